"""Per-token distances between two next-token distributions, and their summary over the tokens of a unit.

KL(reference || candidate) in nats, agreement of the most likely token, and the change of the probability of the
reference's own token: the columns of llama.cpp's ``--kl-divergence``. Float64 whatever the models' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvaudit.audit.again.forced import StepLogits
from kvaudit.audit.again.trajectories import Trajectory
from kvaudit.core.errors import DataError

_ROWS = 64  # of logits that are made double at once


class Distances(NamedTuple):
    """Of every token: KL in nats, whether the most likely token is the same, change of the probability: each [n]."""

    kl: Tensor
    same: Tensor
    change: Tensor


def distances(reference: Tensor, candidate: Tensor, ids: Tensor) -> Distances:
    """Distances of candidate logits [n, V] from reference logits [n, V] where the tokens ``ids`` [n] follow."""
    parts = [
        _block(*block) for block in zip(*(torch.split(t, _ROWS) for t in (reference, candidate, ids)), strict=True)
    ]
    return Distances(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _block(reference: Tensor, candidate: Tensor, ids: Tensor) -> Distances:
    ours, theirs = (logits.double().log_softmax(-1) for logits in (reference, candidate))
    # a token that the reference gives no probability at all adds nothing
    terms = torch.where(ours.exp() > 0, ours.exp() * (ours - theirs), 0.0)
    own = [table.gather(1, ids[:, None])[:, 0].exp() for table in (ours, theirs)]
    # KL is never below 0, its rounded sum may be
    return Distances(terms.sum(-1).clamp(min=0), ours.argmax(-1) == theirs.argmax(-1), own[1] - own[0])


def log_odds(logits: Tensor, token: int) -> float:
    """Log-odds of one token under logits [V], nats."""
    others = logits.double().clone()
    others[token] = -math.inf
    return float(logits[token].double() - others.logsumexp(-1))


class Refusal(NamedTuple):
    """The first token of the refusal that a suite's prompt asks for, and the items whose right answer it is."""

    token: int
    items: frozenset[str]


class UnitDistances:
    """The distances of one unit. All KLs are kept, so quantiles are exact; the caller bounds the number of tokens."""

    def __init__(self, refusal: Refusal | None) -> None:
        self._refusal = refusal
        self._kl: list[float] = []
        self._same, self._squares = 0, 0.0
        self._sequences: list[list[Any]] = []
        self._margins: list[float] = []

    def add(
        self, batch: Sequence[Trajectory], reference: Iterable[StepLogits], candidate: Iterator[StepLogits]
    ) -> None:
        """Compare a batch; raises DataError where a model's logits are no numbers."""
        known = {row: seen.logits for seen in reference for row in seen.rows[:1]}  # densely, a row comes whole
        kls = [torch.zeros(len(one.scored), dtype=torch.float64) for one in batch]
        tokens = [[one.ids[place] for place in one.scored] for one in batch]
        for seen in candidate:
            ours = torch.stack([known[row][step] for row, step in zip(seen.rows, seen.steps, strict=True)])
            ids = [tokens[row][step] for row, step in zip(seen.rows, seen.steps, strict=True)]
            found = distances(ours, seen.logits, torch.tensor(ids, device=ours.device))
            if not bool(found.kl.isfinite().all()):
                raise DataError("logits are no finite numbers; the checkpoint's weights are broken, train it again")
            self._same += int(found.same.sum())
            self._squares += float(found.change.square().sum())
            for row, step, kl in zip(seen.rows, seen.steps, found.kl.tolist(), strict=True):
                kls[row][step] = kl
            self._add_margins(batch, seen, ours)
        for one, values in zip(batch, kls, strict=True):
            self._kl += values.tolist()
            self._sequences.append([one.cluster_id, len(values), float(values.mean())])

    def row(self) -> dict[str, Any]:
        """What displacement.json holds of a unit."""
        median, p99, p99_9 = np.quantile(self._kl, [0.5, 0.99, 0.999]).tolist()
        return {
            "median_kl": median,
            "p99_kl": p99,
            "p99_9_kl": p99_9,
            "max_kl": max(self._kl),
            "same_top1": self._same / len(self._kl),
            "rms_dp": math.sqrt(self._squares / len(self._kl)),
            "refusal_margin": math.fsum(self._margins) / len(self._margins) if self._margins else None,
            "sequences": self._sequences,
        }

    def _add_margins(self, batch: Sequence[Trajectory], seen: StepLogits, reference: Tensor) -> None:
        """Where the first answer begins and should be a refusal: by how much more its first token is expected."""
        if self._refusal is None:
            return
        for place, (row, step) in enumerate(zip(seen.rows, seen.steps, strict=True)):
            if step == 0 and batch[row].turns[0].answer and batch[row].item_id in self._refusal.items:
                pair = [log_odds(logits[place], self._refusal.token) for logits in (seen.logits, reference)]
                self._margins.append(pair[0] - pair[1])
