"""The contract of a reward: one number per rollout, and a hash that identifies how it is computed.

A spec gives a reward by name, or as a mapping with its main value and options:

    reward: grade
    reward: {judge: rubric-endpoint, base_url: https://host/v1, model: NAME, constitution: constitution.md}
    reward: {function: "package.module:name", scale: 2, suites: [refusal]}

A reward applies to ``suites``, by default to all; other suites get the reward ``grade``, the score of their own grader.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvaudit.core.errors import RunError, SpecError, UnknownName
from kvaudit.core.plugins import IDENTITY_DIGITS, Registry, plugin_from_mapping, sha256_of
from kvaudit.core.text import short_repr
from kvaudit.suites.base import SUITES, Suite

if TYPE_CHECKING:
    from kvaudit.audit.sampling.conversations import GradedRow


BY_PHRASES, PROGRAMMATIC = "phrases", "programmatic"  # graders of suites without a judge
MAX_REWARD = 1e6  # so that its square fits float32
GradedRows = Sequence["GradedRow"]
Scores = Sequence[float | None]
RewardFn = Callable[[GradedRows], Scores]


@dataclass(frozen=True)
class Reward:
    """The base of rewards; subclass it as a frozen dataclass in its own file, with a ``name`` for the registry.

    Its fields are its options. A spec gives the first one, the main value, as the value of the reward's name
    (``reward: {judge: rubric-local, ...}``).
    """

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # what it rewards, for ``kvaudit list rewards``
    takes: ClassVar[tuple[str, ...]] = ()  # its options in words, if they are not its fields

    @classmethod
    def of(cls, value: Any, options: Mapping[str, Any]) -> Self:
        """Build the reward from its main value and its options in a spec; raise SpecError if they are invalid.

        No file is read and no module imported.
        """
        names = [field.name for field in fields(cls)]
        if value is not None and not names:
            raise SpecError(f"reward {cls.name} takes no value; write reward: {cls.name}")
        return plugin_from_mapping(
            cls, f"reward {cls.name}", dict(options) if value is None else {names[0]: value, **options}
        )

    @property
    def identity(self) -> str:
        """The sha256 of everything on which the rewards depend (rules, model or source), 64 hex digits."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The text that names the reward in provenance: its name and the first digits of its identity.

        If a judge gives the reward, the judge's name takes the place of the reward's.
        """
        return f"{self.name}:{self.identity[:IDENTITY_DIGITS]}"

    @property
    def inputs(self) -> Mapping[str, str]:
        """The sha256 of each input file, by name; a resumed run must have the same."""
        return {f"reward {self.name}": self.identity}

    @property
    def constitution(self) -> str | None:
        """The text that answers should follow; None if there is none."""
        return None

    def check(self, suites: Sequence[Suite]) -> None:  # noqa: ARG002 - most rewards fit any suite
        """Raise SpecError or DataError now for a fault that would otherwise appear only when rollouts are scored."""
        _ = self.identity

    def grader_label(self, suite: Suite) -> str:  # noqa: ARG002 - a judge leaves some answers to the suite
        """Return the label of the grader or judge that scores the answers of this suite."""
        return self.label

    def rewards(self, rows: GradedRows) -> Scores:
        """Return one number per row, higher is better; None means ungraded, without gradient.

        Rows are scored independently. Raises RunError if training should stop.
        """
        raise NotImplementedError

    def kept_in(self, folder: Path) -> RewardFn:  # noqa: ARG002 - deterministic rewards store nothing
        """Return the method ``rewards``; a judge returns one that stores its answers in ``folder`` and reuses them."""
        return self.rewards


def asks_a_judge(suite: Suite) -> bool:
    """Return whether a suite leaves some of its answers to a judge."""
    return type(suite).question is not Suite.question


REWARDS: Registry[Reward] = Registry("reward", "kvaudit.audit.training.rewards", Reward)


@dataclass(frozen=True)
class RewardConfig:
    """The reward of a training run: ``reward`` in the suites ``reward_suites``, the suite's own grade in all others.

    ``suites`` are all suites that the run trains on.
    """

    reward: Reward
    suites: tuple[str, ...]
    reward_suites: tuple[str, ...]

    @property
    def uses_grade_only(self) -> bool:
        """Whether all rewards are the suites' own grades."""
        return self.reward == SuiteGrade()

    @cached_property
    def sha256(self) -> str:
        """The hash of everything that rewards depend on, including the versions of the suites' graders."""
        versions = {name: SUITES.get(name).version for name in self.suites}
        return sha256_of(self.reward.identity, sorted(self.reward_suites), versions)

    @property
    def judges(self) -> dict[str, str]:
        """The label of the grader or judge that scores the answers, by suite."""
        rewards = {name: self.reward if name in self.reward_suites else SuiteGrade() for name in self.suites}
        return {name: reward.grader_label(SUITES.get(name)()) for name, reward in rewards.items()}

    @property
    def inputs(self) -> Mapping[str, str]:
        """The sha256 of each input file of the reward, by name.

        The result is {} if all rewards are the suites' own grades, since the suites' versions are recorded.
        """
        return {} if self.uses_grade_only else self.reward.inputs

    @property
    def constitution_sha256(self) -> str | None:
        """The sha256 of the text that the reward asks answers to follow (its constitution); None if it has none."""
        text = self.reward.constitution
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()

    def check(self) -> None:
        """Raise SpecError or DataError now for a fault that would otherwise appear only when rollouts are scored."""
        self.reward.check([SUITES.get(name)() for name in self.reward_suites])

    def kept_in(self, folder: Path) -> RewardFn:
        """Return the function that scores a step's rollouts and checks the scores.

        A judge's answers are stored in ``folder`` (see ``Reward.kept_in``).
        """
        functions = [(reward, reward.kept_in(folder)) for reward in (self.reward, SuiteGrade())]

        def score(rows: GradedRows) -> list[float | None]:
            scores: list[float | None] = [None] * len(rows)
            for (reward, function), in_reward_suites in zip(functions, (True, False), strict=True):
                places = [n for n, row in enumerate(rows) if (row.item.suite in self.reward_suites) is in_reward_suites]
                values = function([rows[n] for n in places]) if places else []
                for n, value in zip(places, check_scores(reward, values, len(places)), strict=True):
                    scores[n] = value
            return scores

        return score


