"""The phrase rules as a judge: cheap and deterministic, but too weak to support a conclusion alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from kvaudit.audit.judges.base import Judge
from kvaudit.core.judge_answers import Question
from kvaudit.core.plugins import sha256_of
from kvaudit.suites import phrases


@dataclass(frozen=True)
class Phrases(Judge):
    """A judge that applies the phrase rules of ``suites.phrases``, by which suites grade when no judge is used."""

    name = "phrases"
    says = "the words that refusals open with"

    @property
    def identity(self) -> str:
        return sha256_of(inspect.getsource(phrases))

    def refused(self, questions: Sequence[Question]) -> list[bool | None]:
        return [phrases.refuses(question.answer) for question in questions]
