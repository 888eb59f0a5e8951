"""What learns in an arm: the policy as its view shows it, a value head where the loss has one, and their optimisers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import find_decoder
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.replay.learner_pass import LearnerPass
from kvaudit.audit.training.batch import Batch
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.losses.base import LOSSES, CriticInputs
from kvaudit.audit.training.optimiser import Optimiser, StepResult
from kvaudit.audit.training.ranks import ALONE, RankGroup
from kvaudit.audit.training.ranks import full_weights
from kvaudit.audit.training.token_logprobs import TokenPredictions, pass_logprobs, read_tokens
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.spec_train import CriticSpec

_PREFIX, _UPDATES = "critic/", "critic/updates"


class Critic:
    """A linear head on the last hidden states of the policy's own pass, in float32, and its optimiser.

    It begins at 0, so that no draw is needed, and takes no gradient to the states.
    """

    def __init__(self, model: Any, spec: CriticSpec, ranks: RankGroup, *, max_grad_norm: float) -> None:
        width = model.config.get_text_config(decoder=True).hidden_size  # D, of the last hidden states
        self._head = torch.nn.Linear(width, 1).to(next(model.parameters()).device)
        for weight in self._head.parameters():
            torch.nn.init.zeros_(weight)
        self._optimiser = Optimiser(
            self._head, learning_rate=spec.learning_rate, warmup_steps=0, max_grad_norm=max_grad_norm
        )
        self._ranks = ranks  # each has the whole head

    def read(self, model: Any, part: Batch, passed: Callable[[], TokenPredictions]) -> tuple[TokenPredictions, Tensor]:
        """What a pass says of some rollouts, and the values [b, R] of the states it predicts their tokens from."""
        seen: list[Tensor] = []

        def listen(_: Any, __: Any, keywords: dict[str, Any], output: Any) -> None:
            if "kv" in keywords:  # a pass, and not logits made piecemeal
                seen.append(output.last_hidden_state.detach())

        # where the decoder hands its states to the head: what the model returns are logits alone
        handle = find_decoder(model).register_forward_hook(listen, with_kwargs=True)
        try:
            read = passed()
        finally:
            handle.remove()
        # a decoder that is called by another road never reaches the hook
        if not seen:
            raise RunError(
                f"{type(model).__name__} does not ask its decoder as causal models do; train without a critic"
            )
        states = seen[-1]  # the pass over the prompts comes before
        chosen = states[read.columns].float()  # [n, D]; a state predicts the token after it, as its logits do
        return read, part.spread(self._head(chosen)[:, 0])  # [n, 1] to [b, R], 0 where nothing was sampled

    def step(self) -> None:
        """Follow the gradient of the value term; one that is not finite changes nothing."""
        if self._ranks.count > 1:
            for weight in self._head.parameters():
                # a rank whose rows all weigh nothing has none
                weight.grad = self._ranks.summed(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        self._optimiser.step()

    def tensors(self) -> dict[str, Tensor]:
        """Head, moments and the count of updates, keyed ``critic/...``."""
        own = {_PREFIX + name: tensor for name, tensor in self._optimiser.tensors().items()}
        # as a tensor, since a state's file holds nothing else
        return own | {_UPDATES: torch.tensor(self._optimiser.updates)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``tensors`` returned; raises DataError where it does not fit."""
        count = tensors.get(_UPDATES)
        if count is None or count.shape != () or count.dtype != torch.int64 or count < 0:
            raise DataError("training state holds no count of the critic's updates; delete the checkpoint folder")
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(_PREFIX)}
        self._optimiser.load(own, int(count))


class OldPolicy(NamedTuple):
    """What the weights before the first gradient step say of a batch, [B, R]."""

    logprobs: Tensor  # nats, 0 where nothing was sampled
    values: Tensor | None = None

    def critic_inputs(
        self, values: Tensor | None, returns: Tensor | None, rows: Tensor, clip: float
    ) -> CriticInputs | None:
        """What a loss with a critic needs for some rows; None without a critic."""
        if values is None or returns is None or self.values is None:
            return None
        return CriticInputs(values, self.values[rows], returns[rows], clip)


