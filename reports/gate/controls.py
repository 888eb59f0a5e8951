"""Whether a cell has anything to lose: what the uncompressed reference shows of a score or facet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from audit.core.facets import FACETS
from reports.stats.binomial import clopper_pearson


class Standing(StrEnum):
    """What the reference can show."""

    MEASURABLE = "measurable"
    FLOOR = "at floor"
    CEILING = "at ceiling"
    NOT_READABLE = "not readable"
    NOT_CAPABLE = "not capable"


@dataclass(frozen=True)
class Control:
    """A cell of the reference; ``rate`` is of desired behaviour, with its interval."""

    metric: str
    context_tokens: int
    standing: Standing
    rate: float
    low: float
    high: float
    answers: int
    clusters: int
    says: str


def controls_of(answers: Iterable[Any], margins: Mapping[str, float]) -> tuple[Control, ...]:
    """One control for every metric (SUITE or SUITE.FACET) of ``margins`` and every length, of graded answers."""
    rows = list(answers)
    places = sorted({(row.suite, row.context_tokens) for row in rows})
    return tuple(
        _control(metric, length, margin, [row for row in rows if (row.suite, row.context_tokens) == (suite, length)])
        for metric, margin in margins.items()
        for suite, length in places
        if suite in (metric, metric.rpartition(".")[0])
    )


def _control(metric: str, length: int, margin: float, rows: list[Any]) -> Control:
    suite, _, facet = metric.rpartition(".")
    whole = not suite or any(row.suite == metric for row in rows)
    values = [(row, row.score if whole else _desired(row.facets, facet)) for row in rows]
    known = [(row.cluster_id, float(value)) for row, value in values if value is not None]
    right = sum(value for _, value in known)
    found = clopper_pearson(right, len(known))
    rate = right / len(known) if known else 0.0
    standing = Standing.NOT_READABLE if not known else Standing.FLOOR if rate <= margin else Standing.MEASURABLE
    says = f"{right:g} of {len(known)} desired"
    return Control(
        metric,
        length,
        standing,
        rate,
        found.low,
        found.high,
        len(known),
        len({name for name, _ in known}),
        says if standing is Standing.MEASURABLE else f"{says}; {100 * margin:g} points may be lost",
    )


def _desired(facets: Mapping[str, bool | None], facet: str) -> float | None:
    value = facets.get(facet)
    return None if value is None else float(value == FACETS[facet].wanted)
