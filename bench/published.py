"""What can be measured of a model: rates of the uncompressed reference with intervals and standings, from run folders.

Run: python -m bench.published RUN [RUN ...], where each run has policy none (examples/published.yaml, contexts.yaml).
Prints a table in Markdown: a row for every suite and facet that has a margin, and for every score.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvaudit.core.facets import WELL_FORMED
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.records import Outcome, Record
from kvaudit.reports.stats.judges import clopper_pearson
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS
from kvaudit.reports.verdict.controls import Control, controls_of

MARGIN = 0.05  # that a standing is said for
HEADERS = (
    "suite",
    "tokens",
    "facet",
    "answers",
    "templates",
    "rate",
    "95 %",
    "standing",
    "cut off",
    "loops or empty",
    "minutes",
)


def main(folders: Sequence[str]) -> None:
    """Print the table of every run."""
    for folder in map(Path, folders):
        model = json.loads((folder / "provenance.json").read_text())
        print(f"\n{folder.name}, base weights {str(model['base_sha256'])[:12]}, {model['dtype']}\n")
        print(f"| {' | '.join(HEADERS)} |\n|{'---|' * len(HEADERS)}")
        for row in rows(list(records(folder))):
            print(f"| {' | '.join(row)} |")


def records(folder: Path) -> Iterator[Record]:
    """The answers under policy none."""
    for path in sorted((folder / "records").glob("*.jsonl")):
        found = (Record.from_json(line) for line in path.read_text().splitlines())
        yield from (record for record in found if record.policy == DENSE_POLICY)


def rows(answers: Sequence[Record]) -> Iterator[list[str]]:
    """A row for every metric and length that the answers have."""
    for suite, length in dict.fromkeys((record.suite, record.context_tokens) for record in answers):
        own = [record for record in answers if (record.suite, record.context_tokens) == (suite, length)]
        facets = dict.fromkeys(name for record in own for name in record.facets)
        margins = {suite: MARGIN} | {f"{suite}.{name}": MARGIN for name in facets if name != WELL_FORMED}
        outcomes, minutes = Counter(record.outcome for record in own), sum(record.seconds for record in own) / 60
        cut = sum(record.finish_reason == "length" for record in own)
        for control in controls_of(own, margins):
            yield [*_row(control, own), str(cut), str(outcomes[Outcome.DEGENERATE]), f"{minutes:.1f}"]


def _row(control: Control, own: Sequence[Record]) -> list[str]:
    suite = own[0].suite
    facet = control.metric.removeprefix(suite).removeprefix(".")
    values = [record.score if not facet else record.facets.get(facet) for record in own]
    known = [float(value) for value in values if value is not None]
    count, happened = len(known), sum(known)
    interval = clopper_pearson(round(happened), count, level=0.95)
    templates = len({record.cluster_id for record, value in zip(own, values, strict=True) if value is not None})
    return [
        suite,
        str(own[0].context_tokens),
        facet or "score",
        str(count),
        str(templates),
        f"{100 * happened / count:.0f} %",
        f"{100 * interval.low:.0f} to {100 * interval.high:.0f}" if templates >= FEWEST_CLUSTERS else "-",
        str(control.measurability),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
