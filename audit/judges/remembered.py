"""A judge whose answers are kept on disk by the hash of the question (``core.remembered``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvaudit.audit.judges.base import Judge, question_key
from kvaudit.core.options import IDENTITY_DIGITS
from kvaudit.core.questions import Question, Reading
from kvaudit.core.remembered import Answers

KeptReading = bool | list[bool | None]  # a plain yes or no, or [refused, sure, unsafe]


class Remembered:
    """Asks ``judge`` what the file of its identity in ``folder`` does not hold yet."""

    def __init__(self, judge: Judge, folder: Path) -> None:
        self.judge = judge
        path = folder / f"answers-{judge.name}-{judge.identity[:IDENTITY_DIGITS]}.jsonl"
        self._answers: Answers[Question, KeptReading] = Answers(
            path, question_key, self._asked, "refused", (bool, list)
        )

    def read(self, questions: Sequence[Question]) -> list[Reading | None]:
        """As ``Judge.read``; equal questions are asked once."""
        return [_reading(kept) for kept in self._answers.answers(questions)]

    def _asked(self, questions: Sequence[Question]) -> list[KeptReading | None]:
        return [None if reading is None else _kept(reading) for reading in self.judge.read(questions)]


def _kept(reading: Reading) -> KeptReading:
    plain = reading.sure and reading.unsafe is None
    return reading.refused if plain else [reading.refused, reading.sure, reading.unsafe]


def _reading(kept: Any) -> Reading | None:
    """What a line of the file says; None for what no judge wrote."""
    if isinstance(kept, bool):
        return Reading(kept)
    if not isinstance(kept, list) or len(kept) != 3 or not all(isinstance(word, bool) for word in kept[:2]):
        return None
    return Reading(*kept) if kept[2] is None or isinstance(kept[2], bool) else None
