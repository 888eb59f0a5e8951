"""How fast the desired behaviour goes as the budget shrinks or the context grows, and whether training changed it.

The slope is the contrast sum_d (x_d - mean x) y_d / sum_d (x_d - mean x)^2 over doses x = log2(budget / length), or
log2(length), one number per item, CR3-t over clusters; a training arm's slope is held against the reference's own.
Policies that differ in their budget only are the doses of one curve.
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
from kvaudit.reports.sections.shared import words
from kvaudit.reports.sections.shared.canvas import (
    GAIN,
    INK,
    UNDECIDED,
    Drawing,
    new_figure,
    series_style,
    legend_line,
    legend_patch,
    add_grid,
    save,
)
from kvaudit.reports.sections.shared.safe import PolicyFamily, SafeBudget, families, safe_budgets
from kvaudit.reports.stats.slope import slope_effect
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import percent, with_length
from kvaudit.reports.stats.effect import LEVEL, Array, Effect
from kvaudit.reports.stats.slope import isotonic
from kvaudit.reports.stats.tango import rate_lower
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.drift import broken_contract, seed_pairs
from kvaudit.reports.verdict.verdict import Decided

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch


@dataclass(frozen=True)
class Dose:
    """One budget or length of a curve: the rate there with its 95 % interval. ``x`` is log2 of the dose."""

    amount: int  # entries of the budget, or tokens of context
    x: float
    policy: str
    rate: float
    low: float
    high: float
    fitted: float  # isotonic: a drawn line, not an estimate with an interval


@dataclass(frozen=True)
class DoseCurve:
    """The rate of an arm against the logarithm of the budget, or of the length.

    ``slope_effect`` is the change of the rate per doubling, ``against_reference`` the candidate's slope minus the reference's;
    both None where the cells cannot be compared (``reason``). ``unit`` says whether items or templates are averaged.
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
    """Every curve, and what a fixed sequence of tests cleared of them, which the figure marks."""

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
        """A curve per family, suite, length and arm; of several lengths one per policy, suite and arm."""
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
            f"per doubling, CR3-t; beside it the slope minus {decided.comparison.reference}'s own: on budgets, above "
            "zero means that training made the arm more sensitive. Families with a gated policy; drift.json holds all."
        )

    def finding(self, value: Doses, decided: Decided) -> str:
        known = [(c.slope, c) for c in value.curves if c.slope]
        if not known:
            return ""
        slope_effect, c = max(known, key=lambda pair: abs(pair[0].estimate))
        return f"The steepest of {len(known)}: {c.arm} @ {c.family}, {c.suite}: {words.effect_text(slope_effect)} per doubling."

    def draw(self, value: Doses, decided: Decided) -> Iterator[Drawing | None]:
        """Rate against budget, a panel per family and suite, and against length, a panel per policy and suite."""
        for axis, name, against in (("budget", "doses", "cache budget"), ("length", "lengths", "context length")):
            yield _draw(value, decided, axis, name, f"Rate of every arm against the {against}, with 95 % intervals.")


_NO_COMMON = "items and templates differ between lengths"


@dataclass(frozen=True)
class _Scores:
    """Scores [D, N] of one arm over doses with cluster codes [N], N items, or templates where items differ."""

    table: Array
    clusters: npt.NDArray[np.int64]
    names: tuple[str, ...]  # [N]
    unit: str  # items | templates
    draws: int  # samples that one value averages
    graded: bool  # whether some of them are neither 0 nor 1


def _budget_curves(drift: Drift, tables: Panels) -> Iterator[DoseCurve]:
    for family in families(drift.comparison.policies):
        for context, panel in _suites(drift, tables):
            x = [math.log2(budget / context) for budget in family.budgets] if context > 0 else []
            if x:
                for arm in (drift.comparison.reference, *drift.comparison.candidates):
                    yield _budget_curve(drift, panel, family, arm, x)


def _suites(drift: Drift, tables: Panels) -> Iterator[tuple[int, Panel]]:
    """The panels of whole suites, shortest length first; a facet has no curve: too many would hide those that count."""
    for context in sorted({context for _, context in tables}):
        for suite in drift.comparison.suites:
            if (suite, context) in tables:
                yield context, tables[suite, context]


