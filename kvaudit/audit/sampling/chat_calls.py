"""A conversation over the wire: as rows of a chat completion, and which completions count as an answer to it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvaudit.audit.sampling.chat import TOOL_PREFIX
from kvaudit.core.completions import ChatCompletion, Finish, finish_of, is_filtered
from kvaudit.core.endpoint import RefusedRequest, Scope, Unanswered
from kvaudit.core.records import Message, Role
from kvaudit.core.thoughts import heard

_FRAME = 64, 16  # tokens that a chat template may put around a conversation, and around a message
_COUNTED, _ESTIMATED = 0.2, 1.0  # share by which a claim may differ from what a tokenizer counted, or was estimated
_SPARE = 16  # tokens beyond the limit of an answer that count as rounding
_ENDED_BY_ERROR = "error"  # how gateways say that the server behind them failed under way
_LONGEST_TOKEN = 128  # characters: the longest of the usual vocabularies, which are spaces

WireRows = Sequence[Mapping[str, str]]  # a conversation as it goes over the wire


@dataclass(frozen=True)
class Answer:
    """A reply that counts. Tokens are None where the endpoint says nothing of them; seconds are the call's.

    ``thought`` and ``said_in`` are those of a ``ChatCompletion``.
    """

    text: str
    finish: Finish
    prompt_tokens: int | None
    new_tokens: int | None
    model: str
    seconds: float
    thought: str | None = None
    said_in: str = ""


class SentRequest(NamedTuple):
    """What went out: a conversation of so many ``tokens``, by a tokenizer where ``exact``, and the ``limit`` of new
    ones."""

    rows: WireRows
    tokens: int
    exact: bool
    limit: int


def wire(transcript: Sequence[Message], tool_role: str) -> list[dict[str, str]]:
    """Messages as endpoints take them: without thoughts, and a tool's result in the user's message where asked for."""
    found: list[dict[str, str]] = []
    foreign = False  # whether the last row holds a tool's text
    for message in heard(transcript):
        moved = message.role is Role.TOOL and tool_role == Role.USER
        role, prefix = (tool_role, TOOL_PREFIX) if moved else (str(message.role), "")
        row = {"role": role, "content": prefix + message.content}
        if found and found[-1]["role"] == row["role"] == Role.USER and (moved or foreign):
            found[-1]["content"] += "\n\n" + row["content"]
        else:
            found.append(row)
        foreign = moved
    return found


class Readings:
    """What an endpoint is known to have read whole. Some count only what they had not read before; threads share it."""

    def __init__(self) -> None:
        self._lock, self._whole = threading.Lock(), set[tuple[tuple[str, str], ...]]()

    def note(self, rows: WireRows) -> None:
        """Note a conversation that was read whole, and all of its beginnings."""
        said = _said(rows)
        with self._lock:
            self._whole.update(said[:end] for end in range(1, len(said) + 1))

    def unread(self, rows: WireRows) -> float:
        """The share of a conversation's characters behind the longest beginning that was read before."""
        said = _said(rows)
        with self._lock:
            known = next((end for end in range(len(said), 0, -1) if said[:end] in self._whole), 0)
        sizes = [len(content) + 1 for _, content in said]
        return sum(sizes[known:]) / sum(sizes)


def _said(rows: WireRows) -> tuple[tuple[str, str], ...]:
    return tuple((row["role"], row["content"]) for row in rows)


def answer(completion: ChatCompletion, sent: SentRequest, seconds: float, readings: Readings | None = None) -> Answer:
    """A completion as an answer; raises Unanswered for one that cannot be to what was sent.

    Counts are claims: one that contradicts ours breaks an answer, one that is no number says nothing. A claim that is
    too small says nothing either where ``readings`` know that the conversation began with what was read before.
    """
    drawn = _number(completion.usage, "completion_tokens") or None
    finish = _finish(completion, drawn, sent.limit)
    read = _read_tokens(completion.usage, sent, readings or Readings())
    _check_drawn(completion, finish, drawn, sent.limit)
    return Answer(
        text=completion.text,
        finish=finish,
        prompt_tokens=read,
        new_tokens=drawn,
        model=completion.model[:200],
        seconds=seconds,
        thought=completion.thought,
        said_in=completion.said_in,
    )


def _finish(completion: ChatCompletion, drawn: int | None, limit: int) -> Finish:
    """How an answer ended; an endpoint that does not say stopped, unless it wrote all that it might."""
    word = completion.finish_reason
    said = f", behind {completion.text!r}" if completion.text else ""
    if is_filtered(word):
        raise RefusedRequest(f"it ended by {word[:40]!r}, which is no end of an answer{said}")
    if word == _ENDED_BY_ERROR:
        raise Unanswered("it ended by 'error', which is no end of an answer")
    found = finish_of(word) if word else "stop" if drawn is None or drawn < limit else "length"
    if found is None:
        raise _broken(f"it ended by {word[:40]!r}, which is no end of an answer")
    return found


def _read_tokens(usage: Any, sent: SentRequest, readings: Readings) -> int | None:
    """The tokens that it claims to have read, None where it claims nothing; raises Unanswered for another prompt."""
    read = _number(usage, "prompt_tokens") or None
    if read is None:
        return None
    share = _COUNTED if sent.exact else _ESTIMATED
    least, most = sent.tokens / (1 + share), sent.tokens * (1 + share) + _FRAME[0] + _FRAME[1] * len(sent.rows)
    if read < least:
        # what came out of a cache is counted beside what was read, if at all
        read += _cached(usage)
    unread = readings.unread(sent.rows) if read < least else 1.0
    if unread < 1 and read >= least * unread:
        return None
    # a context that was cut, or another one, is no question of ours
    if not least <= read <= most:
        raise _broken(f"it claims to have read {read} tokens where about {sent.tokens} were sent")
    readings.note(sent.rows)
    return read


def _check_drawn(completion: ChatCompletion, finish: Finish, drawn: int | None, limit: int) -> None:
    """Raise Unanswered for an answer, or a claim of new tokens, that none of this limit has; thoughts may be longer."""
    if drawn is None:
        if len(completion.text) > (limit + _SPARE) * _LONGEST_TOKEN:  # told without counting tokens
            raise _broken(f"it wrote {len(completion.text)} characters where at most {limit} tokens were asked for")
        return
    thought = _number(_details(completion.usage, "completion"), "reasoning_tokens") or 0
    spoken = drawn - min(thought, drawn)
    if spoken > limit + _SPARE and not (completion.thought and not thought):
        raise _broken(f"it claims {spoken} tokens where at most {limit} were asked for")
    if finish == "length" and drawn < limit / 2:
        raise _broken(f"it was cut after {drawn} tokens where {limit} were free")


def _cached(usage: Any) -> int:
    own = _number(_details(usage, "prompt"), "cached_tokens") or 0
    return own or (_number(usage, "cache_read_input_tokens") or 0) + (
        _number(usage, "cache_creation_input_tokens") or 0
    )


def _details(usage: Any, kind: str) -> Any:
    """The table of what tokens of a kind are made of, or usage itself, as some put it there."""
    found = usage.get(f"{kind}_tokens_details") if isinstance(usage, Mapping) else None
    return found if isinstance(found, Mapping) else usage


def _number(usage: Any, key: str) -> int | None:
    """Tokens of a kind; None where nothing is said of them, or something that is no number of tokens."""
    value = usage.get(key) if isinstance(usage, Mapping) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def _broken(what: str) -> Unanswered:
    return Unanswered(what, Scope.QUESTION)
