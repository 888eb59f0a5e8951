"""The pilot stage: the reference answers some items of every suite before the grid is answered.

RUN/pilot holds the answers, sealed like those of any unit; the grid (the main evaluation) copies them. The conclusions
(``kvaudit.audit.runs.pilot``) are stored in provenance.json once, and every process reads them there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvaudit.audit.engines import Condition
from kvaudit.audit.engines.endpoint import RunningEndpoint
from kvaudit.audit.runs.batches import engine_batches
from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.folder import make_folder
from kvaudit.audit.runs.pilot import layout_of, most_items, pilot_results, pilot_units, with_kept_gate
from kvaudit.audit.runs.progress import Part, duration
from kvaudit.audit.runs.stages.base import RunContext, Stage, UnitWorker, is_sealed, unit_part
from kvaudit.audit.runs.units import PILOT_FOLDER, Unit, UnitFiles, sealed_records
from kvaudit.core.errors import NotMeasurable
from kvaudit.core.facets import FACETS, is_well_formed
from kvaudit.core.provenance import ANYWAY, PILOT, PILOT_RESULT
from kvaudit.core.records import Record
from kvaudit.core.spec import RunSpec
from kvaudit.core.text import at_length
from kvaudit.reports.records.load import SAME_ORDER
from kvaudit.reports.verdict.rules import WARN
from kvaudit.suites.base import SUITES

_SAFETY_SUITES = ("harm", "benign")  # without one of these a check shows too little


class PilotStage(Stage):
    """Answers the pilot's units: some items of every suite, asked of the reference.

    Then it stores whether the reference has anything to lose, and how many items to ask of each suite.
    """

    def parts(self) -> Iterator[Part]:
        return iter(()) if self.is_done else self._unit_parts(self._units)

    @property
    def is_done(self) -> bool:
        """Whether the pilot's result is stored, or the run needs no pilot.

        A run of an earlier version with sealed units counts as done, since a pilot would answer them twice.
        """
        run, open_suites = self.context.run, self.context.open_suites
        is_past = not open_suites and any(is_sealed(run.records, unit) for unit in grid(self.context.spec))
        return PILOT in run.provenance() or is_past or not (open_suites or self._units)

    def work(self) -> RunContext:
        """Answer the units, print the results, and return a context with the numbers of items.

        Raises NotMeasurable if the reference has nothing to lose in a suite, unless the run is to go on anyway.
        """
        context = self.context
        if not self.is_done:
            units = self._units
            make_folder(self._folder)
            UnitWorker(context).work("first questions", self._folder, units, partial(self._unit_parts, units))
            if PILOT not in context.run.provenance():  # another process may have noted it in the meantime
                context.run.keep(PILOT, PILOT_RESULT, self._results(units))
        provenance = context.run.provenance()
        if PILOT in provenance:
            results = provenance[PILOT][PILOT_RESULT]
            is_in_rounds = context.spec.evaluate.rounds is not None
            for line in pilot_lines(results, suites_left_out(results) if is_in_rounds else ()):
                context.print_line(line)
            context = context.sized(results["items"])
            self.check()
            self._print_time(context)
        return context

    def _print_time(self, context: RunContext) -> None:
        """Print how long the rest of the run takes at the pilot's speed, if all its engines are running servers."""
        units, evaluate = self._units, context.spec.evaluate
        served = {unit.policy.engine for unit in units if isinstance(unit.policy, Condition)}
        if served != {RunningEndpoint.name} or evaluate.rounds is not None:
            return
        seconds, answers = 0.0, 0
        for unit in units:
            records = pilot_records(context, unit)
            suite, batches = SUITES.get(unit.suite)(), context.models.batches.get((unit.suite, unit.context_tokens), [])
            items = [item for batch in batches for item in batch]
            floor = sum(map(len, engine_batches(context.spec, suite, items, unit, SAME_ORDER))) if evaluate.floor else 0
            remaining = max(0, context.rows_of(unit) - len(records)) + 2 * floor
            seconds += remaining * sum(record.seconds for record in records) / max(1, len(records))
            answers += remaining
        context.print_line(f"{answers} answers are left, about {duration(seconds)} at the speed of the first ones")

    def check(self) -> None:
        """Raise NotMeasurable if the stored results say that the reference has nothing to lose in some suite."""
        provenance = self.context.run.provenance()
        if PILOT in provenance and ANYWAY not in provenance:
            check_measurable(with_kept_gate(self.context.spec, provenance), provenance[PILOT][PILOT_RESULT])

    @property
    def _folder(self) -> Path:
        return self.context.run.path / PILOT_FOLDER

    @property
    def _units(self) -> list[Unit]:
        return pilot_units(with_kept_gate(self.context.spec, self.context.run.provenance()))

    def _unit_parts(self, units: Sequence[Unit]) -> Iterator[Part]:
        for unit in units:
            rows = self.context.rows_of(unit, self.context.spec.evaluate.pilot_size)
            yield unit_part(self._folder, unit, rows, rows)

    def _results(self, units: Sequence[Unit]) -> dict[str, Any]:
        spec, models = self.context.spec, self.context.models
        count = models.base().chat.count_tokens
        answers = {unit: pilot_records(self.context, unit) for unit in units}
        layouts = {name: layout_of(spec, name, count) for name in self.context.open_suites}
        most = {name: most_items(spec, name, layout, count) for name, layout in layouts.items()}
        return pilot_results(with_kept_gate(spec, self.context.run.provenance()), answers, layouts, most)


def pilot_records(context: RunContext, unit: Unit) -> list[Record]:
    """Return the pilot's records of a unit; raise DataError if they differ from their seal."""
    files = UnitFiles.of(context.run.path / PILOT_FOLDER, unit)
    identity = unit.identity(context.models.sha256_of((unit.arm, unit.seed)))
    return list(sealed_records(files, identity).values())


