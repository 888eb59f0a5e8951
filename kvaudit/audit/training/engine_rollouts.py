"""Rollouts of every step from a serving engine, as it was asked for, by the weights that the learner has just then.

The arms are those of any run: ``dense`` draws from the engine's uncompressed reference, all others from the setting.
Of the engine come token ids and their log-probs; questions, seeds, rewards and losses stay ours.
"""

from __future__ import annotations

import math
import shutil
import tempfile
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
from kvaudit.audit.training.arms import get_arm
from kvaudit.audit.training.batch import TrainingItem
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.ranks import ALONE, RankGroup
from kvaudit.audit.training.rewards.base import RewardFn
from kvaudit.audit.training.rollouts import RolloutSampler, StepRollouts, dense_rollout
from kvaudit.audit.training.token_logprobs import read_tokens
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.files import in_file_name
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.core.spec_train import DENSE_ARM, TrainSpec

T = TypeVar("T")
# between an engine and a replay of what it stored, nats a token, mean over a rollout: float32 comes to 1e-5
FRESH, FRESH_ROUNDED = 5e-3, 0.1
_TRIES = 3  # of one step's rollouts
_SAVED = "what is saved stays: start the run again"


class EngineUse(NamedTuple):
    """How an engine that draws is run, and ``hold``, which is told what it says it is at every start."""

    part: EngineSpec = EngineSpec()
    hold: Callable[[Condition, Mapping[str, str]], None] = lambda *_: None


