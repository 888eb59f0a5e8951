"""No compression: the dense reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvaudit.audit.policies.evictor import Evictor, View

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
