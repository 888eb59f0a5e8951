"""Calls as the tokenizer's own ``response_template`` reads them (transformers, ``parse_response``).

Like a chat template it is an untrusted program of regular expressions, so it runs in the subprocess of ``rendering``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvaudit.audit.sampling.rendering import renderer
from kvaudit.core.records import ToolCall
from kvaudit.core.text import is_text
from kvaudit.core.tool_forms.base import LONGEST_ANSWER, Reading, ToolForm, Tools, is_plain


class ResponseTemplate(ToolForm):
    """The form of one tokenizer. ``prompt`` is the end of a prompt, which may begin the answer."""

    name = "tokenizer"
    says = "as the tokenizer's response_template reads it"

    def __init__(self, template: Mapping[str, Any], prompt: str) -> None:
        self._template, self._prompt = template, prompt

    def read(self, text: str, tools: Tools = ()) -> Reading:
        """Return the calls that the tokenizer reads; an answer that it cannot read is broken."""
        text = text[:LONGEST_ANSWER]
        message = renderer.parse(self._template, text, self._prompt, tools) if is_text(text) else None
        rows = [] if message is None else message.get("tool_calls") or []
        calls = [_call_of(row) for row in rows] if isinstance(rows, list) else [None]
        if message is None or None in calls:
            return Reading(text, (), True)
        content = message.get("content")
        return Reading(content if isinstance(content, str) else "", tuple(call for call in calls if call is not None))


def _call_of(row: Any) -> ToolCall | None:
    function = row.get("function", row) if isinstance(row, Mapping) else None
    if not isinstance(function, Mapping):
        return None
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not is_text(name) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments) if is_plain(arguments) else None
