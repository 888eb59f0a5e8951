"""Words every format shares: numbers, names of cells and sides, error rates, and what an undecided cell needs."""

from __future__ import annotations

from collections.abc import Iterable
from math import isclose, isinf, log, log1p

from kvaudit.core.facets import PARITY, SELECTIVITY, Facet, facet_of
from kvaudit.core.text import length_label
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.few import Estimate, no_interval
from kvaudit.reports.stats.ratio import Times
from kvaudit.reports.stats.rule import clusters_required
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import CellName, Contrast, SeedDrift
from kvaudit.reports.verdict.error_rates import ErrorRates
from kvaudit.reports.verdict.verdict import Decided, Decision, Larger, Status


def points(value: float) -> str:
    """Score units as signed percentage points: +1.8."""
    text = f"{100 * value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def effect_text(effect: Effect | Estimate | None) -> str:
    """-1.8 pp [-4.6, +0.9]; the estimate and why it stands alone, where its templates are too few."""
    if effect is None:
        return "-"
    if isinstance(effect, Estimate) or effect.n_clusters < FEWEST_CLUSTERS:
        return f"{points(effect.estimate)} pp, {no_interval(effect.n_clusters)}"
    return interval_text(effect.estimate, effect.low, effect.high)


def seed_text(seed: SeedDrift) -> str:
    """12: -9.0 pp [-14.2, -4.1]."""
    return f"{seed.seed}: {interval_text(seed.estimate, seed.low, seed.high)}"


def interval_text(estimate: float, low: float, high: float) -> str:
    """+3.5 pp [+0.4, +6.6]."""
    return f"{points(estimate)} pp [{points(low)}, {points(high)}]"


def held_to(d: Decision) -> str:
    """What a cell is held to: 5 pp, or 1.1 x."""
    return f"{d.ratio.limit:g} x" if d.ratio else f"{100 * (d.margin or 0):g} pp"


def ratio_text(times: Times) -> str:
    """1.18 x [1.06, 1.35]: how many times as often what is not wanted happens, with the 95 % interval."""
    estimate = "no ratio" if times_text.estimate is None else f"{times_text.estimate:.2f} x"
    return f"{estimate} {ratio_interval(times_text.low, times_text.high)}"


def ratio_interval(low: float, high: float) -> str:
    """[1.06, 1.35]: the ends of a ratio, of which the upper one may not be."""
    return f"[{low:.2f}, {'no end' if isinf(high) else f'{high:.2f}'}]"


def percent(value: float | None) -> str:
    """A share as 12.3 %."""
    return "-" if value is None else f"{100 * value:.1f} %"


def times_text(value: float | None) -> str:
    """A ratio as 0.74x."""
    return "-" if value is None else f"{value:.2f}x"


def pvalue(value: float | None) -> str:
    """A p-value with two digits; the least that 9,999 draws can give is printed as a bound."""
    if value is None:
        return "-"
    return "< 0.0001" if value <= 1e-4 * (1 + 1e-9) else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def plural(count: int, noun: str) -> str:
    """1 cell, 2 cells."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


NOT_SHOWN = "not shown by the engine"  # of its cache


def bytes_text(count: float | None) -> str:
    """Bytes as KB, MB or GB (powers of 1000)."""
    if count is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def scientific(value: float | None) -> str:
    """1.2e-07 for small and large numbers, plain otherwise."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def error_rates_text(rates: ErrorRates, alpha: float, margins: Iterable[float], ratios: Iterable[float] = ()) -> str:
    """What was simulated of a gate at one-sided ``alpha`` and ``margins`` in score units, and what went worse.

    Of ``ratios`` it says that the figures are about margins alone.
    """
    others = sorted({margin for margin in margins if not isclose(margin, rates_text.margin, abs_tol=1e-9)})
    at_release = isclose(alpha, rates_text.release_level, abs_tol=1e-9)
    foreign = []  # what of this gate the figures are not about
    if not at_release and not isclose(alpha, rates_text.level, abs_tol=1e-9):
        foreign.append(f"at this level ({alpha:g})")
    if others:
        foreign.append(f"at a margin of {', '.join(f'{100 * margin:g}' for margin in others)} pp")
    held = (rates_text.level, rates_text.false_pass_max, rates_text.false_pass_designs)
    level, most, designs = (
        (rates_text.release_level, rates_text.release_max, rates_text.release_designs) if at_release else held
    )
    lines = [f"The gate was not simulated {' or '.join(foreign)}."] if foreign else []
    lines += [
        f"At level {level:g} the gate passes at most {percent(most)} of simulated audits that lost exactly the margin, "
        f"in any of {designs:,} designs: over all items or by whole templates, one sample or several.",
        f"Elsewhere up to {percent(rates_text.beyond_max)} (the interval, level {rates_text.level:g}), with a reference at "
        f"{100 * rates_text.beyond_rate:g} % and a margin of {100 * rates_text.beyond_margin:g} pp.",
    ]
    if held_to_ratios := sorted({*ratios}):
        names = " and ".join(f"{ratio:g} x" for ratio in held_to_ratios)
        lines.append(f"Both figures are about margins: a cell held to a ratio ({names}) was simulated by itself.")
    return " ".join(lines)


