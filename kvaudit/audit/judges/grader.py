"""The contract of a grader: questions in, grades out, and a name that says exactly who decided.

A grader sees what its kind sees and nothing else: neither arm nor policy nor suite reaches it, so it cannot lean to one
side. What its grades decide is the stage's to say.

    kind     is asked                         says                                     decides
    judge    a request and the answer to it   whether the answer refuses, what harm    what suites leave to a judge
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from kvaudit.core.judge_answers import AnswerCache, Q
from kvaudit.core.plugins import IDENTITY_DIGITS
from kvaudit.core.records import Item, Record
from kvaudit.suites.base import Suite

G = TypeVar("G")  # what a grader says of a question


@dataclass(frozen=True)
class StoredAnswer:
    """A record, and how to make the suite and the item that it answers again: only who looks at them pays for it."""

    record: Record
    asked: Callable[[], tuple[Suite, Item]]


@dataclass(frozen=True)
class Grader(Generic[Q, G]):
    """Grades in bulk. Subclass a kind of grader as a frozen dataclass in a file of its own, with a ``name``.

    Fields are the grader's options: ``NAME:field=value,field=value`` in a spec or a command.
    """

    kind: ClassVar[str] = ""
    field: ClassVar[str] = ""  # what a grade is called where it is remembered
    remembers: ClassVar[tuple[type, ...]] = (bool,)  # as what

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # what it goes by, for ``kvaudit list``

    @property
    def identity(self) -> str:
        """sha256 of all that its grades follow from: settings and rows, or model and rubric. 64 hex digits."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise SpecError or DataError for what would only be found out once all answers are there."""
        _ = self.identity

    @cached_property
    def sha256(self) -> str:
        """Of all that the effect of its grades follows from."""
        return self.identity

    @cached_property
    def folder(self) -> str:
        """What a run calls the folder of its grades: name and the first digits of its sha256."""
        return f"{self.name}-{self.sha256[:IDENTITY_DIGITS]}"

    @property
    def answers_file(self) -> str:
        """What the file is called that remembers its grades."""
        return f"answers-{self.folder}.jsonl"

    @cached_property
    def unread(self) -> list[str]:
        """What its model said instead of a grade, so that it can be quoted."""
        return []

    # what a kind of grader says

    def grades(self, questions: Sequence[Q]) -> list[G | None]:
        """What it says of each question, to the best of its knowledge; None where it failed: that is unscored.

        What failed is asked again another time. The grade of a question does not depend on the others. Raises RunError
        where asking on is of no use.
        """
        raise NotImplementedError

    @staticmethod
    def key_of(question: Q) -> str:
        """sha256 of a question: what its grade is remembered under."""
        raise NotImplementedError

    def questions_of(self, answer: StoredAnswer) -> list[Q]:
        """What it is asked of a stored answer, in order; nothing where the answer is none of its business."""
        raise NotImplementedError

    def check_questions(self, questions: Sequence[Q]) -> None:
        """Raise DataError where it is not to be asked these."""

    def kept(self, grade: G) -> Any:
        """A grade as it is remembered, of a type that it ``remembers``."""
        return grade

    def recalled(self, kept: Any) -> G | None:
        """What was remembered, as a grade; None for what no such grader wrote."""
        return cast("G", kept)


class Remembered(Generic[Q, G]):
    """A grader whose grades are kept in ``folder`` by the hash of the question: it is asked what its file lacks."""

    def __init__(self, grader: Grader[Q, G], folder: Path) -> None:
        self.grader = grader
        path = folder / grader.answers_file
        self._answers: AnswerCache[Q, Any] = AnswerCache(
            path, grader.key_of, self._asked, grader.field, grader.remembers
        )

    def grades(self, questions: Sequence[Q]) -> list[G | None]:
        """As ``Grader.grades``; equal questions are asked once."""
        found = self._answers.answers(questions)
        return [None if kept is None else self.grader.recalled(kept) for kept in found]

    def _asked(self, questions: Sequence[Q]) -> list[Any]:
        found = self.grader.grades(questions)
        return [None if grade is None else self.grader.kept(grade) for grade in found]
