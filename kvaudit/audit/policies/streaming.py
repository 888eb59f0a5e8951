"""StreamingLLM: attention sinks and a sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View
from kvaudit.core.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Streaming(Evictor):
    """Keep the first tokens (sinks) and the most recent ones (Xiao 2024, arXiv:2309.17453).

    Departure: entries keep the rotary positions they were computed at, so that one pass can replay them.
    ``reposition=true`` is the original, with positions counted inside the cache: for serving only, not replayable.
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
