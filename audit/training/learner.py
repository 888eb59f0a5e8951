"""The learner: log-probs of sampled tokens under a view, and one gradient step over microbatches.

pi_old is the learner's own log-prob before the first update of the batch. Where one pass over one microbatch is all
there is, it is that pass, detached; otherwise a pass without gradient comes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from audit.cache.ledger import Rollout
from audit.replay.learner_pass import suffix_logits
from audit.training.batch import Batch, microbatches
from audit.training.config import TrainConfig
from audit.training.corrections import CORRECTIONS, NEEDS_WHOLE_BATCH, Correction
from audit.training.losses import LOSSES, LossInputs, distill_rows, full_kl
from audit.training.optimiser import Optimiser

View = Literal["dense", "shadow"]


class Read(NamedTuple):
    """What a view says of the n sampled tokens of some rollouts, in row-major order."""

    logits: Tensor  # [n, V], temperature applied
    logprobs: Tensor  # [n], nats
    entropy: Tensor  # [n], nats, no gradient


@dataclass(frozen=True)
class Learned:
    """One batch's learning. ``logprobs`` [B, R] are the view's before the first update, 0 where nothing was sampled.

    ``metrics`` are means over tokens of graded rollouts (nats), over all updates of the batch; None without any.
    ``grad_norm`` is the last update's, None where it was not finite and nothing was changed.
    """

    logprobs: Tensor
    loss: float
    grad_norm: float | None
    metrics: dict[str, float | None]


def read_view(model: Any, rollouts: Sequence[Rollout], group: int, view: View, temperature: float) -> Read:
    """One shared-prompt pass; the distribution of every sampled token at the temperature it was drawn with."""
    logits, _ = suffix_logits(model, rollouts, group=group, kind=view)
    sampled, ids = torch.zeros(logits.shape[:2], dtype=torch.bool), torch.zeros(logits.shape[:2], dtype=torch.int64)
    for row, rollout in enumerate(rollouts):
        suffix = rollout.ids[rollout.prompt_length :]
        ids[row, : len(suffix)] = suffix
        sampled[row, : len(suffix)] = rollout.sampled[rollout.prompt_length :]
    chosen = logits[sampled.to(logits.device)].to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = chosen.log_softmax(dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return Read(chosen, logprobs.gather(1, ids[sampled].to(chosen.device)[:, None])[:, 0], entropy)


def view_logprobs(model: Any, batch: Batch, view: View, config: TrainConfig) -> Tensor:
    """Log-probs [B, R] of the sampled tokens under a view, without gradient; 0 where nothing was sampled."""
    result = torch.zeros_like(batch.sampler_logprobs)
    with torch.no_grad():
        for rows in microbatches(batch.rollouts, batch.group, config.microbatch_tokens):
            read = read_view(model, _pick(batch.rollouts, rows), batch.group, view, config.temperature)
            _place(result, batch.sampled, rows, read.logprobs)
    return result


def learn(
    model: Any,
    optimiser: Optimiser,
    batch: Batch,
    advantages: Tensor,
    config: TrainConfig,
    *,
    max_tokens: int,
    reference: Any,
) -> Learned:
    """Take ``config.updates_per_batch`` gradient steps on one batch; ``reference`` is a model or None."""
    update = _Update(model, batch, advantages, config, max_tokens)
    splits = microbatches(batch.rollouts, batch.group, config.microbatch_tokens)
    several = config.updates_per_batch > 1
    if several or (len(splits) > 1 and config.recipe.correction in NEEDS_WHOLE_BATCH):
        update.fix_old(view_logprobs(model, batch, config.recipe.learner, config))
    if reference is not None:
        update.reference = view_logprobs(reference, batch, config.recipe.learner, config)
    first, loss, norm = torch.zeros_like(batch.sampler_logprobs), 0.0, None
    for number in range(config.updates_per_batch):
        loss = 0.0
        for rows in splits:
            value, logprobs = update.microbatch(rows)
            loss += value
            if number == 0:
                first[rows] = logprobs
        norm = optimiser.step()
    correction = CORRECTIONS[config.recipe.correction](first, batch.sampler_logprobs, batch.mask)
    return Learned(first, loss, norm, {**update.means(), **correction.metrics})


class _Update:
    """What the microbatches of one batch have in common."""

    def __init__(self, model: Any, batch: Batch, advantages: Tensor, config: TrainConfig, max_tokens: int) -> None:
        self._model, self._batch, self._advantages, self._config = model, batch, advantages, config
        self._max_tokens = max_tokens
        self._teachable = distill_rows(batch.rewards, batch.graded, batch.group)
        self._correction: Correction | None = None
        self.reference: Tensor | None = None
        self._sums: dict[str, float] = defaultdict(float)

    def fix_old(self, old: Tensor) -> None:
        """Correct against fixed log-probs [B, R] of the whole batch instead of each pass's own."""
        self._correction = self._rule(old, self._batch.sampler_logprobs, self._batch.mask)

    def microbatch(self, rows: list[int]) -> tuple[float, Tensor]:
        """Add one microbatch's gradient; returns its share of the loss and its rows' log-probs [b, R]."""
        config, batch, recipe = self._config, self._batch, self._config.recipe
        rollouts = _pick(batch.rollouts, rows)
        read = read_view(self._model, rollouts, batch.group, recipe.learner, config.temperature)
        mask, sampled = batch.mask[rows], batch.sampled[rows]
        logprobs = self._spread(rows, read.logprobs)
        correction = self._correct(rows, logprobs.detach())
        outputs = LOSSES[config.loss](
            LossInputs(
                logprobs=logprobs,
                old_logprobs=correction.old_logprobs,
                advantages=self._advantages[rows],
                mask=mask,
                weights=correction.weights,
                keep=correction.keep,
                batch_rows=len(batch.rollouts),
                max_tokens=self._max_tokens,
                epsilon_low=config.epsilon_low,
                epsilon_high=config.epsilon_high,
                beta=config.beta,
                ref_logprobs=None if self.reference is None else self.reference[rows],
                distill_weight=config.distill_weight,
                distill_kl=self._distill(rows, rollouts, read) if recipe.distill else None,
            )
        )
        torch.autograd.backward(outputs.loss)
        for name, value in outputs.metrics.items():
            self._sums[name] += value
        self._sums["entropy"] += float(read.entropy[mask[sampled]].sum())
        self._sums["tokens"] += int(mask.sum())
        return float(outputs.loss.detach()), logprobs.detach()

    def means(self) -> dict[str, float | None]:
        """The summed metrics per token."""
        tokens = self._sums["tokens"]
        return {name: value / tokens if tokens else None for name, value in self._sums.items() if name != "tokens"}

    def _correct(self, rows: list[int], logprobs: Tensor) -> Correction:
        if self._correction is None:
            return self._rule(logprobs, self._batch.sampler_logprobs[rows], self._batch.mask[rows])
        whole = self._correction
        return Correction(whole.weights[rows], whole.keep[rows], whole.old_logprobs[rows], {})

    def _rule(self, learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
        return CORRECTIONS[self._config.recipe.correction](learner, sampler, mask)

    def _distill(self, rows: list[int], rollouts: Sequence[Rollout], shadow: Read) -> Tensor:
        """KL(dense || sg(shadow)) per token [b, R], 0 for rollouts whose group earned nothing under the mask."""
        dense = read_view(self._model, rollouts, self._batch.group, "dense", self._config.temperature)
        return self._spread(rows, full_kl(dense.logits, shadow.logits)) * self._teachable[rows][:, None]

    def _spread(self, rows: list[int], values: Tensor) -> Tensor:
        """Values [n] of the sampled tokens of ``rows`` as [b, R], with gradient."""
        sampled = self._batch.sampled[rows]
        return values.new_zeros(sampled.shape).masked_scatter(sampled, values)


def _pick(rollouts: Sequence[Rollout], rows: Sequence[int]) -> list[Rollout]:
    return [rollouts[row] for row in rows]


def _place(target: Tensor, sampled: Tensor, rows: list[int], values: Tensor) -> None:
    target[rows] = values.new_zeros(sampled[rows].shape).masked_scatter(sampled[rows], values)