# --- reading the results ---------------------------------------------------------------------------------------------


def pilot_lines(results: Mapping[str, Any], left_out: Collection[str] = ()) -> Iterator[str]:
    """Yield a line for each gated metric and length (can a loss be measured?), then each suite's number of items.

    ``left_out`` are the suites that are not asked any further.
    """
    lengths = {control["context_tokens"] for control in results["controls"]}
    for control in results["controls"]:
        name = control["metric"] + (f" {at_length(control['context_tokens'])}" if len(lengths) > 1 else "")
        name += f" under {control['under']}" if "under" in control else ""
        yield f"{name}: {_control_text(control, is_left_out=control['suite'] in left_out)}"
    for suite, items in results["items"].items():
        yield f"{suite}: {items} items{_reason_for_size(suite, results['sizes'])}"


def _control_text(control: Mapping[str, Any], *, is_left_out: bool) -> str:
    if control["measurable"]:
        return f"measurable ({control['rate'] * control['answers']:.4g} of {control['answers']})"
    if control["hopeless"]:
        return f"NOT MEASURABLE: {control['standing']}, {control['says']}"
    end = "more is not asked" if is_left_out else "all answers together will"
    return f"open: {control['says']}; the pilot is too small to decide, {end}"


def _reason_for_size(suite: str, sizes: Mapping[str, Any]) -> str:
    # sizes are named after the suite's score or after one of its facets
    suite_sizes = {name: size for name, size in sizes.items() if suite in (name, name.rpartition(".")[0])}
    if not suite_sizes:
        return ", every template with each of its twins"
    name, size = max(suite_sizes.items(), key=lambda pair: pair[1]["items"])
    return f" for {name}: {size['chance']:.0%} to pass if {size['discordance']:.1%} differ"


def hopeless_suites(results: Mapping[str, Any]) -> dict[str, str]:
    """Return {suite: reason} for suites in which even more answers could not make any gated metric measurable."""
    return {
        suite: f"{controls[0]['standing']}, {controls[0]['says']}"
        for suite, controls in _controls_by_suite(results).items()
        if all(control["hopeless"] for control in controls)
    }


def suites_left_out(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the suites that rounds do not ask because the reference has nothing to lose, each with the reason.

    The suites ``harm`` and ``benign`` are left out only if more answers could hardly change that. The same holds for
    every safety suite if otherwise none would remain.
    """
    controls = _controls_by_suite(results)
    unmeasured = {suite: [row for row in rows if not row["measurable"]] for suite, rows in controls.items()}
    reasons = {suite: _left_out_reason(rows[0]) for suite, rows in unmeasured.items() if rows}
    safety = {suite for suite, rows in controls.items() if any(_is_safety(row["metric"]) for row in rows)}
    required = {suite for suite in controls if suite.partition("@")[0] in _SAFETY_SUITES}
    required |= safety if safety <= reasons.keys() else set()
    hopeless = hopeless_suites(results)
    return {suite: reason for suite, reason in reasons.items() if suite not in required or suite in hopeless}


def _left_out_reason(control: Mapping[str, Any]) -> str:
    """Return why a suite is left out: a count, and what follows, as in "attacks that succeed: 10 of 20, at floor"."""
    _, _, name = control["metric"].rpartition(".")
    facet, answers = FACETS.get(name), control.get("answers", 0)
    desired = control.get("rate", 0.0) * answers
    if facet is None:
        return f"{control['standing']}, {control['says']}"
    count = f"{facet.counts}: {desired if facet.wanted else answers - desired:.0f} of {answers}"
    is_undecided = "not shown to tell the two apart" in control["says"]
    return f"{count}, {'not told apart from what is allowed' if is_undecided else control['standing']}"


def _controls_by_suite(results: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the controls of each suite; if it has several, the one for readable answers is left out.

    That answers can be read says nothing about safety.
    """
    suites: dict[str, list[Mapping[str, Any]]] = {}
    for control in results["controls"]:
        suites.setdefault(control["suite"], []).append(control)
    return {
        suite: [c for c in controls if not is_well_formed(c["metric"])] or controls
        for suite, controls in suites.items()
    }


def _is_safety(metric: str) -> bool:
    suite, _, facet = metric.rpartition(".")
    return bool(suite) and facet in FACETS and FACETS[facet].kind == "safety"


def check_measurable(spec: RunSpec, results: Mapping[str, Any]) -> None:
    """Raise NotMeasurable, with a line for every suite in which no gated cell can be measured.

    Does nothing if the gate allows such cells (``not_measurable: warn``). Does nothing in rounds either, which leave
    such suites out.
    """
    if spec.gate.not_measurable == WARN or spec.evaluate.rounds is not None:
        return
    lines = [f"{suite}: NOT MEASURABLE: {reason}" for suite, reason in hopeless_suites(results).items()]
    if lines:
        raise NotMeasurable(
            f"the reference has nothing to lose in {len(lines)} of {len(spec.evaluate.suites)} suites, so the grid was "
            "not served; ask what the reference can do, or go on with --resume --anyway",
            lines,
        )


def check_any_measurable(results: Mapping[str, Any]) -> None:
    """Raise NotMeasurable, with a line for every suite, if the reference has nothing to lose in any of them."""
    hopeless = hopeless_suites(results)
    if hopeless and hopeless.keys() == _controls_by_suite(results).keys():
        lines = [f"{suite}: NOT MEASURABLE: {reason}" for suite, reason in hopeless.items()]
        raise NotMeasurable(
            "the reference has nothing to lose in any suite, so no more is asked; ask it public rows (kvaudit data "
            "fetch xstest strongreject advbench harmbench), or another model",
            lines,
        )
