"""Drift by human labels: people label every pair that the judge calls different, and a sample of the other pairs.

A pair is the reference's and the candidate's answer to one request; it is discordant if the judge gave the two answers
different grades, else concordant. The sample of concordant pairs is spread over the templates, because a judge may miss
what happens in whole templates. A template's drift is the sum over its discordant pairs, plus the number of its
concordant pairs times the mean of those of them that are labelled. The discordant and the concordant pairs each give
one part of the drift, with an ESS-Tango interval (Tango's score interval at the effective sample size, ``tango``). The
two intervals are added by MOVER (Zou & Donner 2008). A single interval of the sum would be too narrow if all sampled
concordant pairs happen to show no difference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.clustered import ManyTotals, cr3_variance
from kvaudit.reports.stats.effect import LEVEL, Effect, Statistic
from kvaudit.reports.stats.mover import SumBounds, mover_bounds
from kvaudit.reports.stats.tango import design_effects, tango_bounds

Array = npt.NDArray[np.float64]
_SUREST = 1 - 1e-12  # highest confidence; smaller p-values are not computed


class Labelled(NamedTuple):
    """Counts of the pairs of one comparison, or of many at once, by template: every field is [..., C].

    People labelled every pair that the judge graded differently. ``alike`` counts the pairs that it graded alike,
    ``looked`` those among them that people labelled.
    """

    pairs: Array  # all
    losses: Array  # discordant pairs that are a loss by human labels
    gains: Array
    alike: Array  # pairs that the judge graded alike
    looked: Array  # those of them that people labelled
    looked_losses: Array
    looked_gains: Array

    @property
    def unseen(self) -> npt.NDArray[np.int64]:
        """The number of templates with concordant pairs of which none is labelled, for each comparison [...].

        Errors that the judge makes in both answers of a pair would go unnoticed there.
        """
        return np.asarray(np.count_nonzero((self.alike > 0) & (self.looked == 0), axis=-1))

    @property
    def means(self) -> Array:
        """The mean human-labelled difference of the pairs that the judge graded alike, by template [..., C].

        A template without labels takes the overall mean.
        """
        seen = self.looked > 0
        own = (self.looked_gains - self.looked_losses) / np.maximum(self.looked, 1)  # [..., C]
        known = np.where(seen, self.alike, 0.0)
        overall = (known * own).sum(axis=-1) / np.maximum(known.sum(axis=-1), 1)  # [...]
        return np.where(seen, own, overall[..., None])

    @property
    def totals(self) -> Array:
        """The human-labelled differences summed over all pairs of each template [..., C].

        A pair without a label counts as the mean of the labelled pairs that the judge graded alike.
        """
        return self.gains - self.losses + self.alike * self.means


def round_robin(
    rng: np.random.Generator, alike: npt.NDArray[np.bool_], clusters: npt.ArrayLike, size: int
) -> npt.NDArray[np.bool_]:
    """Return a mask [..., N] of the pairs to label: ``size`` random ones of those that the judge graded alike.

    ``alike`` [..., N] marks the pairs graded alike, ``clusters`` [N] names the template of each pair. The pairs are
    drawn in rounds: in each round every template gives one pair, as long as it has any left. With the same ``rng``, a
    larger ``size`` selects all pairs of a smaller one, and more.
    """
    _, codes, counts = np.unique(np.asarray(clusters), return_inverse=True, return_counts=True)
    draws, ties = rng.random((2, *alike.shape))  # each [..., N]
    # within a cluster the pairs alike come first, in random order: their position is their round
    order = np.lexsort((draws, ~alike, np.broadcast_to(codes, alike.shape)))
    # [N], sorted: 0, 1, 2 .. inside every cluster
    place = np.arange(alike.shape[-1]) - np.repeat(np.cumsum(counts) - counts, counts)
    turn = np.empty(alike.shape)
    np.put_along_axis(turn, order, np.broadcast_to(place, alike.shape), axis=-1)
    # the integer part is the round, the fraction the order of clusters within it
    first = np.argsort(np.where(alike, turn + ties, np.inf), axis=-1)[..., :size]
    chosen = np.zeros(alike.shape, dtype=np.bool_)
    np.put_along_axis(chosen, first, True, axis=-1)
    return chosen & alike


def labelled_pairs(discordant: npt.ArrayLike, human_z: npt.ArrayLike, clusters: npt.ArrayLike) -> Labelled:
    """Return the counts by template of labelled and unlabelled pairs [..., N].

    ``discordant`` marks the pairs that the judge graded differently. ``human_z`` is candidate - reference by human
    labels, NaN for unlabelled pairs. ``clusters`` [N] names the template of each pair.
    """
    apart, human = np.asarray(discordant, dtype=np.bool_), np.asarray(human_z, dtype=np.float64)
    assert apart.shape == human.shape, (apart.shape, human.shape)
    assert not np.isnan(human[apart]).any(), "every discordant pair needs a human label"
    assert not np.isinf(human).any(), "a human label is not finite"
    seen = ~apart & ~np.isnan(human)  # labelled pairs among those alike
    assert np.all(seen.any(axis=-1) | apart.all(axis=-1)), "a random sample of the concordant pairs needs human labels"
    _, codes, counts = np.unique(np.asarray(clusters), return_inverse=True, return_counts=True)
    # pairs in order of cluster [N], and the first of each cluster [C]
    order, starts = np.argsort(codes, kind="stable"), np.cumsum(counts) - counts

    def summed(values: npt.NDArray[np.generic]) -> Array:
        # [..., N] to [..., C]
        inside: Array = np.add.reduceat(values[..., order], starts, axis=-1, dtype=np.float64)
        return inside

    lost, won = np.fmax(-human, 0.0), np.fmax(human, 0.0)  # 0 for unlabelled pairs
    parts = (apart * lost, apart * won, ~apart, seen, seen * lost, seen * won)
    return Labelled(counts.astype(np.float64), *(summed(part) for part in parts))


def label_weights(discordant: npt.ArrayLike, human_z: npt.ArrayLike, clusters: npt.ArrayLike) -> Array:
    """Return, for each of N pairs, the number of pairs that it stands for [N].

    A discordant pair stands for itself, a labelled concordant pair for an equal share of the concordant pairs of its
    template, an unlabelled concordant pair for none. Templates without a label are represented by the others.
    """
    apart, seen = np.asarray(discordant, dtype=np.bool_), ~np.isnan(np.asarray(human_z, dtype=np.float64))
    x = labelled_pairs(discordant, human_z, clusters)
    _, codes = np.unique(np.asarray(clusters), return_inverse=True)
    known = np.where(x.looked > 0, x.alike, 0.0)
    # templates without labels are represented by those with labels, as in ``means``
    share = known / np.maximum(x.looked, 1) * x.alike.sum() / max(known.sum(), 1.0)
    return np.where(apart, 1.0, np.where(seen, share[codes], 0.0)).astype(np.float64)


def adjudicated(
    discordant: npt.ArrayLike, human_z: npt.ArrayLike, clusters: npt.ArrayLike, *, alpha: float = 0.05
) -> Effect:
    """Return the drift of N pairs by human labels of all discordant pairs and of a sample of the concordant ones.

    ``discordant`` [N] marks the pairs that the judge graded differently. ``human_z`` [N] is candidate - reference in
    human labels (-1, 0, 1; NaN for unlabelled pairs). ``clusters`` [N] names the template of each pair. A pair is an
    item, or one sample of an item.
    """
    x = labelled_pairs(discordant, human_z, clusters)
    # the printed interval, and the bounds of the gate
    two, one = (adjudicated_bounds(x, confidence=c) for c in (0.5 + LEVEL / 2, 1 - alpha))
    drop = _drop_pvalue(x)
    apart, alike = _discordant_part(x), _concordant_part(x)
    each = float(x.alike.sum() / max(alike.items, 1.0))  # pairs that a labelled one represents
    return Effect(
        estimate=float(two.estimate),
        low=float(two.low),
        high=float(two.high),
        lower=float(one.low),
        upper=float(one.high),
        alpha=alpha,
        pvalue=min(1.0, 2 * min(drop, 1 - drop)),
        pvalue_drop=drop,
        method="adjudicated, ESS-Tango by MOVER",
        source="Zou & Donner 2008",
        n_items=int(x.pairs.sum()),
        n_clusters=len(x.pairs),
        losses=float(apart.losses + alike.losses * each),
        gains=float(apart.gains + alike.gains * each),
        deff=float(apart.deff),
        df=float(len(x.pairs) - 1),
    )


class _Part(NamedTuple):
    """One of the two parts of the drift: from the pairs that the judge graded differently, or from those graded alike.

    It holds the summed losses and gains [...] of ``items`` pairs and their design effect. ``df`` are the degrees of
    freedom of the t quantile with which its bounds are computed.
    """

    losses: Array
    gains: Array
    items: Array
    deff: Array
    df: int

    @property
    def mean(self) -> Array:
        return (self.gains - self.losses) / np.maximum(self.items, 1)

    def bounds(self, confidence: float) -> Array:
        """Return lower and upper bounds [2, ...] of the part's mean difference, each one-sided at ``confidence``."""
        if self.df < 1:  # a single template is no sample of templates
            return np.stack([np.full(self.items.shape, end) for end in (-1.0, 1.0)])
        quantile = float(special.stdtrit(self.df, confidence))
        # in effective independent pairs
        losses, gains, items = (part / self.deff for part in (self.losses, self.gains, self.items))
        return tango_bounds(losses, gains, items, np.array([quantile, -quantile]))


