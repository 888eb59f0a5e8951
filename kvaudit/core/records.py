"""The frozen records that all packages share: messages, items, grades and graded answers. No torch here.

Shape legend, used in every docstring and comment of the project: B batch, G group, T tokens, L layers, H KV heads, D
head size, V vocabulary, N items, C clusters, S seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple, get_type_hints

from kvaudit.core.errors import DataError, OffScale
from kvaudit.core.facets import FACETS, FacetValues
from kvaudit.core.spans import SPANS, KeptSpan, Place, Span
from kvaudit.core.text import inline

RECORD_FORMAT = 2
READABLE_FORMATS = (1, RECORD_FORMAT)  # format 1 has no facets and no outcome for a truncated answer
# how the turns of a conversation are read: one cache for all turns; each request prefilled again; each request sent
# whole to an engine, which decides what to prefill again
ONE_CACHE, READ_ANEW, SENT_WHOLE = "one cache", "read anew", "sent whole"
# metadata of a field of Record
OMITTED = {"omitted": True}  # not written where it has its default, so that older records stay valid
NOT_IN_TABLE = {"in_table": False}  # the report's table of records has no column for it


class Role(StrEnum):
    """The author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    THOUGHT = "thought"  # of a reasoning model, before its answer (``core.completions``)


TOKEN_ROLES = tuple(role for role in Role if role is not Role.THOUGHT)  # in the cache a thought counts as assistant


class Outcome(StrEnum):
    """The class of a graded answer; from a ``degenerate`` or ``unscored`` one nothing can be learnt about behaviour."""

    DESIRED = "desired"
    UNDESIRED = "undesired"
    DEGENERATE = "degenerate"  # loops, gibberish, empty
    TRUNCATED = "truncated"  # cut off before it ended
    UNSCORED = "unscored"  # the judge or the serving failed


