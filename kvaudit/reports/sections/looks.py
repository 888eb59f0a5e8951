"""The interim tests (looks) of a run that asks in rounds: for each the rows asked before it, and its result.

The section also shows the figures of every source of rows, since a suite may draw its rows from several published data
sets. The decision pools all sources; the figures by source decide nothing.
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
from kvaudit.reports.sections.shared.tables import table_of as text_table
from kvaudit.reports.sections.shared.words import metric_label, plural
from kvaudit.reports.verdict.verdict import Decided


@dataclass(frozen=True)
class Look:
    """One test between rounds: the number of rows asked of each suite so far, and the result of each gated metric.

    A result is one word. ``seconds`` is the time since the last look.
    """

    items: dict[str, int]
    words: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class SourceFigures:
    """The rows of one public data set under one policy: how many are as wanted on each side, and how many changed."""

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
    """What the section shows of a run in rounds: all looks, and the counts for each source of rows (``sources``).

    A look is a test of the rows so far. ``planned`` is the number of planned items of each suite, ``ended`` says why
    the run ended, and ``left_out`` names the suites that were left out, with the reason for each.
    """

    looks: tuple[Look, ...]
    planned: dict[str, int]
    ended: str
    left_out: dict[str, str]
    sources: tuple[SourceFigures, ...]


class LooksSection(Section[Looks]):
    name = "looks"
    title = "Looks and sources"
    explain = (
        "Rows were asked in rounds, and after each round the gate looked at all rows so far. Its bounds hold at every "
        "look, so looking often does not make a false PASS more likely."
    )
    reading = "The figures of a source are part of the pooled endpoint above; alone they decide nothing."
    order = 64
    depth = Depth.VERDICT
    remarks_at = 16
    keys: ClassVar = {"looks": 125}

    def compute(self, inputs: Inputs) -> Looks | None:
        provenance = inputs.data.provenance
        looks, entry = all_looks(provenance), table_of(provenance, LOOKS)
        if not looks:
            return None
        planned = table_of(entry, PLANNED)
        return Looks(
            looks=tuple(
                Look(dict(table_of(look, "items")), dict(table_of(look, "words")), float(look.get("seconds") or 0.0))
                for look in looks
            ),
            planned=dict(table_of(planned, "items")),
            ended=str(entry.get(ENDED, "it was stopped")),
            left_out={str(suite): str(why) for suite, why in table_of(planned, "left_out").items()},
            sources=tuple(_sources(inputs.data, inputs.decided)),
        )

    def facts(self, value: Looks | None) -> dict[str, Any]:
        return {"looks": None if value is None else asdict(value)}

    def tables(self, value: Looks, decided: Decided) -> Iterator[Table]:
        yield text_table(["look", "rows on each side", "minutes", "result"], list(_look_rows(value, decided)), words=4)
        rows = [
            [
                metric_label(decided.comparison, figures.metric),
                decided.comparison.label(figures.policy),
                figures.source,
                *map(str, (figures.rows, figures.reference, figures.candidate, figures.lost, figures.gained)),
            ]
            for figures in value.sources
        ]
        headers = ["endpoint", "setting", "source", "rows", "as wanted before", "and after", "lost", "gained"]
        yield text_table(headers, rows)

    def finding(self, value: Looks, decided: Decided) -> str:
        return inline(f"{plural(len(value.looks), 'look')}, then {value.ended}.")

    def remarks(self, value: Looks, decided: Decided) -> Iterator[str]:
        for suite, why in value.left_out.items():
            yield inline(f"Suite {suite} was not asked of this model: {why}.")


def _look_rows(value: Looks, decided: Decided) -> Iterator[list[str]]:
    for number, look in enumerate(value.looks, start=1):
        items = ", ".join(f"{suite} {rows} of {value.planned.get(suite, rows)}" for suite, rows in look.items.items())
        results = ", ".join(f"{metric_label(decided.comparison, metric)} {word}" for metric, word in look.words.items())
        yield [str(number), items, f"{look.seconds / 60:.1f}", results]


def _sources(data: RunData, decided: Decided) -> Iterator[SourceFigures]:
    """Yield the figures of every gated cell for each public data set that its rows come from.

    The names of clusters, SUITE-SOURCE-NUMBER, state the data set.
    """
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
        sources = [part[0] if len(part) > 1 and part[-1].isdigit() else "" for part in parts]
        item_sources = np.array(sources)[panel.clusters]  # [N]
        readable = ~np.isnan(before) & ~np.isnan(after)
        for source in sorted({*item_sources[readable]} - {""}):
            rows = readable & (item_sources == source)
            old, new = before[rows], after[rows]
            yield SourceFigures(
                d.suite,
                d.policy,
                str(source),
                int(rows.sum()),
                *(int(np.sum(side)) for side in (old, new, (old > new), (new > old))),
            )