class EngineRolloutSampler(RolloutSampler):
    """Asks the questions of every step of an engine, which has the weights of ``model``; ``base`` is what it began as.

    It is started at the first question, and again, a few times, where it is gone. Every rank has one of its own.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: LoadedModel,
        questions: Sequence[Sequence[TrainingItem]],
        pays: RewardFn,
        *,
        base: LoadedModel,
        use: EngineUse,
        logs: Path,
        ranks: RankGroup = ALONE,
    ) -> None:
        super().__init__(config, model, questions, pays, ranks)
        assert config.rollout_engine is not None
        self._condition, self._base, self._use = config.rollout_engine, without_adapter(base), use
        rank = f"-rank-{ranks.number}" if ranks.number else ""
        name = f"{in_file_name(self._condition.engine)}-{self._condition.hash}-{config.arm}-{config.seed}{rank}.log"
        self._log = logs / name
        self._drawer: Drawer | None = None
        self._keeps = 0  # rollouts, of which what the engine wrote is kept

    def _sampled(self, step: int, own: slice) -> StepRollouts:
        """What the engine wrote is kept where the arm, or its certificate, reads it."""
        config = self._config
        every = config.design.learner == "shadow" or config.has_certificate(step + 1)
        # where it is of use all of a step's; else the one by which stale weights are found out
        self._keeps = 0 if config.store is None else config.prompts_per_step * config.group if every else 1
        self._push()
        found = super()._sampled(step, own)
        self._check_fresh(found.rollouts[0])
        return found

    def close(self) -> None:
        """End the engine."""
        if self._drawer is not None:
            self._drawer.stop()
        self._drawer = None

    def _check_fresh(self, rollout: Rollout) -> None:
        """Raise RunError where the learner's weights do not say of a rollout what the engine said of it.

        Only where what the engine wrote is known, or the bound would have to be as wide as the codes are coarse.
        """
        if any(turn.stored is None or turn.written is None for turn in rollout.engine_turns):
            return
        with torch.no_grad():
            read = read_tokens(self._model.model, [rollout], 1, "shadow", self._config.temperature)
        said = rollout.sampler_logprobs[rollout.sampled].to(read.logprobs.device)  # [n] nats
        gap = float((read.logprobs - said).abs().mean())
        assert self._drawer is not None
        bound = FRESH if self._drawer.exact and self._model.dtype == torch.float32 else FRESH_ROUNDED
        # turned round, so that NaN is refused too
        if not gap <= bound:
            raise RunError(
                f"engine {self._condition.engine} says of its own rollout what the learner's weights do not: they are "
                f"{gap:.3g} nats a token apart, at most {bound} wanted: it draws by stale weights, or stores otherwise "
                f"than it was asked to; {_SAVED}"
            )

    def _push(self) -> None:
        self._tried(lambda drawer: drawer.push(merged_weights(self._model.model)))

    def _tried(self, work: Callable[[Drawer], T], again: Callable[[], None] = lambda: None) -> T:
        """``work`` of the engine, which is started anew, a few times, where it is gone; ``again`` comes before more."""
        for left in reversed(range(_TRIES)):
            try:
                return work(self._started())
            except EngineFailed as error:
                self.close()
                if not left:
                    raise RunError(f"{error}; {_SAVED}") from None
                # a new engine has the weights that it was started with
                again()
        raise AssertionError

    def _started(self) -> Drawer:
        if self._drawer is None:
            work = EngineContext(self._base, self._use.part, self._log, torch.get_num_threads())
            self._drawer = ENGINES.get(self._condition.engine).drawer(dict(self._condition.settings), work)
            self._use.hold(self._condition, self._drawer.described)
        return self._drawer

    def _play(
        self,
        questions: Sequence[TrainingItem],
        policies: Sequence[Policy],  # noqa: ARG002 - the engine's setting is one
        seeds: Sequence[int],
    ) -> list[GradedRow]:
        model, config, temperature = self._model, self._model.model.config, self._config.temperature
        rows = list[_Row]()
        for n, (suite, item) in enumerate(questions):
            prompt = item_prompt(model.chat, item)
            check_fits(model, suite, item, len(prompt.ids))
            for member in range(self._config.group):
                talk = Conversation(AskedItem(suite, item, prompt, False), member, model)
                rows.append(_Row(talk, prompt, seeds[n * self._config.group + member]))
        stops = tuple(sorted(model.chat.stop_ids))
        while speaking := [row for row in rows if row.talk.open]:
            asked = [row.asked(stops, temperature) for row in speaking]
            drawn = self._tried(partial(_draw, asked, self._keeps), again=self._push)
            for row, one in zip(speaking, drawn, strict=True):
                row.take(one)
        return [row.talk.to_row(row.said.rollout(config, self._config.store)) for row in rows]


def _draw(asked: Sequence[GenerationRequest], keep: int, drawer: Drawer) -> list[DrawnRollout]:
    return drawer.draw(asked, keep=keep)


class _Turn(NamedTuple):
    """The tokens that were drawn at once, from ``start`` to ``end``, and what the engine wrote of all up to them."""

    start: int
    end: int
    written: tuple[Tensor, Tensor] | None  # [tokens, L, H * D]


class RolloutTokens:
    """The tokens of a rollout under way, those that were given and those that an engine drew."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids, self._start = list(prompt), len(prompt)
        self._sampled, self._logprobs = [False] * len(prompt), [0.0] * len(prompt)
        self._turns: list[_Turn] = []

    def give(self, ids: Sequence[int]) -> None:
        """Tokens that nobody drew."""
        self.ids += ids
        self._sampled += [False] * len(ids)
        self._logprobs += [0.0] * len(ids)

    def take(self, drawn: DrawnRollout, until: int | None = None) -> None:
        """The tokens of an answer, the first ``until`` of them."""
        start = len(self.ids)
        self.ids += drawn.ids[:until]
        self._logprobs += drawn.logprobs[:until]
        self._sampled += [True] * (len(self.ids) - start)
        self._turns.append(_Turn(start, len(self.ids), drawn.written))

    def rollout(self, config: Any, store: EngineStore | None = None) -> Rollout:
        """The rollout with what the engine wrote of it, in turns where it read it so; ``config`` is the model's."""
        if [turn.end for turn in self._turns] == [len(self.ids)]:
            return self._turn(config, store, self._turns[0])
        known = all(turn.written is not None for turn in self._turns)
        turns = tuple(self._turn(config, store, turn) for turn in self._turns) if known else ()
        whole = self._plain(config, self._start, _Turn(0, len(self.ids), None))
        return replace(whole, answer_start=self._turns[-1].start, stored=store, turns=turns)

    def _turn(self, config: Any, store: EngineStore | None, turn: _Turn) -> Rollout:
        written = None
        if turn.written is not None:  # [T - 1, L, H * D] to [L, H, T - 1, D]
            shape = turn.end - 1, len(layer_plans(config, Dense())), kv_heads(config), -1
            keys, values = (part[: turn.end - 1].reshape(shape).permute(1, 2, 0, 3) for part in turn.written)
            written = keys, values
        return replace(self._plain(config, turn.start, turn), stored=store, written=written)

    def _plain(self, config: Any, prompt_length: int, turn: _Turn) -> Rollout:
        """All up to a turn's end, of which its tokens are sampled."""
        own = torch.arange(turn.end) >= turn.start
        sampled = torch.tensor(self._sampled[: turn.end]) & own
        logprobs = torch.tensor(self._logprobs[: turn.end]).where(own, 0.0)
        # nothing leaves, and what the engine allocated is not known
        return dense_rollout(config, torch.tensor(self.ids[: turn.end]), prompt_length, sampled, logprobs)


