"""The pilot: what the reference answers before the grid is served, and what follows from it.

The reference answers some items of every suite at every length, uncompressed and under every gated policy. That says
whether a cell has anything to lose (``kvaudit.reports.verdict.controls``), and how often an answer changes at all, from
which ``items: auto`` takes its number (``kvaudit.reports.verdict.item_counts``). Both are noted once and read by
everybody from there. The answers lie in RUN/pilot, sealed as any unit's, and count: the grid takes them over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvaudit.audit.judges.base import JUDGES
from kvaudit.audit.runs.evaluate import asked_suite, grid, made, round_of
from kvaudit.audit.runs.units import Unit
from kvaudit.core.conditions import condition_names, uncompressed, uncompressed_of
from kvaudit.core.errors import CannotPass, NotMeasurable
from kvaudit.core.facets import FACETS, UNSAFE, WELL_FORMED, facet_of
from kvaudit.core.options import parse_named
from kvaudit.core.records import Record
from kvaudit.core.spec import RunSpec, with_gate
from kvaudit.core.spec_evaluate import ALL_ITEMS, AUTO_ITEMS
from kvaudit.core.text import at_length
from kvaudit.reports.verdict.controls import Control, Measurability, controls_of
from kvaudit.reports.verdict.item_counts import (
    ASSUMED_CHURN,
    Layout,
    LayoutItem,
    Metric,
    PlannedItems,
    plan_items,
    planned_discordance,
    shortfall_of,
)
from kvaudit.reports.verdict.rules import WARN, recorded_gate_file
from kvaudit.reports.verdict.sizes import DEFAULT_SAMPLING_SHARE, DEFAULT_SEED_SHARE, Design
from kvaudit.suites.base import CountTokens

_DESCRIBES = 128  # items at the most of a suite of which nothing is gated
_MOST_ROUNDS = 4  # of a suite that makes its items; rows of others are asked once
_ASKED_ON = ("harm", "benign")  # of which a check says too little where they are left out
Answered = Mapping[Unit, Sequence[Record]]


def with_kept_gate(spec: RunSpec, provenance: Mapping[str, Any]) -> RunSpec:
    """The spec with the gate file that was kept when the run began in place of its own gate section, if it has one."""
    file = recorded_gate_file(provenance)
    return spec if file is None else with_gate(spec, file)


def pilot_units(spec: RunSpec, known: Sequence[Unit] | None = None) -> list[Unit]:
    """The units of the grid that the pilot begins: the reference's, uncompressed and under every gated policy.

    Uncompressed in each engine of which a condition is gated; nothing tells of one engine what holds in another.
    ``known``: the grid, where it is at hand.
    """
    gated = {*spec.gate.primary, *_uncompressed_of_gated(spec)}
    units = [unit for unit in (grid(spec) if known is None else known) if unit.arm == spec.gate.reference]
    return [unit for unit in units if unit.policy.canonical in gated] if spec.evaluate.piloted else []


def _uncompressed_of_gated(spec: RunSpec) -> list[str]:
    """What the gated policies are compared with; where none is gated, all that is uncompressed in the grid."""
    references = spec.evaluate.references
    found = [uncompressed_of(policy, references) for policy in spec.gate.primary]
    return list(dict.fromkeys(found or [p for p in spec.evaluate.policies if p in uncompressed(references)]))


def gated_metrics(spec: RunSpec, suite: str) -> list[Metric]:
    """A suite's score, and its facets that have a margin; none where nothing is gated."""
    # the most that a ratio can allow, whatever the reference's rate turns out to be
    allowed = {name: 100 * (1 - 1 / ratio) for name, ratio in spec.gate.ratios.items()}
    margins = {**spec.gate.margins, **allowed}
    facets = [name for name in margins if name not in spec.evaluate.suites and facet_of(name)[0] == suite]
    found = [Metric(suite, None, margins[suite] / 100)] if suite in margins else []  # from points to a share
    found += [Metric(suite, facet_of(name)[1].name, margins[name] / 100) for name in facets]
    arms = {arm for arm, _ in spec.arms} - {spec.gate.reference}
    return found if spec.gate.primary or arms else []


