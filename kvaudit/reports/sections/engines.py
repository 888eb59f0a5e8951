"""Which engine served each condition, and what it said of itself: asked is not applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvaudit.core.policy_names import engine_name, engine_settings
from kvaudit.core.provenance import NOT_SHOWN, engine_facts
from kvaudit.core.text import inline, join_names
from kvaudit.reports.sections.base import Depth, Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import plural
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.verdict import Decided

SILENT = "nothing"  # of an engine that does not say what it resolved


@dataclass(frozen=True)
class Engines:
    """The conditions that engines served, and what each engine said of itself under them."""

    conditions: tuple[str, ...]
    said: Mapping[str, Mapping[str, str]]


class EnginesSection(Section[Engines]):
    name = "engines"
    title = "Engines"
    explain = (
        "Which engine served each condition, the settings that it was given in its own words, and what it said that it "
        "made of them. Each condition is compared with the uncompressed one of its own engine."
    )
    reading = (
        "Cache bytes, entries kept and which tokens were kept are not shown by an engine, and stand nowhere in "
        "this report for one: absent is not zero."
    )
    order = 90
    depth = Depth.VERDICT
    remarks_at = 15

    def compute(self, inputs: Inputs) -> Engines | None:
        sides = inputs.decided.comparison
        own = tuple(policy for policy in sides.policies if sides.is_engine(policy))
        return Engines(own, {policy: engine_facts(inputs.data.provenance, policy) for policy in own}) if own else None

    def tables(self, value: Engines, decided: Decided) -> Iterator[Table]:
        yield _asked_table(decided.comparison, value.conditions)
        headers = ["engine", "says", "in its own words", "under"]
        yield table_of(headers, _said_rows(decided.comparison, value), words=4)

    def finding(self, value: Engines, decided: Decided) -> str:
        engines = list(dict.fromkeys(map(engine_name, value.conditions)))
        told = sum(map(bool, value.said.values()))
        conditions = plural(len(value.conditions), "condition")
        return f"{inline(', '.join(engines))}: {conditions}, of which {told} say what they are."

    def remarks(self, value: Engines, decided: Decided) -> Iterator[str]:
        """What of a condition nobody could hold against the checkpoint that the verdict names."""
        unseen: dict[str, list[str]] = {}
        for policy, said in value.said.items():
            if NOT_SHOWN in said:
                unseen.setdefault(said[NOT_SHOWN], []).append(decided.comparison.label(policy))
        for what, labels in unseen.items():
            yield inline(
                f"Nothing shows the {what} of {join_names(labels)}: that they are the checkpoint's is the word of "
                "whoever named them."
            )


def _asked_table(sides: Comparison, own: Sequence[str]) -> Table:
    rows = []
    for policy in own:
        asked = ", ".join(f"{name}={value}" for name, value in engine_settings(policy).items()) or "as it comes"
        against = "uncompressed" if sides.is_uncompressed(policy) else sides.label(sides.uncompressed_of(policy))
        rows.append([sides.label(policy), engine_name(policy), asked, against])
    return table_of(["condition", "engine", "settings asked", "compared with"], rows, words=4)


def _said_rows(sides: Comparison, found: Engines) -> Iterator[list[str]]:
    """What every condition of an engine says alike stands once."""
    for engine in dict.fromkeys(map(engine_name, found.conditions)):
        conditions = [policy for policy in found.conditions if engine_name(policy) == engine]
        under: dict[tuple[str, str], list[str]] = {}
        for policy in conditions:
            for row in (found.said[policy] or {SILENT: "-"}).items():
                under.setdefault(row, []).append(sides.label(policy))
        for (name, text), labels in sorted(under.items(), key=lambda row: row[0][0]):
            yield [engine, name, text, "every condition" if len(labels) == len(conditions) else ", ".join(labels)]
