"""The engines that served conditions (policies): settings requested and reported, and how often answers vary by chance.

How often they vary by chance is the A/A floor: how often an engine changes its own answer when it is asked again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvaudit.core.errors import DataError
from kvaudit.core.policy_names import engine_name, engine_settings
from kvaudit.core.provenance import NOT_SHOWN, engine_facts
from kvaudit.core.records import ONE_CACHE, READ_ANEW, SENT_WHOLE
from kvaudit.core.text import inline, join_names, length_label
from kvaudit.reports.records.load import FLOOR_FOLDER, RunData
from kvaudit.reports.sections.base import Depth, Inputs, Section
from kvaudit.reports.sections.shared.floor import FloorUnit, covering_floor, floor_at, floor_of
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, metric_label, percent, plural, points, reference_of
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.verdict import Decided, Decision

ENDPOINT = "endpoint"  # the engine whose server the user started
NO_REPORT = "nothing"  # shown for an engine that reports no settings
_TURNS = {  # ``Record.turns_read`` -> how conversations of several turns were read
    ONE_CACHE: "one cache was kept over all turns",
    READ_ANEW: "each turn was read anew, from the first message",
    SENT_WHOLE: "each request held the whole conversation, and what was kept of earlier turns is the engine's choice",
}


@dataclass(frozen=True)
class Engines:
    """The policies that engines served, each engine's report of its settings, and how it read several turns.

    ``conditions`` and the keys of both mappings are policies. The values of ``turns`` are codes of
    ``Record.turns_read`` (how conversations of several turns were read); it has policies of kvaudit's own cache as
    well.
    """

    conditions: tuple[str, ...]
    reports: Mapping[str, Mapping[str, str]]
    turns: Mapping[str, tuple[str, ...]]


class EnginesSection(Section[Engines]):
    name = "engines"
    title = "Engines"
    explain = (
        "The engine that served each condition, the settings requested in the engine's own terms, and the settings "
        "that it reports. Each condition is compared with the uncompressed one of its own engine."
    )
    reading = (
        "An engine does not show cache bytes, the share of entries kept, or which tokens were kept. This report has no "
        "such numbers for it; absent does not mean zero."
    )
    order = 90
    depth = Depth.VERDICT
    remarks_at = 15

    def compute(self, inputs: Inputs) -> Engines | None:
        sides = inputs.decided.comparison
        conditions = tuple(policy for policy in sides.policies if sides.is_engine(policy))
        reports = {policy: engine_facts(inputs.data.provenance, policy) for policy in conditions}
        return Engines(conditions, reports, _turns_read(inputs.data)) if conditions else None

    def tables(self, value: Engines, decided: Decided) -> Iterator[Table]:
        yield _settings_table(decided.comparison, value.conditions)
        headers = ["engine", "reports", "in its own words", "under"]
        yield table_of(headers, _report_rows(decided.comparison, value), words=4)

    def notes(self, value: Engines, decided: Decided) -> Iterator[str]:
        yield from super().notes(value, decided)
        labels: dict[str, list[str]] = {}
        for policy, words in value.turns.items():
            for word in words:
                labels.setdefault(word, []).append(decided.comparison.label(policy))
        for word, names in labels.items():
            yield inline(f"Conversations of several turns under {join_names(names)}: {_TURNS.get(word, word)}.")

    def finding(self, value: Engines, decided: Decided) -> str:
        engines = list(dict.fromkeys(map(engine_name, value.conditions)))
        reporting = sum(map(bool, value.reports.values()))
        conditions = plural(len(value.conditions), "condition")
        return f"{inline(', '.join(engines))}: {conditions}, {reporting} with settings reported by the engine."

    def remarks(self, value: Engines, decided: Decided) -> Iterator[str]:
        """Yield warnings: parts of a server, such as its weights, that could not be checked against the checkpoint."""
        unseen: dict[str, list[str]] = {}
        for policy, report in value.reports.items():
            if NOT_SHOWN in report:
                unseen.setdefault(report[NOT_SHOWN], []).append(decided.comparison.label(policy))
        for parts, labels in unseen.items():
            yield inline(
                f"The {parts} of {join_names(labels)} could not be checked: that they are the checkpoint's "
                "is only declared."
            )
        if labels := [
            decided.comparison.label(policy) for policy in value.conditions if engine_name(policy) == ENDPOINT
        ]:
            yield inline(
                f"The replicas that may stand behind the address of {join_names(labels)} cannot be told apart: they "
                "count as one server, and one with other settings would not be seen."
            )


def _turns_read(data: RunData) -> dict[str, tuple[str, ...]]:
    """Return by policy the codes of ``Record.turns_read``, taken from one record of each suite."""
    first = data.records.drop_duplicates(["policy", "suite"])
    places = [(str(file), int(line)) for file, line in first[["file", "line"]].itertuples(index=False)]
    turns: dict[str, set[str]] = {}
    for _, record in data.records_at(places):
        if record.turns_read:
            turns.setdefault(record.policy, set()).add(record.turns_read)
    return {policy: tuple(sorted(words)) for policy, words in sorted(turns.items())}


def _settings_table(sides: Comparison, conditions: Sequence[str]) -> Table:
    rows = []
    for policy in conditions:
        settings = ", ".join(f"{name}={value}" for name, value in engine_settings(policy).items()) or "defaults"
        reference = "uncompressed" if sides.is_uncompressed(policy) else sides.label(sides.uncompressed_of(policy))
        rows.append([sides.label(policy), engine_name(policy), settings, reference])
    return table_of(["condition", "engine", "settings requested", "compared with"], rows, words=4)


def _report_rows(sides: Comparison, value: Engines) -> Iterator[list[str]]:
    """Yield a row per setting that an engine reported; policies of one engine with the same report share a row."""
    for engine in dict.fromkeys(map(engine_name, value.conditions)):
        conditions = [policy for policy in value.conditions if engine_name(policy) == engine]
        labels_by_setting: dict[tuple[str, str], list[str]] = {}
        for policy in conditions:
            for setting in (value.reports[policy] or {NO_REPORT: "-"}).items():
                labels_by_setting.setdefault(setting, []).append(sides.label(policy))
        for (name, text), labels in sorted(labels_by_setting.items(), key=lambda row: row[0][0]):
            yield [engine, name, text, "every condition" if len(labels) == len(conditions) else ", ".join(labels)]


Units = tuple[FloorUnit, ...]


class FloorSection(Section[Units]):
    name = "floor"
    title = "A/A floor"
    explain = (
        "The same engine and setting, asked again in the same order and in another one: these changes are not caused "
        "by the setting."
    )
    order = 80
    depth = Depth.VERDICT
    keys: ClassVar = {"floor": 80}
    banner_lines_at = 50

    def compute(self, inputs: Inputs) -> Units | None:
        sides = inputs.decided.comparison
        if not sides.references:
            return None
        try:
            return floor_of(inputs.data.records, inputs.data.floor, sides)
        except DataError:  # reported by ``problems``; the figures then say "not asked again"
            return ()

    def problems(self, inputs: Inputs) -> Iterator[str]:
        if not inputs.decided.comparison.references:
            return
        try:
            floor = inputs.data.floor
        except DataError as error:
            yield str(error)
            return
        yield from (f"{FLOOR_FOLDER}/{row.file}:{row.line}: {row.reason}" for row in floor.problems)
        yield from (f"{FLOOR_FOLDER}/{name}: not finished (no seal); resume the run" for name in floor.unfinished)

    def tables(self, value: Units, decided: Decided) -> Iterator[Table]:
        """Yield a table of the second answers: how many have the same text, and each metric in which an answer changed.

        It has a row for each unit (checkpoint, policy, suite, length) and way of asking again (same or another order).
        """
        several = len({(u.arm, u.seed) for u in value}) > 1
        rows = [_unit_row(decided.comparison, unit, several=several) for unit in value]
        headers = ["condition", *(["arm", "seed"] if several else []), "suite", "tokens", "asked", "same text"]
        yield table_of([*headers, "lost / gained, net drift in pp"], rows, words=len(headers) + 1)

    def notes(self, value: Units, decided: Decided) -> Iterator[str]:
        if value:
            yield from _sentences(value, decided)
            yield (
                "The floor decides nothing: A/A flips go both ways, and the spread that they add is already in the "
                "interval."
            )

    def finding(self, value: Units, decided: Decided) -> str:
        same, answers = sum(u.same for u in value), sum(u.answers for u in value)
        return f"{same} of {answers} answers have the same text when asked again."

    def banner_lines(self, value: Units, decided: Decided, head: Decision | None) -> Iterator[str]:
        """Yield the A/A floor of the quoted cell ``head`` if an engine served it."""
        if head and decided.comparison.is_engine(head.policy):
            yield f"A/A: {'. '.join(f'{name} {text}' for name, text in _both_floors(value, decided.comparison, head))}."

    def beside_gate(self, value: Units, decided: Decided, gated: Sequence[Decision]) -> Iterator[Table | str]:
        yield _gate_table(value, decided.comparison, gated)
        yield from _sentences(value, decided)


def _unit_row(sides: Comparison, unit: FloorUnit, *, several: bool) -> list[str]:
    changes = [f"{f.metric} {f.lost}/{f.gained} of {f.answers}, {points(f.drift)}" for f in unit.flips if f.share]
    row = [sides.label(unit.policy), *([unit.arm, str(unit.seed)] if several else []), unit.suite]
    row += [length_label(unit.context_tokens), unit.way, f"{unit.same} of {unit.answers}"]
    return [*row, "; ".join(changes) or "none changed"]


def _gate_table(units: Units, sides: Comparison, decisions: Sequence[Decision]) -> Table:
    """Return a table with each gated drift of an engine, and the A/A floors of the candidate and of its reference."""
    rows = []
    for d in decisions:
        if not sides.is_engine(d.policy):
            continue
        metric = f"{metric_label(sides, d.suite)}, {length_label(d.context_tokens)}"
        flips = f"{d.effect.losses:.3g}/{d.effect.gains:.3g}" if d.effect else "-"
        figures = [sides.who(d.arm, d.policy), metric, effect_text(d.effect), flips]
        rows.append([*figures, *(text for _, text in _both_floors(units, sides, d))])
    headers = ["candidate", "suite", "drift, 95 % interval", "lost / gained"]
    return table_of([*headers, "A/A of the condition", "A/A of what it is compared with"], rows, words=6)


def _both_floors(units: Units, sides: Comparison, d: Decision) -> Iterator[tuple[str, str]]:
    """Yield name and A/A floor, as text, of the candidate and then of the reference of a decision."""
    reference = reference_of(sides, d)
    for arm, policy in ((d.arm, d.policy), reference):
        name = sides.label(policy) if arm == reference[0] == d.arm else f"{arm} @ {sides.label(policy)}"
        cells = floor_at(units, arm, policy, d.suite, d.context_tokens)
        texts = [f"{c.way} {c.same} of {c.answers} texts the same, {c.lost} lost {c.gained} gained" for c in cells]
        yield name, "; ".join(texts) or "not asked again"


def _sentences(units: Units, decided: Decided) -> Iterator[str]:
    """Yield a sentence for each gated change that is no larger than the A/A floor."""
    sides = decided.comparison
    for c in decided.contrasts:
        share = covering_floor(units, c) if c.estimand == "serving" and c.policy in decided.rules.primary else None
        if share is not None:
            cell = f"{sides.who(c.arm, c.policy)}, {metric_label(decided.comparison, c.suite)}"
            yield inline(
                f"{cell}: no more answers changed than change by asking again in another order ({percent(c.churn)}, "
                f"{percent(share)})."
            )