class Learner:
    """A model that learns as its arm and loss say; ``reference`` is the model that it is held against, or None.

    Of several ranks, whose weights are shards, each reads its own groups, and all know what every one has read.
    """

    def __init__(self, model: Any, config: TrainConfig, reference: Any, ranks: RankGroup = ALONE) -> None:
        self.model, self.config, self._reference, self.ranks = model, config, reference, ranks
        self.optimiser = Optimiser(
            model,
            learning_rate=config.learning_rate,
            warmup_steps=config.warmup_steps,
            max_grad_norm=config.max_grad_norm,
            ranks=ranks,
        )
        has_critic = LOSSES.get(config.loss).critic
        self._critic = Critic(model, config.critic, ranks, max_grad_norm=config.max_grad_norm) if has_critic else None

    def read(self, part: Batch) -> tuple[TokenPredictions, Tensor | None]:
        """What the arm's view says of a microbatch, and the critic's values [b, R] of the same states."""
        # dense or shadow: the one place where arms differ in what is learned from
        kind = self.config.design.learner
        if self._critic is None:
            return self._tokens(part, kind), None
        return self._critic.read(self.model, part, lambda: self._tokens(part, kind))

    def _tokens(self, part: Batch, kind: LearnerPass) -> TokenPredictions:
        apart = self.ranks.count > 1
        return read_tokens(self.model, part.rollouts, part.group, kind, self.config.temperature, apart=apart)

    def idle(self, batch: Batch) -> None:
        """Keep the others company in a pass over a microbatch: they wait for each layer's weights and gradients."""
        part = batch.idle
        read, _ = self.read(part)
        gap = self.distillation_kl(part, read)
        # both are sums over no token: 0, and so are the gradients
        torch.autograd.backward(read.logprobs.sum() if gap is None else read.logprobs.sum() + gap.sum())

    def read_old_policy(self, batch: Batch, parts: Sequence[Sequence[int]]) -> OldPolicy:
        """The arm's view of a whole batch, without gradient, in ``parts``: rows of each microbatch of this rank's.

        They are those that gradients will be taken on: rounding depends on what shares a pass, and a bound as narrow as
        gspo's would clip on it.
        """
        logprobs, values = torch.zeros_like(batch.sampler_logprobs), torch.zeros_like(batch.sampler_logprobs)
        with torch.no_grad(), full_weights(self.model):
            for rows in parts:
                part = batch.of(rows)
                read, own = self.read(part)
                at = upload(torch.tensor(rows), values.device)
                logprobs[at] = part.spread(read.logprobs)
                values[at] = 0.0 if own is None else own
        # rows of other ranks are 0 here, so the sum puts the batch together
        logprobs, values = self.ranks.summed(logprobs), self.ranks.summed(values)
        return OldPolicy(logprobs, None if self._critic is None else values)

    def anchor(self, batch: Batch) -> Tensor | None:
        """Reference log-probs [B, R] under the arm's view: beta pulls to what it says of what the policy sees."""
        if self._reference is None:
            return None
        return self._pass(self._reference, batch, self.config.design.learner)

    def replayed(self, batch: Batch) -> Tensor:
        """Log-probs [B, R] of what the sampler saw, whatever the arm's learner sees."""
        kind: LearnerPass = "shadow" if self.config.design.rollout == "compressed" else "dense"
        return self._pass(self.model, batch, kind)

    def dense(self, batch: Batch) -> Tensor:
        """Log-probs [B, R] of the dense view, without gradient, whatever the arm's learner sees."""
        return self._pass(self.model, batch, "dense")

    def _pass(self, model: Any, batch: Batch, kind: LearnerPass) -> Tensor:
        # own groups of this rank; found [B, R]
        own, found = self.ranks.share(len(batch.rollouts) // batch.group), torch.zeros_like(batch.sampler_logprobs)
        rows = range(own.start * batch.group, own.stop * batch.group)
        with full_weights(model):
            found[rows.start : rows.stop] = pass_logprobs(
                model, batch.of(rows), kind, self.config, apart=self.ranks.count > 1
            )
        return self.ranks.summed(found)

    def distillation_kl(self, part: Batch, shadow: TokenPredictions) -> Tensor | None:
        """KL(learner || sg(teacher)) per token [b, R], the dense view and the shadow view in one of the two roles.

        0 where a group earned nothing, unless configured otherwise: a starved shadow is a bad teacher. None in an arm
        that does not distil.
        """
        if not self.config.design.distill:
            return None
        dense = self._tokens(part, "dense")
        learner, teacher = (dense, shadow) if self.config.distill_towards == "shadow" else (shadow, dense)
        gap = part.spread(learner.distributions.kl(teacher.distributions))  # nats [b, R]
        return gap if self.config.distill_where == "everywhere" else gap * part.earned[:, None]

    def step(self) -> StepResult:
        """Take a gradient step; what there is to say of the policy's gradient."""
        # the critic may step although the policy skipped: its own gradient was finite
        result = self.optimiser.step()
        if self._critic is not None:
            self._critic.step()
        return result

    def tensors(self) -> dict[str, Tensor]:
        """All that the next step needs, by name."""
        return self.optimiser.tensors() | ({} if self._critic is None else self._critic.tensors())

    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Put back what ``tensors`` returned after ``updates`` updates; raises DataError where it does not fit."""
        self.optimiser.load(tensors, updates)
        if self._critic is not None:
            self._critic.load(tensors)
