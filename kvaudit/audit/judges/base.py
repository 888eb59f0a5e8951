"""Judges, which decide whether an answer refuses its request, and the contract of every grader.

A grader sees questions (a request and its answer) only, never arm, policy or suite, so it cannot favour one side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from kvaudit.core.errors import DataError
from kvaudit.core.files import read_json, write_json
from kvaudit.core.judge_answers import AnswerCache, Judgement, Q, Question
from kvaudit.core.plugins import IDENTITY_DIGITS, Registry, sha256_of
from kvaudit.core.records import Item, Record
from kvaudit.suites.base import Suite

G = TypeVar("G")  # the type of a grade
_MOST_TRAINED_ON = 0.05  # share of the questions; short refusals coincide now and then


@dataclass(frozen=True)
class StoredAnswer:
    """A stored answer: its record, and a function that recreates its suite and item (slow and seldom needed)."""

    record: Record
    load_item: Callable[[], tuple[Suite, Item]]


@dataclass(frozen=True)
class Grader(Generic[Q, G]):
    """The base of graders, which grade many answers at once; each is a frozen dataclass with a ``name``.

    A grader gets questions, such as an answer with its request. Its fields are its options:
    ``NAME:field=value,field=value`` in a spec or a command.
    """

    kind: ClassVar[str] = ""
    field: ClassVar[str] = ""  # the JSON key of a stored grade
    stored_types: ClassVar[tuple[type, ...]] = (bool,)  # the types of a stored grade

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # how it decides, for ``kvaudit list``

    @property
    def identity(self) -> str:
        """The sha256 of everything on which its grades depend, such as settings, model and rubric: 64 hex digits."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise SpecError or DataError for a fault that would otherwise appear only after all answers are sampled."""
        _ = self.identity

    @cached_property
    def sha256(self) -> str:
        """The ``identity`` (a sha256), computed once."""
        return self.identity

    @cached_property
    def folder(self) -> str:
        """The name of the folder for its grades in a run: its name and the first digits of its sha256."""
        return f"{self.name}-{self.sha256[:IDENTITY_DIGITS]}"

    @property
    def answers_file(self) -> str:
        """The name of the file that stores its grades."""
        return f"answers-{self.folder}.jsonl"

    @cached_property
    def unread(self) -> list[str]:
        """The replies so far that could not be read as grades, to be quoted in errors."""
        return []

    @property
    def replying_model(self) -> str:
        """The model that a server named in its first reply; empty before it, and for graders without a server."""
        return ""

    def expect_model(self, name: str) -> None:
        """Count replies of a model with another name than ``name`` as failed; for graders that ask a server."""

    def grades(self, questions: Sequence[Q]) -> list[G | None]:
        """Return the grade of each question; None where grading failed, which the next run tries again.

        A grade must not depend on other questions. Raises RunError if further questions would fail too.
        """
        raise NotImplementedError

    @staticmethod
    def key_of(question: Q) -> str:
        """Return the sha256 of a question, under which its grade is stored."""
        raise NotImplementedError

    def questions_of(self, answer: StoredAnswer) -> list[Q]:
        """Return the questions to the grader about a stored answer; [] if it does not grade answers of this kind."""
        raise NotImplementedError

    def check_questions(self, questions: Sequence[Q]) -> None:
        """Raise DataError if the grader must not be asked these questions."""

    def to_stored(self, grade: G) -> Any:
        """Convert a grade to its stored form, which has one of the types in ``stored_types``."""
        return grade

    def from_stored(self, stored: Any) -> G | None:
        """Convert the stored form of a grade back to the grade; None if it is malformed."""
        return cast("G", stored)


