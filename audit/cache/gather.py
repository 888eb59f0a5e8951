"""Entries by number: each is copied in one piece, where ``torch.gather`` goes through it element by element."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_entries(table: Tensor, numbers: Tensor) -> Tensor:
    """What ``table`` [B, H, C, ...] holds at the given places [B, H, K] of its third dimension: [B, H, K, ...]."""
    batch, heads, places = table.shape[:3]
    first = torch.arange(batch * heads, device=table.device).view(batch, heads, 1) * places
    return table.flatten(0, 2).index_select(0, (numbers + first).flatten()).view(*numbers.shape, *table.shape[3:])
