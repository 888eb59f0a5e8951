"""Rounds: ask more rows until every gated metric is decided, or the time or the rows are used up.

    RUN/rounds/N/UNIT.jsonl     the rows of round N, sealed like those of any unit
    RUN/records/UNIT.jsonl      the rows of all rounds so far, joined again at every look
    provenance.json, looks      the plan, corrected once by the time of the first round, all looks, and why they ended

Every round is asked under all serving configurations and followed by a look: an interim analysis by the gate. A decided
suite gets no further rows, and a FAIL ends all rounds. The next round follows from the stored looks alone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.folder import make_folder
from kvaudit.audit.runs.pilot import layout_of, pilot_units, with_kept_gate
from kvaudit.audit.runs.stages.base import RunContext, Stage, UnitWorker, unit_part
from kvaudit.audit.runs.stages.pilot import pilot_records, suites_left_out
from kvaudit.audit.runs.units import ROUNDS_FOLDER, Unit, UnitFiles, join_files, written_seconds
from kvaudit.core.errors import SpecError
from kvaudit.core.facets import facet_of
from kvaudit.core.files import mutex
from kvaudit.core.provenance import ENDED, LOOKS, MINUTES, PILOT, PILOT_RESULT, PLANNED, TIME_SPENT, all_looks, table_of
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_evaluate import FIRST_LOOK, Rounds
from kvaudit.reports.records.load import load_run
from kvaudit.reports.stats.betting import decidable_churn, smallest_margin
from kvaudit.reports.verdict.decide import decide
from kvaudit.reports.verdict.drift import drift_of
from kvaudit.reports.verdict.family import gated_facets
from kvaudit.reports.verdict.rules import GateOverrides, declared_rules
from kvaudit.reports.verdict.verdict import Status

DECIDED, ROWS_SPENT, LOSS = "everything is decided", "the rows are spent", "a loss is shown"
# statuses that more rows may change
OPEN = (Status.INCONCLUSIVE.value, Status.NOT_MEASURABLE.value, Status.INVALID.value)
_OVERHEAD = 1.15  # total time / time that the answers take


class RoundsStage(Stage):
    """Asks rounds until a look (a test between rounds) ends them; ``has_asked`` is True if this process asked any."""

    def __init__(self, context: RunContext, worker: UnitWorker, rounds: Rounds) -> None:
        super().__init__(context)
        self._worker, self._rounds = worker, rounds
        self._minutes = max(rounds.minutes, table_of(context.run.provenance(), LOOKS).get(MINUTES, 0.0))
        self._reason, self.has_asked = "", False  # the reason is why the rounds have ended

    @property
    def is_done(self) -> bool:
        return ENDED in table_of(self.context.run.provenance(), LOOKS)

    @property
    def units(self) -> list[Unit]:
        """The units of the suites in the plan; none before there is a plan."""
        plan = RowsPlan.of(self.context.run.provenance())
        return [] if plan is None else [unit for unit in grid(self.context.spec) if unit.suite in plan.items]

    def work(self) -> RunContext:
        self._store_plan()
        units = self.units
        while True:
            provenance = self.context.run.provenance()
            plan, looks = RowsPlan.of(provenance), all_looks(provenance)
            assert plan is not None, "the plan is stored before the first round"
            if looks and "words" not in looks[-1]:  # this round was asked, but has had no look yet
                if len(looks) == 1 and not plan.first_items:
                    self._correct_plan(plan, looks[0])
                self._take_look(units, len(looks), looks[-1])
                continue
            rows = next_round(plan, looks, self._minutes, self._rounds.first)
            if isinstance(rows, str):
                self._reason = rows
                self.context.bar.restart("what is asked again")
                return self.context
            self.has_asked = True
            self._ask(units, len(looks) + 1, rows, table_of(looks[-1], "items") if looks else {})

    def note_end(self) -> None:
        """Store why the rounds ended, which completes the evaluation."""
        self.context.run.keep(LOOKS, ENDED, self._reason)

    def _store_plan(self) -> None:
        """Store the plan of how many rows to ask, unless another process has."""
        context, rounds = self.context, self._rounds
        provenance = context.run.provenance()
        if RowsPlan.of(provenance) is not None:
            return
        results = provenance[PILOT][PILOT_RESULT]
        self._check_clusters()
        seconds = self._seconds_per_row()
        gated = {facet_of(metric)[0] for metric in context.spec.gate.margins}
        items = results["items"]
        plan = rows_plan(items, seconds, suites_left_out(results), self._minutes, rounds.first, gated)
        if not gated & plan.items.keys():  # nothing is measurable, which the first rows of these suites document
            plan = rows_plan(items, seconds, {}, 0.0, rounds.first, gated)
            plan = replace(plan, first_items=plan.items)  # and stays so
        context.run.keep(LOOKS, PLANNED, plan.written())
        stored = RowsPlan.of(context.run.provenance())  # another process may have been faster
        assert stored is not None
        for line in plan_lines(stored, context.spec):
            context.print_line(line)

    def _correct_plan(self, plan: RowsPlan, first_round: Mapping[str, Any]) -> None:
        """Correct the stored plan to the rows that fit into the time, which the first round has shown."""
        gated = {facet_of(metric)[0] for metric in self.context.spec.gate.margins}
        items = corrected_items(plan, first_round, self._minutes, gated)
        self.context.run.note(**{LOOKS: {PLANNED: replace(plan, items=items, first_items=plan.items).written()}})
        changed = [f"{suite} up to {rows} rows" for suite, rows in items.items() if rows != plan.items[suite]]
        if changed:
            self.context.print_line(f"by the time that the first round took: {', '.join(changed)}")

    def _check_clusters(self) -> None:
        """Raise SpecError for a suite with several rows per cluster, as a test between rounds could split clusters."""
        count = self.context.models.base().chat.count_tokens
        for name in self.context.spec.evaluate.suites:
            rows = layout_of(self.context.spec, name, count)
            if len({row.cluster for row in rows}) < len(rows):
                raise SpecError(
                    f"suite {name} asks several rows of a template, but evaluate.rounds needs suites with one row per "
                    "template; use harm, benign or injection, or remove rounds"
                )

    def _seconds_per_row(self) -> dict[str, float]:
        """Return by suite the seconds that one row takes under all serving configurations together, from the pilot."""
        context = self.context
        seconds, rows = dict[str, float](), dict[str, int]()
        for unit in pilot_units(with_kept_gate(context.spec, context.run.provenance())):
            records = pilot_records(context, unit)
            seconds[unit.suite] = seconds.get(unit.suite, 0.0) + sum(record.seconds for record in records)
            rows[unit.suite] = rows.get(unit.suite, 0) + len(records)
        policies = len(context.spec.evaluate.policies)
        return {suite: policies * total / max(1, rows[suite]) for suite, total in seconds.items()}

    def _ask(self, units: Sequence[Unit], number: int, rows: Mapping[str, range], asked: Mapping[str, int]) -> None:
        """Answer the rows of a round, and store how many rows have been asked and how long the round took."""
        folder = self.context.run.path / ROUNDS_FOLDER / str(number)
        make_folder(folder)
        round_units = [unit for unit in units if unit.suite in rows]
        # answers of a process that was stopped count towards the time limit too
        earlier = sum(written_seconds(UnitFiles.of(folder, unit)) for unit in round_units)
        started = time.monotonic()
        self.context.bar.restart(f"round {number}")
        sizes = {unit: len(rows[unit.suite]) for unit in round_units}
        self._worker.work(
            "asking", folder, round_units, lambda: [unit_part(folder, unit, n, n) for unit, n in sizes.items()], rows
        )
        look = {
            "items": {**asked, **{suite: suite_rows.stop for suite, suite_rows in rows.items()}},
            "seconds": round(earlier + time.monotonic() - started, 3),
        }
        self.context.run.keep(LOOKS, str(number), look)

    def _take_look(self, units: Sequence[Unit], number: int, look: Mapping[str, Any]) -> None:
        """Take a look: join the records, let the gate decide, and store its statuses, unless another process has."""
        run = self.context.run
        with mutex(run.path / ".looks.lock"):
            if "words" in all_looks(run.provenance())[number - 1]:
                return
            join_rounds(run.path, units, all_looks(run.provenance())[:number])
            run.note(**{LOOKS: {str(number): {**look, "words": gate_statuses(run.path)}}})
        self.context.print_line(list(look_lines(run.provenance()))[-1])


def look_sizes(rows: int, first: int = FIRST_LOOK) -> list[int]:
    """Return the numbers of rows after which a look is taken: ``first``, then 1.5 times the last, finally ``rows``."""
    looks, look = list[int](), first
    while look < rows:
        looks.append(look)
        look = look * 3 // 2
    return [*looks, rows]


@dataclass(frozen=True)
class RowsPlan:
    """The most rows that rounds may ask of each suite; fixed before the first round, and corrected once after it.

    ``items`` are rows to ask, ``seconds`` per row under all serving configurations together, ``left_out`` the
    reasons why a suite is not asked, and ``at_hand`` the rows that exist. ``first_items`` are the rows planned before
    the first round; it is empty until the plan is corrected.
    """

    items: Mapping[str, int]
    seconds: Mapping[str, float]
    left_out: Mapping[str, str]
    at_hand: Mapping[str, int]
    first_items: Mapping[str, int] = field(default_factory=dict)

    def written(self) -> dict[str, Any]:
        """Return the plan as a table for provenance.json."""
        return {part.name: dict(getattr(self, part.name)) for part in fields(self)}

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> RowsPlan | None:
        """Return the plan that a run has stored, or None."""
        table = table_of(table_of(provenance, LOOKS), PLANNED)
        return cls(*(table_of(table, part.name) for part in fields(cls))) if table else None


def rows_plan(
    at_hand: Mapping[str, int],
    seconds: Mapping[str, float],
    left_out: Mapping[str, str],
    minutes: float,
    first: int,
    gated: Collection[str],
) -> RowsPlan:
    """Return a plan of the most rows of each suite: those of its first look, and for gated suites a share of the rest.

    The share is the same for all gated suites, and as large as ``minutes`` allow.
    """
    least = {suite: min(first, rows) for suite, rows in at_hand.items() if suite not in left_out}
    most = {suite: at_hand[suite] if suite in gated else rows for suite, rows in least.items()}
    needed = [_OVERHEAD * sum(numbers[suite] * seconds.get(suite, 0.0) for suite in most) for numbers in (least, most)]
    share = (60 * minutes - needed[0]) / (needed[1] - needed[0]) if needed[1] > needed[0] else 1.0
    share = min(1.0, max(0.0, share))
    items = {suite: least[suite] + int(share * (rows - least[suite])) for suite, rows in most.items()}
    return RowsPlan(items, {suite: seconds.get(suite, 0.0) for suite in most}, left_out, at_hand)


def corrected_items(
    plan: RowsPlan, first_round: Mapping[str, Any], minutes: float, gated: Collection[str]
) -> dict[str, int]:
    """Return the most rows of each suite, planned anew from the time that the first round took.

    That is the first round's rows and, as time allows, an equal share of each gated suite's other rows. Answers have no
    part in it, so the number of rows at the last look is still fixed beforehand.
    """
    asked, seconds = table_of(first_round, "items"), _measured_seconds(plan, [first_round])
    more = {suite: plan.at_hand.get(suite, rows) - rows for suite, rows in asked.items() if suite in gated}
    seconds_left = 60 * minutes - float(first_round.get("seconds", 0.0))
    needed = sum(rows * seconds.get(suite, 0.0) for suite, rows in more.items())
    share = min(1.0, max(0.0, seconds_left / needed)) if needed else 1.0
    return {suite: asked.get(suite, rows) + int(share * more.get(suite, 0)) for suite, rows in plan.items.items()}


def next_round(
    plan: RowsPlan, looks: Sequence[Mapping[str, Any]], minutes: float, first: int
) -> dict[str, range] | str:
    """Return the rows of the next round by suite, or the reason why there is none.

    A suite that is still open after its planned rows goes on while time and rows are left; the betting test, whose
    bounds hold at every look, decides then.
    """
    asked = {suite: 0 for suite in plan.items} | dict(table_of(looks[-1], "items") if looks else {})
    statuses: Mapping[str, str] = table_of(looks[-1], "words") if looks else {}
    if Status.FAIL.value in statuses.values():
        return LOSS
    not_decided = {facet_of(metric)[0] for metric, status in statuses.items() if status in OPEN}
    undecided = not_decided if looks else {*plan.items}
    if not undecided:
        return DECIDED
    open_suites = {facet_of(metric)[0] for metric, status in statuses.items() if status == Status.INCONCLUSIVE.value}
    rows = dict[str, range]()
    for suite, done in asked.items():
        planned = plan.items[suite]
        if suite in undecided and done < planned:
            rows[suite] = range(done, next(look for look in look_sizes(planned, first) if look > done))
        elif suite in open_suites and done < plan.at_hand.get(suite, planned):
            rows[suite] = range(done, min(done * 3 // 2, plan.at_hand[suite]))
    if not rows:
        is_all_asked = all(asked[suite] == plan.at_hand.get(suite, asked[suite]) for suite in undecided)
        return ROWS_SPENT if is_all_asked else TIME_SPENT
    # the first round is always asked in full: it shows how long the next ones take
    spent = sum(float(look.get("seconds", 0.0)) for look in looks)
    seconds_left, row_seconds = 60 * minutes - spent, _measured_seconds(plan, looks)
    seconds = {suite: len(suite_rows) * row_seconds.get(suite, 0.0) for suite, suite_rows in rows.items()}
    if not looks or sum(seconds.values()) <= seconds_left:
        return rows
    # too little time for all suites: ask the one with the fewest rows that fits alone
    fitting = [suite for suite in rows if seconds[suite] <= seconds_left]
    return {suite: rows[suite] for suite in sorted(fitting, key=lambda suite: len(rows[suite]))[:1]} or TIME_SPENT


def _measured_seconds(plan: RowsPlan, looks: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return the plan's seconds per row by suite, corrected by the time that the rounds so far have taken."""
    spent = sum(float(look.get("seconds", 0.0)) for look in looks)
    rows: Mapping[str, int] = table_of(looks[-1], "items") if looks else {}
    planned = sum(number * plan.seconds.get(suite, 0.0) for suite, number in rows.items())
    slower = spent / planned if planned and spent else _OVERHEAD
    return {suite: slower * seconds for suite, seconds in plan.seconds.items()}


