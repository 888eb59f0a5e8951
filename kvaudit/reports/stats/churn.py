"""What a drift hides: how many items changed at all, and whether the losses lie in a few templates.

A drift near zero may be many losses and as many gains; a drift spread over all templates and one that broke a single
template share a mean.
No statistic: counts and shares that describe a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvaudit.reports.stats.effect import Array


@dataclass(frozen=True, slots=True)
class Churn:
    """Shares of the items; gains - losses is the drift in either reading.

    ``losses, gains, churn`` sum the negative and positive changes of item means. ``draw_*`` are for one draw against
    one draw; ``rerun_churn`` is what two draws of one and the same checkpoint disagree on (mean of both arms), so only
    draw_churn beyond it is change; None with a single sample.
    """

    losses: float
    gains: float
    churn: float
    draw_losses: float
    draw_gains: float
    draw_churn: float
    rerun_churn: float | None
    n_items: int
    samples: int
    method: str = "churn"
    source: str = "McNemar 1947"


@dataclass(frozen=True, slots=True)
class Flips:
    """Shares of the answers; won - lost is the drift.

    ``rerun`` is the A/A churn: what two answers of one and the same checkpoint disagree on, mean of both sides; None
    with a single sample, which has no second answer.
    """

    lost: float
    won: float
    rerun: float | None = None

    @property
    def churn(self) -> float:
        """P(candidate's answer is not the reference's)."""
        return self.lost + self.won


def flips(reference: npt.ArrayLike, candidate: npt.ArrayLike, *, samples: int = 1) -> Flips:
    """What an answer of the candidate has lost and won against the reference's answer of the same pair of seeds.

    Item means [S, N] in [0, 1] of ``samples`` draws each, a row per pair of seeds. A single draw meets the single draw
    of its pair; of several, whose order means nothing, every draw of one side meets every draw of the other.
    """
    old, new = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    assert old.shape == new.shape, (old.shape, new.shape)
    assert old.size, "flips need an item"
    if samples == 1:
        return Flips(float(np.maximum(old - new, 0).mean()), float(np.maximum(new - old, 0).mean()))
    # an item's mean is the chance of one of its draws, so a product is the chance of two draws that part
    return Flips(float((old * (1 - new)).mean()), float(((1 - old) * new).mean()), _rerun(old, new, samples))


def _rerun(old: Array, new: Array, samples: int) -> float:
    """Share of pairs of draws that disagree inside an item, without bias, mean of both sides."""
    # two draws of one item disagree with 2 p (1 - p): the mean of both sides takes the 2
    return float((old * (1 - old) + new * (1 - new)).mean()) * samples / (samples - 1)


def churn_of(reference: npt.ArrayLike, candidate: npt.ArrayLike, *, samples: int = 1) -> Churn:
    """Churn between item means [N] in [0, 1] of ``samples`` 0/1 draws each."""
    old, new = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    assert old.shape == new.shape, (old.shape, new.shape)
    assert old.size, "churn needs an item"
    assert np.all((old >= 0) & (old <= 1) & (new >= 0) & (new <= 1)), "item means lie in [0, 1]"
    losses, gains = float(np.maximum(old - new, 0).mean()), float(np.maximum(new - old, 0).mean())
    lost, won = float((old * (1 - new)).mean()), float(((1 - old) * new).mean())
    rerun = _rerun(old, new, samples) if samples > 1 else None
    return Churn(losses, gains, losses + gains, lost, won, lost + won, rerun, old.size, samples)


HALF = 0.5


@dataclass(frozen=True, slots=True)
class ClusterLoss:
    """One cluster: ``share`` of all losses, ``rate`` of its own items lost; losses and gains in items."""

    label: str
    items: int
    losses: float
    gains: float
    share: float
    rate: float


@dataclass(frozen=True, slots=True)
class Concentration:
    """Losses by cluster, worst first.

    ``gini`` is 0 when every cluster loses alike and near 1 when one loses all; ``chance`` what it would be on average
    had the same losses fallen on items at random. ``carrying_half`` is the fewest clusters with at least half of the
    losses. ``dominant`` holds the cluster with more than half of all losses, if there is one;
    ``broken`` those that lost more than half of their own items.
    """

    losses: float
    gini: float
    chance: float
    carrying_half: int
    dominant: tuple[str, ...]
    broken: tuple[str, ...]
    clusters: tuple[ClusterLoss, ...]
    method: str = "losses per cluster, Gini"
    source: str = "Gini 1912"


def concentration_of(z: npt.ArrayLike, clusters: npt.ArrayLike) -> Concentration:
    """Concentration of the losses among item differences z [N] in clusters [N]."""
    values = np.asarray(z, dtype=np.float64)
    labels, codes = np.unique(np.asarray(clusters), return_inverse=True)
    assert codes.shape == values.shape, (codes.shape, values.shape)
    assert np.isfinite(values).all(), "an item difference is not finite"
    items = np.bincount(codes)
    losses = np.bincount(codes, weights=np.maximum(-values, 0.0))  # [C], in items
    gains = np.bincount(codes, weights=np.maximum(values, 0.0))
    total = float(losses.sum())
    order = np.lexsort([np.arange(len(labels)), -losses])  # worst first, equal ones by label
    rows = tuple(
        ClusterLoss(
            label=str(labels[c]),
            items=int(items[c]),
            losses=float(losses[c]),
            gains=float(gains[c]),
            share=float(losses[c]) / total if total else 0.0,
            rate=float(losses[c] / items[c]),
        )
        for c in order
    )
    running = np.cumsum(losses[order])  # [C], running total from the worst on
    return Concentration(
        losses=total,
        gini=float(gini(losses)),
        chance=chance_gini(np.maximum(-values, 0.0), items),
        # a sum of exactly half may fall short of it by rounding
        carrying_half=int(np.searchsorted(running, total * HALF * (1 - 1e-12)) + 1) if total else 0,
        dominant=tuple(row.label for row in rows if row.share > HALF),
        broken=tuple(row.label for row in rows if row.rate > HALF),
        clusters=rows,
    )


def gini(values: npt.ArrayLike) -> Array:
    """Gini coefficients [...] of values [..., C] that are not negative; 0 where all are 0."""
    x: Array = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    assert np.all(x >= 0), "losses are not negative"
    total = x.sum(axis=-1)
    clusters = x.shape[-1]
    ranks = np.arange(1, clusters + 1)  # [C]
    # the distances of all pairs, summed up from sorted values, over C times the total
    found: Array = x @ (2.0 * ranks - clusters - 1) / (clusters * np.where(total > 0, total, 1.0))
    return found


_SHUFFLES = 400  # give the mean to about .002
_MOST_LOSSES = 1_000_000  # shuffled at once; more items scatter less and take fewer shuffles


def chance_gini(losses: npt.ArrayLike, counts: npt.ArrayLike) -> float:
    """Mean Gini by cluster of item losses [N] that fall at random on clusters of ``counts`` [C] items.

    One lost item gives 1 - 1/C whatever happened, so a Gini says something only beside this one. Sorted values and
    sizes go in and the seed is fixed: neither the order of items nor the names of clusters change the mean.
    """
    values, sizes = np.sort(np.asarray(losses, dtype=np.float64)), np.sort(np.asarray(counts))
    assert len(values) == sizes.sum(), (len(values), int(sizes.sum()))
    shuffles = max(1, min(_SHUFFLES, _MOST_LOSSES // len(values)))
    shuffled = np.random.default_rng(0).permuted(np.tile(values, (shuffles, 1)), axis=1)  # [shuffles, N]
    return float(gini(np.add.reduceat(shuffled, np.cumsum(sizes) - sizes, axis=1)).mean())
