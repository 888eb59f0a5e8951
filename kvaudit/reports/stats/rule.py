"""When a cell passes: the three-valued rule, how many templates a PASS takes, what they must show, a sequence of doses.

Non-inferiority within a declared margin is PASS, FAIL or INCONCLUSIVE (Piaggio et al. 2012, JAMA 308:2594); the
calibration simulates what the gate decides, by the same functions. If a share D of templates breaks totally, C
independent templates miss all of them with probability (1-D)^C, so a PASS takes C_min templates. Doses are tested in
a fixed order from the mildest, until the first that fails: no level is spent, however well a later dose looks (Maurer,
Hothorn & Lehmacher 1995).

The template rule: could templates like those that were seen, weighted otherwise, hide a loss of the margin? What
evicting a cache entry does is often all or nothing: a few templates break altogether, the others are as before. A
sample may hold too few of the broken ones, or none, and then its own variance says nothing about them. So a PASS also
takes an empirical likelihood ratio (Owen 1988, Biometrika 75:237) over template totals: how unlikely must the weights
of the seen templates be, with one more template allowed that nobody saw and that lost everything, for the mean to be at
the margin? The worst unseen point is that of bounded means (Honda & Takemura 2010, COLT; Phan et al. 2021, ICML).
``SHARPNESS`` makes the chi-square limit hold in samples of C_min templates; it is this project's, by simulation
(``bench.calibration``). Nothing discordant gives C * -log(1 - margin), the exponent of C_min, which is asked besides:
the chi-square limit by itself would do with 34 templates where C_min is 59. How many whole templates may break moves in
steps, and a chi-square does not: just before a step it is too kind by half. So a sample must also be less likely than
the fewest broken templates that the binomial law does not rule out (``EXACT``), as far as ``STEEPEST`` allows: all of
that would take 8 points of PASS where many answers differ, and those blur the steps.
No statistic: what bounds come to, and one bound without an estimate of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]
SHARPNESS = 1.2  # 1.1 has level .061 where 5 % of the templates break
EXACT = 1.15  # of the level: how often so few of the templates break, or fewer, where the margin is lost by whole ones
STEEPEST = 1.27  # that is asked instead of ``SHARPNESS`` before a step
LARGEST_SHARE = 0.5  # of the margin: a template that holds more of the items can hide it alone
LARGE_HALF = 0.5  # of the items, held by the largest templates: what a size alone could decide
_STEPS = 40  # halvings of the range of l
_BOUND_STEPS = 17  # of the bound: a thousandth of a percentage point


def clusters_required(margin: float, alpha: float) -> int:
    """C_min: fewest clusters with which a total failure of a share ``margin`` is missed at most ``alpha`` often."""
    assert 0 < margin < 1, margin
    assert 0 < alpha < 1, alpha
    return math.ceil(math.log(alpha) / math.log1p(-margin) - 1e-12)  # a whole number, but for rounding, stays that


def effective_clusters(counts: npt.ArrayLike) -> float:
    """N^2 / sum n_c^2: how many clusters of one size say as much as clusters of ``counts`` [C] items (Kish 1965)."""
    sizes = np.asarray(counts, dtype=np.float64)
    return float(sizes.sum() ** 2 / np.square(sizes).sum())


def blind_spot(clusters: float, alpha: float) -> float:
    """Largest share of templates that could be totally broken and still be unsampled ``alpha`` of the time."""
    return 1.0 - float(alpha ** (1.0 / clusters)) if clusters > 0 else 1.0


class Call(IntEnum):
    """What bounds say. The last three would pass by their interval, were it not for the templates: they cannot tell."""

    PASS = 0
    PASS_NOTED = 1  # a drop is detectable in the family, and within the margin
    FAIL = 2
    INCONCLUSIVE = 3
    CLUSTERS = 4  # fewer than C_min
    UNEVEN = 5  # one, or the largest of them, hold too many of the items
    TEMPLATES = 6  # weighted otherwise, with one more that lost everything, they allow a loss of the margin


def calls(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    pvalue_drop: npt.ArrayLike,
    *,
    clusters: float,
    uneven: bool,
    shown: npt.ArrayLike,
    margin: float,
    alpha: float,
) -> npt.NDArray[np.int8]:
    """The ``Call`` of cells [...] from their one-sided bounds at ``alpha`` and p-values adjusted for the family.

    ``clusters`` are ``effective_clusters``: where large templates break more often, few of them carry the loss.
    ``shown`` [...] is the template rule's word (``shows_margin``); a drop is one only where the family's p-value
    says so, in a PASS as in a FAIL.
    """
    return calls_of(
        np.asarray(lower) > -margin,
        (np.asarray(upper) < 0) & (np.asarray(pvalue_drop) < alpha),
        enough=clusters >= clusters_required(margin, alpha) - 1e-9,
        uneven=uneven,
        shown=shown,
    )


def calls_of(
    within: npt.NDArray[np.bool_],
    dropped: npt.NDArray[np.bool_],
    *,
    enough: bool,
    uneven: bool,
    shown: npt.ArrayLike,
) -> npt.NDArray[np.int8]:
    """The ``Call`` of cells [...] that are shown to lie within their limit, or whose drop is real."""
    passed = np.where(np.asarray(shown), np.where(dropped, Call.PASS_NOTED, Call.PASS), Call.TEMPLATES)
    # the last reason that holds is the one that is named
    if uneven:
        passed = np.full_like(passed, Call.UNEVEN)
    if not enough:
        passed = np.full_like(passed, Call.CLUSTERS)
    # templates hold back what would pass alone: a loss that is shown needs none of their rules
    return np.where(within, passed, np.where(dropped, Call.FAIL, Call.INCONCLUSIVE)).astype(np.int8)


def fixed_sequence(passes: Sequence[bool]) -> int | None:
    """Index of the last cleared dose, mildest first (largest budget or shortest context); None when the first fails."""
    count = int(cleared(np.asarray(passes, dtype=np.bool_)))
    return count - 1 if count else None


def cleared(passes: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How many doses are cleared in each of many sequences [..., D]."""
    count: npt.NDArray[np.int64] = np.cumprod(passes, axis=-1, dtype=np.int64).sum(axis=-1)
    return count


