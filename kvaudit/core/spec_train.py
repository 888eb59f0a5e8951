"""The training section of a spec: which training runs there are, and how each is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from kvaudit.core.alarms import ALARMS
from kvaudit.core.policy_names import ENGINE
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.policy_names import DENSE_POLICY, folder_names, match_policies
from kvaudit.core.spec_parts import (
    BatchTokens,
    Count,
    Factor,
    Group,
    Norm,
    Number,
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
    is_scalar,
    check_unique,
)
from kvaudit.core.text import short_repr

BASE_ARM = "base"  # the model before any training
DENSE_ARM = "dense"  # the one arm whose rollouts are not compressed


class SftSpec(SpecSection):
    """The warm start: ``steps`` of supervised learning on gold answers of the training split, before any arm begins."""

    steps: Count
    learning_rate: Rate = 1e-4
    prompts_per_step: PromptCount = 16
    warmup_steps: Steps = 5


class AdapterSpec(SpecSection):
    """A LoRA adapter (Hu 2021, 2106.09685); ``targets`` are linear layers by the last part of their names, () all."""

    rank: Rank = 16
    alpha: Count = 32
    targets: tuple[Text, ...] = ()


class CriticSpec(SpecSection):
    """How a loss with a value head estimates advantages (Schulman 2016, 1506.02438: gamma and lambda), and learns it.

    A value moves by ``clip`` at most within a batch.
    """

    discount: Share = 1.0
    trace: Share = 0.95
    clip: Norm = 0.2
    learning_rate: Rate = 1e-3


class ValidationSpec(SpecSection):
    """Validation every so many steps, on ``items`` of each suite that training does not meet; () are its own suites.

    An alarm of ``stop_on`` that rang in the last ``patience`` steps before a validation ends all arms of its seed.
    """

    every: Count
    items: Count = 16
    suites: tuple[Text, ...] = ()
    stop_on: tuple[Text, ...] = ()
    patience: Count = 3

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in check_unique("train.watch.stop_on", self.stop_on):
            if name not in ALARMS:
                raise UnknownName("alarm in train.watch.stop_on", name, ALARMS)
        return self


def _rewarded(value: Any) -> Any:
    """The name of a reward, or a mapping with what it goes by; the reward's own file knows its options."""
    named = value if isinstance(value, Mapping) else {"": value}
    for key, option in named.items():
        listed = option if isinstance(option, list) and isinstance(value, Mapping) else [option]
        if not isinstance(key, str) or not all(entry is None or is_scalar(entry) for entry in listed):
            raise PydanticCustomError("reward", "a name, or a mapping such as {function: package.module:name}")
    return value if isinstance(value, Mapping) else str(value)


