"""Read the calls of an answer in a model's own form, and write conversations with tools as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvaudit.core.records import Message, Role, ToolCall
from kvaudit.core.tool_forms.base import TOOL_FORMS, Reading, ToolForm, Tools
from kvaudit.core.tool_forms.text import FORM, TextForm, format_calls, list_tools

_TEXT = TextForm()


def read_calls(text: str, tools: Tools = (), form: ToolForm | None = None) -> Reading:
    """Return the calls of an answer; without a ``form``, those of the first form whose opening it holds.

    A call beside the form (bare JSON, in prose or in a fence) counts too. ``is_broken``: the answer tries to call, in
    any of the forms tried, and no call can be read.
    """
    readings = list(_readings(text, tools, form))
    called = next((reading for reading in readings if reading.calls), None)
    if called is not None:
        return called
    words = readings[0].words if readings else text
    beside = _TEXT.read(words, tools)
    if beside.calls:
        return beside
    is_broken = any(reading.is_broken for reading in (*readings, beside)) or _TEXT.is_attempt(words)
    return Reading(words, (), is_broken)


def _readings(text: str, tools: Tools, form: ToolForm | None) -> Iterator[Reading]:
    if form is not None:
        yield form.read(text, tools)
        return
    for each in TOOL_FORMS.all().values():
        if any(opening in text for opening in each.openings):
            yield each().read(text, tools)


def words_beside(message: Message, tools: Tools = (), form: ToolForm | None = None) -> str:
    """Return a message's text without its calls: a model's turn holds them as it wrote them, a suite's does not."""
    if not message.tool_calls or not message.content:
        return message.content
    reading = read_calls(message.content, tools, form)
    return reading.words if _pairs(reading.calls) == _pairs(message.tool_calls) else message.content


def _pairs(calls: Sequence[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, call.arguments) for call in calls]


def as_text(messages: Sequence[Message], tools: Tools) -> tuple[Message, ...]:
    """Return a conversation with its tools listed in the system prompt and its calls in the text of the messages."""
    written = tuple(_as_text(message, tools) for message in messages)
    if not tools:
        return written
    head = f"{FORM}\n\n{list_tools(tools)}"
    if written and written[0].role is Role.SYSTEM:
        return (replace(written[0], content=f"{written[0].content}\n\n{head}"), *written[1:])
    return (Message(Role.SYSTEM, head), *written)


def _as_text(message: Message, tools: Tools) -> Message:
    content = message.content
    # the turn of a suite, not of a model, which holds its calls already
    if message.tool_calls and words_beside(message, tools) == content:
        content = "\n".join(filter(None, (content, format_calls(message.tool_calls))))
    return Message(message.role, content)