def _budget_curve(drift: Drift, panel: Panel, family: PolicyFamily, arm: str, x: list[float]) -> DoseCurve:
    pairs = seed_pairs(drift.comparison, panel, arm)
    own = [[CellKey(arm, seed, policy) for seed, _ in pairs] for policy in family.policies]
    other = [[CellKey(drift.comparison.reference, seed, policy) for _, seed in pairs] for policy in family.policies]
    scores, reason = _within(panel, own)
    plain = drift.comparison.uncompressed_of(family.policies[0])
    dense = [CellKey(arm, seed, plain) for seed, _ in pairs]
    known = [cell for cell in dense if cell in panel.scores]
    rate = float(np.mean([np.nanmean(panel.scores[cell]) for cell in known])) if known else None  # over seeds
    new_figure = DoseCurve(
        "budget", arm, family.name, panel.suite, panel.context_tokens, uncompressed=rate, reason=reason
    )
    if scores is None:
        return new_figure
    reference = _within(panel, other)[0] if arm != drift.comparison.reference else None
    doses = _doses(family.budgets, x, family.policies, scores, increasing=True)
    return _with_slopes(replace(new_figure, doses=doses), x, scores, reference, drift.alpha)


def _within(panel: Panel, doses: Sequence[Sequence[CellKey]]) -> tuple[_Scores | None, str]:
    """Scores of doses inside one panel, averaged over seeds, or why there are none."""
    cells = sorted({cell for dose in doses for cell in dose})
    reasons = broken_contract(panel, cells) if cells else ()
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
            own = [tables[key] for key in sorted(tables) if key[0] == suite and key[1] > 0]
            if len(own) > 1:
                for arm in (drift.comparison.reference, *drift.comparison.candidates):
                    yield _length_curve(drift, policy, arm, own)


def _length_curve(drift: Drift, policy: str, arm: str, own: Sequence[Panel]) -> DoseCurve:
    scores, reason = _across(drift, own, policy, arm)
    new_figure = DoseCurve("length", arm, drift.comparison.label(policy), own[0].suite, None, reason=reason)
    if scores is None:
        return new_figure
    new_figure, plain = replace(new_figure, unit=scores.unit), drift.comparison.reference
    reference = _across(drift, own, policy, plain)[0] if arm != plain else None
    lengths = [panel.context_tokens for panel in own]
    x = [math.log2(length) for length in lengths]
    doses = _doses(lengths, x, [policy] * len(x), scores, increasing=False)
    return _with_slopes(replace(new_figure, doses=doses), x, scores, reference, drift.alpha)


def _across(drift: Drift, own: Sequence[Panel], policy: str, arm: str) -> tuple[_Scores | None, str]:
    """Scores of one arm over panels of different lengths: by item where items are the same, else by template."""
    parts = []
    for panel in own:
        cells = [CellKey(arm, seed, policy) for seed, _ in seed_pairs(drift.comparison, panel, arm)]
        part, reason = _within(panel, [cells])
        if part is None:
            return None, reason
        parts.append((part, tuple(panel.cluster_names[code] for code in part.clusters)))
    first, templates = parts[0]
    graded = any(part.graded for part, _ in parts)
    if all((part.names, names) == (first.names, templates) for part, names in parts):
        codes = np.unique(np.array(templates, dtype=object).astype(str), return_inverse=True)[1]
        table = np.array([part.table[0] for part, _ in parts])  # [D, N]
        return _Scores(table, codes.astype(np.int64), first.names, "items", first.draws, graded), ""
    means = []
    for part, names in parts:
        found, codes = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
        mean = np.bincount(codes, weights=part.table[0]) / np.bincount(codes)  # [templates]
        means.append(dict(zip(found.tolist(), mean.tolist(), strict=True)))
    if any(one.keys() != means[0].keys() for one in means):
        return None, _NO_COMMON
    shared = tuple(sorted(means[0]))
    # the smallest template decides how many samples a value averages
    draws = first.draws * min(int(min(Counter(names).values())) for _, names in parts)
    table = np.array([[one[name] for name in shared] for one in means])  # [D, templates]
    return _Scores(table, np.arange(len(shared)), shared, "templates", draws, graded), ""


def _doses(
    amounts: Sequence[int], x: Sequence[float], policies: Sequence[str], scores: _Scores, *, increasing: bool
) -> tuple[Dose, ...]:
    """Rate, score interval (Wilson at the effective sample size) and isotonic fit of every dose."""
    fitted = isotonic(x, scores.table.mean(axis=1), increasing=increasing).fitted
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
    """The curve with its slope, and the difference from the reference's where both stand on the same rows."""
    difference = None
    if reference is not None and (reference.names, reference.unit) == (scores.names, scores.unit):
        # differences of rates lie between -1 and 1
        difference = slope_effect(scores.table - reference.table, x, scores.clusters, alpha=alpha, reach=2.0)
    own = slope_effect(scores.table, x, scores.clusters, alpha=alpha, reach=1.0)
    return replace(curve, slope=own, against_reference=difference)


