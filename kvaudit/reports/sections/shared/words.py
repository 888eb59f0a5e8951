"""Texts and facts that every format shares: numbers, names of cells, error rates, and known or unknown facts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from math import isclose, isinf, log, log1p
from typing import Any, Literal, NamedTuple

from kvaudit.core.facets import DEPLOYED, PARITY, SELECTIVITY, SERVING, Facet, facet_of
from kvaudit.core.text import length_label
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.ratio import Times
from kvaudit.reports.stats.rule import clusters_required
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import CellName, Contrast, Estimate, SeedDrift, no_interval
from kvaudit.reports.verdict.controls import ErrorRates, RoundsErrorRates
from kvaudit.reports.verdict.verdict import Decided, Decision, Larger, Status

NOT_SHOWN = "not shown by the engine"  # of its cache
MORE_UNLIKELY = "more data unlikely to pass"
NEAR_FLOOR = 3  # margins: below this rate of the reference a loss is also given relative to it
MOST_OF_NAME = 48  # characters of a name on a line that must not wrap

# --- numbers ----------------------------------------------------------------------------------------------------------


def points(value: float) -> str:
    """Return a share as signed percentage points, 0.018 as "+1.8"."""
    text = f"{100 * value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def effect_text(effect: Effect | Estimate | None) -> str:
    """Return an effect as text, "-1.8 pp [-4.6, +0.9]"; without interval if the templates are too few for one."""
    if effect is None:
        return "-"
    if isinstance(effect, Estimate) or effect.n_clusters < FEWEST_CLUSTERS:
        return f"{points(effect.estimate)} pp, {no_interval(effect.n_clusters)}"
    return interval_text(effect.estimate, effect.low, effect.high)


def interval_text(estimate: float, low: float, high: float) -> str:
    """Return an estimate with its interval, "+3.5 pp [+0.4, +6.6]"."""
    return f"{points(estimate)} pp [{points(low)}, {points(high)}]"


def seed_text(seed: SeedDrift) -> str:
    """Return a training seed with its drift, "12: -9.0 pp [-14.2, -4.1]"."""
    return f"{seed.seed}: {interval_text(seed.estimate, seed.low, seed.high)}"


def held_to(d: Decision) -> str:
    """Return the limit on the loss of a cell: its margin ("5 pp") or its limit on the ratio of rates ("1.1 x")."""
    return f"{d.ratio.limit:g} x" if d.ratio else f"{100 * (d.margin or 0):g} pp"


def ratio_text(ratio: Times) -> str:
    """Return the ratio of the rates of the unwanted event with its 95 % interval: 1.18 x [1.06, 1.35]."""
    estimate = "no ratio" if ratio.estimate is None else f"{ratio.estimate:.2f} x"
    return f"{estimate} {ratio_interval(ratio.low, ratio.high)}"


def ratio_interval(low: float, high: float) -> str:
    """Return an interval of a ratio, "[1.06, 1.35]", or "[1.06, no end]" if the upper end is infinite."""
    return f"[{low:.2f}, {'no end' if isinf(high) else f'{high:.2f}'}]"


def percent(value: float | None) -> str:
    """Return a share in percent: 12.3 %."""
    return "-" if value is None else f"{100 * value:.1f} %"


def from_to(before: float, after: float) -> str:
    """Return two shares in percent: 5.6 to 9.1 %."""
    return f"{100 * before:.1f} to {percent(after)}"


def times_text(value: float | None) -> str:
    """Return a multiple: 0.74x."""
    return "-" if value is None else f"{value:.2f}x"


def pvalue(value: float | None) -> str:
    """Return a p-value with two digits; "< 0.0001" at or below the smallest value that 9,999 draws can give."""
    if value is None:
        return "-"
    return "< 0.0001" if value <= 1e-4 * (1 + 1e-9) else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 cell, 2 cells."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def bytes_text(count: float | None) -> str:
    """Return bytes as KB, MB or GB (powers of 1000)."""
    if count is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def scientific(value: float | None) -> str:
    """Return a number as text: "1.2e-07" if very small or large, else three significant digits."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


