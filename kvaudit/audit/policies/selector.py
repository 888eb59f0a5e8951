"""The contract of a selecting policy: nothing leaves, every drawn token's query attends to some of the entries.

Which ones is the policy's ``choose``; the cache attends to them and writes them into the ledger, one list per query.
Given tokens attend to everything.
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
    """Entries are chosen in units of ``unit`` consecutive positions; memory: the dense cache's, and `extremes`."""

    selects: ClassVar[bool] = True
    extremes: ClassVar[bool] = False  # wants `View.extremes`, by its units

    budget: int = 512
    chunk: int = 1024

    def __post_init__(self) -> None:
        self._at_least("budget", 1)
        self._at_least("chunk", 1)

    @property
    def unit(self) -> int:
        """Positions that are chosen together: unit n holds positions n * unit to (n + 1) * unit - 1."""
        return 1

    # units, not positions: a budget of 512 in pages of 16 is 32
    def units_at(self, seen: int) -> int:
        """How many units a query attends to whose row has seen ``seen`` tokens, its own included."""
        raise NotImplementedError

    def choose(self, view: View) -> Tensor:
        """Units that each row's newest query attends to: int64 [B, A, k], no unit twice, -1 = none, in any order.

        A is 1 for one set that all heads share, or the number of KV heads or of query heads. ``view.queries`` holds the
        newest query alone. A row's list must not depend on other rows.
        """
        raise NotImplementedError
