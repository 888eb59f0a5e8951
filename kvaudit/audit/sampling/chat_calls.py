"""Conversations over the wire: messages as request rows, and which chat completions count as answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvaudit.audit.sampling.chat import move_roles
from kvaudit.core.completions import ChatCompletion, Finish, is_filtered, parse_finish, without_thoughts
from kvaudit.core.endpoint import RefusedRequest, Scope, Unanswered
from kvaudit.core.records import Message, Role

_FRAME = 64, 16  # tokens that a chat template may add to a conversation, and to each message
_COUNTED, _ESTIMATED = 0.2, 1.0  # relative error allowed in a claim, if our count is exact or an estimate
_SPARE = 16  # tokens that an answer may exceed its limit by
_ENDED_BY_ERROR = "error"  # a gateway's finish reason when its server failed during the answer
_ENDED_BY_CALLS = ("tool_calls", "function_call", "tool_use")  # where tools were offered, an end like any other
_LONGEST_TOKEN = 128  # characters of the longest token in common vocabularies (spaces)

WireRows = Sequence[Mapping[str, Any]]  # a conversation as it goes over the wire


@dataclass(frozen=True)
class Answer:
    """An accepted completion. Token counts are None if the endpoint does not report them; seconds are the call's.

    ``thought`` and ``said_in`` are copied from the ``ChatCompletion``.
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
    """A request: its rows, their ``tokens`` (``exact`` or estimated), the ``limit`` of new tokens, if it has tools."""

    rows: WireRows
    tokens: int
    exact: bool
    limit: int
    has_tools: bool = False


def wire(transcript: Sequence[Message], tool_role: str) -> list[dict[str, Any]]:
    """Return messages as request rows, without thoughts; ``tool_role`` "user" puts tool results into user messages."""
    return move_roles(without_thoughts(transcript), {Role.TOOL} if tool_role == Role.USER else set(), "text")


class Readings:
    """The conversations an endpoint has read in full, shared by threads; some endpoints count only uncached tokens."""

    def __init__(self) -> None:
        self._lock, self._prefixes = threading.Lock(), set[tuple[tuple[str, str], ...]]()

    def note(self, rows: WireRows) -> None:
        """Add a conversation and all of its prefixes."""
        pairs = _pairs(rows)
        with self._lock:
            self._prefixes.update(pairs[:end] for end in range(1, len(pairs) + 1))

    def unread(self, rows: WireRows) -> float:
        """Return the share of a conversation's characters after its longest prefix that was read before."""
        pairs = _pairs(rows)
        with self._lock:
            length = next((end for end in range(len(pairs), 0, -1) if pairs[:end] in self._prefixes), 0)
        sizes = [len(content) + 1 for _, content in pairs]
        return sum(sizes[length:]) / sum(sizes)


def _pairs(rows: WireRows) -> tuple[tuple[str, str], ...]:
    calls = (json.dumps(row["tool_calls"]) if "tool_calls" in row else "" for row in rows)
    return tuple((row["role"], row["content"] + text) for row, text in zip(rows, calls, strict=True))


def answer(completion: ChatCompletion, sent: SentRequest, seconds: float, readings: Readings | None = None) -> Answer:
    """Return a completion as an answer; raises Unanswered if it cannot be one to the request.

    The endpoint's token counts are checked against ours; one that is not a number is ignored. So is a count of prompt
    tokens that is too small, if ``readings`` show that the endpoint has read the beginning before.
    """
    new_tokens = _number(completion.usage, "completion_tokens") or None
    if sent.has_tools and completion.calls:
        completion = _with_calls(completion)
    finish = _finish(completion, new_tokens, sent.limit)
    prompt_tokens = _prompt_tokens(completion.usage, sent, readings or Readings())
    _check_length(completion, finish, new_tokens, sent.limit)
    return Answer(
        text=completion.text,
        finish=finish,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        model=completion.model[:200],
        seconds=seconds,
        thought=completion.thought,
        said_in=completion.said_in,
    )


