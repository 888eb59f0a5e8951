"""A conversation over the wire: as rows of a chat completion, and which completions count as an answer to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvaudit.audit.sampling.chat import TOOL_PREFIX
from kvaudit.core.endpoint import ChatCompletion, RefusedRequest, Scope, Unanswered
from kvaudit.core.records import Message, Role
from kvaudit.core.thoughts import heard

# how a finish is called here and there; what else there is (a filter, a tool call) is no answer
_FINISHES = {"stop": "stop", "end_turn": "stop", "eos": "stop", "length": "length", "max_tokens": "length"}
_FILTERED = "content_filter"
_FRAME = 64, 16  # tokens that a chat template may put around a conversation, and around a message
_COUNTED, _ESTIMATED = 0.2, 1.0  # share by which a claim may differ from what a tokenizer counted, or was estimated
_SPARE = 16  # tokens beyond the limit of an answer that count as rounding
_LONGEST_TOKEN = 128  # characters: the longest of the usual vocabularies, which are spaces


@dataclass(frozen=True)
class Answer:
    """A reply that counts. Tokens are None where the endpoint says nothing of them; seconds are the call's."""

    text: str
    finish: Literal["stop", "length"]
    prompt_tokens: int | None
    new_tokens: int | None
    model: str
    seconds: float


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


def answer(completion: ChatCompletion, *, sent: int, messages: int, exact: bool, limit: int, seconds: float) -> Answer:
    """A completion as an answer; raises Unanswered for one that cannot be to what was sent.

    ``sent`` tokens in so many ``messages``, by a tokenizer where ``exact``; at most ``limit`` were to be written.
    """
    finish = _FINISHES.get(completion.finish_reason)
    if completion.finish_reason == _FILTERED:
        said = f", behind {completion.text!r}" if completion.text else ""
        raise RefusedRequest(f"it ended by {_FILTERED!r}, which is no end of an answer{said}")
    if finish is None:
        raise _broken(f"it ended by {completion.finish_reason[:40]!r}, which is no end of an answer")
    read, drawn = (_number(completion.usage, key) for key in ("prompt_tokens", "completion_tokens"))
    share = _COUNTED if exact else _ESTIMATED
    most = sent * (1 + share) + _FRAME[0] + _FRAME[1] * messages
    # a context that was cut, or another one, is no question of ours
    if read is not None and not sent / (1 + share) <= read <= most:
        raise _broken(f"it claims to have read {read} tokens where about {sent} were sent")
    if drawn is None and len(completion.text) > (limit + _SPARE) * _LONGEST_TOKEN:  # told without counting tokens
        raise _broken(f"it wrote {len(completion.text)} characters where at most {limit} tokens were asked for")
    if drawn is not None and drawn > limit + _SPARE:
        raise _broken(f"it claims {drawn} tokens where at most {limit} were asked for")
    if drawn is not None and finish == "length" and drawn < limit / 2:
        raise _broken(f"it was cut after {drawn} tokens where {limit} were free")
    return Answer(completion.text, finish, read, drawn, completion.model[:200], seconds)  # type: ignore[arg-type]


def _number(usage: Any, key: str) -> int | None:
    """Tokens of a kind, None where nothing is said of them."""
    value = usage.get(key) if isinstance(usage, Mapping) else usage
    if value is not None and (type(value) is not int or value < 0):
        raise _broken(f"its {key} are no number")
    return value


def _broken(what: str) -> Unanswered:
    return Unanswered(what, Scope.QUESTION)