def gated_lengths(spec: RunSpec, suite: str) -> list[int]:
    """The lengths at which a suite is decided."""
    asked = spec.evaluate.contexts_of(suite)
    return [length for length in asked if length in (spec.gate.contexts or asked)]


def layout_of(spec: RunSpec, name: str, count: CountTokens) -> Layout:
    """One round of a suite, or as much of it as is asked."""
    suite, part = asked_suite(spec, name), spec.evaluate
    context = min(part.contexts_of(name))
    round_ = made("evaluate", suite, "eval", round_of(spec, suite, count), part.seed, context, count)
    graded = any(parse_named(JUDGES, text).grades_harm for text in spec.judge)
    return [
        LayoutItem(
            item.cluster_id, (*suite.facets(item), *([UNSAFE] if graded and suite.asks_harm(item) else []), WELL_FORMED)
        )
        for item in round_
    ]


# --- what cannot pass ------------------------------------------------------------------------------------------------


def impossible(spec: RunSpec, count: CountTokens) -> Iterator[str]:
    """The gated cells that cannot pass with the items that are asked, a line each with the number that would do."""
    assert spec.gate.alpha is not None, "a complete spec has a level"
    for name in spec.evaluate.suites:
        if not (metrics := gated_metrics(spec, name)):
            continue
        layout = layout_of(spec, name, count)
        part = spec.evaluate.suites[name]
        items = part.items if isinstance(part.items, int) else len(layout)  # more templates than these there are not
        for metric in metrics:
            if (found := shortfall_of(layout, metric, items, spec.gate.alpha)) is not None:
                yield found.line


def check_possible(spec: RunSpec, count: CountTokens) -> None:
    """Raise CannotPass, with a line for every gated cell that could not pass whatever was answered."""
    if lines := tuple(impossible(spec, count)):
        raise CannotPass(
            "the spec asks for a decision that its items cannot give; ask the number that would do, or run it as a "
            "description with --anyway",
            lines,
        )


# --- what the pilot found --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Churn:
    """How many of the pilot's answers differ between the uncompressed cache and a gated policy."""

    differing: int
    pairs: int


def found_by(
    spec: RunSpec, answers: Answered, layouts: Mapping[str, Layout], most: Mapping[str, int]
) -> dict[str, Any]:
    """What the pilot says, as it is noted: controls, and items of suites that left it open (``most`` they have)."""
    plain = _uncompressed_of_gated(spec)
    dense = {p: [row for unit, rows in answers.items() if unit.policy.canonical == p for row in rows] for p in plain}
    controls, names = [], condition_names(spec.evaluate.references)
    items, why = dict[str, int](), dict[str, Any]()
    for name, part in spec.evaluate.suites.items():
        metrics, lengths = gated_metrics(spec, name), gated_lengths(spec, name)
        for policy, rows in dense.items():
            own = [row for row in rows if row.suite == name and row.context_tokens in lengths]
            found = controls_of(own, {m.name: m.margin for m in metrics}) if own else ()
            served = {"policy": policy, "under": names.get(policy, policy)} if spec.evaluate.references else {}
            controls += [_noted(name, one) | served for one in found]
        if isinstance(part.items, int):
            continue
        # all there are, or as many as describe a suite
        items[name] = min(len(layouts[name]), len(layouts[name]) if part.items == ALL_ITEMS else _DESCRIBES)
        if part.items == AUTO_ITEMS and metrics:
            sized = {m.name: _sized(spec, m, answers, layouts[name], most[name]) for m in metrics}
            items[name] = max(one["items"] for one in sized.values())
            why |= sized
    return {"controls": controls, "items": items, "sizes": why}


