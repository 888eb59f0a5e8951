"""Every contrast of a run as one flat row: for a table in memory, and for contrasts.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from kvaudit.core.text import inline
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.verdict import Decided
from kvaudit.reports.verdict.verdict import Decision

_POINTS = 100.0  # scores are shares; tables speak of percentage points
CONTRASTS = "contrasts.csv"
_FORMULA = ("=", "+", "-", "@", "\t")  # what a spreadsheet takes for a formula
CONTRAST_COLUMNS = (
    *("contrast", "arm", "policy", "suite", "context_tokens", "reference", "candidate"),
    *("estimate", "low", "high", "lower", "upper", "margin", "gated", "status"),
    *("items", "templates", "lost", "gained", "churn", "recipe_low", "recipe_high", "seeds", "why"),
    *("ratio", "ratio_low", "ratio_high", "ratio_limit"),
)


def contrast_rows(decided: Decided) -> Iterator[dict[str, Any]]:
    """One row for each contrast and facet, by ``CONTRAST_COLUMNS``.

    Rates (``reference``, ``candidate``, ``churn``) are in percent; ``estimate``, ``low``, ``high`` (95 %), the bounds
    of the rule ``lower`` and ``upper``, ``margin`` and the interval with seed variance in percentage points; drift is
    candidate minus reference. Where a ratio decides, ``ratio`` is how many times as often what is not wanted happens,
    with 95 % ends and the limit it is held to; ``margin`` is then what that comes to. What does not exist is None,
    never 0, and an end that is not there is infinite.
    """
    decisions = {one.place: one for one in decided.verdict.decisions}
    return (_row(one, decisions.get(one.place)) for one in decided.drift.contrasts)


def _row(one: Contrast, decision: Decision | None) -> dict[str, Any]:
    effect, recipe = one.effect, one.recipe
    held = decision.ratio if decision else None
    shares = {name: getattr(one.rates, name, None) for name in ("reference", "candidate")}
    shares |= {name: getattr(effect, name, None) for name in ("estimate", "low", "high", "lower", "upper")}
    shares |= {"margin": decision.margin if decision else None, "churn": one.churn}
    shares |= {f"recipe_{end}": getattr(recipe, end, None) for end in ("low", "high")}
    return {
        # the place fills the first columns
        **dict(zip(CONTRAST_COLUMNS, one.place, strict=False)),
        **{name: None if share is None else _POINTS * share for name, share in shares.items()},
        "gated": bool(decision and decision.gated),
        "status": decision.status.value if decision else None,
        "items": effect.n_items if effect else None,
        "templates": effect.n_clusters if effect else None,
        "lost": effect.losses if effect else None,
        "gained": effect.gains if effect else None,
        "seeds": len(one.seeds),
        "why": "; ".join(map(str, one.reasons)) or None,
        "ratio": held.times.estimate if held else None,
        "ratio_low": held.times.low if held else None,
        "ratio_high": held.times.high if held else None,
        "ratio_limit": held.limit if held else None,
    }


def contrasts_csv(decided: Decided) -> str:
    """The rows as text; what does not exist is an empty field. No verdict of the run stands here."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CONTRAST_COLUMNS)
    writer.writerows([_field(row[name]) for name in CONTRAST_COLUMNS] for row in contrast_rows(decided))
    return text.getvalue()


def _field(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        shown = inline(value)
        return f"'{shown}" if shown.startswith(_FORMULA) else shown
    return value