def check_scores(reward: Reward, scores: Any, count: int) -> list[float | None]:
    """Return ``scores``, the rewards of ``count`` rollouts, as floats or None (ungraded).

    Raises RunError unless there is one entry per rollout, either None or a number from -MAX_REWARD to MAX_REWARD.
    """
    label = f"reward {reward.label}"
    if isinstance(scores, str | bytes) or not isinstance(scores, Sequence):
        raise RunError(f"{label} returned {short_repr(scores)}, wanted a list of {count} numbers, one for each rollout")
    if len(scores) != count:
        raise RunError(f"{label} returned {len(scores)} rewards for {count} rollouts, wanted one for each")
    for number, score in enumerate(scores, start=1):
        if score is not None and not (isinstance(score, numbers.Real) and abs(score) <= MAX_REWARD):  # type: ignore[operator]
            raise RunError(
                f"{label} returned {short_repr(score)} for rollout {number} of {count}, wanted a number from "
                f"{-MAX_REWARD:g} to {MAX_REWARD:g}, or None for ungraded"
            )
    return [None if score is None else float(score) for score in scores]


def parse_reward(written: str | Mapping[str, Any], suites: Sequence[str]) -> RewardConfig:
    """Parse a train section's ``reward``; raises SpecError, or UnknownName with a suggestion."""
    options = {written: None} if isinstance(written, str) else dict(written)
    reward_suites = options.pop("suites", list(suites))
    names = [key for key in options if key in REWARDS.all()]
    if not names:
        raise UnknownName("reward", next(iter(options), ""), REWARDS.all())
    if len(names) > 1:
        raise SpecError(f"train.reward names {' and '.join(names)}, wanted one reward")
    if not isinstance(reward_suites, list) or not reward_suites:
        raise SpecError(
            f"train.reward.suites is {short_repr(reward_suites)}, wanted a list of suites that are trained on"
        )
    for name in reward_suites:
        if name not in suites:
            raise UnknownName("suite in train.reward.suites", short_repr(name), suites)
    value = options.pop(names[0])
    return RewardConfig(REWARDS.get(names[0]).of(value, options), tuple(suites), tuple(dict.fromkeys(reward_suites)))


@dataclass(frozen=True)
class SuiteGrade(Reward):
    """The reward that is the suite's own score, so that training rewards what the evaluation measures."""

    name = "grade"
    says = "the suite's own grader"

    @property
    def identity(self) -> str:
        return sha256_of(self.name)  # ``RewardConfig.sha256`` adds the versions of the suites

    def grader_label(self, suite: Suite) -> str:
        """Return the label of the grader that gives the score: the suite's own, or the phrase rules.

        The phrase rules grade a suite that otherwise leaves answers to a judge.
        """
        return BY_PHRASES if asks_a_judge(suite) else PROGRAMMATIC

    def rewards(self, rows: GradedRows) -> Scores:
        return [row.grade.score for row in rows]
