"""The decision rule of a cell: its three outcomes, the templates that a PASS needs, the template rule, dose sequences.

Non-inferiority within a declared margin is PASS, FAIL or INCONCLUSIVE (Piaggio et al. 2012, JAMA 308:2594); gate and
calibration share these functions. If a share D of templates breaks totally, C independent templates miss all of them
with probability (1-D)^C, so a PASS needs C_min templates. Doses are tested in a fixed order, the mildest first, until
one fails; this needs no adjustment (Maurer, Hothorn & Lehmacher 1995).

The template rule: could templates like the observed ones, weighted differently, hide a loss of the margin? Evicting
cache entries often breaks a few templates totally and leaves the others unchanged. A sample may have too few broken
templates, or none, and then its variance does not show them. So a PASS also needs an empirical likelihood ratio (Owen
1988, Biometrika 75:237) over template totals. One unseen template that lost everything is added to the observed ones,
and the templates are weighted so that their mean lies at the margin: how unlikely are such weights? The worst unseen
point is that of bounded means (Honda & Takemura 2010, COLT; Phan et al. 2021, ICML). ``SHARPNESS`` makes the chi-square
limit valid for C_min templates; it was found by simulation (``bench.calibration``). If no answer differs, the log ratio
is C * -log(1 - margin). C_min templates are required as well, because the chi-square limit alone would accept 34 where
C_min is 59. The number of templates that may break changes in steps, and a chi-square does not: just before a step it
is too lenient by half. So a sample must also be less likely than one with the fewest broken templates that the binomial
law does not exclude (``EXACT``). ``STEEPEST`` caps this second limit: without the cap 8 points of PASS would be lost
where many answers differ, which blurs the steps.
No statistic: decisions from bounds, and one bound without an estimate.
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
SHARPNESS = 1.2  # 1.1 has level .061 if 5 % of the templates break
EXACT = 1.15  # times the level: the probability of so few broken templates if whole ones lose the margin
STEEPEST = 1.27  # used instead of ``SHARPNESS`` before a step
LARGEST_SHARE = 0.5  # of the margin: a template with a larger share of the items can hide the margin alone
LARGE_HALF = 0.5  # lowest share of the items in the largest templates that are checked together
_STEPS = 40  # bisection steps over the range of l
_BOUND_STEPS = 17  # bisection steps of the bound: a thousandth of a percentage point


def clusters_required(margin: float, alpha: float) -> int:
    """Return C_min, the fewest clusters that miss total failure of a share ``margin`` with probability ``alpha``."""
    assert 0 < margin < 1, margin
    assert 0 < alpha < 1, alpha
    return math.ceil(math.log(alpha) / math.log1p(-margin) - 1e-12)  # rounding must not raise a whole number


def effective_clusters(counts: npt.ArrayLike) -> float:
    """Return N^2 / sum n_c^2, the effective number of clusters with ``counts`` [C] items (Kish 1965)."""
    sizes = np.asarray(counts, dtype=np.float64)
    return float(sizes.sum() ** 2 / np.square(sizes).sum())


def blind_spot(clusters: float, alpha: float) -> float:
    """Return the largest share of totally broken templates that goes unsampled with probability ``alpha``."""
    return 1.0 - float(alpha ** (1.0 / clusters)) if clusters > 0 else 1.0


class Call(IntEnum):
    """The outcome of the rule for a cell; a PASS_NOTED has a significant drop within the margin.

    CLUSTERS, UNEVEN and TEMPLATES: the interval would pass, but the templates do not suffice.
    """

    PASS = 0
    PASS_NOTED = 1  # a drop is detectable in the family, and within the margin
    FAIL = 2
    INCONCLUSIVE = 3
    CLUSTERS = 4  # fewer than C_min
    UNEVEN = 5  # the largest template, or several, have too many of the items
    TEMPLATES = 6  # weighted differently, with one unseen template that lost everything, they allow the margin


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
    """Return the outcome (``Call``) of each cell [...] from its one-sided bounds at ``alpha`` and p-value of a drop.

    ``pvalue_drop`` is adjusted for multiple testing; if it is below ``alpha``, the drop is significant. A PASS may have
    a significant drop too. ``clusters`` is the effective number of templates (``effective_clusters``), since few large
    ones may carry the loss; ``uneven`` is whether their sizes differ too much (``too_uneven``). ``shown`` [...] is the
    result of the template rule (``shows_margin``).
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
    """Return the outcome (``Call``) of each cell [...] from what was shown about it.

    ``within`` marks cells whose loss is shown to be within the limit, ``dropped`` those with a significant drop,
    ``shown`` those that meet the template rule. If there are not ``enough`` templates, or they are ``uneven`` in size,
    no cell passes.
    """
    passed = np.where(np.asarray(shown), np.where(dropped, Call.PASS_NOTED, Call.PASS), Call.TEMPLATES)
    # the last reason that applies is reported
    if uneven:
        passed = np.full_like(passed, Call.UNEVEN)
    if not enough:
        passed = np.full_like(passed, Call.CLUSTERS)
    # template rules apply to a PASS only, not to a significant loss
    return np.where(within, passed, np.where(dropped, Call.FAIL, Call.INCONCLUSIVE)).astype(np.int8)


