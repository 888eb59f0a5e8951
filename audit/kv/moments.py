"""Running mean and covariance of a row's queries before rotation: O(D^2) per head, whatever the length."""

from __future__ import annotations

import torch
from torch import Tensor

from audit.kv.rotary import Rotary
from audit.policies import Moments


class QueryMoments:
    """Sums over the queries of one layer; those at positions below ``sink`` are left out (they attend to themselves).

    Sums are float32, or float64 for a float64 model.
    """

    def __init__(self, rotary: Rotary, sink: int) -> None:
        self._rotary, self._sink = rotary, sink
        self._count = self._sum = self._outer = torch.empty(0)  # [B], [B, N, D], [B, N, D, D]

    def add(self, query: Tensor, positions: Tensor) -> None:
        """Take queries [B, N, Q, D] at positions [B, Q] (-1 = padding)."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        if not self._count.numel():
            batch, heads, _, size = query.shape
            self._count = query.new_zeros(batch, dtype=dtype)
            self._sum = query.new_zeros(batch, heads, size, dtype=dtype)
            self._outer = query.new_zeros(batch, heads, size, size, dtype=dtype)
        counted = positions >= self._sink
        plain = self._rotary.turn(query.to(dtype), -positions) * counted[:, None, :, None]
        self._count += counted.sum(1)
        self._sum += plain.sum(2)
        self._outer += plain.transpose(2, 3) @ plain

    def of(self, rows: Tensor | slice) -> Moments:
        """The moments of some rows."""
        count = self._count[rows].clamp(min=1)[:, None, None]
        mean = self._sum[rows] / count
        covariance = self._outer[rows] / count[..., None] - mean[..., None] * mean[..., None, :]
        size, dtype = mean.shape[-1], mean.dtype
        return Moments(mean, covariance, lambda start, steps: self._rotary.mean_turn(start, steps, size, dtype))

    def expand(self, group: int) -> None:
        """Repeat every row ``group`` times."""
        self._count, self._sum, self._outer = (
            t.repeat_interleave(group, 0) for t in (self._count, self._sum, self._outer)
        )

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return sum(t.numel() * t.element_size() for t in (self._count, self._sum, self._outer))
