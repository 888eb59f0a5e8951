"""The contract of a reward: one number per rollout, from what was played alone, and a name for exactly what paid it.

A spec names a reward by itself, or in a mapping with what it goes by and its options:

    reward: grade
    reward: {judge: rubric-endpoint, base_url: https://host/v1, model: NAME, constitution: constitution.md}
    reward: {function: "package.module:name", scale: 2, suites: [refusal]}

``suites`` are those that it pays for; the others pay by their own graders.
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
from kvaudit.core.plugins import IDENTITY_DIGITS, plugin_from_mapping, sha256_of
from kvaudit.core.plugins import Registry
from kvaudit.core.text import short_repr
from kvaudit.suites.base import SUITES, Suite

if TYPE_CHECKING:
    from kvaudit.audit.sampling.conversations import GradedRow

BY_PHRASES, PROGRAMMATIC = "phrases", "programmatic"  # who graded a suite that no judge was asked about
_SUITES = "suites"
MAX_REWARD = 1e6  # of a reward, so that its square is a number in float32
GradedRows = Sequence["GradedRow"]
Scores = Sequence[float | None]
RewardFn = Callable[[GradedRows], Scores]


@dataclass(frozen=True)
class Reward:
    """What rollouts earn. Subclass as a frozen dataclass in a file of its own, with a ``name``; the registry finds it.

    Fields are the reward's options; the first one is what it goes by, the value of its name in a spec.
    """

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # what it pays by, for ``kvaudit list rewards``
    takes: ClassVar[tuple[str, ...]] = ()  # its options in words, where they are not its fields

    @classmethod
    def of(cls, value: Any, options: Mapping[str, Any]) -> Self:
        """The reward as a spec gives it; raises SpecError for what it does not know. Reads and imports nothing."""
        names = [field.name for field in fields(cls)]
        if value is not None and not names:
            raise SpecError(f"reward {cls.name} goes by nothing else; write reward: {cls.name}")
        given = dict(options) if value is None else {names[0]: value, **options}
        return plugin_from_mapping(cls, f"reward {cls.name}", given)

    @property
    def identity(self) -> str:
        """sha256 of all that its rewards follow from: rules, or model, or source. 64 hex digits."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """What provenance calls it: a name and the first digits of its identity; of a judge, as records do."""
        return f"{self.name}:{self.identity[:IDENTITY_DIGITS]}"

    @property
    def inputs(self) -> Mapping[str, str]:
        """What it was made of, by name: sha256. A run goes on with the same only."""
        return {f"reward {self.name}": self.identity}

    @property
    def constitution(self) -> str | None:
        """The text that answers are held to, where there is one."""
        return None

    def check(self, suites: Sequence[Suite]) -> None:  # noqa: ARG002 - most pay for any suite
        """Raise SpecError or DataError for what would only be found out once there are rollouts of these suites."""
        _ = self.identity

    def paid_by(self, suite: Suite) -> str:  # noqa: ARG002 - a judge leaves some answers to the suite
        """Who decides what an answer of this suite earns."""
        return self.label

    def rewards(self, played: GradedRows) -> Scores:
        """A number each, higher for what is wanted; None where nobody can tell, and no gradient is taken.

        What one earns does not depend on the others. Raises RunError where going on is of no use.
        """
        raise NotImplementedError

    def kept_in(self, folder: Path) -> RewardFn:  # noqa: ARG002 - who pays by the same rule again keeps nothing
        """``rewards``; one that may be told otherwise when it asks again keeps what it was told in ``folder``."""
        return self.rewards


def asks_a_judge(suite: Suite) -> bool:
    """Whether a suite leaves some of its answers to a judge."""
    return type(suite).question is not Suite.question


REWARDS: Registry[Reward] = Registry("reward", "kvaudit.audit.training.rewards", Reward)


@dataclass(frozen=True)
class RewardConfig:
    """The reward of a training run: ``reward`` pays in the suites ``reward_suites``, ``grade`` in the rest of ``suites``."""

    reward: Reward
    grade: Reward
    suites: tuple[str, ...]
    reward_suites: tuple[str, ...]

    @property
    def uses_grade_only(self) -> bool:
        """Whether all of it are the suites' own grades."""
        return self.reward == self.grade

    @cached_property
    def sha256(self) -> str:
        """Of all that rewards follow from, the versions of the suites' graders included."""
        versions = {name: SUITES.get(name).version for name in self.suites}
        return sha256_of(self.reward.identity, sorted(self.reward_suites), versions)

    @property
    def judges(self) -> dict[str, str]:
        """By suite, who pays for its answers."""
        payers = {name: self.reward if name in self.reward_suites else self.grade for name in self.suites}
        return {name: payer.paid_by(SUITES.get(name)()) for name, payer in payers.items()}

    @property
    def inputs(self) -> Mapping[str, str]:
        """What a run holds on to, by sha256; nothing where suites grade by themselves, whose versions are held."""
        return {} if self.uses_grade_only else self.reward.inputs

    @property
    def constitution_sha256(self) -> str | None:
        """Of the text that answers are held to; None where there is none."""
        text = self.reward.constitution
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()

    def check(self) -> None:
        """Raise SpecError or DataError for what would only be found out once there are rollouts."""
        self.reward.check([SUITES.get(name)() for name in self.reward_suites])

    def kept_in(self, folder: Path) -> RewardFn:
        """What pays a step's rollouts, each held to be a number; see ``Reward.kept_in``."""
        parts = [(reward, reward.kept_in(folder), own) for reward, own in ((self.reward, True), (self.grade, False))]

        def pays(played: GradedRows) -> list[float | None]:
            found: list[float | None] = [None] * len(played)
            for reward, scored, own in parts:
                rows = [n for n, row in enumerate(played) if (row.item.suite in self.reward_suites) is own]
                scores = scored([played[n] for n in rows]) if rows else []
                for n, score in zip(rows, check_scores(reward, scores, len(rows)), strict=True):
                    found[n] = score
            return found

        return pays