def fixed_sequence(passes: Sequence[bool]) -> int | None:
    """Return the index of the last dose that passes before the first failure; None if the first dose fails.

    Doses come mildest first (largest budget, shortest context).
    """
    count = int(cleared(np.asarray(passes, dtype=np.bool_)))
    return count - 1 if count else None


def cleared(passes: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return how many doses each sequence [..., D] of tests passes before its first failure."""
    count: npt.NDArray[np.int64] = np.cumprod(passes, axis=-1, dtype=np.int64).sum(axis=-1)
    return count


class SuiteTotals(NamedTuple):
    """The contribution of one suite to a weighted sum of suites: ``weight`` * total of ``sums`` / total of ``counts``.

    ``sums`` has for each template the sum of its items' values, ``counts`` the number of its items.
    """

    weight: float
    sums: Array  # [C]
    counts: Array  # [C] items


# --- the template rule -----------------------------------------------------------------------------------------------


def shows_margin(sums: npt.ArrayLike, counts: npt.ArrayLike, *, margin: float, alpha: float) -> npt.NDArray[np.bool_]:
    """Return whether totals [..., C] of templates with ``counts`` [C] items rule out a loss of ``margin``.

    The loss must be ruled out twice: with templates weighted by their items, as in the drift, and with equal weights,
    so that no large template decides alone.
    """
    sizes = np.asarray(counts, dtype=np.float64)
    # [..., C], each total minus its value at a loss of the margin
    above, least = np.asarray(sums, dtype=np.float64) + margin * sizes, chi_square_limit(len(sizes), alpha)
    most = STEEPEST / SHARPNESS * least
    wanted = float(np.clip(_exact_limit(len(sizes), margin, alpha), least, most))
    return shows_above(above, sizes, worst=1 - margin, wanted=wanted)


def shows_above(above: Array, sizes: Array, *, worst: float, wanted: float) -> npt.NDArray[np.bool_]:
    """Return whether the template rule rules a limit out: a few broken templates cannot hide a loss beyond it.

    The limit is a margin, or a limit on a ratio. ``above`` [..., C] is how far each template's total lies above its
    value at the limit, and ``sizes`` [C] are the numbers of items. The rule also assumes a template that is not in the
    sample and lost everything: each of its items lies ``worst`` below the limit. ``wanted`` is the log-likelihood ratio
    that must be exceeded.
    """
    by_items = _rules_out(above, sizes, worst, wanted)
    if sizes.min() == sizes.max():
        return by_items
    return by_items & _rules_out(above / sizes, np.ones_like(sizes), worst, wanted)


def chi_square_limit(clusters: int, alpha: float) -> float:
    """Return the log-likelihood ratio that the templates must exceed to rule a limit out (the template rule).

    It is half the squared t quantile times ``SHARPNESS``: twice a log-likelihood ratio has a chi-square distribution
    (Owen).
    """
    return SHARPNESS * float(special.stdtrit(clusters - 1, 1 - alpha)) ** 2 / 2


@lru_cache(maxsize=4096)
def _exact_limit(clusters: int, margin: float, alpha: float) -> float:
    """Return the log-likelihood ratio that a sample must exceed to rule out a loss of the margin, 0 for no limit.

    Assume templates of equal size, each of which breaks with probability ``margin``. A number k of broken templates is
    too unlikely if P(at most k broken) is EXACT * alpha or less. The limit is the ratio of a sample with the smallest k
    that is not too unlikely.
    """
    broken = 0
    while special.bdtr(broken, clusters, margin) <= EXACT * alpha:
        broken += 1
    share = broken / clusters
    if broken == 0 or share >= margin:
        return 0.0  # too few templates, which is checked separately, or an estimate past the margin
    # log-likelihood ratio of this share against one of the margin
    ratio = broken * math.log(share / margin) + (clusters - broken) * math.log((1 - share) / (1 - margin))
    return ratio * (1 + 1e-9)  # a sample with exactly so many broken templates must not pass by rounding


def parts_show_margin(parts: Sequence[SuiteTotals], *, margin: float, alpha: float) -> bool:
    """Return whether a few broken templates of one or more suites cannot hide a loss of the margin (the template rule).

    For one suite this is ``shows_margin``; for several, ``template_bound`` must lie above minus the margin.
    """
    if len(parts) == 1 and abs(parts[0].weight) == 1:
        [part] = parts
        return bool(shows_margin(part.weight * part.sums, part.counts, margin=margin, alpha=alpha))
    return template_bound(parts, alpha=alpha) > -margin


def template_bound(parts: Sequence[SuiteTotals], *, alpha: float) -> float:
    """Return the lowest difference that could still hide in a few broken templates (the template rule).

    The bounds of several suites are combined by MOVER. For one suite the result lies above -margin exactly if
    ``shows_margin`` holds.
    """
    means = [p.weight * float(p.sums.sum() / p.counts.sum()) for p in parts]
    gaps = [mean - _part_bound(p, alpha) for p, mean in zip(parts, means, strict=True)]
    return sum(means) - float(np.sqrt(np.sum(np.square(gaps))))


def too_large(counts: npt.ArrayLike, margin: float) -> bool:
    """Return whether one template has so many of the items that its failure alone could hide a loss of the margin."""
    sizes = np.asarray(counts, dtype=np.float64)
    return bool(sizes.max() > LARGEST_SHARE * margin * sizes.sum() * (1 + 1e-9))


class Largest(NamedTuple):
    """A set of the largest templates, how much it holds, and how often a loss in it is not seen.

    ``number`` is how many templates it has, ``share`` their share of all items. ``unseen`` is the chance that no
    template of a loss is sampled. The loss has the size of the margin. It consists of whole templates of the set, each
    of which is equally likely to be lost.
    """

    number: int
    share: float
    unseen: float


def largest_alone(counts: npt.ArrayLike, margin: float) -> Largest:
    """Return the set of largest templates in which a loss of the margin most often goes unsampled.

    Only sets with half of the items or more are considered. The loss is a total failure of some templates of the set.
    If all templates have one size, the set is all of them, and with C_min templates the chance of missing the loss
    equals the level.
    """
    sizes = np.sort(np.asarray(counts, dtype=np.float64))[::-1]
    shares, numbers = np.cumsum(sizes) / sizes.sum(), np.arange(1, len(sizes) + 1)
    chance = np.where(shares >= max(LARGE_HALF, margin) - 1e-12, margin / shares, 1.0)
    unseen = np.where(chance < 1, (1 - np.minimum(chance, 1.0)) ** numbers, 0.0)
    most = int(np.argmax(unseen))
    return Largest(most + 1, float(shares[most]), float(unseen[most]))


def too_uneven(counts: npt.ArrayLike, margin: float, alpha: float) -> bool:
    """Return whether one template, or the largest ones together, are large enough to hide a loss of the margin."""
    return too_large(counts, margin) or largest_alone(counts, margin).unseen > alpha * (1 + 1e-9)


def _part_bound(part: SuiteTotals, alpha: float) -> float:
    """Return the lowest weighted mean of one suite that could still hide in a few broken templates (the template rule).

    With a negative weight, losses of this suite count as gains.
    """
    sign, size = (1.0, part.weight) if part.weight > 0 else (-1.0, -part.weight)
    low, high = 0.0, 1.0  # around the largest margin that is not ruled out
    for _ in range(_BOUND_STEPS):
        middle = (low + high) / 2
        shown = bool(shows_margin(sign * part.sums, part.counts, margin=middle, alpha=alpha))
        low, high = (low, middle) if shown else (middle, high)
    return -high * size


def _rules_out(above: Array, sizes: Array, worst: float, wanted: float) -> npt.NDArray[np.bool_]:
    clear = above.mean(axis=-1) > 0  # otherwise the estimate is at the margin, or past it
    unseen = worst * float(np.sum(sizes**2) / sizes.sum())  # distance of a template that lost everything
    found = np.zeros(clear.shape, dtype=np.bool_)
    found[clear] = _log_ratio(above[clear], unseen) > wanted
    return found


def _log_ratio(above: Array, unseen: float) -> Array:
    """Return the log-likelihood ratio [...] that the template rule tests: the maximum over l of sum log(1 + l * above).

    ``above`` [..., C] is how far each template's total lies above its value at the limit, for example at a loss of the
    margin. ``unseen`` is how far a template that is not in the sample and lost everything would lie below that value. l
    is at least 0, and small enough that 1 - l * unseen and every 1 + l * above are 0 or more. The sum is concave in l,
    so the maximum is where its slope is 0, which is found by bisection between 0 and the largest l.
    """
    most = 1 / np.maximum(unseen, -above.min(axis=-1, initial=0.0))[..., None]
    low, high = np.zeros_like(most), np.ones_like(most)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        rising = np.sum(above / (1 + middle * most * above), axis=-1, keepdims=True) > 0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    return np.asarray(np.sum(np.log1p(low * most * above), axis=-1))
