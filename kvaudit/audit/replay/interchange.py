"""Rollouts of another engine, as JSON or safetensors: who was kept when becomes the ledger's one integer per entry.

Both forms are described in docs/rollout-files.md. Every value is checked, since the file is a stranger's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvaudit.audit.cache.ledger import NEVER, Rollout, load_ledgers
from kvaudit.audit.cache.selection import Selection, selection_fault
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.replay.interchange import (
    ChosenForm,
    EventForm,
    FileHeader,
    JsonFile,
    TensorFile,
    experts_of,
    selection_of,
)
from kvaudit.audit.replay.rollout_checks import RecordedRollouts
from kvaudit.core.errors import DataError

ROLLOUTS_FORMAT, ROLLOUTS_VERSION = "kvaudit.rollouts", 1
_TENSORS = {
    "ids": (torch.int64, 1),  # [T]
    "sampled": (torch.bool, 1),  # [T]
    "logprobs": (torch.float32, 1),  # [sampled tokens], nats
    "query": (torch.int32, 1),  # [events]
    "kept": (torch.bool, 4),  # [events, L, H, T]
}
_SHOWN = 60  # characters of a wrong value
_MOST_ENTRIES = 1 << 28  # of all ledgers of a file: a few bytes of header must not claim all memory
_MOST_STEPS = 1 << 34  # entries that all events together look at: seconds
_LARGEST_JSON = 1 << 28  # bytes


class Event(NamedTuple):
    """From query ``query`` on, of the entries before it only ``kept`` can be seen: bool [H, T] per layer.

    None for a layer in which nothing left.
    """

    query: int
    kept: Sequence[Tensor | None]


def read_rollouts(path: Path) -> RecordedRollouts:
    """Read a ledger file or either interchange form; raises DataError for anything else."""
    if not path.is_file():
        raise DataError(f"rollouts {str(path)!r} do not exist; give a ledger, or a file of format {ROLLOUTS_FORMAT}")
    try:
        if path.suffix.lower() == ".json":
            return _from_json(path)
        with safe_open(path, framework="pt") as file:
            metadata = (file.metadata() or {}).get("kvaudit", "")
            if f'"{ROLLOUTS_FORMAT}"' in metadata:
                return _from_tensors(path, TensorFile.model_validate_json(metadata), file)
    except ValidationError as error:  # first, being a ValueError itself
        raise DataError(f"rollouts {str(path)!r}: {first_error(error)}") from None
    except (SafetensorError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"rollouts {str(path)!r}: {error}") from None
    rollouts, policy = load_ledgers(path)
    return RecordedRollouts(str(path), tuple(rollouts), policy, policy_hash=json.loads(metadata).get("policy_hash"))


def build_ledger(events: Iterable[Event], shape: tuple[int, int, int]) -> Tensor:
    """``evicted_at`` int32 [L, H, T] of a history; raises ValueError where the history contradicts itself."""
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
            _refuse(f"{where}, layer {layer}", kept & has_left, "returns after it had left; eviction is for good")
            table[layer][past & ~kept & ~has_left] = event.query
    return table


def _refuse(where: str, wrong: Tensor, why: str) -> None:
    if bool(wrong.any()):
        head, entry = wrong.nonzero()[0].tolist()
        raise ValueError(f"{where}, head {head}: entry {entry} {why}")


def _from_json(path: Path) -> RecordedRollouts:
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"larger than {_LARGEST_JSON >> 20} MB; write the safetensors form")
    table = JsonFile.model_validate_json(path.read_bytes())
    _require_room(table, [len(row.ids) for row in table.rollouts])
    looked_at = sum(
        len(row.ids) * table.kv_heads * sum(layer is not None for layer in event.kept)
        for row in table.rollouts
        for event in row.events
    )
    if looked_at > _MOST_STEPS:
        raise ValueError(f"its events look at {looked_at} entries, at most {_MOST_STEPS} are followed")
    rollouts = []
    for number, row in enumerate(table.rollouts):
        tokens = len(row.ids)
        _require_suffix(number, row.prompt_length, tokens)
        sampled = torch.zeros(tokens, dtype=torch.bool)
        for start, stop in [(row.prompt_length, tokens)] if row.sampled is None else row.sampled:
            _require(start < stop <= tokens, number, f"has the sampled span [{start}, {stop}] in {tokens} tokens")
            sampled[start:stop] = True
        # one at a time: all of them at once can be a thousand times the file
        events = (_event(number, place, event, table, tokens) for place, event in enumerate(row.events))
        ids, logprobs = torch.tensor(row.ids, dtype=torch.int64), torch.tensor(row.logprobs, dtype=torch.float32)
        rollout = _rollout(number, row.prompt_length, ids, sampled, logprobs, events, table)
        experts = None if row.experts is None else experts_of(row.experts, tokens)
        rollouts.append(replace(rollout, experts=experts, selection=_fitting(number, row.selection, rollout)))
    return _recorded(path, table, rollouts)


def _fitting(number: int, made: Selection | ChosenForm | None, rollout: Rollout) -> Selection | None:
    """What queries chose, if it can have been chosen in this rollout."""
    if isinstance(made, ChosenForm):
        made = selection_of(made)
    if made is not None:
        fault = selection_fault(made, rollout.evicted_at)
        _require(fault is None, number, str(fault))
    return made


def _event(number: int, place: int, event: EventForm, table: FileHeader, tokens: int) -> Event:
    """An event's lists as booleans [H, T] per layer."""
    layers = len(event.kept)
    _require(layers == table.layers, number, f"has {layers} layers in event {place}, the file says {table.layers}")
    kept: list[Tensor | None] = []
    for layer, heads in enumerate(event.kept):
        where = f"in event {place}, layer {layer}"
        if heads is None:
            kept.append(None)
            continue
        _require(len(heads) == table.kv_heads, number, f"has {len(heads)} heads {where}, wanted {table.kv_heads}")
        mask = torch.zeros(table.kv_heads, tokens, dtype=torch.bool)
        for head, entries in enumerate(heads):
            _require(len(set(entries)) == len(entries), number, f"names an entry twice {where}, head {head}")
            _require(max(entries, default=0) < tokens, number, f"names an entry beyond its end {where}, head {head}")
            mask[head, entries] = True
        kept.append(mask)
    return Event(event.query, kept)


