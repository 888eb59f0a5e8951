"""Which entries a query sees and which stay: the arithmetic between a policy's ranking and the store."""

from __future__ import annotations

import torch
from torch import Tensor

from audit.policies import Policy

INF = float("inf")


def visibility(at: Tensor, positions: Tensor, sliding_window: int | None) -> Tensor:
    """Which slots each query sees: bool [B, H, Q, K] from query positions [B, Q] and slot positions [B, H, K].

    A padding query sees everything, empty slots included: its output is never used, but must stay finite.
    """
    q, k = at[:, None, :, None], positions[:, :, None]
    visible = (k >= 0) & (k <= q)
    if sliding_window is not None:
        visible &= q - k < sliding_window
    return visible | (q < 0)


def retained(
    importance: Tensor, positions: Tensor, seen: Tensor, policy: Policy, pinned: Tensor | None = None
) -> Tensor:
    """The slots that stay: sink, window and pins first, then the highest importance, ties to the earlier position.

    All [B, H, K] but ``seen`` [B], slots in order of position; bool with exactly ``policy.budget`` True per head.
    """
    rank = _rank(importance, positions, seen, policy, pinned)
    best = torch.sort(rank, dim=-1, descending=True, stable=True).indices[..., : policy.budget]
    return torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, best, True)


def only_victim(
    importance: Tensor, positions: Tensor, seen: Tensor, policy: Policy, pinned: Tensor | None = None
) -> Tensor:
    """The one slot per head [B, H] that ``retained`` would drop from budget + 1, whatever the order of slots."""
    rank = _rank(importance, positions, seen, policy, pinned)
    lowest = rank == rank.amin(-1, keepdim=True)
    return torch.where(lowest, positions, -1).argmax(-1)


def _rank(importance: Tensor, positions: Tensor, seen: Tensor, policy: Policy, pinned: Tensor | None) -> Tensor:
    protected = (positions < policy.sink) | (positions >= seen[:, None, None] - policy.window)
    if pinned is not None:
        protected |= pinned
    return importance.masked_fill(protected, INF).masked_fill(positions < 0, -INF)
