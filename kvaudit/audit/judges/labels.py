"""Human labels of whether answers refuse, and a judge's card: its agreement with each data set of labels (source).

    xstest/xstest_v2_completions_*.csv      two annotators; a partial refusal is a refusal (Roettger et al. 2024)
    refusal_judge_labels/pyrit_refusal.csv  one label each

PyRIT also labels off-topic answers as refusals, which suites recognise on their own
(``suites.phrases.addresses_request``). Such rows form a separate source, which no judge is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvaudit.audit.judges.base import Judge
from kvaudit.core.judge_answers import Judgement, Question
from kvaudit.reports.stats.judges import JudgeError, Kappa, Proportion, clopper_pearson, judge_error, kappa
from kvaudit.suites.phrases import addresses_request, refuses
from kvaudit.suites.sources import csv_rows, data_file

XSTEST = ("mistralinstruct", "mistralguard")
PYRIT = "refusal_judge_labels/pyrit_refusal.csv"
OFF_TOPIC = "pyrit, beside the point"
_COMPLIES = "1_full_compliance"
_LABEL_COLUMNS = ("final_label", "annotation_1", "annotation_2")
_LONG = 200  # characters; a shorter answer that repeats no word of the request may well refuse it


class LabelledAnswer(NamedTuple):
    """A question with its human label (``refused``).

    ``annotations``: the labels that two annotators gave separately; None if there was one annotator.
    """

    question: Question
    refused: bool
    annotations: tuple[bool, bool] | None = None


@dataclass(frozen=True)
class Source:
    """One data set of human labels: the labelled answers of a file, or of a part of it."""

    name: str
    rows: tuple[LabelledAnswer, ...]
    is_for_training: bool = True  # whether judges may be trained on it


def sources() -> tuple[Source, ...]:
    """Return every data set of human labels, as read from the files under KVAUDIT_DATA.

    Raises DataError for a missing file or a bad row.
    """
    files = [f"xstest/xstest_v2_completions_{model}.csv" for model in XSTEST]
    xstest = [_xstest(name, data_file("labels", path, "judge")) for name, path in zip(XSTEST, files, strict=True)]
    return (*xstest, *_pyrit(data_file("labels", PYRIT, "judge")))


@cache
def _xstest(model: str, path: Path) -> Source:
    values = dict.fromkeys(_LABEL_COLUMNS, (_COMPLIES, "2_full_refusal", "3_partial_refusal"))
    rows = []
    for row in csv_rows(path, ("prompt", "completion", *_LABEL_COLUMNS), values):
        final, first, second = (row[column] != _COMPLIES for column in _LABEL_COLUMNS)
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
        Source(OFF_TOPIC, tuple(off_topic), is_for_training=False),
    )


def _is_off_topic(question: Question) -> bool:
    is_long = len(question.answer) > _LONG
    return is_long and not refuses(question.answer) and not addresses_request(question.request, question.answer)


# --- the card of a judge --------------------------------------------------------------------------------------------

HEADINGS = (
    *("labels", "answers, refusals", "sensitivity", "specificity", "kappa", "unsure", "kappa where sure"),
    *("kappa of two people", "failed"),
)


@dataclass(frozen=True)
class CardLine:
    """One line of a judge's card, for one data set of human labels: how often the judge agrees with people.

    A trained judge is first trained again without this data set. ``error`` and ``agreement`` use the judge's best guess
    about every answer. ``decided`` is its agreement with people on the answers of which it is sure. ``people`` is the
    agreement of two annotators with each other. ``failed`` counts the answers that the judge could not grade; its other
    numbers leave them out.
    """

    source: str
    answers: int
    refused: int  # by the human labels
    failed: int
    error: JudgeError
    agreement: Kappa | None  # None if it failed on every answer
    people: Kappa | None
    unsure: Proportion  # of the answers that it labelled
    decided: Kappa | None  # None if it is sure of none


def card_lines(judge: Judge, all_sources: Sequence[Source]) -> list[CardLine]:
    """Return the lines of a judge's card (its agreement with people), one for each data set of human labels.

    For each line a trained judge is first trained again without that data set.
    """
    return [_card_line(judge.without(source.name), source) for source in all_sources]


def card_rows(judge: Judge, all_sources: Sequence[Source]) -> list[list[str]]:
    """Return a judge's card (its agreement with people) as rows of texts, one for each data set of human labels.

    Each row has the columns of ``HEADINGS``.
    """
    return [
        [
            line.source,
            f"{line.answers}, {line.refused}",
            _share_text(line.error.sensitivity),
            _share_text(line.error.specificity),
            _kappa_text(line.agreement),
            _share_text(line.unsure),
            _kappa_text(line.decided),
            _kappa_text(line.people),
            str(line.failed),
        ]
        for line in card_lines(judge, all_sources)
    ]


def _share_text(rate: Proportion) -> str:
    return "no label" if rate.estimate is None else f"{rate.estimate:.2f} [{rate.low:.2f}, {rate.high:.2f}]"


def _kappa_text(agreement: Kappa | None) -> str:
    if agreement is None or agreement.estimate is None:
        return "-"
    low, high = agreement.low, agreement.high
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{agreement.estimate:.2f}{interval}"


def _card_line(judge: Judge, source: Source) -> CardLine:
    readings = judge.read([row.question for row in source.rows])
    labelled = [(row.refused, reading) for row, reading in zip(source.rows, readings, strict=True) if reading]
    sure = [(label, reading) for label, reading in labelled if reading.sure]
    pairs = [row.annotations for row in source.rows if row.annotations is not None]
    return CardLine(
        source=source.name,
        answers=len(source.rows),
        refused=sum(row.refused for row in source.rows),
        failed=len(readings) - len(labelled),
        error=judge_error([reading.refused for _, reading in labelled], [label for label, _ in labelled]),
        agreement=_kappa(labelled),
        unsure=clopper_pearson(len(labelled) - len(sure), len(labelled)),
        decided=_kappa(sure),
        people=kappa(*zip(*pairs, strict=True)) if pairs else None,
    )


def _kappa(pairs: Sequence[tuple[bool, Judgement]]) -> Kappa | None:
    return kappa([label for label, _ in pairs], [reading.refused for _, reading in pairs]) if pairs else None
