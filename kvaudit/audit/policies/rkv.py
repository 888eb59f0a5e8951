"""R-KV: keep entries that the last queries attend to and that later keys do not repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

_SIMILAR = 0.5  # cosine above which two keys count as the same content
_KEY_BLOCK = 128  # keys that are compared with all others at once


@dataclass(frozen=True)
class RKV(Evictor):
    """Rank by weight * I - (1 - weight) * R, importance I and redundancy R (Cai 2025, arXiv:2505.24133).

    I is the attention of the last ``window`` queries to the entries before the window: the softmax of the largest logit
    in the GQA group, averaged over the queries, then max-pooled over ``kernel`` entries. R is, in each head, the
    softmax of an entry's mean cosine to all keys. In these means each key leaves out one entry: the latest whose cosine
    to it is above 0.5, since that entry counts as new, not as redundant.

    Departure: a key without such an entry leaves out none; the published code leaves out the first entry.
    """

    name = "rkv"
    paper = "2505.24133"
    keeps = "entries that are attended to and unlike what comes later, and the last `window`"

    sink: int = 0
    window: int = 8
    interval: int = 128
    kernel: int = 7
    weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight", self.weight + 0.0)  # -0.0 is 0.0
        for field in ("window", "kernel"):
            self._at_least(field, 1)
        if self.kernel % 2 == 0 or not 0 <= self.weight <= 1:
            raise SpecError(
                f"policy rkv: kernel={self.kernel}, weight={self.weight}; wanted an odd kernel, a weight in [0, 1]"
            )

    @property
    def observed_queries(self) -> int:
        return self.window

    def importance(self, view: View) -> Tensor:
        from torch.nn.functional import max_pool1d

        before = (view.positions >= 0) & (view.positions < view.seen[:, None, None] - self.window)  # [B, H, K]
        attended = max_pool1d(self._window_attention(view, before), self.kernel, stride=1, padding=self.kernel // 2)
        return self.weight * attended - (1 - self.weight) * _redundancy(view.keys, view.positions >= 0)

    def _window_attention(self, view: View, before: Tensor) -> Tensor:
        """Return the mean attention [B, H, K] of the last ``window`` queries to the entries marked by ``before``."""
        import torch

        batch, heads, _, size = view.keys.shape
        queries = view.queries.float().reshape(batch, heads, -1, view.queries.shape[2], size)  # [B, H, G, W, D]
        logits = torch.einsum("bhgwd,bhkd->bhgwk", queries, view.keys.float()).amax(2) * view.scaling  # [B, H, W, K]
        shares = logits.masked_fill(~before[:, :, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        present = view.query_positions >= 0  # [B, W]
        return (shares * present[:, None, :, None]).sum(2) / present.sum(1).clamp(min=1)[:, None, None]


def _redundancy(keys: Tensor, present: Tensor) -> Tensor:
    """Return the redundancy of each entry [B, H, K]: the softmax of its mean cosine to all keys; 0 for empty slots.

    Computed in blocks of keys, in memory O(_KEY_BLOCK * K).
    """
    import torch
    from torch.nn.functional import normalize

    # [B, H, K, D]; an empty slot is 0 and similar to nothing
    unit = normalize(keys.float(), dim=-1) * present[..., None]
    columns = torch.arange(keys.shape[2], device=keys.device)
    total = unit.new_zeros(unit.shape[:3])  # [B, H, K]
    for start in range(0, keys.shape[2], _KEY_BLOCK):
        block = slice(start, start + _KEY_BLOCK)
        # [B, H, block, K], without a key's cosine to itself
        cosine = (unit[:, :, block] @ unit.transpose(2, 3)).masked_fill(columns == columns[block, None], 0.0)
        latest = torch.where(cosine > _SIMILAR, columns, -1).amax(-1, keepdim=True)  # [B, H, block, 1]
        total += cosine.masked_fill(columns == latest, 0.0).sum(2)
    mean = total / present.sum(-1, keepdim=True)  # [B, H, K]
    return mean.masked_fill(~present, float("-inf")).softmax(-1)
