"""The suite's own grader as the reward."""

from __future__ import annotations

from audit.sampling.conversations import Played
from audit.training.rewards.base import Reward


class SuiteGrade(Reward):
    """The score that the suite gave, so that training and evaluation ask for the same thing."""

    name = "grade"

    def __call__(self, played: Played) -> float | None:
        return played.grade.score
