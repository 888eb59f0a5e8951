"""Bare JSON objects with name and parameters: Llama 3.1."""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, call_in, decode_at
from kvaudit.core.tool_forms.pythonic import Pythonic

_TAG = "<|python_tag|>"


class LlamaJson(ToolForm):
    name = "llama_json"
    says = "bare JSON objects with name and parameters"
    marks = ("<|start_header_id|>", "parameters")
    openings = (_TAG,)

    @classmethod
    def recognises(cls, template: str) -> bool:
        return super().recognises(template) and "tool_call" in template and not Pythonic.recognises(template)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:  # noqa: ARG002
        tag = text.find(_TAG)
        start = tag if tag >= 0 else len(text) - len(text.lstrip())
        offset = start + len(_TAG) if tag >= 0 else start
        while offset < len(text):
            value, end = decode_at(text, offset)
            call = call_in(value)
            if call is None:
                return
            yield FoundCall(start, end, *call)
            # objects follow one another, between them blanks and semicolons
            rest = text[end:].lstrip(" \t\r\n;")
            start = end
            offset = len(text) - len(rest)
