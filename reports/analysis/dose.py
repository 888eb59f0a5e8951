"""E6: how fast the desired behaviour goes as the budget shrinks or the context grows, and whether training changed it.

The slope is the contrast sum_d (x_d - mean x) y_d / sum_d (x_d - mean x)^2 over doses x = log2(budget / length), or
log2(length), one number per item, CR3-t over clusters; a training arm's slope is held against the reference's own.
Policies that differ in their budget only are the doses of one curve.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvaudit.reports.analysis.results import Dose, DoseCurve
from kvaudit.reports.drift.drift import broken_contract, seed_pairs
from kvaudit.reports.drift.results import Drift
from kvaudit.reports.records.rows import CellKey, Panel, Panels
from kvaudit.reports.stats.effect import LEVEL, Array, Effect
from kvaudit.reports.stats.slope import dose_weights, isotonic, slope_effect
from kvaudit.reports.stats.tango import ess_tango, rate_lower


@dataclass(frozen=True)
class PolicyFamily:
    """Policies of one kind by budget, smallest first."""

    name: str
    budgets: tuple[int, ...]
    policies: tuple[str, ...]


def families(policies: Sequence[str]) -> tuple[PolicyFamily, ...]:
    """The families with two budgets or more.

    Policies of one name belong together, whatever else changes with their budget (a window is often a share of it).
    Where a name has a budget twice, only policies that agree in every other field do.
    """
    by_name: dict[str, list[tuple[int, str, str]]] = {}
    for policy in policies:
        known = _budget(policy)
        if known:
            name, budget, rest = known
            by_name.setdefault(name, []).append((budget, policy, rest))
    found = []
    for name, members in by_name.items():
        if len({budget for budget, *_ in members}) == len(members):
            found.append(_family(name, members))
            continue
        for rest in dict.fromkeys(rest for *_, rest in members):
            found.append(_family(f"{name} {rest}".strip(), [m for m in members if m[2] == rest]))
    return tuple(family for family in found if len(set(family.budgets)) == len(family.budgets) > 1)


def _family(name: str, members: list[tuple[int, str, str]]) -> PolicyFamily:
    ordered = sorted(members)
    return PolicyFamily(name, tuple(m[0] for m in ordered), tuple(m[1] for m in ordered))


def _budget(policy: str) -> tuple[str, int, str] | None:
    """(name, budget, the other fields) of a policy with one budget; None for any other, a draw of several included."""
    if "|" in policy:
        return None
    names: list[str] = []
    rest: list[str] = []
    budgets: list[str] = []
    for part in policy.split("+"):
        name, _, text = part.partition(":")
        names.append(name.strip())
        for field in filter(None, text.split(",")):
            key, _, value = (piece.strip() for piece in field.partition("="))
            (budgets if key == "budget" else rest).append(value if key == "budget" else f"{key}={value}")
    if len(budgets) != 1 or not budgets[0].isascii() or not budgets[0].isdigit() or not 0 < len(budgets[0]) < 12:
        return None
    return ("+".join(names), int(budgets[0]), ",".join(rest)) if int(budgets[0]) > 0 else None


NO_COMMON = "items and templates differ between lengths"


@dataclass(frozen=True)
class DoseScores:
    """Scores [D, N] of one arm over doses with cluster codes [N], N items, or templates where items differ."""

    table: Array
    clusters: npt.NDArray[np.int64]
    names: tuple[str, ...]  # [N]
    unit: str  # items | templates
    draws: int  # samples that one value averages
    graded: bool  # whether some of them are neither 0 nor 1


def dose_curves(drift: Drift, tables: Panels) -> tuple[DoseCurve, ...]:
    """A curve per family, suite, length and arm, and one per policy, suite and arm where there are several lengths."""
    return tuple([*_budget_curves(drift, tables), *_length_curves(drift, tables)])


def shown_arms(drift: Drift) -> tuple[str, ...]:
    """The arms a curve is drawn for: the reference and the candidates."""
    return (drift.comparison.reference, *drift.comparison.candidates)


def _budget_curves(drift: Drift, tables: Panels) -> Iterator[DoseCurve]:
    for family in families(drift.comparison.policies):
        for context, panel in _suites(drift, tables):
            x = [math.log2(budget / context) for budget in family.budgets] if context > 0 else []
            if x:
                for arm in shown_arms(drift):
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
    blank = DoseCurve(
        axis="budget",
        arm=arm,
        family=family.name,
        suite=panel.suite,
        context_tokens=panel.context_tokens,
        doses=(),
        uncompressed=float(np.mean([np.nanmean(panel.scores[cell]) for cell in known])) if known else None,
        unit="items",
        slope=None,
        against_reference=None,
        reason=reason,
    )
    if scores is None:
        return blank
    reference = _within(panel, other)[0] if arm != drift.comparison.reference else None
    doses = _doses(family.budgets, x, family.policies, scores, increasing=True)
    return _with_slopes(replace(blank, doses=doses), x, scores, reference, drift.alpha)


def _within(panel: Panel, doses: Sequence[Sequence[CellKey]]) -> tuple[DoseScores | None, str]:
    """Scores of doses inside one panel, averaged over seeds, or why there are none."""
    cells = sorted({cell for dose in doses for cell in dose})
    reasons = broken_contract(panel, cells) if cells else ()
    if reasons or not cells:
        return None, reasons[0].text if reasons else "no seed to pair"
    present = ~np.isnan(panel.scores[cells[0]])
    table = np.array([np.mean([panel.scores[cell][present] for cell in dose], axis=0) for dose in doses])
    names = tuple(panel.items[i] for i in np.flatnonzero(present))
    return DoseScores(table, panel.clusters[present], names, "items", panel.samples * len(doses[0]), panel.graded), ""


def _length_curves(drift: Drift, tables: Panels) -> Iterator[DoseCurve]:
    for policy in drift.comparison.policies:
        for suite in drift.comparison.suites:
            own = [tables[key] for key in sorted(tables) if key[0] == suite and key[1] > 0]
            if len(own) > 1:
                for arm in shown_arms(drift):
                    yield _length_curve(drift, policy, arm, own)


def _length_curve(drift: Drift, policy: str, arm: str, own: Sequence[Panel]) -> DoseCurve:
    scores, reason = _across(drift, own, policy, arm)
    blank = DoseCurve(
        axis="length",
        arm=arm,
        family=drift.comparison.labels.get(policy, policy),
        suite=own[0].suite,
        context_tokens=None,
        doses=(),
        uncompressed=None,
        unit=scores.unit if scores else "items",
        slope=None,
        against_reference=None,
        reason=reason,
    )
    if scores is None:
        return blank
    reference = (
        _across(drift, own, policy, drift.comparison.reference)[0] if arm != drift.comparison.reference else None
    )
    lengths = [panel.context_tokens for panel in own]
    x = [math.log2(length) for length in lengths]
    doses = _doses(lengths, x, [policy] * len(x), scores, increasing=False)
    return _with_slopes(replace(blank, doses=doses), x, scores, reference, drift.alpha)


def _across(drift: Drift, own: Sequence[Panel], policy: str, arm: str) -> tuple[DoseScores | None, str]:
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
        table = np.array([part.table[0] for part, _ in parts])
        return DoseScores(table, codes.astype(np.int64), first.names, "items", first.draws, graded), ""
    means = [_template_means(part.table[0], names) for part, names in parts]
    if any(mean.keys() != means[0].keys() for mean in means):
        return None, NO_COMMON
    shared = tuple(sorted(means[0]))
    draws = first.draws * min(int(min(Counter(names).values())) for _, names in parts)
    table = np.array([[mean[name] for name in shared] for mean in means])
    return DoseScores(table, np.arange(len(shared)), shared, "templates", draws, graded), ""


def _template_means(values: Array, names: Sequence[str]) -> dict[str, float]:
    found, codes = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
    means = np.bincount(codes, weights=values) / np.bincount(codes)
    return dict(zip(found.tolist(), means.tolist(), strict=True))


def _doses(
    amounts: Sequence[int], x: Sequence[float], policies: Sequence[str], scores: DoseScores, *, increasing: bool
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
    curve: DoseCurve, x: Sequence[float], scores: DoseScores, reference: DoseScores | None, alpha: float
) -> DoseCurve:
    """The curve with its slope, and the difference from the reference's where both stand on the same rows."""
    difference = None
    if reference is not None and (reference.names, reference.unit) == (scores.names, scores.unit):
        difference = slope(scores.table - reference.table, x, scores.clusters, alpha=alpha, reach=2.0)
    own = slope(scores.table, x, scores.clusters, alpha=alpha, reach=1.0)
    return replace(curve, slope=own, against_reference=difference)


def slope(table: Array, x: Sequence[float], clusters: npt.NDArray[np.int64], *, alpha: float, reach: float) -> Effect:
    """Change per doubling of values [D, N] that span ``reach``, CR3-t.

    Where every item agrees there is no spread to go by, and a zero width would be a lie: ESS-Tango over all slopes
    that such values can have.
    """
    effect = slope_effect(table, x, clusters, alpha=alpha)
    if effect.high > effect.low:
        return effect
    weights = np.asarray(dose_weights(x))
    steepest = reach * float(np.abs(weights).sum()) / 2
    return ess_tango(weights @ table, clusters, alpha=alpha, scale=steepest)
