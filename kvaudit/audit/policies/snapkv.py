"""SnapKV's ranking by the attention of the last queries, under one budget, or under budgets by head or by layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

_INF = float("inf")
_ROUNDED_DIGITS = 9  # so that 0.8 * 15 + 0.2 * 15 is 15
_FUNNEL = 20  # of PyramidKV: beyond the window, the last layer keeps a twentieth of the mean budget
_LONG = 2**62  # tokens of a row that is longer than any budget


@dataclass(frozen=True)
class SnapKV(Evictor):
    """Rank by mean attention of the last ``window`` queries, pooled along positions (Li 2024, arXiv:2404.14469).

    The mean also runs over the GQA group. The original compresses the prompt once (`phase=prefill`); with `both`, the
    default, decoding is compressed by the same rule every ``interval`` tokens, so that memory stays bounded.
    """

    name = "snapkv"
    paper = "2404.14469"
    keeps = "the entries the last `window` queries attend to, and that window"

    sink: int = 0
    window: int = 32
    interval: int = 128
    kernel: int = 7
    pool: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("window", "kernel"):
            self._at_least(field, 1)
        if self.kernel % 2 == 0:
            raise SpecError(f"policy snapkv: kernel={self.kernel}, wanted an odd number")
        self._one_of("pool", ("max", "avg"))

    @property
    def observed_queries(self) -> int:
        return self.window

    def importance(self, view: View) -> Tensor:
        from torch.nn.functional import avg_pool1d, max_pool1d

        attention = view.attention()  # [B, H, W, K]
        present = (view.query_positions >= 0).sum(-1).clamp(min=1)  # [B]
        score = attention.sum(2) / present[:, None, None]  # [B, H, K]; rows of absent queries are 0
        # the window stays anyway; pooling must not spread its mass to the entries before it
        in_window = view.positions >= (view.seen[:, None, None] - self.window)
        score = score.masked_fill(in_window | (view.positions < 0), 0.0)
        if self.pool == "max":
            return max_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)  # [B, H, K], padded with -inf
        # [B, H, K], padded with zeros, which count in the mean
        return avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2, count_include_pad=True)


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV's ranking under budgets per head (Feng 2024, arXiv:2407.11550).

    A layer of H heads keeps H * ``budget`` entries; heads with dispersed attention keep more of them. Each head keeps
    its protected entries and alpha * (budget - protected) + (1 - alpha) * n others. Here n is the number of its
    unprotected entries among the best H * budget of the layer, and the first term is the safeguard.

    Departures: the numbers are rounded so that a layer keeps H * budget (largest remainders up), while the authors
    round each separately. If a head holds fewer entries than its share, the best other entries of all heads take the
    rest.
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
    """Return whether each slot is among the best ``count`` [B] slots of all heads: bool [B, H, K].

    Of equal ranks the earlier slot is better, then the lower head.
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


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's ranking under budgets that fall linearly with depth (Cai 2024, arXiv:2406.02069).

    ``budget`` is the mean over layers. Beyond the window, layer l of L keeps max - l (max - min) / (L - 1) entries with
    min = (budget - window) / 20 and max = 2 (budget - window) - min. As in the authors' code, max is never more than
    the tokens seen minus the window, and what it loses is added to min. While a row has fewer than 2 (budget - window)
    tokens, all its layers keep ``budget``.

    Departures: tokens seen replace the prompt's length, so that decoding and later turns follow the same rule. Budgets
    are rounded so that they sum to L * budget, while the authors' whole steps leave up to L / 2 more per layer.
    """

    name = "pyramidkv"
    paper = "2406.02069"
    keeps = "as snapkv, with budgets that shrink from the first layer to the last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink > (self.budget - self.window) // _FUNNEL:
            raise SpecError(
                f"policy pyramidkv: sink={self.sink} does not fit the last layer, which keeps "
                f"(budget - window) / {_FUNNEL} = {(self.budget - self.window) // _FUNNEL} entries beyond the window"
            )

    def for_layer(self, layer: int, layers: int) -> SnapKV:
        shared = {field.name: getattr(self, field.name) for field in fields(SnapKV)}
        return _Layer(**shared, mean=self.budget, layer=layer, layers=layers)


@dataclass(frozen=True)
class _Layer(SnapKV):
    """The policy of one layer of PyramidKV.

    ``mean`` is the budget that a layer has on average, ``budget`` the budget of this layer once rows are long.
    """

    mean: int = 0
    layer: int = 0
    layers: int = 1

    def __post_init__(self) -> None:
        import torch

        # checks and forecasts read the budget of a row that is long enough for the full slope
        object.__setattr__(self, "budget", int(self._sloped(torch.tensor(_LONG))))
        super().__post_init__()

    def budget_at(self, seen: Tensor) -> Tensor:
        import torch

        is_short = seen < 2 * (self.mean - self.window)  # all layers keep the mean
        return torch.where(is_short, self.mean, self._sloped(seen))

    def _sloped(self, seen: Tensor) -> Tensor:
        # differences of rounded sums, so that the budgets add up exactly
        return self._total(self.layer + 1, seen) - self._total(self.layer, seen)

    def _total(self, count: int, seen: Tensor) -> Tensor:
        """Return the sum of the budgets of the first ``count`` layers for each row, int64.

        ``seen`` are the tokens of each row.
        """
        import torch

        beyond = self.mean - self.window  # of a layer, on average
        if self.layers == 1:
            return torch.full_like(seen, count * self.mean)
        # unrounded entries beyond the window of the first and of the last layer; their mean is ``beyond``
        most = (seen - self.window).double().clamp(max=2 * beyond - beyond / _FUNNEL)
        least = 2 * beyond - most
        # an arithmetic series: layer l has most - l * step beyond its window
        ramp = count * most - (most - least) / (self.layers - 1) * count * (count - 1) / 2
        return count * self.window + ramp.round().long()