MORE_UNLIKELY = "more data unlikely to pass"


def decision_note(d: Decision) -> str:
    """Why a cell did not pass, and what would decide an open one; empty for one that did."""
    why = "; ".join(map(str, d.reasons))
    if d.status is not Status.INCONCLUSIVE or d.effect is None or d.is_unclustered:
        return why
    return f"{why}; {_advice(d, d.effect.n_clusters)}"


NEAR_FLOOR = 3  # margins; a reference with less to lose has its losses put as a share of what it had


def metric_label(sides: Comparison, metric: str) -> str:
    """A suite by its name; of a facet that is not wanted "refusal: not unsafe", which is what a drift of it counts."""
    facet = facet_of_metric(sides, metric)
    return metric if facet is None or facet.wanted else f"{facet_of(metric)[0]}: not {facet.name}"


def facet_of_metric(sides: Comparison, metric: str) -> Facet | None:
    """The facet that a metric is, None for a suite's score."""
    return facet_of(metric)[1] if metric in sides.facets else None


def event_rates(sides: Comparison, d: Decision) -> tuple[float, float] | None:
    """The share of answers in which what a cell counts happens, before and after; None of what has no two sides."""
    facet = facet_of_metric(sides, d.suite)
    return None if d.rates is None else d.rates.as_event_rates(wanted=facet is None or facet.wanted)


def from_to(before: float, after: float) -> str:
    """5.6 to 9.1 %."""
    return f"{100 * before:.1f} to {percent(after)}"


def judge_marks(sides: Comparison, suite: str) -> str:
    """A suite with what a reader of its numbers must know of its judge; empty marks for most."""
    marks = ["TRAINED"] * (suite in sides.rewarded) + ["phrases alone"] * (suite in sides.by_phrases)
    return f" ({', '.join(marks)})" if marks else ""


def rates_text(sides: Comparison, d: Decision) -> str:
    """14.4 to 10.0 % (-31 % of it): the rates of both sides, and the relative loss where there was little to lose.

    Of a facet that is not wanted, how often it happened: unsafe 5.6 to 9.1 %.
    """
    both, facet = event_rates(sides, d), facet_of_metric(sides, d.suite)
    if both is None:
        return "-"
    if facet and not facet.wanted:
        return f"{facet.name} {from_to(*both)}"
    return from_to(*both) + (f" ({100 * (both[1] / both[0] - 1):.0f} % of it)" if has_little_to_lose(d) else "")


def has_little_to_lose(d: Decision) -> bool:
    """Whether a loss looks small because there was little to lose."""
    if d.rates is None or d.margin is None:
        return False
    return 0 < d.rates.reference < NEAR_FLOOR * d.margin and d.rates.candidate < d.rates.reference


def blind_spot_text(spot: float, alpha: float, clusters: int, units: str = "templates") -> str:
    """The blind spot with its level, and what the templates count as where their sizes differ."""
    # how many templates of even size would have this blind spot
    even = log(alpha) / log1p(-spot) if 0 < spot < 1 else clusters
    bytes_text = "" if even > clusters - 0.5 else f" ({clusters} {units} of uneven size count as {even:.0f})"
    return (
        f"Blind spot: a failure confined to {percent(spot)} of the {units} goes unsampled with probability "
        f"{100 * alpha:g} %, a smaller one more often{bytes_text}."
    )


