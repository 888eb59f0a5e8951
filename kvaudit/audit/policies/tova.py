"""TOVA: keep the entries that the last token attends to, the same for all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tova(Evictor):
    """Rank by the last query's attention, mean over all heads; no sink or window (Oren 2024, arXiv:2401.06104)."""

    name = "tova"
    paper = "2401.06104"
    keeps = "the entries the last query attends to, the same in every head"
    ordered = False

    sink: int = 0
    window: int = 0

    @property
    def observed_queries(self) -> int:
        return 1

    def importance(self, view: View) -> Tensor:
        attention = view.attention()[:, :, 0]  # [B, H, K]
        return attention.mean(1, keepdim=True).expand_as(attention)
