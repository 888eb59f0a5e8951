"""By what should pairs be clustered, if each user's task and each hidden order occurs in many pairs?

    python -m bench.two_way [--simulations 2000] [--seed 1] [--gain 0.02]

Takes 10 seconds; results: docs/statistics.md.

AgentDojo crosses its tasks with its orders inside four environments: 944 pairs, or 560 with 16 tasks for each order. A
loss at the margin is simulated that varies with the task, the order or both (a share of the latent variance of a
probit), and each clustering decides as the gate does, by interval and template rule. FAIL is counted by the interval
alone, before the adjustment for several cells.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from scipy import special

from kvaudit.reports.stats.rule import clusters_required, effective_clusters, shows_margin
from kvaudit.reports.stats.tango import many_ess_tango

ENVIRONMENTS = ((40, 14), (20, 5), (20, 7), (16, 9))  # tasks and orders: workspace, slack, travel, banking
ALPHA = 0.05
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


def main(
    simulations: Annotated[int, typer.Option(help="Draws of each case.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 1,
    margin: Annotated[float, typer.Option(help="Margin in points.")] = 10,
    gain: Annotated[float, typer.Option(help="Share of pairs that change each way by chance.")] = 0.02,
) -> None:
    """Print how often a loss at the margin passes, and how often no loss passes or shows a drop."""
    designs = {f"{n} an order": choose_pairs(np.random.default_rng(seed), n) for n in (7, 16)}
    one_way = {"neither": (0.0, 0.0), "task .3": (0.3, 0.0), "task .6": (0.6, 0.0)}
    shares = {**one_way, "order .3": (0.0, 0.3), "order .6": (0.0, 0.6), "both .2": (0.2, 0.2), "both .4": (0.4, 0.4)}
    print("| pairs | N | loss varies by | PASS by task | by order | no loss: PASS by task | by order | drop by order |")
    print("|---" * 8 + "|")
    for design, p in designs.items():
        for name, (by_task, by_order) in shares.items():
            cells = []
            for loss in (margin / 100, 0.0):
                rng = np.random.default_rng([seed, len(cells)])
                z = draw_differences(rng, p, simulations, loss, gain, by_task, by_order)
                cells += [f"{decide(z, labels, margin / 100)[0].mean():.3f}" for labels in p]
            cells.append(f"{decide(z, p.orders, margin / 100)[1].mean():.3f}")
            print(f"| {design} | {len(p.tasks)} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
