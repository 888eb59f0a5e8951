"""The looks of a run that was asked in rounds: after how many rows, what each said, and the figures of every source.

What is decided is pooled over sources; the figures by source stand here and decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from kvaudit.core.facets import facet_of
from kvaudit.core.provenance import ENDED, LOOKS, PLANNED, all_looks, table_of
from kvaudit.core.text import inline
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import CellKey
from kvaudit.reports.sections.base import Depth, Inputs, Section
from kvaudit.reports.sections.shared.tables import Table
from kvaudit.reports.sections.shared.tables import table_of as table
from kvaudit.reports.sections.shared.words import plural, metric_label
from kvaudit.reports.verdict.verdict import Decided, Decision


@dataclass(frozen=True)
class Look:
    """One look: rows of each suite so far, what each gated metric was then, and the seconds since the last."""

    items: dict[str, int]
    words: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class SourceFigures:
    """What the rows of one source came to under one setting: how many are as wanted before and after, and moved."""

    metric: str
    policy: str
    source: str
    rows: int
    reference: int
    candidate: int
    lost: int
    gained: int


@dataclass(frozen=True)
class Looks:
    """The looks, what was planned, why it ended, what was left out, and the figures by source."""

    looks: tuple[Look, ...]
    planned: dict[str, int]
    ended: str
    left_out: dict[str, str]
    sources: tuple[SourceFigures, ...]


class LooksSection(Section[Looks]):
    name = "looks"
    title = "Looks and sources"
    explain = (
        "Rows were asked in rounds, and after each the gate looked at all of them. Its bounds hold whenever one stops, "
        "so a look is no second chance."
    )
    reading = "The figures of a source are part of the pooled endpoint above; by themselves they decide nothing."
    order = 64
    depth = Depth.VERDICT
    banner_lines_at = 45
    keys: ClassVar = {"looks": 125}

    def compute(self, inputs: Inputs) -> Looks | None:
        provenance = inputs.data.provenance
        looks, noted = all_looks(provenance), table_of(provenance, LOOKS)
        if not looks:
            return None
        planned = table_of(noted, PLANNED)
        return Looks(
            looks=tuple(
                Look(dict(table_of(one, "items")), dict(table_of(one, "words")), float(one.get("seconds") or 0.0))
                for one in looks
            ),
            planned=dict(table_of(planned, "items")),
            ended=str(noted.get(ENDED, "it was stopped")),
            left_out={str(suite): str(why) for suite, why in table_of(planned, "left_out").items()},
            sources=tuple(_sources(inputs.data, inputs.decided)),
        )

    def facts(self, value: Looks | None) -> dict[str, Any]:
        return {"looks": None if value is None else asdict(value)}

    def tables(self, value: Looks, decided: Decided) -> Iterator[Table]:
        yield table(["look", "rows on each side", "minutes", "what it said"], list(_look_rows(value, decided)), words=4)
        rows = [
            [
                metric_label(decided.comparison, one.metric),
                decided.comparison.label(one.policy),
                one.source,
                *(str(number) for number in (one.rows, one.reference, one.candidate, one.lost, one.gained)),
            ]
            for one in value.sources
        ]
        yield table(["endpoint", "setting", "source", "rows", "as wanted before", "and after", "lost", "gained"], rows)

    def finding(self, value: Looks, decided: Decided) -> str:
        return inline(f"{plural(len(value.looks), 'look')}, then {value.ended}.")

    def banner_lines(self, value: Looks, decided: Decided, head: Decision | None) -> Iterator[str]:
        for suite, why in value.left_out.items():
            yield inline(f"Not asked of this model: {suite} ({why}).")


def _look_rows(value: Looks, decided: Decided) -> Iterator[list[str]]:
    for number, look in enumerate(value.looks, start=1):
        items = ", ".join(f"{suite} {rows} of {value.planned.get(suite, rows)}" for suite, rows in look.items.items())
        words = ", ".join(f"{metric_label(decided.comparison, metric)} {word}" for metric, word in look.words.items())
        yield [str(number), items, f"{look.seconds / 60:.1f}", words]


def _sources(data: RunData, decided: Decided) -> Iterator[SourceFigures]:
    """The figures of every gated cell by the source that its clusters name: SUITE-SOURCE-NUMBER."""
    sides = decided.comparison
    for d in decided.verdict.gated:
        panel = data.panels.get((d.suite, d.context_tokens))
        if panel is None or d.suite not in sides.facets:
            continue
        suite = facet_of(d.suite)[0]
        keys = [CellKey(d.arm, 0, policy) for policy in (sides.uncompressed_of(d.policy), d.policy)]
        if not all(key in panel.scores for key in keys):
            continue
        before, after = (panel.scores[key] for key in keys)
        bare = suite.partition("@")[0]
        parts = [name.removeprefix(f"{suite}-").removeprefix(f"{bare}-").split("-") for name in panel.cluster_names]
        names = np.array([part[0] if len(part) > 1 and part[-1].isdigit() else "" for part in parts])[panel.clusters]
        known = ~np.isnan(before) & ~np.isnan(after)
        for source in sorted({*names[known]} - {""}):
            own = known & (names == source)
            old, new = before[own], after[own]
            yield SourceFigures(
                d.suite,
                d.policy,
                str(source),
                int(own.sum()),
                *(int(np.sum(side)) for side in (old, new, (old > new), (new > old))),
            )