def check_scores(reward: Reward, scores: Any, wanted: int) -> list[float | None]:
    """The rewards of ``wanted`` rollouts as plain numbers; raises RunError for what no gradient can be made of."""
    who = f"reward {reward.label}"
    if isinstance(scores, str | bytes) or not isinstance(scores, Sequence):
        raise RunError(f"{who} gave {short_repr(scores)}, wanted a list of {wanted} numbers, one for each rollout")
    if len(scores) != wanted:
        raise RunError(f"{who} gave {len(scores)} rewards for {wanted} rollouts, wanted one for each")
    for number, score in enumerate(scores, start=1):
        if score is not None and not (isinstance(score, numbers.Real) and abs(score) <= MAX_REWARD):  # type: ignore[operator]
            raise RunError(
                f"{who} gave {short_repr(score)} for rollout {number} of {wanted}, wanted a number from {-MAX_REWARD:g} to "
                f"{MAX_REWARD:g}, or None where it cannot tell"
            )
    return [None if score is None else float(score) for score in scores]


def parse_reward(written: str | Mapping[str, Any], suites: Sequence[str]) -> RewardConfig:
    """What a train section's ``reward`` stands for; raises SpecError, or UnknownName with a suggestion."""
    options = {written: None} if isinstance(written, str) else dict(written)
    # without suites of its own it pays in all
    paid = options.pop(_SUITES, list(suites))
    names = [key for key in options if key in REWARDS.all()]
    if not names:
        raise UnknownName("reward", next(iter(options), ""), REWARDS.all())
    if len(names) > 1:
        raise SpecError(f"train.reward names {' and '.join(names)}, wanted one; an option has another name")
    if not isinstance(paid, list) or not paid:
        raise SpecError(f"train.reward.suites is {short_repr(paid)}, wanted a list of suites that are trained on")
    for name in paid:
        if name not in suites:
            raise UnknownName("suite in train.reward.suites", short_repr(name), suites)
    value = options.pop(names[0])
    grade = REWARDS.get("grade").of(None, {})
    return RewardConfig(REWARDS.get(names[0]).of(value, options), grade, tuple(suites), tuple(dict.fromkeys(paid)))
