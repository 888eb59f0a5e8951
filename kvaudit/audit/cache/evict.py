"""The arithmetic of eviction: which slots a query sees, how much attention each slot gets, and which slots are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from kvaudit.audit.cache.tensors import fusable
from kvaudit.audit.policies import Evictor, softmax

QUERY_BLOCK = 128  # queries whose attention probabilities are computed together
HOST_MASS = 1 << 22  # attention probabilities computed together on a CPU; one row's block may exceed it
MANY_QUERIES = 1024  # from here on, most of a full product would be of slots that a query cannot see


def visibility_mask(query_positions: Tensor, positions: Tensor, sliding_window: int | None) -> Tensor:
    """Return which slots each query sees, bool [B, H, Q, K], from the positions of queries and of slots.

    ``query_positions`` are [B, Q], the ``positions`` of the slots [B, H, K]. A padding query sees every slot, empty
    ones too: its output is never used, but must stay finite.
    """
    q, k = query_positions[:, None, :, None], positions[:, :, None]  # [B, 1, Q, 1] and [B, H, 1, K]
    visible = (k >= 0) & (k <= q)
    if sliding_window is not None:
        visible &= q - k < sliding_window
    return visible | (q < 0)


def attention_mass(
    query: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    positions: Tensor,
    scaling: float,
    sink_logits: Tensor | None = None,
    *,
    before: int | None = None,
    no_padding: bool = False,
) -> Tensor:
    """Return the softmax weight that each slot gets, summed over the queries and the GQA group: [B, H, K] float32.

    query [B, G*H, Q, D] at row positions [B, Q] (-1 = padding, adds nothing), keys [B, H, K, D] at positions [B, H, K].
    ``before`` promises that query n, unless it is padding, sees exactly the first ``before`` + n + 1 slots;
    ``no_padding`` promises that no query is padding. Queries are computed in blocks, and on a CPU rows too, so that
    memory stays at O(block * K).
    """
    row_size = query.shape[1] * min(QUERY_BLOCK, query.shape[2]) * keys.shape[2]  # probabilities of a block of queries
    step = max(1, HOST_MASS // max(1, row_size))
    if query.device.type == "cpu" and step < len(query):
        blocks = [slice(first, first + step) for first in range(0, len(query), step)]
        masses = [
            attention_mass(
                *(query[rows], query_positions[rows], keys[rows], positions[rows], scaling, sink_logits),
                before=before,
                no_padding=no_padding,
            )
            for rows in blocks
        ]
        return torch.cat(masses)
    keys = keys.float()
    groups = query.shape[1] // keys.shape[1]  # query heads of a KV head
    total = keys.new_zeros(keys.shape[:3])  # [B, H, K]
    for start in range(0, query.shape[2], QUERY_BLOCK):
        block, at = query[:, :, start : start + QUERY_BLOCK].float(), query_positions[:, start : start + QUERY_BLOCK]
        packed = block.reshape(len(block), -1, groups, *block.shape[2:])  # [B, H, G, q, D]
        reach = _reach(at, positions, start, before) if query.shape[2] >= MANY_QUERIES else positions.shape[2]
        logits = torch.einsum("bhgqd,bhkd->bhgqk", packed, keys[:, :, :reach]).mul_(scaling)  # [B, H, G, q, reach]
        # slots that the block's first query sees are seen by all of its queries and need no mask
        unmasked = 0 if before is None else before + start + 1
        # without a window: a layer with its own window is ranked by that alone, and no policy asks for its mass
        if unmasked < reach:
            hidden = ~visibility_mask(at, positions[:, :, unmasked:reach], None)
            logits[..., unmasked:].masked_fill_(hidden[:, :, None], -float("inf"))
        shares = softmax(logits, sink_logits)
        if not no_padding:  # the shares of padding are finite; set them to 0
            shares *= (at >= 0).float()[:, None, None, :, None]
        total[:, :, :reach] += shares.sum((2, 3))  # over group and queries
    return total


def _reach(query_positions: Tensor, positions: Tensor, start: int, before: int | None) -> int:
    """Return how many slots, from the first on, hold everything that the queries [B, Q] can see.

    The number is rounded up to a multiple of QUERY_BLOCK. ``positions`` [B, H, K] are those of the slots; ``start`` is
    the number of the first query. With ``before`` (see ``attention_mass``) nothing is read from a device.
    """
    if before is None:
        visible = (positions <= query_positions.max()).flatten(0, 1).any(0).nonzero()  # [n, 1], slot numbers
        needed = int(visible[-1]) + 1 if len(visible) else 0
    else:
        needed = before + start + query_positions.shape[1]
    # rounded up, so that products have few shapes
    return min(-(-needed // QUERY_BLOCK) * QUERY_BLOCK, positions.shape[2])


@fusable
def add_step_mass(
    mass: Tensor,
    query: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    positions: Tensor,
    scaling: float,
    sink_logits: Tensor | None,
) -> None:
    """Add to ``mass`` [B, H, K] the attention that each slot gets from one query per row.

    Uses operators of fixed shapes only, so that a GPU can capture and replay them.
    """
    mass += attention_mass(query, query_positions, keys, positions, scaling, sink_logits)


def keep_mask(
    importance: Tensor, positions: Tensor, seen: Tensor, policy: Evictor, pinned: Tensor | None = None
) -> Tensor:
    """Return which slots to keep: sink, window and pinned entries first, then those of the highest importance.

    Of equally important entries the earlier position is kept. All tensors are [B, H, K] except ``seen`` [B]; slots are
    in order of position. ``policy.budget_at(seen)`` slots are kept per head, or on average over heads that share a
    budget.
    """
    rank = _rank(importance, positions, seen, policy, pinned)  # [B, H, K]
    order = torch.sort(rank, dim=-1, descending=True, stable=True).indices
    capacities = policy.capacities(rank, policy.budget_at(seen))
    stays = torch.arange(rank.shape[-1], device=rank.device) < capacities[..., None]  # by place in ``order``
    return torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, order, stays)


@fusable
def victim_slots(
    importance: Tensor, positions: Tensor, seen: Tensor, policy: Evictor, pinned: Tensor | None = None
) -> Tensor:
    """Return the slot [B, H] of the entry to evict from each head that has one entry more than its budget.

    The entry is the one that ``keep_mask`` would drop. Unlike there, the slots need not be in order of position.
    """
    rank = _rank(importance, positions, seen, policy, pinned)
    is_lowest = rank == rank.amin(-1, keepdim=True)
    return torch.where(is_lowest, positions, -1).argmax(-1)  # the latest of a tie, as the stable sort above has it


def _rank(importance: Tensor, positions: Tensor, seen: Tensor, policy: Evictor, pinned: Tensor | None) -> Tensor:
    # the window is the last tokens of the text, whether or not all of them are still in the cache
    protected = (positions < policy.sink) | (positions >= seen[:, None, None] - policy.window)
    if pinned is not None:
        protected |= pinned
    # empty slots last, and after the protection: their position -1 is below every sink
    return importance.masked_fill(protected, float("inf")).masked_fill(positions < 0, -float("inf"))
