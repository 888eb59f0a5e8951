"""Which engine served each condition, and what it said of itself: asked is not applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvaudit.core.conditions import engine_in, settings_in
from kvaudit.core.provenance import SERVED_BY, table_of
from kvaudit.core.text import inline
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.layout.tables import Table
from kvaudit.reports.layout.tables import table_of as table_from
from kvaudit.reports.layout.words import counted
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.page import Section

SILENT = "nothing"  # of an engine that does not say what it resolved


def said_by(provenance: Mapping[str, Any], condition: str) -> dict[str, str]:
    """What an engine said of itself when it first answered under a condition: engine, version, what it resolved."""
    return {str(name): str(text) for name, text in table_of(table_of(provenance, SERVED_BY), condition).items()}


def engines_section(findings: Findings) -> Section | None:
    """The engines of a run; None where our own cache served everything."""
    sides = findings.comparison
    own = [policy for policy in sides.policies if sides.is_engine(policy)]
    if not own:
        return None
    engines = list(dict.fromkeys(map(engine_in, own)))
    told = sum(bool(said_by(findings.provenance, policy)) for policy in own)
    return Section(
        "engines",
        "Engines",
        "Which engine served each condition, the settings that it was given in its own words, and what it said that it "
        "made of them. Each condition is compared with the uncompressed one of its own engine.",
        tables=(_asked_table(findings.comparison, own), _said_table(findings, own)),
        notes=(
            "Cache bytes, entries kept and which tokens were kept are not shown by an engine, and stand nowhere in "
            "this report for one: absent is not zero.",
        ),
        finding=f"{inline(', '.join(engines))}: {counted(len(own), 'condition')}, of which {told} say what they are.",
    )


def _asked_table(sides: Comparison, own: list[str]) -> Table:
    rows = [
        [
            sides.label(policy),
            engine_in(policy),
            ", ".join(f"{name}={value}" for name, value in settings_in(policy).items()) or "as it comes",
            "uncompressed" if sides.is_uncompressed(policy) else sides.label(sides.uncompressed_of(policy)),
        ]
        for policy in own
    ]
    return table_from(["condition", "engine", "settings asked", "compared with"], rows, words=4)


def _said_table(findings: Findings, own: list[str]) -> Table:
    return table_from(["engine", "says", "in its own words", "under"], _said_rows(findings, own), words=4)


def _said_rows(findings: Findings, own: list[str]) -> Iterator[list[str]]:
    """What every condition of an engine says alike stands once."""
    for engine in dict.fromkeys(map(engine_in, own)):
        conditions = [policy for policy in own if engine_in(policy) == engine]
        under: dict[tuple[str, str], list[str]] = {}
        for policy in conditions:
            for row in (said_by(findings.provenance, policy) or {SILENT: "-"}).items():
                under.setdefault(row, []).append(findings.comparison.label(policy))
        for (name, text), labels in sorted(under.items(), key=lambda row: row[0][0]):
            yield [engine, name, text, "every condition" if len(labels) == len(conditions) else ", ".join(labels)]