class Training(SpecSection):
    """How a policy is trained with, whatever the arm and the seed.

    ``policy`` is the compressed policy, named in every arm, used by those with compressed rollouts. ``weights`` are
    relative shares of prompts per suite, empty for equal ones. ``ledger_every`` 0 saves none. ``rollout_rows`` is how
    many rollouts are sampled at once, whole groups, 0 all of a step. A loss may have defaults of its own; they stand in
    its file.
    """

    later = (
        *("sft", "adapter", "gradient_checkpointing", "rollout_rows", "minibatches", "resample", "overlong", "critic"),
        *("distill_towards", "distill_where", "policies", "only", "watch", "reward", "ranks", "rollouts"),
    )

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
    sft: SftSpec | None = None
    adapter: AdapterSpec | None = None
    gradient_checkpointing: bool = False
    rollout_rows: Steps = 0
    minibatches: Group = 1  # gradient steps of one pass over a batch, each on its own share of the prompts
    resample: Steps | None = None  # how often a group is sampled again whose rewards are all alike
    overlong: ShareOrZero | None = None  # the last share of the most tokens, where length begins to cost; 0 is off
    critic: CriticSpec = CriticSpec()
    distill_towards: Literal["shadow", "dense"] = "shadow"  # the view that teaches the other
    distill_where: Literal["earned", "everywhere"] = "earned"  # groups whose rewards are not all 0, or all
    watch: ValidationSpec | None = None
    reward: Annotated[Any, BeforeValidator(_rewarded)] = "grade"  # text, or {NAME: what it goes by, option: value}
    ranks: Count = 1  # processes that share each batch and the optimiser's state, a GPU each
    rollouts: Policy | None = None  # the engine that draws them, with its settings; without, our own cache does

    @property
    def updates_per_step(self) -> int:
        """Gradient steps on one batch of rollouts."""
        return self.updates_per_batch * self.minibatches

    @property
    def validation_suites(self) -> tuple[str, ...]:
        """The suites that validation asks; none without."""
        return () if self.watch is None else self.watch.suites or self.suites

    @property
    def stops(self) -> bool:
        """Whether an alarm may end training."""
        return self.watch is not None and bool(self.watch.stop_on)

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Take what was not given from ``defaults``; only while the section is in the making.

        A null is not given: it is not written either, and what was written must read back as it was.
        """
        for key, value in defaults.items():
            if key not in self.model_fields_set or getattr(self, key) is None:
                object.__setattr__(self, key, value)

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        one_group = "2 or more, advantages compare rollouts of one prompt"
        once = 0 < len(set(self.suites)) == len(self.suites)
        _require("epsilon_low", self.epsilon_low, "less than 1", self.epsilon_low < 1)
        _require("group", self.group, one_group, self.group >= 2)
        _require("suites", list(self.suites), "at least one suite, each once", once)
        check_unique("train.watch.suites", self.validation_suites)
        if self.watch is not None and self.watch.stop_on:
            in_time = f"at most the {self.steps} steps of training, or the stop never comes"
            _require("watch.patience", self.watch.patience, in_time, self.watch.patience <= self.steps)
        whole_groups = f"0, or {self.group} or more: a group is sampled at once"
        _require(
            "rollout_rows", self.rollout_rows, whole_groups, self.rollout_rows == 0 or self.rollout_rows >= self.group
        )
        parts = f"a divisor of the {self.prompts_per_step} prompts of a step"
        _require("minibatches", self.minibatches, parts, self.prompts_per_step % self.minibatches == 0)
        apiece = self.prompts_per_step // self.minibatches
        _require("ranks", self.ranks, f"at most the {apiece} prompts of a gradient step", self.ranks <= apiece)
        if self.weights:
            fitting = len(self.weights) == len(self.suites) and min(self.weights) >= 0 and sum(self.weights) > 0
            _require("weights", list(self.weights), f"{len(self.suites)} numbers of 0 or more, one per suite", fitting)
        return self


class Pairs(SpecSection):
    """Which training runs there are: every arm with every seed."""

    arms: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[Seed, ...] = Field(min_length=1)


class TrainedArm(NamedTuple):
    """An arm of a run: ``name`` in its folders, records and report; the recipe, and the policy it is trained under."""

    name: str
    recipe: str
    policy: str


class TrainSpec(Training, Pairs):  # a written spec begins with the fields of the last base
    """The paired training runs: ``kvaudit.audit.training.config.TrainConfig`` is one of them.

    ``policies`` are a sweep: every arm is trained under each of them, ``dense`` once, which has no use for any.
    ``only`` names arms that are trained under some of them alone.
    """

    policies: Policies = ()
    only: dict[str, Policies] = Field(default_factory=dict)

    @property
    def trained(self) -> tuple[TrainedArm, ...]:
        """Every arm of the run, in the order of ``arms``; one of a sweep is called RECIPE_POLICY."""
        if not self.policies:
            return tuple(TrainedArm(recipe, recipe, self.policy) for recipe in self.arms)
        words, found = folder_names(self.policies), list[TrainedArm]()
        for recipe in self.arms:
            if recipe == DENSE_ARM:
                found.append(TrainedArm(recipe, recipe, DENSE_POLICY))
            else:
                own = self.only.get(recipe, self.policies)
                found += (TrainedArm(f"{recipe}_{words[policy]}", recipe, policy) for policy in own)
        return tuple(found)

    @property
    def pairs(self) -> tuple[tuple[str, int], ...]:
        """Every training run as name of its arm and seed: seed by seed, so that a run cut short holds whole seeds."""
        return tuple((arm.name, seed) for seed in self.seeds for arm in self.trained)

    def written(self) -> dict[str, Any]:
        """Of a sweep without the one policy that it has not."""
        row = super().written()
        if self.policies:
            del row["policy"]
        return row

    @model_validator(mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        """A sweep as a section whose own policy compresses nothing: no arm is trained under it but ``dense``.

        So is a section whose rollouts an engine draws.
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
    def _known(self, info: ValidationInfo) -> Self:
        check_unique("train.arms", self.arms)
        check_unique("train.seeds", self.seeds)
        if "policies" in self.model_fields_set and not check_unique("train.policies", self.policies):
            raise SpecError("train.policies is empty; give one policy at least, or policy: alone")
        if self.only and not self.policies:
            raise SpecError("train.only says which policies of a sweep an arm is trained under; give policies too")
        object.__setattr__(self, "only", {arm: self._some(arm, own) for arm, own in self.only.items()})
        if info.context is not None:
            self.fill(info.context.loss_defaults(self.loss))
            info.context.check_training(self)
        return self

    def _some(self, arm: str, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The policies of the sweep that ``only`` names for an arm, in the order of the sweep."""
        if arm not in self.arms or arm == DENSE_ARM:
            raise UnknownName("arm in train.only", arm, (known for known in self.arms if known != DENSE_ARM))
        own = match_policies(check_unique(f"train.only.{arm}", asked), self.policies)
        for policy in own:
            if policy not in self.policies:
                raise UnknownName(f"policy in train.only.{arm}", policy, self.policies)
        if not own:
            raise SpecError(f"train.only.{arm} names no policy; leave the arm out of train.arms instead")
        return tuple(policy for policy in self.policies if policy in own)


def _require(name: str, got: Any, wanted: str, holds: bool) -> None:
    if not holds:
        raise SpecError(f"training option {name!r} is {got!r}, wanted {wanted}")
