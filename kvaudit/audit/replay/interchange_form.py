"""The interchange form as pydantic checks it part by part, and its lists as tensors. See docs/rollout-files.md."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cache.routing import NO_EXPERT
from kvaudit.audit.cache.selection import NO_UNIT, Selection
from kvaudit.audit.replay.rollout_checks import LOGPROB_ROUNDING
from kvaudit.core.spec_parts import TemperatureOrGreedy

Index = Annotated[int, Field(strict=True, ge=0, lt=NEVER)]
Length = Annotated[int, Field(strict=True, ge=1, lt=NEVER)]
Expert = Annotated[int, Field(strict=True, ge=0, lt=2**15)]  # an int16
AxisSize = Annotated[int, Field(strict=True, ge=1, le=1024)]
Nats = Annotated[float, Field(le=LOGPROB_ROUNDING, allow_inf_nan=False)]
_MOST_CHOICES = 1 << 28  # of one rollout, lists filled up to the longest


class Form(BaseModel):
    """A part of a file; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ChoiceUnits(Form):
    """Where keys were chosen, and how many positions at once."""

    unit: Length
    layers: list[Index]


class ChoiceForm(Form):
    """One query's lists, layer by layer and head by head."""

    query: Index
    chosen: list[list[list[Index]]]  # [layers][heads][units]


class ChosenForm(ChoiceUnits):
    """Every choosing query."""

    queries: Annotated[list[ChoiceForm], Field(min_length=1)]


class EventForm(Form):
    """One eviction."""

    query: Index
    kept: list[list[list[Index]] | None]  # [layers][heads][entries], None for a layer in which nothing left


class RolloutForm(Form):
    """One rollout, in either form."""

    prompt_length: Length


class TensorRollout(RolloutForm):
    """The header of one whose tensors stand beside."""

    selection: ChoiceUnits | None = None


class JsonRollout(RolloutForm):
    """One with everything in lists."""

    ids: list[Index]
    sampled: list[tuple[Index, Index]] | None = None  # the first, and the one behind the last
    logprobs: list[Nats]
    events: list[EventForm] = []
    experts: list[list[list[Expert]]] | None = None  # [tokens - 1][blocks][experts]
    selection: ChosenForm | None = None


class FileHeader(Form):
    """What all rollouts of a file share."""

    format: Literal["kvaudit.rollouts"]
    version: Literal[1]
    layers: AxisSize
    kv_heads: AxisSize
    policy: str | None = None
    temperature: TemperatureOrGreedy | None = None


class JsonFile(FileHeader):
    """The JSON form."""

    rollouts: Annotated[list[JsonRollout], Field(min_length=1)]


class TensorFile(FileHeader):
    """The header of the safetensors form."""

    rollouts: Annotated[list[TensorRollout], Field(min_length=1)]


def selection_of(rows: ChosenForm) -> Selection:
    """The record that the lists describe; raises ValueError where they are uneven."""
    shapes = {(len(row.chosen), *map(len, row.chosen)) for row in rows.queries}
    layers, *heads = next(iter(shapes))
    if len(shapes) != 1 or layers != len(rows.layers) or len(set(heads)) != 1 or not heads[0]:
        raise ValueError(
            f"a choosing query has lists of other layers or heads than {len(rows.layers)} layers of one size"
        )
    widest = max(len(units) for row in rows.queries for heads in row.chosen for units in heads)
    if len(rows.queries) * layers * heads[0] * widest > _MOST_CHOICES:
        raise ValueError(
            f"{len(rows.queries)} choosing queries of up to {widest} units take more than {_MOST_CHOICES} numbers"
        )
    chosen = [
        [[units + [NO_UNIT] * (widest - len(units)) for units in heads] for heads in row.chosen] for row in rows.queries
    ]
    queries = torch.tensor([row.query for row in rows.queries], dtype=torch.int32)
    lists = torch.tensor(chosen, dtype=torch.int32).reshape(len(queries), layers, heads[0], widest)
    return Selection(rows.unit, tuple(rows.layers), queries, lists.permute(1, 2, 0, 3))  # [N, S, A, k] -> [S, A, N, k]


def experts_of(rows: list[list[list[int]]], tokens: int) -> Tensor:
    """Experts int16 [T, M, k] of all tokens but the last, which was drawn and not fed; ValueError where uneven."""
    if len(rows) != tokens - 1:
        raise ValueError(f"a rollout has experts of {len(rows)} tokens, wanted {tokens - 1}: not the last one's")
    sizes = {(len(blocks), *map(len, blocks)) for blocks in rows}
    if len(sizes) != 1 or len(set(next(iter(sizes))[1:])) != 1:
        raise ValueError("a rollout has experts of uneven lengths")
    return torch.nn.functional.pad(torch.tensor(rows, dtype=torch.int16), (0, 0, 0, 0, 0, 1), value=NO_EXPERT)
