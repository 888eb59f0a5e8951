"""Read tool calls in answers, and find how much of a growing answer can be sent before its calls are known.

Calls are read in the model's own syntax, as in an audit. Text that cannot be read as a call stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvaudit.audit.serving.wire import Choice
from kvaudit.core.completions import split_thought
from kvaudit.core.records import Role
from kvaudit.core.tool_forms.base import LONGEST_ANSWER, TOOL_FORMS, Reading, ToolForm, call_in, functions_of
from kvaudit.core.tool_forms.text import read_calls

# in addition to the openings of the forms: tags around a call, and channels, of which only the last is the answer
_OPENINGS = ("<tool_call>", "<|channel|>", "<|start|>")
_UNDECIDED = 12  # characters: an error so near the end of a JSON text may only mean that a value is incomplete
_DECODER = json.JSONDecoder()
_FENCE = "```"
_FRAME = re.compile(r"\s*(?:```\w*\s*)?[\[(\s]*")  # possible text before a call in Python
_AFTER_NAME = re.compile(r"\s*(?:\(|\Z)")  # a call's bracket, or the end of the text so far
_ANY_CALL = re.compile(r"[^\W\d][\w.]*\s*(?:\(|\Z)")  # a call of a function with any name


class AnswerReader:
    """A reader of the tool calls in answers to one conversation.

    ``form`` is the model's own syntax of calls, None for any syntax. ``opens_thought``: the chat's prompts have already
    opened the thought (reasoning) of an answer. Without ``parallel`` only the first call of an answer is returned.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        form: ToolForm | None = None,
        *,
        opens_thought: bool = False,
        parallel: bool = True,
    ) -> None:
        self._tools, self._form = tuple(tools), form
        self._opens_thought, self._parallel = opens_thought, parallel
        self._names = frozenset(functions_of(tools))

    def read(self, choice: Choice) -> Choice:
        """Return an answer with its tool calls moved from the text to ``calls``; unchanged if no call can be read."""
        thought, body = split_answer(choice.text, opens_thought=self._opens_thought)
        reading = self._read_calls(body)
        lead = body[: len(body) - len(body.lstrip())] if reading.words else ""
        text = thought + lead + reading.words + body[LONGEST_ANSWER:]
        # a stream sends text before it has seen the calls, so that text must begin the text beside the calls
        if not reading.calls or not text.startswith(self.start().sendable(choice.text)):
            return choice
        calls = reading.calls if self._parallel else reading.calls[:1]
        calls = tuple(replace(call, call_id=_new_id()) for call in calls)
        # an answer that was cut may lack a call, so its end stays "length"
        reason = "tool_calls" if choice.finish_reason == "stop" else choice.finish_reason
        return replace(choice, text=text if text.strip() else "", calls=calls, finish_reason=reason)

    def start(self) -> GrowingAnswer:
        """Return a ``GrowingAnswer`` for a new answer, to stream its text while it is sampled."""
        openings = (opening for form in TOOL_FORMS.all().values() for opening in form.openings)
        # a form without openings is known to its tokenizer alone
        is_open = self._form is None or bool(self._form.openings)
        return GrowingAnswer(
            (*_OPENINGS, *openings) if is_open else None, self._names, opens_thought=self._opens_thought
        )

    def _read_calls(self, text: str) -> Reading:
        """Return the calls in an answer, and the rest of its text.

        Calls in another syntax than the model's own count only if all tools that they name were offered.
        """
        text = text[:LONGEST_ANSWER]
        reading = None if self._form is None else self._form.read(text, self._tools)
        if reading is not None and reading.calls:
            return reading
        reading = read_calls(text, self._tools, self._form)
        return reading if all(call.name in self._names for call in reading.calls) else Reading(text)


