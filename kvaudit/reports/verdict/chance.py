"""The chance of a PASS: audits are simulated, and each is decided by the gate's own rule.

A simulated audit holds only what the gate's interval and template rule need: for each template the differences
candidate - reference summed over its items, and the sum of the absolute differences over all items. Before a run,
templates are drawn from a ``Pool``, which is simulated once for a design, so that a search over sizes only has to draw.
After a run, they are the run's own templates with random signs, which keeps discordance, correlation and sizes, but not
the drift. All seeds are fixed, so results are reproducible.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvaudit.reports.stats.clustered import Array, ManyTotals, cr3_variance
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.ratio import Events, is_below, points_of, shows_ratio
from kvaudit.reports.stats.rule import clusters_required, effective_clusters, shows_margin, too_uneven
from kvaudit.reports.stats.signflip import random_signs
from kvaudit.reports.stats.tango import design_effects, ess_tango_bounds
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.verdict import Larger

_POOLED = 200_000  # items of a pool; the error of its mean is a tenth of a point
_FEWEST = 256  # templates of a pool
_MOST_TEMPLATES = 600_000  # of all audits of one estimate; limits the number of audits
AUDITS = 1000  # of one estimate: a standard error of .013 at .8
_FEWEST_AUDITS = 64  # of one estimate before a run
_FEWEST_FLIPPED = 16  # after a run: few suffice to classify a cell, and a report has many cells
_POWER = 0.8
_TIMES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40)  # multiples of the templates, in a search


class Differences(NamedTuple):
    """Assumptions for a simulation: how much the answers of two arms to the same items differ, and why.

    ``discordance`` is the share of single answers that differ, ``drift`` the mean difference. ``decoding`` is the share
    of items whose difference is drawn anew for every sample, ``training`` the share whose difference is drawn anew for
    every training seed; all other items have one difference. ``correlation`` is the intra-class correlation (ICC)
    within a template. ``happens`` is the reference's rate of the unwanted event, for a ratio.
    """

    discordance: float
    drift: float
    decoding: float
    training: float
    correlation: float
    happens: float | None = None


class Pool(NamedTuple):
    """Simulated templates [P] of ``items`` items each, from which audits are drawn.

    An item's difference is its mean over ``draws`` answers. The arrays have one number per template. ``sums`` adds up
    the differences and ``moved`` their absolute values. ``differing`` counts the items that differ, and ``split`` those
    that differ in only some of their answers. ``unwanted`` counts the reference's unwanted events.
    """

    items: int
    draws: int
    sums: Array
    moved: Array
    differing: Array
    split: Array
    unwanted: Array | None = None


class Audits(NamedTuple):
    """Simulated audits [B] of C templates.

    ``sums`` [B, C] are the differences summed by template, ``counts`` [C] the numbers of items, ``moved`` [B] the
    summed absolute differences. ``unwanted`` [B, C] counts the unwanted events of the reference, for a ratio.
    """

    sums: Array
    counts: Array
    moved: Array  # [B]
    floor: Array  # [B], the least design effect (``tango.deff_floors``)
    unwanted: Array | None = None


@lru_cache(maxsize=4)  # a search over sizes or margins uses the same pool many times
def pool_of(differences: Differences, *, items: int, samples: int, seeds: int) -> Pool:
    """Simulate the pool of templates from which audits are drawn; each template has ``items`` items.

    An item's difference candidate - reference is averaged over ``samples`` answers and ``seeds`` training seeds.
    """
    rng = np.random.default_rng(0)
    shape = (max(_FEWEST, _POOLED // items), items)
    # an item has either its own difference, or the one shared by its template
    single = _averages(rng, differences, shape, samples, seeds)
    template = _averages(rng, differences, (shape[0], 1), samples, seeds)  # [P, 1]
    is_shared = rng.random(shape) < differences.correlation**0.5  # both items of a pair share it: the square, the ICC
    z = np.where(is_shared, template.net, single.net)
    differing = np.abs(z) > 1e-9
    split = np.abs(z - np.round(z)) > 1e-9
    unwanted = None
    if differences.happens is not None:
        unwanted = _unwanted(rng, differences, differences.happens, is_shared, single, template)
    totals = (z.sum(axis=1), np.abs(z).sum(axis=1), differing.sum(axis=1), split.sum(axis=1))  # each [P]
    return Pool(items, samples * seeds, *totals, unwanted)


def _unwanted(
    rng: np.random.Generator,
    differences: Differences,
    happens: float,
    is_shared: npt.NDArray[np.bool_],
    single: _Averages,
    template: _Averages,
) -> Array:
    """Draw the number of the reference's unwanted events in each template [P] of a pool.

    The reference has the event on every item that the candidate gains and on none that it loses. On the other items it
    has the event at one rate, chosen so that its rate over all items is ``happens``. An item's answers are in
    ``single``; where ``is_shared``, it has those of its ``template`` instead.
    """
    # a gain was unwanted before; the remaining events lie on items that did not move
    rate = (happens - (differences.discordance + differences.drift) / 2) / (1 - differences.discordance)
    single_events, template_events = (
        kind.gained + (rng.random(kind.net.shape) < rate) * (1 - kind.moved) for kind in (single, template)
    )
    total: Array = np.where(is_shared, template_events, single_events).sum(axis=1)
    return total


class _Averages(NamedTuple):
    """Three shares of an item's answers: gained - lost (``net``), gained or lost (``moved``), and ``gained``."""

    net: Array
    moved: Array
    gained: Array


