"""The base class of selecting policies, which evict nothing; each sampled token's query attends to selected entries.

The policy's ``choose`` selects entries; the cache attends to them and records one list per query in the ledger. Prompt
tokens attend to everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvaudit.audit.policies.base import Policy
from kvaudit.audit.policies.evictor import View

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Selector(Policy):
    """Select cache entries in units, which are runs of ``unit`` consecutive positions.

    Nothing is evicted, so memory is that of the dense cache. Policies that set `extremes` need more: the minimum and
    maximum of the keys in every unit.
    """

    selects: ClassVar[bool] = True
    extremes: ClassVar[bool] = False  # needs `View.extremes`, one per unit

    budget: int = 512
    chunk: int = 1024

    def __post_init__(self) -> None:
        self._at_least("budget", 1)
        self._at_least("chunk", 1)

    @property
    def unit(self) -> int:
        """The number of positions selected together: unit n has positions n * unit to (n + 1) * unit - 1."""
        return 1

    def units_at(self, seen: int) -> int:
        """Return how many units (runs of positions) a query attends to after ``seen`` tokens, its own unit included."""
        raise NotImplementedError

    def choose(self, view: View) -> Tensor:
        """Return the units (runs of positions) that each row's newest query attends to, int64 [B, A, k].

        The units of a list are distinct and in any order; -1 means none. A is 1 for one list that all heads share, or
        the number of KV heads or of query heads. ``view.queries`` holds only the newest query. A row's list must not
        depend on other rows.
        """
        raise NotImplementedError
