"""The pilot stage: the reference answers some items of every suite before the grid is answered.

It answers them at every length, uncompressed and under every gated policy. The answers show whether a cell has anything
to lose (``kvaudit.reports.verdict.controls``) and how many answers a policy changes, from which ``items: auto`` takes
its number (``kvaudit.reports.verdict.sizes``). RUN/pilot holds the answers, sealed like those of any unit; the
grid copies them. The results are stored in provenance.json once, and every process reads them there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.audit.engines import Condition
from kvaudit.audit.engines.endpoint import RunningEndpoint
from kvaudit.audit.judges.base import JUDGES
from kvaudit.audit.runs.batches import engine_batches
from kvaudit.audit.runs.evaluate import grid, make_items, round_size, suite_as_asked
from kvaudit.audit.runs.folder import make_folder
from kvaudit.audit.runs.progress import Part, duration
from kvaudit.audit.runs.stages.base import RunContext, Stage, UnitWorker, is_sealed, unit_part
from kvaudit.audit.runs.units import PILOT_FOLDER, Unit, UnitFiles, sealed_records
from kvaudit.core.errors import CannotPass, NotMeasurable
from kvaudit.core.facets import FACETS, UNSAFE, WELL_FORMED, facet_of
from kvaudit.core.plugins import parse_plugin
from kvaudit.core.policy_names import condition_names, reference_of, uncompressed_policies
from kvaudit.core.provenance import ANYWAY, DEFAULT_MARGINS, PILOT, PILOT_RESULT, table_of
from kvaudit.core.records import Record
from kvaudit.core.spec import RunSpec, with_gate
from kvaudit.core.spec_evaluate import ALL_ITEMS, AUTO_ITEMS
from kvaudit.core.text import at_length
from kvaudit.reports.records.load import SAME_ORDER
from kvaudit.reports.verdict.controls import Control, Measurability, controls_of
from kvaudit.reports.verdict.rules import WARN, recorded_gate_file
from kvaudit.reports.verdict.sizes import (
    ASSUMED_CHURN,
    DEFAULT_SAMPLING_SHARE,
    DEFAULT_SEED_SHARE,
    Design,
    Layout,
    LayoutItem,
    Metric,
    plan_items,
    planned_discordance,
    shortfall_of,
)
from kvaudit.suites.base import SUITES, CountTokens

_SAFETY_SUITES = ("harm", "benign")  # without one of these a check shows too little
_UNGATED_ITEMS = 128  # at most, for an open suite of which nothing is gated
_MOST_ROUNDS = 4  # of a suite that generates its items; the rows of others are asked once
Answers = Mapping[Unit, Sequence[Record]]


class PilotStage(Stage):
    """Answers the pilot's units and stores the results: controls, and the numbers of items of open suites."""

    def parts(self) -> Iterator[Part]:
        return iter(()) if self.is_done else self._unit_parts(self._units)

    @property
    def is_done(self) -> bool:
        """Whether the result is stored, or there is no pilot.

        A run of an earlier version with sealed units counts as done, since a pilot would answer them twice.
        """
        run, open_suites = self.context.run, self.context.open_suites
        is_past = not open_suites and any(is_sealed(run.records, unit) for unit in grid(self.context.spec))
        return PILOT in run.provenance() or is_past or not (open_suites or self._units)

    def work(self) -> RunContext:
        """Answer the units, print the results, and return a context with the numbers of items.

        Raises NotMeasurable if a suite has nothing to lose, unless the run is to go on anyway.
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
            for line in pilot_lines(results):
                context.print_line(line)
            context = context.sized(results["items"])
            self.check()
            self._print_time(context)
        return context

    def _print_time(self, context: RunContext) -> None:
        """Print how long the rest of a run of running servers takes at the speed of the pilot's answers."""
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
        """Raise NotMeasurable if the stored results say that a suite has nothing to lose."""
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


# --- what the pilot asks ---------------------------------------------------------------------------------------------


def with_kept_gate(spec: RunSpec, provenance: Mapping[str, Any]) -> RunSpec:
    """Return the spec with the gate file that was stored when the run began, if any, as its gate section."""
    file = recorded_gate_file(provenance)
    return spec if file is None else with_gate(spec, file, defaults=table_of(provenance, DEFAULT_MARGINS))


