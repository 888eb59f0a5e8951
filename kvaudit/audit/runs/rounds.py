"""Asking in rounds until everything that is gated is decided, the time is spent, or the rows are.

    RUN/rounds/N/UNIT.jsonl     the rows of round N, sealed as any unit's
    RUN/records/UNIT.jsonl      the rows of all rounds so far, put together again at every look
    provenance.json, looks      what was planned before the first row, every look with what it said, and why it ended

Every round is asked under all ways of serving, and then looked at. What a look decides stays decided: of that suite no
further row is asked. A FAIL ends everything, because no other answer could let the setting be served. The next round
follows from the looks that are recorded, so a check that is resumed goes on as the same check.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvaudit.audit.runs.units import REFUSED, Unit, UnitFiles
from kvaudit.core.facets import facet_of
from kvaudit.core.files import read_json, write_json, write_output
from kvaudit.core.provenance import ENDED, LOOKS, PLANNED, TIME_SPENT, looks_in, table_of
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_evaluate import FIRST_LOOK
from kvaudit.reports.records.load import load_run
from kvaudit.reports.stats.betting import decidable_churn, smallest_margin
from kvaudit.reports.verdict.decide import decide
from kvaudit.reports.verdict.drift import drift_of
from kvaudit.reports.verdict.family import gated_facets
from kvaudit.reports.verdict.rules import GateOverrides, declared_rules
from kvaudit.reports.verdict.verdict import Status

ROUNDS_FOLDER = "rounds"
DECIDED, ROWS_SPENT, LOSS = "everything is decided", "the rows are spent", "a loss is shown"
# more rows may decide it, or leave too few unscored to matter
OPEN = (Status.INCONCLUSIVE.value, Status.NOT_MEASURABLE.value, Status.INVALID.value)
_OVERHEAD = 1.15  # of the time that answers take, for what lies between them


def looks_at(rows: int, first: int = FIRST_LOOK) -> list[int]:
    """After how many of so many rows a look is taken, each half as many again, and at the end."""
    found, look = list[int](), first
    while look < rows:
        found.append(look)
        look = look * 3 // 2
    return [*found, rows]


@dataclass(frozen=True)
class RowsPlan:
    """What may be asked at the most, fixed before the first round: rows and seconds a row on all sides, by suite."""

    items: Mapping[str, int]
    seconds: Mapping[str, float]
    left_out: Mapping[str, str]  # suite -> why the reference is not asked it
    at_hand: Mapping[str, int]  # rows that there are

    def written(self) -> dict[str, Any]:
        """As it stands in a provenance."""
        return {name: dict(getattr(self, name)) for name in ("items", "seconds", "left_out", "at_hand")}

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> RowsPlan | None:
        """The plan that a run has noted, None before it has one."""
        noted = table_of(table_of(provenance, LOOKS), PLANNED)
        names = ("items", "seconds", "left_out", "at_hand")
        return cls(*(table_of(noted, name) for name in names)) if noted else None


def rows_plan(
    at_hand: Mapping[str, int],
    seconds: Mapping[str, float],
    left_out: Mapping[str, str],
    minutes: float,
    first: int,
    gated: Collection[str],
) -> RowsPlan:
    """The first look of every suite, and of what is left of the gated ones the same share, as much as time allows.

    ``seconds`` by suite are those of a row on all sides together.
    """
    least = {suite: min(first, rows) for suite, rows in at_hand.items() if suite not in left_out}
    asked = {suite: at_hand[suite] if suite in gated else rows for suite, rows in least.items()}
    needed = [
        _OVERHEAD * sum(numbers[suite] * seconds.get(suite, 0.0) for suite in asked) for numbers in (least, asked)
    ]
    share = (60 * minutes - needed[0]) / (needed[1] - needed[0]) if needed[1] > needed[0] else 1.0
    share = min(1.0, max(0.0, share))
    items = {suite: least[suite] + int(share * (rows - least[suite])) for suite, rows in asked.items()}
    return RowsPlan(items, {suite: seconds.get(suite, 0.0) for suite in asked}, left_out, at_hand)


def next_round(
    plan: RowsPlan, looks: Sequence[Mapping[str, Any]], minutes: float, first: int
) -> dict[str, range] | str:
    """The rows of the next round by suite, or why there is none."""
    asked = {suite: 0 for suite in plan.items} | dict(table_of(looks[-1], "items") if looks else {})
    words: Mapping[str, str] = table_of(looks[-1], "words") if looks else {}
    if Status.FAIL.value in words.values():
        return LOSS
    open_ = {facet_of(metric)[0] for metric, word in words.items() if word in OPEN} if looks else {*plan.items}
    if not open_:
        return DECIDED
    found = {
        suite: range(done, next(look for look in looks_at(plan.items[suite], first) if look > done))
        for suite, done in asked.items()
        if suite in open_ and done < plan.items[suite]
    }
    if not found:
        whole = all(plan.items[suite] == plan.at_hand.get(suite, plan.items[suite]) for suite in open_)
        return ROWS_SPENT if whole else TIME_SPENT
    # an engine's first round is never left out: it is what tells how long the next ones take
    spent = sum(float(look.get("seconds", 0.0)) for look in looks)
    left, row_seconds = 60 * minutes - spent, _seconds_a_row(plan, looks)
    if not looks or sum(len(rows) * row_seconds.get(suite, 0.0) for suite, rows in found.items()) <= left:
        return found
    # not all of them, but what fits by itself
    fits = {suite: rows for suite, rows in found.items() if len(rows) * row_seconds.get(suite, 0.0) <= left}
    return dict([min(fits.items(), key=lambda pair: len(pair[1]))]) if fits else TIME_SPENT


def _seconds_a_row(plan: RowsPlan, looks: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """What a row takes on all sides together, as the rounds so far have shown beside the plan."""
    spent = sum(float(look.get("seconds", 0.0)) for look in looks)
    rows: Mapping[str, int] = table_of(looks[-1], "items") if looks else {}
    foreseen = sum(number * plan.seconds.get(suite, 0.0) for suite, number in rows.items())
    slower = spent / foreseen if foreseen and spent else _OVERHEAD
    return {suite: slower * seconds for suite, seconds in plan.seconds.items()}


def put_together(run: Path, units: Sequence[Unit], rounds: int) -> None:
    """Write the record file of every unit from those of its rounds, with a seal."""
    for unit in units:
        parts = [UnitFiles.of(run / ROUNDS_FOLDER / str(number), unit) for number in range(1, rounds + 1)]
        parts = [part for part in parts if part.seal.exists()]
        if not parts:
            continue
        raw = b"".join(part.records.read_bytes() for part in parts)
        whole, digest = UnitFiles.of(run / "records", unit), hashlib.sha256(raw).hexdigest()
        if whole.seal.exists() and read_json(whole.seal)["sha256"] == digest:
            continue
        whole.seal.unlink(missing_ok=True)
        write_output(whole.records, raw.decode())
        own = {"records": raw.count(b"\n"), "sha256": digest}
        write_json(whole.seal, _joined_seal([read_json(part.seal) for part in parts]) | own)


def _joined_seal(seals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last of the seals, with the rows that a server refused in any of its rounds."""
    refused = sum(int(seal.get(REFUSED, 0)) for seal in seals)
    return {**seals[-1], **({REFUSED: refused} if refused else {})}


