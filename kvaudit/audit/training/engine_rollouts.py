"""Training rollouts sampled by a serving engine, which gets the learner's current weights before every step.

The ``dense`` arm samples from the engine without compression, all other arms with the given settings. The engine only
returns token ids and log-probs; questions, seeds, rewards and losses are kvaudit's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvaudit.audit.cache.engine_store import EngineStore
from kvaudit.audit.cache.layers import kv_heads, layer_plans
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.engines import ENGINES, Condition, GenerationRequest, parse_condition
from kvaudit.audit.engines.base import Drawer, DrawnRollout, EngineContext, EngineFailed, turn_seed
from kvaudit.audit.policies import Dense, Policy
from kvaudit.audit.sampling.chat import ChatTokens
from kvaudit.audit.sampling.conversations import AskedItem, Conversation, GradedRow, check_fits, item_prompt
from kvaudit.audit.sampling.decoding import Completion
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.adapters import merged_weights, without_adapter
from kvaudit.audit.training.batch import TrainingItem
from kvaudit.audit.training.config import TrainConfig, get_arm
from kvaudit.audit.training.learner import read_tokens
from kvaudit.audit.training.rewards.base import RewardFn
from kvaudit.audit.training.rollouts import RolloutSampler, StepRollouts, dense_rollout
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.files import in_file_name
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.spec_train import TrainSpec

T = TypeVar("T")
# largest mean gap of a rollout between engine and replay of its store, nats a token; float32 reaches 1e-5
_MAX_GAP, _MAX_GAP_ROUNDED = 5e-3, 0.1
_TRIES = 3  # of one call, with a new start of the engine each time
_KEPT = "saved work is kept: start the run again"


class EngineUse(NamedTuple):
    """How to run the sampling engine; ``spec`` is the engine's entry in the spec.

    ``on_start`` is called at every start of the engine with its condition (name and settings) and its description.
    """

    spec: EngineSpec = EngineSpec()
    on_start: Callable[[Condition, Mapping[str, str]], None] = lambda *_: None


class EngineRolloutSampler(RolloutSampler):
    """A rollout sampler that uses an engine with the weights of ``model``; ``base`` is the model before training.

    The engine starts when the first rollouts are sampled. If it dies, it is restarted; a call is tried _TRIES times.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: LoadedModel,
        questions: Sequence[Sequence[TrainingItem]],
        reward: RewardFn,
        *,
        base: LoadedModel,
        use: EngineUse,
        logs: Path,
    ) -> None:
        super().__init__(config, model, questions, reward)
        assert config.rollout_engine is not None
        self._condition, self._base, self._use = config.rollout_engine, without_adapter(base), use
        engine = f"{in_file_name(self._condition.engine)}-{self._condition.hash}"
        self._log = logs / f"{engine}-{config.arm}-{config.seed}.log"
        self._drawer: Drawer | None = None
        self._stored_rollouts = 0  # rollouts whose keys and values the engine returns

    def sample(self, step: int) -> StepRollouts:
        """Return a step's rollouts as ``RolloutSampler`` does; raise RunError if the engine has stale weights."""
        config = self._config
        reads_store = config.design.learner == "shadow" or config.has_certificate(step + 1)
        if config.store is None:
            self._stored_rollouts = 0
        else:  # all of a step if the arm or its certificate reads them, else one to detect stale weights
            self._stored_rollouts = config.prompts_per_step * config.group if reads_store else 1
        self._push_weights()
        sampled = super().sample(step)
        self._check_fresh(sampled.rollouts[0])
        return sampled

    def close(self) -> None:
        """Stop the engine."""
        if self._drawer is not None:
            self._drawer.stop()
        self._drawer = None

    def _check_fresh(self, rollout: Rollout) -> None:
        """Raise RunError if the engine's log-probs of a rollout differ from the learner's by more than rounding.

        They do so if the engine's weights are stale. If it is unknown how the engine stores keys and values, nothing is
        checked: the allowed difference would have to cover quantisation error too, and would hide stale weights.
        """
        if any(turn.stored is None or turn.written is None for turn in rollout.engine_turns):
            return
        with torch.no_grad():
            read = read_tokens(self._model.model, [rollout], 1, "shadow", self._config.temperature)
        engine_logprobs = rollout.sampler_logprobs[rollout.sampled].to(read.logprobs.device)  # [n] nats
        gap = float((read.logprobs - engine_logprobs).abs().mean())
        assert self._drawer is not None
        bound = _MAX_GAP if self._drawer.exact and self._model.dtype == torch.float32 else _MAX_GAP_ROUNDED
        # negated, so that NaN is refused too
        if not gap <= bound:
            raise RunError(
                f"engine {self._condition.engine} and the learner's weights disagree on the engine's rollout by "
                f"{gap:.3g} nats a token, at most {bound} is allowed: the engine samples from stale weights, or stores "
                f"its cache in another way than configured; {_KEPT}"
            )

    def _push_weights(self) -> None:
        self._call(lambda drawer: drawer.push(merged_weights(self._model.model)))

    def _call(self, work: Callable[[Drawer], T], before_retry: Callable[[], None] = lambda: None) -> T:
        """Return ``work(engine)``; if the engine dies, restart it, call ``before_retry`` and try again."""
        for retries in reversed(range(_TRIES)):
            try:
                return work(self._start())
            except EngineFailed as error:
                self.close()
                if not retries:
                    raise RunError(f"{error}; {_KEPT}") from None
                before_retry()
        raise AssertionError

    def _start(self) -> Drawer:
        if self._drawer is None:
            context = EngineContext(self._base, self._use.spec, self._log, torch.get_num_threads())
            self._drawer = ENGINES.get(self._condition.engine).drawer(dict(self._condition.settings), context)
            self._use.on_start(self._condition, self._drawer.described)
        return self._drawer

    def _play(
        self,
        questions: Sequence[TrainingItem],
        policies: Sequence[Policy],  # noqa: ARG002 - the engine has a single setting
        seeds: Sequence[int],
    ) -> list[GradedRow]:
        model, config, temperature = self._model, self._model.model.config, self._config.temperature
        rows = list[_Row]()
        for n, (suite, item) in enumerate(questions):
            prompt = item_prompt(model.chat, item)
            check_fits(model, suite, item, len(prompt.ids))
            for member in range(self._config.group):
                conversation = Conversation(AskedItem(suite, item, prompt, False), member, model)
                rows.append(_Row(conversation, prompt, seeds[n * self._config.group + member]))
        stops = tuple(sorted(model.chat.stop_ids))
        while open_rows := [row for row in rows if row.conversation.open]:
            requests = [row.request(stops, temperature) for row in open_rows]
            # a restarted engine has the weights that it was started with
            answers = self._call(partial(_draw, requests, self._stored_rollouts), before_retry=self._push_weights)
            for row, answer in zip(open_rows, answers, strict=True):
                row.take(answer)
        return [row.conversation.to_row(row.tokens.rollout(config, self._config.store)) for row in rows]


