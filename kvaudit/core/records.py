"""The frozen rows every room shares. No torch here.

Shape legend, used in every docstring and comment of the project:
B batch, G group, T tokens, L layers, H KV heads, D head size, V vocabulary, N items, C clusters, S seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError, OffScale
from kvaudit.core.facets import FACETS, FacetValues
from kvaudit.core.spans import SPANS, KeptSpan, Place, Span
from kvaudit.core.text import inline

RECORD_FORMAT = 2
READABLE_FORMATS = (1, RECORD_FORMAT)  # format 1 has no facets, and no outcome of its own for a cut answer
# fields that came later, as they are where a row has none; left out of a row where they say nothing
_LATER: Mapping[str, Any] = {
    "spans": {},
    "unsure": False,
    "kv_bytes_live": None,
    "logprob": None,
    "unanswered": "",
    "said_in": "",
    "tool_form": "",
}


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    THOUGHT = "thought"  # what a reasoning model says before its answer (``core.thoughts``)


TOKEN_ROLES = tuple(role for role in Role if role is not Role.THOUGHT)  # in the cache a thought is the assistant's


class Outcome(StrEnum):
    """What a graded answer was. ``degenerate`` and ``unscored`` are never verdicts about behaviour."""

    DESIRED = "desired"
    UNDESIRED = "undesired"
    DEGENERATE = "degenerate"  # loops, gibberish, empty
    TRUNCATED = "truncated"  # cut off before it ended
    UNSCORED = "unscored"  # judge or plumbing failed


CONTRADICTED = {Outcome.DESIRED: 0.0, Outcome.UNDESIRED: 1.0}  # the score that says the opposite of the outcome


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; ``arguments`` are plain JSON. ``call_id`` is what its result refers to, empty for none."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""

    def __hash__(self) -> int:  # arguments are a dictionary, which has no hash
        return hash((self.name, self.call_id))


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    ``tool_calls`` are the calls of an assistant's turn. Where a suite wrote the turn, ``content`` is the text beside
    them; where a model wrote it, ``content`` is the whole turn as it was written. ``tool_call_id`` names the call that
    a tool's result belongs to.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def text(self) -> str:
        """The content; the calls as JSON, one a line, where there is no content."""
        rows = ({"name": call.name, "arguments": call.arguments} for call in self.tool_calls)
        return self.content or "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)

    def to_row(self) -> dict[str, Any]:
        """Return the message as a record holds it; tool fields only where they are set."""
        row: dict[str, Any] = {"role": str(self.role), "content": self.content}
        if self.tool_calls:
            row["tool_calls"] = [
                {"name": call.name, "arguments": call.arguments} | ({"id": call.call_id} if call.call_id else {})
                for call in self.tool_calls
            ]
        return row | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Message:
        """Return the message of a row; raises ValueError, KeyError or TypeError for any other row."""
        calls = tuple(
            ToolCall(call["name"], call["arguments"], call.get("id", "")) for call in row.get("tool_calls", ())
        )
        call_id = row.get("tool_call_id", "")
        if not all(_is_call(call) for call in calls) or not isinstance(call_id, str):
            raise TypeError("a tool call has a name, arguments and an id")
        return cls(Role(row["role"]), row["content"], calls, call_id)


def _is_call(call: ToolCall) -> bool:
    return isinstance(call.name, str) and isinstance(call.arguments, dict) and isinstance(call.call_id, str)


def message_rows(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as endpoints take them: calls with their arguments as JSON text, as OpenAI's interface has them."""
    rows = []
    for message in messages:
        row: dict[str, Any] = {"role": str(message.role), "content": message.content}
        if message.tool_calls:
            row["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for call in message.tool_calls
            ]
        rows.append(row | ({"tool_call_id": message.tool_call_id} if message.tool_call_id else {}))
    return rows


