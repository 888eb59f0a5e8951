"""Tool calls in answers: what a whole answer says and calls, and how much of a growing one may be sent already.

Calls are read in the model's own form, as an audit reads them. Text that could not be read stays text.
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
from kvaudit.core.tool_forms.reading import read_calls

# beside the openings of the forms: tags around a call, and channels, of which only the last is said
_OPENINGS = ("<tool_call>", "<|channel|>", "<|start|>")
_UNDECIDED = 12  # characters: an error so near the end of a JSON text may be one of a value that is not complete
_DECODER = json.JSONDecoder()
_FENCE = "```"
_FRAME = re.compile(r"\s*(?:```\w*\s*)?[\[(\s]*")  # what may stand before a call in Python
_CALLED = re.compile(r"\s*(?:\(|\Z)")
_LISTED = re.compile(r"[^\W\d][\w.]*\s*(?:\(|\Z)")


class AnswerReader:
    """Reads the answers to a conversation with tools.

    ``form`` is the model's own form of calls, None for any form; ``opens_thought`` that of the chat. Without
    ``parallel`` only the first call of an answer is returned.
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
        """Return an answer with its calls and the text beside them; one without a call that can be read as it was."""
        thought, body = split_answer(choice.text, opens_thought=self._opens_thought)
        reading = self._reading(body)
        lead = body[: len(body) - len(body.lstrip())] if reading.words else ""
        text = thought + lead + reading.words + body[LONGEST_ANSWER:]
        # what a stream sends before it has seen the calls must be the beginning of the text beside them
        if not reading.calls or not text.startswith(self.start().sendable(choice.text)):
            return choice
        calls = reading.calls if self._parallel else reading.calls[:1]
        calls = tuple(replace(call, call_id=_new_id()) for call in calls)
        # an answer that was cut may lack a call, so its end stays "length"
        reason = "tool_calls" if choice.finish_reason == "stop" else choice.finish_reason
        return replace(choice, text=text if text.strip() else "", calls=calls, finish_reason=reason)

    def start(self) -> GrowingAnswer:
        """Return the state of an answer of which nothing is drawn yet."""
        openings = (opening for form in TOOL_FORMS.all().values() for opening in form.openings)
        # a form without openings is known to its tokenizer alone
        is_open = self._form is None or bool(self._form.openings)
        return GrowingAnswer(
            (*_OPENINGS, *openings) if is_open else None, self._names, opens_thought=self._opens_thought
        )

    def _reading(self, text: str) -> Reading:
        """Return the calls of an answer; those of tools that were not offered count in the model's own form alone."""
        text = text[:LONGEST_ANSWER]
        own = None if self._form is None else self._form.read(text, self._tools)
        if own is not None and own.calls:
            return own
        reading = read_calls(text, self._tools, self._form)
        return reading if all(call.name in self._names for call in reading.calls) else Reading(text)


class GrowingAnswer:
    """The part of an answer in which no call can begin, as the answer grows.

    ``openings`` are texts that may begin a call, None if any text may; ``names`` those of the tools.
    """

    def __init__(self, openings: Sequence[str] | None, names: frozenset[str], *, opens_thought: bool) -> None:
        self._openings, self._names, self._opens_thought = openings, names, opens_thought
        self._decided = 0  # characters in which no call begins, whatever follows
        self._held_from, self._look_at = 0, 0  # in characters: the last result, and the length to look again at
        self._start, self._may_be_python = 0, True  # of the text behind a thought

    def sendable(self, text: str) -> str:
        """Return the beginning of an answer that is sure to be text, without blanks at its end."""
        return text[: self._place(text)].rstrip()

    def _place(self, text: str) -> int:
        """Return the first place at which a call may begin, the length of the text if there is none."""
        thought, body = split_answer(text, opens_thought=self._opens_thought)
        if not body:
            return len(text)
        if len(thought) != self._start:  # until now a thought could not be told from an answer
            self._start, self._may_be_python, self._look_at = len(thought), True, 0
        if self._openings is None:
            return len(thought)
        if len(text) >= self._look_at:
            self._held_from = self._look(text, len(thought), body)
            # a long stretch that is held is looked at again after an eighth more, or looking would cost its square
            self._look_at = len(text) + max(1, (len(text) - self._held_from) // 8)
        return self._held_from

    def _look(self, text: str, begin: int, body: str) -> int:
        window, start = text[: begin + LONGEST_ANSWER], max(self._decided, begin)
        place = min(_find_opening(window, start, self._openings or ()), _find_json_call(window, start))
        self._decided = max(start, place)
        if self._begins_in_python(body):
            return begin
        return place if place < len(window) else len(text)

    def _begins_in_python(self, body: str) -> bool:
        """Return whether a text may become calls in Python and nothing else."""
        if not self._may_be_python or body.lstrip() in _FENCE:
            return self._may_be_python
        frame = _FRAME.match(body)
        assert frame is not None
        rest = body[frame.end() :]
        self._may_be_python = (
            not rest
            or any(
                name.startswith(rest) or (rest.startswith(name) and _CALLED.match(rest, len(name)) is not None)
                for name in self._names
            )
            or ("[" in frame[0] and _LISTED.match(rest) is not None)
        )
        return self._may_be_python


def split_answer(text: str, *, opens_thought: bool) -> tuple[str, str]:
    """Return the thought that an answer begins with, "" for none, and the text behind it."""
    *thoughts, answer = split_thought(text, is_open=opens_thought)
    return "".join(message.content for message in thoughts if message.role is Role.THOUGHT), answer.content


def _find_opening(text: str, start: int, openings: Sequence[str]) -> int:
    """Return where the first opening begins, which the end of the text may cut; the length of the text for none."""
    first = len(text)
    for opening in openings:
        place = text.find(opening, start)
        if place < 0:
            longest = min(len(opening) - 1, len(text) - start)
            place = len(text) - next((n for n in range(longest, 0, -1) if text.endswith(opening[:n])), 0)
        first = min(first, place)
    return first


def _find_json_call(text: str, start: int) -> int:
    """Return where the first JSON object begins that is a call or not complete; the length of the text for none."""
    place = text.find("{", start)
    while place >= 0:
        end = place + 1  # where no object can begin
        try:
            value, end = _DECODER.raw_decode(text, place)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated") or error.pos >= len(text) - _UNDECIDED:
                return place
        except RecursionError:
            return place
        except ValueError:  # a number of too many digits
            pass
        else:
            if call_in(value) is not None:
                return place
        place = text.find("{", end)
    return len(text)


def _new_id() -> str:
    # nine letters and digits, since Mistral's templates take no other ids
    return f"c{secrets.token_hex(4)}"
