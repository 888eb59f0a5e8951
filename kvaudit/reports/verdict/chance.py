"""The chance of a PASS: audits that are drawn and decided by the gate's own rule, instead of a normal formula. Pure.

An audit is the net sum of every template and how much moved in all: the gate's interval and the template rule need no
more. Before a run templates come from a ``Pool`` that is drawn once for a design, so that a search over sizes draws
only which of them an audit meets. Of a run that is over they are its own, each turned by a coin: the same discordance,
the same correlation and sizes, and no drift. Every draw has a fixed seed, so the same question has the same answer.
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

_POOLED = 200_000  # items of a pool: its own mean is off by a tenth of a point
_FEWEST = 256  # templates of a pool
_HELD = 600_000  # templates of all audits of one question
AUDITS = 1000  # of one question, fewer where they would be larger than that: a standard error of .013 at .8
_FEWEST_AUDITS, _FEWEST_TURNED = 64, 16  # a class is not a chance, and a report has many cells
_POWER = 0.8
_TIMES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40)  # as many templates, in a search


class Differences(NamedTuple):
    """How items of two arms differ: ``discordance`` of single answers, ``drift``, and who decides an item's answers.

    ``decoding`` and ``training`` are the shares of discordant items whose difference is drawn anew for every sample,
    and for every training seed; the rest differ whoever asks. ``correlation`` is the ICC inside a template.
    ``happens`` is how often what is not wanted happens with the reference, where it is to be held to a ratio.
    """

    discordance: float
    drift: float
    decoding: float
    training: float
    correlation: float
    happens: float | None = None


class Pool(NamedTuple):
    """Templates [P] of ``items`` each, averaged over ``draws`` answers: what many audits are drawn from.

    ``moved`` are the summed sizes of the item differences, ``differing`` how many items differ, ``split`` how many of
    those in some answers only. ``unwanted`` is how often the reference did what is not wanted, where that is asked.
    """

    items: int
    draws: int
    sums: Array
    moved: Array
    differing: Array
    split: Array
    unwanted: Array | None = None


class Audits(NamedTuple):
    """Audits [B] of C templates: the net ``sums`` [B, C] of items ``counts`` [C], and per audit what the gate reads.

    ``unwanted`` [B, C] is what the reference did that is not wanted, which a ratio needs.
    """

    sums: Array
    counts: Array
    moved: Array  # [B]
    floor: Array  # [B] of the design effect
    unwanted: Array | None = None


@lru_cache(maxsize=4)  # a search over sizes or margins asks for one again and again
def pool_of(found: Differences, *, items: int, samples: int, seeds: int) -> Pool:
    """Templates of ``items`` whose differences are averaged over samples and seeds."""
    rng = np.random.default_rng(0)
    shape = (max(_FEWEST, _POOLED // items), items)
    # an item either has a difference of its own, or the one that all who follow their template share
    own = _averages(rng, found, shape, samples, seeds)
    template = _averages(rng, found, (shape[0], 1), samples, seeds)  # [P, 1]
    follows = rng.random(shape) < found.correlation**0.5  # two items follow, and are alike, this often squared
    z = np.where(follows, template.net, own.net)
    differing = np.abs(z) > 1e-9
    split = np.abs(z - np.round(z)) > 1e-9
    unwanted = None if found.happens is None else _unwanted(rng, found, found.happens, follows, own, template)
    totals = (z.sum(axis=1), np.abs(z).sum(axis=1), differing.sum(axis=1), split.sum(axis=1))  # each [P]
    return Pool(items, samples * seeds, *totals, unwanted)


def _unwanted(
    rng: np.random.Generator,
    found: Differences,
    happens: float,
    follows: npt.NDArray[np.bool_],
    own: _Averages,
    template: _Averages,
) -> Array:
    """What the reference of a pool did: all of what was gained, nothing of what was lost, the rest at one rate."""
    # what was gained was unwanted before; the rest of what happens lies on items that did not move
    rate = (happens - (found.discordance + found.drift) / 2) / (1 - found.discordance)
    alone, alike = (kind.gained + (rng.random(kind.net.shape) < rate) * (1 - kind.moved) for kind in (own, template))
    total: Array = np.where(follows, alike, alone).sum(axis=1)
    return total


class _Averages(NamedTuple):
    """Item differences, averaged over draws: the ``net``, what moved either way, and what was gained."""

    net: Array
    moved: Array
    gained: Array


def _averages(
    rng: np.random.Generator, found: Differences, shape: tuple[int, int], samples: int, seeds: int
) -> _Averages:
    """Item differences averaged over as many independent draws as the kind of the item has."""
    kind = rng.random(shape)
    # independent answers that an item is the mean of: all, one for each seed, or a single one
    draws = np.where(kind < found.decoding, samples * seeds, np.where(kind < found.decoding + found.training, seeds, 1))
    moved = rng.binomial(draws, found.discordance)
    # what moves gains with this chance, so that an item differs by the drift in the mean
    gained = rng.binomial(moved, min(1.0, max(0.0, (1 + found.drift / found.discordance) / 2)))
    return _Averages((2 * gained - moved) / draws, moved / draws, gained / draws)


def draw_audits(pool: Pool, clusters: int, *, audits: int = AUDITS) -> Audits:
    """Audits of ``clusters`` templates of a pool."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(len(pool.sums), size=(_affordable(clusters, audits), clusters))  # [B, C]
    # each [B]
    moved, differing, split = (part[chosen].sum(axis=1) for part in (pool.moved, pool.differing, pool.split))
    # as ``deff_floors`` has it of items, which a pool does not keep
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
    """Audits of ``times`` as many templates as those at hand (sums [C], counts [C]), each turned by a coin.

    A template that is turned has its two sides exchanged: ``unwanted`` [C] is then the candidate's.
    """
    rng = np.random.default_rng(2)
    size = _affordable(times * len(sums), audits, fewest=_FEWEST_TURNED)
    turns = random_signs(rng, size, times * len(sums))  # [B, C]
    every, tiled = np.full(size, times * moved), np.tile(sums, times)
    # the candidate's part is the reference's less the net sum, as wanted and unwanted add up to the items
    own = None if unwanted is None else np.tile(unwanted, times) - np.where(turns < 0, tiled, 0.0)
    return Audits(turns * tiled, np.tile(counts, times), every, np.full(size, floor), own)


