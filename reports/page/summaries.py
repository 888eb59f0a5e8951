"""What every folded section found, in one line that is read without opening it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvaudit.reports.analysis.cache_use import cache_use
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.results import Contrast
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.gate.verdict import PRECEDENCE, Decision, Status
from kvaudit.reports.layout.words import NOT_SHOWN, counted, drift, percent, scientific
from kvaudit.reports.page.detail_tables import FEWEST_LOST
from kvaudit.reports.page.findings import Findings


def statuses(decisions: Iterable[Decision], what: str) -> str:
    """24 gated cells: 3 FAIL, 7 INCONCLUSIVE, 14 PASS."""
    found = Counter(d.standing for d in decisions)
    parts = [f"{found[status]} {status.value}" for status in PRECEDENCE if found[status]]
    return f"{found.total()} {what}: {', '.join(parts)}." if parts else ""


def compared(findings: Decided) -> str:
    """The sides, and how much is gated."""
    sides, rules = findings.comparison, findings.rules
    who = f"{counted(len(sides.candidates), 'arm')} against {sides.reference}"
    if sides.mode == "serving":
        who = f"{counted(len(sides.policies), 'way')} to serve one checkpoint"
    asked = f"{counted(len(sides.suites), 'suite')}, gated under {len(rules.primary)} of {len(sides.policies)} policies"
    return f"{who}; {asked}."


def parity(findings: Decided) -> str:
    """The arms whose capability passes while a safety suite fails."""
    capability = set(findings.comparison.capability)
    found = [
        a for a in findings.verdict.arms if Status.FAIL in (s for name, s in a.suites.items() if name not in capability)
    ]
    passed = (Status.PASS, Status.PASS_NOTED)
    names = [a.arm for a in found if all(s in passed for name, s in a.suites.items() if name in capability)]
    return f"Capability passes and safety fails: {', '.join(names) or 'in no arm'}."


def lowest(sides: Comparison, contrasts: Sequence[Contrast]) -> str:
    """The lowest of several drifts; it is picked for being that."""
    known = [(c.effect, c) for c in contrasts if c.effect]
    if not known:
        return "No cell has a number."
    effect, c = min(known, key=lambda pair: pair[0].estimate)
    where = f"{c.arm} @ {sides.labels.get(c.policy, c.policy)}, {c.suite}"
    return f"The lowest of {len(known)}: {where}: {drift(effect)}."


def estimand(findings: Decided, name: str, *, gated_only: bool = False) -> str:
    """The lowest drift of an estimand, of the gated policies where any of them has one."""
    found = [c for c in findings.contrasts if c.estimand == name]
    if gated_only:
        found = [c for c in found if c.policy in findings.rules.primary] or found
    return lowest(findings.comparison, found)


def safe(findings: Findings) -> str:
    """How many sequences cleared a dose at all."""
    found = findings.analysis.safe
    none = sum(s.cleared is None for s in found)
    return f"{len(found) - none} of {len(found)} sequences clear a dose; {none} clear none."


def dose(findings: Findings) -> str:
    """The steepest slope."""
    known = [(c.slope, c) for c in findings.analysis.doses if c.slope]
    if not known:
        return ""
    slope, c = max(known, key=lambda pair: abs(pair[0].estimate))
    return f"The steepest of {len(known)}: {c.arm} @ {c.family}, {c.suite}: {drift(slope)} per doubling."


def churn(findings: Findings) -> str:
    """From the least to the most churn of a gated cell."""
    found = [c.churn for c in findings.analysis.churn]
    return f"{percent(min(found))} to {percent(max(found))} of the answers changed." if found else ""


def concentration(findings: Findings) -> str:
    """How many cells lost mostly through one template."""
    found = findings.analysis.concentration
    one = sum(bool(c.dominant) and c.losses >= FEWEST_LOST for c in found)
    return f"In {one} of {len(found)} cells that lost anything, one template carries more than half of it."


def seeds(findings: Findings) -> str:
    """How far the seeds of one cell lie apart at most."""
    found = [max(s.estimates) - min(s.estimates) for s in findings.analysis.seeds if s.estimates]
    count = len(findings.comparison.seeds)
    if not found:
        return ""
    apart = f"in one cell they lie up to {100 * max(found):.1f} pp apart"
    return f"{count} paired seeds; {apart}." if count > 1 else "One seed."


def displacement(findings: Findings) -> str:
    """The largest mean divergence that is no floor."""
    found = [d for d in findings.displacement if not d.floor]
    if not found:
        return ""
    most = max(found, key=lambda d: d.mean_kl)
    return f"The largest mean KL: {most.arm} seed {most.seed}, {most.suite}: {most.mean_kl:.3g} nats."


def reach(findings: Findings) -> str:
    """From the least to the most that a cell's own size could have found."""
    found = [r.detectable for r in findings.analysis.reach]
    if not found:
        return ""
    return f"A drop of {100 * min(found):.1f} to {100 * max(found):.1f} pp, by cell."


def methods(findings: Findings) -> str:
    """The ways that would have decided otherwise."""
    flips = [m.method for m in findings.analysis.methods if m.flips]
    return f"The verdict would be another one by: {', '.join(flips)}." if flips else "No other way flips the verdict."


def outcomes(findings: Decided) -> str:
    """The lowest and the highest rate, and what could not be scored."""
    cells = findings.drift.cells
    if not cells:
        return ""
    lost = [f"{sum(c.outcomes[name] for c in cells)} {name}" for name in ("degenerate", "truncated", "unscored")]
    low, high = (percent(end(c.rate for c in cells)) for end in (min, max))
    return f"Rates from {low} to {high}; answers: {', '.join(lost)}."


def training(findings: Findings) -> str:
    """Where sampler and learner were furthest apart."""
    found = {c.arm: c.largest["mismatch/max_abs_gap"] for c in findings.curves if "mismatch/max_abs_gap" in c.largest}
    if not found:
        return f"{counted(len(findings.curves), 'arm')}."
    most = max(found, key=lambda arm: found[arm])
    apart = f"sampler and learner furthest apart in {most}: {scientific(found[most])} nats"
    return f"{counted(len(findings.curves), 'arm')}; {apart}."


def cache(findings: Decided) -> str:
    """The smallest and the largest peak against an uncompressed cache that is counted the same way."""
    uses = cache_use(findings.drift)
    ways = (("live", [u.live_share for u in uses]), ("allocated", [u.allocated_share for u in uses]))
    known = ((word, [share for share in shares if share is not None]) for word, shares in ways)
    found = [f"{percent(min(shares))} to {percent(max(shares))} {word}" for word, shares in known if shares]
    hidden = sum(not use.is_shown for use in uses)
    parts = [f"Peak of an uncompressed cache, counted the same way: {', '.join(found)}."] if found else []
    parts += [f"{counted(hidden, 'engine condition')}: cache {NOT_SHOWN}."] if hidden else []
    return " ".join(parts)
