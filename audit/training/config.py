"""What a training run is, apart from the base model: frozen, checked, hashed. The arm is one field of it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from audit.core.errors import SpecError, UnknownName
from audit.core.spec import TrainSpec
from audit.policies import parse_policy
from audit.training.arms import Arm, get_arm
from audit.training.losses import LOSSES
from suites.base import SUITES

_AT_LEAST_ONE = (
    "context_tokens",
    "steps",
    "prompts_per_step",
    "group",
    "microbatch_tokens",
    "save_every",
    "updates_per_batch",
)
_NOT_NEGATIVE = ("warmup_steps", "ledger_every", "epsilon_low", "epsilon_high", "beta", "distill_weight")
_POSITIVE = ("learning_rate", "temperature", "max_grad_norm")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One paired training run. Two arms differ in ``arm`` and in nothing else.

    ``policy`` is the compressed policy, named in every arm, used by those with compressed rollouts. ``weights`` are
    relative shares of prompts per suite, empty for equal ones. ``ledger_every`` 0 saves none. Raises SpecError or
    UnknownName.
    """

    arm: str
    seed: int
    policy: str
    suites: Sequence[str]
    weights: Sequence[float] = ()
    context_tokens: int = 192
    steps: int = 60
    prompts_per_step: int = 16
    group: int = 8
    learning_rate: float = 1e-4
    warmup_steps: int = 5
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    loss: str = "grpo"
    temperature: float = 1.0
    distill_weight: float = 0.1
    max_grad_norm: float = 1.0
    microbatch_tokens: int = 16384
    save_every: int = 20
    ledger_every: int = 20
    updates_per_batch: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "suites", tuple(self.suites))
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        get_arm(self.arm)
        for suite in self.suites:
            SUITES.get(suite)
        if self.loss not in LOSSES:
            raise UnknownName("loss", self.loss, LOSSES)
        policy = parse_policy(self.policy)
        _require(
            "policy", policy.canonical, "a policy that can be replayed (see: kvaudit list policies)", policy.replayable
        )
        object.__setattr__(self, "policy", policy.canonical)
        self._check_numbers()
        self._check_suites()

    @classmethod
    def of(cls, section: TrainSpec, arm: str, seed: int) -> TrainConfig:
        """The training run of one arm and seed; all others of a spec differ from it in these two fields only."""
        shared = {
            field.name: getattr(section, field.name) for field in fields(cls) if field.name not in ("arm", "seed")
        }
        return cls(arm=arm, seed=seed, **shared)

    @property
    def recipe(self) -> Arm:
        """The arm as data."""
        return get_arm(self.arm)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of prompts per suite; they add up to 1."""
        weights = self.weights or (1.0,) * len(self.suites)
        return tuple(weight / sum(weights) for weight in weights)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, the same for equal configurations."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @property
    def hash(self) -> str:
        """12 hex digits of the sha256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]

    def _check_numbers(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _AT_LEAST_ONE:
            _require(name, values[name], "a whole number of at least 1", values[name] >= 1)
        for name in _NOT_NEGATIVE:
            _require(name, values[name], "0 or more", values[name] >= 0)
        for name in _POSITIVE:
            _require(name, values[name], "a number above 0", values[name] > 0)
        _require("epsilon_low", self.epsilon_low, "less than 1", self.epsilon_low < 1)
        _require("group", self.group, "2 or more, advantages compare rollouts of one prompt", self.group >= 2)

    def _check_suites(self) -> None:
        _require(
            "suites", list(self.suites), "at least one suite, each once", 0 < len(set(self.suites)) == len(self.suites)
        )
        if self.weights:
            fitting = len(self.weights) == len(self.suites) and min(self.weights) >= 0 and sum(self.weights) > 0
            _require("weights", list(self.weights), f"{len(self.suites)} numbers of 0 or more, one per suite", fitting)


def _require(name: str, got: Any, wanted: str, holds: bool) -> None:
    if not holds or (isinstance(got, float) and not math.isfinite(got)):
        raise SpecError(f"training option {name!r} is {got!r}, wanted {wanted}")
