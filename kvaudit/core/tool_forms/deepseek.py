"""Calls between separators: DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, decode_at

_BEGIN, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
# in V3 the kind of the tool comes first, then its name and a fence around the arguments; repeats are possessive where
# a run of blanks could be divided between two of them, or an answer of blanks would take hours
_V3 = re.compile(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*function\s*<｜tool▁sep｜>\s*+([^\n`{<]{1,200}+)\n\s*+```(?:json)?\s*+"
)
_V31 = re.compile(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*+([^<\n]{1,200}+)\s*+<｜tool▁sep｜>\s*+(?=\{)"
)
_END = re.compile(r"(?:\s*```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?")
_OPEN = re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>")


class DeepSeek(ToolForm):
    name = "deepseek"
    says = "names and JSON between separators"
    marks = (_BEGIN, _SEPARATOR)
    openings = (_BEGIN, "<｜tool▁calls▁begin｜>")

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:  # noqa: ARG002
        for opening in _OPEN.finditer(text):
            match = _V3.match(text, opening.start()) or _V31.match(text, opening.start())
            if match is None:
                continue
            try:
                value, end = decode_at(text, match.end())
            except ValueError:
                continue
            closing = _END.match(text, end)
            yield FoundCall(match.start(), closing.end() if closing else end, match[1].strip(), value)
