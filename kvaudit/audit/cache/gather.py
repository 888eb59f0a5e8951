"""Entries by number: each is copied in one piece, where ``torch.gather`` goes through it element by element."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_columns(table: Tensor, order: Tensor) -> Tensor:
    """``gather_entries`` of the same places [B, K] in every head."""
    return gather_entries(table, order[:, None].expand(-1, table.shape[1], -1))


def gather_entries(table: Tensor, numbers: Tensor) -> Tensor:
    """What ``table`` [B, H, C, ...] holds at the given places [B, H, K] of its third dimension: [B, H, K, ...].

    Raises IndexError on a CPU for a place that is none; elsewhere asking would wait for the device.
    """
    batch, heads, places = table.shape[:3]
    if table.device.type == "cpu" and numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < places:
        raise IndexError(f"places {int(numbers.min())} to {int(numbers.max())} of {places}")  # of another head's
    # where each head begins, once batch, heads and places are one dimension: [B, H, 1]
    first = torch.arange(batch * heads, device=table.device).view(batch, heads, 1) * places
    return table.flatten(0, 2).index_select(0, (numbers + first).flatten()).view(*numbers.shape, *table.shape[3:])
