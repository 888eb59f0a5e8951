"""Kept sets over time and the ledger say the same, since an entry that left never returns; each from the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from audit.cache.ledger import NEVER


class Event(NamedTuple):
    """From query ``query`` on, of the entries before it only ``kept`` can be seen: bool [H, T] per layer.

    None for a layer in which nothing left.
    """

    query: int
    kept: Sequence[Tensor | None]


def ledger_of(events: Iterable[Event], shape: tuple[int, int, int]) -> Tensor:
    """``evicted_at`` int32 [L, H, T] of a history; raises ValueError where the history contradicts itself."""
    table = torch.full(shape, NEVER, dtype=torch.int32)
    columns, before = torch.arange(shape[2]), 0
    for number, event in enumerate(events):
        where = f"event {number} (query {event.query})"
        if not before < event.query <= shape[2]:
            raise ValueError(f"{where}: queries rise, from 1 to at most {shape[2]} tokens; the one before is {before}")
        past, before = columns < event.query, event.query
        for layer, kept in enumerate(event.kept):
            if kept is None:
                continue
            gone = table[layer] < NEVER
            _refuse(f"{where}, layer {layer}", kept & ~past, "is in the future, the query cannot have seen it")
            _refuse(f"{where}, layer {layer}", kept & gone, "returns after it had left; eviction is for good")
            table[layer][past & ~kept & ~gone] = event.query
    return table


def history(evicted_at: Tensor) -> list[Event]:
    """The kept sets of a ledger [L, H, T], one event per query at which anything left."""
    tokens = evicted_at.shape[2]
    columns, times = torch.arange(tokens), [time for time in torch.unique(evicted_at).tolist() if time <= tokens]
    return [Event(time, list((columns < time) & (evicted_at > time))) for time in times]


def _refuse(where: str, wrong: Tensor, why: str) -> None:
    if bool(wrong.any()):
        head, entry = wrong.nonzero()[0].tolist()
        raise ValueError(f"{where}, head {head}: entry {entry} {why}")
