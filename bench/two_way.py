"""By what should pairs be clustered, if each user's task and each hidden order occurs in many pairs?

    python -m bench.two_way [--simulations 2000] [--seed 1] [--gain 0.02] [--injecagent]

Takes 10 seconds; results: docs/statistics.md.

AgentDojo crosses its tasks with its orders inside four environments: 944 pairs, or 560 with 16 tasks for each order. A
loss at the margin is simulated that varies with the task, the order or both (a share of the latent variance of a
probit), and each clustering decides as the gate does, by interval and template rule. FAIL is counted by the interval
alone, before the adjustment for several cells.

With ``--injecagent`` the pairs are those of ``orders`` in a check with ``--agents``: each attacker with one or more of
17 users, clustered by the attacker. The decisions are those of the last look of a check with five endpoints.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from scipy import special

from kvaudit.reports.stats.betting import SHARE, log_wealth
from kvaudit.reports.stats.rule import clusters_required, effective_clusters, shows_margin
from kvaudit.reports.stats.tango import many_ess_tango

ENVIRONMENTS = ((40, 14), (20, 5), (20, 7), (16, 9))  # tasks and orders: workspace, slack, travel, banking
USERS, ATTACKERS = 17, (62, 30)  # of InjecAgent, with and without those who steal data
SMALL_LOSS, PLANTED_LOSS = 0.02, 0.2
TESTS = 5  # gated cells of a check with --agents
ALPHA = 0.05
# shares of the latent variance that are the task's and the order's
SHARES = {
    "neither": (0.0, 0.0),
    "task .3": (0.3, 0.0),
    "task .6": (0.6, 0.0),
    "order .3": (0.0, 0.3),
    "order .6": (0.0, 0.6),
    "both .2": (0.2, 0.2),
    "both .4": (0.4, 0.4),
}
Ints = npt.NDArray[np.int64]


class Pairs(NamedTuple):
    """The pairs that are asked: the numbers [N] of their tasks and of their orders."""

    tasks: Ints
    orders: Ints


def choose_pairs(rng: np.random.Generator, per_order: int) -> Pairs:
    """Return ``per_order`` random tasks for every order, as a spec's number of items chooses them."""
    tasks, orders, first = list[int](), list[int](), (0, 0)
    for users, attacks in ENVIRONMENTS:
        for attack in range(attacks):
            tasks += (first[0] + rng.choice(users, per_order, replace=False)).tolist()
            orders += [first[1] + attack] * per_order
        first = first[0] + users, first[1] + attacks
    return Pairs(np.array(tasks), np.array(orders))


def draw_differences(
    rng: np.random.Generator, p: Pairs, size: int, loss: float, gain: float, by_task: float, by_order: float
) -> npt.NDArray[np.float64]:
    """Return differences [size, N] of mean -``loss``; ``by_task``, ``by_order`` are shares of the latent variance."""
    lost = loss + gain
    effect = np.sqrt(by_task) * rng.standard_normal((size, p.tasks.max() + 1))[:, p.tasks]
    effect += np.sqrt(by_order) * rng.standard_normal((size, p.orders.max() + 1))[:, p.orders]
    noise = np.sqrt(1 - by_task - by_order) * rng.standard_normal(effect.shape)
    is_lost = effect + noise < special.ndtri(lost)
    is_gained = rng.random(effect.shape) < gain / (1 - lost)
    return np.where(is_lost, -1.0, is_gained.astype(np.float64))


def decide(z: npt.NDArray[np.float64], labels: Ints, margin: float) -> tuple[npt.NDArray[np.bool_], ...]:
    """Return which samples [S, N] pass with these clusters, and which show a drop."""
    order = np.argsort(labels, kind="stable")
    counts = np.unique(labels, return_counts=True)[1]
    ordered = z[:, order]
    bounds = many_ess_tango(ordered, counts, alpha=ALPHA)
    sums = np.add.reduceat(ordered, np.r_[0, np.cumsum(counts)[:-1]], axis=1)
    shown = shows_margin(sums, counts, margin=margin, alpha=ALPHA)
    enough = effective_clusters(counts) >= clusters_required(margin, ALPHA)
    return np.asarray(bounds.lower > -margin) & shown & enough, np.asarray(bounds.upper < 0)


