"""Every contrast and decided cell as one flat row, from which tables and files take their columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvaudit.core.text import inline
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.label_sheet import spreadsheet_safe
from kvaudit.reports.verdict.reasons import Reason
from kvaudit.reports.verdict.verdict import Decided, Decision

CONTRASTS = "contrasts.csv"


@dataclass(frozen=True)
class Row:
    """One measured difference with its decision. Scores are shares (0.05 = 5 pp), drift is candidate minus reference.

    A missing value is None, never 0. ``low`` and ``high`` are the 95 % interval, ``lower`` and ``upper`` the one-sided
    bounds that decide, ``recipe_low`` and ``recipe_high`` the interval with seed variance. Where a ratio decides,
    ``ratio`` is the ratio of the rates of the unwanted event, and ``margin`` its limit in score units.
    """

    estimand: str
    arm: str
    policy: str  # canonical
    label: str  # the policy's short name
    metric: str  # a suite, or SUITE.FACET
    context_tokens: int
    reference: float | None
    candidate: float | None
    estimate: float | None
    low: float | None
    high: float | None
    lower: float | None
    upper: float | None
    margin: float | None
    gated: bool
    status: str | None  # of the data; None where the cell was not decided
    standing: str | None  # after waivers
    items: int | None
    templates: int | None
    lost: float | None
    gained: float | None
    churn: float | None
    recipe_low: float | None
    recipe_high: float | None
    seeds: int
    pvalue: float | None  # one-sided for a drop, adjusted over the gated cells
    reasons: tuple[Reason, ...]
    contrast_reasons: tuple[Reason, ...]  # why the contrast has no number
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    ratio_limit: float | None


def row_of(sides: Comparison, contrast: Contrast | None, decision: Decision | None) -> Row:
    """Return the row of a cell from its measured difference, its decision, or both."""
    cell = contrast or decision
    assert cell is not None, "a row needs a contrast or a decision"
    effect, rates, recipe = cell.effect, cell.rates, contrast.recipe if contrast else None
    times, limit = (decision.ratio.times, decision.ratio.limit) if decision and decision.ratio else (None, None)
    return Row(
        estimand=cell.estimand,
        arm=cell.arm,
        policy=cell.policy,
        label=sides.label(cell.policy),
        metric=cell.suite,
        context_tokens=cell.context_tokens,
        reference=rates.reference if rates else None,
        candidate=rates.candidate if rates else None,
        estimate=effect.estimate if effect else None,
        low=effect.low if effect else None,
        high=effect.high if effect else None,
        lower=effect.lower if effect else None,
        upper=effect.upper if effect else None,
        margin=decision.margin if decision else None,
        gated=bool(decision and decision.gated),
        status=decision.status.value if decision else None,
        standing=decision.standing.value if decision else None,
        items=effect.n_items if effect else None,
        templates=effect.n_clusters if effect else None,
        lost=effect.losses if effect else None,
        gained=effect.gains if effect else None,
        churn=contrast.churn if contrast else None,
        recipe_low=recipe.low if recipe else None,
        recipe_high=recipe.high if recipe else None,
        seeds=len(contrast.seeds) if contrast else 0,
        pvalue=decision.pvalue_drop if decision else None,
        reasons=decision.reasons if decision else cell.reasons,
        contrast_reasons=contrast.reasons if contrast else (),
        ratio=times.estimate if times else None,
        ratio_low=times.low if times else None,
        ratio_high=times.high if times else None,
        ratio_limit=limit,
    )


# in the order of the file; rates are in percent, drifts and margins in percentage points
CONTRAST_COLUMNS = (
    *("contrast", "arm", "policy", "suite", "context_tokens", "reference", "candidate", "estimate", "low", "high"),
    *("lower", "upper", "margin", "gated", "status", "items", "templates", "lost", "gained", "churn"),
    *("recipe_low", "recipe_high", "seeds", "why", "ratio", "ratio_low", "ratio_high", "ratio_limit", "pvalue"),
    "reasons",
)
_FIELDS = {"contrast": "estimand", "suite": "metric"}  # column -> field of a Row, where their names differ
_TIMES_100 = {
    *("reference", "candidate", "estimate", "low", "high", "lower", "upper", "margin", "churn"),
    *("recipe_low", "recipe_high"),
}


def _value(row: Row, column: str) -> Any:
    if column == "why":
        return "; ".join(map(str, row.contrast_reasons)) or None
    if column == "reasons":
        return " ".join(reason.code for reason in row.reasons) or None
    value = getattr(row, _FIELDS.get(column, column))
    return 100.0 * value if column in _TIMES_100 and value is not None else value


def contrast_rows(decided: Decided) -> Iterator[dict[str, Any]]:
    """Yield every contrast, facets included, as a row (column -> value).

    Where a ratio's interval has no upper end, the value is infinity.
    """
    decisions = {decision.place: decision for decision in decided.verdict.decisions}
    for contrast in decided.drift.contrasts:
        row = row_of(decided.comparison, contrast, decisions.get(contrast.place))
        yield {column: _value(row, column) for column in CONTRAST_COLUMNS}


def contrasts_csv(decided: Decided) -> str:
    """Return the text of contrasts.csv; a missing value is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CONTRAST_COLUMNS)
    writer.writerows([_field(value) for value in row.values()] for row in contrast_rows(decided))
    return text.getvalue()


def _field(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return spreadsheet_safe(inline(value))
    return value