class Part(NamedTuple):
    """One suite's share in a difference: ``weight`` times the item mean of its template totals."""

    weight: float
    sums: Array  # [C]
    counts: Array  # [C] items


# --- the template rule -----------------------------------------------------------------------------------------------


def shows_margin(sums: npt.ArrayLike, counts: npt.ArrayLike, *, margin: float, alpha: float) -> npt.NDArray[np.bool_]:
    """Whether totals [..., C] of templates with ``counts`` [C] items rule out a loss of ``margin``, weighted both ways.

    Both must: by items, as the drift is, and by templates, so that no large template speaks for the small ones.
    """
    sizes = np.asarray(counts, dtype=np.float64)
    # [..., C], how far every total lies above what a loss of the margin would leave of it
    above, least = np.asarray(sums, dtype=np.float64) + margin * sizes, chi_square_limit(len(sizes), alpha)
    most = STEEPEST / SHARPNESS * least
    wanted = float(np.clip(_exact_limit(len(sizes), margin, alpha), least, most))
    return shows_above(above, sizes, worst=1 - margin, wanted=wanted)


def shows_above(above: Array, sizes: Array, *, worst: float, wanted: float) -> npt.NDArray[np.bool_]:
    """The same of how far templates [..., C] lie above the limit; each lost item of an unseen one lies ``worst`` below.

    ``wanted`` is the log-likelihood ratio that has to be exceeded.
    """
    by_items = _rules_out(above, sizes, worst, wanted)
    if sizes.min() == sizes.max():
        return by_items
    return by_items & _rules_out(above / sizes, np.ones_like(sizes), worst, wanted)


def chi_square_limit(clusters: int, alpha: float) -> float:
    """Half a squared quantile, sharpened: twice a log-likelihood ratio is a chi-square (Owen)."""
    return SHARPNESS * float(special.stdtrit(clusters - 1, 1 - alpha)) ** 2 / 2


@lru_cache(maxsize=4096)
def _exact_limit(clusters: int, margin: float, alpha: float) -> float:
    """The ratio of the fewest broken templates of one size that a loss of the margin by whole ones leaves likely."""
    broken = 0
    while special.bdtr(broken, clusters, margin) <= EXACT * alpha:
        broken += 1
    share = broken / clusters
    if broken == 0 or share >= margin:
        return 0.0  # too few templates, which is asked besides; or an estimate that is past the margin itself
    # log-likelihood ratio of this share against one of the margin
    ratio = broken * math.log(share / margin) + (clusters - broken) * math.log((1 - share) / (1 - margin))
    return ratio * (1 + 1e-9)  # a sample with just so many broken must not pass by rounding


