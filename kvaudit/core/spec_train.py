"""The training section of a spec: its arms and seeds, and the options of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from kvaudit.core.alarms import ALARMS
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.policy_names import DENSE_POLICY, ENGINE, folder_names, match_policies
from kvaudit.core.spec_parts import (
    BatchTokens,
    Count,
    Factor,
    Group,
    Norm,
    Number,
    OmitDefault,
    Policies,
    Policy,
    PromptCount,
    Rank,
    Rate,
    Seed,
    Share,
    ShareOrZero,
    SpecSection,
    Steps,
    Temperature,
    Text,
    Tokens,
    check_unique,
    is_scalar,
)
from kvaudit.core.text import short_repr

BASE_ARM = "base"  # the model before any training
DENSE_ARM = "dense"  # the only arm with uncompressed rollouts


class SftSpec(SpecSection):
    """The warm start of all arms: ``steps`` of supervised training on right answers to items of the training split."""

    steps: Count
    learning_rate: Rate = 1e-4
    prompts_per_step: PromptCount = 16
    warmup_steps: Steps = 5


class AdapterSpec(SpecSection):
    """The options of a LoRA adapter (Hu et al. 2021, arXiv:2106.09685).

    ``targets`` name the linear layers to adapt by the last part of their names, such as ``q_proj``; () means all.
    """

    rank: Rank = 16
    alpha: Count = 32
    targets: tuple[Text, ...] = ()


class CriticSpec(SpecSection):
    """The options of a loss with a value head (Schulman et al. 2016, arXiv:1506.02438).

    ``discount`` and ``trace`` are the gamma and lambda of generalised advantage estimation (GAE). ``clip`` is the
    largest change of a value within a batch. ``learning_rate`` is the learning rate of the value head.
    """

    discount: Share = 1.0  # gamma
    trace: Share = 0.95  # lambda
    clip: Norm = 0.2  # how far a value may move within a batch
    learning_rate: Rate = 1e-3


class ValidationSpec(SpecSection):
    """The options of validation every ``every`` steps, on ``items`` items of each suite; training uses none of these.

    An arm stops at a validation if an alarm in ``stop_on`` was raised in each of the last ``patience`` steps before it.
    All arms of the seed then end at the step of the earliest such stop.
    """

    every: Count
    items: Count = 16
    suites: tuple[Text, ...] = ()  # (): those of training
    stop_on: tuple[Text, ...] = ()
    patience: Count = 3

    @model_validator(mode="after")
    def _check_alarms(self) -> Self:
        for name in check_unique("train.watch.stop_on", self.stop_on):
            if name not in ALARMS:
                raise UnknownName("alarm in train.watch.stop_on", name, ALARMS)
        return self


def _check_reward(value: Any) -> Any:
    """Return a reward's name as text, or its mapping of plain options unchanged; raise pydantic's error for others.

    The reward itself checks the options later.
    """
    options = value if isinstance(value, Mapping) else {"": value}
    for key, option in options.items():
        entries = option if isinstance(option, list) and isinstance(value, Mapping) else [option]
        if not isinstance(key, str) or not all(entry is None or is_scalar(entry) for entry in entries):
            raise PydanticCustomError("reward", "a name, or a mapping such as {function: package.module:name}")
    return value if isinstance(value, Mapping) else str(value)


class Training(SpecSection):
    """The options of training that all arms and seeds share; a loss may define other defaults in its file.

    ``policy`` is the compressed policy; every arm records it, and arms with compressed rollouts use it. ``weights`` are
    the relative numbers of prompts from each suite, () for equal numbers. ``ledger_every`` is the number of steps
    between saved ledgers (which cache entries each rollout kept); 0 saves none. ``rollout_rows`` is the largest number
    of rollouts that are sampled at once, in whole groups; 0 means all rollouts of a step.
    """

    policy: Policy
    suites: tuple[str, ...]
    weights: tuple[Number, ...] = ()
    context_tokens: Tokens = 192
    steps: Count = 60
    prompts_per_step: PromptCount = 16
    group: Group = 8
    learning_rate: Rate = 1e-4
    warmup_steps: Steps = 5
    epsilon_low: Factor = 0.2
    epsilon_high: Factor = 0.2
    beta: Factor = 0.0
    loss: str = "grpo"
    temperature: Temperature = 1.0
    distill_weight: Factor = 0.1
    max_grad_norm: Norm = 1.0
    microbatch_tokens: BatchTokens = 16384
    save_every: Count = 20
    ledger_every: Steps = 20
    updates_per_batch: Group = 1
    sft: OmitDefault[SftSpec | None] = None
    adapter: OmitDefault[AdapterSpec | None] = None
    gradient_checkpointing: OmitDefault[bool] = False
    rollout_rows: OmitDefault[Steps] = 0
    minibatches: OmitDefault[Group] = 1  # gradient steps per pass over a batch, each on an equal share of the prompts
    resample: OmitDefault[Steps | None] = None  # how often a group with equal rewards is sampled again
    # the last share of the token limit, in which length costs reward; 0 is off
    overlong: OmitDefault[ShareOrZero | None] = None
    critic: OmitDefault[CriticSpec] = CriticSpec()
    distill_towards: OmitDefault[Literal["shadow", "dense"]] = "shadow"  # the pass that teaches the other
    distill_where: OmitDefault[Literal["earned", "everywhere"]] = "earned"  # earned: groups whose rewards are not all 0
    watch: OmitDefault[ValidationSpec | None] = None
    # text, or {NAME: argument, option: value}
    reward: OmitDefault[Annotated[Any, BeforeValidator(_check_reward)]] = "grade"
    ranks: OmitDefault[Count] = 1  # of runs of earlier versions, which could train a unit in several processes
    rollouts: OmitDefault[Policy | None] = None  # the engine that draws them, with its settings; None: our own cache

    @property
    def updates_per_step(self) -> int:
        """The number of gradient steps on one batch of rollouts."""
        return self.updates_per_batch * self.minibatches

    @property
    def validation_suites(self) -> tuple[str, ...]:
        """The suites of validation; () without validation."""
        return () if self.watch is None else self.watch.suites or self.suites

    @property
    def stops(self) -> bool:
        """Whether an alarm may stop training."""
        return self.watch is not None and bool(self.watch.stop_on)

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Set options that the spec does not give to their values in ``defaults``, while the spec is being checked.

        An option that is null counts as not given: it is not written to a file, and a written spec must parse to an
        equal one.
        """
        for key, value in defaults.items():
            if key not in self.model_fields_set or getattr(self, key) is None:
                object.__setattr__(self, key, value)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        are_unique = 0 < len(set(self.suites)) == len(self.suites)
        _require("epsilon_low", self.epsilon_low, "less than 1", self.epsilon_low < 1)
        _require("group", self.group, "2 or more, advantages compare rollouts of one prompt", self.group >= 2)
        _require("suites", list(self.suites), "at least one suite, each once", are_unique)
        check_unique("train.watch.suites", self.validation_suites)
        if self.watch is not None and self.watch.stop_on:
            expected = f"at most the {self.steps} steps of training, or the stop never comes"
            _require("watch.patience", self.watch.patience, expected, self.watch.patience <= self.steps)
        rows, expected = self.rollout_rows, f"0, or {self.group} or more: a group is sampled at once"
        _require("rollout_rows", rows, expected, rows == 0 or rows >= self.group)
        expected = f"a divisor of the {self.prompts_per_step} prompts of a step"
        _require("minibatches", self.minibatches, expected, self.prompts_per_step % self.minibatches == 0)
        if self.weights:
            fits = len(self.weights) == len(self.suites) and min(self.weights) >= 0 and sum(self.weights) > 0
            _require("weights", list(self.weights), f"{len(self.suites)} numbers of 0 or more, one per suite", fits)
        return self


