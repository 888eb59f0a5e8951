"""Reading rollouts that other engines wrote, as JSON or safetensors.

A file says at each eviction which cache entries were kept; this history is converted to a ledger, which says when each
entry left. Both forms are described in docs/rollout-files.md. Every value is checked, since the file may come from
anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvaudit.audit.cache.ledger import NEVER, Rollout, load_ledgers
from kvaudit.audit.cache.routing import NO_EXPERT
from kvaudit.audit.cache.selection import NO_UNIT, Selection, selection_fault
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.replay.rollout_checks import LOGPROB_ROUNDING, RecordedRollouts
from kvaudit.core.errors import DataError
from kvaudit.core.spec_parts import TemperatureOrGreedy

ROLLOUTS_FORMAT = "kvaudit.rollouts"
_TENSORS = {
    "ids": (torch.int64, 1),  # [T]
    "sampled": (torch.bool, 1),  # [T]
    "logprobs": (torch.float32, 1),  # [sampled tokens], nats
    "query": (torch.int32, 1),  # [events]
    "kept": (torch.bool, 4),  # [events, L, H, T]
}
_MAX_SHOWN = 60  # characters of a wrong value
_MOST_ENTRIES = 1 << 28  # of all ledgers of a file: a few bytes of header must not claim all memory
_MOST_STEPS = 1 << 34  # entries in all events together: seconds of work
_MOST_CHOICES = 1 << 28  # of one rollout, lists padded to the longest
_LARGEST_JSON = 1 << 28  # bytes

Index = Annotated[int, Field(strict=True, ge=0, lt=NEVER)]
Length = Annotated[int, Field(strict=True, ge=1, lt=NEVER)]
Expert = Annotated[int, Field(strict=True, ge=0, lt=2**15)]  # an int16
AxisSize = Annotated[int, Field(strict=True, ge=1, le=1024)]
Nats = Annotated[float, Field(le=LOGPROB_ROUNDING, allow_inf_nan=False)]


class Form(BaseModel):
    """The base of the pydantic models of a file's parts; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ChoiceUnits(Form):
    """The layers with sparse attention, and the length of the runs of positions (units) that their queries select."""

    unit: Length
    layers: list[Index]


class ChoiceForm(Form):
    """The units (runs of positions) that one query selected, by layer and head."""

    query: Index
    chosen: list[list[list[Index]]]  # [layers][heads][units]


class ChosenForm(ChoiceUnits):
    """What every selecting query of a rollout selected, as numbers of units (runs of consecutive positions)."""

    queries: Annotated[list[ChoiceForm], Field(min_length=1)]


class EventForm(Form):
    """An eviction: from ``query`` on, only the ``kept`` of the earlier entries are visible, by layer and head."""

    query: Index
    kept: list[list[list[Index]] | None]  # [layers][heads][entries], None for a layer from which nothing left


class TensorRollout(Form):
    """A rollout's entry in the header of a safetensors file; its tensors are stored in the same file."""

    prompt_length: Length
    selection: ChoiceUnits | None = None


class JsonRollout(Form):
    """A rollout's entry in a rollout file that is stored as JSON."""

    prompt_length: Length
    ids: list[Index]
    sampled: list[tuple[Index, Index]] | None = None  # half-open spans
    logprobs: list[Nats]
    events: list[EventForm] = []
    experts: list[list[list[Expert]]] | None = None  # [tokens - 1][blocks][experts]
    selection: ChosenForm | None = None


class FileHeader(Form):
    """The fields of a rollout file that hold for all its rollouts: format, layers, heads, policy and temperature."""

    format: Literal["kvaudit.rollouts"]
    version: Literal[1]
    layers: AxisSize
    kv_heads: AxisSize
    policy: str | None = None
    temperature: TemperatureOrGreedy | None = None


class JsonFile(FileHeader):
    """The whole content of a rollout file that is stored as JSON."""

    rollouts: Annotated[list[JsonRollout], Field(min_length=1)]


class TensorFile(FileHeader):
    """The header of a rollout file that is stored as safetensors: what describes the tensors of its rollouts."""

    rollouts: Annotated[list[TensorRollout], Field(min_length=1)]


