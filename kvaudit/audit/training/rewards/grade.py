"""The suite's own grader as the reward."""

from __future__ import annotations

from dataclasses import dataclass

from kvaudit.audit.training.rewards.base import BY_PHRASES, PROGRAMMATIC, GradedRows, Reward, Scores, asks_a_judge
from kvaudit.core.plugins import sha256_of
from kvaudit.suites.base import Suite


@dataclass(frozen=True)
class SuiteGrade(Reward):
    """The suite's own score, so that training and evaluation reward the same."""

    name = "grade"
    says = "the suite's own grader"

    @property
    def identity(self) -> str:
        return sha256_of(self.name)  # ``RewardConfig.sha256`` adds the versions of the suites

    def paid_by(self, suite: Suite) -> str:
        """Return the label of the suite's grader, or of the phrase rules for suites that leave answers to a judge."""
        return BY_PHRASES if asks_a_judge(suite) else PROGRAMMATIC

    def rewards(self, rows: GradedRows) -> Scores:
        return [row.grade.score for row in rows]
