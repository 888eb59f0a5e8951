"""What a number cannot say: what was not sampled, what templates may hide, and how often the gate is wrong."""

from __future__ import annotations

from kvaudit.core.estimands import PARITY
from kvaudit.core.text import inline
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.records.rows import LIVE
from kvaudit.reports.sections.shared.cache_use import lacks_live_bytes
from kvaudit.reports.sections.shared.words import (
    blind_spot_text,
    effect_text,
    error_rates_text,
    percent,
    plural,
    suite_label,
)
from kvaudit.reports.stats.rule import blind_spot
from kvaudit.reports.stats.seeds import SEEDS_ADVISED
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.rules import CONTRASTED
from kvaudit.reports.verdict.verdict import Decided, Decision, Status


def cautions(findings: Findings, head: Decision | None) -> list[str]:
    """What a number cannot say: what was not sampled, the other side of the cell, and how often the gate is wrong."""
    other = [
        _other_side(findings.comparison, d)
        for d in findings.verdict.decisions
        if d.effect and head and d.place[1:] == head.place[1:] and {d.estimand, head.estimand} == set(CONTRASTED)
    ]
    lines = (_blind_spot(findings, head), *hidden(findings), *other, *_recipe_level(findings), *calibrated(findings))
    return list(map(inline, lines))


def _blind_spot(findings: Decided, head: Decision | None) -> str:
    """Of the cell that is quoted; without one, of the suite with the fewest templates."""
    alpha = findings.rules.alpha
    if head and head.effect and head.blind_spot is not None:
        return blind_spot_text(head.blind_spot, alpha, head.effect.n_clusters)
    have = min((c.n_clusters for c in findings.drift.cells), default=0)
    return blind_spot_text(blind_spot(have, alpha), alpha, have)


def hidden(findings: Decided) -> list[str]:
    """Could a few broken templates hide a loss of the margin where the interval alone would pass?"""
    cells = [d for d in findings.verdict.gated if d.template_bound is not None and d.estimand != PARITY]
    held = [d for d in cells if any(reason.code == ReasonCode.TEMPLATES for reason in d.reasons)]
    lines = []
    for own, words in ((held, _HELD), ([d for d in cells if d not in held], _CLEARED)):
        if own:
            d = min(own, key=lambda d: (d.template_bound or 0.0) + (d.margin or 0.0))
            place = f"{findings.comparison.who(d.arm, d.policy)}, {suite_label(findings.comparison, d)}"
            most = f"{-100 * min(d.template_bound or 0.0, 0.0):.2f} pp"
            lines.append(words.format(cells=plural(len(own), "cell"), most=most, place=place))
    return lines


_WEIGHTED = "the templates that were seen, weighted otherwise, plus one like them that lost everything,"
_CLEARED = (
    f"Broken templates: in {{cells}} with the interval inside the margin, {_WEIGHTED} could not come from a model that "
    "loses the margin; from one that loses {most} they could ({place})."
)
_HELD = (
    f"Broken templates: in {{cells}} with the interval inside the margin, {_WEIGHTED} could come from a model that "
    "loses more than the margin, up to {most} ({place}): data cannot tell."
)


def _other_side(sides: Comparison, d: Decision) -> str:
    """The same cell against the reference served another way."""
    assert d.effect is not None
    policy = sides.label(d.policy)
    if d.estimand == "deployed":
        who = f"{d.arm} served under {policy} against uncompressed {sides.reference}"
        return f"End to end, {who}: {effect_text(d.effect)}."
    return f"Served alike, {d.arm} against {sides.reference}, both under {policy}: {effect_text(d.effect)}."


def _recipe_level(findings: Findings) -> list[str]:
    few = len(findings.comparison.seeds) < SEEDS_ADVISED and findings.verdict.recipe is not None
    if not few or findings.calibration is None:
        return []
    return [
        f"With fewer than {SEEDS_ADVISED} seeds the 95 % interval of a recipe raises a false alarm in up to "
        f"{percent(findings.calibration.recipe_three_seeds_max)} of simulated audits; with {SEEDS_ADVISED} seeds "
        "it is about 5 %."
    ]


def limits(findings: Decided) -> tuple[str, ...]:
    """What must be said even when it is unflattering."""
    graded = "Grading is by program; answers a person would grade otherwise are not corrected here."
    if any(c.people for c in findings.drift.contrasts):
        graded = "Beyond the cells that people labelled, answers are graded as recorded."
    lines = [
        "Only the listed suites, policies and lengths were asked; nothing is said about others.",
        graded,
        f"FAIL uses {findings.verdict.adjustment.method} over the gated cells; every interval is unadjusted, and "
        "outside the gate exploratory.",
    ]
    if lacks_live_bytes(findings.drift):
        lines.append(
            f"Live bytes of the cache are not known: some records hold no {LIVE}, which earlier versions of kvaudit "
            "did not count. What was allocated is known."
        )
    if findings.comparison.mode == "training" and findings.verdict.recipe is None:
        lines.append("With fewer than 3 paired seeds nothing is claimed about the training recipe.")
    return tuple(lines)


def calibrated(findings: Findings) -> list[str]:
    """How often the gate and its intervals are wrong, from the calibration that ships; nothing of what is INVALID."""
    c = findings.calibration
    if c is None or findings.verdict.status is Status.INVALID:
        return []
    rules = findings.rules
    return [
        f"{error_rates_text(c, rules.alpha, rules.margins.values(), rules.ratios.values())} "
        f"Simulated at {c.scale} scale "
        f"({c.simulations:,} runs). Two-sided false alarms at 5 %: at most {percent(c.type_one_max)}; coverage of 95 % "
        f"intervals: at least {percent(c.coverage_min)}. A reference with nothing to lose counts as measurable in at "
        f"most {percent(c.nothing_to_lose_max)}, a healthy one does not in at most {percent(c.turned_away_max)}."
    ]
