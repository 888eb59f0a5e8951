"""The contract of a judge: questions in, readings out, and a name that says exactly who decided.

A judge sees a request and an answer. Neither arm nor policy nor suite reaches it, so it cannot lean to one side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kvaudit.core.errors import DataError
from kvaudit.core.options import IDENTITY_DIGITS, parse_named, sha256_of
from kvaudit.core.questions import Question, Reading
from kvaudit.core.registry import Registry

_OWN_ROWS = 0.05  # of the questions; short refusals coincide now and then


@dataclass(frozen=True)
class Judge:
    """Decides in bulk whether answers refuse. Subclass as a frozen dataclass in a file of its own, with a ``name``.

    Fields are the judge's options: ``NAME:field=value,field=value`` in a command.
    """

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # what it goes by, for ``kvaudit list judges``

    @property
    def identity(self) -> str:
        """sha256 of all that its answers follow from: recipe and rows, or model and rubric. 64 hex digits."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise SpecError or DataError for what would only be found out once all answers are there."""
        _ = self.identity

    @cached_property
    def label(self) -> str:
        """What records call it: name and the first digits of its identity."""
        return f"{self.name}:{self.identity[:IDENTITY_DIGITS]}"

    def refused(self, questions: Sequence[Question]) -> list[bool | None]:
        """Whether each answer refuses its request, to the best of the judge's knowledge; None where it failed.

        What failed is asked again another time. The answer to a question does not depend on the others. Raises RunError
        where asking on is of no use.
        """
        raise NotImplementedError

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


JUDGES: Registry[Judge] = Registry("judge", "kvaudit.audit.judges", Judge)


def question_key(question: Question) -> str:
    """sha256 of a question: what its answer is remembered under."""
    return sha256_of(question.request, question.answer)


def parse_judge(text: str) -> Judge:
    """The judge of ``NAME`` or ``NAME:field=value,field=value``; raises SpecError for what it does not know."""
    return parse_named(JUDGES, text)


def refuse_own_rows(judge: Judge, questions: Sequence[Question]) -> None:
    """Raise DataError for a judge that would be asked what it was taught."""
    learnt = judge.trained_on()
    if not questions or not learnt:
        return
    own = sum(question_key(question) in learnt for question in questions)
    if own > _OWN_ROWS * len(questions):
        raise DataError(
            f"judge {judge.label} was trained on {own} of these {len(questions)} answers and would repeat what it was "
            "told; leave their source out (left_out=SOURCE), or take another judge"
        )
