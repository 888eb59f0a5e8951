"""How often is a check in rounds wrong, how often does it decide, and after how many rows? Simulated.

    python -m bench.looks [--draws 4000] [--rows 1036] [--seed 7]

Takes a few minutes; results: docs/statistics.md and docs/decisions.md.

Rows lose, keep or gain an answer with fixed probabilities; a check looks after 32 and 100 rows, then after half as many
again, and at the last row. At exactly the margin both PASS and FAIL are errors. Decisions come from the functions that
the gate calls; one draw in forty is also decided by ``betting_effect`` itself, with the same result required.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import typer

from kvaudit.audit.runs.round_plan import look_sizes
from kvaudit.reports.stats.betting import SHARE, betting_effect, clusters_show, log_wealth
from kvaudit.reports.stats.effect import Array
from kvaudit.reports.stats.rule import shows_margin
from kvaudit.reports.stats.tango import many_ess_tango

MARGIN, ALPHA, TESTS = 0.05, 0.05, 2
OPEN, PASS, FAIL = 0, 1, 2
RECHECK = 40  # every so many draws one is also decided by ``betting_effect``


class Shares(NamedTuple):
    """The shares of answers that a setting loses and gains, and the true loss in words."""

    lost: float
    gained: float
    title: str


DESIGNS = (
    Shares(0, 0, "nothing changes"),
    Shares(0.02, 0.02, "equal, 4 % change"),
    Shares(0.05, 0.05, "equal, 10 % change"),
    Shares(0.10, 0.10, "equal, 20 % change"),
    Shares(0.025, 0, "half the margin"),
    Shares(0.03, 0.005, "half the margin"),
    Shares(0.05, 0.025, "half the margin"),
    Shares(0.05, 0, "at the margin"),
    Shares(0.055, 0.005, "at the margin"),
    Shares(0.06, 0.01, "at the margin"),
    Shares(0.10, 0.05, "at the margin"),
    Shares(0.15, 0.10, "at the margin"),
    Shares(0.10, 0, "twice the margin"),
    Shares(0.12, 0.02, "twice the margin"),
    Shares(0.15, 0.05, "twice the margin"),
    Shares(0.20, 0, "four times the margin"),
)


class Decisions(NamedTuple):
    """The decisions of D draws, and after how many rows they fell."""

    decision: np.ndarray  # [D] OPEN, PASS or FAIL
    rows: np.ndarray  # [D]


def simulate_checks(design: Shares, looks: Sequence[int], draws: int, rng: np.random.Generator) -> Decisions:
    """Simulate checks that stop at the first look that decides."""
    shares = [design.lost, 1 - design.lost - design.gained, design.gained]
    answers = rng.choice([-1.0, 0.0, 1.0], p=shares, size=(draws, looks[-1]))
    decisions, rows = np.zeros(draws, dtype=int), np.full(draws, looks[-1])
    for look in looks:
        is_open = np.flatnonzero(decisions == OPEN)
        decided = decide_look(answers[is_open, :look], is_last=look == looks[-1])
        decisions[is_open], rows[is_open[decided != OPEN]] = decided, look
    for draw in range(0, draws, RECHECK):
        assert decisions[draw] == decide_one(answers[draw], looks), (design, draw)
    return Decisions(decisions, rows)


def decide_look(answers: Array, *, is_last: bool) -> np.ndarray:
    """Return the decision of each draw of answers [D, N] at one look."""
    passed = bets_exceed(answers, -MARGIN, SHARE * ALPHA)
    failed = bets_exceed(-answers, MARGIN, SHARE * ALPHA / TESTS)
    if is_last:
        templates = shows_margin(answers, np.ones(answers.shape[1]), margin=MARGIN, alpha=(1 - SHARE) * ALPHA)
        passed |= (tango_lower(answers, (1 - SHARE) * ALPHA) > -MARGIN) & templates
        failed |= tango_lower(-answers, (1 - SHARE) * ALPHA / TESTS) > MARGIN
    return np.where(passed, PASS, np.where(failed, FAIL, OPEN))


def bets_exceed(answers: Array, null: float, level: float) -> np.ndarray:
    """Return for each draw [D, N] whether the bets show a mean above ``null``."""
    counts = np.stack([(answers < 0).sum(1), (answers == 0).sum(1), (answers > 0).sum(1)], axis=1)
    kinds, kind_of_draw = np.unique(counts, axis=0, return_inverse=True)
    wealth = np.array([log_wealth(np.repeat([-1.0, 0.0, 1.0], kind), null) for kind in kinds])
    return wealth[kind_of_draw.ravel()] >= -np.log(level)


def tango_lower(answers: Array, level: float) -> Array:
    """Return the lower bounds of ESS-Tango for draws [D, N]."""
    return many_ess_tango(answers, np.ones(answers.shape[1]), samples=1, alpha=level).lower


def decide_one(answers: Array, looks: Sequence[int]) -> int:
    """Return the decision for one draw [N], by the functions that the gate calls."""
    for look in looks:
        effect = betting_effect(answers[:look], np.arange(look), alpha=ALPHA, tests=TESTS, is_last=look == looks[-1])
        if effect.lower > -MARGIN and clusters_show(answers[:look], MARGIN, ALPHA):
            return PASS
        if effect.upper < -MARGIN:
            return FAIL
    return OPEN


def main(
    draws: Annotated[int, typer.Option(help="Checks to simulate for each design.")] = 4000,
    rows: Annotated[int, typer.Option(help="Rows that can be asked.")] = 1036,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 7,
) -> None:
    """Print how often a check passes, fails and stays open, and its median number of rows."""
    looks = look_sizes(rows)
    print(f"looks at {', '.join(map(str, looks))} rows; margin {100 * MARGIN:g} points, {draws} draws, seed {seed}\n")
    print("| lost, gained | true loss | PASS | FAIL | open | median rows |\n|---|---|---:|---:|---:|---:|")
    rng = np.random.default_rng(seed)
    for design in DESIGNS:
        result = simulate_checks(design, looks, draws, rng)
        shares = " | ".join(f"{100 * (result.decision == decision).mean():.1f} %" for decision in (PASS, FAIL, OPEN))
        print(
            f"| {100 * design.lost:g} %, {100 * design.gained:g} % | {design.title} | {shares} "
            f"| {int(np.median(result.rows))} |"
        )


if __name__ == "__main__":
    typer.run(main)
