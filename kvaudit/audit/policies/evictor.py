"""The contract of an evicting policy: which entries stay when the cache is over budget, and what it sees of them.

A policy ranks; the template around it (audit/cache/cache.py) protects sink and window, cuts to budget, moves the
tensors and writes the ledger.
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

PHASES = ("prefill", "decode", "both")


class Moments(NamedTuple):
    """Mean [B, G*H, D] and covariance [B, G*H, D, D] of a row's queries before rotation, and how rotation goes on.

    ``turn(start, count)`` is the mean rotation [B, D, D] over positions start .. start + count - 1, start [B].
    """

    mean: Tensor
    covariance: Tensor
    turn: Callable[[Tensor, int], Tensor]


class Centres(NamedTuple):
    """Mean [B, G*H, D] of a row's queries before rotation and mean length [B, G*H, F] of pairs that turn together.

    ``turn(start, steps)`` is the mean rotation [B, D, D] over positions start + steps, start [B] and steps [n];
    ``lengths(x)`` those of the F pairs of any x [..., D].
    """

    mean: Tensor
    length: Tensor
    turn: Callable[[Tensor, Tensor], Tensor]
    lengths: Callable[[Tensor], Tensor]


class Extremes(NamedTuple):
    """The lowest and the highest number of each channel among the keys of a unit of positions: [B, H, U, D] each.

    U is at least the units of the longest row; what a unit that a row has not reached holds says nothing.
    """

    low: Tensor
    high: Tensor


class View(NamedTuple):
    """What a policy sees of one layer's cache when it ranks. K is the number of slots, W of remembered queries.

    Slots are in order of position unless the policy does not care (`ordered`); a slot whose position is -1 is empty
    and its importance is ignored.
    """

    layer: int
    keys: Tensor  # [B, H, K, D], rotary applied
    values: Tensor  # [B, H, K, D]
    positions: Tensor  # [B, H, K] int, -1 = empty
    seen: Tensor  # [B] tokens seen so far
    queries: Tensor  # [B, G*H, W, D] the last W queries, W = 0 unless the policy asks (`observed_queries`)
    query_positions: Tensor  # [B, W], -1 = none
    mass: Tensor  # [B, H, K] float32 accumulated attention, zeros unless the policy asks (`accumulates`)
    scaling: float  # what q k is multiplied by before softmax, 1 / sqrt(D) in most models
    entry_keys: Tensor  # int64, broadcasts to [B, H, K]: the number of the row an entry was made for, for seeded draws
    moments: Moments | None = None  # of all queries so far, where the policy asks (`moments`)
    sink_logits: Tensor | None = None  # [G*H] what the model itself puts beside every query's logits, if anything
    centres: Centres | None = None  # of all queries so far, where the policy asks (`centres`)
    longest: int | None = None  # the largest of `seen`, where the host knows it: to ask would wait for the device
    extremes: Extremes | None = None  # of all keys so far, where the policy asks (`extremes`)

    def attention(self) -> Tensor:
        """Softmax of the remembered queries over the slots each may see, mean over the GQA group: [B, H, W, K].

        Rows of absent queries are zero. A sink of the model takes its share, as in the model's own attention.
        """
        import torch

        batch, kv_heads, _, size = self.keys.shape
        window = self.queries.shape[2]
        queries = self.queries.float().reshape(batch, kv_heads, -1, window, size)  # [B, H, G, W, D]
        logits = torch.einsum("bhgwd,bhkd->bhgwk", queries, self.keys.float()) * self.scaling  # [B, H, G, W, K]
        at = self.query_positions[:, None, :, None]  # [B, 1, W, 1], the position of each query
        visible = (self.positions[:, :, None] >= 0) & (self.positions[:, :, None] <= at)  # [B, H, W, K]
        logits = logits.masked_fill(~visible[:, :, None], float("-inf"))
        # a query that sees nothing has only -inf, of which softmax makes NaN
        return softmax(logits, self.sink_logits).nan_to_num(0.0).mean(2)


def softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Shares [B, H, G, Q, K] of logits of that shape; ``sink_logits`` [G*H] count in the sum and are given nothing."""
    import torch

    if sink_logits is None:
        return logits.softmax(-1)
    batch, heads, _, queries, _ = logits.shape
    sink = sink_logits.to(logits.dtype).reshape(1, heads, -1, 1, 1).expand(batch, -1, -1, queries, 1)  # [B, H, G, Q, 1]
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class Evictor(Policy):
    """Keep at most ``budget`` entries per KV head, ``sink`` first and ``window`` last of them protected.

    ``interval``: decode steps of a row between evictions. ``phase``: evict after chunks of given tokens (prefill and
    later messages), while decoding, or both. ``chunk``: given tokens enter the cache this many at a time, each chunk
    attending before it is evicted from; memory is bounded by budget + max(chunk, interval). ``pin``: roles whose tokens
    never leave, such as ``system`` or ``system/tool``; they count towards the budget.
    """

    evicts: ClassVar[bool] = True
    accumulates: ClassVar[bool] = False  # wants `View.mass`
    moments: ClassVar[bool] = False  # wants `View.moments`
    centres: ClassVar[bool] = False  # wants `View.centres`
    shares_heads: ClassVar[bool] = False  # a layer's heads keep H * budget in all, each as many as `capacities` says
    seeded: ClassVar[bool] = False  # draws by `View.entry_keys`, so that a record needs them
    blind: ClassVar[bool] = False  # ranks by positions and entry keys alone: alike to the last entry every time
    by_position: ClassVar[bool] = False  # ranks by positions alone: every layer and head loses the same entries
    ordered: ClassVar[bool] = True  # ranks by neighbourhood: slots must come in order of position

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
        if self.phase not in PHASES:
            raise SpecError(f"policy {self.name}: phase={self.phase!r}, wanted one of {', '.join(PHASES)}")
        for role in self.pinned_roles:
            if role not in TOKEN_ROLES:
                raise UnknownName(f"role in pin of policy {self.name}", role, [str(known) for known in TOKEN_ROLES])
        # one order, each role once: equal policies have one text and one hash
        object.__setattr__(self, "pin", "/".join(str(role) for role in TOKEN_ROLES if role in self.pinned_roles))
        if self.evicts and self.budget < self.sink + self.window:
            raise SpecError(
                f"policy {self.name}: budget={self.budget} is below sink + window = {self.sink} + {self.window}; "
                "raise the budget or lower sink or window"
            )

    @property
    def repositions(self) -> bool:
        """Whether positions are counted inside the cache."""
        return False

    @property
    def needs_rotary(self) -> bool:
        """Whether the cache must be able to turn keys and queries itself."""
        return self.moments or self.centres or self.repositions

    @property
    def across_layers(self) -> bool:
        """Whether layers evict together, after the last one attended, and go by what they `agreed` on."""
        return False

    @property
    def pinned_roles(self) -> tuple[str, ...]:
        return tuple(self.pin.split("/")) if self.pin else ()

    @property
    def observed_queries(self) -> int:
        """How many of the last queries the cache remembers for this policy."""
        return 0

    @property
    def needs_queries(self) -> bool:
        """Whether the cache looks at queries for this policy beside letting them attend."""
        return self.accumulates or self.moments or self.centres or self.observed_queries > 0

    def budget_at(self, seen: Tensor) -> Tensor:
        """Entries per KV head that an eviction leaves in this layer once rows have seen so many tokens, elementwise."""
        import torch

        return torch.full_like(seen, self.budget)

    def capacities(self, rank: Tensor, budgets: Tensor) -> Tensor:
        """Entries that every head keeps, int64 [B, H] of sum H * ``budgets`` [B].

        ``rank`` [B, H, K] is the importance with inf where an entry is protected and -inf where a slot is empty.
        """
        return budgets[:, None].expand(rank.shape[:2])

    def importance(self, view: View) -> Tensor:
        """Rank of every slot, higher stays: [B, H, K] float32. Protected and empty slots may hold anything finite."""
        raise NotImplementedError

    def agreed(self, importances: Sequence[Tensor]) -> Sequence[Tensor]:
        """The ranks that layers go by, from the importance of each; slots are alike in all where they agree."""
        return importances