def _affordable(clusters: int, audits: int, *, fewest: int = _FEWEST_AUDITS) -> int:
    return max(fewest, min(audits, _HELD // clusters))


def pass_rate(found: Audits, *, margin: float, alpha: float, ratio: float | None = None) -> float:
    """The share of audits that the gate passes, held to a margin, or to a ratio where there is one."""
    if ratio is not None:
        return float(np.mean(_passes_ratio(found, ratio, alpha)))
    items = float(found.counts.sum())
    if effective_clusters(found.counts) < clusters_required(margin, alpha) - 1e-9 or too_uneven(
        found.counts, margin, alpha
    ):
        return 0.0
    shown = shows_margin(found.sums, found.counts, margin=margin, alpha=alpha)
    return float(np.mean(shown & (_lower(found, items, alpha) > -margin)))


def _passes_ratio(found: Audits, ratio: float, alpha: float) -> npt.NDArray[np.bool_]:
    """Which audits pass a ratio: each asks as many templates as its own reference's rate makes necessary."""
    assert found.unwanted is not None, "a ratio needs both sides"
    allowed = points_of(ratio, found.unwanted.sum(axis=-1) / found.counts.sum())
    enough = allowed >= _least_margin(found.counts, alpha)
    passed: npt.NDArray[np.bool_] = enough & is_below(_events(found), ratio, alpha=alpha)
    own, sums = found.unwanted[passed], found.sums[passed]  # templates are asked only where the interval passes
    passed[passed] = shows_ratio(own, own - sums, found.counts, limit=ratio, alpha=alpha)
    return passed


def _least_margin(counts: Array, alpha: float) -> float:
    """The least margin that templates of these sizes can show, to a hundredth of a point."""
    worth, low, high = effective_clusters(counts), 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        can = worth >= clusters_required(middle, alpha) - 1e-9 and not too_uneven(counts, middle, alpha)
        low, high = (low, middle) if can else (middle, high)
    return high


def _events(found: Audits) -> Events:
    assert found.unwanted is not None, "a ratio needs both sides"
    net = found.sums.sum(axis=-1)
    # what was won was unwanted with the reference alone, what was lost with the candidate alone
    before, after = (found.moved + net) / 2, (found.moved - net) / 2
    both = found.unwanted.sum(axis=-1) - before
    return Events(both, before, after, found.unwanted, found.unwanted - found.sums, found.counts, found.floor)


def interval_rate(found: Audits, *, margin: float, alpha: float, ratio: float | None = None) -> float:
    """The share of audits whose interval alone lies within the margin, whatever the templates say."""
    if ratio is not None:
        return float(np.mean(is_below(_events(found), ratio, alpha=alpha)))
    return float(np.mean(_lower(found, float(found.counts.sum()), alpha) > -margin))


def _lower(found: Audits, items: float, alpha: float) -> Array:
    """The one-sided lower bounds [B] of ESS-Tango."""
    net = found.sums.sum(axis=1)
    residuals = found.sums - found.counts * (net / items)[:, None]
    losses, gains = (found.moved - net) / 2, (found.moved + net) / 2
    t = ManyTotals(found.sums, found.counts, residuals, net / items, losses, gains)
    deff = design_effects(t, cr3_variance(residuals, found.counts), floor=found.floor)
    return ess_tango_bounds(losses, gains, items, deff, df=len(found.counts) - 1, alpha=alpha).lower


def larger_run(c: Contrast, margin: float, sign: int, ratio: float | None = None) -> Larger | None:
    """How many times the templates of a contrast would pass, were there no drift; None where that is no remedy.

    That is where the estimate is past the margin already (of a test for a gain, ``sign`` -1, a gain), and where several
    suites are combined: the margin has no share in each. With a ``ratio`` the margin is what that allows.
    """
    e = c.judged or c.effect
    if e is None or c.effect is None or sign * c.effect.estimate <= -margin or len(c.sums) != 1:
        return None
    for word, times, audits in ((Larger.TWICE, 2, 256), (Larger.TEN_TIMES, 10, 128)):
        if _would_pass(c, e, margin, ratio, times, audits):
            return word
    return Larger.NEVER


def _would_pass(c: Contrast, e: Effect, margin: float, ratio: float | None, times: int, audits: int) -> bool:
    """Whether so many times the templates at hand pass with power .8, were there no drift."""
    [own] = c.judged_sums or c.sums  # of the labels that ``e`` is of
    unwanted = None if ratio is None or not c.unwanted else c.unwanted[0].reference
    found = flipped_audits(
        own.sums,
        own.counts,
        moved=e.losses + e.gains,
        # below 1 only where draws were averaged, or scores are graded
        floor=min(1.0, e.deff),
        times=times,
        audits=audits,
        unwanted=unwanted,
    )
    rate = pass_rate(found, margin=margin, alpha=e.alpha, ratio=None if unwanted is None else ratio)
    return rate >= _POWER


def templates_for(c: Contrast, margin: float, ratio: float | None = None) -> int | None:
    """How many templates like those at hand would pass, were there no drift, to a fifth of their number or so.

    None where no number up to forty times as many would, where the estimate is past the margin already, and where
    several suites are combined.
    """
    e = c.judged or c.effect
    if e is None or c.effect is None or c.effect.estimate <= -margin or len(c.sums) != 1:
        return None
    for times in _TIMES:
        if _would_pass(c, e, margin, ratio, times, 128):
            return times * len(c.sums[0].sums)
    return None


def lowest_estimate(clusters: int, *, margin: float, alpha: float) -> float | None:
    """The lowest drift that passes even where every template of one size shows it alike; None where none does."""
    low, high = -margin, 1.0
    counts = np.ones(clusters)
    if clusters < clusters_required(margin, alpha):
        return None
    for _ in range(40):
        middle = (low + high) / 2
        shown = bool(shows_margin(middle * counts, counts, margin=margin, alpha=alpha))
        low, high = (low, middle) if shown else (middle, high)
    return high
