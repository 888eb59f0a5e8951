"""The policies that do not look at the content of entries: keep all, a random subset, or the first and last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.draws import mix
from kvaudit.audit.policies.evictor import Evictor, View
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Dense(Evictor):
    """Keep every entry uncompressed; also serves as the evictor of policies that evict nothing."""

    name = "none"
    keeps = "every entry"
    evicts = False
    uses = ()

    def importance(self, view: View) -> Tensor:
        raise AssertionError(f"the dense cache never evicts (layer {view.layer})")


@dataclass(frozen=True)
class Random(Evictor):
    """Keep the entries of highest random priority, drawn once for each (seed, row, layer, head, position).

    This is the control that every other ranking has to beat. Fixed priorities make the kept entries a uniform sample of
    all entries seen, for any batch and schedule.
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


@dataclass(frozen=True)
class Streaming(Evictor):
    """Keep the first tokens (sinks) and the most recent ones (Xiao 2024, arXiv:2309.17453).

    Departure: entries keep the rotary positions they were computed at, so that one pass can replay them. The original
    counts positions inside the cache: ``reposition=true``, which is for serving only and cannot be replayed.
    """

    name = "streaming"
    paper = "2309.17453"
    keeps = "the first `sink` entries and the most recent ones"
    ordered = False
    blind = True
    by_position = True

    window: int = 0
    reposition: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reposition and self.pin:
            raise SpecError("policy streaming: reposition=true counts positions inside the cache and takes no pin")

    @property
    def repositions(self) -> bool:
        return self.reposition

    @property
    def replayable(self) -> bool:
        return not self.reposition

    def importance(self, view: View) -> Tensor:
        return view.positions.float()  # the latest rank highest; the cache protects the sinks