# --- error rates of the gate, and what an open cell needs -------------------------------------------------------------


def error_rates_text(rates: ErrorRates, alpha: float, margins: Iterable[float], ratios: Iterable[float] = ()) -> str:
    """Return sentences on the simulated error rates of a gate at one-sided ``alpha`` and ``margins`` in score units.

    If a gate with this level and these margins was not simulated, the text says so. It also says that the figures do
    not cover limits on ``ratios``, if there are any.
    """
    level, highest, designs = rates.level, rates.false_pass_max, rates.false_pass_designs
    if isclose(alpha, rates.release_level, abs_tol=1e-9):
        level, highest, designs = rates.release_level, rates.release_max, rates.release_designs
    not_simulated = _not_simulated(alpha, level, margins, (rates.margin,))
    lines = [
        f"{not_simulated}At level {level:g} the gate passes at most {percent(highest)} of simulated audits that lost "
        f"exactly the margin, in any of {designs:,} designs: over all items or by whole templates, one sample or "
        "several.",
        f"Elsewhere up to {percent(rates.beyond_max)} (the interval, level {rates.level:g}), with a reference at "
        f"{100 * rates.beyond_rate:g} % and a margin of {100 * rates.beyond_margin:g} pp.",
    ]
    if limits := sorted({*ratios}):
        names = " and ".join(f"{ratio:g} x" for ratio in limits)
        lines.append(f"Both figures are about margins: a cell held to a ratio ({names}) was simulated separately.")
    return " ".join(lines)


def rounds_error_rates_text(rates: RoundsErrorRates, alpha: float, margins: Iterable[float]) -> str:
    """Return sentences on the simulated error rates of a run in rounds, and on what of this gate was not simulated."""
    not_simulated = _not_simulated(alpha, rates.level, margins, rates.margins)
    return (
        f"{not_simulated}At level {rates.level:g} a run in rounds that lost exactly the margin passes in at most "
        f"{percent(rates.passes)} and fails in at most {percent(rates.fails)} of {rates.simulations:,} simulated runs, "
        "under any plan."
    )


def _not_simulated(alpha: float, level: float, margins: Iterable[float], simulated: Iterable[float]) -> str:
    """Return a sentence that says at which level and margins the gate was not simulated; empty if there are none.

    The gate has ``alpha`` and ``margins``; simulated were ``level`` and the margins ``simulated``.
    """
    known = [*simulated]
    others = sorted({m for m in margins if not any(isclose(m, margin, abs_tol=1e-9) for margin in known)})
    missing = [] if isclose(alpha, level, abs_tol=1e-9) else [f"at this level ({alpha:g})"]
    missing += [f"at a margin of {', '.join(f'{100 * margin:g}' for margin in others)} pp"] if others else []
    return f"The gate was not simulated {' or '.join(missing)}. " if missing else ""


def decision_note(d: Decision) -> str:
    """Return why a cell did not pass, and what would decide it if it is undecided; empty for a cell that passed."""
    why = "; ".join(map(str, d.reasons))
    if d.status is not Status.INCONCLUSIVE or d.effect is None or d.is_unclustered:
        return why
    return f"{why}; {_advice(d, d.effect.n_clusters)}"


def _advice(d: Decision, templates: int) -> str:
    """Return what would decide an undecided cell, such as more templates; ``templates`` is how many the run has."""
    if d.larger is None:
        is_within = d.effect is not None and d.effect.estimate > -(d.margin or 0)
        return "more templates in every suite" if d.estimand == SELECTIVITY and is_within else MORE_UNLIKELY
    if d.clusters_required and templates < d.clusters_required:
        return too_few_templates(d.clusters_required, held_to(d), templates)
    if d.larger is Larger.NEVER:
        return f"with no real drift, even ten times as many templates (now {templates}) would not reach 80 % power"
    return f"with no real drift, {d.larger} as many templates (now {templates}) would pass with 80 % power"