def _averages(rng: np.random.Generator, d: Differences, shape: tuple[int, int], samples: int, seeds: int) -> _Averages:
    kind = rng.random(shape)
    # the number of independent answers of an item: all samples of all seeds, one per seed, or one
    draws = np.where(kind < d.decoding, samples * seeds, np.where(kind < d.decoding + d.training, seeds, 1))
    moved = rng.binomial(draws, d.discordance)
    # the share of gains among the moved, for which the mean difference is the drift
    gained = rng.binomial(moved, min(1.0, max(0.0, (1 + d.drift / d.discordance) / 2)))
    return _Averages((2 * gained - moved) / draws, moved / draws, gained / draws)


def draw_audits(pool: Pool, clusters: int, *, audits: int = AUDITS) -> Audits:
    """Simulate ``audits`` audits (fewer if they are large): each draws ``clusters`` templates from a pool."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(len(pool.sums), size=(_affordable(clusters, audits), clusters))  # [B, C]
    # each [B]
    moved, differing, split = (field[chosen].sum(axis=1) for field in (pool.moved, pool.differing, pool.split))
    # as in ``deff_floors``, which needs items
    floor = np.where(split == 0, 1.0, 1 / np.clip(differing, 1, pool.draws))
    unwanted = None if pool.unwanted is None else pool.unwanted[chosen]
    return Audits(pool.sums[chosen], np.full(clusters, float(pool.items)), moved, floor, unwanted)


def flipped_audits(
    sums: Array,
    counts: Array,
    *,
    moved: float,
    floor: float,
    times: int,
    audits: int,
    unwanted: Array | None = None,
) -> Audits:
    """Simulate audits without drift: the given templates, each used ``times`` times, with a random sign each time.

    ``sums`` [C] and ``counts`` [C] are the templates' summed differences and numbers of items, ``moved`` is the sum of
    absolute differences over all items, ``floor`` the least design effect to assume. ``unwanted`` [C] are the unwanted
    events of the reference. A negative sign exchanges reference and candidate in a template, so that the reference has
    as many unwanted events there as the candidate had.
    """
    rng = np.random.default_rng(2)
    size = _affordable(times * len(sums), audits, fewest=_FEWEST_FLIPPED)
    flips = random_signs(rng, size, times * len(sums))  # [B, C]
    tiled = np.tile(sums, times)
    # the candidate's unwanted events are the reference's minus the net sum of wanted ones
    events = None if unwanted is None else np.tile(unwanted, times) - np.where(flips < 0, tiled, 0.0)
    return Audits(flips * tiled, np.tile(counts, times), np.full(size, times * moved), np.full(size, floor), events)


def _affordable(clusters: int, audits: int, *, fewest: int = _FEWEST_AUDITS) -> int:
    return max(fewest, min(audits, _MOST_TEMPLATES // clusters))


def pass_rate(audits: Audits, *, margin: float, alpha: float, ratio: float | None = None) -> float:
    """Return the share of simulated audits that the gate passes, by ``ratio`` if it is given, else by the margin."""
    if ratio is not None:
        return float(np.mean(_passes_ratio(audits, ratio, alpha)))
    if not can_show(audits.counts, margin, alpha):
        return 0.0
    is_shown = shows_margin(audits.sums, audits.counts, margin=margin, alpha=alpha)
    return float(np.mean(is_shown & (_lower(audits, alpha) > -margin)))


def can_show(counts: Array, margin: float, alpha: float) -> bool:
    """Return whether templates of these sizes [C] can pass a margin at all: they are enough, and none is too large."""
    has_clusters = effective_clusters(counts) >= clusters_required(margin, alpha) - 1e-9
    return has_clusters and not too_uneven(counts, margin, alpha)


def _passes_ratio(audits: Audits, ratio: float, alpha: float) -> npt.NDArray[np.bool_]:
    """Return whether each simulated audit [B] passes a limit on the ratio of unwanted events.

    The rarer the event is with the reference, the more templates it needs.
    """
    assert audits.unwanted is not None, "a ratio needs both sides"
    allowed = points_of(ratio, audits.unwanted.sum(axis=-1) / audits.counts.sum())
    has_templates = allowed >= _least_margin(audits.counts, alpha)
    passed: npt.NDArray[np.bool_] = has_templates & is_below(_events(audits), ratio, alpha=alpha)
    # the slower template rule only where the interval passes
    unwanted, sums = audits.unwanted[passed], audits.sums[passed]
    passed[passed] = shows_ratio(unwanted, unwanted - sums, audits.counts, limit=ratio, alpha=alpha)
    return passed


def _least_margin(counts: Array, alpha: float) -> float:
    """Return the smallest margin (to a hundredth of a point) that templates of these sizes can show."""
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if can_show(counts, middle, alpha) else (middle, high)
    return high


def _events(audits: Audits) -> Events:
    assert audits.unwanted is not None, "a ratio needs both sides"
    net = audits.sums.sum(axis=-1)
    # a gain is an unwanted event of the reference only, a loss one of the candidate only
    before, after = (audits.moved + net) / 2, (audits.moved - net) / 2
    both = audits.unwanted.sum(axis=-1) - before
    return Events(both, before, after, audits.unwanted, audits.unwanted - audits.sums, audits.counts, audits.floor)


def interval_rate(audits: Audits, *, margin: float, alpha: float, ratio: float | None = None) -> float:
    """Return the share of simulated audits whose interval lies within the margin, or within ``ratio`` if it is given.

    That alone is no PASS: the gate also asks whether a few broken templates could hide a loss (the template rule).
    """
    if ratio is not None:
        return float(np.mean(is_below(_events(audits), ratio, alpha=alpha)))
    return float(np.mean(_lower(audits, alpha) > -margin))


def _lower(audits: Audits, alpha: float) -> Array:
    """Return the one-sided lower bound of the drift in each simulated audit [B], by ESS-Tango, the gate's interval."""
    net, items = audits.sums.sum(axis=1), float(audits.counts.sum())
    residuals = audits.sums - audits.counts * (net / items)[:, None]
    losses, gains = (audits.moved - net) / 2, (audits.moved + net) / 2
    t = ManyTotals(audits.sums, audits.counts, residuals, net / items, losses, gains)
    deff = design_effects(t, cr3_variance(residuals, audits.counts), floor=audits.floor)
    return ess_tango_bounds(losses, gains, items, deff, df=len(audits.counts) - 1, alpha=alpha).lower


