"""The gate on real answers whose true drift is known: no drift (A/A) must not FAIL, a loss put there must, by name.

Run: python -m bench.controls [FOLDER]. What was sampled stays in FOLDER (default runs/controls) for the next time.
Exits with 3 where a control is not what it should be. Every verdict is taken as ``kvaudit gate`` takes it.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers.utils.logging import disable_progress_bar

from bench.control_draws import Shares, gated, halves, limit, losses, planned_pass, shares, some, swaps, templates_of
from bench.control_runs import (
    AGAIN,
    BASE,
    DENSE,
    RUINOUS,
    SERVED,
    Size,
    break_down,
    copy_run,
    flip,
    rerun_arm,
    sample,
    spoil_templates,
)
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.reports.records.load import RunData, load_run
from kvaudit.reports.run import write_report
from kvaudit.reports.sections.base import BothSides, gated_sides
from kvaudit.reports.verdict.verdict import Decision, Status

SPOILT_SHARE = 0.1
TOO_FEW = 4  # templates: with k that differ no sign-flip p-value is below 1/2^k, and 1/16 is above .05
MISSED = 3
MOST_LISTED = 20  # templates of a cell


@dataclass(frozen=True)
class Named:
    """A gated cell of a run on disk. ``listed`` are the templates that lost, worst first."""

    cell: str
    decision: Decision
    listed: tuple[str, ...]
    spoilt: tuple[str, ...]  # those that were spoilt in this suite

    @property
    def found(self) -> int:
        """How many spoilt templates stand at the top of the table, among as many as were spoilt."""
        return len(set(self.listed[: len(self.spoilt)]) & set(self.spoilt))


@dataclass(frozen=True)
class Check:
    """One control: what it should give, what it gave."""

    control: str
    asked: str
    reached: str
    ok: bool


def controls(folder: Path, size: Size, seed: int = 0) -> list[Check]:
    """Sample what is missing, take every verdict, print the shares as they come; returns the checks."""
    rng = np.random.default_rng(seed)
    run = sample(folder / "sampled", size)
    both, arms = (DENSE, SERVED), {BASE: (BASE,), rerun_arm(0): (AGAIN,)}
    whole = load_run(copy_run(run, _fresh(folder / "whole"), arms, both))
    show_named("A/A on disk: the first run against its first rerun", named(whole.run, frozenset()))
    data = replace(load_run(run.path), spec=whole.spec, provenance=whole.provenance)
    names = [BASE, *(rerun_arm(number) for number in range(size.reruns))]
    checks = []
    for what, runs in (
        ("A/A, random half of the templates", halves(data, names, size.splits, rng)),
        ("A/A, all templates, a random half swapped", swaps(data, names, size.splits, rng)),
    ):
        found = shares(runs)
        show_shares(what, found, planned_pass(data, names))
        most = limit(found.draws)
        checks.append(Check(what, f"FAIL <= {most:.3f}", f"{found.fail:.3f} of {found.draws}", found.fail <= most))
    checks += _spoilt(data, names, size, rng)
    checks += _on_disk(run, folder, data, rng)
    return checks


def _spoilt(data: RunData, names: Sequence[str], size: Size, rng: np.random.Generator) -> list[Check]:
    """Labels spoilt at random, many times; only a copy has no other difference that could hide the loss.

    A flipped label also turns wrong answers into right ones, so only templates that break are asked to FAIL each time.
    """
    checks = []
    for what, spoil, copy in (
        ("a tenth of the templates of a copy broken", break_down, True),
        ("labels flipped in a tenth of the templates of a copy (shown)", flip, True),
        ("a tenth of the templates of another run broken (shown)", break_down, False),
        ("labels flipped in a tenth of the templates of another run (shown)", flip, False),
    ):
        found = shares(losses(data, names, size.splits, rng, share=SPOILT_SHARE, spoil=spoil, copy=copy))
        show_shares(what, found, {})
        if copy and spoil is break_down:
            checks.append(Check(what, "FAIL 1", f"{found.fail:.3f} of {found.draws}", found.fail == 1))
    return checks


def _on_disk(run: RunFolder, folder: Path, data: RunData, rng: np.random.Generator) -> list[Check]:
    """Run folders as a user has them: the report names the cells that fail and the templates that carry the loss."""
    twins, both = {BASE: (BASE, AGAIN)}, (DENSE, SERVED)
    chosen = some(data, rng, SPOILT_SHARE)
    few = frozenset(name for own in templates_of(data).values() for name in own[:TOO_FEW])
    rows = {}
    for what, templates in (("broken", chosen), ("few", few)):
        change = spoil_templates(templates, break_down)
        rows[what] = named(copy_run(run, _fresh(folder / what), twins, both, change), templates)
        show_named(f"{len(templates)} templates of a copy broken, on disk", rows[what])
    starved = named(copy_run(run, _fresh(folder / "starved"), {BASE: (BASE,)}, (DENSE, RUINOUS)), frozenset())
    show_named("the reference at a ruinous budget, on disk", starved)
    broken, short = _failed(rows["broken"]), _failed(rows["few"])
    exact = all(set(row.listed) <= set(row.spoilt) for row in broken)
    told = ", ".join(f"{row.cell} ({row.found} of {len(row.spoilt)} broken templates lead its table)" for row in broken)
    dead = _failed(starved)
    return [
        Check("broken templates, on disk", "FAIL, only they are listed", told or "no FAIL", bool(broken) and exact),
        Check(f"{TOO_FEW} broken templates of every suite", "no cell FAILs", f"{len(short)} FAIL", not short),
        Check(
            f"served under {RUINOUS}",
            "every suite FAILs",
            ", ".join(row.cell for row in dead) or "no FAIL",
            len(dead) == len(starved),
        ),
    ]


def _failed(rows: Sequence[Named]) -> list[Named]:
    return [row for row in rows if row.decision.status is Status.FAIL]


def named(run: Path, spoilt: frozenset[str]) -> list[Named]:
    """Write the report of a run on disk and read from it which cells fail and which templates carry the loss."""
    report = write_report(run)
    lost = {(d.suite, d.policy): losing(both) for d, both in gated_sides(report, load_run(run).panels)}
    rows = []
    for d in gated(report.verdict):
        listed = lost.get((d.suite, d.policy), ())
        own = tuple(sorted(name for name in spoilt if name.startswith(f"{d.suite}-")))
        rows.append(Named(f"{d.suite} {report.comparison.labels[d.policy]}", d, listed, own))
    return rows


def losing(both: BothSides) -> tuple[str, ...]:
    """The templates that lost something, worst first."""
    losses = Counter[str]()
    for template, difference in zip(both.templates, both.difference, strict=True):
        losses[template] += max(0.0, -float(difference))
    return tuple(template for template, loss in losses.most_common(MOST_LISTED) if loss > 0)


def _fresh(folder: Path) -> Path:
    """A place for a copy, emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def show_shares(title: str, found: Shares, planned: dict[tuple[str, str], float]) -> None:
    """The shares of the verdict, then those of every cell."""
    print(f"{title}: {_shares(found.verdicts, found.draws)}")
    for (suite, policy), statuses in sorted(found.cells.items()):
        plan = f"; planned on all templates: PASS {planned[suite, policy]:.3f}" if planned else ""
        print(f"  {suite}, {policy.partition(',')[0]}: {_shares(statuses, found.draws)}{plan}")


def _shares(counts: dict[Status, int], draws: int) -> str:
    return ", ".join(f"{status} {count / draws:.3f}" for status, count in sorted(counts.items()))


def show_named(title: str, rows: Sequence[Named]) -> None:
    """A line per gated cell."""
    print(title)
    for row in rows:
        d, effect = row.decision, row.decision.effect
        bounds = [] if effect is None else [effect.estimate, effect.lower, effect.upper]
        numbers = " ".join(f"{100 * value:+.1f}" for value in bounds)
        top = f"; {row.found} of {len(row.spoilt)} broken templates lead the table" if row.spoilt else ""
        print(f"  {row.cell}: {d.status}; drift, bounds in pp: {numbers}; max-T p {d.pvalue_drop:.4f}{top}")


def main() -> None:
    """Sample, gate, print the table of checks."""
    started = time.process_time()
    disable_progress_bar()
    checks = controls(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/controls"), Size())
    print("control | asked | reached | ok")
    for check in checks:
        print(f"{check.control} | {check.asked} | {check.reached} | {'yes' if check.ok else 'NO'}")
    print(f"{time.process_time() - started:.0f} s of CPU")
    sys.exit(0 if all(check.ok for check in checks) else MISSED)


if __name__ == "__main__":
    main()