class Event(NamedTuple):
    """An eviction: from query ``query`` on, only ``kept`` of the earlier entries are visible, bool [H, T] per layer.

    ``kept`` is None for a layer without evictions.
    """

    query: int
    kept: Sequence[Tensor | None]


def read_rollouts(path: Path) -> RecordedRollouts:
    """Read the rollouts of a ledger file, or of a JSON or safetensors file of format ``kvaudit.rollouts``.

    Raises DataError for anything else.
    """
    if not path.is_file():
        raise DataError(f"rollouts {str(path)!r} do not exist; give a ledger, or a file of format {ROLLOUTS_FORMAT}")
    try:
        if path.suffix.lower() == ".json":
            return _from_json(path)
        with safe_open(path, framework="pt") as file:
            metadata = (file.metadata() or {}).get("kvaudit", "")
            if f'"{ROLLOUTS_FORMAT}"' in metadata:
                return _from_tensors(path, TensorFile.model_validate_json(metadata), file)
    except ValidationError as error:  # before ValueError, which it subclasses
        raise DataError(f"rollouts {str(path)!r}: {first_error(error)}") from None
    except (SafetensorError, ValueError) as error:
        raise DataError(f"rollouts {str(path)!r}: {error}") from None
    rollouts, policy = load_ledgers(path)
    return RecordedRollouts(str(path), tuple(rollouts), policy, policy_hash=json.loads(metadata).get("policy_hash"))


def build_ledger(events: Iterable[Event], shape: tuple[int, int, int]) -> Tensor:
    """Convert evictions, in order of time, to ``evicted_at`` int32 [L, H, T]: the first query that lacked each entry.

    ``shape`` is (L, H, T). Raises ValueError for evictions that contradict each other.
    """
    table = torch.full(shape, NEVER, dtype=torch.int32)
    columns, before = torch.arange(shape[2]), 0  # [T]
    for number, event in enumerate(events):
        where = f"event {number} (query {event.query})"
        if not before < event.query <= shape[2]:
            raise ValueError(f"{where}: queries rise, from 1 to at most {shape[2]} tokens; the one before is {before}")
        past, before = columns < event.query, event.query  # [T], entries before the query
        for layer, kept in enumerate(event.kept):
            if kept is None:
                continue
            has_left = table[layer] < NEVER  # [H, T]
            _refuse(f"{where}, layer {layer}", kept & ~past, "is in the future, the query cannot have seen it")
            _refuse(
                f"{where}, layer {layer}",
                kept & has_left,
                "returns after it had left; an evicted entry cannot come back",
            )
            table[layer][past & ~kept & ~has_left] = event.query
    return table


def _refuse(where: str, wrong: Tensor, why: str) -> None:
    if bool(wrong.any()):
        head, entry = wrong.nonzero()[0].tolist()
        raise ValueError(f"{where}, head {head}: entry {entry} {why}")


def _from_json(path: Path) -> RecordedRollouts:
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"larger than {_LARGEST_JSON >> 20} MB; write the safetensors form")
    file = JsonFile.model_validate_json(path.read_bytes())
    _require_room(file, [len(row.ids) for row in file.rollouts])
    steps = sum(
        len(row.ids) * file.kv_heads * sum(layer is not None for layer in event.kept)
        for row in file.rollouts
        for event in row.events
    )
    if steps > _MOST_STEPS:
        raise ValueError(f"its events look at {steps} entries, at most {_MOST_STEPS} are followed")
    rollouts = []
    for number, row in enumerate(file.rollouts):
        tokens = len(row.ids)
        _require_suffix(number, row.prompt_length, tokens)
        sampled = torch.zeros(tokens, dtype=torch.bool)
        for start, stop in [(row.prompt_length, tokens)] if row.sampled is None else row.sampled:
            _require(start < stop <= tokens, number, f"has the sampled span [{start}, {stop}] in {tokens} tokens")
            sampled[start:stop] = True
        # generated one at a time: all masks together can be a thousand times the file
        events = (_event(number, place, event, file, tokens) for place, event in enumerate(row.events))
        ids, logprobs = torch.tensor(row.ids, dtype=torch.int64), torch.tensor(row.logprobs, dtype=torch.float32)
        rollout = _rollout(number, row.prompt_length, ids, sampled, logprobs, events, file)
        experts = None if row.experts is None else _experts(row.experts, tokens)
        selection = None if row.selection is None else _selection(row.selection)
        rollouts.append(replace(rollout, experts=experts, selection=_check_selection(number, selection, rollout)))
    return _to_recorded(path, file, rollouts)


