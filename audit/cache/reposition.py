"""Positions counted inside the cache: what StreamingLLM's original does, for serving only."""

from __future__ import annotations

import torch
from torch import Tensor

from audit.cache.rotary import Rotary
from audit.cache.store import Store


class MovingSinks:
    """Turns a layer's sink keys towards the recent ones by as many positions as were evicted between them.

    All recent entries and the queries move alike, so only the sinks have to. They are turned from their first state
    every time, so that rounding does not add up.
    """

    def __init__(self, rotary: Rotary, sink: int) -> None:
        self._rotary, self._sink = rotary, sink
        self._first = torch.empty(0)  # [B, H, sink, D]
        self._known = torch.empty(0, dtype=torch.bool)  # [B] rows whose first state is held

    def move(self, store: Store, rows: Tensor | slice, *, by: Tensor) -> None:
        """Set the sinks of some rows, in their first slots, ``by`` [b] positions further than they were computed at."""
        keys = store.entries(slice(None))[0][:, :, : self._sink]
        if not self._known.numel():
            self._first = keys.clone()
            self._known = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
        fresh = torch.zeros_like(self._known)
        fresh[rows] = True
        fresh &= ~self._known
        self._first[fresh] = keys[fresh]
        self._known |= fresh
        first = self._first[rows]
        store.overwrite_keys(rows, self._sink, self._rotary.turn(first, by[:, None].expand(-1, first.shape[2])))

    def expand(self, group: int) -> None:
        """Repeat every row ``group`` times."""
        self._first, self._known = self._first.repeat_interleave(group, 0), self._known.repeat_interleave(group, 0)

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return self._first.numel() * self._first.element_size()
