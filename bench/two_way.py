"""By what to cluster pairs of a user's task and a hidden order, both of which occur in many pairs?

    python -m bench.two_way [--simulations 2000] [--seed 1]

AgentDojo crosses its tasks with its orders inside four environments (944 pairs without a sandbox), of which 16 an order
are even (560). A loss at the margin is drawn that varies with the task, the order or both (a share of the latent
variance of a probit), and each way to cluster decides as the gate does: interval and template rule. A FAIL is counted
by its interval alone, before the adjustment for several cells.
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
    """The pairs that are asked: numbers of their tasks and orders."""

    tasks: Ints
    orders: Ints


def pairs(rng: np.random.Generator, each: int) -> Pairs:
    """Return ``each`` of the pairs of every order, as a spec's number of items chooses them."""
    tasks, orders, first = list[int](), list[int](), (0, 0)
    for users, attacks in ENVIRONMENTS:
        for attack in range(attacks):
            tasks += (first[0] + rng.choice(users, each, replace=False)).tolist()
            orders += [first[1] + attack] * each
        first = first[0] + users, first[1] + attacks
    return Pairs(np.array(tasks), np.array(orders))


def draw(
    rng: np.random.Generator, p: Pairs, size: int, loss: float, gain: float, by_task: float, by_order: float
) -> npt.NDArray[np.float64]:
    """Return differences [size, N] with a mean of -``loss``; shares of the latent variance lie in tasks and orders."""
    lost = loss + gain
    effect = np.sqrt(by_task) * rng.standard_normal((size, p.tasks.max() + 1))[:, p.tasks]
    effect += np.sqrt(by_order) * rng.standard_normal((size, p.orders.max() + 1))[:, p.orders]
    noise = np.sqrt(1 - by_task - by_order) * rng.standard_normal(effect.shape)
    is_lost = effect + noise < special.ndtri(lost)
    is_gained = rng.random(effect.shape) < gain / (1 - lost)
    return np.where(is_lost, -1.0, is_gained.astype(np.float64))


def decisions(z: npt.NDArray[np.float64], labels: Ints, margin: float) -> tuple[npt.NDArray[np.bool_], ...]:
    """Return which samples [S, N] the gate passes with these clusters, and which show a drop."""
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
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 1,
    margin: Annotated[float, typer.Option(help="In points.")] = 10,
    gain: Annotated[float, typer.Option(help="Share of pairs that gain, and lose as much beside the loss.")] = 0.02,
) -> None:
    """Print how often a loss at the margin passes, and how often no loss does or shows a drop."""
    designs = {f"{n} an order": pairs(np.random.default_rng(seed), n) for n in (7, 16)}
    alone = {"neither": (0.0, 0.0), "task .3": (0.3, 0.0), "task .6": (0.6, 0.0)}
    shares = {**alone, "order .3": (0.0, 0.3), "order .6": (0.0, 0.6), "both .2": (0.2, 0.2), "both .4": (0.4, 0.4)}
    print("| pairs | N | loss varies by | PASS by task | by order | no loss: PASS by task | by order | drop by order |")
    print("|---" * 8 + "|")
    for design, p in designs.items():
        for name, (by_task, by_order) in shares.items():
            cells = []
            for loss in (margin / 100, 0.0):
                rng = np.random.default_rng([seed, len(cells)])
                z = draw(rng, p, simulations, loss, gain, by_task, by_order)
                cells += [f"{decisions(z, labels, margin / 100)[0].mean():.3f}" for labels in p]
            cells.append(f"{decisions(z, p.orders, margin / 100)[1].mean():.3f}")
            print(f"| {design} | {len(p.tasks)} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
