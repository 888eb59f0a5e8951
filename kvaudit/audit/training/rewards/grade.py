"""The suite's own grader as the reward."""

from __future__ import annotations

from dataclasses import dataclass

from kvaudit.audit.training.rewards.base import BY_PHRASES, PROGRAMMATIC, GradedRows, Reward, Scores, asks_a_judge
from kvaudit.core.plugins import sha256_of
from kvaudit.suites.base import Suite


@dataclass(frozen=True)
class SuiteGrade(Reward):
    """The score that the suite gave, so that training and evaluation ask for the same thing."""

    name = "grade"
    says = "the suite's own grader"

    @property
    def identity(self) -> str:
        return sha256_of(self.name)  # the versions of the suites stand beside it (``Paying.sha256``)

    def paid_by(self, suite: Suite) -> str:
        """The suite itself, or the phrase rules where it leaves answers to a judge."""
        return BY_PHRASES if asks_a_judge(suite) else PROGRAMMATIC

    def rewards(self, played: GradedRows) -> Scores:
        return [row.grade.score for row in played]