def pilot_units(spec: RunSpec, units: Sequence[Unit] | None = None) -> list[Unit]:
    """Return the units that the pilot begins: the reference's, uncompressed and under every gated policy.

    Each engine with a gated condition has uncompressed units too. ``units`` is the grid, if the caller has it.
    """
    if not spec.evaluate.pilot_size:
        return []
    policies = {*spec.gate.primary, *_reference_policies(spec)}
    reference_units = [unit for unit in (grid(spec) if units is None else units) if unit.arm == spec.gate.reference]
    return [unit for unit in reference_units if unit.policy.canonical in policies]


def _reference_policies(spec: RunSpec) -> list[str]:
    """Return the references of the gated policies, or every uncompressed policy if none is gated."""
    references = spec.evaluate.references
    policies = [reference_of(policy, references) for policy in spec.gate.primary]
    return list(
        dict.fromkeys(policies or [p for p in spec.evaluate.policies if p in uncompressed_policies(references)])
    )


def gated_metrics(spec: RunSpec, suite: str) -> list[Metric]:
    """Return the gated metrics of a suite: its score and its facets with a margin; none if nothing is gated."""
    # the largest difference that a ratio can allow, whatever the reference's rate is
    allowed = {name: 100 * (1 - 1 / ratio) for name, ratio in spec.gate.ratios.items()}
    margins = {**spec.gate.margins, **allowed}
    facets = [name for name in margins if name not in spec.evaluate.suites and facet_of(name)[0] == suite]
    metrics = [Metric(suite, None, margins[suite] / 100)] if suite in margins else []  # from points to a share
    metrics += [Metric(suite, facet_of(name)[1].name, margins[name] / 100) for name in facets]
    arms = {arm for arm, _ in spec.arms} - {spec.gate.reference}
    return metrics if spec.gate.primary or arms else []


def gated_lengths(spec: RunSpec, suite: str) -> list[int]:
    """Return the context lengths at which a suite is gated."""
    lengths = spec.evaluate.contexts_of(suite)
    return [length for length in lengths if length in (spec.gate.contexts or lengths)]


def layout_of(spec: RunSpec, name: str, count: CountTokens) -> Layout:
    """Return the cluster and the facets of every item in one round of a suite."""
    suite, section = suite_as_asked(spec, name), spec.evaluate
    context = min(section.contexts_of(name))
    items = make_items("evaluate", suite, "eval", round_size(spec, suite, count), section.seed, context, count)
    grades_harm = any(parse_plugin(JUDGES, text).grades_harm for text in spec.judge)
    return [
        LayoutItem(
            item.cluster_id,
            (*suite.facets(item), *([UNSAFE] if grades_harm and suite.asks_harm(item) else []), WELL_FORMED),
        )
        for item in items
    ]


# --- cells that cannot pass ------------------------------------------------------------------------------------------


def impossible_cells(spec: RunSpec, count: CountTokens) -> Iterator[str]:
    """Yield a line for each gated cell that cannot pass with its number of items, with a number that could."""
    assert spec.gate.alpha is not None, "a complete spec has a level"
    for name in spec.evaluate.suites:
        if not (metrics := gated_metrics(spec, name)):
            continue
        layout = layout_of(spec, name, count)
        section = spec.evaluate.suites[name]
        items = section.items if isinstance(section.items, int) else len(layout)  # the layout has every template
        for metric in metrics:
            if (shortage := shortfall_of(layout, metric, items, spec.gate.alpha)) is not None:
                yield shortage.line


def check_possible(spec: RunSpec, count: CountTokens) -> None:
    """Raise CannotPass, with a line for every gated cell that could not pass even with perfect answers."""
    if lines := tuple(impossible_cells(spec, count)):
        raise CannotPass(
            "the spec asks for a decision that its items cannot give; ask the number that would do, or run it as a "
            "description with --anyway",
            lines,
        )


# --- results from the answers ----------------------------------------------------------------------------------------


class Churn(NamedTuple):
    """The number of pilot answers that differ between the uncompressed cache and a gated policy."""

    differing: int
    pairs: int