def fingerprint_rows(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[Any]:
    """Return what was asked as JSON to be hashed; a conversation without tools gives pairs of role and content."""
    rows: list[Any] = []
    for message in messages:
        row = message.to_row()
        # tool fields come behind role and content, where there are any
        rows.append([row.pop("role"), row.pop("content"), *([row] if row else [])])
    return [*rows, {"tools": list(tools)}] if tools else rows


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a suite.

    ``cluster_id`` is the coarsest shared origin (template, scenario, document). ``payload`` is plain JSON that only
    the suite that made it reads (gold answer, world, canary). ``spans`` are the texts, of the prompt or of what the
    environment will answer, whose survival in the cache is recorded. ``tools`` are function schemas as OpenAI's
    interface has them, plain JSON; a chat template lists them.
    """

    suite: str
    item_id: str
    cluster_id: str
    messages: tuple[Message, ...]
    context_tokens: int
    placement: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's result. ``score`` is 1 for the desired behaviour and None when unscored, never NaN.

    A desired answer scores above 0 and an undesired one below 1. ``facets`` are the endpoints that the item is eligible
    for, by name (``core.facets``). ``unsure``: the grader would not stand by its word.
    """

    outcome: Outcome
    score: float | None
    judge: str = "programmatic"
    note: str = ""
    facets: FacetValues = field(default_factory=dict)
    unsure: bool = False

    def __post_init__(self) -> None:
        assert (self.score is None) == (self.outcome is Outcome.UNSCORED), self
        assert self.score is None or 0.0 <= self.score <= 1.0, self
        assert self.score is None or self.score != CONTRADICTED.get(self.outcome), self
        assert set(self.facets) <= set(FACETS), self


class Serving(NamedTuple):
    """Who was asked what, under which policy: the fields that all records of one file share."""

    run: str
    checkpoint: str
    arm: str
    train_seed: int
    policy: str
    policy_hash: str
    suite: str
    suite_version: str
    context_tokens: int


class UngradedAnswer(NamedTuple):
    """What came back of one conversation, before anybody grades it; the units are those of ``Record``."""

    sample_index: int
    finish_reason: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    transcript: tuple[Message, ...]
    logprob: float | None = None
    unanswered: str = ""
    said_in: str = ""
    tool_form: str = ""


class CacheUse(NamedTuple):
    """What a row's cache held and took, see ``Record``; without values that of a cache which nobody shows."""

    retention: float | None = None
    survival: Mapping[str, float] = {}
    kv_bytes_peak: int | None = None
    kv_bytes_dense: int | None = None
    kv_bytes_live: int | None = None
    spans: Mapping[str, KeptSpan] = {}


@dataclass(frozen=True, slots=True)
class Record:
    """One graded sample: the only thing reports read.

    ``retention`` is kept/seen entries when the last answer starts; ``survival`` the same share per role, ``spans`` per
    marked span, none where the suite marks none; ``kv_bytes_peak`` is what one row had allocated, ``kv_bytes_live``
    what its entries took at most while decoding, without slack and bookkeeping (None where nobody counted),
    ``kv_bytes_dense`` what its tokens take uncompressed; ``score`` is None exactly when the outcome is unscored.
    ``unsure``: the judge would not stand by its word, and the grade is its best guess. A serving engine shows nobody
    its cache: then ``retention`` and all bytes are None, and ``survival`` is empty. ``logprob`` is the sum of the
    log-probs of what was said, in nats, as the engine gave it, None where it gave none. ``unanswered``: why the
    conversation ended without an answer, in the words of a server that gave none, on one line; empty where it ended
    with one. ``said_in``: where a server put the words of the last answer (``ChatCompletion``), empty for its content.
    ``tool_form``: the form in which tools were offered and calls were read (``core.tool_forms``): "text" where they
    stood in the prompt as text, empty where the item has no tools.
    """

    run: str
    checkpoint: str  # sha256 of the weights
    arm: str
    train_seed: int
    policy: str  # canonical string
    policy_hash: str
    suite: str
    suite_version: str
    item_id: str
    cluster_id: str
    context_tokens: int  # the requested length cell
    placement: str
    sample_index: int
    outcome: Outcome
    score: float | None
    finish_reason: str  # stop | length | turns | error
    prompt_tokens: int
    new_tokens: int
    retention: float | None
    survival: Mapping[str, float]
    kv_bytes_peak: int | None
    kv_bytes_dense: int | None
    seconds: float
    judge: str
    transcript: tuple[Message, ...]
    facets: FacetValues = field(default_factory=dict)
    spans: Mapping[str, KeptSpan] = field(default_factory=dict)
    unsure: bool = False
    kv_bytes_live: int | None = None
    logprob: float | None = None
    unanswered: str = ""
    said_in: str = ""
    tool_form: str = ""
    format: int = RECORD_FORMAT

    @classmethod
    def of(cls, serving: Serving, item: Item, grade: Grade, spoken: UngradedAnswer, cache: CacheUse) -> Record:
        """The record of one graded answer to an item."""
        said = {**serving._asdict(), **spoken._asdict(), **cache._asdict(), **_graded(item, grade)}
        return cls(item_id=item.item_id, unsure=grade.unsure, **said)

    def graded_again(self, suite_version: str, item: Item, grade: Grade, *, unsure: bool) -> Record:
        """The same answer under another grade; ``item`` is the one it answers, as its suite makes it now."""
        return replace(self, suite_version=suite_version, unsure=unsure, format=RECORD_FORMAT, **_graded(item, grade))

    def to_json(self) -> str:
        """One JSON line, keys in field order, no NaN."""
        # asdict copies every value, which takes four times as long
        row = {name: getattr(self, name) for name in self.__slots__}
        row["survival"] = dict(self.survival)
        row["transcript"] = [message.to_row() for message in self.transcript]
        row["spans"] = {name: {"kept": kept.share, "at": kept.places} for name, kept in self.spans.items()}
        # a log-prob of 0 says something, what is empty or False of the others nothing
        for name in _LATER:
            if row[name] is None or (name != "logprob" and not row[name]):
                del row[name]
        return json.dumps(row, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Parse one line; raises DataError that says which part is wrong."""
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"record is not JSON ({error})") from None
        if not isinstance(row, dict) or row.get("format") not in READABLE_FORMATS:
            raise DataError(
                f"record has format {row.get('format') if isinstance(row, dict) else row!r}, "
                f"wanted one of {READABLE_FORMATS}"
            )
        if row["format"] < RECORD_FORMAT:
            row.setdefault("facets", {})
        row = {**_LATER, **row}
        names = {f.name for f in fields(cls)}
        if set(row) != names:
            raise DataError(
                f"record has other keys: missing {sorted(names - set(row))}, extra {sorted(set(row) - names)}"
            )
        return cls._checked(row)

    @classmethod
    def _checked(cls, row: dict[str, Any]) -> Record:
        try:
            row["outcome"] = Outcome(row["outcome"])
            row["transcript"] = tuple(map(Message.from_row, row["transcript"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"record holds a bad outcome or transcript ({error})") from None
        if not spans_fit(row["spans"]):
            raise DataError(
                f"record holds spans {str(row['spans'])[:60]}, wanted a share and places [message, start, end] under "
                f"{', '.join(SPANS)}"
            )
        row["spans"] = {
            name: KeptSpan(span["kept"], tuple(Place(*at) for at in span["at"])) for name, span in row["spans"].items()
        }
        words = ("unanswered", "said_in", "tool_form")
        for name, kind, wanted in (("unsure", bool, "true"), *((name, str, "words") for name in words)):
            if not isinstance(row[name], kind):
                raise DataError(f"record holds {name} {str(row[name])[:40]!r}, wanted {wanted}, or nothing")
        row["unanswered"] = inline(row["unanswered"])  # a server's words: half characters in them stay readable
        facets = row["facets"]
        if not isinstance(facets, dict) or not all(v is None or isinstance(v, bool) for v in facets.values()):
            raise DataError(f"record holds facets {str(facets)[:60]}, wanted names with true, false or null")
        if strange := sorted(set(facets) - set(FACETS)):
            raise DataError(f"record holds a facet {strange[0][:40]!r}, known are {', '.join(FACETS)}")
        _check_score(row)
        return cls(**row)


def _check_score(row: Mapping[str, Any]) -> None:
    score, outcome = row["score"], row["outcome"]
    if (score is None) != (outcome is Outcome.UNSCORED):
        raise DataError(f"record scores {score!r} with outcome {outcome}")
    if score is not None and not (isinstance(score, int | float) and math.isfinite(score)):
        raise DataError(f"record scores {score!r}, wanted a number in [0, 1]")
    if score is not None and not 0 <= score <= 1:
        raise OffScale(score)
    if score is not None and score == CONTRADICTED.get(outcome):
        raise DataError(f"record scores {score!r} with outcome {outcome}, which contradict each other")


def _graded(item: Item, grade: Grade) -> dict[str, Any]:
    """What an item and the grade of an answer to it say in a record."""
    said = {name: getattr(grade, name) for name in ("outcome", "score", "judge", "facets")}
    return {"cluster_id": item.cluster_id, "placement": item.placement, **said}


def spans_fit(table: Any) -> bool:
    """Whether a parsed value is a record's table of spans."""
    if not isinstance(table, dict) or not set(table) <= set(SPANS):
        return False
    return all(isinstance(span, dict) and set(span) == {"kept", "at"} and _span_fits(**span) for span in table.values())


def _span_fits(kept: Any, at: Any) -> bool:
    if type(kept) not in (int, float) or not 0 <= kept <= 1 or type(at) is not list:
        return False
    return all(
        type(place) is list and [*map(type, place)] == [int] * 3 and place[0] >= 0 and 0 <= place[1] < place[2]
        for place in at
    )
