"""What an undecided cell needs: templates that were not asked, a margin that the run can show, or another cell."""

from __future__ import annotations

from reports.gate.verdict import AT_FLOOR, Decision, Status
from reports.page.findings import Findings
from reports.stats.blindspot import clusters_required

MORE_UNLIKELY = "more data unlikely to pass"


def note(d: Decision) -> str:
    """Why a cell is open, and what would decide it; empty for any other."""
    if d.status is not Status.INCONCLUSIVE or d.effect is None:
        return ""
    codes = ", ".join(reason.code for reason in d.reasons)
    return f"{codes}: {AT_FLOOR if d.at_floor else _advice(d, d.effect.n_clusters)}"


def _advice(d: Decision, have: int) -> str:
    """What would decide an open cell, measured against the templates that the run has."""
    if d.clusters_to_decide is None:
        return MORE_UNLIKELY
    if d.clusters_required and have < d.clusters_required == d.clusters_to_decide:
        return too_few(d.clusters_required, d.margin or 0, have)
    more = ", more templates than were asked" if d.clusters_to_decide > have else ""
    return f"about {d.clusters_to_decide} templates would decide{more} ({have})"


def too_few(required: int, margin: float, have: int) -> str:
    """Why a cell could not pass whatever came out, and what to do."""
    return (
        f"needs {required} templates for {100 * margin:g} pp, the run has {have}: raise the margin before a run or add "
        "templates"
    )


def short_suites(findings: Findings) -> tuple[str, ...]:
    """The suites with fewer templates than their margin takes, one sentence each."""
    have: dict[str, int] = {}
    for c in findings.drift.cells:
        have[c.suite] = min(c.n_clusters, have.get(c.suite, c.n_clusters))
    need = {
        s: clusters_required(findings.rules.margins[s], findings.rules.alpha)
        for s in have
        if s in findings.rules.margins
    }
    return tuple(
        f"{suite} {too_few(required, findings.rules.margins[suite], have[suite])}."
        for suite, required in need.items()
        if have[suite] < required
    )