def join_rounds(run: Path, units: Sequence[Unit], looks: Sequence[Mapping[str, Any]]) -> None:
    """Write the record file of every unit from the files of the rounds of ``looks``, and seal it.

    Raises DataError if the file of a round is missing, is not sealed, or differs from its seal.
    """
    for unit in units:
        counts = [0, *(table_of(look, "items").get(unit.suite, 0) for look in looks)]
        rounds = [number for number, (before, after) in enumerate(pairwise(counts), start=1) if after > before]
        parts = [UnitFiles.of(run / ROUNDS_FOLDER / str(number), unit) for number in rounds]
        if parts:
            join_files(UnitFiles.of(run / "records", unit), parts)


def gate_statuses(run: Path) -> dict[str, str]:
    """Return the gate's status of each gated metric for the rows asked so far: the worst one over all settings."""
    data = load_run(run)
    comparison, rules = declared_rules(data, GateOverrides())
    drift = drift_of(data, comparison, rules.alpha, gated_facets(comparison, rules))
    statuses: dict[str, str] = {}
    order = [Status.FAIL.value, *OPEN]
    for decision in decide(drift, rules).gated:
        settings = [status for status in (statuses.get(decision.suite), decision.status.value) if status]
        statuses[decision.suite] = min(settings, key=lambda s: order.index(s) if s in order else len(order))
    return statuses