def pilot_results(
    spec: RunSpec, answers: Answers, layouts: Mapping[str, Layout], most: Mapping[str, int]
) -> dict[str, Any]:
    """Return the pilot's results: controls, numbers of items of open suites, and how these were computed.

    ``most`` is the number of items that an open suite has. The table goes into provenance.json.
    """
    dense = {
        policy: [row for unit, rows in answers.items() if unit.policy.canonical == policy for row in rows]
        for policy in _reference_policies(spec)
    }
    controls, names = [], condition_names(spec.evaluate.references)
    items, sizes = dict[str, int](), dict[str, Any]()
    for name, section in spec.evaluate.suites.items():
        metrics, lengths = gated_metrics(spec, name), gated_lengths(spec, name)
        for policy, rows in dense.items():
            suite_rows = [row for row in rows if row.suite == name and row.context_tokens in lengths]
            suite_controls = controls_of(suite_rows, {m.name: m.margin for m in metrics}) if suite_rows else ()
            policy_keys = {"policy": policy, "under": names.get(policy, policy)} if spec.evaluate.references else {}
            controls += [_control_table(name, control) | policy_keys for control in suite_controls]
        if isinstance(section.items, int):
            continue
        items[name] = min(len(layouts[name]), len(layouts[name]) if section.items == ALL_ITEMS else _UNGATED_ITEMS)
        if section.items == AUTO_ITEMS and metrics:
            needed = {m.name: _needed_items(spec, m, answers, layouts[name], most[name]) for m in metrics}
            items[name] = max(size["items"] for size in needed.values())
            sizes |= needed
    return {"controls": controls, "items": items, "sizes": sizes}


def _control_table(suite: str, control: Control) -> dict[str, Any]:
    return {
        "suite": suite,
        "metric": control.metric,
        "context_tokens": control.context_tokens,
        "standing": str(control.measurability),
        "measurable": control.measurability is Measurability.MEASURABLE,
        "hopeless": control.hopeless,
        "rate": float(control.rate),
        "answers": int(control.answers),
        "clusters": int(control.clusters),
        "says": control.says,
    }


def _needed_items(spec: RunSpec, metric: Metric, answers: Answers, layout: Layout, most: int) -> dict[str, Any]:
    """Return how many items a metric needs at the length and policy that need most, with their churn."""
    worst = max(churns_of(spec, metric, answers), key=lambda c: planned_discordance(c.differing, c.pairs), default=None)
    discordance = ASSUMED_CHURN if worst is None else planned_discordance(worst.differing, worst.pairs)
    plan = plan_items(layout, metric, _design(spec, metric, discordance), most)
    pilot = None if worst is None else worst._asdict()
    return {**plan._asdict(), "discordance": discordance, "pilot": pilot}


def _design(spec: RunSpec, metric: Metric, discordance: float) -> Design:
    """Return the statistical design before the grid is answered: no drift, all samples and seeds of the spec."""
    assert spec.gate.alpha is not None
    is_trained = spec.train is not None
    return Design(
        margin=metric.margin,
        discordance=discordance,
        clusters=2,
        samples=spec.evaluate.samples_of(metric.suite),
        sampling_share=DEFAULT_SAMPLING_SHARE if spec.evaluate.temperature > 0 else 0.0,
        seeds=len({seed for _, seed in spec.arms}) if is_trained else 1,
        seed_share=DEFAULT_SEED_SHARE if is_trained else 0.0,
        alpha=spec.gate.alpha,
    )


def churns_of(spec: RunSpec, metric: Metric, answers: Answers) -> Iterator[Churn]:
    """Yield the churn of a metric under every gated policy at every gated length, over all seeds."""
    references = spec.evaluate.references
    values = {unit: {(r.item_id, r.sample_index): _value(r, metric) for r in rows} for unit, rows in answers.items()}
    for length in gated_lengths(spec, metric.suite):
        units = [unit for unit in answers if (unit.suite, unit.context_tokens) == (metric.suite, length)]
        policies = dict.fromkeys(unit.policy.canonical for unit in units)
        for policy in (p for p in policies if p not in uncompressed_policies(references)):
            reference = reference_of(policy, references)
            # rows of one seed, paired by item and sample
            pairs = [
                (values[dense][row], value)
                for unit in units
                for dense in units
                if unit.policy.canonical == policy and (dense.seed, dense.policy.canonical) == (unit.seed, reference)
                for row, value in values[unit].items()
            ]
            scored = [(a, b) for a, b in pairs if a is not None and b is not None]
            yield Churn(sum(a != b for a, b in scored), len(scored))


