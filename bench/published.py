"""Which losses could be measured of a model? Its uncompressed rates with intervals, from run folders.

    python -m bench.published RUN [RUN ...]

Takes seconds per run; results: docs/results/real-model.md and at-length.md. Each run has policy none or an engine's
uncompressed reference (examples/published.yaml, long-measure.yaml). Prints one row for every score and every facet that
has a margin.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvaudit.audit.runs.names import NAMES
from kvaudit.core.facets import WELL_FORMED
from kvaudit.core.policy_names import uncompressed_policies
from kvaudit.core.records import Outcome, Record
from kvaudit.core.spec import load_spec
from kvaudit.reports.stats.judges import clopper_pearson
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS
from kvaudit.reports.verdict.controls import Control, controls_of

MARGIN = 0.05  # for which it is decided whether a loss could be measured
HEADERS = (
    "suite",
    "tokens",
    "facet",
    "answers",
    "templates",
    "rate",
    "95 %",
    "measurability",
    "cut off",
    "loops or empty",
    "minutes",
)


def main(folders: Sequence[str]) -> None:
    for folder in map(Path, folders):
        model = json.loads((folder / "provenance.json").read_text())
        print(f"\n{folder.name}, base weights {str(model['base_sha256'])[:12]}, {model['dtype']}\n")
        print(f"| {' | '.join(HEADERS)} |\n|{'---|' * len(HEADERS)}")
        for row in table_rows(list(read_uncompressed(folder))):
            print(f"| {' | '.join(row)} |")


def read_uncompressed(folder: Path) -> Iterator[Record]:
    """Yield the answers under policy none, or under an engine's reference."""
    uncompressed = uncompressed_policies(load_spec(folder / "spec.yaml", NAMES).evaluate.references)
    for path in sorted((folder / "records").glob("*.jsonl")):
        rows = map(Record.from_json, path.read_text().splitlines())
        yield from (record for record in rows if record.policy in uncompressed)


def table_rows(answers: Sequence[Record]) -> Iterator[list[str]]:
    """Yield one row for each metric and length."""
    for suite, length in dict.fromkeys((record.suite, record.context_tokens) for record in answers):
        cell = [record for record in answers if (record.suite, record.context_tokens) == (suite, length)]
        facets = dict.fromkeys(name for record in cell for name in record.facets)
        margins = {suite: MARGIN} | {f"{suite}.{name}": MARGIN for name in facets if name != WELL_FORMED}
        outcomes, minutes = Counter(record.outcome for record in cell), sum(record.seconds for record in cell) / 60
        cut = sum(record.finish_reason == "length" for record in cell)
        for control in controls_of(cell, margins):
            yield [*_row(control, cell), str(cut), str(outcomes[Outcome.DEGENERATE]), f"{minutes:.1f}"]


def _row(control: Control, answers: Sequence[Record]) -> list[str]:
    suite = answers[0].suite
    facet = control.metric.removeprefix(suite).removeprefix(".")
    values = [record.score if not facet else record.facets.get(facet) for record in answers]
    readable = [float(value) for value in values if value is not None]
    count, hits = len(readable), sum(readable)
    interval = clopper_pearson(round(hits), count, level=0.95)
    templates = len({record.cluster_id for record, value in zip(answers, values, strict=True) if value is not None})
    return [
        suite,
        str(answers[0].context_tokens),
        facet or "score",
        str(count),
        str(templates),
        f"{100 * hits / count:.0f} %",
        f"{100 * interval.low:.0f} to {100 * interval.high:.0f}" if templates >= FEWEST_CLUSTERS else "-",
        str(control.measurability),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
