"""Which entries a query sees and which stay: the arithmetic between a policy's ranking and the store."""

from __future__ import annotations

import torch
from torch import Tensor

from kvaudit.audit.policies import Evictor, softmax

_INF = float("inf")
QUERY_BLOCK = 128  # queries whose attention probabilities are held at once
HOST_MASS = 1 << 22  # attention probabilities that a processor holds at once, unless a row's block is more
MANY_QUERIES = 1024  # from here on, what the first of them cannot see is most of what is computed


def visibility_mask(at: Tensor, positions: Tensor, sliding_window: int | None) -> Tensor:
    """Which slots each query sees: bool [B, H, Q, K] from query positions [B, Q] and slot positions [B, H, K].

    A padding query sees everything, empty slots included: its output is never used, but must stay finite.
    """
    q, k = at[:, None, :, None], positions[:, :, None]  # [B, 1, Q, 1] and [B, H, 1, K]
    visible = (k >= 0) & (k <= q)
    if sliding_window is not None:
        visible &= q - k < sliding_window
    return visible | (q < 0)


def attention_mass(
    query: Tensor,
    at: Tensor,
    keys: Tensor,
    positions: Tensor,
    scaling: float,
    sink_logits: Tensor | None = None,
    *,
    before: int | None = None,
    all_fed: bool = False,
) -> Tensor:
    """Softmax mass that each slot draws from the queries, summed over them and the GQA group: [B, H, K] float32.

    query [B, G*H, Q, D] at row positions [B, Q] (-1 = padding, adds nothing), keys [B, H, K, D] at positions [B, H, K].
    ``before`` promises that query n, unless it is padding, sees ``before`` + n + 1 slots, the first ones, and
    ``all_fed`` that none is padding. Blocks of queries, and on a processor of rows, keep memory at O(block * K).
    """
    of_a_row = query.shape[1] * min(QUERY_BLOCK, query.shape[2]) * keys.shape[2]  # probabilities of a block of queries
    rows = max(1, HOST_MASS // max(1, of_a_row))
    if query.device.type == "cpu" and rows < len(query):

        def of(some: slice) -> Tensor:
            own = (query[some], at[some], keys[some], positions[some])
            return attention_mass(*own, scaling, sink_logits, before=before, all_fed=all_fed)

        return torch.cat([of(slice(first, first + rows)) for first in range(0, len(query), rows)])
    keys = keys.float()
    groups = query.shape[1] // keys.shape[1]  # query heads of a KV head
    total = keys.new_zeros(keys.shape[:3])  # [B, H, K]
    for start in range(0, query.shape[2], QUERY_BLOCK):
        block, asked = query[:, :, start : start + QUERY_BLOCK].float(), at[:, start : start + QUERY_BLOCK]
        packed = block.reshape(len(block), -1, groups, *block.shape[2:])  # [B, H, G, q, D]
        reach = _reach(asked, positions, start, before) if query.shape[2] >= MANY_QUERIES else positions.shape[2]
        logits = torch.einsum("bhgqd,bhkd->bhgqk", packed, keys[:, :, :reach]).mul_(scaling)  # [B, H, G, q, reach]
        # what the first query of the block sees, all of them see: a mask of that would hide nothing
        sure = 0 if before is None else before + start + 1
        # without a window: a layer that has one of its own keeps to that, and no policy asks for its mass
        if sure < reach:
            hidden = ~visibility_mask(asked, positions[:, :, sure:reach], None)
            logits[..., sure:].masked_fill_(hidden[:, :, None], -_INF)
        shares = softmax(logits, sink_logits)
        # padding has shares that are finite; here they come to nothing
        if not all_fed:
            shares *= (asked >= 0).float()[:, None, None, :, None]
        total[:, :, :reach] += shares.sum((2, 3))  # over group and queries
    return total


def _reach(at: Tensor, positions: Tensor, start: int, before: int | None) -> int:
    """How many slots [B, H, K] to look at for queries at ``at`` [B, Q]: behind them none is early enough for any.

    ``start`` is the number of the first query, and ``before`` as ``attention_mass`` has it: then nothing is read.
    """
    if before is None:
        early = (positions <= at.max()).flatten(0, 1).any(0).nonzero()  # [n, 1], slots by number
        needed = int(early[-1]) + 1 if len(early) else 0
    else:
        needed = before + start + at.shape[1]
    # in steps, so that a product has few shapes
    return min(-(-needed // QUERY_BLOCK) * QUERY_BLOCK, positions.shape[2])


def keep_mask(
    importance: Tensor, positions: Tensor, seen: Tensor, policy: Evictor, pinned: Tensor | None = None
) -> Tensor:
    """The slots that stay: sink, window and pins first, then the highest importance, ties to the earlier position.

    All [B, H, K] but ``seen`` [B], slots in order of position; ``policy.budget_at(seen)`` True per head, in the mean
    where heads share.
    """
    rank = _rank(importance, positions, seen, policy, pinned)  # [B, H, K]
    order = torch.sort(rank, dim=-1, descending=True, stable=True).indices
    # by place in that order: as many from its front as the head may hold
    best = torch.arange(rank.shape[-1], device=rank.device) < policy.capacities(rank, policy.budget_at(seen))[..., None]
    return torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, order, best)


def victim_slots(
    importance: Tensor, positions: Tensor, seen: Tensor, policy: Evictor, pinned: Tensor | None = None
) -> Tensor:
    """The one slot per head [B, H] that ``keep_mask`` would drop from budget + 1, whatever the order of slots."""
    rank = _rank(importance, positions, seen, policy, pinned)
    lowest = rank == rank.amin(-1, keepdim=True)
    return torch.where(lowest, positions, -1).argmax(-1)  # the latest of a tie, as the stable sort above has it


def _rank(importance: Tensor, positions: Tensor, seen: Tensor, policy: Evictor, pinned: Tensor | None) -> Tensor:
    # by position in the text, whatever is held: a window of the last tokens seen
    protected = (positions < policy.sink) | (positions >= seen[:, None, None] - policy.window)
    if pinned is not None:
        protected |= pinned
    # empty slots last, after the protection: their position -1 is below every sink
    return importance.masked_fill(protected, _INF).masked_fill(positions < 0, -_INF)
