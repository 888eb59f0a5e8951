"""SnapKV with more entries in the lower layers and fewer in the upper ones."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from audit.errors import SpecError
from audit.policies.snapkv import SnapKV

FUNNEL = 20  # the uppermost layer keeps a twentieth of the mean budget beyond the window


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's ranking under budgets that fall linearly with depth (Cai 2024, arXiv:2406.02069).

    ``budget`` is the mean over layers. Beyond the window, layer l of L keeps max - l (max - min) / (L - 1) entries with
    min = (budget - window) / 20 and max = 2 (budget - window) - min; they are rounded so that they sum to L * budget.
    """

    name: ClassVar[str] = "pyramidkv"
    paper: ClassVar[str] = "2406.02069"
    keeps: ClassVar[str] = "as snapkv, with budgets that shrink from the first layer to the last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink > (self.budget - self.window) // FUNNEL:
            raise SpecError(
                f"policy pyramidkv: sink={self.sink} does not fit the last layer, which keeps "
                f"(budget - window) / {FUNNEL} = {(self.budget - self.window) // FUNNEL} entries beyond the window"
            )

    def for_layer(self, layer: int, layers: int) -> SnapKV:
        shared = {field.name: getattr(self, field.name) for field in fields(SnapKV)}
        return SnapKV(**shared | {"budget": self._total(layer + 1, layers) - self._total(layer, layers)})

    def _total(self, count: int, layers: int) -> int:
        """Entries of the first ``count`` layers together."""
        beyond = self.budget - self.window
        if layers == 1:
            return count * self.budget
        least = beyond / FUNNEL
        most = 2 * beyond - least
        ramp = count * most - (most - least) / (layers - 1) * count * (count - 1) / 2
        return count * self.window + round(ramp)
