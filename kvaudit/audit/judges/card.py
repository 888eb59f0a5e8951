"""A judge's card: how often it is right where people labelled, source by source, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvaudit.audit.judges.base import Judge
from kvaudit.audit.judges.labels import Source
from kvaudit.core.judge_answers import Judgement
from kvaudit.reports.stats.binomial import Proportion, clopper_pearson
from kvaudit.reports.stats.judges import JudgeError, Kappa, judge_error, kappa


@dataclass(frozen=True)
class CardLine:
    """One source: the judge's errors, its agreement with people, and theirs among each other.

    A judge that learns was taught without the source. ``error`` and ``agreement`` are of its best guess about every
    answer, ``decided`` is its agreement where it is sure. ``failed`` answers got no label and count in nothing else.
    """

    source: str
    answers: int
    refused: int  # by people
    failed: int
    error: JudgeError
    agreement: Kappa | None  # None where it failed throughout
    people: Kappa | None
    unsure: Proportion  # of the answers that it labelled
    decided: Kappa | None  # None where it is sure of nothing


def card_lines(judge: Judge, sources: Sequence[Source]) -> list[CardLine]:
    """The lines of a judge; one that learns is taught anew without each source in turn."""
    return [_line(judge.without(source.name), source) for source in sources]


HEADINGS = (
    *("labels", "answers, refusals", "sensitivity", "specificity", "kappa", "unsure", "kappa where sure"),
    *("kappa of two people", "failed"),
)


def card_rows(judge: Judge, sources: Sequence[Source]) -> list[list[str]]:
    """The card as text, a row for each source under ``HEADINGS``."""
    return [
        [
            line.source,
            f"{line.answers}, {line.refused}",
            _share(line.error.sensitivity),
            _share(line.error.specificity),
            _agreement(line.agreement),
            _share(line.unsure),
            _agreement(line.decided),
            _agreement(line.people),
            str(line.failed),
        ]
        for line in card_lines(judge, sources)
    ]


def _share(rate: Proportion) -> str:
    """.87 [.82, .91], or that nobody gave such a label."""
    return "no label" if rate.estimate is None else f"{rate.estimate:.2f} [{rate.low:.2f}, {rate.high:.2f}]"


def _agreement(found: Kappa | None) -> str:
    if found is None or found.estimate is None:
        return "-"
    interval = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.estimate:.2f}{interval}"


def _line(judge: Judge, source: Source) -> CardLine:
    said = judge.read([row.question for row in source.rows])
    known = [(row.refused, reading) for row, reading in zip(source.rows, said, strict=True) if reading is not None]
    sure = [(truth, reading) for truth, reading in known if reading.sure]
    people, labels = [truth for truth, _ in known], [reading.refused for _, reading in known]
    pairs = [row.each for row in source.rows if row.each is not None]
    return CardLine(
        source=source.name,
        answers=len(source.rows),
        refused=sum(row.refused for row in source.rows),
        failed=len(said) - len(known),
        error=judge_error(labels, people),
        agreement=_kappa(known),
        unsure=clopper_pearson(len(known) - len(sure), len(known)),
        decided=_kappa(sure),
        people=kappa(*zip(*pairs, strict=True)) if pairs else None,
    )


def _kappa(known: Sequence[tuple[bool, Judgement]]) -> Kappa | None:
    return kappa([truth for truth, _ in known], [reading.refused for _, reading in known]) if known else None
