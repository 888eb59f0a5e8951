"""Rounds: ask more rows until every gated metric is decided, or the time or the rows are used up.

    RUN/rounds/N/UNIT.jsonl     the rows of round N, sealed like those of any unit
    RUN/records/UNIT.jsonl      the rows of all rounds so far, joined again at every look
    provenance.json, looks      the plan, corrected once by the time of the first rows, all looks, and why they ended

Every round is asked under all serving configurations and followed by a look: an interim analysis by the gate. The first
round is the pilot's rows, copied, so that a setting that ruins the model is found without another question. A decided
suite gets no further rows, and a FAIL ends all rounds. The next round follows from the stored looks alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.folder import make_folder
from kvaudit.audit.runs.pilot import layout_of, pilot_units, with_kept_gate
from kvaudit.audit.runs.round_plan import (
    ENDINGS,
    INVALID_BY_CANARY,
    INVALID_BY_FORM,
    INVALID_BY_MISSING,
    OPEN,
    RowsPlan,
    corrected_items,
    is_first_asked,
    next_round,
    plan_lines,
    rows_plan,
)
from kvaudit.audit.runs.stages.base import RunContext, Stage, UnitWorker, unit_part
from kvaudit.audit.runs.stages.pilot import pilot_records, suites_left_out
from kvaudit.audit.runs.units import PILOT_FOLDER, ROUNDS_FOLDER, Unit, UnitFiles, join_files, written_seconds
from kvaudit.core.errors import SpecError
from kvaudit.core.facets import facet_of, suite_of
from kvaudit.core.files import mutex
from kvaudit.core.provenance import (
    ENDED,
    LOOKS,
    MINUTES,
    PILOT,
    PILOT_RESULT,
    PLANNED,
    all_looks,
    item_counts,
    table_of,
)
from kvaudit.core.spec_evaluate import FIRST_LOOK, Rounds
from kvaudit.reports.records.load import load_run
from kvaudit.reports.records.rows import LOGPROB
from kvaudit.reports.verdict.decide import decide
from kvaudit.reports.verdict.drift import drift_of
from kvaudit.reports.verdict.family import gated_facets
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.rules import GateOverrides, declared_rules
from kvaudit.reports.verdict.verdict import Status


class RoundsStage(Stage):
    """Asks rounds until a look ends them; ``has_asked`` is True if this process asked any."""

    def __init__(self, context: RunContext, worker: UnitWorker, rounds: Rounds) -> None:
        super().__init__(context)
        self._worker, self._rounds = worker, rounds
        self._minutes = max(rounds.minutes, table_of(context.run.provenance(), LOOKS).get(MINUTES, 0.0))
        self._pilot = context.spec.evaluate.pilot_size
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
                if not plan.first_items and is_first_asked(looks, self._pilot):
                    self._correct_plan(plan, looks)
                self._take_look(units, len(looks), looks[-1])
                continue
            rows = next_round(plan, looks, self._minutes, self._rounds.first, self._pilot)
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
        shares = self._eligible_shares()
        seconds = self._seconds_per_row()
        gated = {facet_of(metric)[0] for metric in context.spec.gate.margins}
        items = results["items"]
        plan = rows_plan(items, seconds, suites_left_out(results), self._minutes, rounds.first, gated)
        if not gated & plan.items.keys():  # nothing is measurable, which the pilot's rows of these suites document
            plan = rows_plan(items, seconds, {}, 0.0, self._pilot, gated)
            plan = replace(plan, first_items=plan.items)  # and stays so
        context.run.keep(LOOKS, PLANNED, plan.written())
        stored = RowsPlan.of(context.run.provenance())  # another process may have been faster
        assert stored is not None
        for line in plan_lines(stored, context.spec, shares):
            context.print_line(line)

    def _correct_plan(self, plan: RowsPlan, looks: Sequence[Mapping[str, Any]]) -> None:
        """Store the plan again, now with as many rows as fit into the time at the speed of the rows so far."""
        gated = {facet_of(metric)[0] for metric in self.context.spec.gate.margins}
        items = corrected_items(plan, looks, self._minutes, gated)
        self.context.run.note(**{LOOKS: {PLANNED: replace(plan, items=items, first_items=plan.items).written()}})
        changed = [f"{suite} up to {rows} rows" for suite, rows in items.items() if rows != plan.items[suite]]
        if changed:
            self.context.print_line(f"by the time that the first rows took: {', '.join(changed)}")

    def _eligible_shares(self) -> dict[str, float]:
        """Return {gated metric: share of its suite's rows that have its facet}.

        Raises SpecError for a suite with several rows per template: a round could end in the middle of one.
        """
        spec, count = self.context.spec, self.context.models.base().chat.count_tokens
        shares = dict[str, float]()
        for name in spec.evaluate.suites:
            rows = layout_of(spec, name, count)
            if len({row.cluster for row in rows}) < len(rows):
                raise SpecError(
                    f"suite {name} asks several rows of a template, but evaluate.rounds needs suites with one row per "
                    "template; use harm, benign or injection, or remove rounds"
                )
            for suite, facet, metric in ((*facet_of(metric), metric) for metric in spec.gate.margins):
                if suite == name:
                    shares[metric] = sum(facet.name in row.facets for row in rows) / len(rows)
        return shares

    def _seconds_per_row(self) -> dict[str, float]:
        """Return by suite the seconds that one row takes under all serving configurations, as measured in the pilot."""
        context = self.context
        seconds, rows = dict[str, float](), dict[str, int]()
        for unit in pilot_units(with_kept_gate(context.spec, context.run.provenance())):
            records = pilot_records(context, unit)
            seconds[unit.suite] = seconds.get(unit.suite, 0.0) + sum(record.seconds for record in records)
            rows[unit.suite] = rows.get(unit.suite, 0) + len(records)
        policies = len(context.spec.evaluate.policies)
        return {suite: policies * total / max(1, rows[suite]) for suite, total in seconds.items()}

    def _ask(self, units: Sequence[Unit], number: int, rows: Mapping[str, range], asked: Mapping[str, int]) -> None:
        """Answer the rows of round ``number``; store how many rows have been asked by now, and the round's seconds.

        ``asked`` is the number of rows before this round, ``rows`` the range to ask now, both by suite.
        """
        folder = self.context.run.path / ROUNDS_FOLDER / str(number)
        make_folder(folder)
        round_units = [unit for unit in units if unit.suite in rows]
        earlier = sum(self._earlier_seconds(folder, unit, rows[unit.suite]) for unit in round_units)
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

    def _earlier_seconds(self, folder: Path, unit: Unit, rows: range) -> float:
        """Return the seconds that the existing answers of a round took: the pilot's, and those of a stopped process.

        They count towards the time limit like the rows that this process asks.
        """
        piloted = UnitFiles.of(self.context.run.path / PILOT_FOLDER, unit)
        copied = len(range(rows.start, min(rows.stop, self._pilot)))
        return written_seconds(piloted, rows) + written_seconds(UnitFiles.of(folder, unit), range(copied, len(rows)))

    def _take_look(self, units: Sequence[Unit], number: int, look: Mapping[str, Any]) -> None:
        """Take a look unless another process has: join the records so far and store the gate's statuses."""
        run = self.context.run
        with mutex(run.path / ".looks.lock"):
            if "words" in all_looks(run.provenance())[number - 1]:
                return
            join_rounds(run.path, units, all_looks(run.provenance())[:number])
            run.note(**{LOOKS: {str(number): {**look, "words": gate_statuses(run.path)}}})
        self.context.print_line(list(look_lines(run.provenance()))[-1])


def join_rounds(run: Path, units: Sequence[Unit], looks: Sequence[Mapping[str, Any]]) -> None:
    """Write and seal each unit's record file, joined from its files of all rounds so far.

    ``looks`` has one entry for each round. Raises DataError if the file of a round is missing, is not sealed, or
    differs from its seal.
    """
    for unit in units:
        counts = [0, *(table_of(look, "items").get(unit.suite, 0) for look in looks)]
        rounds = [number for number, (before, after) in enumerate(pairwise(counts), start=1) if after > before]
        parts = [UnitFiles.of(run / ROUNDS_FOLDER / str(number), unit) for number in rounds]
        if parts:
            join_files(UnitFiles.of(run / "records", unit), parts)


def gate_statuses(run: Path) -> dict[str, str]:
    """Return {gated metric: its status for the rows asked so far}; among several gated settings the worst counts."""
    data = load_run(run)
    comparison, rules = declared_rules(data, GateOverrides())
    drift = drift_of(data, comparison, rules.alpha, gated_facets(comparison, rules))
    statuses: dict[str, str] = {}
    order = [Status.FAIL.value, *ENDINGS, *OPEN]
    rows_asked, rounds = item_counts(data.provenance), data.spec.evaluate.rounds
    first = FIRST_LOOK if rounds is None else rounds.first
    has_logprobs = bool(data.records[LOGPROB].notna().all())  # without them equal answers show less
    for decision in decide(drift, rules).gated:
        codes = {reason.code for reason in decision.reasons} if decision.status is Status.INVALID else set()
        status = decision.status.value
        if ReasonCode.MISSING in codes:
            status = INVALID_BY_MISSING
        elif ReasonCode.FEW_CLUSTERS in codes and rows_asked.get(suite_of(decision.suite), 0) >= first:
            status = INVALID_BY_FORM
        elif ReasonCode.CANARY in codes and has_logprobs:
            status = INVALID_BY_CANARY
        under_settings = filter(None, (statuses.get(decision.suite), status))
        statuses[decision.suite] = min(under_settings, key=lambda s: order.index(s) if s in order else len(order))
    return statuses


def look_lines(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for every look of a run, and one about why the looks ended."""
    for number, look in enumerate(all_looks(provenance), start=1):
        items = ", ".join(f"{suite} {rows}" for suite, rows in table_of(look, "items").items())
        statuses = ", ".join(f"{metric} {status}" for metric, status in table_of(look, "words").items())
        yield f"look {number}: {items}: {statuses}"
    if ended := table_of(provenance, LOOKS).get(ENDED):
        yield f"ended: {ended}"
