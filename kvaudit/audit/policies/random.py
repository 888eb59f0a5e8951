"""A uniformly random subset: the control that every other ranking has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.draws import mix
from kvaudit.audit.policies.evictor import Evictor, View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Random(Evictor):
    """Keep the entries of highest random priority, drawn once for each (seed, row, layer, head, position).

    Fixed priorities make the kept entries a uniform sample of all entries seen, for any batch and schedule.
    """

    name = "random"
    keeps = "a uniform random sample, different in every row, layer and head"
    ordered = False
    blind = True
    seeded = True

    sink: int = 0
    window: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("seed", 0)

    def importance(self, view: View) -> Tensor:
        import torch

        heads = torch.arange(view.positions.shape[1], device=view.positions.device)[:, None]  # [H, 1]
        # mixed after every term: a plain sum would give (layer 1, head 0) and (layer 0, head 1) the same draws
        draw = mix(view.entry_keys + mix(torch.full((1,), self.seed, device=heads.device)))
        draw = mix(mix(draw + view.layer * 1_000_003) + heads)
        # 24 bits are exact in float32, so the ranking is the same on every device
        return (mix(draw + view.positions) & 0xFFFFFF).float()