def _with_calls(completion: ChatCompletion) -> ChatCompletion:
    """Return a completion with the calls that the server read behind its text, and an end if it ended by them."""
    word = "stop" if completion.finish_reason in _ENDED_BY_CALLS else completion.finish_reason
    places = "content and tool_calls" if completion.text.strip() else "tool_calls"
    text = "\n".join(filter(None, (completion.text, completion.calls)))
    return replace(completion, text=text, finish_reason=word, said_in=places)


def _finish(completion: ChatCompletion, new_tokens: int | None, limit: int) -> Finish:
    """Return how an answer ended; without a finish reason "stop", or "length" if it used its limit."""
    word = completion.finish_reason
    text = f", behind {completion.text!r}" if completion.text else ""
    if is_filtered(word):
        raise RefusedRequest(f"it ended by {word[:40]!r}, which is no end of an answer{text}")
    if word == _ENDED_BY_ERROR:
        raise Unanswered("it ended by 'error', which is no end of an answer")
    finish = parse_finish(word) if word else "stop" if new_tokens is None or new_tokens < limit else "length"
    if finish is None:
        raise _broken(f"it ended by {word[:40]!r}, which is no end of an answer")
    return finish


def _prompt_tokens(usage: Any, sent: SentRequest, readings: Readings) -> int | None:
    """Return the prompt tokens that an endpoint reports, if any; raises Unanswered if they do not fit the request."""
    read = _number(usage, "prompt_tokens") or None
    if read is None:
        return None
    share = _COUNTED if sent.exact else _ESTIMATED
    least, most = sent.tokens / (1 + share), sent.tokens * (1 + share) + _FRAME[0] + _FRAME[1] * len(sent.rows)
    if read < least:
        # some endpoints count cached tokens apart, or not at all
        read += _cached(usage)
    unread = readings.unread(sent.rows) if read < least else 1.0
    if unread < 1 and read >= least * unread:
        return None
    # the endpoint cut the context or read another one
    if not least <= read <= most:
        raise _broken(f"it claims to have read {read} tokens where about {sent.tokens} were sent")
    readings.note(sent.rows)
    return read


def _check_length(completion: ChatCompletion, finish: Finish, new_tokens: int | None, limit: int) -> None:
    """Raise Unanswered for an answer, or a count of new tokens, that does not fit the limit; thoughts may exceed it."""
    most = max(limit, new_tokens or 0)
    if len(completion.text) > (most + _SPARE) * _LONGEST_TOKEN:  # whatever it claims
        raise _broken(f"it wrote {len(completion.text)} characters where at most {most} tokens were asked for")
    if new_tokens is None:
        return
    thought = _number(_details(completion.usage, "completion"), "reasoning_tokens") or 0
    spoken = new_tokens - min(thought, new_tokens)
    if spoken > limit + _SPARE and not (completion.thought and not thought):
        raise _broken(f"it claims {spoken} tokens where at most {limit} were asked for")
    if finish == "length" and new_tokens < limit / 2:
        raise _broken(f"it was cut after {new_tokens} tokens where {limit} were free")


def _cached(usage: Any) -> int:
    count = _number(_details(usage, "prompt"), "cached_tokens") or 0
    return count or (_number(usage, "cache_read_input_tokens") or 0) + (
        _number(usage, "cache_creation_input_tokens") or 0
    )


def _details(usage: Any, kind: str) -> Any:
    """Return the detailed token counts of a kind; some endpoints put them into ``usage`` itself."""
    details = usage.get(f"{kind}_tokens_details") if isinstance(usage, Mapping) else None
    return details if isinstance(details, Mapping) else usage


def _number(usage: Any, key: str) -> int | None:
    """Return a token count; None if it is missing or is not a whole number."""
    value = usage.get(key) if isinstance(usage, Mapping) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def _broken(what: str) -> Unanswered:
    return Unanswered(what, Scope.QUESTION)