def _draw(requests: Sequence[GenerationRequest], keep: int, drawer: Drawer) -> list[DrawnRollout]:
    return drawer.draw(requests, keep=keep)


class _Turn(NamedTuple):
    """The tokens from ``start`` to ``end``, sampled in one request; ``written`` are keys and values of all before."""

    start: int
    end: int
    written: tuple[Tensor, Tensor] | None  # [tokens, L, H * D]


class RolloutTokens:
    """The tokens of a growing rollout: given tokens (prompt, tool replies) and tokens that an engine samples."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids, self._start = list(prompt), len(prompt)
        self._sampled, self._logprobs = [False] * len(prompt), [0.0] * len(prompt)
        self._turns: list[_Turn] = []

    def add_given(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled, such as a tool's reply."""
        self.ids += ids
        self._sampled += [False] * len(ids)
        self._logprobs += [0.0] * len(ids)

    def add_sampled(self, answer: DrawnRollout, until: int | None = None) -> None:
        """Append the first ``until`` tokens of an answer as sampled; None: all of them."""
        start = len(self.ids)
        self.ids += answer.ids[:until]
        self._logprobs += answer.logprobs[:until]
        self._sampled += [True] * (len(self.ids) - start)
        self._turns.append(_Turn(start, len(self.ids), answer.written))

    def rollout(self, config: Any, store: EngineStore | None = None) -> Rollout:
        """Return the tokens so far as a rollout; ``config`` is the model's configuration.

        A rollout of several answers has had a request for each of them, and the engine prefilled the whole conversation
        for each. If it returned keys and values, the rollout also lists its turns: each answer with the keys and values
        of its own request. ``store`` is how the engine stores keys and values, None if unknown.
        """
        if [turn.end for turn in self._turns] == [len(self.ids)]:
            return self._turn_rollout(config, store, self._turns[0])
        has_writes = all(turn.written is not None for turn in self._turns)
        turns = tuple(self._turn_rollout(config, store, turn) for turn in self._turns) if has_writes else ()
        rollout = self._plain_rollout(config, self._start, _Turn(0, len(self.ids), None))
        return replace(rollout, answer_start=self._turns[-1].start, stored=store, turns=turns)

    def _turn_rollout(self, config: Any, store: EngineStore | None, turn: _Turn) -> Rollout:
        written = None
        if turn.written is not None:  # [T - 1, L, H * D] to [L, H, T - 1, D]
            shape = turn.end - 1, len(layer_plans(config, Dense())), kv_heads(config), -1
            keys, values = (part[: turn.end - 1].reshape(shape).permute(1, 2, 0, 3) for part in turn.written)
            written = keys, values
        return replace(self._plain_rollout(config, turn.start, turn), stored=store, written=written)

    def _plain_rollout(self, config: Any, prompt_length: int, turn: _Turn) -> Rollout:
        """Return all tokens up to the end of ``turn`` as a rollout; tokens sampled before the turn count as given.

        ``config`` is the model's configuration, ``prompt_length`` the number of tokens that count as the prompt.
        """
        in_turn = torch.arange(turn.end) >= turn.start
        sampled = torch.tensor(self._sampled[: turn.end]) & in_turn
        logprobs = torch.tensor(self._logprobs[: turn.end]).where(in_turn, 0.0)
        return dense_rollout(config, torch.tensor(self.ids[: turn.end]), prompt_length, sampled, logprobs)


