"""The checked and hashed configuration of a training run, without the base model; and the table of arms."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import ValidationInfo, field_validator, model_validator

from kvaudit.audit.engines import ENGINES, Condition, parse_condition
from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.training.losses.base import LOSSES
from kvaudit.audit.training.rewards.base import RewardConfig, parse_reward
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.spec_parts import Seed, SpecSection
from kvaudit.core.spec_train import BASE_ARM, DENSE_ARM, AdapterSpec, CriticSpec, SftSpec, Training, TrainSpec
from kvaudit.suites.base import SUITES

if TYPE_CHECKING:
    from kvaudit.audit.cache.engine_store import EngineStore


@dataclass(frozen=True, slots=True)
class Arm:
    """The design of one arm (training variant): everything in which arms may differ.

    Items, seeds, optimiser and the number of updates are the same in all arms.
    """

    name: str
    rollout: Literal["dense", "compressed"]  # the sampler's cache
    learner: Literal["dense", "shadow"]  # the attention of the pass with gradient
    correction: str  # a name in ``corrections.CORRECTIONS``
    distill: bool  # whether the dense view learns from the shadow view
    summary: str  # one line for people

    def __post_init__(self) -> None:
        assert self.learner == "dense" or self.rollout == "compressed", "dense rollouts leave no ledger to replay"
        assert not self.distill or self.learner == "shadow", "distillation needs the shadow view as its teacher"
        assert (self.rollout == "dense") == (self.name == DENSE_ARM), "a sweep of policies trains one arm once"


_ALL = (
    Arm(DENSE_ARM, "dense", "dense", "none", False, "uncompressed rollouts: the reference"),
    Arm("naive", "compressed", "dense", "none", False, "compressed rollouts taken for the learner's own: silent bias"),
    Arm("naive-ratio", "compressed", "dense", "naive-ratio", False, "the sampler's log-probs inside the clipped ratio"),
    Arm("tis", "compressed", "dense", "tis", False, "truncated importance weights, min(ratio, 2)"),
    Arm("mis", "compressed", "dense", "mis", False, "masked importance weights, ratios outside [.5, 5] dropped"),
    Arm("tis-sequence", "compressed", "dense", "tis-sequence", False, "one truncated weight for a whole rollout"),
    Arm("mis-sequence", "compressed", "dense", "mis-sequence", False, "one weight for a rollout, none outside [.5, 5]"),
    Arm("sparse-rl", "compressed", "dense", "sparse-rl", False, "clipped weights, token mask and sequence veto"),
    Arm("sparse-rl-text", "compressed", "dense", "sparse-rl-text", False, "sequence veto and clipped weights alone"),
    Arm("smd", "compressed", "shadow", "none", False, "the learner replays the ledger: the ratio is 1"),
    Arm("smd-distill", "compressed", "shadow", "none", True, "smd, and the dense view learns from the shadow view"),
)
ARMS: Mapping[str, Arm] = MappingProxyType({arm.name: arm for arm in _ALL})


def get_arm(name: str) -> Arm:
    """Return the arm called ``name``; raises UnknownName with a suggestion."""
    if name not in ARMS:
        raise UnknownName("arm", name, ARMS)
    return ARMS[name]


class HashedConfig(ABC):
    """A configuration with a hash, by which a checkpoint folder recognises its own configuration."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the configuration as plain JSON, the same for equal configurations."""

    @property
    def hash(self) -> str:
        """The first 12 hex digits of the sha256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]


class TrainConfig(HashedConfig, Training):
    """The configuration of one training run: one seed of one arm.

    The configurations of two arms differ in ``arm`` only (in a sweep, in ``policy`` too). Raises SpecError or
    UnknownName.
    """

    arm: str
    seed: Seed

    @classmethod
    def of(cls, section: TrainSpec, arm: str, seed: int) -> TrainConfig:
        """Return the configuration of one seed of an arm; ``arm`` is the arm's name in the run."""
        shared = section.model_dump(include=set(Training.model_fields))
        trained = next(entry for entry in section.trained if entry.name == arm)
        return cls(**(shared | {"arm": trained.recipe, "seed": seed, "policy": trained.policy}))

    @property
    def design(self) -> Arm:
        """The arm's design, from the table of arms."""
        return get_arm(self.arm)

    @property
    def rollout_policy(self) -> Policy:
        """The policy under which the arm's rollouts are sampled."""
        return parse_policy(self.policy if self.design.rollout == "compressed" else "none")

    @cached_property
    def rollout_engine(self) -> Condition | None:
        """The engine that samples the rollouts, uncompressed for arm ``dense``; None if kvaudit itself samples them."""
        if self.rollouts is None:
            return None
        condition = parse_condition(self.rollouts)
        return condition if self.design.rollout == "compressed" else condition.reference

    @cached_property
    def store(self) -> EngineStore | None:
        """The format in which ``rollout_engine`` stores keys and values, so that the learner can read equal ones.

        None if kvaudit itself samples, or if the format is unknown. Of some engines kvaudit has to read the stored
        entries out of the cache itself (``shown``); this is done only in arms whose learner reads the compressed cache,
        and in all other arms the result is None.
        """
        condition = self.rollout_engine
        if condition is None:
            return None
        store = ENGINES.get(condition.engine).store(dict(condition.settings))
        # a ``shown`` store depends on the engine's version, so it is read only by the arms that learn from it
        return None if store is not None and store.shown and self.design.learner != "shadow" else store

    def recipe_summary(self) -> dict[str, Any]:
        """Return how the checkpoint was trained, as {aspect: words}, readable without this project's table of arms."""
        arm, policy = self.design, self.rollout_engine or self.rollout_policy
        reward = self.reward_config
        return {
            "rollouts": policy.canonical,
            "rollouts_hash": policy.hash,
            "learner": arm.learner,
            "correction": arm.correction,
            "distillation": arm.distill,
            "loss": self.loss,
            "reward": reward.reward.name if reward.uses_grade_only else self.reward,
            "reward_sha256": reward.sha256,
            "constitution": reward.constitution_sha256,
        }

    @cached_property
    def reward_config(self) -> RewardConfig:
        """The configuration of the reward that rollouts get."""
        return parse_reward(self.reward, self.suites)

    @property
    def whole_groups(self) -> bool:
        """Whether the loss needs all rollouts of a group in the same microbatch."""
        return LOSSES.get(self.loss).whole_groups

    def to_json(self) -> dict[str, Any]:
        return {"arm": self.arm, "seed": self.seed} | self.written()

    def keeps_ledger(self, steps: int) -> bool:
        """Return whether step number ``steps`` saves its rollouts' ledgers (when each cache entry was evicted).

        Rollouts sampled by an engine have no ledger.
        """
        return self.rollouts is None and self.has_certificate(steps)

    def has_certificate(self, steps: int) -> bool:
        """Return whether step number ``steps`` compares the sampler's log-probs with a replay's.

        The replay is the learner's pass over the same tokens with the cache entries that the sampler had.
        """
        return self.ledger_every > 0 and steps % self.ledger_every == 0

    @field_validator("policy", "rollouts", mode="before")
    @classmethod
    def _canonical(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "rollouts":
            return None if value is None else parse_condition(value).canonical
        policy = parse_policy(value)
        # every group of a mixture draws one policy, so each must be replayable
        if not all(drawn.replayable for drawn in policy.draws):
            raise SpecError(
                f"training option 'policy' is {policy.canonical!r}, wanted a policy that can be replayed "
                "(see: kvaudit list policies)"
            )
        return policy.canonical

    @model_validator(mode="after")
    def _check(self) -> Self:
        get_arm(self.arm)
        for suite in (*self.suites, *self.validation_suites):
            SUITES.get(suite)
        parse_reward(self.reward, self.suites)
        loss = LOSSES.get(self.loss)
        # before the checks below, which read what the loss fills in
        self.fill(loss.defaults)
        self._check_engine()
        if loss.reference and self.beta == 0:
            raise SpecError(f"loss {self.loss!r} needs a reference model, and 'beta' is 0; set beta above 0")
        if not loss.critic and self.critic != CriticSpec():
            raise SpecError(f"training option 'critic' needs a loss with a value head (ppo), loss is {self.loss!r}")
        return self

    def _check_engine(self) -> None:
        """Raise SpecError if the engine cannot sample rollouts, or if the arm needs a replay that is impossible.

        A replay recomputes a rollout's log-probs from the keys and values that the engine had stored.
        """
        engine = self.rollout_engine
        if engine is None:
            return
        ENGINES.get(engine.engine).check_drawing(dict(engine.settings))
        if self.design.learner != "shadow":
            return
        if self.store is None:
            raise SpecError(
                f"arm {self.arm} replays the sampler's cache, but how {engine.canonical} stores keys and values is not "
                "known (no ledger, no quantiser); use naive, tis or mis, or other settings"
            )
        limit = f"arm {self.arm} replays the sampler's cache, but {engine.engine} returns only what its queries read"
        if self.store.shown and self.updates_per_step > 1:
            raise SpecError(
                f"{limit}, not its codes, so later updates ({self.updates_per_step} per step) cannot be replayed; "
                "leave updates_per_batch and minibatches at 1, or use naive, tis or mis"
            )
        if self.store.shown and self.beta > 0:
            raise SpecError(
                f"{limit}, not its codes, so the reference model of 'beta' cannot be replayed; leave beta at 0, or use "
                "naive, tis or mis"
            )


class StartConfig(HashedConfig, SpecSection):
    """The configuration of one seed's warm start (supervised steps before any arm is trained).

    It has only the settings that affect the warm start, so that all arms share the same one.
    """

    arm: ClassVar[str] = BASE_ARM  # its name in folders and records
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
        """Return the configuration of one seed's warm start, from a spec's train section with an ``sft`` part."""
        return cls(seed=seed, **section.model_dump(include=set(cls.model_fields) - {"seed"}))

    @property
    def steps(self) -> int:
        """The number of supervised steps."""
        return self.sft.steps

    @property
    def prompts_per_step(self) -> int:
        """The number of transcripts per step."""
        return self.sft.prompts_per_step

    def recipe_summary(self) -> dict[str, Any]:
        """Return how the checkpoint was trained, as {aspect: words} for its provenance."""
        return {"learner": "dense", "trained_on": "gold answers of the training split"}

    def to_json(self) -> dict[str, Any]:
        return {"arm": self.arm} | self.model_dump(mode="json")


AnyConfig = TrainConfig | StartConfig