class _Row:
    """A conversation under way, the tokens of which ``said`` holds."""

    def __init__(self, talk: Conversation, prompt: ChatTokens, seed: int) -> None:
        self.talk, self.said, self._seed, self._turn = talk, RolloutTokens(prompt.ids), seed, 0

    def asked(self, stops: tuple[int, ...], temperature: float) -> GenerationRequest:
        """What the engine is to answer next: the whole conversation so far."""
        most = self.talk.suite.max_new_tokens
        return GenerationRequest(tuple(self.said.ids), most, stops, temperature, 1.0, turn_seed(self._seed, self._turn))

    def take(self, drawn: DrawnRollout) -> None:
        """Hear an answer, which ends where a text of its suite ends it, and what the environment says to it."""
        ends = (end for end in range(1, len(drawn.ids) + 1) if self.talk.has_ended(drawn.ids[:end]))
        until = next(ends, len(drawn.ids)) if self.talk.suite.until else len(drawn.ids)
        finish = drawn.finish if until == len(drawn.ids) else "stop"
        self.said.take(drawn, until)
        self.talk.answer(Completion(drawn.ids[:until], drawn.logprobs[:until], finish))
        self.said.give(self.talk.take_pending().ids)
        self._turn += 1


def check_rollout_engine(section: TrainSpec, model: LoadedModel, part: EngineSpec) -> None:
    """Raise SpecError where the engine of ``rollouts`` is not installed, or its store is not known of such layers."""
    if section.rollouts is None:
        return
    condition = parse_condition(section.rollouts)
    ENGINES.get(condition.engine).check(dict(condition.settings), part)
    shadows = [arm.name for arm in section.trained if get_arm(arm.recipe).learner == "shadow"]
    plans = layer_plans(model.model.config, Dense())
    if shadows and not all(plan.has_entries and plan.sliding_window is None for plan in plans):
        raise SpecError(
            f"arm {shadows[0]}: some layers of the model attend to a window or carry a state, and how an engine stores "
            "those is not known; take naive, tis or mis"
        )


def try_rollout_engine(section: TrainSpec, model: LoadedModel, part: EngineSpec) -> None:
    """Start the engine of ``rollouts`` once; raises RunError for what would otherwise come up behind the dense arm."""
    if section.rollouts is None or section.arms == (DENSE_ARM,):
        return
    condition = parse_condition(section.rollouts)
    logs = Path(tempfile.mkdtemp(prefix="kvaudit-engines-"))
    work = EngineContext(
        without_adapter(model), part, logs / f"{in_file_name(condition.engine)}.log", torch.get_num_threads()
    )
    try:
        ENGINES.get(condition.engine).drawer(dict(condition.settings), work).stop()
    except EngineFailed as error:
        raise RunError(f"{error} (train.rollouts {condition.canonical})") from None
    shutil.rmtree(logs)  # where an error names it, it stays


def engine_rollout(config: Any, prompt: Sequence[int], drawn: DrawnRollout, store: EngineStore | None = None) -> Rollout:
    """An engine's answer to a prompt as a rollout; ``config`` is the model's."""
    said = RolloutTokens(prompt)
    said.take(drawn)
    return said.rollout(config, store)


def engine_gap_numbers(sampler: Tensor, replayed: Tensor | None, dense: Tensor, mask: Tensor) -> dict[str, float | None]:
    """How far the engine's log-probs [B, R] are from two views of the learner, root mean square in nats a token.

    ``engine/explained`` is the share of the squared gap to the dense view that the replay of what was stored explains.
    """

    def rms(view: Tensor) -> float:
        return math.sqrt(float((sampler - view)[mask].double().square().mean()))

    whole, own = rms(dense), None if replayed is None else rms(replayed)
    explained = None if own is None or not whole else 1.0 - (own / whole) ** 2
    return {"engine/dense_rms": whole, "engine/replay_rms": own, "engine/explained": explained}
