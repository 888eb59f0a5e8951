"""What a run's engine settings did, a row for each setting and suite: python -m bench.engine_table RUN [RUN ...]

``texts`` is how many answers stay the same as under the reference of the same engine, ``grades`` how many that passed
do no more and how many do now; ``refusals`` how many went from refused to not refused, in brackets those whose answer
makes no sense, and back, among rows that a rule forbids and whose form could be read on both sides; ``floor`` how many
texts stay the same when the same is asked again, and when it is asked in another order; ``minutes`` what the cell took.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import kvaudit
from kvaudit.core.conditions import condition_names
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.records import Record
from kvaudit.reports.analysis.floor import floor_of

COLUMNS = (
    "setting",
    "suite",
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
    answers: dict[tuple[str, str], dict[str, Record]] = {}
    for record in run.answers():
        answers.setdefault((record.policy, record.suite), {})[record.item_id] = record
    table = run.table().set_index(["contrast", "policy", "suite"])
    for (policy, suite), served in sorted(answers.items()):
        reference = references.get(policy, DENSE_POLICY)
        if policy in {DENSE_POLICY, *references.values()} or (reference, suite) not in answers:
            continue
        plain = answers[reference, suite]
        same = sum(served[item].transcript[-1] == plain[item].transcript[-1] for item in served)
        told = table.loc[("serving", policy, suite)]
        interval = f"{told['estimate']:+.1f} [{told['low']:+.1f}, {told['high']:+.1f}]"
        cells = (
            names.get(policy, policy.partition(":residual")[0]),
            suite,
            f"{same} of {len(served)}",
            f"{told['status']} {interval}",
            grades(plain, served),
            flips(plain, served),
            floor(run, policy, suite),
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


def floor(run: kvaudit.Run, policy: str, suite: str) -> str:
    """Texts that stay the same, asked again and asked in another order."""
    units = floor_of(run.records, run.data.floor, run.drift.comparison)
    found = [one for one in units if (one.policy, one.suite) == (policy, suite)]
    return ", ".join(f"{one.way} {one.same} of {one.answers}" for one in found) or "-"


def main() -> None:
    """Print the table of every run."""
    for path in map(Path, sys.argv[1:]):
        run = kvaudit.load_run(path)
        print(f"\n{run.spec.name} {run.data.provenance.get('base_sha256', '')[:12]}\n")
        print(f"| {' | '.join(COLUMNS)} |")
        print("|---|---|---:|---|---:|---:|---|---:|")
        for line in rows_of(run):
            print(line)


if __name__ == "__main__":
    main()
