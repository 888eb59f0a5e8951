"""The pilot, which asks some items before the rest: which units it asks, and what follows from their answers.

The reference answers some items of every suite at every length, uncompressed and under every gated policy. The answers
show whether a cell has anything to lose (``kvaudit.reports.verdict.controls``) and how many answers a policy changes,
from which ``items: auto`` takes its number (``kvaudit.reports.verdict.sizes``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvaudit.audit.judges.base import JUDGES
from kvaudit.audit.runs.evaluate import grid, make_items, round_size, suite_as_asked
from kvaudit.audit.runs.units import Unit
from kvaudit.core.errors import CannotPass
from kvaudit.core.facets import UNSAFE, WELL_FORMED, facet_of
from kvaudit.core.plugins import parse_plugin
from kvaudit.core.policy_names import condition_names, reference_of, uncompressed_policies
from kvaudit.core.provenance import DEFAULT_MARGINS, table_of
from kvaudit.core.records import Record
from kvaudit.core.spec import RunSpec, with_gate
from kvaudit.core.spec_evaluate import ALL_ITEMS, AUTO_ITEMS
from kvaudit.reports.verdict.controls import Control, Measurability, controls_of
from kvaudit.reports.verdict.rules import recorded_gate_file
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
from kvaudit.suites.base import CountTokens

_UNGATED_ITEMS = 128  # at most, for an open suite of which nothing is gated
_MOST_ROUNDS = 4  # of a suite that generates its items; the rows of others are asked once
Answers = Mapping[Unit, Sequence[Record]]


def with_kept_gate(spec: RunSpec, provenance: Mapping[str, Any]) -> RunSpec:
    """Return the spec with its gate section taken from the gate file that was stored when the run began, if any."""
    file = recorded_gate_file(provenance)
    return spec if file is None else with_gate(spec, file, defaults=table_of(provenance, DEFAULT_MARGINS))


def pilot_units(spec: RunSpec, units: Sequence[Unit] | None = None) -> list[Unit]:
    """Return the units of which the pilot asks some items: the reference arm's, uncompressed and under gated policies.

    For a gated engine setting, the uncompressed units are those under its reference setting. ``units`` is the grid, if
    the caller has it already.
    """
    if not spec.evaluate.pilot_size:
        return []
    policies = {*spec.gate.primary, *_reference_policies(spec)}
    reference_units = [unit for unit in (grid(spec) if units is None else units) if unit.arm == spec.gate.reference]
    return [unit for unit in reference_units if unit.policy.canonical in policies]


def _reference_policies(spec: RunSpec) -> list[str]:
    """Return the uncompressed policies that gated policies are compared with.

    If no policy is gated, return all uncompressed ones.
    """
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
    """Return the cluster and the facets of each item in one round of a suite (all clusters, or all public rows)."""
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


# --- what cannot pass ------------------------------------------------------------------------------------------------


def impossible_cells(spec: RunSpec, count: CountTokens) -> Iterator[str]:
    """Yield a line for each gated metric that cannot pass with its suite's items, with the number needed to pass."""
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
    """Raise CannotPass if a gated metric could not pass even with perfect answers, with a line for each such metric."""
    if lines := tuple(impossible_cells(spec, count)):
        raise CannotPass(
            "the spec asks for a decision that its items cannot give; ask the number that would do, or run it as a "
            "description with --anyway",
            lines,
        )


# --- what follows from the answers -----------------------------------------------------------------------------------


class Churn(NamedTuple):
    """How many answers a gated policy changes.

    Of ``pairs`` items answered both uncompressed and under the policy, ``differing`` have different values of a metric.
    """

    differing: int
    pairs: int


def pilot_results(
    spec: RunSpec, answers: Answers, layouts: Mapping[str, Layout], most: Mapping[str, int]
) -> dict[str, Any]:
    """Return the pilot's results, a table with the keys ``controls``, ``items`` and ``sizes`` for provenance.json.

    ``controls`` say whether the reference has anything to lose. ``items`` has how many items to ask of each suite whose
    spec has ``items: auto`` or ``all``, and ``sizes`` why so many. Of these suites, ``layouts`` has the cluster and
    facets of each item, and ``most`` the largest number of items to ask.
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
    """Return a table for provenance.json: how many items a metric needs (at most ``most``), and why.

    The number is planned for the length and policy at which most of the pilot's answers changed.
    """
    worst = max(churns_of(spec, metric, answers), key=lambda c: planned_discordance(c.differing, c.pairs), default=None)
    discordance = ASSUMED_CHURN if worst is None else planned_discordance(worst.differing, worst.pairs)
    plan = plan_items(layout, metric, _design(spec, metric, discordance), most)
    pilot = None if worst is None else worst._asdict()
    return {**plan._asdict(), "discordance": discordance, "pilot": pilot}


def _design(spec: RunSpec, metric: Metric, discordance: float) -> Design:
    """Return the design, without a true drift, from which the number of items that a metric needs is computed.

    ``discordance`` is the share of items whose answers differ between the sides.
    """
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
    """Yield, for each gated policy and length, how many answers differ from the uncompressed ones in a metric.

    Answers of all seeds are counted together.
    """
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
    """Return the most items to ask of a suite: one round (``layout``), or several if further ones ask new questions."""
    suite, section = suite_as_asked(spec, name), spec.evaluate
    if suite.rows("eval", section.seed) is not None:
        return len(layout)
    context, items = min(section.contexts_of(name)), 2 * len(layout)
    prompts = [item.messages for item in make_items("evaluate", suite, "eval", items, section.seed, context, count)]
    return len(layout) * (_MOST_ROUNDS if len(set(prompts)) == len(prompts) else 1)
