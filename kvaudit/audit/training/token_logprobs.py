"""The learner's log-probs of sampled tokens, from a dense or a shadow pass, with or without gradient.

Memory: logits of a vocabulary above ``WHOLE_VOCABULARY`` tokens are never held for all tokens of a pass. Then the last
hidden states are kept, and their logits made piece by piece, again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.replay.learner_pass import LearnerPass, LogitsHead, shared_tokens, suffix_logits, suffix_states
from kvaudit.audit.training.batch import Batch, microbatches
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.losses.base import full_kl

WHOLE_VOCABULARY = 8192
LOGITS_PER_PIECE = 1 << 26  # 256 MiB in float32, of which a backward pass needs a few


@dataclass(frozen=True)
class Distributions:
    """Predicted distributions of n tokens; ``states`` are logits [n, V], or hidden states [n, D] with a ``head``."""

    states: Tensor
    head: LogitsHead | None
    temperature: float
    piece: int  # tokens whose logits are held at once

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [m, V] of some of the states, divided by the temperature; float32 or wider."""
        logits = states if self.head is None else self.head(states)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature

    def map(self, function: Callable[..., tuple[Tensor, ...]], *more: Tensor) -> tuple[Tensor, ...]:
        """Apply ``function`` to the states and ``more`` tensors [n, ...]: at once, or piece by piece with a head."""
        if self.head is None:
            return function(self.states, *more)
        pieces = zip(*(torch.split(tensor, self.piece) for tensor in (self.states, *more)), strict=True)
        results = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        return tuple(torch.cat(column) for column in zip(*results, strict=True))

    def kl(self, teacher: Distributions) -> Tensor:
        """Return KL(self || sg(teacher)) over the whole vocabulary, nats [n]."""

        def piece_kl(states: Tensor, teacher_states: Tensor) -> tuple[Tensor]:
            with torch.no_grad():
                teacher_logits = teacher.logits(teacher_states)  # [m, V]
            return (full_kl(self.logits(states), teacher_logits),)

        return self.map(piece_kl, teacher.states.detach())[0]


class TokenPredictions(NamedTuple):
    """A pass's predictions of the n sampled tokens of some rollouts, in row-major order."""

    distributions: Distributions
    logprobs: Tensor  # [n], nats
    entropy: Tensor  # [n], nats, no gradient
    columns: tuple[Tensor, ...]  # row and column [n] of the pass that predict them


def read_tokens(
    model: Any,
    rollouts: Sequence[Rollout],
    group: int,
    kind: LearnerPass,
    temperature: float,
    *,
    whole_rows: bool = False,
) -> TokenPredictions:
    """Run a shared-prompt pass; return the predictions of every sampled token at the sampling temperature.

    ``whole_rows``: no shared prompts, see ``suffix_logits``. A conversation that an engine read again in every turn is
    replayed turn by turn, each turn a row; the sampled tokens keep their order.
    """
    if kind == "shadow" and any(rollout.turns for rollout in rollouts):
        rollouts, group = [turn for rollout in rollouts for turn in rollout.engine_turns], 1
    head, vocabulary = None, model.config.get_text_config(decoder=True).vocab_size
    if vocabulary > WHOLE_VOCABULARY:
        states, valid, head = suffix_states(model, rollouts, group=group, kind=kind, whole_rows=whole_rows)
    else:
        states, valid = suffix_logits(model, rollouts, group=group, kind=kind, whole_rows=whole_rows)
    # both [b, Q], Q columns of the longest suffix (or row)
    sampled, ids = torch.zeros(valid.shape, dtype=torch.bool), torch.zeros(valid.shape, dtype=torch.int64)
    for row, rollout in enumerate(rollouts):
        first = shared_tokens(rollout, whole_rows=whole_rows) + 1  # the token that the first column predicts
        ids[row, : len(rollout.ids) - first] = rollout.ids[first:]
        sampled[row, : len(rollout.ids) - first] = rollout.sampled[first:]
    # indices are computed on the host: indexing by a mask on the device would wait for it
    columns = tuple(upload(index, states.device) for index in sampled.nonzero(as_tuple=True))
    targets = upload(ids[sampled], states.device)
    # select sampled tokens before the vocabulary dimension is made
    distributions = Distributions(states[columns], head, temperature, max(LOGITS_PER_PIECE // vocabulary, 1))

    def logprobs_and_entropy(piece: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = distributions.logits(piece).log_softmax(dim=-1)  # [m, V], the largest tensor of training
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, tokens[:, None])[:, 0], entropy  # [m], [m]

    logprobs, entropy = distributions.map(logprobs_and_entropy, targets)
    return TokenPredictions(distributions, logprobs, entropy, columns)


def pass_logprobs(
    model: Any, batch: Batch, kind: LearnerPass, config: TrainConfig, *, whole_rows: bool = False
) -> Tensor:
    """Return log-probs [B, R] of the sampled tokens under a pass, without gradient; 0 where nothing was sampled."""
    logprobs = torch.zeros_like(batch.sampler_logprobs)
    with torch.no_grad():
        for rows in microbatches(batch.rollouts, batch.group, config.microbatch_tokens, whole_rows=whole_rows):
            part = batch.of(rows)
            read = read_tokens(model, part.rollouts, part.group, kind, config.temperature, whole_rows=whole_rows)
            logprobs[upload(torch.tensor(rows), logprobs.device)] = part.spread(read.logprobs)
    return logprobs
