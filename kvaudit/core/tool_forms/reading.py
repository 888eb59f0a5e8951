"""Read the calls of an answer in a model's form, and write conversations with tools as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvaudit.core.records import Message, Role, ToolCall
from kvaudit.core.tool_forms.base import TOOL_FORMS, Reading, ToolForm, Tools
from kvaudit.core.tool_forms.text import FORM, TextForm, format_calls, list_tools

_TEXT = TextForm()


def read_calls(text: str, tools: Tools = (), form: ToolForm | None = None) -> Reading:
    """Read the calls of an answer, in the given ``form`` or else in the first form whose opening it contains.

    A call outside of the form (bare JSON, in prose or in a fence) counts too. ``is_broken``: the answer tries to call
    in one of the forms tried, and no call can be read.
    """
    readings = list(_readings(text, tools, form))
    if with_calls := [reading for reading in readings if reading.calls]:
        return with_calls[0]
    other_text = readings[0].words if readings else text
    plain = _TEXT.read(other_text, tools)
    if plain.calls:
        return plain
    is_broken = any(reading.is_broken for reading in (*readings, plain)) or _TEXT.is_attempt(other_text)
    return Reading(other_text, (), is_broken)


def _readings(text: str, tools: Tools, form: ToolForm | None) -> Iterator[Reading]:
    if form is not None:
        yield form.read(text, tools)
        return
    for tool_form in TOOL_FORMS.all().values():
        if any(opening in text for opening in tool_form.openings):
            yield tool_form().read(text, tools)


def text_without_calls(message: Message, tools: Tools = (), form: ToolForm | None = None) -> str:
    """Return a message's text without calls, which a model's turn has in its content and a suite's turn has not."""
    if not message.tool_calls or not message.content:
        return message.content
    reading = read_calls(message.content, tools, form)
    return reading.words if _pairs(reading.calls) == _pairs(message.tool_calls) else message.content


def _pairs(calls: Sequence[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, call.arguments) for call in calls]


def as_text(messages: Sequence[Message], tools: Tools) -> tuple[Message, ...]:
    """Write a conversation with tools as text: tools in the system prompt, calls in the messages."""
    messages_as_text = tuple(_as_text(message, tools) for message in messages)
    if not tools:
        return messages_as_text
    head = f"{FORM}\n\n{list_tools(tools)}"
    if messages_as_text and messages_as_text[0].role is Role.SYSTEM:
        return (replace(messages_as_text[0], content=f"{messages_as_text[0].content}\n\n{head}"), *messages_as_text[1:])
    return (Message(Role.SYSTEM, head), *messages_as_text)


def _as_text(message: Message, tools: Tools) -> Message:
    content = message.content
    # the turn of a suite, not of a model, which holds its calls already
    if message.tool_calls and text_without_calls(message, tools) == content:
        content = "\n".join(filter(None, (content, format_calls(message.tool_calls))))
    return Message(message.role, content)