class GrowingAnswer:
    """An answer that is being sampled; it finds how much of the text can be sent before a possible tool call.

    ``openings`` are the texts that may begin a call; None means that any text may. ``names`` are the names of the
    tools. ``opens_thought``: the prompt has already opened the thought (reasoning) before the answer.
    """

    def __init__(self, openings: Sequence[str] | None, names: frozenset[str], *, opens_thought: bool) -> None:
        self._openings, self._names, self._opens_thought = openings, names, opens_thought
        self._searched = 0  # characters in which no call begins, whatever follows
        # in characters: the last result, and the length of the text at which to search again
        self._call_start, self._search_again_at = 0, 0
        self._start, self._may_be_python = 0, True  # of the text after a thought

    def sendable(self, text: str) -> str:
        """Return the part of the growing answer ``text`` before any possible call, without blanks at its end."""
        return text[: self._first_call_start(text)].rstrip()

    def _first_call_start(self, text: str) -> int:
        """Return the first offset at which a call may begin; the length of the text if none can begin in it."""
        thought, body = split_answer(text, opens_thought=self._opens_thought)
        if not body:
            return len(text)
        if len(thought) != self._start:  # so far it was unknown whether the text is a thought
            self._start, self._may_be_python, self._search_again_at = len(thought), True, 0
        if self._openings is None:
            return len(thought)
        if len(text) >= self._search_again_at:
            self._call_start = self._search(text, len(thought), body)
            # search a long text again only after it has grown by an eighth, or the cost would be quadratic
            self._search_again_at = len(text) + max(1, (len(text) - self._call_start) // 8)
        return self._call_start

    def _search(self, text: str, begin: int, body: str) -> int:
        window, start = text[: begin + LONGEST_ANSWER], max(self._searched, begin)
        call_start = min(_find_opening(window, start, self._openings or ()), _find_json_call(window, start))
        self._searched = max(start, call_start)
        if self._may_be_python_calls(body):
            return begin
        return call_start if call_start < len(window) else len(text)

    def _may_be_python_calls(self, body: str) -> bool:
        """Return whether the text so far can still become nothing but tool calls in Python syntax.

        An example is "[get_weather(ci", if there is a tool get_weather.
        """
        if not self._may_be_python or body.lstrip() in _FENCE:
            return self._may_be_python
        frame = _FRAME.match(body)
        assert frame is not None
        code = body[frame.end() :]
        self._may_be_python = (
            not code
            or any(
                name.startswith(code) or (code.startswith(name) and _AFTER_NAME.match(code, len(name)) is not None)
                for name in self._names
            )
            or ("[" in frame[0] and _ANY_CALL.match(code) is not None)
        )
        return self._may_be_python


def split_answer(text: str, *, opens_thought: bool) -> tuple[str, str]:
    """Return the thought (reasoning) at the beginning of an answer, "" if there is none, and the text after it.

    ``opens_thought``: the prompt has already opened the thought.
    """
    *thoughts, answer = split_thought(text, is_open=opens_thought)
    return "".join(message.content for message in thoughts if message.role is Role.THOUGHT), answer.content


def _find_opening(text: str, start: int, openings: Sequence[str]) -> int:
    """Return where the first of the ``openings`` (texts that begin a call) begins in ``text`` from ``start`` on.

    An opening of which the text holds only the first characters, at its very end, counts too. Returns the length of the
    text if there is no opening.
    """
    earliest = len(text)
    for opening in openings:
        index = text.find(opening, start)
        if index < 0:
            longest = min(len(opening) - 1, len(text) - start)
            index = len(text) - next((n for n in range(longest, 0, -1) if text.endswith(opening[:n])), 0)
        earliest = min(earliest, index)
    return earliest


def _find_json_call(text: str, start: int) -> int:
    """Return where the first JSON object begins that is a tool call, or that is incomplete and may become one.

    Returns the length of the text if there is none.
    """
    begin = text.find("{", start)
    while begin >= 0:
        end = begin + 1  # continue the search here if this is no object
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated") or error.pos >= len(text) - _UNDECIDED:
                return begin
        except RecursionError:
            return begin
        except ValueError:  # a number of too many digits
            pass
        else:
            if call_in(value) is not None:
                return begin
        begin = text.find("{", end)
    return len(text)


def _new_id() -> str:
    # nine letters and digits, since Mistral's templates take no other ids
    return f"c{secrets.token_hex(4)}"