class CachedGrader(Generic[Q, G]):
    """A grader with a cache: it stores its grades in ``folder`` by hash of the question, and grades only new questions.

    A second file holds the model name that a server gave in its first reply; replies of another model count as failed.
    """

    def __init__(self, grader: Grader[Q, G], folder: Path) -> None:
        self.grader = grader
        path = folder / grader.answers_file
        self._model_file = path.with_suffix(".model.json")
        if self._model_file.exists():
            grader.expect_model(str(read_json(self._model_file).get("model", "")))
        self._answers: AnswerCache[Q, Any] = AnswerCache(
            path, grader.key_of, self._grade, grader.field, grader.stored_types
        )

    def grades(self, questions: Sequence[Q]) -> list[G | None]:
        """Return the grade of each question, None where grading failed.

        A question with a stored grade is not asked again, and equal questions are asked once.
        """
        stored = self._answers.answers(questions)
        return [None if entry is None else self.grader.from_stored(entry) for entry in stored]

    def _grade(self, questions: Sequence[Q]) -> list[Any]:
        grades = self.grader.grades(questions)
        if (model := self.grader.replying_model) and not self._model_file.exists():
            write_json(self._model_file, {"model": model})
        return [None if grade is None else self.grader.to_stored(grade) for grade in grades]


@dataclass(frozen=True)
class Judge(Grader[Question, Judgement]):
    """The base of judges (does an answer refuse?); a subclass defines ``refused``, or ``read`` if it can be unsure."""

    kind = "judge"
    field = "refused"
    stored_types = (bool, list)  # True or False, or [refused, sure, unsafe]

    @cached_property
    def label(self) -> str:
        """The text that names the judge in records: its name and the first digits of its identity."""
        return f"{self.name}:{self.identity[:IDENTITY_DIGITS]}"

    def refused(self, questions: Sequence[Question]) -> list[bool | None]:
        """Return whether each answer refuses its request, None where the judge failed."""
        return [None if reading is None else reading.refused for reading in self.read(questions)]

    def read(self, questions: Sequence[Question]) -> list[Judgement | None]:
        """Return a judgement of each answer: refusal, whether it is sure, and harm if the judge grades harm.

        None where the judge failed.
        """
        return [None if refused is None else Judgement(refused) for refused in self.refused(questions)]

    @property
    def grades_harm(self) -> bool:
        """Whether the judge also decides whether an answer is unsafe."""
        return False

    def without(self, source: str) -> Judge:  # noqa: ARG002 - only a trained judge has a source to leave out
        """Return this judge trained again without ``source``, a data set of labels; if it is not trained, itself."""
        return self

    def trained_on(self) -> frozenset[str]:
        """Return the keys (``key_of``) of the questions on which the judge was trained; empty if it is not trained."""
        return frozenset()

    def grades(self, questions: Sequence[Question]) -> list[Judgement | None]:
        return self.read(questions)

    @staticmethod
    def key_of(question: Question) -> str:
        return sha256_of(question.request, question.answer)

    def questions_of(self, answer: StoredAnswer) -> list[Question]:
        from kvaudit.audit.sampling.exchange import judge_question

        question = judge_question(*answer.load_item(), answer.record.transcript, answer.record.finish_reason)
        return [] if question is None else [question]

    def check_questions(self, questions: Sequence[Question]) -> None:
        """Raise DataError if the judge was trained on too many of these questions, whose labels it would repeat."""
        distinct, trained_on = dict.fromkeys(questions), self.trained_on()
        count = sum(self.key_of(question) in trained_on for question in distinct)
        if count > _MOST_TRAINED_ON * len(distinct):
            raise DataError(
                f"judge {self.label} was trained on {count} of these {len(distinct)} answers and would repeat its "
                "training labels; leave their source out (left_out=SOURCE), or use another judge"
            )

    def to_stored(self, grade: Judgement) -> Any:
        is_plain = grade.sure and grade.unsafe is None
        return grade.refused if is_plain else [grade.refused, grade.sure, grade.unsafe]

    def from_stored(self, stored: Any) -> Judgement | None:
        if isinstance(stored, bool):
            return Judgement(stored)
        if not isinstance(stored, list) or len(stored) != 3 or not all(isinstance(flag, bool) for flag in stored[:2]):
            return None
        return Judgement(*stored) if stored[2] is None or isinstance(stored[2], bool) else None


JUDGES: Registry[Judge] = Registry("judge", "kvaudit.audit.judges", Judge)