def words_of(run: Path) -> dict[str, str]:
    """What the gate says of each gated metric after the rows that were asked so far."""
    data = load_run(run)
    comparison, rules = declared_rules(data, GateOverrides())
    drift = drift_of(data, comparison, rules.alpha, gated_facets(comparison, rules))
    found: dict[str, str] = {}
    for decision in decide(drift, rules).gated:
        known = found.get(decision.suite)
        found[decision.suite] = _graver(known, decision.status.value)
    return found


def _graver(one: str | None, other: str) -> str:
    """Of several settings under one metric the word that decides how it goes on."""
    order = [Status.FAIL.value, *OPEN]
    return min((word for word in (one, other) if word), key=lambda w: order.index(w) if w in order else len(order))


def look_lines(provenance: Mapping[str, Any]) -> Iterator[str]:
    """The looks of a run, one a line."""
    for number, look in enumerate(looks_in(provenance), start=1):
        items = ", ".join(f"{suite} {rows}" for suite, rows in table_of(look, "items").items())
        words = ", ".join(f"{metric} {word}" for metric, word in table_of(look, "words").items())
        yield f"look {number}: {items}: {words}"
    if ended := table_of(provenance, LOOKS).get(ENDED):
        yield f"ended: {ended}"


def plan_lines(plan: RowsPlan, spec: RunSpec) -> Iterator[str]:
    """What the rows and the time can show, before any of it is asked."""
    assert spec.gate.alpha is not None, "a complete spec has a level"
    for suite, why in plan.left_out.items():
        yield f"not asked of this model: {suite} ({why})"
    for suite, rows in plan.items.items():
        minutes = max(1, round(_OVERHEAD * rows * plan.seconds.get(suite, 0.0) / 60))
        time = f"{suite}: up to {rows} rows, about {minutes} minute{'s' * (minutes > 1)}"
        for metric, points in spec.gate.margins.items():
            if facet_of(metric)[0] == suite:
                yield f"{time}; {_can_show(rows, points, spec.gate.alpha)}"


def _can_show(rows: int, points: float, alpha: float) -> str:
    """Which loss these rows can find or rule out."""
    least = 100 * smallest_margin(rows, alpha)
    if least > points:
        return f"a loss of {points:g} points cannot be ruled out with so few rows, one of {least:.1f} points can"
    churn = 100 * decidable_churn(rows, points / 100, alpha)
    return f"a loss of {points:g} points is found or ruled out if fewer than {churn:.0f} % of the answers change"
