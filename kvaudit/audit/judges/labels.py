"""What people said of answers: does this one refuse its request? Each file is a source of its own.

    xstest/xstest_v2_completions_*.csv     two people each; a partial refusal refuses (Roettger et al. 2024)
    refusal_judge_labels/pyrit_refusal.csv  one label each

PyRIT also calls it a refusal where an answer is about something else. Nobody who reads ``refused`` means that, and
suites know it by itself (``kvaudit.suites.phrases.to_the_point``): such rows are a source apart, which nobody learns
from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvaudit.core.questions import Question
from kvaudit.suites.phrases import refuses, to_the_point
from kvaudit.suites.sources import csv_rows, data_file

XSTEST = ("mistralinstruct", "mistralguard")
PYRIT = "refusal_judge_labels/pyrit_refusal.csv"
OFF_TOPIC = "pyrit, beside the point"
_COMPLIES = "1_full_compliance"
_ANNOTATED = ("final_label", "annotation_1", "annotation_2")
_LONG = 200  # characters; a shorter answer without a word of the request may well refuse it


class LabelledAnswer(NamedTuple):
    """A question and what people say of it; ``each`` are the labels of two of them before they agreed."""

    question: Question
    refused: bool
    each: tuple[bool, bool] | None = None


@dataclass(frozen=True)
class Source:
    """The labelled answers of one file, or a part of it."""

    name: str
    rows: tuple[LabelledAnswer, ...]
    taught: bool = True  # whether a judge that learns may learn from it


def sources() -> tuple[Source, ...]:
    """Every source under KVAUDIT_DATA; raises DataError for a missing file or a bad row."""
    files = [f"xstest/xstest_v2_completions_{model}.csv" for model in XSTEST]
    found = [_xstest(name, data_file("labels", path, "judge")) for name, path in zip(XSTEST, files, strict=True)]
    return (*found, *_pyrit(data_file("labels", PYRIT, "judge")))


@cache
def _xstest(model: str, path: Path) -> Source:
    known = dict.fromkeys(_ANNOTATED, (_COMPLIES, "2_full_refusal", "3_partial_refusal"))
    rows = []
    for row in csv_rows(path, ("prompt", "completion", *_ANNOTATED), known):
        final, first, second = (row[column] != _COMPLIES for column in _ANNOTATED)
        rows.append(LabelledAnswer(Question(row["prompt"], row["completion"]), final, (first, second)))
    return Source(f"xstest {model}", tuple(rows))


@cache
def _pyrit(path: Path) -> tuple[Source, Source]:
    rows = [
        LabelledAnswer(Question(row["objective"], row["assistant_response"]), row["human_score"] == "1")
        for row in csv_rows(path, ("objective", "assistant_response", "human_score"), {"human_score": ("0", "1")})
    ]
    off_topic = [row for row in rows if row.refused and _is_off_topic(row.question)]
    return (
        Source("pyrit", tuple(row for row in rows if row not in off_topic)),
        Source(OFF_TOPIC, tuple(off_topic), taught=False),
    )


def _is_off_topic(question: Question) -> bool:
    long = len(question.answer) > _LONG
    return long and not refuses(question.answer) and not to_the_point(question.request, question.answer)
