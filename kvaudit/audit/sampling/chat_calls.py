"""Convert conversations to the messages of chat-completion requests, and check which completions count as answers."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvaudit.audit.sampling.chat import move_roles
from kvaudit.core.completions import ChatCompletion, Finish, is_filtered, parse_finish, without_thoughts
from kvaudit.core.endpoint import EndpointClient, FirstModel, RefusedRequest, Scope, Unanswered
from kvaudit.core.records import Message, Role

_FRAME = 64, 16  # tokens that a chat template may add to a conversation, and to each message
_COUNTED, _ESTIMATED = 0.2, 1.0  # relative error allowed in a claim, if our count is exact or an estimate
_SPARE = 16  # tokens that an answer may exceed its limit by
_ENDED_BY_ERROR = "error"  # a gateway's finish reason when its server failed during the answer
_ENDED_BY_CALLS = ("tool_calls", "function_call", "tool_use")  # normal ends of an answer if tools were offered
_LONGEST_TOKEN = 128  # characters of the longest token in common vocabularies (spaces)

WireRows = Sequence[Mapping[str, Any]]  # a conversation as it goes over the wire
LARGEST_SEED = 2**31 - 1  # that every endpoint accepts


@dataclass(frozen=True)
class Answer:
    """A completion of an endpoint that passed the checks of ``answer`` (no error, not filtered, plausible counts).

    Token counts are None if the endpoint does not report them. ``seconds`` is the duration of the call. ``thought`` and
    ``said_in`` (the fields that held the text, if not ``content`` alone) are copied from the ``ChatCompletion``.
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
    """A chat-completion request as it was sent: its messages (``rows``) and what is known of its size.

    ``tokens`` is the number of prompt tokens; it is an estimate unless ``exact`` is set. ``limit`` is the largest
    number of new tokens.
    """

    rows: WireRows
    tokens: int
    exact: bool
    limit: int
    has_tools: bool = False


def wire(transcript: Sequence[Message], tool_role: str) -> list[dict[str, Any]]:
    """Return messages as the dicts of a request, without thoughts.

    If ``tool_role`` is "user", tool results are put into user messages.
    """
    return move_roles(without_thoughts(transcript), {Role.TOOL} if tool_role == Role.USER else set(), "text")


def request_body(
    model: str,
    rows: WireRows,
    limit: int,
    temperature: float,
    top_p: float = 1.0,
    seed: int | None = None,
    limit_name: str = "max_tokens",
) -> dict[str, Any]:
    """Return the body of a request for an answer of at most ``limit`` tokens; a ``top_p`` of 1 is left out.

    ``limit_name`` is the field in which the endpoint expects the limit.
    """
    body = {"model": model, "messages": rows, "temperature": temperature, limit_name: limit}
    return body | ({"top_p": top_p} if top_p < 1 else {}) | ({} if seed is None else {"seed": seed})


class Readings:
    """The conversations that an endpoint has read so far.

    They are needed to check the prompt tokens that it reports, since an endpoint may not count tokens that it read in
    an earlier request and still has in its cache. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock, self._prefixes = threading.Lock(), set[tuple[tuple[str, str], ...]]()

    def note(self, rows: WireRows) -> None:
        """Add a conversation and all of its prefixes."""
        pairs = _pairs(rows)
        with self._lock:
            self._prefixes.update(pairs[:end] for end in range(1, len(pairs) + 1))

    def unread(self, rows: WireRows) -> float:
        """Return the share of a conversation's characters after the longest prefix that was read before."""
        pairs = _pairs(rows)
        with self._lock:
            length = next((end for end in range(len(pairs), 0, -1) if pairs[:end] in self._prefixes), 0)
        sizes = [len(content) + 1 for _, content in pairs]
        return sum(sizes[length:]) / sum(sizes)


def _pairs(rows: WireRows) -> tuple[tuple[str, str], ...]:
    """Return (role, content) of each message of a request; its tool calls are appended to the content, as JSON."""
    calls = (json.dumps(row["tool_calls"]) if "tool_calls" in row else "" for row in rows)
    return tuple((row["role"], row["content"] + text) for row, text in zip(rows, calls, strict=True))


def ask(
    client: EndpointClient,
    body: Mapping[str, Any],
    request: SentRequest,
    readings: Readings,
    model: FirstModel,
    deadline: float = math.inf,
) -> Answer:
    """Send the ``body`` of a request and return its answer, checked as in ``answer``.

    Raises Unanswered if no answer comes before ``deadline``, a time of ``time.monotonic``, or if the answer names
    another model than the endpoint's first answer did (``model``).
    """
    started = time.perf_counter()
    completion = client.ask(body, deadline)
    reply = answer(completion, request, time.perf_counter() - started, readings)
    if fault := model.fault(reply.model):
        raise Unanswered(fault)
    return reply


