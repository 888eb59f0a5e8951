"""Tools in chat templates: how a template takes them, where it writes tools and calls, and how calls are read.

A tokenizer's ``response_template`` (transformers, ``parse_response``) is an untrusted program of regular expressions,
like a chat template, so it runs in the subprocess of ``rendering``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from kvaudit.audit.sampling.rendering import renderer
from kvaudit.core.records import Message, Role, ToolCall
from kvaudit.core.text import is_text
from kvaudit.core.tool_forms.base import LONGEST_ANSWER, Reading, ToolForm, Tools, is_plain

ArgumentsAs = Literal["object", "text"]  # how a template wants the arguments of a call
_NAME, _VALUE = "kvaudit_tool_7391", "kvaudit-value-7391"
CALL_ID = "call07391"  # Mistral's templates want nine letters and digits
# a placeholder for an item's tool
TOOL_SLOT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": f"{_NAME}.",
        "parameters": {
            "type": "object",
            "properties": {_NAME: {"type": "string", "description": _NAME}},
            "required": [_NAME],
        },
    },
}
# a conversation that every template with tools takes: a call, and its result
PROBE = (
    Message(Role.USER, "."),
    Message(Role.ASSISTANT, "", (ToolCall(_NAME, {_NAME: _VALUE}, CALL_ID),)),
    Message(Role.TOOL, "kvaudit-result-7391", tool_call_id=CALL_ID),
)
PROBE_TEXTS = (_NAME, _VALUE, PROBE[-1].content)


def tool_fields(message: Message, names: dict[str, str], arguments_as: ArgumentsAs) -> dict[str, Any]:
    """Return the fields about tools of a message, for the dict that a chat template takes.

    An answer has a field for its calls; a result has the id of the call that it answers, and the tool's name. ``names``
    maps call ids to names of tools. The calls of this message are added to it, for the results in later messages.
    """
    fields: dict[str, Any] = {}
    if message.tool_calls:
        names |= {call.call_id: call.name for call in message.tool_calls}
        fields["tool_calls"] = [_call_row(call, arguments_as) for call in message.tool_calls]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
        fields |= {"name": names[message.tool_call_id]} if message.tool_call_id in names else {}
    return fields


def _call_row(call: ToolCall, arguments_as: ArgumentsAs) -> dict[str, Any]:
    arguments: Any = dict(call.arguments)
    if arguments_as == "text":
        arguments = json.dumps(arguments, ensure_ascii=False)
    row = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.call_id, **row} if call.call_id else row


def slot_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with every tool call replaced by a placeholder of unique name and argument."""
    return [
        replace(
            message,
            tool_calls=tuple(
                ToolCall(slot_name(number, k), {slot_name(number, k): slot_name(number, k)}, call.call_id)
                for k, call in enumerate(message.tool_calls)
            ),
        )
        for number, message in enumerate(messages)
    ]


def slot_name(message: int, call: int) -> str:
    """Return the name of the placeholder for call number ``call`` of message number ``message``."""
    return f"kvaudit_call_{message}_{call}_7391"


def differing_part(text: str, other: str) -> tuple[int, int]:
    """Return the start and end of what differs from ``other`` in ``text``: all but their common beginning and end."""
    shortest = min(len(text), len(other))
    start = next((n for n in range(shortest) if text[n] != other[n]), shortest)
    tail = next((n for n in range(shortest - start) if text[-1 - n] != other[-1 - n]), shortest - start)
    return start, len(text) - tail


class ResponseTemplate(ToolForm):
    """The syntax of tool calls that one tokenizer defines by its ``response_template``.

    ``prompt`` is any prompt as the chat template renders it. The parser needs it, because a prompt may already end with
    the first characters of the answer.
    """

    name = "tokenizer"
    says = "as the tokenizer's response_template reads it"

    def __init__(self, template: Mapping[str, Any], prompt: str) -> None:
        self._template, self._prompt = template, prompt

    def read(self, text: str, tools: Tools = ()) -> Reading:
        """Return the text and the tool calls of an answer, as the tokenizer's own ``response_template`` parses them.

        ``is_broken`` is set if the template cannot parse the answer, or finds a call that is not valid.
        """
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