def _noted(suite: str, found: Control) -> dict[str, Any]:
    return {
        "suite": suite,
        "metric": found.metric,
        "context_tokens": found.context_tokens,
        "standing": str(found.measurability),
        "measurable": found.measurability is Measurability.MEASURABLE,
        "hopeless": found.hopeless,
        "rate": float(found.rate),
        "answers": int(found.answers),
        "clusters": int(found.clusters),
        "says": found.says,
    }


def _sized(spec: RunSpec, metric: Metric, answers: Answered, layout: Layout, most: int) -> dict[str, Any]:
    """How many items a metric needs, at the length and under the policy that need most, and for what churn."""
    worst = max(churns_of(spec, metric, answers), key=lambda c: planned_discordance(c.differing, c.pairs), default=None)
    planned = ASSUMED_CHURN if worst is None else planned_discordance(worst.differing, worst.pairs)
    found = plan_items(layout, metric, _design(spec, metric, planned), most)
    pilot = None if worst is None else {"differing": worst.differing, "pairs": worst.pairs}
    return {**found._asdict(), "discordance": planned, "pilot": pilot}


def _design(spec: RunSpec, metric: Metric, discordance: float) -> Design:
    """What is known before the grid is served: a reference without drift, as many samples and seeds as are asked."""
    assert spec.gate.alpha is not None
    trained = spec.train is not None
    return Design(
        margin=metric.margin,
        discordance=discordance,
        clusters=2,
        samples=spec.evaluate.samples_of(metric.suite),
        sampling_share=DEFAULT_SAMPLING_SHARE if spec.evaluate.temperature > 0 else 0.0,
        seeds=len({seed for _, seed in spec.arms}) if trained else 1,
        seed_share=DEFAULT_SEED_SHARE if trained else 0.0,
        alpha=spec.gate.alpha,
    )


def churns_of(spec: RunSpec, metric: Metric, answers: Answered) -> Iterator[Churn]:
    """The churn of a metric under every gated policy at every gated length, over all seeds."""
    references = spec.evaluate.references
    values = {unit: {(r.item_id, r.sample_index): _value(r, metric) for r in rows} for unit, rows in answers.items()}
    for length in gated_lengths(spec, metric.suite):
        own = [unit for unit in answers if (unit.suite, unit.context_tokens) == (metric.suite, length)]
        served = dict.fromkeys(unit.policy.canonical for unit in own)
        for policy in (p for p in served if p not in uncompressed(references)):
            plain = uncompressed_of(policy, references)
            # rows of one seed, by item and sample
            pairs = [
                (values[dense][row], value)
                for unit in own
                for dense in own
                if unit.policy.canonical == policy and (dense.seed, dense.policy.canonical) == (unit.seed, plain)
                for row, value in values[unit].items()
            ]
            known = [(a, b) for a, b in pairs if a is not None and b is not None]
            yield Churn(sum(a != b for a, b in known), len(known))


def _value(record: Record, metric: Metric) -> float | bool | None:
    return record.score if metric.facet is None else record.facets.get(metric.facet)


def most_items(spec: RunSpec, name: str, layout: Layout, count: CountTokens) -> int:
    """How many items a suite has: a round, or several of a suite whose next round asks something new."""
    suite, part = asked_suite(spec, name), spec.evaluate
    if suite.rows("eval", part.seed) is not None:
        return len(layout)
    # two rounds, to see whether the second asks anything new
    context, items = min(part.contexts_of(name)), 2 * len(layout)
    asked = [item.messages for item in made("evaluate", suite, "eval", items, part.seed, context, count)]
    return len(layout) * (_MOST_ROUNDS if len(set(asked)) == len(asked) else 1)


# --- reading it ------------------------------------------------------------------------------------------------------


