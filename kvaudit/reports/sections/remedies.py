"""What a failing arm could be served under instead: the line of the banner, and a table for every arm and policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any, ClassVar

from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.text import inline, some
from kvaudit.reports.analysis.remedies import Cost, Mended, Remedies, Remedy, remedies_of
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.gate.verdict import PASSED, Decision, Status
from kvaudit.reports.layout.json_text import contrast_facts
from kvaudit.reports.layout.tables import Table, table_of
from kvaudit.reports.layout.words import drift, percent, shortened, size, spelled
from kvaudit.reports.records.remedies import AFTER_RUN, REMEDIES_FOLDER
from kvaudit.reports.sections.base import Depth, Inputs, Section

_NAMED = 3  # lines of the banner
_NOTES = (
    "As deployed: the compressed arm against the uncompressed reference. A remedy passes every gated cell and is shown "
    "to win something back in each that failed, all at the gate's level. Weights, items and seeds are the same, so the "
    "change is the cause of what is won.",
    "Remedies are tested in the order in which they were declared, until the first that is none; what stands behind it "
    "is not held, however it looks. So the cheapest of many is no lucky one: what is no remedy is called one in alpha "
    "of such tables at most. The judge's labels decide, also where people labelled the run.",
    "KV bytes: peak of an answer's row, mean over suites. Seconds: an answer's share of its batch, as recorded; what "
    "was served at another time or on a busier machine is not to be compared.",
)


class RemediesSection(Section[Remedies]):
    name = "remedies"
    title = "Remedies"
    explain = (
        "An arm that fails as deployed, served again under another policy: the same items and decoding seeds, the same "
        "gate. What is left of the drift, and what it costs."
    )
    order = 60
    depth = Depth.DISCLOSURE
    keys: ClassVar = {"remedies": 90}
    remarks_at = 30

    def compute(self, inputs: Inputs) -> Remedies | None:
        decided = inputs.decided
        return remedies_of(inputs.data, decided.drift, decided.rules, decided.verdict)

    def problems(self, inputs: Inputs) -> Iterator[str]:
        found = inputs.data.remedies.problems
        yield from (f"{REMEDIES_FOLDER}/{one.file}:{one.line}: {one.reason}" for one in found)

    def facts(self, value: Remedies | None) -> Mapping[str, Any]:
        return {"remedies": _facts(value) if value else None}

    def tables(self, value: Remedies, decided: Decided) -> Iterator[Table]:
        for one in _tried(value):
            yield _remedy_table(decided.comparison, one)
            yield _drift_left_table(decided, one)

    def notes(self, value: Remedies, decided: Decided) -> Iterator[str]:
        yield from _NOTES if _tried(value) else self.remarks(value, decided)

    def finding(self, value: Remedies, decided: Decided) -> str:
        return next(self.remarks(value, decided)).removeprefix("REMEDIES: ")

    def instead(self, value: Remedies, decided: Decided) -> Iterator[str]:
        """The cheapest policy that passes where one fails, if one does."""
        for one in _shown(value):
            if one.chosen is not None and decided.verdict.status is not Status.INVALID:
                label, other = shortened(one.label), shortened(one.remedies[one.chosen].label)
                yield inline(f"Instead of {label}, for {shortened(one.failing.arm)}: {other} passes.")

    def remarks(self, value: Remedies, decided: Decided) -> Iterator[str]:
        """The cheapest policy that passes where one fails, a line for each, for whoever reads the verdict alone."""
        if decided.verdict.status is Status.INVALID:
            yield "REMEDIES: none was tried, since an INVALID verdict does not say what fails."
            return
        if not value.failing:
            yield "REMEDIES: nothing fails as deployed under a gated policy, so none was tried."
        elif not value.mended:
            engines = [one for one in value.failing if decided.comparison.is_engine(one.policy)]
            names = dict.fromkeys(decided.comparison.label(one.policy) for one in engines)
            if names:
                yield inline(
                    f"REMEDIES: none is tried on {', '.join(names)}: remedies are of our own cache, not an engine's."
                )
            if len(engines) < len(value.failing):
                yield "REMEDIES: declared, and not served yet: kvaudit replay remedy RUN."
        yield from (f"REMEDIES: {_told(decided.comparison, one)}" for one in _shown(value)[:_NAMED])
        if len(_shown(value)) > _NAMED:
            yield f"REMEDIES: {len(_shown(value)) - _NAMED} more arms and policies stand in the report."
        yield from _lost_in_training(decided.comparison, value)


def _shown(found: Remedies) -> list[Mended]:
    """What a serving policy could mend."""
    return [one for one in found.mended if not one.failing.uncompressed]


def _told(sides: Comparison, one: Mended) -> str:
    failed = min(one.failing.cells, key=lambda d: d.effect.estimate if d.effect else 0.0)
    at = f"{spelled(sides, failed.suite)} {drift(failed.effect)}" if failed.effect else spelled(sides, failed.suite)
    where = f"{one.failing.arm} under {one.label} fails as deployed ({at} at worst)"
    if sides.is_engine(one.failing.policy):
        return f"{where}; remedies are of our own cache, and none is tried on an engine's."
    if not one.remedies:
        return f"{where}; no remedy that was tried has a hold on that policy."
    held, tried = sum(remedy.held for remedy in one.remedies), len(one.remedies)
    if one.chosen is None:
        alone = [remedy.label for remedy in one.remedies if remedy.mends]
        passes = f", though {', '.join(alone)} would alone" if alone else ""
        return f"{where}; none of {tried} tried in order passes{passes}."
    best = one.remedies[one.chosen]
    late = ", tried after the run" if best.declared == AFTER_RUN else ""
    cost = f", {size(best.cost.kv_bytes)} of KV cache ({_against(best.cost, one)})" if best.cost else ""
    passes = f"the cheapest policy that passes is {best.label}{cost}{late}"
    return f"{where}; {passes}. {held} of {tried} tried in order hold."


def _against(cost: Cost, one: Mended) -> str:
    """75.3 % of none, 28.0 % less than under snapkv 112."""
    of_dense = f"{percent(cost.kv_ratio)} of {DENSE_POLICY}"
    if one.cost is None:
        return of_dense
    more = cost.kv_bytes / one.cost.kv_bytes - 1
    return f"{of_dense}, {percent(abs(more))} {'more' if more > 0 else 'less'} than under {one.label}"


def _lost_in_training(sides: Comparison, found: Remedies) -> Iterator[str]:
    """The arms that do not pass uncompressed: nothing is tried where nothing can pass."""
    lost = {one.failing.arm: one.failing.uncompressed for one in found.mended if one.failing.uncompressed}
    arms = [f"{arm} ({_cell_words(sides, _lowest(cells))})" for arm, cells in lost.items()]
    if arms:
        yield (
            f"REMEDIES: none is tried on {some(arms)}: served uncompressed these do not pass "
            "either, and no way of serving mends what training did."
        )


def _tried(found: Remedies) -> list[Mended]:
    return [one for one in _shown(found) if one.remedies]


def _remedy_table(sides: Comparison, one: Mended) -> Table:
    failed = f"{one.failing.arm} @ {one.label}"
    worst = _cell_words(sides, _lowest(one.failing.decided))
    rows = [[failed, "FAIL", worst, "", *_costs(one.cost), "fails"]]
    for remedy in one.remedies:
        label = f"{remedy.label}{' (after the run)' * (remedy.declared == AFTER_RUN)}"
        row = [label, remedy.status.value, _cell_words(sides, _lowest(remedy.cells)), _won(sides, remedy)]
        rows.append([*row, *_costs(remedy.cost), _called(one, remedy)])
    rows.append([DENSE_POLICY, "", "", "", *_costs(one.dense), "uncompressed"])
    headers = ["served under", "verdict", "drift left, least room", "won back, least", "KV bytes allocated", "of none"]
    return table_of([*headers, "s/answer", "a remedy"], rows, words=len(headers) + 2)


def _drift_left_table(decided: Decided, one: Mended) -> Table:
    ways = [(one.label, one.failing.decided), *((remedy.label, remedy.cells) for remedy in one.remedies)]
    several = len(decided.rules.contexts) > 1
    names = list(dict.fromkeys((d.suite, d.context_tokens) for d in one.failing.decided))
    rows = []
    for label, cells in ways:
        known = {(d.suite, d.context_tokens): d for d in cells}
        rows.append([label, *(_drift_left(known.get(name)) for name in names)])
    headers = [spelled(decided.comparison, suite) + (f", {context}" if several else "") for suite, context in names]
    return table_of(["served under", *headers], rows, words=1 + len(headers))


def _lowest(cells: Sequence[Decision]) -> Decision | None:
    """The cell with the least room to its margin, an open or failed one first."""
    known = [(d.status in PASSED, (d.effect.lower if d.effect else -1.0) + (d.margin or 0.0), d) for d in cells]
    return min(known, key=itemgetter(0, 1))[2] if known else None


def _cell_words(sides: Comparison, d: Decision | None) -> str:
    return "-" if d is None else f"{spelled(sides, d.suite)} {_drift_left(d)}"


def _drift_left(d: Decision | None) -> str:
    if d is None:
        return "-"
    if d.effect is None:
        return f"no number ({d.reasons[0].text if d.reasons else 'not served'})"
    code = f" ({d.reasons[0].code})" if d.reasons and d.status not in PASSED else ""
    return f"{drift(d.effect)} {d.status.value}{code}"


def _won(sides: Comparison, remedy: Remedy) -> str:
    """What came back in the failed cell that is least shown to have won anything."""
    known = [c for c in remedy.won if c.effect is not None]
    if len(known) < len(remedy.won) or not known:
        return "no number"
    least = min(known, key=lambda c: c.effect.lower if c.effect else 0.0)
    return f"{spelled(sides, least.suite)} {drift(least.effect)}" if least.effect else "-"


def _costs(cost: Cost | None) -> list[str]:
    if cost is None:
        return ["not served", "-", "-"]
    return [size(cost.kv_bytes), percent(cost.kv_ratio), f"{cost.seconds:.3f}"]


def _called(one: Mended, remedy: Remedy) -> str:
    if remedy.held:
        return "yes, the cheapest" if one.chosen is not None and remedy is one.remedies[one.chosen] else "yes"
    if remedy.cost is None:
        return "not served yet"
    if remedy.status not in PASSED:
        return "no: does not pass"
    if not remedy.helps:
        return f"no: not shown to be better than {one.label}"
    return inline(f"not held: tested behind {next(r.label for r in one.remedies if not r.mends)}")


def _facts(found: Remedies) -> dict[str, Any]:
    rows = []
    for one in found.mended:
        tried = []
        for r in one.remedies:
            own = {"won": [contrast_facts(c) for c in r.won], "status": r.status, "mends": r.mends}
            tried.append({**asdict(replace(r, won=())), **own})
        rows.append({**asdict(replace(one, remedies=())), "remedies": tried})
    failing = [{"arm": one.arm, "policy": one.policy} for one in found.failing]
    return {"declared": found.declared, "failing": failing, "mended": rows}