def _slope_table(value: Doses, decided: Decided, axis: str) -> Table:
    every = [c for c in value.curves if c.axis == axis]
    found = [c for c in every if any(d.policy in decided.rules.primary for d in c.doses)] or every
    headers = ["arm", "policy family" if axis == "budget" else "policy", "suite", f"rate by {axis}"]
    headers += ["slope per doubling, 95 % interval", f"minus {decided.comparison.reference}'s"]
    rows = []
    for c in found:
        suite = c.suite if c.context_tokens is None else with_length(decided.comparison, c.suite, c.context_tokens)
        rates = "; ".join(f"{d.amount}: {percent(d.rate)}" for d in c.doses) or c.reason
        slopes = [words.effect_text(effect) for effect in (c.slope, c.against_reference)]
        rows.append([c.arm, c.family, suite, rates, *slopes])
    return table_of(headers, rows, words=4)


_COLUMNS = 3
MOST_LINES = 4  # rows of panels
_APART = 0.16  # of the range of doses, from the first arm at a dose to the last


def _draw(value: Doses, decided: Decided, axis: str, name: str, alt: str) -> Drawing | None:
    known = [c for c in value.curves if c.axis == axis and c.doses]
    if axis == "length":  # one panel per policy is many: the gated ones
        gated = {decided.comparison.label(p) for p in decided.rules.primary}
        known = [c for c in known if c.family in gated] or known
    groups: dict[tuple[str, str, int | None], list[DoseCurve]] = {}
    for curve in known:
        groups.setdefault((curve.family, curve.suite, curve.context_tokens), []).append(curve)
    if not groups:
        return None
    columns = min(_COLUMNS, len(groups))
    shown = list(groups.items())[: columns * MOST_LINES]
    lines = -(-len(shown) // columns)
    figure = new_figure(0.5 + 2.9 * columns, 0.6 + 2.3 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(shown) :]:
        panel.set_visible(False)
    for place, (panel, (key, curves)) in enumerate(zip(panels.flat, shown, strict=False)):
        _panel(panel, value, decided, curves)
        family, suite, context = key
        where = suite if context is None or len(decided.comparison.contexts) == 1 else f"{suite}, {context}"
        panel.set_title(inline(f"{where}: {family}"))
        if place % columns == 0:
            panel.set_ylabel("desired, %")
        if place + columns >= len(shown):
            panel.set_xlabel("budget, entries" if axis == "budget" else "context, tokens")
    figure.legend(handles=_legend(decided.comparison, shown[0][1], axis), loc="outside upper center", ncols=columns)
    return save(figure, name, alt)


def _panel(panel: Axes, value: Doses, decided: Decided, curves: Sequence[DoseCurve]) -> None:
    cleared = {(s.axis, s.arm, s.family, s.suite, s.context_tokens): s.cleared for s in value.cleared if s.cleared}
    doses = curves[0].doses
    # marks of one dose stand beside each other, curve by curve
    spread = _APART * (doses[-1].x - doses[0].x)
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
                # above every rate: the last dose that is cleared
                panel.plot([dose.x + shift], [105], marker="v", color=hue, markersize=6)
    own = next((c for c in curves if c.arm == decided.comparison.reference), None)
    if own is not None:
        _shade_safe(panel, own, cleared.get((own.axis, own.arm, own.family, own.suite, own.context_tokens)))
    reference = own.uncompressed if own else None
    if reference is not None:
        panel.axhline(100 * reference, color=INK, linewidth=0.9)
        margin = decided.rules.margins.get(curves[0].suite)
        if margin is not None:
            panel.axhspan(100 * (reference - margin), 100 * reference, color=UNDECIDED, alpha=0.16, linewidth=0)
    panel.set_xticks([dose.x for dose in doses], [str(dose.amount) for dose in doses])
    panel.set_xticks([], minor=True)
    panel.set_yticks([0, 20, 40, 60, 80, 100])
    panel.set_ylim(-2, 109)
    panel.margins(x=0.12)
    add_grid(panel)


def _shade_safe(panel: Axes, curve: DoseCurve, last: int | None) -> None:
    """The doses that serving the reference was cleared for: budgets from the last one up, lengths up to it."""
    place = next((dose.x for dose in curve.doses if dose.amount == last), None)
    if place is None:
        return
    ends = curve.doses[0].x, curve.doses[-1].x
    aside = 0.09 * (ends[1] - ends[0])
    # a larger budget is safe with it, on the other axis a smaller dose
    low, high = (place, ends[1] + aside) if curve.axis == "budget" else (ends[0] - aside, place)
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
