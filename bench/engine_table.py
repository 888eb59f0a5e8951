"""What did each KV setting of a run change? One row per setting, suite and length.

    python -m bench.engine_table RUN [RUN ...] [--answers FILE]

Takes seconds per run; results: docs/results/engines.md, finding.md and at-length.md.

A cell that was cut short has the items that it has, if the other side has the same. ``tokens`` is the length of the
context, 0 without one; ``texts`` how many answers equal those under the reference of the same engine; ``grades`` how
many answers passed only before and only after; ``refusals`` how many readable answers to forbidden requests went from
refused to not refused (in brackets those that make no sense) and back; ``floor`` how many texts stay the same when
asked again and in another order; ``minutes`` the time of the cell.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

import kvaudit
from kvaudit.core.policy_names import DENSE_POLICY, condition_names
from kvaudit.core.records import Record
from kvaudit.reports.sections.shared.floor import floor_of

COLUMNS = (
    "setting",
    "suite",
    "tokens",
    "texts the same",
    "verdict, drift in points",
    "grades lost, won",
    "refusals lost (no sense), won",
    "floor",
    "minutes",
)


def rows_of(run: kvaudit.Run) -> Iterator[str]:
    """Yield one row of the table for each setting that compresses."""
    references = run.spec.evaluate.references
    names = condition_names(references)
    answers: dict[tuple[str, str, int], dict[str, Record]] = {}
    for record in run.answers():
        answers.setdefault((record.policy, record.suite, record.context_tokens), {})[record.item_id] = record
    table = run.table().set_index(["contrast", "policy", "suite", "context_tokens"])
    for (policy, suite, length), served in sorted(answers.items()):
        reference = references.get(policy, DENSE_POLICY)
        plain = answers.get((reference, suite, length), {})
        if policy in {DENSE_POLICY, *references.values()} or set(plain) != set(served):
            continue
        same = sum(served[item].transcript[-1] == plain[item].transcript[-1] for item in served)
        contrast = table.loc[("serving", policy, suite, length)]
        if pd.isna(contrast["estimate"]):  # for example a cell that was half answered
            continue
        interval = f"{contrast['estimate']:+.1f} [{contrast['low']:+.1f}, {contrast['high']:+.1f}]"
        cells = (
            names.get(policy, policy.partition(":residual")[0]),
            suite,
            str(length),
            f"{same} of {len(served)}",
            f"{contrast['status']} {interval}",
            grades(plain, served),
            flips(plain, served),
            floor(run, policy, suite, length),
            f"{sum(record.seconds for record in served.values()) / 60:.1f}",
        )
        yield f"| {' | '.join(cells)} |"


def grades(plain: dict[str, Record], served: dict[str, Record]) -> str:
    """Return how many answers passed only uncompressed, and only compressed."""
    pairs = [(plain[item].score, served[item].score) for item in served]
    scored = [(before, after) for before, after in pairs if before is not None and after is not None]
    return f"{sum(after < before for before, after in scored)}, {sum(after > before for before, after in scored)}"


def flips(plain: dict[str, Record], served: dict[str, Record]) -> str:
    """Return how many refusals of forbidden requests are lost and won, among answers readable on both sides."""
    pairs = [(plain[item].facets.get("refused"), served[item].facets.get("refused"), item) for item in served]
    lost = [item for before, after, item in pairs if (before, after) == (True, False)]
    won = sum((before, after) == (False, True) for before, after, _ in pairs)
    senseless = sum(served[item].facets.get("coherent") is False for item in lost)
    return f"{len(lost)} ({senseless}), {won} of {sum(None not in pair for pair in pairs)}"


def floor(run: kvaudit.Run, policy: str, suite: str, length: int) -> str:
    """Return how many texts stay the same when asked again and in another order."""
    all_units = floor_of(run.records, run.data.floor, run.drift.comparison)
    units = [unit for unit in all_units if (unit.policy, unit.suite, unit.context_tokens) == (policy, suite, length)]
    return ", ".join(f"{unit.way} {unit.same} of {unit.answers}" for unit in units) or "-"


def answer_table(run: kvaudit.Run) -> pd.DataFrame:
    """Return one row per answer; a facet that the item lacks or that could not be read is missing."""
    rows = [
        {
            "policy": record.policy,
            "suite": record.suite,
            "tokens": record.context_tokens,
            "item": record.item_id,
            "template": record.cluster_id,
            "outcome": str(record.outcome),
            "score": record.score,
            "retention": record.retention,
            **record.facets,
            "answer_sha256": hashlib.sha256(record.transcript[-1].content.encode()).hexdigest()[:16],
        }
        for record in run.answers()
    ]
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--answers", type=Path, help="a Parquet file to write: every answer's grade, texts as hashes")
    options = parser.parse_args()
    runs = [kvaudit.load_run(path) for path in options.runs]
    if options.answers:
        pd.concat(map(answer_table, runs)).to_parquet(options.answers, index=False, compression="zstd")
    for run in runs:
        print(f"\n{run.spec.name} {run.data.provenance.get('base_sha256', '')[:12]}\n")
        print(f"| {' | '.join(COLUMNS)} |")
        print("|---|---|---:|---:|---|---:|---:|---|---:|")
        for line in rows_of(run):
            print(line)


if __name__ == "__main__":
    main()