def _event(number: int, place: int, event: EventForm, file: FileHeader, tokens: int) -> Event:
    """Convert an eviction's lists of kept entries to masks, bool [H, T] per layer.

    ``number`` is that of the rollout, ``place`` that of the eviction in it. Raises ValueError for lists that do not
    fit.
    """
    layers = len(event.kept)
    _require(layers == file.layers, number, f"has {layers} layers in event {place}, the file says {file.layers}")
    kept: list[Tensor | None] = []
    for layer, heads in enumerate(event.kept):
        where = f"in event {place}, layer {layer}"
        if heads is None:
            kept.append(None)
            continue
        _require(len(heads) == file.kv_heads, number, f"has {len(heads)} heads {where}, wanted {file.kv_heads}")
        mask = torch.zeros(file.kv_heads, tokens, dtype=torch.bool)
        for head, entries in enumerate(heads):
            _require(len(set(entries)) == len(entries), number, f"names an entry twice {where}, head {head}")
            _require(max(entries, default=0) < tokens, number, f"names an entry beyond its end {where}, head {head}")
            mask[head, entries] = True
        kept.append(mask)
    return Event(event.query, kept)


def _selection(form: ChosenForm) -> Selection:
    """Convert selections to padded tensors; raises ValueError if lists are uneven or too large."""
    shapes = {(len(row.chosen), *map(len, row.chosen)) for row in form.queries}
    layers, *heads = next(iter(shapes))
    if len(shapes) != 1 or layers != len(form.layers) or len(set(heads)) != 1 or not heads[0]:
        raise ValueError(
            f"a choosing query has lists of other layers or heads than {len(form.layers)} layers of one size"
        )
    widest = max(len(units) for row in form.queries for heads in row.chosen for units in heads)
    if len(form.queries) * layers * heads[0] * widest > _MOST_CHOICES:
        raise ValueError(
            f"{len(form.queries)} choosing queries of up to {widest} units take more than {_MOST_CHOICES} numbers"
        )
    chosen = [
        [[units + [NO_UNIT] * (widest - len(units)) for units in heads] for heads in row.chosen] for row in form.queries
    ]
    queries = torch.tensor([row.query for row in form.queries], dtype=torch.int32)
    lists = torch.tensor(chosen, dtype=torch.int32).reshape(len(queries), layers, heads[0], widest)
    return Selection(form.unit, tuple(form.layers), queries, lists.permute(1, 2, 0, 3))  # [N, S, A, k] -> [S, A, N, k]


def _experts(rows: list[list[list[int]]], tokens: int) -> Tensor:
    """Convert lists of experts to int16 [T, M, k], with NO_EXPERT for the last token, which was not fed.

    Raises ValueError if the lists differ in length.
    """
    if len(rows) != tokens - 1:
        raise ValueError(f"a rollout has experts of {len(rows)} tokens, wanted {tokens - 1}: not the last one's")
    sizes = {(len(blocks), *map(len, blocks)) for blocks in rows}
    if len(sizes) != 1 or len(set(next(iter(sizes))[1:])) != 1:
        raise ValueError("a rollout has experts of uneven lengths")
    return torch.nn.functional.pad(torch.tensor(rows, dtype=torch.int16), (0, 0, 0, 0, 0, 1), value=NO_EXPERT)


