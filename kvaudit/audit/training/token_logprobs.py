"""The learner's reading of sampled tokens: what a dense or a shadow pass says, with gradient or without.

One rule about memory: a vocabulary of more than ``WHOLE_VOCABULARY`` tokens is never held for all tokens of a pass. Then the last
hidden states are kept, and logits are made of ``LOGITS_PER_PIECE`` of them at a time, again in the backward pass.
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

WHOLE_VOCABULARY = 8192  # tokens of a vocabulary
LOGITS_PER_PIECE = 1 << 26  # logits at once: 256 MiB in float32, of which a backward pass needs a few


@dataclass(frozen=True)
class Distributions:
    """What a pass predicts n tokens with: ``states`` are logits [n, V], or [n, D] where a ``head`` makes them so."""

    states: Tensor
    head: LogitsHead | None
    temperature: float
    piece: int  # tokens whose logits are held at once

    def logits(self, states: Tensor) -> Tensor:
        """Logits [m, V] of some of the states, temperature applied; float32 or wider."""
        made = states if self.head is None else self.head(states)
        return made.to(torch.promote_types(made.dtype, torch.float32)) / self.temperature

    def each(self, function: Callable[..., tuple[Tensor, ...]], *more: Tensor) -> tuple[Tensor, ...]:
        """``function`` of the states, and of ``more`` [n, ...] beside them, as one call; piece by piece with a head."""
        if self.head is None:
            return function(self.states, *more)
        pieces = zip(*(torch.split(tensor, self.piece) for tensor in (self.states, *more)), strict=True)
        made = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        return tuple(torch.cat(column) for column in zip(*made, strict=True))

    def kl(self, teacher: Distributions) -> Tensor:
        """KL(self || sg(teacher)) over the whole vocabulary, exact: nats [n]."""

        def of(own: Tensor, other: Tensor) -> tuple[Tensor]:
            with torch.no_grad():
                taught = teacher.logits(other)  # [m, V] nats, of the same m tokens
            return (full_kl(self.logits(own), taught),)

        (found,) = self.each(of, teacher.states.detach())
        return found


class TokenPredictions(NamedTuple):
    """What a pass says of the n sampled tokens of some rollouts, in row-major order."""

    distributions: Distributions
    logprobs: Tensor  # [n], nats
    entropy: Tensor  # [n], nats, no gradient
    columns: tuple[Tensor, ...]  # row and column [n] of the pass that predict them


def read_tokens(
    model: Any, rollouts: Sequence[Rollout], group: int, kind: LearnerPass, temperature: float, *, apart: bool = False
) -> TokenPredictions:
    """One shared-prompt pass; the distribution of every sampled token at the temperature it was drawn with.

    ``apart``: every row by itself, see ``suffix_logits``. A conversation that an engine read anew in every turn is
    replayed turn by turn, each a row of its own; the sampled tokens are the same, in the same order.
    """
    if kind == "shadow" and any(rollout.turns for rollout in rollouts):
        rollouts, group = [turn for rollout in rollouts for turn in rollout.engine_turns], 1
    head, vocabulary = None, model.config.get_text_config(decoder=True).vocab_size
    if vocabulary > WHOLE_VOCABULARY:
        states, valid, head = suffix_states(model, rollouts, group=group, kind=kind, whole_rows=apart)
    else:
        states, valid = suffix_logits(model, rollouts, group=group, kind=kind, whole_rows=apart)
    # both [b, Q], Q columns of the longest suffix, or row
    sampled, ids = torch.zeros(valid.shape, dtype=torch.bool), torch.zeros(valid.shape, dtype=torch.int64)
    for row, rollout in enumerate(rollouts):
        first = shared_tokens(rollout, whole_rows=apart) + 1  # token that the first column predicts
        ids[row, : len(rollout.ids) - first] = rollout.ids[first:]
        sampled[row, : len(rollout.ids) - first] = rollout.sampled[first:]
    # found here, where nobody waits for it: a mask on a device is read before it chooses
    columns = tuple(upload(place, states.device) for place in sampled.nonzero(as_tuple=True))
    wanted = upload(ids[sampled], states.device)
    # given tokens go before anything is made wide
    chosen = states[columns]
    found = Distributions(chosen, head, temperature, max(LOGITS_PER_PIECE // vocabulary, 1))

    def numbers(own: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = found.logits(own).log_softmax(dim=-1)  # [m, V], the largest tensor of training
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, tokens[:, None])[:, 0], entropy  # [m], [m]

    logprobs, entropy = found.each(numbers, wanted)
    return TokenPredictions(found, logprobs, entropy, columns)


def pass_logprobs(model: Any, batch: Batch, kind: LearnerPass, config: TrainConfig, *, apart: bool = False) -> Tensor:
    """Log-probs [B, R] of the sampled tokens under a pass, without gradient; 0 where nothing was sampled."""
    result = torch.zeros_like(batch.sampler_logprobs)
    with torch.no_grad():
        for rows in microbatches(batch.rollouts, batch.group, config.microbatch_tokens, apart=apart):
            part = batch.of(rows)
            read = read_tokens(model, part.rollouts, part.group, kind, config.temperature, apart=apart)
            result[upload(torch.tensor(rows), result.device)] = part.spread(read.logprobs)
    return result
