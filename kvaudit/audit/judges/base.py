"""Judges: whether an answer refuses its request, which suites leave to somebody who reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvaudit.audit.judges.base import Grader, StoredAnswer
from kvaudit.core.errors import DataError
from kvaudit.core.options import IDENTITY_DIGITS, sha256_of
from kvaudit.core.questions import Question, Reading
from kvaudit.core.registry import Registry

_OWN_ROWS = 0.05  # of the questions; short refusals coincide now and then


@dataclass(frozen=True)
class Judge(Grader[Question, Reading]):
    """Decides in bulk whether answers refuse; a subclass says ``refused``, or ``read`` where it has doubts."""

    kind = "judge"
    field = "refused"
    remembers = (bool, list)  # a plain yes or no, or [refused, sure, unsafe]

    @cached_property
    def label(self) -> str:
        """What records call it: name and the first digits of its identity."""
        return f"{self.name}:{self.identity[:IDENTITY_DIGITS]}"

    def refused(self, questions: Sequence[Question]) -> list[bool | None]:
        """Whether each answer refuses its request; as ``grades``, in a word."""
        return [None if reading is None else reading.refused for reading in self.read(questions)]

    def read(self, questions: Sequence[Question]) -> list[Reading | None]:
        """As ``refused``, with what the judge is not sure of and, where it grades harm, the harm that was done."""
        return [None if said is None else Reading(said) for said in self.refused(questions)]

    @property
    def grades_harm(self) -> bool:
        """Whether its readings also say of every answer whether it is unsafe."""
        return False

    def without(self, source: str) -> Judge:  # noqa: ARG002 - only a judge that learns has something to leave out
        """The judge as it is without one source of human labels: itself, unless it learns."""
        return self

    def trained_on(self) -> frozenset[str]:
        """The keys of the questions that it learnt from."""
        return frozenset()

    def grades(self, questions: Sequence[Question]) -> list[Reading | None]:
        return self.read(questions)

    @staticmethod
    def key_of(question: Question) -> str:
        return sha256_of(question.request, question.answer)

    def questions_of(self, answer: StoredAnswer) -> list[Question]:
        from kvaudit.audit.sampling.exchange import judge_question

        question = judge_question(*answer.asked(), answer.record.transcript, answer.record.finish_reason)
        return [] if question is None else [question]

    def check_questions(self, questions: Sequence[Question]) -> None:
        """Raise DataError for a judge that would be asked what it was taught."""
        asked, learnt = dict.fromkeys(questions), self.trained_on()
        own = sum(self.key_of(question) in learnt for question in asked)
        if own > _OWN_ROWS * len(asked):
            raise DataError(
                f"judge {self.label} was trained on {own} of these {len(asked)} answers and would repeat what it was "
                "told; leave their source out (left_out=SOURCE), or take another judge"
            )

    def kept(self, grade: Reading) -> Any:
        plain = grade.sure and grade.unsafe is None
        return grade.refused if plain else [grade.refused, grade.sure, grade.unsafe]

    def recalled(self, kept: Any) -> Reading | None:
        if isinstance(kept, bool):
            return Reading(kept)
        if not isinstance(kept, list) or len(kept) != 3 or not all(isinstance(word, bool) for word in kept[:2]):
            return None
        return Reading(*kept) if kept[2] is None or isinstance(kept[2], bool) else None


JUDGES: Registry[Judge] = Registry("judge", "kvaudit.audit.judges", Judge)
