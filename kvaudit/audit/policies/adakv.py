"""AdaKV: SnapKV whose heads share a layer's budget, so that heads with dispersed attention keep more entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.snapkv import SnapKV
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

_INF = float("inf")
_ROUNDED_DIGITS = 9  # so that 0.8 * 15 + 0.2 * 15 is 15


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV's ranking under budgets per head (Feng 2024, arXiv:2407.11550).

    A layer of H heads keeps H * ``budget`` entries. Beyond protected entries, a head keeps alpha * the mean
    over heads (the safeguard) + (1 - alpha) * the number of its entries among the best H * budget of all heads.

    Departures: capacities are rounded so that they sum to H * budget (largest remainders up), while the authors round
    each separately. If a head holds less than its share, the rest goes to the best other entries of all heads.
    """

    name = "adakv"
    paper = "2407.11550"
    keeps = "as snapkv, with a budget shared by a layer's heads: more where attention is spread"
    shares_heads = True

    alpha: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alpha", self.alpha + 0.0)  # -0.0 is 0.0
        if not 0 <= self.alpha <= 1:
            raise SpecError(f"policy adakv: alpha={self.alpha}, wanted a share from 0 to 1")

    def capacities(self, rank: Tensor, budgets: Tensor) -> Tensor:
        import torch

        protected = rank == _INF  # [B, H, K]
        free, mean = rank.masked_fill(protected, -_INF), budgets[:, None] - protected.sum(-1)  # [B, H]
        total = mean.sum(1)  # [B], entries to share beyond the protected ones
        best = _best(free, total).sum(-1)  # [B, H], how many of the layer's best entries each head has
        # [B, H], unrounded; they sum to total
        shares = ((1 - self.alpha) * best.double() + self.alpha * mean).round(decimals=_ROUNDED_DIGITS)
        # as many heads round up as the floors fall short of the total
        up = (
            _places((shares - shares.floor()).round(decimals=_ROUNDED_DIGITS))
            < (total - shares.floor().sum(1))[:, None]
        )
        assigned = torch.minimum(shares.floor().long() + up, (free > -_INF).sum(-1))  # no more than the head holds
        # [B, H, K], entries that no head has taken yet: the best of them fill up to H * budget
        remaining = free.masked_fill(_places(free) < assigned[..., None], -_INF)
        return protected.sum(-1) + assigned + _best(remaining, total - assigned.sum(1)).sum(-1)


def _best(rank: Tensor, count: Tensor) -> Tensor:
    """Return whether each slot is among the ``count`` [B] highest of all heads: bool [B, H, K].

    Of equal ranks the earlier slot is higher, then the lower head.
    """
    batch, heads, slots = rank.shape
    # slot before head, [B, 1, K * H], so that a stable sort breaks ties in this order
    places = _places(rank.transpose(1, 2).reshape(batch, 1, -1)).reshape(batch, slots, heads).transpose(1, 2)
    return (places < count[:, None, None]) & (rank > -_INF)


def _places(rank: Tensor) -> Tensor:
    """Return how many slots rank above each slot, along the last dimension."""
    import torch

    order = torch.sort(rank, dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(rank.shape[-1], device=rank.device).expand_as(order)
    # the inverse of the sorting permutation: slot order[i] has i slots before it
    return torch.empty_like(order).scatter_(-1, order, ranks)
