"""A grader whose grades are kept on disk by the hash of the question (``core.remembered``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic

from kvaudit.audit.judges.grader import G, Grader
from kvaudit.core.remembered import Answers, Q


class Remembered(Generic[Q, G]):
    """Asks ``grader`` what its file in ``folder`` does not hold yet."""

    def __init__(self, grader: Grader[Q, G], folder: Path) -> None:
        self.grader = grader
        path = folder / grader.answers_file
        self._answers: Answers[Q, Any] = Answers(path, grader.key_of, self._asked, grader.field, grader.remembers)

    def grades(self, questions: Sequence[Q]) -> list[G | None]:
        """As ``Grader.grades``; equal questions are asked once."""
        found = self._answers.answers(questions)
        return [None if kept is None else self.grader.recalled(kept) for kept in found]

    def _asked(self, questions: Sequence[Q]) -> list[Any]:
        said = self.grader.grades(questions)
        return [None if grade is None else self.grader.kept(grade) for grade in said]