CONTRADICTED = {Outcome.DESIRED: 0.0, Outcome.UNDESIRED: 1.0}  # the score that contradicts the outcome


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; ``arguments`` are plain JSON.

    ``call_id`` is the id by which the message with the call's result refers to it, or empty.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""

    def __hash__(self) -> int:  # arguments are a dictionary, which has no hash
        return hash((self.name, self.call_id))


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    ``tool_calls`` are the calls of an assistant's turn. In a turn written by a suite, ``content`` is the text without
    the calls; in a model's turn, ``content`` is the whole turn as written. ``tool_call_id`` names the call to which a
    tool's result belongs.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def text(self) -> str:
        """The content; if that is empty, the tool calls as JSON, one per line."""
        rows = ({"name": call.name, "arguments": call.arguments} for call in self.tool_calls)
        return self.content or "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)

    def to_row(self) -> dict[str, Any]:
        """Return the message as JSON for a record; tool fields only if they are set."""
        row: dict[str, Any] = {"role": str(self.role), "content": self.content}
        if self.tool_calls:
            row["tool_calls"] = [
                {"name": call.name, "arguments": call.arguments} | ({"id": call.call_id} if call.call_id else {})
                for call in self.tool_calls
            ]
        return row | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Message:
        """Parse a message from a record's JSON; raises ValueError, KeyError or TypeError if it is malformed."""
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
    """Convert messages to the JSON that endpoints accept, with the arguments of calls as JSON text."""
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
    """Return the JSON value by whose hash a question is recognised: [role, content] of each message, then the tools."""
    rows: list[Any] = []
    for message in messages:
        row = message.to_row()
        rows.append([row.pop("role"), row.pop("content"), *([row] if row else [])])
    return [*rows, {"tools": list(tools)}] if tools else rows


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a suite.

    ``cluster_id`` is the coarsest shared origin (template, scenario, document). ``payload`` is plain JSON that only the
    item's own suite reads (right answer, world, canary). ``spans`` are texts of the prompt, or of the environment's
    replies, whose survival in the cache is recorded. ``tools`` are function schemas in OpenAI's format, plain JSON; a
    chat template lists them.
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
    """The result of grading; ``score`` is 1 for the desired behaviour, None if unscored, and never NaN.

    A desired answer scores above 0 and an undesired one below 1. ``facets`` are the answer's yes-or-no properties by
    name (``core.facets``). If ``unsure``, the grade is only the grader's best guess.
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
    """The fields that all records of one file share: what was served (checkpoint, policy) and asked (suite, length)."""

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
    """The last answer of one conversation, not graded yet, with transcript and measurements.

    The fields mean what they mean in ``Record``.
    """

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
    turns_read: str = ""


class CacheUse(NamedTuple):
    """The cache use of one answer; the fields are explained in ``Record``.

    The defaults are the values for an engine that does not report its cache.
    """

    retention: float | None = None
    survival: Mapping[str, float] = {}
    kv_bytes_peak: int | None = None
    kv_bytes_dense: int | None = None
    kv_bytes_live: int | None = None
    spans: Mapping[str, KeptSpan] = {}


@dataclass(frozen=True, slots=True)
class Record:
    """One graded sample: the only input of reports.

    Everything that reads or writes records is derived from the annotations and metadata of these fields: the JSON
    reader and writer here, the fast reader (``reports.records.blocks``) and the columns of the table
    (``reports.records.rows``).

    ``score`` is None exactly when the outcome is unscored. ``retention`` is the share of cache entries left when the
    last answer starts; ``survival`` has this share for each role, and ``spans`` for each marked span. Of the memory for
    the keys and values of this conversation, ``kv_bytes_peak`` is the most that was allocated, ``kv_bytes_live`` the
    largest size of the entries while decoding, without slack and bookkeeping, and ``kv_bytes_dense`` the size that all
    its tokens would have without compression. If an engine does not report its cache, ``retention`` and all bytes are
    None, and ``survival`` is empty.
    """

    run: str = field(metadata=NOT_IN_TABLE)
    checkpoint: str  # sha256 of the weights
    arm: str
    train_seed: int
    policy: str  # canonical string
    policy_hash: str
    suite: str
    suite_version: str
    item_id: str
    cluster_id: str
    context_tokens: int  # the requested length
    placement: str
    sample_index: int
    outcome: Outcome
    score: float | None
    finish_reason: str  # stop | length | turns | error
    prompt_tokens: int = field(metadata=NOT_IN_TABLE)
    new_tokens: int
    retention: float | None
    survival: Mapping[str, float]
    kv_bytes_peak: int | None
    kv_bytes_dense: int | None
    seconds: float
    judge: str
    transcript: tuple[Message, ...]
    facets: FacetValues = field(default_factory=dict)
    spans: Mapping[str, KeptSpan] = field(default_factory=dict, metadata=OMITTED)
    unsure: bool = field(default=False, metadata=OMITTED)  # the grade is only the judge's best guess
    kv_bytes_live: int | None = field(default=None, metadata=OMITTED)
    logprob: float | None = field(default=None, metadata=OMITTED)  # of the answer, nats, if the engine reports it
    # the server's error, on one line, where the conversation ended without an answer
    unanswered: str = field(default="", metadata=OMITTED | NOT_IN_TABLE)
    # the reply field that held the last answer (``ChatCompletion.said_in``), empty for its content
    said_in: str = field(default="", metadata=OMITTED | NOT_IN_TABLE)
    # the form in which tools were offered and calls read (``core.tool_forms``), "text" if as text of the prompt
    tool_form: str = field(default="", metadata=OMITTED | NOT_IN_TABLE)
    # how several turns were read: ONE_CACHE, READ_ANEW or SENT_WHOLE; empty for a suite of one turn
    turns_read: str = field(default="", metadata=OMITTED | NOT_IN_TABLE)
    format: int = field(default=RECORD_FORMAT, metadata=NOT_IN_TABLE)

    @classmethod
    def of(cls, serving: Serving, item: Item, grade: Grade, answer: UngradedAnswer, cache_use: CacheUse) -> Record:
        """Return the record of one graded answer to an item."""
        values = {**serving._asdict(), **answer._asdict(), **cache_use._asdict(), **_grade_fields(item, grade)}
        return cls(item_id=item.item_id, unsure=grade.unsure, **values)

    def with_grade(self, suite_version: str, item: Item, grade: Grade, *, unsure: bool) -> Record:
        """Return the record with a new grade, for a suite that has changed since.

        ``item`` is the record's item as the suite makes it now, in ``suite_version``.
        """
        values = _grade_fields(item, grade)
        return replace(self, suite_version=suite_version, unsure=unsure, format=RECORD_FORMAT, **values)

    def to_json(self) -> str:
        """Return one JSON line, keys in field order, no NaN."""
        # asdict copies every value, which takes four times as long
        schema = schema_of(type(self))
        row = {name: getattr(self, name) for name in schema.fields}
        for name, default in schema.defaults.items():
            if row[name] == default:
                del row[name]
        row["survival"] = dict(self.survival)
        row["transcript"] = [message.to_row() for message in self.transcript]
        if self.spans:
            row["spans"] = {name: {"kept": span.share, "at": span.places} for name, span in self.spans.items()}
        return json.dumps(row, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Parse one JSON line; raises a DataError that names the wrong field."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"record is not JSON ({error})") from None
        if not isinstance(row, dict) or row.get("format") not in READABLE_FORMATS:
            raise DataError(
                f"record has format {row.get('format') if isinstance(row, dict) else row!r}, "
                f"wanted one of {READABLE_FORMATS}"
            )
        if row["format"] < RECORD_FORMAT:
            row.setdefault("facets", {})
        schema = schema_of(cls)
        row = {**schema.defaults, **row}
        names = schema.fields.keys()
        if row.keys() != names:
            raise DataError(
                f"record has wrong keys: missing {sorted(names - row.keys())}, extra {sorted(row.keys() - names)}"
            )
        return cls._from_row(row, schema)

    @classmethod
    def _from_row(cls, row: dict[str, Any], schema: RecordSchema) -> Record:
        try:
            row["outcome"] = Outcome(row["outcome"])
            row["transcript"] = tuple(map(Message.from_row, row["transcript"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"record has a bad outcome or transcript ({error})") from None
        if not are_spans(row["spans"]):
            raise DataError(
                f"record has spans {str(row['spans'])[:60]}, wanted a share and places [message, start, end] under "
                f"{', '.join(SPANS)}"
            )
        row["spans"] = {
            name: KeptSpan(span["kept"], tuple(Place(*place) for place in span["at"]))
            for name, span in row["spans"].items()
        }
        for name in schema.defaults:
            kind = schema.fields[name].type
            if kind in _OMITTED_KINDS and not isinstance(row[name], kind):
                raise DataError(f"record has {name} {str(row[name])[:40]!r}, wanted {_OMITTED_KINDS[kind]} or no key")
        row["unanswered"] = inline(row["unanswered"])  # it is a server's text and may hold broken characters
        facets = row["facets"]
        if not isinstance(facets, dict) or not all(v is None or isinstance(v, bool) for v in facets.values()):
            raise DataError(f"record has facets {str(facets)[:60]}, wanted names with true, false or null")
        if unknown := sorted(set(facets) - set(FACETS)):
            raise DataError(f"record has an unknown facet {unknown[0][:40]!r}; known: {', '.join(FACETS)}")
        _check_score(row)
        return cls(**row)


_OMITTED_KINDS = {bool: "true or false", str: "text"}


class RecordField(NamedTuple):
    """The type of one field of a record, and whether the report's table has it."""

    type: Any  # the annotation, resolved
    in_table: bool


