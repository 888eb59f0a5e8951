"""Attention of one query per row straight on codes: scales go to the logits and the shares, not to every element."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logits(query: Tensor, numbers: Tensor, parameters: Tensor) -> Tensor:
    """q k [b, H, X, C] for keys coded per token in n groups of channels.

    query [b, H, X, D], numbers [b, H, C, D], parameters [b, H, C, n, P].
    """
    parts = parameters.shape[3]
    total = None
    for q, k, p in zip(query.chunk(parts, -1), numbers.chunk(parts, -1), parameters.unbind(3), strict=True):
        logits = (q @ k.transpose(2, 3)) * p[..., 0][:, :, None]
        if p.shape[-1] == 2:
            logits += q.sum(-1, keepdim=True) * p[..., 1][:, :, None]
        total = logits if total is None else total + logits
    assert total is not None
    return total


def group_logits(query: Tensor, numbers: Tensor, table: Tensor) -> Tensor:
    """q k for keys coded per channel in runs: numbers [b, H, G, g, D], table [b, H, G, D, P] -> [b, H, X, G * g]."""
    keys = numbers.mul_(table[..., 0][:, :, :, None]).flatten(2, 3)
    logits = query @ keys.transpose(2, 3)
    if table.shape[-1] == 2:
        logits += (query @ table[..., 1].transpose(2, 3)).repeat_interleave(numbers.shape[3], -1)
    return logits


def token_mix(shares: Tensor, numbers: Tensor, parameters: Tensor) -> Tensor:
    """Values coded per token, weighted: shares [b, H, X, C], numbers [b, H, C, D] -> [b, H, X, D]."""
    parts = parameters.shape[3]
    out = []
    for v, p in zip(numbers.chunk(parts, -1), parameters.unbind(3), strict=True):
        mixed = (shares * p[..., 0][:, :, None]) @ v
        if p.shape[-1] == 2:
            mixed += shares @ p[..., 1][..., None]
        out.append(mixed)
    return torch.cat(out, -1)
