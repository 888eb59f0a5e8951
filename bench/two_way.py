"""By what to cluster pairs of a user's task and a hidden order, both of which occur in many pairs?

    python -m bench.two_way [--simulations 2000] [--seed 1]

AgentDojo crosses its tasks with its orders inside four environments (944 pairs without a sandbox). A loss at the margin
is drawn that varies with the task, the order or both (a share of the latent variance of a probit), and each way to
cluster decides as the gate does: interval and template rule. ``thin`` asks every task with so many orders, in rotation.
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


def pairs(thin: int | None) -> Pairs:
    """Return every pair, or those of each task with ``thin`` orders."""
    tasks, orders, first = list[int](), list[int](), (0, 0)
    for users, attacks in ENVIRONMENTS:
        for user in range(users):
            asked = range(attacks) if thin is None else [(user * thin + n) % attacks for n in range(min(thin, attacks))]
            tasks += [first[0] + user] * len(asked)
            orders += [first[1] + attack for attack in asked]
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


def passes(z: npt.NDArray[np.float64], labels: Ints, margin: float) -> npt.NDArray[np.bool_]:
    """Return which samples [S, N] the gate passes with these clusters."""
    order = np.argsort(labels, kind="stable")
    counts = np.unique(labels, return_counts=True)[1]
    ordered = z[:, order]
    sums = np.add.reduceat(ordered, np.r_[0, np.cumsum(counts)[:-1]], axis=1)
    shown = shows_margin(sums, counts, margin=margin, alpha=ALPHA)
    if effective_clusters(counts) < clusters_required(margin, ALPHA):
        return np.zeros(len(z), dtype=np.bool_)
    return np.asarray(many_ess_tango(ordered, counts, alpha=ALPHA).lower > -margin) & shown


def main(
    simulations: Annotated[int, typer.Option(help="Draws of each case.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 1,
    margin: Annotated[float, typer.Option(help="In points.")] = 10,
    gain: Annotated[float, typer.Option(help="Share of pairs that gain, and lose as much beside the loss.")] = 0.02,
) -> None:
    """Print how often a loss at the margin passes, and how often no loss does."""
    designs = {"all pairs": pairs(None), **{f"thin {n}": pairs(n) for n in (1, 2, 3)}}
    alone = {"neither": (0.0, 0.0), "task .3": (0.3, 0.0), "task .6": (0.6, 0.0)}
    shares = {**alone, "order .3": (0.0, 0.3), "order .6": (0.0, 0.6), "both .2": (0.2, 0.2), "both .4": (0.4, 0.4)}
    print("| pairs | N | loss varies by | by task | by order | both | no loss: by task | by order | both |")
    print("|---" * 9 + "|")
    for design, p in designs.items():
        for name, (by_task, by_order) in shares.items():
            cells = []
            for loss in (margin / 100, 0.0):
                rng = np.random.default_rng([seed, len(cells)])
                z = draw(rng, p, simulations, loss, gain, by_task, by_order)
                ways = [passes(z, labels, margin / 100) for labels in p]
                cells += [f"{way.mean():.3f}" for way in (*ways, ways[0] & ways[1])]
            print(f"| {design} | {len(p.tasks)} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
