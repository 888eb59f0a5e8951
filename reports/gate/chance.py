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

from kvaudit.reports.drift.results import Contrast
from kvaudit.reports.gate.verdict import Larger
from kvaudit.reports.stats.clustered import Array, ManyTotals, cr3_variance
from kvaudit.reports.stats.rule import clusters_required, effective_clusters, shows_margin, too_large
from kvaudit.reports.stats.signflip import random_signs
from kvaudit.reports.stats.tango import design_effects, ess_tango_bounds

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
    """

    discordance: float
    drift: float
    decoding: float
    training: float
    correlation: float


class Pool(NamedTuple):
    """Templates [P] of ``items`` each, averaged over ``draws`` answers: what many audits are drawn from.

    ``moved`` are the summed sizes of the item differences, ``differing`` how many items differ, ``split`` how many of
    those in some answers only.
    """

    items: int
    draws: int
    sums: Array
    moved: Array
    differing: Array
    split: Array


class Audits(NamedTuple):
    """Audits [B] of C templates: the net ``sums`` [B, C] of items ``counts`` [C], and per audit what the gate reads."""

    sums: Array
    counts: Array
    moved: Array  # [B]
    floor: Array  # [B] of the design effect


@lru_cache(maxsize=4)  # a search over sizes or margins asks for one again and again
def pool_of(found: Differences, *, items: int, samples: int, seeds: int) -> Pool:
    """Templates of ``items`` whose differences are averaged over samples and seeds."""
    rng = np.random.default_rng(0)
    shape = (max(_FEWEST, _POOLED // items), items)
    own = _averages(rng, found, shape, samples, seeds)
    template = _averages(rng, found, (shape[0], 1), samples, seeds)
    follows = rng.random(shape) < found.correlation**0.5  # two items follow, and are alike, this often squared
    z = np.where(follows, template, own)
    differing = np.abs(z) > 1e-9
    split = np.abs(z - np.round(z)) > 1e-9
    return Pool(items, samples * seeds, z.sum(axis=1), np.abs(z).sum(axis=1), differing.sum(axis=1), split.sum(axis=1))


def _averages(rng: np.random.Generator, found: Differences, shape: tuple[int, int], samples: int, seeds: int) -> Array:
    """Item differences averaged over as many independent draws as the kind of the item has."""
    kind = rng.random(shape)
    draws = np.where(kind < found.decoding, samples * seeds, np.where(kind < found.decoding + found.training, seeds, 1))
    moved = rng.binomial(draws, found.discordance)
    # what moves gains with this chance, so that an item differs by the drift in the mean
    gained = rng.binomial(moved, min(1.0, max(0.0, (1 + found.drift / found.discordance) / 2)))
    average: Array = (2 * gained - moved) / draws
    return average


def audits_of(pool: Pool, clusters: int, *, audits: int = AUDITS) -> Audits:
    """Audits of ``clusters`` templates of a pool."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(len(pool.sums), size=(_affordable(clusters, audits), clusters))
    moved, differing, split = (part[chosen].sum(axis=1) for part in (pool.moved, pool.differing, pool.split))
    # as ``deff_floors`` has it of items, which a pool does not keep
    floor = np.where(split == 0, 1.0, 1 / np.clip(differing, 1, pool.draws))
    return Audits(pool.sums[chosen], np.full(clusters, float(pool.items)), moved, floor)


def turned(sums: Array, counts: Array, *, moved: float, floor: float, times: int, audits: int) -> Audits:
    """Audits of ``times`` as many templates as those at hand (sums [C], counts [C]), each turned by a coin."""
    rng = np.random.default_rng(2)
    size = _affordable(times * len(sums), audits, fewest=_FEWEST_TURNED)
    turns = random_signs(rng, size, times * len(sums))
    every = np.full(size, times * moved)
    return Audits(turns * np.tile(sums, times), np.tile(counts, times), every, np.full(size, floor))


def _affordable(clusters: int, audits: int, *, fewest: int = _FEWEST_AUDITS) -> int:
    return max(fewest, min(audits, _HELD // clusters))


def pass_rate(found: Audits, *, margin: float, alpha: float) -> float:
    """The share of audits that the gate passes."""
    items = float(found.counts.sum())
    if effective_clusters(found.counts) < clusters_required(margin, alpha) - 1e-9 or too_large(found.counts, margin):
        return 0.0
    shown = shows_margin(found.sums, found.counts, margin=margin, alpha=alpha)
    return float(np.mean(shown & (_lower(found, items, alpha) > -margin)))


def interval_rate(found: Audits, *, margin: float, alpha: float) -> float:
    """The share of audits whose interval alone lies within the margin, whatever the templates say."""
    return float(np.mean(_lower(found, float(found.counts.sum()), alpha) > -margin))


def _lower(found: Audits, items: float, alpha: float) -> Array:
    """The one-sided lower bounds [B] of ESS-Tango."""
    net = found.sums.sum(axis=1)
    residuals = found.sums - found.counts * (net / items)[:, None]
    losses, gains = (found.moved - net) / 2, (found.moved + net) / 2
    t = ManyTotals(found.sums, found.counts, residuals, net / items, losses, gains)
    deff = design_effects(t, cr3_variance(residuals, found.counts), floor=found.floor)
    return ess_tango_bounds(losses, gains, items, deff, df=len(found.counts) - 1, alpha=alpha).lower


def larger(c: Contrast, margin: float, sign: int) -> Larger | None:
    """How many times the templates of a contrast would pass, were there no drift; None where that is no remedy.

    That is where the estimate is past the margin already (of a test for a gain, ``sign`` -1, a gain), and where several
    suites are combined: the margin has no share in each.
    """
    e = c.judged or c.effect
    if e is None or c.effect is None or sign * c.effect.estimate <= -margin or len(c.sums) != 1:
        return None
    [own] = c.sums
    for word, times, audits in ((Larger.TWICE, 2, 256), (Larger.TEN_TIMES, 10, 128)):
        found = turned(
            own.sums, own.counts, moved=e.losses + e.gains, floor=min(1.0, e.deff), times=times, audits=audits
        )
        if pass_rate(found, margin=margin, alpha=e.alpha) >= _POWER:
            return word
    return Larger.NEVER


def templates_for(c: Contrast, margin: float) -> int | None:
    """How many templates like those at hand would pass, were there no drift, to a fifth of their number or so.

    None where no number up to forty times as many would, where the estimate is past the margin already, and where
    several suites are combined.
    """
    e = c.judged or c.effect
    if e is None or c.effect is None or c.effect.estimate <= -margin or len(c.sums) != 1:
        return None
    [own] = c.sums
    for times in _TIMES:
        found = turned(own.sums, own.counts, moved=e.losses + e.gains, floor=min(1.0, e.deff), times=times, audits=128)
        if pass_rate(found, margin=margin, alpha=e.alpha) >= _POWER:
            return times * len(own.sums)
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
