"""JSON objects in <tool_call> tags: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, call_in, decode_at

_OPEN, _CLOSE = re.compile(r"<tool_call>"), re.compile(r"\s*</tool_call>")


class Hermes(ToolForm):
    name = "hermes"
    says = "JSON in <tool_call> tags"
    marks = ("<tool_call>", "arguments")
    others = ("<function=", "<arg_key>")
    openings = ("<tool_call>",)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:  # noqa: ARG002
        for match in _OPEN.finditer(text):
            try:
                value, end = decode_at(text, match.end())
            except ValueError:
                continue  # half a call, or a tag in prose
            call = call_in(value)
            if call is not None:
                closing = _CLOSE.match(text, end)
                yield FoundCall(match.start(), closing.end() if closing else end, *call)
