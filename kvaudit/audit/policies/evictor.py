"""The base class of evicting policies, which rank the entries of a cache that holds more than its budget.

The cache (audit/cache/cache.py) does the rest: it protects sink (first entries) and window (last ones), cuts to budget,
moves the tensors and writes the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvaudit.audit.policies.base import Policy
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.records import TOKEN_ROLES

if TYPE_CHECKING:
    from torch import Tensor


class Moments(NamedTuple):
    """Mean [B, G*H, D] and covariance [B, G*H, D, D] of a row's queries before rotary embedding.

    ``turn(start, count)`` returns the mean rotation [B, D, D] over ``count`` positions per row, from ``start`` [B] on.
    """

    mean: Tensor
    covariance: Tensor
    turn: Callable[[Tensor, int], Tensor]


class Centres(NamedTuple):
    """Mean [B, G*H, D] of a row's queries before rotary embedding, and mean length [B, G*H, F] of their F rotary pairs.

    ``turn(start, steps)`` returns the mean rotation [B, D, D] over n positions per row: ``start`` [B] plus each of
    ``steps`` [n]. ``lengths(x)`` returns the lengths [..., F] of the rotary pairs of any x [..., D].
    """

    mean: Tensor
    length: Tensor
    turn: Callable[[Tensor, Tensor], Tensor]
    lengths: Callable[[Tensor], Tensor]


class Extremes(NamedTuple):
    """The minimum and maximum of each channel over the keys of each page (a block of positions): [B, H, U, D] each.

    U is at least the number of pages of the longest row; pages that a row has not reached hold arbitrary numbers.
    """

    low: Tensor
    high: Tensor


class View(NamedTuple):
    """What a policy sees of one layer's cache when it ranks entries: K slots, and the last W queries.

    Slots are in order of position unless the policy sets `ordered` to False. A slot at position -1 is empty; the rank
    that the policy gives it is ignored.
    """

    layer: int
    keys: Tensor  # [B, H, K, D], rotary applied
    values: Tensor  # [B, H, K, D]
    positions: Tensor  # [B, H, K] int, -1 = empty
    seen: Tensor  # [B] tokens seen so far
    queries: Tensor  # [B, G*H, W, D] the last W queries, W = `observed_queries` of the policy
    query_positions: Tensor  # [B, W], -1 = none
    mass: Tensor  # [B, H, K] float32 accumulated attention, zeros unless the policy `accumulates`
    scaling: float  # the factor of q k before softmax, 1 / sqrt(D) in most models
    entry_keys: Tensor  # int64, broadcasts to [B, H, K]: the key of the row each entry was made for, for seeded draws
    moments: Moments | None = None  # of all queries so far, if the policy sets `moments`
    sink_logits: Tensor | None = None  # [G*H] the model's learned attention sinks, if it has them
    centres: Centres | None = None  # of all queries so far, if the policy sets `centres`
    longest: int | None = None  # the largest of `seen`, if the host knows it without waiting for the device
    extremes: Extremes | None = None  # of all keys so far, if the policy sets `extremes`

    def attention(self) -> Tensor:
        """Return the attention of the last W queries to each slot, mean over the GQA group: [B, H, W, K].

        For missing queries it is zero. If there are ``sink_logits``, they take a share of every query's attention, as
        in the model itself.
        """
        import torch

        batch, kv_heads, _, size = self.keys.shape
        window = self.queries.shape[2]
        queries = self.queries.float().reshape(batch, kv_heads, -1, window, size)  # [B, H, G, W, D]
        logits = torch.einsum("bhgwd,bhkd->bhgwk", queries, self.keys.float()) * self.scaling  # [B, H, G, W, K]
        at = self.query_positions[:, None, :, None]  # [B, 1, W, 1], the position of each query
        visible = (self.positions[:, :, None] >= 0) & (self.positions[:, :, None] <= at)  # [B, H, W, K]
        logits = logits.masked_fill(~visible[:, :, None], float("-inf"))
        # softmax of a query that sees nothing is NaN
        return softmax(logits, self.sink_logits).nan_to_num(0.0).mean(2)


def softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Return the softmax [B, H, G, Q, K] of logits; ``sink_logits`` [G*H] add to its denominator only."""
    import torch

    if sink_logits is None:
        return logits.softmax(-1)
    batch, heads, _, queries, _ = logits.shape
    sink = sink_logits.to(logits.dtype).reshape(1, heads, -1, 1, 1).expand(batch, -1, -1, queries, 1)  # [B, H, G, Q, 1]
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class Evictor(Policy):
    """Keep at most ``budget`` entries per KV head; the first ``sink`` and the last ``window`` tokens are protected.

    ``interval``: decode steps of a row between evictions. ``phase``: evict after chunks of prompt tokens (prefill and
    later messages), while decoding, or both. ``chunk``: the number of prompt tokens that enter the cache at once; a
    chunk attends before the eviction, so memory is bounded by budget + max(chunk, interval). ``pin``: roles whose
    tokens are never evicted, such as ``system`` or ``system/tool``; they count towards the budget.
    """

    evicts: ClassVar[bool] = True
    accumulates: ClassVar[bool] = False  # needs `View.mass`
    moments: ClassVar[bool] = False  # needs `View.moments`
    centres: ClassVar[bool] = False  # needs `View.centres`
    shares_heads: ClassVar[bool] = False  # heads share H * budget entries, split by `capacities`
    seeded: ClassVar[bool] = False  # draws random numbers by `View.entry_keys`
    blind: ClassVar[bool] = False  # ranks by positions and entry keys alone, so rounding changes nothing
    by_position: ClassVar[bool] = False  # ranks by positions alone: all layers and heads lose the same entries
    ordered: ClassVar[bool] = True  # looks at neighbouring slots, which must be in order of position

    budget: int = 512
    sink: int = 4
    window: int = 32
    interval: int = 1
    phase: str = "both"
    chunk: int = 1024
    pin: str = ""

    def __post_init__(self) -> None:
        for field in ("budget", "interval", "chunk"):
            self._at_least(field, 1)
        for field in ("sink", "window"):
            self._at_least(field, 0)
        self._one_of("phase", ("prefill", "decode", "both"))
        for role in self.pinned_roles:
            if role not in TOKEN_ROLES:
                raise UnknownName(f"role in pin of policy {self.name}", role, [*map(str, TOKEN_ROLES)])
        # one spelling, so that equal policies have one hash
        object.__setattr__(self, "pin", "/".join(str(role) for role in TOKEN_ROLES if role in self.pinned_roles))
        if self.evicts and self.budget < self.sink + self.window:
            raise SpecError(
                f"policy {self.name}: budget={self.budget} is below sink + window = {self.sink} + {self.window}; "
                "raise the budget or lower sink or window"
            )

    @property
    def repositions(self) -> bool:
        """Whether an entry's rotary position is its place among the entries in the cache, not its place in the text."""
        return False

    @property
    def needs_rotary(self) -> bool:
        """Whether the cache needs the model's rotary embedding, to rotate vectors itself."""
        return self.moments or self.centres or self.repositions

    @property
    def across_layers(self) -> bool:
        """Whether layers evict together, after the last of them has attended, by the ranks that ``agreed`` returns."""
        return False

    @property
    def pinned_roles(self) -> tuple[str, ...]:
        return tuple(self.pin.split("/")) if self.pin else ()

    @property
    def observed_queries(self) -> int:
        """The number of last queries that the cache stores for this policy."""
        return 0

    @property
    def needs_queries(self) -> bool:
        """Whether the cache stores queries, or statistics of queries, for this policy."""
        return self.accumulates or self.moments or self.centres or self.observed_queries > 0

    def budget_at(self, seen: Tensor) -> Tensor:
        """Return how many entries per KV head an eviction keeps after ``seen`` tokens, elementwise."""
        import torch

        return torch.full_like(seen, self.budget)

    def capacities(self, rank: Tensor, budgets: Tensor) -> Tensor:
        """Return how many entries every head keeps, int64 [B, H]; they sum to H * ``budgets`` [B].

        ``rank`` [B, H, K] is the importance, inf for protected entries and -inf for empty slots.
        """
        return budgets[:, None].expand(rank.shape[:2])

    def importance(self, view: View) -> Tensor:
        """Return the rank of every slot [B, H, K], float32 and finite; entries of the highest ranks are kept.

        Ranks of protected entries and of empty slots are ignored.
        """
        raise NotImplementedError

    def agreed(self, importances: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return each layer's scores to evict by, from the importances [B, H, K] of layers that evict together.

        By default these are the layer's own importances; a policy may combine those of several layers.
        """
        return importances
