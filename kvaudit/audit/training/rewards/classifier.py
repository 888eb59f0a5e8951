"""A sequence-classification model as the reward: how probable a label of the answer is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvaudit.audit.judges.guards.classifier import Classifier
from kvaudit.audit.training.rewards.base import Played, Reward, Scores
from kvaudit.core.errors import SpecError
from kvaudit.core.options import sha256_of
from kvaudit.suites.base import SUITES


@dataclass(frozen=True)
class Classified(Reward):
    """``classifier`` is a folder or a hub id; it reads the last answer alone.

    ``pays`` names the labels (with | between them) whose probability is the reward, ``costs`` those whose probability
    is taken from 1. An answer longer than the model's window earns what its worst window does.
    """

    name = "classifier"
    says = "the probability of a label of the answer, by a sequence-classification model"

    classifier: str
    pays: str = ""
    costs: str = ""

    def __post_init__(self) -> None:
        if bool(self.pays) == bool(self.costs):
            raise SpecError("reward classifier wants pays: LABEL or costs: LABEL, one of the two")

    @property
    def identity(self) -> str:
        return sha256_of(self._model.identity, bool(self.pays))

    def rewards(self, played: Played) -> Scores:
        from kvaudit.audit.sampling.exchange import said_nothing

        broken = [said_nothing(SUITES.get(p.item.suite)(), p.item, p.transcript, p.finish_reason) for p in played]
        asked = [row for row, fault in zip(played, broken, strict=True) if fault is None]
        # by answer, a probability for each window of it
        windows = iter(self._model.chances([row.transcript[-1].content for row in asked]))
        # what says nothing earns what its suite gives for that
        return [self._paid(next(windows)) if fault is None else fault.score for fault in broken]

    def _paid(self, windows: Sequence[float]) -> float | None:
        if not windows or any(map(math.isnan, windows)):
            return None
        return min(windows) if self.pays else 1.0 - max(windows)

    @cached_property
    def _model(self) -> Classifier:
        return Classifier(model=self.classifier, block=self.pays or self.costs)
