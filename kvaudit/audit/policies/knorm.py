"""Key norm: keep entries with small keys, to which attention tends to go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeyNorm(Evictor):
    """Keep the entries whose keys have the lowest L2 norm (Devoto 2024, arXiv:2406.11430).

    Departure: the first two layers, which the authors leave dense in some models, are compressed like the others.
    """

    name = "knorm"
    paper = "2406.11430"
    keeps = "the entries with the smallest keys"
    ordered = False

    sink: int = 0
    window: int = 0

    def importance(self, view: View) -> Tensor:
        norms: Tensor = view.keys.float().norm(dim=-1)
        return -norms