def _from_tensors(path: Path, table: TensorFile, file: Any) -> RecordedRollouts:
    rollouts, lengths, names = [], list[int](), set(file.keys())
    for number, row in enumerate(table.rollouts):
        kinds = _TENSORS | ({"experts": (torch.int16, 3)} if f"{number}.experts" in names else {})
        # choosing [N] queries, chosen [S, A, N, k] of the S layers that choose
        kinds |= {} if row.selection is None else {"choosing": (torch.int32, 1), "chosen": (torch.int32, 4)}
        found = {name: file.get_tensor(f"{number}.{name}") for name in kinds}
        for name, (dtype, rank) in kinds.items():
            fits = found[name].dtype == dtype and found[name].dim() == rank
            _require(fits, number, f"has {name} of another type than {rank}-dimensional {dtype}")
        ids, query, kept = found["ids"], found["query"].tolist(), found["kept"]
        lengths.append(len(ids))
        _require_room(table, lengths)
        _require_suffix(number, row.prompt_length, len(ids))
        wanted = (len(query), table.layers, table.kv_heads, len(ids))
        _require(tuple(kept.shape) == wanted, number, f"has kept of shape {tuple(kept.shape)}, wanted {wanted}")
        events = [Event(time, list(sets)) for time, sets in zip(query, kept, strict=True)]
        rollout = _rollout(number, row.prompt_length, ids, found["sampled"], found["logprobs"], events, table)
        made = None
        if row.selection is not None:
            made = Selection(row.selection.unit, tuple(row.selection.layers), found["choosing"], found["chosen"])
        rollouts.append(replace(rollout, experts=found.get("experts"), selection=_fitting(number, made, rollout)))
    return _recorded(path, table, rollouts)


def _rollout(
    number: int,
    prompt_length: int,
    ids: Tensor,
    sampled: Tensor,
    logprobs: Tensor,
    events: Iterable[Event],
    table: FileHeader,
) -> Rollout:
    _require(len(sampled) == len(ids), number, f"has {len(sampled)} sampled flags for {len(ids)} tokens")
    drawn = int(sampled.sum())
    _require(len(logprobs) == drawn, number, f"has {len(logprobs)} log-probs for {drawn} sampled tokens")
    try:
        evicted_at = build_ledger(events, (table.layers, table.kv_heads, len(ids)))
    except _Misfit:  # names its rollout already
        raise
    except ValueError as error:
        raise ValueError(f"rollout {number}, {error}") from None
    # the last answer begins with the last run of drawn tokens
    starts = [start for start, _ in _spans(sampled.tolist())]
    start = starts[-1] if starts else prompt_length
    return Rollout(
        ids=ids,
        prompt_length=prompt_length,
        sampled=sampled,
        sampler_logprobs=torch.zeros(len(ids)).masked_scatter(sampled, logprobs),
        evicted_at=evicted_at,
        kv_bytes_peak=0,  # what the other engine allocated is not known
        kv_bytes_dense=0,
        retention=float((evicted_at[:, :, :start] > start).double().mean()),
        answer_start=start,
    )


def _recorded(path: Path, table: FileHeader, rollouts: Sequence[Rollout]) -> RecordedRollouts:
    policy = None if table.policy is None else parse_policy(table.policy)
    return RecordedRollouts(str(path), tuple(rollouts), policy, table.temperature)


def _spans(sampled: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Half-open runs of True."""
    padded = [False, *sampled, False]
    edges = [n for n in range(len(padded) - 1) if padded[n] != padded[n + 1]]
    yield from zip(edges[::2], edges[1::2], strict=True)


class _Misfit(ValueError):
    """A rollout whose parts do not fit, said with its number."""


def _require(holds: bool, number: int, otherwise: str) -> None:
    if not holds:
        raise _Misfit(f"rollout {number} {otherwise}")


def _require_room(table: FileHeader, lengths: Sequence[int]) -> None:
    """Raise ValueError where the ledgers of rollouts of these lengths would not fit."""
    entries = table.layers * table.kv_heads * sum(lengths)
    if entries > _MOST_ENTRIES:
        raise ValueError(f"{entries} cache entries, at most {_MOST_ENTRIES} can be read; split the file")


def _require_suffix(number: int, prompt_length: int, tokens: int) -> None:
    _require(prompt_length < tokens, number, f"has prompt_length {prompt_length} in {tokens} tokens")


def first_error(error: ValidationError) -> str:
    """The first mistake that a form has found, with its place, such as rollouts.2.events.0.query."""
    mistake: Mapping[str, Any] = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in mistake["loc"]) or "the file"
    place = "".join(character if character.isprintable() else "?" for character in path[:_SHOWN])
    # of these the input is whatever stands around, not a wrong value
    if mistake["type"] in ("missing", "json_invalid", "extra_forbidden"):
        return f"{place}: {mistake['msg']}"
    return f"{place} is {str(mistake['input'])[:_SHOWN]!r}: {mistake['msg']}"