def parts_show_margin(parts: Sequence[Part], *, margin: float, alpha: float) -> bool:
    """``shows_margin`` of a difference over several suites: by the bound, since the margin has no share in each."""
    if len(parts) == 1 and abs(parts[0].weight) == 1:
        [part] = parts
        return bool(shows_margin(part.weight * part.sums, part.counts, margin=margin, alpha=alpha))
    return template_bound(parts, alpha=alpha) > -margin


def template_bound(parts: Sequence[Part], *, alpha: float) -> float:
    """The lowest difference that the template rule leaves possible; of several suites, added as MOVER does.

    Of one suite it lies above -margin exactly where ``shows_margin`` holds.
    """
    means = [p.weight * float(p.sums.sum() / p.counts.sum()) for p in parts]
    gaps = [mean - _part_bound(p, alpha) for p, mean in zip(parts, means, strict=True)]
    return sum(means) - float(np.sqrt(np.sum(np.square(gaps))))


def too_large(counts: npt.ArrayLike, margin: float) -> bool:
    """Whether one template holds so many of the items that the others cannot speak for it."""
    sizes = np.asarray(counts, dtype=np.float64)
    return bool(sizes.max() > LARGEST_SHARE * margin * sizes.sum() * (1 + 1e-9))


class Largest(NamedTuple):
    """The largest templates, ``number`` of them with this ``share`` of the items, and how often none of them breaks.

    That is where they alone lose the margin, by whole templates, each as often as the others.
    """

    number: int
    share: float
    unseen: float


def largest_alone(counts: npt.ArrayLike, margin: float) -> Largest:
    """Which of the largest templates, that hold half of the items or more, could lose the margin unseen most often.

    Of one size it is all of them, and C_min is where that is as rare as the level.
    """
    sizes = np.sort(np.asarray(counts, dtype=np.float64))[::-1]
    shares, numbers = np.cumsum(sizes) / sizes.sum(), np.arange(1, len(sizes) + 1)
    chance = np.where(shares >= max(LARGE_HALF, margin) - 1e-12, margin / shares, 1.0)
    unseen = np.where(chance < 1, (1 - np.minimum(chance, 1.0)) ** numbers, 0.0)
    most = int(np.argmax(unseen))
    return Largest(most + 1, float(shares[most]), float(unseen[most]))


def too_uneven(counts: npt.ArrayLike, margin: float, alpha: float) -> bool:
    """Whether sizes are such that one template, or the largest of them alone, could hide a loss of the margin."""
    return too_large(counts, margin) or largest_alone(counts, margin).unseen > alpha * (1 + 1e-9)


def _part_bound(part: Part, alpha: float) -> float:
    """The lower bound of one suite's weighted mean; a negative weight turns losses into gains."""
    sign, size = (1.0, part.weight) if part.weight > 0 else (-1.0, -part.weight)
    low, high = 0.0, 1.0  # the margin that is just not ruled out lies between
    for _ in range(_BOUND_STEPS):
        middle = (low + high) / 2
        shown = bool(shows_margin(sign * part.sums, part.counts, margin=middle, alpha=alpha))
        low, high = (low, middle) if shown else (middle, high)
    return -high * size


def _rules_out(above: Array, sizes: Array, worst: float, wanted: float) -> npt.NDArray[np.bool_]:
    clear = above.mean(axis=-1) > 0  # otherwise the estimate itself is at the margin, or past it
    unseen = worst * float(np.sum(sizes**2) / sizes.sum())  # how far one that lost everything lies below it
    found = np.zeros(clear.shape, dtype=np.bool_)
    found[clear] = _log_ratio(above[clear], unseen) > wanted
    return found


def _log_ratio(above: Array, unseen: float) -> Array:
    """Max over l of sum log(1 + l * above) [...], where no template's factor, nor the unseen one's, is negative.

    The sum is concave in l: its slope is halved in on, as a share of the largest l.
    """
    most = 1 / np.maximum(unseen, -above.min(axis=-1, initial=0.0))[..., None]
    low, high = np.zeros_like(most), np.ones_like(most)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        rising = np.sum(above / (1 + middle * most * above), axis=-1, keepdims=True) > 0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    return np.asarray(np.sum(np.log1p(low * most * above), axis=-1))
