"""H2O: keep the entries with the most accumulated attention, and recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HeavyHitter(Evictor):
    """Rank by attention weight, summed over all queries so far and the GQA group (Zhang 2023, arXiv:2306.14048).

    Half of the budget goes to recent entries (`window=-1`), as in the original; no first tokens are protected.
    """

    name = "h2o"
    paper = "2306.14048"
    keeps = "half by the most accumulated attention, half the most recent entries"
    ordered = False
    accumulates = True

    sink: int = 0
    window: int = -1

    def __post_init__(self) -> None:
        if self.window == -1:
            object.__setattr__(self, "window", self.budget // 2)
        super().__post_init__()

    def importance(self, view: View) -> Tensor:
        return view.mass
