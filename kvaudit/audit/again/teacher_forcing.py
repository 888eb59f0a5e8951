"""Logits of a model under teacher forcing, led along given answers, and how far they are from the reference's.

They come densely in one pass, or through the cache as a policy serves it. There, the prompt and the environment's
replies are prefilled and every answer token is fed by itself, as when the sampler draws it: the policy compresses at
the same moments, seeing the same tokens.

Distances are KL(reference || candidate) in nats, agreement of the most likely token, and the change of the probability
of the reference's own token: the columns of llama.cpp's ``--kl-divergence``. Float64 whatever the models' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvaudit.audit.again.trajectories import NOTHING, Trajectory
from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.policies import Dense, Policy
from kvaudit.audit.replay.attention import Replay
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.sampler import Episode
from kvaudit.core.errors import DataError

AGAIN_ROWS = 8  # at once when the reference is run again
_ROWS = 64  # of logits that are made double at once


class StepLogits(NamedTuple):
    """Logits [n, V] that predict, for each of ``rows`` of the batch, its ``steps``-th predicted token."""

    rows: list[int]
    steps: list[int]
    logits: Tensor


class ForcedEpisode(Episode):
    """An episode whose answers are given instead of drawn."""

    def force(self, answers: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Feed one answer to every row (() = none), as ``decode`` feeds what it draws.

        Yields, before each token, the rows that still have one and the logits [n, V] that predict it.
        """
        assert len(answers) == self.rows
        self._feed_pending([bool(answer) for answer in answers])
        logits = self._logits  # [B, V], which predict each row's next token
        for step in range(max(map(len, answers))):
            rows = [n for n, answer in enumerate(answers) if step < len(answer)]
            yield rows, logits[rows]
            # the last token stays outside, pending, as after ``decode``
            fed = [answer[step] if step + 1 < len(answer) else -1 for answer in answers]
            if max(fed) >= 0:
                logits = self._step(fed)
        for n, answer in enumerate(answers):
            if answer:
                self._rows[n].add(list(answer), [0.0] * len(answer))  # nothing was drawn, so no log-probs
                self._pending[n] = list(answer[-1:])

    def extend(self, chunks: Sequence[Sequence[int]], roles: Sequence[Sequence[str]] | None = None) -> None:
        """See ``Episode.extend``; what is given enters at once, as every row that is given something goes on."""
        super().extend(chunks, roles)
        if any(chunks):
            self.rollouts()  # after which nothing given is left outside the cache


def check_lengths(model: LoadedModel, found: Sequence[Trajectory]) -> None:
    """Raise DataError for a conversation that does not fit the model's positions."""
    for one in found:
        if len(one.ids) > model.max_positions:
            raise DataError(
                f"the recorded conversation of item {one.item_id[:80]!r} has {len(one.ids)} tokens, model "
                f"{model.name!r} has {model.max_positions} positions; it is not a record of this model"
            )


@torch.no_grad()
def dense_logits(model: LoadedModel, batch: Sequence[Trajectory]) -> Iterator[StepLogits]:
    """One parallel pass without any cache, row by row."""
    plans = layer_plans(model.model.config, Dense())
    ids = pad_sequence([torch.tensor(one.ids) for one in batch], batch_first=True)  # [B, T]
    lengths = torch.tensor([len(one.ids) for one in batch])[:, None]  # [B, 1]
    columns = torch.arange(ids.shape[1])
    positions = torch.where(columns < lengths, columns, -1).to(model.device)  # [B, T]
    wanted = sorted({place - 1 for one in batch for place in one.scored})  # a column's logits predict the next token
    place_of = {column: place for place, column in enumerate(wanted)}
    logits = model.model(
        input_ids=ids.to(model.device),
        position_ids=positions.clamp(min=0),
        use_cache=False,
        kv=Replay(plans, positions, positions, None),
        logits_to_keep=torch.tensor(wanted, device=model.device),
    ).logits  # [B, wanted, V]
    for row, one in enumerate(batch):
        steps = list(range(len(one.scored)))
        yield StepLogits([row] * len(steps), steps, logits[row, [place_of[place - 1] for place in one.scored]])


def served_logits(model: LoadedModel, policy: Policy, batch: Sequence[Trajectory]) -> Iterator[StepLogits]:
    """Through a cache that ``policy`` compresses; of a mixture every row has the policy that it draws."""
    drawn = [policy.drawn(one.seed) for one in batch]
    for part in dict.fromkeys(drawn):
        places = [n for n, own in enumerate(drawn) if own == part]
        for seen in _one_policy(model, part, [batch[n] for n in places]):
            yield StepLogits([places[row] for row in seen.rows], seen.steps, seen.logits)


def _one_policy(model: LoadedModel, policy: Policy, batch: Sequence[Trajectory]) -> Iterator[StepLogits]:
    prompts, roles = [one.prompt.ids for one in batch], [one.prompt.roles for one in batch]
    episode = ForcedEpisode(model, policy, prompts, [one.seed for one in batch], 1, roles)
    done = [0] * len(batch)
    for number in range(max(len(one.turns) for one in batch)):
        turns = [one.turns[number] if number < len(one.turns) else None for one in batch]
        for rows, logits in episode.force([turn.answer if turn else () for turn in turns]):
            yield StepLogits(rows, [done[row] for row in rows], logits)
            for row in rows:
                done[row] += 1
        chunks = [turn.reply if turn else NOTHING for turn in turns]
        episode.extend([chunk.ids for chunk in chunks], [chunk.roles for chunk in chunks])


def again(model: LoadedModel, batch: Sequence[Trajectory]) -> Iterator[StepLogits]:
    """The uncompressed model once more by another road: a few rows at a time from the last, through the cache."""
    policy = Dense()
    order = list(range(len(batch)))[::-1]
    for places in (order[start : start + AGAIN_ROWS] for start in range(0, len(order), AGAIN_ROWS)):
        for seen in served_logits(model, policy, [batch[place] for place in places]):
            yield StepLogits([places[row] for row in seen.rows], seen.steps, seen.logits)


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
    ours, theirs = (logits.double().log_softmax(-1) for logits in (reference, candidate))  # [n, V]
    # a token that the reference gives no probability at all adds nothing
    terms = torch.where(ours.exp() > 0, ours.exp() * (ours - theirs), 0.0)
    own = [table.gather(1, ids[:, None])[:, 0].exp() for table in (ours, theirs)]  # [n] each
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
            ours = torch.stack([known[row][step] for row, step in zip(seen.rows, seen.steps, strict=True)])  # [n, V]
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
                self._margins.append(pair[0] - pair[1])  # nats