def too_few_templates(required: int, limit: str, templates: int) -> str:
    """Return a sentence: a cell needs ``required`` templates to pass its ``limit``, and has only ``templates``."""
    return f"needs {required} templates for {limit}, the run has {templates}: add templates"


def undersized_suites(decided: Decided) -> tuple[str, ...]:
    """Return a sentence for each suite that has fewer templates than a PASS at its margin needs."""
    templates: dict[str, int] = {}
    for c in decided.drift.cells:
        templates[c.suite] = min(c.n_clusters, templates.get(c.suite, c.n_clusters))
    margins = decided.rules.margins
    required = {s: clusters_required(margins[s], decided.rules.alpha) for s in templates if s in margins}
    return tuple(
        f"{suite} {too_few_templates(count, f'{100 * margins[suite]:g} pp', templates[suite])}."
        for suite, count in required.items()
        if templates[suite] < count
    )


def blind_spot_text(spot: float, alpha: float, clusters: int, units: str = "templates") -> str:
    """Return a sentence on the blind spot: the share of templates that can be broken without any of them being sampled.

    ``spot`` is this share, which goes unsampled with probability ``alpha``. ``clusters`` is the number of templates,
    and ``units`` is what they are called. If templates differ in size, the sentence also states their effective number.
    """
    # the number of templates of even size that would have this blind spot
    even = log(alpha) / log1p(-spot) if 0 < spot < 1 else clusters
    size = "" if even > clusters - 0.5 else f" ({clusters} {units} of uneven size count as {even:.0f})"
    return (
        f"Blind spot: a failure confined to {percent(spot)} of the {units} goes unsampled with probability "
        f"{100 * alpha:g} %, a smaller one more often{size}."
    )


# --- rates ------------------------------------------------------------------------------------------------------------


def facet_of_metric(sides: Comparison, metric: str) -> Facet | None:
    """Return the facet that a metric SUITE.FACET counts; None for SUITE, the score of a suite."""
    return facet_of(metric)[1] if metric in sides.facets else None


def event_rates(sides: Comparison, d: Decision) -> tuple[float, float] | None:
    """Return the rates of the event that a cell counts, reference first.

    None for a difference of differences, which has four rates instead of two.
    """
    facet = facet_of_metric(sides, d.suite)
    return None if d.rates is None else d.rates.as_event_rates(wanted=facet is None or facet.wanted)


def rates_text(sides: Comparison, d: Decision) -> str:
    """Return how often both sides did what is wanted, "14.4 to 10.0 %", reference first.

    For a facet whose event is unwanted, the text has the rates of the event with its name: "unsafe 5.6 to 9.1 %". If
    the reference's rate is so low that a loss looks small, the relative loss is added: "(-31 % of it)".
    """
    rates, facet = event_rates(sides, d), facet_of_metric(sides, d.suite)
    if rates is None:
        return "-"
    if facet and not facet.wanted:
        return f"{facet.name} {from_to(*rates)}"
    return from_to(*rates) + (f" ({100 * (rates[1] / rates[0] - 1):.0f} % of it)" if has_little_to_lose(d) else "")


def has_little_to_lose(d: Decision) -> bool:
    """Return whether the candidate lost from so low a rate of the reference that the loss looks small.

    A rate is so low if it is below NEAR_FLOOR times the margin.
    """
    if d.rates is None or d.margin is None:
        return False
    return 0 < d.rates.reference < NEAR_FLOOR * d.margin and d.rates.candidate < d.rates.reference


def exceeds_margin(d: Decision) -> bool:
    """Return whether a decision of FAIL rests on a drop that is shown to exceed the margin.

    Under "parity", which forbids drift to either side, a gain that exceeds it counts as well.
    """
    assert d.effect is not None
    margin = d.margin or 0.0
    if d.ratio:
        return d.ratio.times.lower > d.ratio.limit
    return d.effect.upper < -margin or (d.estimand == PARITY and d.effect.lower > margin)


