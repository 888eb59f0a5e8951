"""How far the next-token distributions of one model are from those of another.

KL(reference || candidate) in nats, agreement of the most likely token, and the change of the probability of the
reference's own token: the columns of llama.cpp's ``--kl-divergence``. Float64 whatever the models' dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = 64  # of logits that are made double at once


class Distances(NamedTuple):
    """Of every token: KL in nats, whether the most likely token is the same, change of the probability: each [n]."""

    kl: Tensor
    same: Tensor
    change: Tensor


def distances(reference: Tensor, candidate: Tensor, ids: Tensor) -> Distances:
    """Measure candidate logits [n, V] against reference logits [n, V] where the tokens ``ids`` [n] follow."""
    parts = [
        _block(*block) for block in zip(*(torch.split(t, _ROWS) for t in (reference, candidate, ids)), strict=True)
    ]
    return Distances(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _block(reference: Tensor, candidate: Tensor, ids: Tensor) -> Distances:
    ours, theirs = (logits.double().log_softmax(-1) for logits in (reference, candidate))  # [n, V]
    # a token that the reference gives no probability at all adds nothing
    terms = torch.where(ours.exp() > 0, ours.exp() * (ours - theirs), 0.0)
    own = [table.gather(1, ids[:, None])[:, 0].exp() for table in (ours, theirs)]  # [n] each
    # KL is never below 0, its rounded sum may be
    return Distances(terms.sum(-1).clamp(min=0), ours.argmax(-1) == theirs.argmax(-1), own[1] - own[0])