class _Row:
    """One conversation in progress, with its tokens so far."""

    def __init__(self, conversation: Conversation, prompt: ChatTokens, seed: int) -> None:
        self.conversation, self.tokens = conversation, RolloutTokens(prompt.ids)
        self._seed, self._turn = seed, 0

    def request(self, stops: tuple[int, ...], temperature: float) -> GenerationRequest:
        """Return the request for the next answer, given the whole conversation so far."""
        max_tokens = self.conversation.suite.max_new_tokens
        return GenerationRequest(
            tuple(self.tokens.ids), max_tokens, stops, temperature, 1.0, turn_seed(self._seed, self._turn)
        )

    def take(self, answer: DrawnRollout) -> None:
        """Add an answer to the conversation, then the environment's reply; the answer is cut after a stop text."""
        until = len(self.conversation.cut(answer.ids))
        finish = answer.finish if until == len(answer.ids) else "stop"
        self.tokens.add_sampled(answer, until)
        self.conversation.answer(Completion(answer.ids[:until], answer.logprobs[:until], finish))
        self.tokens.add_given(self.conversation.take_pending().ids)
        self._turn += 1


def check_rollout_engine(section: TrainSpec, model: LoadedModel, engine_spec: EngineSpec) -> None:
    """Raise SpecError if the engine that the section's ``rollouts`` names is not installed.

    Raises it too if an arm learns from the engine's compressed cache, but it is unknown how the engine stores some
    layers of this model.
    """
    if section.rollouts is None:
        return
    condition = parse_condition(section.rollouts)
    ENGINES.get(condition.engine).check(dict(condition.settings), engine_spec)
    shadows = [arm.name for arm in section.trained if get_arm(arm.recipe).learner == "shadow"]
    plans = layer_plans(model.model.config, Dense())
    if shadows and not all(plan.has_entries and plan.sliding_window is None for plan in plans):
        raise SpecError(
            f"arm {shadows[0]}: some layers of the model have a sliding window or a recurrent state, and it is not "
            "known how an engine stores those; use naive, tis or mis"
        )


def engine_rollout(
    config: Any, prompt: Sequence[int], answer: DrawnRollout, store: EngineStore | None = None
) -> Rollout:
    """Return an engine's answer to a prompt as a rollout; ``config`` is the model's configuration.

    ``store`` is how the engine stores keys and values, None if unknown.
    """
    tokens = RolloutTokens(prompt)
    tokens.add_sampled(answer)
    return tokens.rollout(config, store)


def engine_gap_numbers(
    sampler: Tensor, replayed: Tensor | None, dense: Tensor, mask: Tensor
) -> dict[str, float | None]:
    """Return how far the engine's log-probs are from the learner's, as root mean squares in nats per token.

    ``sampler`` [B, R] are the engine's log-probs. The learner's are ``dense`` (uncompressed cache) and ``replayed``
    (with the engine's stored keys and values; None if these are unknown). The numbers are ``engine/dense_rms`` and
    ``engine/replay_rms``, the gaps to these two, and ``engine/explained``: the share by which the square of the replay
    gap is smaller than that of the dense gap.
    """

    def rms(view: Tensor) -> float:
        return math.sqrt(float((sampler - view)[mask].double().square().mean()))

    dense_gap, replay_gap = rms(dense), None if replayed is None else rms(replayed)
    explained = None if replay_gap is None or not dense_gap else 1.0 - (replay_gap / dense_gap) ** 2
    return {"engine/dense_rms": dense_gap, "engine/replay_rms": replay_gap, "engine/explained": explained}
