"""KeyDiff: keep keys that differ from the mean key, since similar keys are redundant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeyDiff(Evictor):
    """Keep the keys least similar to the mean of the normalised keys (Park 2025, arXiv:2504.15364)."""

    name = "keydiff"
    paper = "2504.15364"
    keeps = "the entries whose keys are least like the mean key"
    ordered = False

    sink: int = 0
    window: int = 0

    def importance(self, view: View) -> Tensor:
        from torch.nn.functional import cosine_similarity, normalize

        present = (view.positions >= 0)[..., None]  # [B, H, K, 1]
        keys = normalize(view.keys.float(), dim=-1)  # [B, H, K, D]; otherwise long keys would dominate the mean
        mean = (keys * present).sum(2, keepdim=True) / present.sum(2, keepdim=True)  # [B, H, 1, D]
        return -cosine_similarity(keys, mean, dim=-1)