def look_lines(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for every look of a run, and one about why the looks ended."""
    for number, look in enumerate(all_looks(provenance), start=1):
        items = ", ".join(f"{suite} {rows}" for suite, rows in table_of(look, "items").items())
        statuses = ", ".join(f"{metric} {status}" for metric, status in table_of(look, "words").items())
        yield f"look {number}: {items}: {statuses}"
    if ended := table_of(provenance, LOOKS).get(ENDED):
        yield f"ended: {ended}"


def plan_lines(plan: RowsPlan, spec: RunSpec) -> Iterator[str]:
    """Yield lines on what the planned rows can show of each margin and how long they take."""
    assert spec.gate.alpha is not None, "a complete spec has a level"
    for suite, reason in plan.left_out.items():
        yield f"not asked of this model: {suite} ({reason})"
    for suite, rows in plan.items.items():
        minutes = max(1, round(_OVERHEAD * rows * plan.seconds.get(suite, 0.0) / 60))
        size = f"{suite}: up to {rows} rows, about {minutes} minute{'s' * (minutes > 1)}"
        for metric, points in spec.gate.margins.items():
            if facet_of(metric)[0] == suite:
                yield f"{size}; {_detectable_loss(rows, points, spec.gate.alpha)}"


def _detectable_loss(rows: int, points: float, alpha: float) -> str:
    least = 100 * smallest_margin(rows, alpha)
    if least > points:
        return f"a loss of {points:g} points cannot be ruled out with so few rows, one of {least:.1f} points can"
    churn = 100 * decidable_churn(rows, points / 100, alpha)
    return f"a loss of {points:g} points is found or ruled out if fewer than {churn:.0f} % of the answers change"
