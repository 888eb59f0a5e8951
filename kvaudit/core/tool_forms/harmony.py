"""Calls as messages to a function in the commentary channel: gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvaudit.core.tool_forms.base import FoundCall, ToolForm, Tools, decode_at

_CALL = re.compile(r"to=functions\.([\w.-]{1,200})[^{}\n]{0,200}?<\|message\|>")
_FINAL = re.compile(r"<\|channel\|>final[^\n]{0,40}?<\|message\|>")
_ENDS = re.compile(r"<\|(?:end|return|call|start)\|>")


class Harmony(ToolForm):
    name = "harmony"
    says = "messages to functions in channels"
    marks = ("<|channel|>", "functions.")
    openings = ("to=functions.",)

    def find(self, text: str, tools: Tools) -> Iterator[FoundCall]:  # noqa: ARG002
        for match in _CALL.finditer(text):
            try:
                value, end = decode_at(text, match.end())
            except ValueError:
                continue
            yield FoundCall(match.start(), end, match[1], value)

    def words(self, text: str, calls: Sequence[FoundCall]) -> str:
        """Return the text of the final channel; the other channels are thoughts and calls."""
        if "<|channel|>" not in text and not calls:
            return text.strip()
        final = _FINAL.search(text)
        return "" if final is None else _ENDS.split(text[final.end() :], maxsplit=1)[0].strip()