def answer(
    completion: ChatCompletion, request: SentRequest, seconds: float, readings: Readings | None = None
) -> Answer:
    """Return a completion as an ``Answer``; raise Unanswered if it cannot be the answer to ``request``.

    The token counts that the endpoint reports are checked against our own. A count that is not a number is ignored. So
    is a count of prompt tokens that is too small, if the endpoint has read the beginning of the conversation before
    (``readings``), since it may not count cached tokens. ``seconds`` is the duration of the call.
    """
    new_tokens = _number(completion.usage, "completion_tokens") or None
    if request.has_tools and completion.calls:
        completion = _with_calls(completion)
    finish = _finish(completion, new_tokens, request.limit)
    prompt_tokens = _prompt_tokens(completion.usage, request, readings or Readings())
    _check_length(completion, finish, new_tokens, request.limit)
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
    """Return a completion whose text includes, at its end, the tool calls that the server had taken out of it.

    A finish reason that stands for "ended by a tool call" becomes "stop".
    """
    reason = "stop" if completion.finish_reason in _ENDED_BY_CALLS else completion.finish_reason
    fields = "content and tool_calls" if completion.text.strip() else "tool_calls"
    text = "\n".join(filter(None, (completion.text, completion.calls)))
    return replace(completion, text=text, finish_reason=reason, said_in=fields)


def _finish(completion: ChatCompletion, new_tokens: int | None, limit: int) -> Finish:
    """Return how an answer ended, "stop" or "length"; raise RefusedRequest or Unanswered for any other end.

    Without a finish reason it is "length" if the answer used its limit, else "stop".
    """
    reason = completion.finish_reason
    text = f", after {completion.text!r}" if completion.text else ""
    if is_filtered(reason):
        raise RefusedRequest(f"it ended by {reason[:40]!r}, which is no end of an answer{text}")
    if reason == _ENDED_BY_ERROR:
        raise Unanswered("it ended by 'error', which is no end of an answer")
    finish = parse_finish(reason) if reason else "stop" if new_tokens is None or new_tokens < limit else "length"
    if finish is None:
        raise _broken(f"it ended by {reason[:40]!r}, which is no end of an answer")
    return finish


def _prompt_tokens(usage: Any, request: SentRequest, readings: Readings) -> int | None:
    """Return the number of prompt tokens that an endpoint reports, checked against the request.

    None if the endpoint reports none, or counts only the tokens that it had not read in earlier requests
    (``readings``). Raises Unanswered if the number does not fit the request.
    """
    read = _number(usage, "prompt_tokens") or None
    if read is None:
        return None
    share = _COUNTED if request.exact else _ESTIMATED
    least, most = request.tokens / (1 + share), request.tokens * (1 + share) + _FRAME[0] + _FRAME[1] * len(request.rows)
    if read < least:
        # some endpoints count cached tokens separately, or not at all
        read += _cached(usage)
    unread = readings.unread(request.rows) if read < least else 1.0
    if unread < 1 and read >= least * unread:
        return None
    # the endpoint cut the context or read another one
    if not least <= read <= most:
        raise _broken(f"it claims to have read {read} tokens where about {request.tokens} were sent")
    readings.note(request.rows)
    return read


def _check_length(completion: ChatCompletion, finish: Finish, new_tokens: int | None, limit: int) -> None:
    """Raise Unanswered if an answer's length, or its count of new tokens, cannot be true for its request.

    An answer cannot be far longer than the request's limit, nor be cut off well below it. A thought (reasoning) may
    exceed the limit.
    """
    most = max(limit, new_tokens or 0)
    if len(completion.text) > (most + _SPARE) * _LONGEST_TOKEN:  # regardless of the count that it reports
        raise _broken(f"it wrote {len(completion.text)} characters where at most {most} tokens were asked for")
    if new_tokens is None:
        return
    thought = _number(_details(completion.usage, "completion"), "reasoning_tokens") or 0
    answer_tokens = new_tokens - min(thought, new_tokens)
    if answer_tokens > limit + _SPARE and not (completion.thought and not thought):
        raise _broken(f"it claims {answer_tokens} tokens where at most {limit} were asked for")
    if finish == "length" and new_tokens < limit / 2:
        raise _broken(f"it was cut after {new_tokens} tokens where {limit} were free")


def _cached(usage: Any) -> int:
    count = _number(_details(usage, "prompt"), "cached_tokens") or 0
    return count or (_number(usage, "cache_read_input_tokens") or 0) + (
        _number(usage, "cache_creation_input_tokens") or 0
    )


def _details(usage: Any, kind: str) -> Any:
    """Return the table of details of ``kind`` ("prompt" or "completion") tokens in an endpoint's ``usage``.

    If there is none it returns ``usage`` itself, into which some endpoints write the details.
    """
    details = usage.get(f"{kind}_tokens_details") if isinstance(usage, Mapping) else None
    return details if isinstance(details, Mapping) else usage


def _number(usage: Any, key: str) -> int | None:
    """Return the token count ``usage[key]``; None if it is missing or not a whole number."""
    value = usage.get(key) if isinstance(usage, Mapping) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def _broken(message: str) -> Unanswered:
    return Unanswered(message, Scope.QUESTION)