def spread_users(attackers: int, each: int) -> Pairs:
    """Return ``each`` users for every attacker, every user equally often."""
    numbers = np.arange(attackers * each)
    return Pairs(numbers % USERS, numbers // each)


def decide_last_look(
    z: npt.NDArray[np.float64], each: int, margin: float
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which samples [S, N] pass, and which fail, at the last look; ``each`` pairs are one cluster."""
    means = z.reshape(len(z), -1, each).mean(axis=2)  # [S, C]
    counts, level = np.ones(means.shape[1], dtype=np.int64), (1 - SHARE) * ALPHA
    low, high = (many_ess_tango(means, counts, alpha=alpha, graded=each > 1) for alpha in (level, level / TESTS))
    shown = shows_margin(means, counts, margin=margin, alpha=level)
    passed = bets_exceed(means, -margin, SHARE * ALPHA) | ((low.lower > -margin) & shown)
    return passed, bets_exceed(-means, margin, SHARE * ALPHA / TESTS) | (high.upper < -margin)


def bets_exceed(means: npt.NDArray[np.float64], null: float, level: float) -> npt.NDArray[np.bool_]:
    """Return for each sample of cluster means [S, C] whether the bets show a mean above ``null``."""
    kinds, kind_of_sample = np.unique(np.sort(means, axis=1), axis=0, return_inverse=True)
    wealth = np.array([log_wealth(kind, null) for kind in kinds])
    return np.asarray(wealth[kind_of_sample.ravel()] >= -np.log(level))


def print_injecagent(simulations: int, seed: int, margin: float, gain: float) -> None:
    """Print the rates of ``orders`` with one, two and four users for each attacker."""
    print(
        "| attackers | users each | loss varies by | at the margin: PASS | FAIL | no loss: PASS | 2 % lost: PASS |",
        end="",
    )
    print(" 20 % lost: FAIL |\n" + "|---" * 8 + "|")
    for attackers in ATTACKERS:
        for each in (1, 2, 4):
            p = spread_users(attackers, each)
            for name, (by_user, by_attacker) in SHARES.items():
                rates = []
                for number, loss in enumerate((margin, 0.0, SMALL_LOSS, PLANTED_LOSS)):
                    rng = np.random.default_rng([seed, number])
                    z = draw_differences(rng, p, simulations, loss, gain, by_user, by_attacker)
                    rates.append([float(decided.mean()) for decided in decide_last_look(z, each, margin)])
                (wrong, failed), (equal, _), (small, _), (_, planted) = rates
                cells = " | ".join(f"{rate:.3f}" for rate in (wrong, failed, equal, small, planted))
                label = name.replace("task", "user").replace("order", "attacker")
                print(f"| {attackers} | {each} | {label} | {cells} |", flush=True)


def main(
    simulations: Annotated[int, typer.Option(help="Draws of each case.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 1,
    margin: Annotated[float, typer.Option(help="Margin in points.")] = 10,
    gain: Annotated[float, typer.Option(help="Share of pairs that change each way by chance.")] = 0.02,
    injecagent: Annotated[bool, typer.Option("--injecagent", help="Simulate InjecAgent's pairs instead.")] = False,
) -> None:
    """Print how often a loss at the margin passes, and how often no loss passes or shows a drop."""
    if injecagent:
        print_injecagent(simulations, seed, margin / 100, gain)
        return
    designs = {f"{n} an order": choose_pairs(np.random.default_rng(seed), n) for n in (7, 16)}
    print("| pairs | N | loss varies by | PASS by task | by order | no loss: PASS by task | by order | drop by order |")
    print("|---" * 8 + "|")
    for design, p in designs.items():
        for name, (by_task, by_order) in SHARES.items():
            cells = []
            for loss in (margin / 100, 0.0):
                rng = np.random.default_rng([seed, len(cells)])
                z = draw_differences(rng, p, simulations, loss, gain, by_task, by_order)
                cells += [f"{decide(z, labels, margin / 100)[0].mean():.3f}" for labels in p]
            cells.append(f"{decide(z, p.orders, margin / 100)[1].mean():.3f}")
            print(f"| {design} | {len(p.tasks)} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