def _discordant_part(x: Labelled) -> _Part:
    """Return the part of the drift from the pairs that the judge graded differently; all other pairs count as equal."""
    return _part_of(x.losses, x.gains, x.pairs, least=1.0)


def _concordant_part(x: Labelled) -> _Part:
    """Return the part of the drift from pairs graded alike.

    Each labelled pair is weighted by how many pairs of its template it stands for.
    """
    known = np.where(x.looked > 0, x.alike, 0.0)
    drawn = x.looked.sum(axis=-1, keepdims=True)
    # the total is the number of labelled pairs: weights must not make a sample larger
    sizes = known * drawn / np.maximum(known.sum(axis=-1, keepdims=True), 1)
    each = sizes / np.maximum(x.looked, 1)  # weight of a labelled pair
    unequal = (sizes * each).sum(axis=-1) / np.maximum(sizes.sum(axis=-1), 1)  # Kish's design effect of the weights
    return _part_of(each * x.looked_losses, each * x.looked_gains, sizes, least=unequal)


def _part_of(losses: Array, gains: Array, sizes: Array, *, least: npt.ArrayLike) -> _Part:
    """Return what one group of pairs, such as those that people labelled, contributes to the drift.

    ``losses``, ``gains`` and ``sizes`` (numbers of pairs) have one entry per template [..., C] and are summed over
    templates. The design effect is computed from them too, and is at least ``least``.
    """
    lost, won, items = losses.sum(axis=-1), gains.sum(axis=-1), sizes.sum(axis=-1)
    # the fewest clusters of any of the samples
    clusters = int(np.count_nonzero(sizes, axis=-1).min())
    if clusters < 2:
        return _Part(lost, won, items, np.ones_like(items), 0)
    sums, mean = gains - losses, (won - lost) / items
    t = ManyTotals(sums, sizes, sums - sizes * mean[..., None], mean, lost, won)
    deff = np.maximum(design_effects(t, cr3_variance(t.residuals, sizes), floor=1.0), least)
    return _Part(lost, won, items, deff, clusters - 1)


