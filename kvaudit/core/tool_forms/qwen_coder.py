"""Functions and parameters in tags: Qwen3-Coder."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, properties_of, read_tagged, typed

_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]{1,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,200})>")
_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_CLOSE = "</parameter>"


class QwenCoder(ToolForm):
    name = "qwen_coder"
    says = "functions and parameters in tags"
    marks = ("<function=", "<parameter=")
    openings = ("<function=",)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:
        for match in _FUNCTION.finditer(text):
            name = match[1].strip()
            schemas, (values, end) = properties_of(tools, name), read_tagged(text, match.end(), _PARAMETER, _CLOSE)
            # the template sets every value between line breaks
            arguments = {
                parameter: typed(value.removeprefix("\n").removesuffix("\n"), schemas.get(parameter))
                for parameter, value in values.items()
            }
            # a function without its end is half a call
            if closing := _END.match(text, end):
                yield FoundCall(match.start(), closing.end(), name, arguments)