class Pairs(SpecSection):
    """The arms (ways to train) and seeds of the training runs: every arm is trained with every seed."""

    arms: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[Seed, ...] = Field(min_length=1)


class TrainedArm(NamedTuple):
    """An arm of a run: its ``name`` in folders and records, its kind (``recipe``, such as naive) and rollout policy."""

    name: str
    recipe: str
    policy: str


class TrainSpec(Training, Pairs):  # the fields of the last base come first in a written spec
    """The section ``train``: all training runs. A ``kvaudit.audit.training.config.TrainConfig`` describes one of them.

    ``policies`` make a sweep: every arm is trained under each policy, ``dense`` only once. ``only`` maps an arm to
    those policies of the sweep that it is trained under.
    """

    policies: OmitDefault[Policies] = ()
    only: OmitDefault[dict[str, Policies]] = Field(default_factory=dict)

    @property
    def trained(self) -> tuple[TrainedArm, ...]:
        """Every arm of the run, in the order of ``arms``; in a sweep of policies an arm is called ARM_POLICY."""
        if not self.policies:
            return tuple(TrainedArm(recipe, recipe, self.policy) for recipe in self.arms)
        names, arms = folder_names(self.policies), list[TrainedArm]()
        for recipe in self.arms:
            if recipe == DENSE_ARM:
                arms.append(TrainedArm(recipe, recipe, DENSE_POLICY))
            else:
                policies = self.only.get(recipe, self.policies)
                arms += (TrainedArm(f"{recipe}_{names[policy]}", recipe, policy) for policy in policies)
        return tuple(arms)

    @property
    def pairs(self) -> tuple[tuple[str, int], ...]:
        """The (arm, seed) of every training run, seed by seed, so that an interrupted run has complete seeds."""
        return tuple((arm.name, seed) for seed in self.seeds for arm in self.trained)

    def written(self) -> dict[str, Any]:
        """Return the section as plain values, without ``policy`` for a sweep."""
        row = super().written()
        if self.policies:
            del row["policy"]
        return row

    @model_validator(mode="before")
    @classmethod
    def _fill_policy(cls, value: Any) -> Any:
        """Set ``policy`` to ``none`` if the section has a sweep of ``policies``, or ``rollouts`` of an engine.

        In both cases only the arm ``dense`` uses ``policy``. Raises SpecError if the section has more than one of
        ``policy``, ``policies`` and ``rollouts``; ``policy: none`` is allowed with ``rollouts``.
        """
        if not isinstance(value, Mapping):
            return value
        if (rollouts := value.get("rollouts")) is not None:
            if not isinstance(rollouts, str) and not (isinstance(rollouts, Mapping) and rollouts.get(ENGINE)):
                raise SpecError(
                    f"train.rollouts is {short_repr(rollouts)}, which names no engine; wanted {{engine: vllm, "
                    "kv_cache_dtype: fp8}, or another engine with its settings"
                )
            if "policies" in value or value.get("policy", DENSE_POLICY) != DENSE_POLICY:
                raise SpecError("train has rollouts of an engine and a policy of our own cache; give one of the two")
        elif "policies" not in value:
            return value
        elif "policy" in value:
            raise SpecError("train has policy and policies; give policies alone, every arm is trained under each")
        return {**value, "policy": DENSE_POLICY}

    @model_validator(mode="after")
    def _check_names(self, info: ValidationInfo) -> Self:
        check_unique("train.arms", self.arms)
        check_unique("train.seeds", self.seeds)
        if "policies" in self.model_fields_set and not check_unique("train.policies", self.policies):
            raise SpecError("train.policies is empty; give one policy at least, or policy: alone")
        if self.only and not self.policies:
            raise SpecError("train.only selects policies of a sweep for an arm; give policies too")
        object.__setattr__(self, "only", {arm: self._selected(arm, texts) for arm, texts in self.only.items()})
        if info.context is not None:
            self.fill(info.context.loss_defaults(self.loss))
            info.context.check_training(self)
        return self

    def _selected(self, arm: str, texts: tuple[str, ...]) -> tuple[str, ...]:
        """Return the policies that ``only`` names for an arm, as the sweep spells them and in its order.

        Raises SpecError or UnknownName for an arm or a policy that the sweep does not have.
        """
        if arm not in self.arms or arm == DENSE_ARM:
            raise UnknownName("arm in train.only", arm, (name for name in self.arms if name != DENSE_ARM))
        selected = match_policies(check_unique(f"train.only.{arm}", texts), self.policies)
        for policy in selected:
            if policy not in self.policies:
                raise UnknownName(f"policy in train.only.{arm}", policy, self.policies)
        if not selected:
            raise SpecError(f"train.only.{arm} names no policy; leave the arm out of train.arms instead")
        return tuple(policy for policy in self.policies if policy in selected)


def _require(name: str, value: Any, expected: str, is_valid: bool) -> None:
    if not is_valid:
        raise SpecError(f"training option {name!r} is {value!r}, wanted {expected}")
