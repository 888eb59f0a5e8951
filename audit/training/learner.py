"""The learner's reading of sampled tokens: what a dense or a shadow pass says, with gradient or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from audit.cache.ledger import Rollout
from audit.replay.learner_pass import LearnerPass, suffix_logits
from audit.training.batch import Batch, microbatches
from audit.training.config import TrainConfig


class Read(NamedTuple):
    """What a pass says of the n sampled tokens of some rollouts, in row-major order."""

    logits: Tensor  # [n, V], temperature applied
    logprobs: Tensor  # [n], nats
    entropy: Tensor  # [n], nats, no gradient


def read_tokens(model: Any, rollouts: Sequence[Rollout], group: int, kind: LearnerPass, temperature: float) -> Read:
    """One shared-prompt pass; the distribution of every sampled token at the temperature it was drawn with."""
    logits, _ = suffix_logits(model, rollouts, group=group, kind=kind)
    sampled, ids = torch.zeros(logits.shape[:2], dtype=torch.bool), torch.zeros(logits.shape[:2], dtype=torch.int64)
    for row, rollout in enumerate(rollouts):
        suffix = rollout.ids[rollout.prompt_length :]
        ids[row, : len(suffix)] = suffix
        sampled[row, : len(suffix)] = rollout.sampled[rollout.prompt_length :]
    # [n, V]: given tokens go before anything is made wide
    chosen = logits[sampled.to(logits.device)].to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = chosen.log_softmax(dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return Read(chosen, logprobs.gather(1, ids[sampled].to(chosen.device)[:, None])[:, 0], entropy)


def pass_logprobs(model: Any, batch: Batch, kind: LearnerPass, config: TrainConfig) -> Tensor:
    """Log-probs [B, R] of the sampled tokens under a pass, without gradient; 0 where nothing was sampled."""
    result = torch.zeros_like(batch.sampler_logprobs)
    with torch.no_grad():
        for rows in microbatches(batch.rollouts, batch.group, config.microbatch_tokens):
            part = batch.of(rows)
            read = read_tokens(model, part.rollouts, part.group, kind, config.temperature)
            result[rows] = part.spread(read.logprobs)
    return result