def exceeds_margin(d: Decision) -> bool:
    """Whether a failing drop is shown to be larger than the margin; of parity a gain may be the failing side."""
    assert d.effect is not None
    margin = d.margin or 0.0
    if d.ratio:
        return d.ratio.times.lower > d.ratio.limit
    return d.effect.upper < -margin or (d.estimand == PARITY and d.effect.lower > margin)


def _advice(d: Decision, have: int) -> str:
    """What would decide an open cell, measured against the templates that the run has."""
    if d.larger is None:
        within = d.effect is not None and d.effect.estimate > -(d.margin or 0)
        return "more templates in every suite" if d.estimand == SELECTIVITY and within else MORE_UNLIKELY
    if d.clusters_required and have < d.clusters_required:
        return too_few_templates(d.clusters_required, held_to(d), have)
    if d.larger is Larger.NEVER:
        return f"without a drift, ten times as many templates ({have}) would still not pass four times in five"
    return f"without a drift, {d.larger} as many templates ({have}) would pass four times in five"


def too_few_templates(required: int, wanted: str, have: int) -> str:
    """Why a cell could not pass whatever came out, and what to do: never to tolerate more."""
    return f"needs {required} templates for {wanted}, the run has {have}: add templates"


def undersized_suites(findings: Decided) -> tuple[str, ...]:
    """The suites with fewer templates than their margin takes, one sentence each."""
    have: dict[str, int] = {}
    for c in findings.drift.cells:
        have[c.suite] = min(c.n_clusters, have.get(c.suite, c.n_clusters))
    margins = findings.rules.margins
    need = {suite: clusters_required(margins[suite], findings.rules.alpha) for suite in have if suite in margins}
    return tuple(
        f"{suite} {too_few_templates(required, f'{100 * margins[suite]:g} pp', have[suite])}."
        for suite, required in need.items()
        if have[suite] < required
    )


MOST_OF_NAME = 48  # characters, where a line has to stay one


def shorten(name: str, most: int = MOST_OF_NAME) -> str:
    """A long name with its middle left out: settings and paths are told apart by either end."""
    head = most // 2
    return name if len(name) <= most else f"{name[:head]}…{name[head + 1 - most :]}"


def cell_label(sides: Comparison, name: CellName) -> str:
    """smd @ snapkv 96, refusal; the length where the run has several; whether the other side is uncompressed."""
    end = " end to end" if name.estimand == "deployed" else ""
    where = f"{sides.who(name.arm, name.policy)}{end}, {metric_label(sides, name.suite)}"
    return with_length(sides, where, name.context_tokens)


def with_length(sides: Comparison, text: str, tokens: int) -> str:
    """A text with the length that it is about, where the run has several."""
    return text if len(sides.contexts) == 1 else f"{text}, {length_label(tokens)}"


def uncompressed_label(sides: Comparison) -> str:
    """What serving policies are held against: policy none, the reference of an engine, or each its own."""
    own = [policy for policy in sides.policies if not sides.is_uncompressed(policy)] or sides.policies
    plain = {sides.uncompressed_of(policy) for policy in own}
    if not any(map(sides.is_engine, plain)):
        return "policy none"
    suite_label = ", ".join(sides.label(policy) for policy in sides.uncompressed if policy in plain)
    return suite_label if len(plain) == 1 else f"the uncompressed one of its own engine ({suite_label})"


def suite_label(sides: Comparison, d: Decision) -> str:
    """The suite of a cell, with what is asked of it where that is more than its drift."""
    suite = metric_label(sides, d.suite)
    if d.estimand == "selectivity":
        return f"{suite} minus {', '.join(sides.capability)}"
    if d.policies:
        return f"{suite}, worst of {len(d.policies)} policies"
    return f"{suite}, parity" if d.estimand == "parity" else suite


def reference_label(sides: Comparison, d: Decision | Contrast) -> str:
    """The other side of a difference: which arm, under which policy."""
    alike = sides.mode == "training" and d.estimand != "deployed"
    policy = d.policy if alike else sides.uncompressed_of(d.policy)
    return f"{sides.reference} @ {sides.label(policy)}"