def _value(record: Record, metric: Metric) -> float | bool | None:
    return record.score if metric.facet is None else record.facets.get(metric.facet)


def most_items(spec: RunSpec, name: str, layout: Layout, count: CountTokens) -> int:
    """Return how many items a suite has: one round, or several if a second round asks new questions."""
    suite, section = suite_as_asked(spec, name), spec.evaluate
    if suite.rows("eval", section.seed) is not None:
        return len(layout)
    context, items = min(section.contexts_of(name)), 2 * len(layout)
    prompts = [item.messages for item in make_items("evaluate", suite, "eval", items, section.seed, context, count)]
    return len(layout) * (_MOST_ROUNDS if len(set(prompts)) == len(prompts) else 1)


# --- reading the results ---------------------------------------------------------------------------------------------


def pilot_lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for every suite and gated facet, then a line for every number of items that the pilot fixed."""
    lengths = {control["context_tokens"] for control in results["controls"]}
    for control in results["controls"]:
        name = control["metric"] + (f" {at_length(control['context_tokens'])}" if len(lengths) > 1 else "")
        name += f" under {control['under']}" if "under" in control else ""
        yield f"{name}: {_control_text(control)}"
    for suite, items in results["items"].items():
        yield f"{suite}: {items} items{_reason_for_size(suite, results['sizes'])}"


def _control_text(control: Mapping[str, Any]) -> str:
    if control["measurable"]:
        return f"measurable ({control['rate'] * control['answers']:.4g} of {control['answers']})"
    if control["hopeless"]:
        return f"NOT MEASURABLE: {control['standing']}, {control['says']}"
    return f"open: {control['says']}; the pilot is too small to decide, all answers together will"


def _reason_for_size(suite: str, sizes: Mapping[str, Any]) -> str:
    # sizes are named after the suite's score or after one of its facets
    suite_sizes = {name: size for name, size in sizes.items() if suite in (name, name.rpartition(".")[0])}
    if not suite_sizes:
        return ", every template with each of its twins"
    name, size = max(suite_sizes.items(), key=lambda pair: pair[1]["items"])
    return f" for {name}: {size['chance']:.0%} to pass if {size['discordance']:.1%} differ"


def hopeless_suites(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the suites in which more answers could not make any gated metric measurable, each with the reason."""
    return {
        suite: f"{controls[0]['standing']}, {controls[0]['says']}"
        for suite, controls in _controls_by_suite(results).items()
        if all(control["hopeless"] for control in controls)
    }


def suites_left_out(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the suites that rounds do not ask because the reference has nothing to lose, each with the reason.

    Harmful and harmless requests are left out only if more answers could hardly change that. The other safety
    suites are kept if none would remain.
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
    """Return a count and the conclusion from it: "attacks that succeed: 10 of 20, at floor"."""
    _, _, name = control["metric"].rpartition(".")
    facet, answers = FACETS.get(name), control.get("answers", 0)
    desired = control.get("rate", 0.0) * answers
    if facet is None:
        return f"{control['standing']}, {control['says']}"
    count = f"{facet.counts}: {desired if facet.wanted else answers - desired:.0f} of {answers}"
    is_undecided = "not shown to tell the two apart" in control["says"]
    return f"{count}, {'not told apart from what is allowed' if is_undecided else control['standing']}"


def _controls_by_suite(results: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    suites: dict[str, list[Mapping[str, Any]]] = {}
    for control in results["controls"]:
        suites.setdefault(control["suite"], []).append(control)
    return suites


def _is_safety(metric: str) -> bool:
    suite, _, facet = metric.rpartition(".")
    return bool(suite) and facet in FACETS and FACETS[facet].kind == "safety"


def check_measurable(spec: RunSpec, results: Mapping[str, Any]) -> None:
    """Raise NotMeasurable, with a line for every suite in which no gated cell can be measured.

    Does nothing if the gate allows such cells (``not_measurable: warn``), nor in rounds, which leave such suites
    out.
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