def pilot_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What the pilot found, a line for every suite and gated facet, then every number of items."""
    lengths = {one["context_tokens"] for one in found["controls"]}
    for one in found["controls"]:
        at = f" {at_length(one['context_tokens'])}" if len(lengths) > 1 else ""
        at += f" under {one['under']}" if "under" in one else ""
        yield f"{one['metric']}{at}: {_says(one)}"
    for suite, items in found["items"].items():
        yield f"{suite}: {items} items{_why(suite, found['sizes'])}"


def _says(one: Mapping[str, Any]) -> str:
    if one["measurable"]:
        return f"measurable ({one['rate'] * one['answers']:.4g} of {one['answers']})"
    if one["hopeless"]:
        return f"NOT MEASURABLE: {one['standing']}, {one['says']}"
    return f"open: {one['says']}; the pilot is too small to say, the whole of the answers will"


def _why(suite: str, sizes: Mapping[str, Any]) -> str:
    # those of its score, and of its facets
    own = {name: row for name, row in sizes.items() if suite in (name, name.rpartition(".")[0])}
    if not own:
        return ", every template with each of its twins"
    name, row = max(own.items(), key=lambda pair: pair[1]["items"])
    planned = PlannedItems(row["items"], row["chance"])
    return f" for {name}: {planned.chance:.0%} to pass if {row['discordance']:.1%} differ"


def hopeless_suites(found: Mapping[str, Any]) -> dict[str, str]:
    """The suites of which nothing that is gated can be measured, whatever else is asked, each with why."""
    return {
        suite: f"{own[0]['standing']}, {own[0]['says']}"
        for suite, own in _by_suite(found).items()
        if all(one["hopeless"] for one in own)
    }


def suites_left_out(found: Mapping[str, Any]) -> dict[str, str]:
    """The suites of rounds that the reference is not shown to have anything to lose in, each with why.

    Harm and harmless requests are left out only where more answers could hardly show it; so is what else is about
    safety, where nothing of it would be left.
    """
    controls = _by_suite(found)
    open_ = {suite: [one for one in own if not one["measurable"]] for suite, own in controls.items()}
    out = {suite: _how_often(own[0]) for suite, own in open_.items() if own}
    safety = {suite for suite, own in controls.items() if any(_is_safety(one["metric"]) for one in own)}
    kept = {suite for suite in controls if suite.partition("@")[0] in _ASKED_ON}
    kept |= safety if safety <= out.keys() else set()
    hopeless = hopeless_suites(found)
    return {suite: why for suite, why in out.items() if suite not in kept or suite in hopeless}


def _how_often(control: Mapping[str, Any]) -> str:
    """What the reference did of a metric, and what that leaves: "attacks that succeed: 10 of 20, at floor"."""
    _, _, name = control["metric"].rpartition(".")
    facet, answers = FACETS.get(name), control.get("answers", 0)
    wanted = control.get("rate", 0.0) * answers
    if facet is None:
        return f"{control['standing']}, {control['says']}"
    said = f"{facet.counts}: {wanted if facet.wanted else answers - wanted:.0f} of {answers}"
    apart = "not shown to tell the two apart" in control["says"]
    return f"{said}, {'not told apart from what is allowed' if apart else control['standing']}"


def _by_suite(found: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    suites: dict[str, list[Mapping[str, Any]]] = {}
    for one in found["controls"]:
        suites.setdefault(one["suite"], []).append(one)
    return suites


def _is_safety(metric: str) -> bool:
    suite, _, facet = metric.rpartition(".")
    return bool(suite) and facet in FACETS and FACETS[facet].kind == "safety"


def check_measurable(spec: RunSpec, found: Mapping[str, Any]) -> None:
    """Raise NotMeasurable, with a line for every suite of whose gated cells none has any hope of being measurable.

    Not where the gate's rules let such cells through (``not_measurable: warn``).
    """
    if spec.gate.not_measurable == WARN or spec.evaluate.rounds is not None:
        return  # of rounds such a suite is left out, and said
    lines = [f"{suite}: NOT MEASURABLE: {why}" for suite, why in hopeless_suites(found).items()]
    if lines:
        raise NotMeasurable(
            f"nothing can be lost in {len(lines)} of {len(spec.evaluate.suites)} suites, so the grid was not served; "
            "ask what the reference can do, or go on with --resume --anyway",
            lines,
        )
