"""The calls of a probe: how a conversation goes over the wire, which replies count, and a memory of those that did.

    calls.jsonl    {"call": sha256 of what was asked, "text": ..., "finish": ...}, a line each, appended as they come;
                   {"call": sha256, "failed": why} where none came, which is asked again

What was answered is never asked again, so a killed probe goes on at the next call.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from audit.core.endpoint import ChatCompletion, Scope, Unanswered
from audit.core.records import Message, Role
from audit.core.spec import RunSpec
from audit.core.text import is_text
from audit.core.thoughts import heard
from audit.sampling.chat import TOOL_PREFIX
from suites.base import Suite

# how a finish is called here and there; what else there is (a filter, a tool call) is no answer
_FINISHES = {"stop": "stop", "end_turn": "stop", "eos": "stop", "length": "length", "max_tokens": "length"}
_FRAME = 64, 16  # tokens that a chat template may put around a conversation, and around a message
_COUNTED, _ESTIMATED = 0.2, 1.0  # share by which a claim may differ from what a tokenizer counted, or was estimated
_SPARE = 16  # tokens beyond the limit of an answer that count as rounding


@dataclass(frozen=True)
class Answer:
    """A reply that counts. Tokens are None where the endpoint says nothing of them; seconds are the call's."""

    text: str
    finish: Literal["stop", "length"]
    prompt_tokens: int | None
    new_tokens: int | None
    model: str
    seconds: float


def request(spec: RunSpec, suite: Suite, transcript: Sequence[Message], seed: int) -> dict[str, Any]:
    """The body of the next call of a conversation."""
    probe, grid = spec.probe, spec.evaluate
    assert probe is not None
    body = {
        "model": spec.model_path,
        "messages": wire(transcript, probe.tool_role),
        "temperature": grid.temperature,
        probe.limit: suite.max_new_tokens,
    }
    body |= {"top_p": grid.top_p} if grid.top_p < 1 else {}
    body |= {"seed": seed} if probe.seeded else {}
    return body | ({"stop": list(suite.until)} if suite.until else {})


def wire(transcript: Sequence[Message], tool_role: str) -> list[dict[str, str]]:
    """Messages as endpoints take them: without thoughts, and a tool's result in the user's message where asked for."""
    found: list[dict[str, str]] = []
    foreign = False  # whether the last row holds a tool's text
    for message in heard(transcript):
        moved = message.role is Role.TOOL and tool_role == Role.USER
        row = {"role": tool_role, "content": TOOL_PREFIX + message.content} if moved else _row(message)
        if found and found[-1]["role"] == row["role"] == Role.USER and (moved or foreign):
            found[-1]["content"] += "\n\n" + row["content"]
        else:
            found.append(row)
        foreign = moved
    return found


def _row(message: Message) -> dict[str, str]:
    return {"role": str(message.role), "content": message.content}


def answer(completion: ChatCompletion, *, sent: int, messages: int, exact: bool, limit: int, seconds: float) -> Answer:
    """A completion as an answer; raises Unanswered for one that cannot be to what was sent.

    ``sent`` tokens in so many ``messages``, by a tokenizer where ``exact``; at most ``limit`` were to be written.
    """
    finish = _FINISHES.get(completion.finish_reason)
    if finish is None:
        raise _broken(f"it ended by {completion.finish_reason[:40]!r}, which is no end of an answer")
    read, drawn = _usage(completion.usage)
    _check_read(read, sent, messages, exact=exact)
    if drawn is not None and drawn > limit + _SPARE:
        raise _broken(f"it claims {drawn} tokens where at most {limit} were asked for")
    if drawn is not None and finish == "length" and drawn < limit / 2:
        raise _broken(f"it was cut after {drawn} tokens where {limit} were free")
    return Answer(completion.text, finish, read, drawn, completion.model[:200], seconds)  # type: ignore[arg-type]


def _check_read(read: int | None, sent: int, messages: int, *, exact: bool) -> None:
    """A context that was cut, or another one, is no question of ours."""
    share = _COUNTED if exact else _ESTIMATED
    most = sent * (1 + share) + _FRAME[0] + _FRAME[1] * messages
    if read is not None and not sent / (1 + share) <= read <= most:
        raise _broken(f"it claims to have read {read} tokens where about {sent} were sent")


def _usage(usage: Any) -> tuple[int | None, int | None]:
    """Tokens read and written, None where nothing is said of them."""
    if usage is None:
        return None, None
    read, drawn = (_number(usage, key) for key in ("prompt_tokens", "completion_tokens"))
    return read, drawn


def _number(usage: Any, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, Mapping) else usage
    if value is not None and (type(value) is not int or value < 0):
        raise _broken(f"its {key} are no number")
    return value


def _broken(what: str) -> Unanswered:
    return Unanswered(what, Scope.QUESTION)


class Calls:
    """What was answered, by what was asked; every answer is on disk before it is used. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path, self._door = path, threading.Lock()
        raw = path.read_bytes() if path.exists() else b""
        self._torn = bool(raw) and not raw.endswith(b"\n")  # a kill has cut the last line
        self._known = dict(_kept(raw))

    def find(self, key: str) -> Answer | None:
        """The answer to a call, None where there is none yet."""
        return self._known.get(key)

    def keep(self, key: str, found: Answer | Unanswered) -> None:
        """Note an answer, or why there is none."""
        said = {"failed": str(found)} if isinstance(found, Unanswered) else asdict(found)
        with self._door:
            if isinstance(found, Answer):
                self._known[key] = found
            self._append(json.dumps({"call": key, **said}, ensure_ascii=False))

    def _append(self, line: str) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # one write of a whole line, so that those of another process stay whole too
            os.write(descriptor, ("\n" * self._torn + line + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._torn = False


def call_key(body: Mapping[str, Any], sample: int) -> str:
    """sha256 of what is asked, and for the how manyth time."""
    named = {("limit" if key.startswith("max_") else key): value for key, value in body.items()}
    return hashlib.sha256(json.dumps([named, sample], sort_keys=True).encode()).hexdigest()


def _kept(raw: bytes) -> Iterator[tuple[str, Answer]]:
    """What a file holds; a line that is none of ours is left out, and its call made again."""
    for line in raw.splitlines():
        try:
            row = json.loads(line)
            key = row.pop("call")
            found = Answer(**row)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if isinstance(key, str) and _is_answer(found):
            yield key, found


def _is_answer(found: Answer) -> bool:
    texts = all(isinstance(text, str) and is_text(text) for text in (found.text, found.model))
    counts = all(n is None or (type(n) is int and n >= 0) for n in (found.prompt_tokens, found.new_tokens))
    timed = isinstance(found.seconds, float) and math.isfinite(found.seconds)
    return texts and counts and timed and found.finish in ("stop", "length")
