"""How often a check is wrong, how often it decides and after how many rows: the sequential rule, simulated.

    python -m bench.looks [--draws 4000] [--rows 1036] [--seed 7]

Rows lose, keep or gain an answer with given shares; a check looks after 100 rows, then after half as many again, and at
the last. At the margin a PASS is false, and so is a FAIL. Every decision comes from the functions that the gate calls;
one draw in forty is decided by ``betting_effect`` itself as well, and must come out alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import typer

from kvaudit.audit.runs.stages.rounds import look_sizes
from kvaudit.reports.stats.betting import SHARE, betting_effect, clusters_show, log_wealth
from kvaudit.reports.stats.effect import Array
from kvaudit.reports.stats.rule import shows_margin
from kvaudit.reports.stats.tango import many_ess_tango

MARGIN, ALPHA, TESTS = 0.05, 0.05, 2
OPEN, PASS, FAIL = 0, 1, 2
CHECKED = 40


class Shares(NamedTuple):
    """How many of the answers a setting loses and gains, and what that is beside the margin."""

    lost: float
    gained: float
    says: str


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


class Decided(NamedTuple):
    """What draws [D] came to, and after how many rows."""

    word: np.ndarray
    rows: np.ndarray


def simulated(design: Shares, looks: Sequence[int], draws: int, rng: np.random.Generator) -> Decided:
    """Checks that stop at the first look that decides."""
    shares = [design.lost, 1 - design.lost - design.gained, design.gained]
    answers = rng.choice([-1.0, 0.0, 1.0], p=shares, size=(draws, looks[-1]))
    word, rows = np.zeros(draws, dtype=int), np.full(draws, looks[-1])
    for look in looks:
        open_ = np.flatnonzero(word == OPEN)
        found = look_at(answers[open_, :look], is_last=look == looks[-1])
        word[open_], rows[open_[found != OPEN]] = found, look
    for draw in range(0, draws, CHECKED):
        assert word[draw] == by_effects(answers[draw], looks), (design, draw)
    return Decided(word, rows)


def look_at(answers: Array, *, is_last: bool) -> np.ndarray:
    """The word for every draw of answers [D, N]."""
    passed = bets_show(answers, -MARGIN, SHARE * ALPHA)
    failed = bets_show(-answers, MARGIN, SHARE * ALPHA / TESTS)
    if is_last:
        templates = shows_margin(answers, np.ones(answers.shape[1]), margin=MARGIN, alpha=(1 - SHARE) * ALPHA)
        passed |= (fixed_bound(answers, (1 - SHARE) * ALPHA) > -MARGIN) & templates
        failed |= fixed_bound(-answers, (1 - SHARE) * ALPHA / TESTS) > MARGIN
    return np.where(passed, PASS, np.where(failed, FAIL, OPEN))


def bets_show(answers: Array, null: float, level: float) -> np.ndarray:
    """Whether the bets show that the mean of draws [D, N] lies above ``null``."""
    counts = np.stack([(answers < 0).sum(1), (answers == 0).sum(1), (answers > 0).sum(1)], axis=1)
    kinds, back = np.unique(counts, axis=0, return_inverse=True)
    wealth = np.array([log_wealth(np.repeat([-1.0, 0.0, 1.0], kind), null) for kind in kinds])
    return wealth[back.ravel()] >= -np.log(level)


def fixed_bound(answers: Array, level: float) -> Array:
    """The lower bounds of ESS-Tango for draws [D, N]."""
    return many_ess_tango(answers, np.ones(answers.shape[1]), samples=1, alpha=level).lower


def by_effects(answers: Array, looks: Sequence[int]) -> int:
    """The word for one draw [N] as the gate comes to it."""
    for look in looks:
        found = betting_effect(answers[:look], np.arange(look), alpha=ALPHA, tests=TESTS, is_last=look == looks[-1])
        if found.lower > -MARGIN and clusters_show(answers[:look], MARGIN, ALPHA):
            return PASS
        if found.upper < -MARGIN:
            return FAIL
    return OPEN


def main(
    draws: Annotated[int, typer.Option(help="Checks to simulate for each design.")] = 4000,
    rows: Annotated[int, typer.Option(help="Rows at hand.")] = 1036,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 7,
) -> None:
    """Print a table: how often a check passes, fails and stays open, and its median rows."""
    looks = look_sizes(rows)
    print(f"looks at {', '.join(map(str, looks))} rows; margin {100 * MARGIN:g} points, {draws} draws, seed {seed}\n")
    print("| lost, gained | that is | PASS | FAIL | open | median rows |\n|---|---|---:|---:|---:|---:|")
    rng = np.random.default_rng(seed)
    for design in DESIGNS:
        found = simulated(design, looks, draws, rng)
        shares = " | ".join(f"{100 * (found.word == word).mean():.1f} %" for word in (PASS, FAIL, OPEN))
        print(
            f"| {100 * design.lost:g} %, {100 * design.gained:g} % | {design.says} | {shares} "
            f"| {int(np.median(found.rows))} |"
        )


if __name__ == "__main__":
    typer.run(main)
