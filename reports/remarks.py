"""What must be read wherever a verdict is read: foreign rules, looks, waivers, an INCONCLUSIVE that was let through."""

from __future__ import annotations

from collections.abc import Iterator

from reports.report import Report
from reports.rules import AFTER_RUN, WARN, Rules
from reports.verdict import Status, Verdict


def remarks(report: Report, verdict: Verdict) -> Iterator[str]:
    """One plain line each; none for a run that is decided by its spec in one look."""
    rules = report.plan.rules
    if rules.sha256 is not None:
        yield _source(rules)
    if rules.profile or rules.looks > 1:
        yield _level(rules)
    if verdict.status is Status.INCONCLUSIVE and rules.on_inconclusive == WARN:
        yield "WARNING: INCONCLUSIVE is let through (on_inconclusive: warn); it is not a PASS."
    if verdict.status is Status.INCONCLUSIVE and rules.last:
        yield f"LOOKS: this was the last of {rules.looks} declared looks and it does not decide; no look is left."
    yield from _waivers(report, verdict)
    if verdict.adjustment.reason:
        yield f"FAIL is held to the family by Holm instead of max-T: {verdict.adjustment.reason}."


def _source(rules: Rules) -> str:
    line = f"Gate: {rules.source}, sha256 {(rules.sha256 or '')[:12]}, {rules.declared}"
    if rules.declared != AFTER_RUN:
        return line + "."
    return f"{line}, which changes " + ("; ".join(rules.changes) if rules.changes else "nothing that decides") + "."


def _level(rules: Rules) -> str:
    words = [f"profile {rules.profile}"] if rules.profile else []
    words.append(f"one-sided level {rules.alpha:g}")
    if rules.looks > 1:
        words.append(f"look {rules.look} of {rules.looks}, each at {rules.alpha_per_look:.3g}")
    return "Rules: " + ", ".join(words) + "."


def _waivers(report: Report, verdict: Verdict) -> Iterator[str]:
    for waiver in report.waivers:
        cells = [d for d in verdict.decisions if d.waiver is waiver]
        places = ", ".join(f"{d.arm}, {d.suite} @ {report.plan.labels.get(d.policy, d.policy)}" for d in cells[:3])
        more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
        let = f"lets {len(cells)} cells through ({places}{more})" if cells else "fits no cell and does nothing"
        if len(cells) == 1:
            let = f"lets {cells[0].status.value} through ({places})"
        yield f"WAIVER by {waiver.who}, until {waiver.expires}: {waiver.why}; it {let}."
    if verdict.unwaived is not verdict.status:
        yield f"Without waivers the verdict is {verdict.unwaived.value}."
