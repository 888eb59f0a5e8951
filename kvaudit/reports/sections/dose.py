"""The rate of the desired behaviour by cache budget and by context length, and whether training changed its slope.

A dose is one budget or one length; policies that differ only in their budget are the doses of one curve. x is
log2(budget / length) if the doses are budgets, log2(length) if they are lengths. Each item has a slope of its scores y
over the doses: sum_d (x_d - mean x) y_d / sum_d (x_d - mean x)^2. The curve's slope is the mean over items, with a
CR3-t interval over clusters. The slope of a trained arm is compared with the reference's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvaudit.core.text import inline
from kvaudit.reports.records.rows import CellKey, Panel, Panels
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.canvas import (
    GAIN,
    INK,
    UNDECIDED,
    Drawing,
    add_grid,
    legend_line,
    legend_patch,
    new_figure,
    save,
    series_style,
)
from kvaudit.reports.sections.shared.safe import PolicyFamily, SafeBudget, families, safe_budgets
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, percent, with_length
from kvaudit.reports.stats.effect import LEVEL, Array, Effect
from kvaudit.reports.stats.slope import isotonic, slope_effect
from kvaudit.reports.stats.tango import rate_lower
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.drift import incomparable_reasons, seed_pairs
from kvaudit.reports.verdict.verdict import Decided

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch


@dataclass(frozen=True)
class Dose:
    """One point of a curve: a budget or length, the rate there, and its 95 % interval. ``x`` is log2 of the dose."""

    amount: int  # entries of the budget, or tokens of context
    x: float
    policy: str
    rate: float
    low: float
    high: float
    fitted: float  # isotonic, drawn as a line without an interval


@dataclass(frozen=True)
class DoseCurve:
    """The rate of an arm by the logarithm of the budget or of the length.

    ``slope`` is the change of the rate per doubling, ``against_reference`` the candidate's slope minus the reference's;
    both are None if the cells cannot be compared (``reason``). ``unit`` says whether the rates average items or
    templates.
    """

    axis: str  # budget | length
    arm: str
    family: str  # policies that differ in their budget; on axis length one policy's short name
    suite: str
    context_tokens: int | None  # None on axis length
    doses: tuple[Dose, ...] = ()  # smallest first
    uncompressed: float | None = None  # rate of the arm under policy none, axis budget
    unit: str = "items"
    slope: Effect | None = None
    against_reference: Effect | None = None
    reason: str = ""


@dataclass(frozen=True)
class Doses:
    """All curves of the section; ``cleared`` holds the last budgets and lengths at which arms were non-inferior."""

    curves: tuple[DoseCurve, ...]
    cleared: tuple[SafeBudget, ...]


class DoseSection(Section[Doses]):
    name = "dose"
    title = "Dose and response"
    explain = "How the rate changes with the cache budget and with the context length, on a log scale."
    order = 170
    figures = ("doses", "lengths")
    keys: ClassVar = {"analysis.doses": 31}

    def compute(self, inputs: Inputs) -> Doses | None:
        """Compute the curves over budgets, then those over context lengths; None if there are none.

        Over budgets there is a curve for each policy family, length, suite and arm; over lengths for each policy, suite
        and arm.
        """
        drift, tables = inputs.decided.drift, inputs.data.panels
        curves = (*_budget_curves(drift, tables), *_length_curves(drift, tables))
        return Doses(curves, safe_budgets(drift, inputs.decided.rules)) if curves else None

    def facts(self, value: Doses | None) -> Mapping[str, Any]:
        return {"analysis.doses": [asdict(curve) for curve in value.curves] if value else []}

    def tables(self, value: Doses, decided: Decided) -> Iterator[Table]:
        yield _slope_table(value, decided, "budget")
        yield _slope_table(value, decided, "length")

    def notes(self, value: Doses, decided: Decided) -> Iterator[str]:
        yield (
            "Points: rates with pointwise 95 % score intervals. Lines: isotonic, drawn and not tested. Slope: pp "
            f"per doubling, CR3-t; next to it the slope minus {decided.comparison.reference}'s own: on budgets, above "
            "zero means that training made the arm more sensitive. Families with a gated policy; drift.json holds all."
        )

    def finding(self, value: Doses, decided: Decided) -> str:
        slopes = [(c.slope, c) for c in value.curves if c.slope]
        if not slopes:
            return ""
        slope, c = max(slopes, key=lambda pair: abs(pair[0].estimate))
        return f"The steepest of {len(slopes)}: {c.arm} @ {c.family}, {c.suite}: {effect_text(slope)} per doubling."

    def draw(self, value: Doses, decided: Decided) -> Iterator[Drawing | None]:
        """Yield two figures, the rate by budget and by length, with a panel per suite and policy family (or policy)."""
        for axis, name, against in (("budget", "doses", "cache budget"), ("length", "lengths", "context length")):
            yield _draw(value, decided, axis, name, f"Rate of every arm against the {against}, with 95 % intervals.")


# --- curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scores:
    """The scores [D, N] of one arm at D doses (cache budgets or context lengths), with cluster codes [N].

    N counts items, or templates if the items differ between the doses.
    """

    table: Array
    clusters: npt.NDArray[np.int64]
    names: tuple[str, ...]  # [N]
    unit: str  # items | templates
    draws: int  # samples that one value averages
    graded: bool  # whether some sample is neither 0 nor 1


def _budget_curves(drift: Drift, tables: Panels) -> Iterator[DoseCurve]:
    for family in families(drift.comparison.policies):
        for context, panel in _suites(drift, tables):
            x = [math.log2(budget / context) for budget in family.budgets] if context > 0 else []
            if x:
                for arm in (drift.comparison.reference, *drift.comparison.candidates):
                    yield _budget_curve(drift, panel, family, arm, x)


def _suites(drift: Drift, tables: Panels) -> Iterator[tuple[int, Panel]]:
    """Yield (context length, score table) of each suite, the shortest length first.

    Facets (single properties of answers) have score tables too, but would give too many curves.
    """
    for context in sorted({context for _, context in tables}):
        for suite in drift.comparison.suites:
            if (suite, context) in tables:
                yield context, tables[suite, context]


def _budget_curve(drift: Drift, panel: Panel, family: PolicyFamily, arm: str, x: list[float]) -> DoseCurve:
    pairs, plain = seed_pairs(drift.comparison, panel, arm), drift.comparison.reference
    arm_cells = [[CellKey(arm, seed, policy) for seed, _ in pairs] for policy in family.policies]
    reference_cells = [[CellKey(plain, seed, policy) for _, seed in pairs] for policy in family.policies]
    scores, reason = _scores_at(panel, arm_cells)
    uncompressed = drift.comparison.uncompressed_of(family.policies[0])
    dense = [cell for seed, _ in pairs if (cell := CellKey(arm, seed, uncompressed)) in panel.scores]
    rate = float(np.mean([np.nanmean(panel.scores[cell]) for cell in dense])) if dense else None  # over seeds
    curve = DoseCurve("budget", arm, family.name, panel.suite, panel.context_tokens, uncompressed=rate, reason=reason)
    if scores is None:
        return curve
    reference = _scores_at(panel, reference_cells)[0] if arm != plain else None
    doses = _doses(family.budgets, x, family.policies, scores, increasing=True)
    return _with_slopes(replace(curve, doses=doses), x, scores, reference, drift.alpha)


def _scores_at(panel: Panel, doses: Sequence[Sequence[CellKey]]) -> tuple[_Scores | None, str]:
    """Return an arm's scores at several doses (budgets) averaged over seeds, or None and the reason.

    ``doses`` lists the arm's cells (checkpoint and policy) at each dose, a cell per seed; ``panel`` is the score table
    of a suite at one length.
    """
    cells = sorted({cell for dose in doses for cell in dose})
    reasons = incomparable_reasons(panel, cells) if cells else ()
    if reasons or not cells:
        return None, reasons[0].text if reasons else "no seed to pair"
    present = ~np.isnan(panel.scores[cells[0]])
    # [D, N], over seeds
    table = np.array([np.mean([panel.scores[cell][present] for cell in dose], axis=0) for dose in doses])
    names = tuple(panel.items[i] for i in np.flatnonzero(present))
    return _Scores(table, panel.clusters[present], names, "items", panel.samples * len(doses[0]), panel.graded), ""


def _length_curves(drift: Drift, tables: Panels) -> Iterator[DoseCurve]:
    for policy in drift.comparison.policies:
        for suite in drift.comparison.suites:
            panels = [tables[key] for key in sorted(tables) if key[0] == suite and key[1] > 0]
            if len(panels) > 1:
                for arm in (drift.comparison.reference, *drift.comparison.candidates):
                    yield _length_curve(drift, policy, arm, panels)


def _length_curve(drift: Drift, policy: str, arm: str, panels: Sequence[Panel]) -> DoseCurve:
    scores, reason = _scores_over_lengths(drift, panels, policy, arm)
    curve = DoseCurve("length", arm, drift.comparison.label(policy), panels[0].suite, None, reason=reason)
    if scores is None:
        return curve
    plain = drift.comparison.reference
    reference = _scores_over_lengths(drift, panels, policy, plain)[0] if arm != plain else None
    lengths = [panel.context_tokens for panel in panels]
    x = [math.log2(length) for length in lengths]
    doses = _doses(lengths, x, [policy] * len(x), scores, increasing=False)
    return _with_slopes(replace(curve, unit=scores.unit, doses=doses), x, scores, reference, drift.alpha)


def _scores_over_lengths(drift: Drift, panels: Sequence[Panel], policy: str, arm: str) -> tuple[_Scores | None, str]:
    """Return the scores of one arm at several context lengths, or None and the reason why there are none.

    There is a score per item if all lengths have the same items, else one per template.
    """
    parts = []
    for panel in panels:
        cells = [CellKey(arm, seed, policy) for seed, _ in seed_pairs(drift.comparison, panel, arm)]
        scores, reason = _scores_at(panel, [cells])
        if scores is None:
            return None, reason
        parts.append((scores, tuple(panel.cluster_names[code] for code in scores.clusters)))
    first, first_templates = parts[0]
    graded = any(scores.graded for scores, _ in parts)
    if all((scores.names, templates) == (first.names, first_templates) for scores, templates in parts):
        codes = np.unique(np.array(first_templates, dtype=object).astype(str), return_inverse=True)[1]
        table = np.array([scores.table[0] for scores, _ in parts])  # [D, N]
        return _Scores(table, codes.astype(np.int64), first.names, "items", first.draws, graded), ""
    means = []
    for scores, templates in parts:
        names, codes = np.unique(np.array(templates, dtype=object).astype(str), return_inverse=True)
        mean = np.bincount(codes, weights=scores.table[0]) / np.bincount(codes)  # [templates]
        means.append(dict(zip(names.tolist(), mean.tolist(), strict=True)))
    if any(by_template.keys() != means[0].keys() for by_template in means):
        return None, "items and templates differ between lengths"
    shared = tuple(sorted(means[0]))
    # the smallest template decides how many samples a value averages
    draws = first.draws * min(int(min(Counter(templates).values())) for _, templates in parts)
    table = np.array([[by_template[name] for name in shared] for by_template in means])  # [D, templates]
    return _Scores(table, np.arange(len(shared)), shared, "templates", draws, graded), ""


def _doses(
    amounts: Sequence[int], x: Sequence[float], policies: Sequence[str], scores: _Scores, *, increasing: bool
) -> tuple[Dose, ...]:
    """Return for every dose the rate, its interval (Wilson's at the effective sample size), and its isotonic fit.

    ``amounts`` are the budgets or lengths, and ``x`` are their log2. The fitted rate rises with x if ``increasing``,
    else it falls.
    """
    fitted = isotonic(x, scores.table.mean(axis=1), increasing=increasing)
    tail = (1 - LEVEL) / 2
    rows = zip(amounts, x, policies, scores.table, fitted, strict=True)
    return tuple(
        Dose(
            amount=int(amount),
            x=float(place),
            policy=policy,
            rate=float(row.mean()),
            low=rate_lower(row, scores.clusters, samples=scores.draws, alpha=tail, graded=scores.graded),
            high=1 - rate_lower(1 - row, scores.clusters, samples=scores.draws, alpha=tail, graded=scores.graded),
            fitted=float(fit),
        )
        for amount, place, policy, row, fit in rows
    )


def _with_slopes(
    curve: DoseCurve, x: Sequence[float], scores: _Scores, reference: _Scores | None, alpha: float
) -> DoseCurve:
    """Return the curve with its slope over ``x`` (log2 of budgets or lengths), and this slope minus the reference's.

    The difference is None unless arm and reference have the same items.
    """
    difference = None
    if reference is not None and (reference.names, reference.unit) == (scores.names, scores.unit):
        # differences of rates lie between -1 and 1
        difference = slope_effect(scores.table - reference.table, x, scores.clusters, alpha=alpha, reach=2.0)
    slope = slope_effect(scores.table, x, scores.clusters, alpha=alpha, reach=1.0)
    return replace(curve, slope=slope, against_reference=difference)


# --- the page ---------------------------------------------------------------------------------------------------------


def _slope_table(value: Doses, decided: Decided, axis: str) -> Table:
    curves = [c for c in value.curves if c.axis == axis]
    curves = [c for c in curves if any(d.policy in decided.rules.primary for d in c.doses)] or curves
    headers = ["arm", "policy family" if axis == "budget" else "policy", "suite", f"rate by {axis}"]
    headers += ["slope per doubling, 95 % interval", f"minus {decided.comparison.reference}'s"]
    rows = []
    for c in curves:
        suite = c.suite if c.context_tokens is None else with_length(decided.comparison, c.suite, c.context_tokens)
        rates = "; ".join(f"{d.amount}: {percent(d.rate)}" for d in c.doses) or c.reason
        slopes = [effect_text(effect) for effect in (c.slope, c.against_reference)]
        rows.append([c.arm, c.family, suite, rates, *slopes])
    return table_of(headers, rows, words=4)


_COLUMNS = 3
MOST_LINES = 4  # rows of panels
_ARM_SPREAD = 0.16  # distance from the first to the last arm at one dose, as a share of the range of doses


def _draw(value: Doses, decided: Decided, axis: str, name: str, alt: str) -> Drawing | None:
    curves_drawn = [c for c in value.curves if c.axis == axis and c.doses]
    if axis == "length":  # a panel per policy would be too many: only gated ones
        gated = {decided.comparison.label(p) for p in decided.rules.primary}
        curves_drawn = [c for c in curves_drawn if c.family in gated] or curves_drawn
    groups: dict[tuple[str, str, int | None], list[DoseCurve]] = {}
    for curve in curves_drawn:
        groups.setdefault((curve.family, curve.suite, curve.context_tokens), []).append(curve)
    if not groups:
        return None
    columns = min(_COLUMNS, len(groups))
    panels_shown = list(groups.items())[: columns * MOST_LINES]
    lines = -(-len(panels_shown) // columns)
    figure = new_figure(0.5 + 2.9 * columns, 0.6 + 2.3 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(panels_shown) :]:
        panel.set_visible(False)
    for place, (panel, (key, curves)) in enumerate(zip(panels.flat, panels_shown, strict=False)):
        _panel(panel, value, decided, curves)
        family, suite, context = key
        name_of_suite = suite if context is None or len(decided.comparison.contexts) == 1 else f"{suite}, {context}"
        panel.set_title(inline(f"{name_of_suite}: {family}"))
        if place % columns == 0:
            panel.set_ylabel("desired, %")
        if place + columns >= len(panels_shown):
            panel.set_xlabel("budget, entries" if axis == "budget" else "context, tokens")
    figure.legend(
        handles=_legend(decided.comparison, panels_shown[0][1], axis), loc="outside upper center", ncols=columns
    )
    return save(figure, name, alt)


def _panel(panel: Axes, value: Doses, decided: Decided, curves: Sequence[DoseCurve]) -> None:
    cleared = {(s.axis, s.arm, s.family, s.suite, s.context_tokens): s.cleared for s in value.cleared if s.cleared}
    doses = curves[0].doses
    # at one dose the marks of the arms are drawn side by side
    spread = _ARM_SPREAD * (doses[-1].x - doses[0].x)
    for i, curve in enumerate(curves):
        hue, marker, style = series_style(decided.comparison.arms, curve.arm)
        shift = spread * (i / (len(curves) - 1) - 0.5) if len(curves) > 1 else 0.0
        for dose in curve.doses:
            panel.plot([dose.x + shift] * 2, [100 * dose.low, 100 * dose.high], color=hue, alpha=0.5, linewidth=1)
            panel.plot([dose.x + shift], [100 * dose.rate], marker=marker, color=hue, markersize=4.5, linestyle="")
        xs = [dose.x + shift for dose in curve.doses]
        panel.plot(xs, [100 * dose.fitted for dose in curve.doses], color=hue, linestyle=style, linewidth=1.3)
        last = cleared.get((curve.axis, curve.arm, curve.family, curve.suite, curve.context_tokens))
        for dose in curve.doses:
            if dose.amount == last:
                # above every rate
                panel.plot([dose.x + shift], [105], marker="v", color=hue, markersize=6)
    reference = next((c for c in curves if c.arm == decided.comparison.reference), None)
    if reference is not None:
        key = (reference.axis, reference.arm, reference.family, reference.suite, reference.context_tokens)
        _shade_safe(panel, reference, cleared.get(key))
    rate = reference.uncompressed if reference else None
    if rate is not None:
        panel.axhline(100 * rate, color=INK, linewidth=0.9)
        margin = decided.rules.margins.get(curves[0].suite)
        if margin is not None:
            panel.axhspan(100 * (rate - margin), 100 * rate, color=UNDECIDED, alpha=0.16, linewidth=0)
    panel.set_xticks([dose.x for dose in doses], [str(dose.amount) for dose in doses])
    panel.set_xticks([], minor=True)
    panel.set_yticks([0, 20, 40, 60, 80, 100])
    panel.set_ylim(-2, 109)
    panel.margins(x=0.12)
    add_grid(panel)


def _shade_safe(panel: Axes, curve: DoseCurve, amount: int | None) -> None:
    """Shade the doses that passed: all budgets from ``amount`` up, or all lengths up to ``amount``.

    Nothing is shaded if ``amount`` is None.
    """
    x = next((dose.x for dose in curve.doses if dose.amount == amount), None)
    if x is None:
        return
    first, final = curve.doses[0].x, curve.doses[-1].x
    padding = 0.09 * (final - first)
    low, high = (x, final + padding) if curve.axis == "budget" else (first - padding, x)
    panel.axvspan(low, high, color=GAIN, alpha=0.13, linewidth=0)


def _legend(sides: Comparison, curves: Sequence[DoseCurve], axis: str) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = []
    for curve in curves:
        hue, marker, style = series_style(sides.arms, curve.arm)
        handles.append(legend_line(inline(curve.arm), color=hue, marker=marker, linestyle=style))
    if axis == "budget":
        handles.append(
            legend_line(inline(f"{sides.reference} uncompressed, with the margin"), color=INK, linewidth=0.9)
        )
    cleared = "smallest cleared budget" if axis == "budget" else "longest cleared length"
    safe = legend_patch(inline(f"cleared for serving {sides.reference}"), color=GAIN, alpha=0.25)
    return [*handles, legend_line(cleared, color=INK, marker="v", linestyle=""), safe]