def larger_run(c: Contrast, margin: float, sign: int, ratio: float | None = None) -> Larger | None:
    """Return how much larger a run would have to be for a contrast to pass if there is no drift.

    It is None (unknown) if the estimate is past the margin already, and if the contrast combines several suites, which
    share one margin. ``sign`` is 1 for a test of a drop and -1 for one of a gain. If ``ratio`` is given, ``margin`` is
    the loss that it allows.
    """
    if c.effect is None or sign * c.effect.estimate <= -margin or len(c.sums) != 1:
        return None
    for word, times, audits in ((Larger.TWICE, 2, 256), (Larger.TEN_TIMES, 10, 128)):
        if _would_pass(c, c.judged or c.effect, margin, ratio, times, audits):
            return word
    return Larger.NEVER


def _would_pass(c: Contrast, e: Effect, margin: float, ratio: float | None, times: int, audits: int) -> bool:
    """Return whether ``times`` as many templates like those of a contrast would pass with power .8, without true drift.

    ``e`` is the contrast's effect by the judge's labels, even if human labels decide. ``audits`` is the number of
    audits to simulate.
    """
    [templates] = c.judged_sums or c.sums  # by the same labels
    unwanted = None if ratio is None or not c.unwanted else c.unwanted[0].reference
    simulated = flipped_audits(
        templates.sums,
        templates.counts,
        moved=e.losses + e.gains,
        floor=min(1.0, e.deff),  # below 1 only for averaged draws and graded scores
        times=times,
        audits=audits,
        unwanted=unwanted,
    )
    rate = pass_rate(simulated, margin=margin, alpha=e.alpha, ratio=None if unwanted is None else ratio)
    return rate >= _POWER


def templates_for(c: Contrast, margin: float, ratio: float | None = None) -> int | None:
    """Return about how many templates like those of a contrast would give a PASS if there were no drift.

    It is None if forty times as many would not suffice, if the estimate is past the margin already, and if the contrast
    combines several suites.
    """
    if c.effect is None or c.effect.estimate <= -margin or len(c.sums) != 1:
        return None
    for times in _TIMES:
        if _would_pass(c, c.judged or c.effect, margin, ratio, times, 128):
            return times * len(c.sums[0].sums)
    return None


def lowest_estimate(clusters: int, *, margin: float, alpha: float) -> float | None:
    """Return the lowest drift with which ``clusters`` templates of one size still pass, if all of them show this drift.

    It is None if there are too few templates to pass with any drift.
    """
    if clusters < clusters_required(margin, alpha):
        return None
    low, high, counts = -margin, 1.0, np.ones(clusters)
    for _ in range(40):
        middle = (low + high) / 2
        is_shown = bool(shows_margin(middle * counts, counts, margin=margin, alpha=alpha))
        low, high = (low, middle) if is_shown else (middle, high)
    return high
