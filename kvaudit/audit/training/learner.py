"""The learner of an arm: the model in training, which reads rollouts with a full cache or with the sampler's.

With a full cache it has the dense view, with the sampler's cache the shadow view. The learner also holds an optional
value head (critic), and the optimisers of model and value head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvaudit.audit.cache.attention import find_decoder
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.replay.learner_pass import LearnerPass, LogitsHead, suffix_logits, suffix_states
from kvaudit.audit.training.batch import Batch, microbatches
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.losses.base import LOSSES, full_kl
from kvaudit.audit.training.optimiser import Optimiser, StepResult
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.spec_train import CriticSpec

WHOLE_VOCABULARY = 8192
LOGITS_PER_PIECE = 1 << 26  # 256 MiB in float32, of which a backward pass needs a few


@dataclass(frozen=True)
class Distributions:
    """The predicted next-token distributions of n tokens, as logits [n, V] or as hidden states [n, D].

    If there is a ``head`` (LM head), ``states`` are hidden states, and the head is applied to ``piece`` tokens at a
    time. Otherwise ``states`` are logits.
    """

    states: Tensor
    head: LogitsHead | None
    temperature: float
    piece: int  # tokens whose logits are held at once

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [m, V] of m rows of ``states``, divided by the temperature; float32 or wider."""
        logits = states if self.head is None else self.head(states)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature

    def map(self, function: Callable[..., tuple[Tensor, ...]], *more: Tensor) -> tuple[Tensor, ...]:
        """Apply ``function`` to the ``states`` of all tokens and to the tensors ``more``, and return its results.

        Inputs and results have one row per token. If the states are hidden states, logits may be too large to hold for
        all tokens: the function is then called for ``piece`` tokens at a time, and the results are joined.
        """
        if self.head is None:
            return function(self.states, *more)
        pieces = zip(*(torch.split(tensor, self.piece) for tensor in (self.states, *more)), strict=True)
        results = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        return tuple(torch.cat(column) for column in zip(*results, strict=True))

    def kl(self, teacher: Distributions) -> Tensor:
        """Return KL(self || teacher) over the whole vocabulary, nats [n], without gradient to the teacher."""

        def piece_kl(states: Tensor, teacher_states: Tensor) -> tuple[Tensor]:
            with torch.no_grad():
                teacher_logits = teacher.logits(teacher_states)  # [m, V]
            return (full_kl(self.logits(states), teacher_logits),)

        return self.map(piece_kl, teacher.states.detach())[0]


class TokenPredictions(NamedTuple):
    """The predictions that a pass makes for the n sampled tokens of its rollouts, in row-major order."""

    distributions: Distributions
    logprobs: Tensor  # [n], nats
    entropy: Tensor  # [n], nats, no gradient
    columns: tuple[Tensor, ...]  # row and column [n] of the pass that predict them


def read_tokens(
    model: Any, rollouts: Sequence[Rollout], group: int, view: LearnerPass, temperature: float
) -> TokenPredictions:
    """Run a pass with shared prompts; return the predictions of every sampled token at the sampling temperature.

    ``view`` is "dense" (full cache) or "shadow" (the sampler's cache). A conversation that an engine prefilled again in
    every turn is replayed with a row for each turn; the sampled tokens keep their order.
    """
    if view == "shadow" and any(rollout.turns for rollout in rollouts):
        rollouts, group = [turn for rollout in rollouts for turn in rollout.engine_turns], 1
    head, vocabulary = None, model.config.get_text_config(decoder=True).vocab_size
    if vocabulary > WHOLE_VOCABULARY:
        states, valid, head = suffix_states(model, rollouts, group=group, view=view)
    else:
        states, valid = suffix_logits(model, rollouts, group=group, view=view)
    # both [b, Q], Q columns of the longest suffix
    sampled, ids = torch.zeros(valid.shape, dtype=torch.bool), torch.zeros(valid.shape, dtype=torch.int64)
    for row, rollout in enumerate(rollouts):
        first = rollout.prompt_length  # the token that the first column predicts
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


