"""What a training run is, apart from the base model: frozen, checked, hashed. The arm is one field of it."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import ValidationInfo, field_validator, model_validator

from kvaudit.audit.engines import ENGINES, Condition, parse_condition
from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.training.arms import Arm, get_arm
from kvaudit.audit.training.losses.base import LOSSES
from kvaudit.audit.training.rewards.base import RewardConfig, parse_reward
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_parts import Seed, SpecSection
from kvaudit.core.spec_train import BASE_ARM, AdapterSpec, CriticSpec, SftSpec, Training, TrainSpec
from kvaudit.suites.base import SUITES

if TYPE_CHECKING:
    from kvaudit.audit.cache.engine_store import EngineStore


class HashedConfig(ABC):
    """A configuration by which a checkpoint folder is claimed."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Plain JSON, the same for equal configurations."""

    @property
    def hash(self) -> str:
        """12 hex digits of the sha256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]


class TrainConfig(HashedConfig, Training):
    """One paired training run; raises SpecError or UnknownName.

    Two arms differ in ``arm``, those of a sweep in ``policy`` too, and in nothing else.
    """

    arm: str
    seed: Seed

    @classmethod
    def of(cls, section: TrainSpec, arm: str, seed: int) -> TrainConfig:
        """The training run of one seed of a spec and one arm, by its name in the run."""
        # what all arms have in common; arm, seed and policy are their own
        shared = section.model_dump(include=set(Training.model_fields))
        own = next(known for known in section.trained if known.name == arm)
        return cls(**(shared | {"arm": own.recipe, "seed": seed, "policy": own.policy}))

    @property
    def design(self) -> Arm:
        """The arm as data."""
        return get_arm(self.arm)

    @property
    def rollout_policy(self) -> Policy:
        """The policy that the arm's rollouts are sampled under."""
        return parse_policy(self.policy if self.design.rollout == "compressed" else "none")

    @cached_property
    def rollout_engine(self) -> Condition | None:
        """The engine that draws the arm's rollouts, uncompressed where the arm's are; None where our own cache does."""
        if self.rollouts is None:
            return None
        condition = parse_condition(self.rollouts)
        return condition if self.design.rollout == "compressed" else condition.reference

    @cached_property
    def store(self) -> EngineStore | None:
        """How that engine stores keys and values, where that is known and the learner can replay it."""
        engine = self.rollout_engine
        if engine is None:
            return None
        found = ENGINES.get(engine.engine).store(dict(engine.settings))
        # by forms that another version may not have: read for those alone who learn from it
        return None if found is not None and found.shown and self.design.learner != "shadow" else found

    def disclosed(self) -> dict[str, Any]:
        """What a reader of the checkpoint has to know of how it was trained, without this project's table of arms."""
        arm, policy = self.design, self.rollout_engine or self.rollout_policy
        return {
            "rollouts": policy.canonical,
            "rollouts_hash": policy.hash,
            "learner": arm.learner,
            "correction": arm.correction,
            "distillation": arm.distill,
            "loss": self.loss,
            "reward": self.reward_config.reward.name if self.reward_config.uses_grade_only else self.reward,
            "reward_sha256": self.reward_config.sha256,
            "constitution": self.reward_config.constitution_sha256,
        }

    @cached_property
    def reward_config(self) -> RewardConfig:
        """What pays the rollouts."""
        return parse_reward(self.reward, self.suites)

    @property
    def whole_groups(self) -> bool:
        """Whether a group must not be split over microbatches."""
        return LOSSES.get(self.loss).whole_groups

    def to_json(self) -> dict[str, Any]:
        return {"arm": self.arm, "seed": self.seed} | self.written()

    def keeps_ledger(self, steps: int) -> bool:
        """Whether the rollouts of the step that makes ``steps`` of them are kept; an engine's leave no ledger."""
        return self.rollouts is None and self.has_certificate(steps)

    def has_certificate(self, steps: int) -> bool:
        """Whether that step is held against what its sampler saw."""
        return self.ledger_every > 0 and steps % self.ledger_every == 0

    @field_validator("policy", "rollouts", mode="before")
    @classmethod
    def _canonical(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "rollouts":
            return None if value is None else parse_condition(value).canonical
        policy = parse_policy(value)
        # of a mixture every group draws one, so that its prompt has one ledger
        if not all(drawn.replayable for drawn in policy.draws):
            raise SpecError(
                f"training option 'policy' is {policy.canonical!r}, wanted a policy that can be replayed "
                "(see: kvaudit list policies)"
            )
        return policy.canonical

    @model_validator(mode="after")
    def _known(self) -> Self:
        get_arm(self.arm)
        for suite in (*self.suites, *self.validation_suites):
            SUITES.get(suite)
        parse_reward(self.reward, self.suites)
        loss = LOSSES.get(self.loss)
        # before the checks below, which look at what the loss fills in
        self.fill(loss.defaults)
        self._check_engine()
        if loss.reference and self.beta == 0:
            raise SpecError(f"loss {self.loss!r} is held against a reference, and 'beta' is 0; give beta more than 0")
        if not loss.critic and self.critic != CriticSpec():
            raise SpecError(f"training option 'critic' is of a loss with a value head (ppo), loss is {self.loss!r}")
        return self

    def _check_engine(self) -> None:
        drawn_by = self.rollout_engine
        if drawn_by is None:
            return
        ENGINES.get(drawn_by.engine).check_drawing(dict(drawn_by.settings))
        if self.design.learner == "shadow":
            self._check_replay(drawn_by, f"arm {self.arm} has the learner see what the sampler saw, and")

    def _check_replay(self, drawn_by: Condition, for_an_arm: str) -> None:
        """Raise SpecError where what the engine stored cannot be replayed."""
        if self.store is None:
            raise SpecError(
                f"{for_an_arm} how {drawn_by.canonical} stores keys and values is not known (no ledger, no quantiser); "
                "take naive, tis or mis, or other settings"
            )
        shown = (
            f"{for_an_arm} {drawn_by.engine} shows what its queries read and not what it coded, so what they would read"
        )
        if self.store.shown and self.updates_per_step > 1:
            raise SpecError(
                f"{shown} after the first of {self.updates_per_step} updates is not known; leave updates_per_batch and "
                "minibatches at 1, or take naive, tis or mis"
            )
        if self.store.shown and self.beta > 0:
            raise SpecError(
                f"{shown} by the weights of the reference, which 'beta' pulls to, is not known; leave beta at 0, or "
                "take naive, tis or mis"
            )


class StartConfig(HashedConfig, SpecSection):
    """The warm start of one seed: what of a train section it follows from, and nothing else, so that arms share it."""

    arm: ClassVar[str] = BASE_ARM  # the name under which it is kept and evaluated
    updates_per_step: ClassVar[int] = 1

    seed: Seed
    sft: SftSpec
    suites: tuple[str, ...]
    weights: tuple[float, ...]
    context_tokens: int
    adapter: AdapterSpec | None
    max_grad_norm: float
    microbatch_tokens: int
    save_every: int
    gradient_checkpointing: bool

    @classmethod
    def of(cls, section: TrainSpec, seed: int) -> StartConfig:
        """The warm start of a seed of a spec that asks for one."""
        return cls(seed=seed, **section.model_dump(include=set(cls.model_fields) - {"seed"}))

    @property
    def steps(self) -> int:
        """Supervised steps."""
        return self.sft.steps

    @property
    def prompts_per_step(self) -> int:
        """Transcripts of one step."""
        return self.sft.prompts_per_step

    def disclosed(self) -> dict[str, Any]:
        """What a reader of the checkpoint has to know of how it was trained."""
        return {"learner": "dense", "trained_on": "gold answers of the training split"}

    def to_json(self) -> dict[str, Any]:
        return {"arm": self.arm} | self.model_dump(mode="json")


AnyConfig = TrainConfig | StartConfig
