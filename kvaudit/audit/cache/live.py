"""Bytes that a row's entries take, counted entry by entry: no slack, no positions, no accumulated mass.

What was allocated has all of these on top, uncompressed too, and the moment of a prefill at which a layer is whole
before it is cut. A policy is compared with no compression counted the same way: allocated with allocated, live with
live.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class EntryBytes(NamedTuple):
    """Bytes of one entry of one head, keys and values: as they arrive, and as codes with their parameters."""

    exact: tuple[float, float] = (0.0, 0.0)
    coded: tuple[float, float] = (0.0, 0.0)


def live_peak(
    evicted_at: Tensor, entries: Sequence[EntryBytes], coded_at: tuple[Tensor, Tensor] | None, sampled: Tensor
) -> float:
    """The most bytes that the entries of one row took at once while it was decoded.

    ``evicted_at`` [L, H, T]; ``entries`` of every layer; ``coded_at`` when keys and values became codes, [T] each.
    ``sampled`` [T] are the tokens that were decoded one by one; a row without any is asked at its end.
    """
    tokens = evicted_at.shape[2]
    arrived = torch.arange(tokens)  # [T], an entry is there from its own token on
    # bytes that come or go at each token; the last place is never
    change = torch.zeros(tokens + 1, dtype=torch.float64)
    for layer, sizes in zip(evicted_at, entries, strict=True):
        leaves_at = layer.long().clamp(max=tokens)  # [H, T]
        change[:tokens] += len(layer) * sum(sizes.exact)
        if coded_at is None:
            change -= _counted(leaves_at, torch.full(leaves_at.shape, sum(sizes.exact), dtype=torch.float64), tokens)
            continue
        for exact, coded, times in zip(sizes.exact, sizes.coded, coded_at, strict=True):
            became = torch.maximum(times.long(), arrived).clamp(max=tokens).expand_as(leaves_at)  # [H, T]
            while_there = became < leaves_at  # an entry that leaves first is never stored as codes
            change += _counted(became, while_there * float(coded - exact), tokens)
            change -= _counted(leaves_at, torch.where(while_there, float(coded), float(exact)).double(), tokens)
    held = change[:tokens].cumsum(0)  # bytes after each token
    return float(held[sampled].max() if bool(sampled.any()) else held[-1])


def _counted(at: Tensor, amounts: Tensor, tokens: int) -> Tensor:
    """The amounts summed by their places up to ``tokens``: float64 [tokens + 1]."""
    return torch.bincount(at.flatten(), weights=amounts.double().flatten(), minlength=tokens + 1)