class RecordSchema(NamedTuple):
    """The fields of a record class by name, in order, and the defaults of fields that a stored line may lack."""

    fields: Mapping[str, RecordField]
    defaults: Mapping[str, Any]


_SCHEMAS: dict[type[Record], RecordSchema] = {}


def schema_of(record: type[Record]) -> RecordSchema:
    """Return the fields and defaults of a record class; they are computed once."""
    if record not in _SCHEMAS:
        hints = get_type_hints(record)
        omitted = [f for f in fields(record) if f.metadata.get("omitted")]
        _SCHEMAS[record] = RecordSchema(
            {f.name: RecordField(hints[f.name], f.metadata.get("in_table", True)) for f in fields(record)},
            {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in omitted},
        )
    return _SCHEMAS[record]


def _check_score(row: Mapping[str, Any]) -> None:
    score, outcome = row["score"], row["outcome"]
    if (score is None) != (outcome is Outcome.UNSCORED):
        raise DataError(f"record has score {score!r} with outcome {outcome}")
    if score is not None and not (isinstance(score, int | float) and math.isfinite(score)):
        raise DataError(f"record has score {score!r}, wanted a number in [0, 1]")
    if score is not None and not 0 <= score <= 1:
        raise OffScale(score)
    if score is not None and score == CONTRADICTED.get(outcome):
        raise DataError(f"record has score {score!r} with outcome {outcome}, which contradict each other")


def _grade_fields(item: Item, grade: Grade) -> dict[str, Any]:
    values = {name: getattr(grade, name) for name in ("outcome", "score", "judge", "facets")}
    return {"cluster_id": item.cluster_id, "placement": item.placement, **values}


def are_spans(table: Any) -> bool:
    """Return whether a value parsed from JSON is a valid table of spans: {name: {"kept": share, "at": places}}.

    A place is [message, start, end]; a span is a text of the prompt whose survival in the cache is recorded.
    """
    if not isinstance(table, dict) or not set(table) <= set(SPANS):
        return False
    return all(isinstance(span, dict) and set(span) == {"kept", "at"} and _is_span(**span) for span in table.values())


def _is_span(kept: Any, at: Any) -> bool:
    if type(kept) not in (int, float) or not 0 <= kept <= 1 or type(at) is not list:
        return False
    return all(
        type(entry) is list and [*map(type, entry)] == [int] * 3 and entry[0] >= 0 and 0 <= entry[1] < entry[2]
        for entry in at
    )