def adjudicated_bounds(x: Labelled, *, confidence: float) -> SumBounds:
    """Return the drift of each comparison [...] by human labels, with bounds each one-sided at ``confidence``."""
    parts = (_discordant_part(x), _concordant_part(x))
    # the discordant part is a mean over all pairs already, the other part is weighted by its share of them
    weights = np.stack(np.broadcast_arrays(1.0, x.alike.sum(axis=-1) / x.pairs.sum()), axis=-1)
    low, high = (np.stack(ends, axis=-1) for ends in zip(*(part.bounds(confidence) for part in parts), strict=True))
    return mover_bounds(weights, np.stack([part.mean for part in parts], axis=-1), low, high)


def _drop_pvalue(labelled: Labelled) -> float:
    """Return the one-sided p-value of a drop, from the level at which a bound of the drift reaches 0."""
    from scipy import optimize  # slow to import, and few reports need it

    estimate = float(adjudicated_bounds(labelled, confidence=0.75).estimate)  # the same at any level
    if estimate == 0:
        return 0.5

    def beyond(confidence: float) -> float:
        bounds = adjudicated_bounds(labelled, confidence=confidence)
        return float(bounds.high if estimate < 0 else -bounds.low)

    least = 0.5 + 1e-9  # at 0.5 the quantile is 0, and both bounds are the estimate
    if beyond(_SUREST) < 0:
        confidence = _SUREST
    elif beyond(least) >= 0:
        confidence = least
    else:
        confidence = float(optimize.brentq(beyond, least, _SUREST, xtol=1e-13))
    return 1 - confidence if estimate < 0 else confidence


STATISTIC = Statistic(
    adjudicated,
    oracle="tests/test_stats_judge.py::test_adjudicated_drift_of_a_small_example",
    of=lambda z, clusters: adjudicated(z != 0, z, clusters),  # every pair is labelled, and people agree with the judge
)
