"""What a run's settings did, a row for each setting, suite and length: python -m bench.engine_table RUN [RUN ...]

With ``--answers FILE`` the graded answers of the runs are written as Parquet too, texts as hashes.

A cell that was cut short stands with the items that it has, where the other side has the same. ``tokens`` is the length
that a context was made to, 0 where there is none; ``texts`` how many answers stay the same as under the reference of
the same engine, ``grades`` how many that passed do no more and how many do now; ``refusals`` how many went from refused
to not refused, in brackets those whose answer makes no sense, and back, among rows that a rule forbids and whose form
could be read on both sides; ``floor`` how many texts stay the same when the same is asked again, and when it is asked
in another order; ``minutes`` what the cell took.
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
    """A line of the table for each setting that compresses."""
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
        told = table.loc[("serving", policy, suite, length)]
        if pd.isna(told["estimate"]):  # such as a cell of which half was answered
            continue
        interval = f"{told['estimate']:+.1f} [{told['low']:+.1f}, {told['high']:+.1f}]"
        cells = (
            names.get(policy, policy.partition(":residual")[0]),
            suite,
            str(length),
            f"{same} of {len(served)}",
            f"{told['status']} {interval}",
            grades(plain, served),
            flips(plain, served),
            floor(run, policy, suite, length),
            f"{sum(one.seconds for one in served.values()) / 60:.1f}",
        )
        yield f"| {' | '.join(cells)} |"


def grades(plain: dict[str, Record], served: dict[str, Record]) -> str:
    """Answers that passed and do no more, and the other way round."""
    pairs = [(plain[item].score, served[item].score) for item in served]
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    return f"{sum(after < before for before, after in known)}, {sum(after > before for before, after in known)}"


def flips(plain: dict[str, Record], served: dict[str, Record]) -> str:
    """Refusals that are lost and won among what a rule forbids; broken forms count for neither."""
    pairs = [(plain[item].facets.get("refused"), served[item].facets.get("refused"), item) for item in served]
    lost = [item for before, after, item in pairs if (before, after) == (True, False)]
    won = sum((before, after) == (False, True) for before, after, _ in pairs)
    senseless = sum(served[item].facets.get("coherent") is False for item in lost)
    return f"{len(lost)} ({senseless}), {won} of {sum(None not in pair for pair in pairs)}"


def floor(run: kvaudit.Run, policy: str, suite: str, length: int) -> str:
    """Texts that stay the same, asked again and asked in another order."""
    units = floor_of(run.records, run.data.floor, run.drift.comparison)
    found = [one for one in units if (one.policy, one.suite, one.context_tokens) == (policy, suite, length)]
    return ", ".join(f"{one.way} {one.same} of {one.answers}" for one in found) or "-"


def answers_of(run: kvaudit.Run) -> pd.DataFrame:
    """One row for each answer; a facet that an item has not, or that could not be read, is missing."""
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
    """Print the table of every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--answers", type=Path)
    asked = parser.parse_args()
    runs = [kvaudit.load_run(path) for path in asked.runs]
    if asked.answers:
        pd.concat(map(answers_of, runs)).to_parquet(asked.answers, index=False, compression="zstd")
    for run in runs:
        print(f"\n{run.spec.name} {run.data.provenance.get('base_sha256', '')[:12]}\n")
        print(f"| {' | '.join(COLUMNS)} |")
        print("|---|---|---:|---:|---|---:|---:|---|---:|")
        for line in rows_of(run):
            print(line)


if __name__ == "__main__":
    main()
