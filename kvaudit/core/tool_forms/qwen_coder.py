"""Functions and parameters in tags: Qwen3-Coder."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, properties_of, typed

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
            schemas, arguments, place = properties_of(tools, name), dict[str, object](), match.end()
            while parameter := _PARAMETER.match(text, place):
                end = text.find(_CLOSE, parameter.end())
                if end < 0:
                    break
                value = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
                arguments[parameter[1].strip()] = typed(value, schemas.get(parameter[1].strip()))
                place = end + len(_CLOSE)
            # a function without its end is half a call
            if closing := _END.match(text, place):
                yield FoundCall(match.start(), closing.end(), name, arguments)
