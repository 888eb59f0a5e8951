"""SnapKV with more entries in the lower layers and fewer in the upper ones."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvaudit.audit.policies.snapkv import SnapKV
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

_FUNNEL = 20  # beyond the window, the last layer keeps a twentieth of the mean budget
_LONG = 2**62  # tokens of a row that is longer than any budget


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's ranking under budgets that fall linearly with depth (Cai 2024, arXiv:2406.02069).

    ``budget`` is the mean over layers. Beyond the window, layer l of L keeps max - l (max - min) / (L - 1) entries with
    min = (budget - window) / 20 and max = 2 (budget - window) - min. As in the authors' code, max is at most the tokens
    seen less the window, min grows by what max loses, and below 2 (budget - window) tokens all layers keep ``budget``.

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
    """The policy of one layer of PyramidKV; ``budget`` is the layer's for long rows, ``mean`` the mean over layers."""

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
        """Return the sum of the budgets of the first ``count`` layers, rounded."""
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
