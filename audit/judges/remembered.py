"""A judge whose answers are kept on disk by the hash of the question (``core.remembered``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from audit.core.options import IDENTITY_DIGITS
from audit.core.questions import Question
from audit.core.remembered import Answers
from audit.judges.base import Judge, question_key


class Remembered:
    """Asks ``judge`` what the file of its identity in ``folder`` does not hold yet."""

    def __init__(self, judge: Judge, folder: Path) -> None:
        self.judge = judge
        path = folder / f"answers-{judge.name}-{judge.identity[:IDENTITY_DIGITS]}.jsonl"
        self._answers = Answers(path, question_key, judge.refused, "refused")

    def refused(self, questions: Sequence[Question]) -> list[bool | None]:
        """As ``Judge.refused``; equal questions are asked once."""
        return self._answers.answers(questions)
