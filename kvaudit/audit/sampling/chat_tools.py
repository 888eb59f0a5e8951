"""Tools in chat templates: how a template takes them, and stand-ins that show where it writes tools and calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from kvaudit.core.records import Message, Role, ToolCall

ArgumentsAs = Literal["object", "text"]  # how a template wants the arguments of a call
_NAME, _VALUE = "kvaudit_tool_7391", "kvaudit-value-7391"
CALL_ID = "call07391"  # Mistral's templates want nine letters and digits
# a tool that stands for an item's own
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
    """Return a template's row of a message without role and content; adds the calls to ``names``, by id."""
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
    """Return messages with a stand-in for every call, each with a name and a value of its own."""
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
    """Return the name of the placeholder for a tool call."""
    return f"kvaudit_call_{message}_{call}_7391"


def varying(text: str, other: str) -> tuple[int, int]:
    """Return the first and the last place (exclusive) at which ``text`` differs from ``other``."""
    shortest = min(len(text), len(other))
    first = next((n for n in range(shortest) if text[n] != other[n]), shortest)
    last = next((n for n in range(shortest - first) if text[-1 - n] != other[-1 - n]), shortest - first)
    return first, len(text) - last
