"""The engine that served each condition, the settings requested of it, and the settings that it reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvaudit.core.policy_names import engine_name, engine_settings
from kvaudit.core.provenance import NOT_SHOWN, engine_facts
from kvaudit.core.records import ONE_CACHE, READ_ANEW, SENT_WHOLE
from kvaudit.core.text import inline, join_names
from kvaudit.reports.records.load import RunData
from kvaudit.reports.sections.base import Depth, Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import plural
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.verdict import Decided

OUTSIDE = "endpoint"  # the engine whose server the user started
SILENT = "nothing"  # for an engine that reports no settings
_TURNS = {  # ``Record.turns_read`` -> how conversations of several turns were read
    ONE_CACHE: "one cache was kept over all turns",
    READ_ANEW: "each turn was read anew, from the first message",
    SENT_WHOLE: "each request held the whole conversation, and what was kept of earlier turns is the engine's choice",
}


@dataclass(frozen=True)
class Engines:
    """The conditions that engines served, each engine's report, and how conversations of several turns were read.

    ``turns`` also has kvaudit's own conditions: policy -> the words of ``Record.turns_read``.
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
            decided.comparison.label(policy) for policy in value.conditions if engine_name(policy) == OUTSIDE
        ]:
            yield inline(
                f"The replicas that may stand behind the address of {join_names(labels)} cannot be told apart: they "
                "count as one server, and one with other settings would not be seen."
            )


def _turns_read(data: RunData) -> dict[str, tuple[str, ...]]:
    """Return how conversations of several turns were read, by condition, from one record of each suite."""
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
    """Yield a row per reported setting; conditions of an engine with the same report share a row."""
    for engine in dict.fromkeys(map(engine_name, value.conditions)):
        conditions = [policy for policy in value.conditions if engine_name(policy) == engine]
        labels_by_setting: dict[tuple[str, str], list[str]] = {}
        for policy in conditions:
            for setting in (value.reports[policy] or {SILENT: "-"}).items():
                labels_by_setting.setdefault(setting, []).append(sides.label(policy))
        for (name, text), labels in sorted(labels_by_setting.items(), key=lambda row: row[0][0]):
            yield [engine, name, text, "every condition" if len(labels) == len(conditions) else ", ".join(labels)]
