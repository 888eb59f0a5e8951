"""The sentences of the banner: what its number is about, and what must be read with it."""

from __future__ import annotations

from audit.core.text import inline
from reports.gate.rules import DEFAULT_ESTIMANDS
from reports.gate.verdict import AT_FLOOR, FLOOR, Decision, Status
from reports.page.advice import short_suites
from reports.page.findings import Findings
from reports.page.plain import drift, percent, points
from reports.page.remarks import remarks
from reports.page.tables import against, named
from reports.stats.blindspot import blind_spot

INVALID_SHOWN = 4  # cells in the banner


def about(findings: Findings, d: Decision) -> str:
    """The cell that the banner quotes, in words."""
    sides, effect = findings.comparison, d.effect
    assert effect is not None
    policy = sides.labels.get(d.policy, d.policy)
    who = f"{d.arm} against {sides.reference}, both served under {policy}"
    if d.estimand == "E2":
        who = f"{d.arm} served under {policy} against {sides.reference} served under none"
    if sides.mode == "serving":
        who = f"{d.arm} served under {policy} against the same model under none"
    deciding = "This is the cell that decides the verdict."
    if d.waiver:
        deciding = f"This cell is {d.status.value}, waived by {d.waiver.who} until {d.waiver.expires}."
    elif d.status is not findings.verdict.status:
        deciding = f"This cell is {d.status.value}; the verdict is open because of cells at the floor."
    return inline(
        f"{named(findings, d)} at {d.context_tokens} tokens, {who}. Margin {100 * (d.margin or 0):g} pp, 95 % "
        f"interval, {effect.n_items} items in {effect.n_clusters} templates, churn {churn_share(findings, d)}. "
        f"{deciding}"
    )


def asides(findings: Findings, head: Decision | None) -> list[str]:
    """What stands under the number: reasons, the other side of the cell, what the run cannot show."""
    lines = [f"{reason.code}: {reason.text}" for reason in findings.verdict.reasons] + list(remarks(findings))
    invalid = [d for d in findings.verdict.decisions if d.gated and d.status is Status.INVALID]
    labels = findings.comparison.labels
    lines += [
        f"{d.arm}, {d.suite} @ {labels.get(d.policy, d.policy)}: {d.reasons[0].code}: {d.reasons[0].text}"
        for d in invalid[:INVALID_SHOWN]
    ]
    if len(invalid) > INVALID_SHOWN:
        lines.append(f"and {len(invalid) - INVALID_SHOWN} more invalid cells in the gate table")
    if head is not None:
        lines += [_other_side(findings, d) for d in findings.verdict.decisions if d.effect and _is_other_side(d, head)]
        lines += _unscored(head)
    lines += _blind_spot(findings, head)
    lines += short_suites(findings)
    floors = [d for d in findings.verdict.decisions if d.gated and d.at_floor]
    if floors:
        where = list(dict.fromkeys(f"{d.suite} ({against(findings, d)})" for d in floors))
        share = f"{len(floors)} of {sum(d.gated for d in findings.verdict.decisions)} gated cells"
        lines.append(f"{FLOOR}: {AT_FLOOR} ({share}: {', '.join(where)}).")
    lines.append(_scope(findings))
    return [inline(line) for line in lines]


def churn_share(findings: Findings, d: Decision) -> str:
    """E7 of a decision's cell, of the worst policy's for E3: the share of answers that are not the reference's."""
    place = (d.arm, d.policy, d.suite, d.context_tokens)
    here = [c for c in findings.drift.contrasts if (c.arm, c.policy, c.suite, c.context_tokens) == place]
    found = {c.estimand: c.churn for c in here}
    return percent(found.get(d.estimand, found.get(findings.comparison.base)))


def _unscored(head: Decision) -> list[str]:
    """The number with every unscored answer counted against the candidate, and for it; nothing where all are scored."""
    if head.worst is None or head.best is None or head.worst == head.best:
        return []
    against_it, for_it = points(head.worst), points(head.best)
    return [f"Unscored answers: all counted against the candidate {against_it} pp, all counted for it {for_it} pp."]


def _blind_spot(findings: Findings, head: Decision | None) -> list[str]:
    """Of the cell that is quoted; without one, of the suite with the fewest templates."""
    have = [head.effect.n_clusters] if head and head.effect else sorted(c.n_clusters for c in findings.drift.cells)[:1]
    spots = [percent(blind_spot(clusters, findings.rules.alpha)) for clusters in have]
    return [
        f"Blind spot: a failure confined to {spot} of the templates or fewer could be entirely unsampled."
        for spot in spots
    ]


def _is_other_side(d: Decision, head: Decision) -> bool:
    """Whether a decision is the same cell against the reference served another way."""
    same = (d.arm, d.policy, d.suite, d.context_tokens) == (head.arm, head.policy, head.suite, head.context_tokens)
    return same and {d.estimand, head.estimand} == set(DEFAULT_ESTIMANDS)


def _other_side(findings: Findings, d: Decision) -> str:
    assert d.effect is not None
    policy = findings.comparison.labels.get(d.policy, d.policy)
    if d.estimand == "E2":
        who = f"{d.arm} served under {policy} against uncompressed {findings.comparison.reference}"
        return f"End to end, {who}: {drift(d.effect)}."
    return f"Served alike, {d.arm} against {findings.comparison.reference}, both under {policy}: {drift(d.effect)}."


def _scope(findings: Findings) -> str:
    if findings.comparison.mode == "serving":
        return "Claim: about this checkpoint under these serving policies (artifact)."
    if findings.verdict.recipe is None:
        return "Claim: about these checkpoints (artifact). Recipe claim not supported: it needs 3 paired seeds."
    return (
        f"Claim: about these checkpoints, averaged over paired seeds (artifact). For the recipe, with seed variance "
        f"added, the verdict is {findings.verdict.recipe.value}."
    )