def _from_tensors(path: Path, header: TensorFile, file: Any) -> RecordedRollouts:
    rollouts, lengths, names = [], list[int](), set(file.keys())
    for number, row in enumerate(header.rollouts):
        kinds = _TENSORS | ({"experts": (torch.int16, 3)} if f"{number}.experts" in names else {})
        # choosing [N] queries, chosen [S, A, N, k] of the S layers that choose
        kinds |= {} if row.selection is None else {"choosing": (torch.int32, 1), "chosen": (torch.int32, 4)}
        tensors = {name: file.get_tensor(f"{number}.{name}") for name in kinds}
        for name, (dtype, rank) in kinds.items():
            fits = tensors[name].dtype == dtype and tensors[name].dim() == rank
            _require(fits, number, f"has {name} of another type than {rank}-dimensional {dtype}")
        ids, query, kept = tensors["ids"], tensors["query"].tolist(), tensors["kept"]
        lengths.append(len(ids))
        _require_room(header, lengths)
        _require_suffix(number, row.prompt_length, len(ids))
        expected = (len(query), header.layers, header.kv_heads, len(ids))
        _require(tuple(kept.shape) == expected, number, f"has kept of shape {tuple(kept.shape)}, wanted {expected}")
        events = [Event(time, list(masks)) for time, masks in zip(query, kept, strict=True)]
        rollout = _rollout(number, row.prompt_length, ids, tensors["sampled"], tensors["logprobs"], events, header)
        selection = None
        if row.selection is not None:
            layers = tuple(row.selection.layers)
            selection = Selection(row.selection.unit, layers, tensors["choosing"], tensors["chosen"])
        selection = _check_selection(number, selection, rollout)
        rollouts.append(replace(rollout, experts=tensors.get("experts"), selection=selection))
    return _to_recorded(path, header, rollouts)


def _rollout(
    number: int,
    prompt_length: int,
    ids: Tensor,
    sampled: Tensor,
    logprobs: Tensor,
    events: Iterable[Event],
    header: FileHeader,
) -> Rollout:
    _require(len(sampled) == len(ids), number, f"has {len(sampled)} sampled flags for {len(ids)} tokens")
    drawn = int(sampled.sum())
    _require(len(logprobs) == drawn, number, f"has {len(logprobs)} log-probs for {drawn} sampled tokens")
    try:
        evicted_at = build_ledger(events, (header.layers, header.kv_heads, len(ids)))
    except _RolloutError:  # names its rollout already
        raise
    except ValueError as error:
        raise ValueError(f"rollout {number}, {error}") from None
    # the last answer is the last run of drawn tokens
    starts = (sampled.int().diff(prepend=torch.zeros(1, dtype=torch.int32)) > 0).nonzero()[:, 0].tolist()
    start = starts[-1] if starts else prompt_length
    return Rollout(
        ids=ids,
        prompt_length=prompt_length,
        sampled=sampled,
        sampler_logprobs=torch.zeros(len(ids)).masked_scatter(sampled, logprobs),
        evicted_at=evicted_at,
        kv_bytes_peak=0,  # unknown for another engine
        kv_bytes_dense=0,
        retention=float((evicted_at[:, :, :start] > start).double().mean()),
        answer_start=start,
    )


def _check_selection(number: int, selection: Selection | None, rollout: Rollout) -> Selection | None:
    if selection is not None:
        fault = selection_fault(selection, rollout.evicted_at)
        _require(fault is None, number, str(fault))
    return selection


def _to_recorded(path: Path, header: FileHeader, rollouts: Sequence[Rollout]) -> RecordedRollouts:
    policy = None if header.policy is None else parse_policy(header.policy)
    return RecordedRollouts(str(path), tuple(rollouts), policy, header.temperature)


class _RolloutError(ValueError):
    """The error in a rollout file whose message already names the rollout, so that no caller adds the name."""


def _require(holds: bool, number: int, fault: str) -> None:
    if not holds:
        raise _RolloutError(f"rollout {number} {fault}")


def _require_room(header: FileHeader, lengths: Sequence[int]) -> None:
    entries = header.layers * header.kv_heads * sum(lengths)
    if entries > _MOST_ENTRIES:
        raise ValueError(f"{entries} cache entries, at most {_MOST_ENTRIES} can be read; split the file")


def _require_suffix(number: int, prompt_length: int, tokens: int) -> None:
    _require(prompt_length < tokens, number, f"has prompt_length {prompt_length} in {tokens} tokens")


def first_error(error: ValidationError) -> str:
    """Return pydantic's first error with its location, such as rollouts.2.events.0.query."""
    details: Mapping[str, Any] = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in details["loc"]) or "the file"
    place = "".join(character if character.isprintable() else "?" for character in path[:_MAX_SHOWN])
    # of these errors the input is the surrounding object, not a wrong value
    if details["type"] in ("missing", "json_invalid", "extra_forbidden"):
        return f"{place}: {details['msg']}"
    return f"{place} is {str(details['input'])[:_MAX_SHOWN]!r}: {details['msg']}"