def pass_logprobs(model: Any, batch: Batch, view: LearnerPass, config: TrainConfig) -> Tensor:
    """Return log-probs [B, R] of the sampled tokens, without gradient; 0 where nothing was sampled.

    ``view`` is "dense" (full cache) or "shadow" (the sampler's cache).
    """
    logprobs = torch.zeros_like(batch.sampler_logprobs)
    with torch.no_grad():
        for rows in microbatches(batch.rollouts, batch.group, config.microbatch_tokens):
            part = batch.of(rows)
            read = read_tokens(model, part.rollouts, part.group, view, config.temperature)
            logprobs[upload(torch.tensor(rows), logprobs.device)] = part.spread(read.logprobs)
    return logprobs


_PREFIX, _UPDATES = "critic/", "critic/updates"


class Critic:
    """A linear value head on the last hidden states of the policy's own pass, in float32, with its own optimiser.

    It starts at 0, so it needs no random draw, and sends no gradient to the hidden states.
    """

    def __init__(self, model: Any, spec: CriticSpec, *, max_grad_norm: float) -> None:
        width = model.config.get_text_config(decoder=True).hidden_size  # D, of the last hidden states
        self._head = torch.nn.Linear(width, 1).to(next(model.parameters()).device)
        for weight in self._head.parameters():
            torch.nn.init.zeros_(weight)
        self.optimiser = Optimiser(
            self._head, learning_rate=spec.learning_rate, warmup_steps=0, max_grad_norm=max_grad_norm
        )

    def read(
        self, model: Any, part: Batch, run_pass: Callable[[], TokenPredictions]
    ) -> tuple[TokenPredictions, Tensor]:
        """Call ``run_pass``, the policy's pass over ``part``; return its predictions and the critic's values [b, R].

        The values are computed from the last hidden states of that pass.
        """
        outputs: list[Tensor] = []

        def keep_states(_: Any, __: Any, keywords: dict[str, Any], output: Any) -> None:
            if "kv" in keywords:  # a pass, not logits that are computed in pieces
                outputs.append(output.last_hidden_state.detach())

        # a hook on the decoder, because the model returns logits only
        handle = find_decoder(model).register_forward_hook(keep_states, with_kwargs=True)
        try:
            read = run_pass()
        finally:
            handle.remove()
        # a decoder that is called in another way never triggers the hook
        if not outputs:
            raise RunError(
                f"{type(model).__name__} does not call its decoder as causal models do; use a loss without critic"
            )
        states = outputs[-1]  # the pass over the prompts comes before
        chosen = states[read.columns].float()  # [n, D]; a state predicts the token after it, as its logits do
        return read, part.spread(self._head(chosen)[:, 0])  # [n, 1] to [b, R], 0 where nothing was sampled

    def tensors(self) -> dict[str, Tensor]:
        """Return the head, its moments and the update count, under keys ``critic/...``."""
        tensors = {_PREFIX + name: tensor for name, tensor in self.optimiser.tensors().items()}
        # as a tensor, because a state file can hold nothing else
        return tensors | {_UPDATES: torch.tensor(self.optimiser.updates)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load what ``Critic.tensors`` returned; raises DataError if it does not fit."""
        count = tensors.get(_UPDATES)
        if count is None or count.shape != () or count.dtype != torch.int64 or count < 0:
            raise DataError("training state has no count of the critic's updates; delete the checkpoint folder")
        state = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(_PREFIX)}
        self.optimiser.load(state, int(count))


class OldPolicy(NamedTuple):
    """The predictions for a batch before its first gradient step, [B, R]: log-probs of pi_old and critic values."""

    logprobs: Tensor  # nats, 0 where nothing was sampled
    values: Tensor | None  # None without a critic


class Learner:
    """The model in training and its optimisers; it reads rollouts under its arm's view, dense or shadow.

    In the dense view it reads with a full cache, in the shadow view with the cache that the sampler had. ``reference``
    is the reference model of the KL term, or None.
    """

    def __init__(self, model: Any, config: TrainConfig, reference: Any) -> None:
        self.model, self.config, self._reference = model, config, reference
        self.optimiser = Optimiser(
            model,
            learning_rate=config.learning_rate,
            warmup_steps=config.warmup_steps,
            max_grad_norm=config.max_grad_norm,
        )
        has_critic = LOSSES.get(config.loss).critic
        self._critic = Critic(model, config.critic, max_grad_norm=config.max_grad_norm) if has_critic else None

    def read(self, part: Batch) -> tuple[TokenPredictions, Tensor | None]:
        """Read a microbatch under the arm's view (full cache, or the sampler's).

        Returns the predictions, and the critic's values [b, R]; these are None if there is no critic.
        """
        # dense or shadow: the only place where arms differ in what they learn from
        view = self.config.design.learner
        if self._critic is None:
            return self._tokens(part, view), None
        return self._critic.read(self.model, part, lambda: self._tokens(part, view))

    def _tokens(self, part: Batch, view: LearnerPass) -> TokenPredictions:
        return read_tokens(self.model, part.rollouts, part.group, view, self.config.temperature)

    def read_old_policy(self, batch: Batch, parts: Sequence[Sequence[int]]) -> OldPolicy:
        """Return log-probs and critic values of a batch before its updates, without gradient.

        They are under the arm's view (full cache, or the sampler's). ``parts`` are the rows of the microbatches, which
        must be the same as in the gradient passes: rounding depends on which rows share a pass, and narrow clip bounds
        such as gspo's would react to it.
        """
        logprobs, values = torch.zeros_like(batch.sampler_logprobs), torch.zeros_like(batch.sampler_logprobs)
        with torch.no_grad():
            for rows in parts:
                part = batch.of(rows)
                read, part_values = self.read(part)
                index = upload(torch.tensor(rows), values.device)
                logprobs[index] = part.spread(read.logprobs)
                values[index] = 0.0 if part_values is None else part_values
        return OldPolicy(logprobs, None if self._critic is None else values)

    def ref_logprobs(self, batch: Batch) -> Tensor | None:
        """Return the reference model's log-probs [B, R] with the cache of the arm's view (dense or shadow).

        None without a reference model.
        """
        if self._reference is None:
            return None
        return pass_logprobs(self._reference, batch, self.config.design.learner, self.config)

    def sampler_view(self, batch: Batch) -> Tensor:
        """Return the model's log-probs [B, R] with the cache that the sampler had.

        This is the shadow pass if the arm samples from a compressed cache, else the dense pass.
        """
        view: LearnerPass = "shadow" if self.config.design.rollout == "compressed" else "dense"
        return pass_logprobs(self.model, batch, view, self.config)

    def distillation_kl(self, part: Batch, shadow: TokenPredictions) -> Tensor | None:
        """Return KL(learner || teacher) per token [b, R]; None in arms without distillation.

        One of the two is the pass with the full cache (dense), the other the pass with the sampler's (``shadow``). The
        setting ``distill_towards`` names the teacher, which gets no gradient. Unless configured otherwise, the KL is 0
        in groups without a positive reward, because their shadow pass is a poor teacher.
        """
        if not self.config.design.distill:
            return None
        dense = self._tokens(part, "dense")
        learner, teacher = (dense, shadow) if self.config.distill_towards == "shadow" else (shadow, dense)
        gap = part.spread(learner.distributions.kl(teacher.distributions))  # nats [b, R]
        return gap if self.config.distill_where == "everywhere" else gap * part.group_earned[:, None]

    def step(self) -> StepResult:
        """Take a gradient step on policy and critic; return the result of the policy's step."""
        # the critic steps even if the policy's step was skipped: its gradient is separate
        result = self.optimiser.step()
        if self._critic is not None:
            self._critic.optimiser.step()
        return result

    def tensors(self) -> dict[str, Tensor]:
        """Return all state that the next step needs, by name."""
        return self.optimiser.tensors() | ({} if self._critic is None else self._critic.tensors())

    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Load what ``Learner.tensors`` returned after ``updates`` updates; raises DataError if it does not fit."""
        self.optimiser.load(tensors, updates)
        if self._critic is not None:
            self._critic.load(tensors)