# --- names ------------------------------------------------------------------------------------------------------------


def metric_label(sides: Comparison, metric: str) -> str:
    """Return a metric's name; for an unwanted facet "refusal: not unsafe", which is what its drift counts."""
    facet = facet_of_metric(sides, metric)
    return metric if facet is None or facet.wanted else f"{facet_of(metric)[0]}: not {facet.name}"


def judge_marks(sides: Comparison, suite: str) -> str:
    """Return warnings about the judge of a suite, such as " (TRAINED)"; empty for most suites.

    TRAINED: training may have rewarded such answers.
    """
    marks = ["TRAINED"] * (suite in sides.rewarded) + ["phrases alone"] * (suite in sides.by_phrases)
    return f" ({', '.join(marks)})" if marks else ""


def shorten(name: str, most: int = MOST_OF_NAME) -> str:
    """Return a name, cut in the middle if it is long, since settings and paths often differ at either end."""
    head = most // 2
    return name if len(name) <= most else f"{name[:head]}…{name[head + 1 - most :]}"


def cell_label(sides: Comparison, name: CellName) -> str:
    """Return a cell's name, "smd @ snapkv 96, refusal", with the length if the run has several."""
    end = " end to end" if name.estimand == "deployed" else ""
    text = f"{sides.who(name.arm, name.policy)}{end}, {metric_label(sides, name.suite)}"
    return with_length(sides, text, name.context_tokens)


def with_length(sides: Comparison, text: str, tokens: int) -> str:
    """Return the text with the length added if the run has several lengths."""
    return text if len(sides.contexts) == 1 else f"{text}, {length_label(tokens)}"


def uncompressed_label(sides: Comparison) -> str:
    """Return the name for uncompressed serving: "policy none", or the uncompressed setting of each engine."""
    compressed = [policy for policy in sides.policies if not sides.is_uncompressed(policy)] or sides.policies
    conditions = {sides.uncompressed_of(policy) for policy in compressed}
    if not any(map(sides.is_engine, conditions)):
        return "policy none"
    labels = ", ".join(sides.label(policy) for policy in sides.uncompressed if policy in conditions)
    return labels if len(conditions) == 1 else f"the uncompressed one of its own engine ({labels})"


def suite_label(sides: Comparison, d: Decision) -> str:
    """Return the suite of a cell, with the kind of difference (estimand) unless that is a plain drift."""
    suite = metric_label(sides, d.suite)
    if d.estimand == SELECTIVITY:
        return f"{suite} minus {', '.join(sides.capability)}"
    if d.policies:
        return f"{suite}, worst of {len(d.policies)} policies"
    return f"{suite}, parity" if d.estimand == PARITY else suite


def reference_of(sides: Comparison, d: Decision | Contrast) -> tuple[str, str]:
    """Return arm and policy of the reference side of a difference."""
    uncompressed = sides.uncompressed_of(d.policy)
    if is_serving(sides, d):
        return d.arm, uncompressed
    return sides.reference, uncompressed if d.estimand == DEPLOYED else d.policy


def is_serving(sides: Comparison, d: Decision | Contrast) -> bool:
    """Return whether a checkpoint under a policy is compared with itself uncompressed."""
    return SERVING in (sides.base, d.estimand)


class Fact(NamedTuple):
    """One fact of a disclosure. ``value`` is plain JSON, None unless ``state`` is known."""

    state: Literal["known", "unknown", "not applicable"]
    value: Any = None


UNKNOWN, NOT_APPLICABLE = Fact("unknown"), Fact("not applicable")
Facts = Mapping[str, Fact]


def fact_of(value: Any) -> Fact:
    """Return a value as a known fact; None and empty text as an unknown one."""
    return UNKNOWN if value is None or value == "" else Fact("known", value)


def dump_json(body: Any) -> str:
    """Return the ASCII text of a JSON file; NaN and infinities become null, values unknown to JSON become text."""
    return json.dumps(_finite(body), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
