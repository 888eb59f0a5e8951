"""What a design can show before a run is made, and what it would take. Pure.

The chance to pass is simulated under the gate's own rule (``gate.chance``); the width of intervals and the drop that
is found follow from ``stats.power`` with t quantiles at the planned number of templates; C_min and the blind spot are
those of the gate. Priors go in, never a finished run's own result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvaudit.core.errors import SpecError
from kvaudit.core.spec_parts import LEAST_RATIO, MOST_RATIO
from kvaudit.reports.stats import power as kernels
from kvaudit.reports.stats.ratio import points_of
from kvaudit.reports.stats.rule import blind_spot, clusters_required
from kvaudit.reports.stats.seeds import SEEDS_ADVISED
from kvaudit.reports.verdict.chance import (
    AUDITS,
    Differences,
    Pool,
    draw_audits,
    interval_rate,
    lowest_estimate,
    pass_rate,
    pool_of,
)
from kvaudit.reports.verdict.rules import margin_of

DEFAULT_CORRELATION = 0.1  # of paired differences inside a template, where nothing is known
DEFAULT_SAMPLING_SHARE = 0.5  # gave the power of 1, 4 and 8 samples that was simulated for decoding at temperature 1
DEFAULT_SEED_SHARE = 0.85  # .84 and more in the default audit's cells that moved little
_ARMS = 2  # reference and candidate
SECONDS_PER_HOUR = 3600.0
_MOST_CLUSTERS, _MOST_ITEMS = 20_000, 2_000  # templates, items of each; beyond, a chance takes more than seconds
_SEARCHED = 500  # audits at each step of a search
_SAMPLES_ADVISED, _ITEMS_TIMES = 4, 4


@dataclass(frozen=True)
class Design:
    """What is planned. ``margin``, ``drift`` and ``discordance`` in score units, a loss below 0; ``rate`` in answers
    per second.

    ``discordance``: share of items whose single answers differ between the arms. ``sampling_share``: part of that
    variance which is decoding noise, so that more samples shrink it; ``seed_share``: part of the rest which is the
    training run's, so that more seeds shrink it. ``correlation``: ICC of the paired difference.
    """

    margin: float
    discordance: float
    clusters: int
    items_per_cluster: int = 5
    samples: int = 1
    sampling_share: float = DEFAULT_SAMPLING_SHARE
    seeds: int = 1
    seed_share: float = DEFAULT_SEED_SHARE
    policies: int = 1
    arms: int = _ARMS
    correlation: float = DEFAULT_CORRELATION
    drift: float = 0.0
    alpha: float = 0.05
    power: float = 0.8
    rate: float | None = None
    ratio: float | None = None  # that decides instead of the margin, which is what it comes to
    happens: float | None = None  # how often what is not wanted happens with the reference: a ratio needs it

    @property
    def items(self) -> int:
        """N of one suite at one length."""
        return self.clusters * self.items_per_cluster

    @property
    def answers(self) -> int:
        """Answers over all arms, seeds and policies."""
        return self.items * self.samples * self.policies * self.arms * self.seeds

    @property
    def seconds(self) -> float | None:
        """How long the answers take, None without a rate."""
        return None if self.rate is None else self.answers / self.rate

    @property
    def training(self) -> float:
        """Share of the variance that more seeds shrink and more samples do not."""
        return (1 - self.sampling_share) * self.seed_share


@dataclass(frozen=True)
class Sizes:
    """What a design buys."""

    design: Design
    deff: float
    error: float  # standard error of the drift
    passes: float  # P(PASS) at the assumed drift
    interval: float  # P(lower bound above the margin): a PASS, were it not for the templates
    detects: float | None  # P(upper bound below 0) at a drop of the margin; None where too few items differ for one
    detectable: float  # smallest drop found with the asked power by a cell alone
    half_width: float  # of the two-sided 95 % interval
    required_clusters: int  # C_min
    blind_spot: float
    lowest_estimate: float | None  # that passes, however precise; None below C_min


class Step(NamedTuple):
    """A larger design, in words, and its chance to pass."""

    words: str
    passes: float


def plan_sizes(design: Design) -> Sizes:
    """What a design buys. Raises SpecError for numbers that cannot be."""
    check_design(design)
    df = design.clusters - 1
    deff = float(kernels.icc_design_effect(design.correlation, design.items_per_cluster))
    error = float(kernels.standard_error(design.items, _variance(design, design.drift), deff=deff))
    audits = draw_audits(_pool(design), design.clusters)
    return Sizes(
        design=design,
        deff=deff,
        error=error,
        passes=pass_rate(audits, margin=design.margin, alpha=design.alpha, ratio=design.ratio),
        interval=interval_rate(audits, margin=design.margin, alpha=design.alpha, ratio=design.ratio),
        detects=_detects(design, deff),
        detectable=float(kernels.minimal_detectable(error, df=df, alpha=design.alpha, power=design.power)),
        # a power of one half has quantile 0, so this is t at .975 times the error
        half_width=float(kernels.minimal_detectable(error, df=df, alpha=0.025, power=0.5)),
        required_clusters=clusters_required(design.margin, design.alpha),
        blind_spot=blind_spot(design.clusters, design.alpha),
        lowest_estimate=lowest_estimate(design.clusters, margin=design.margin, alpha=design.alpha),
    )


def _variance(design: Design, drift: float) -> float:
    """Of an item's difference at a true ``drift``, averaged over samples and seeds."""
    draws = design.samples * design.seeds
    # what neither more samples nor more seeds average away
    common = 1 - design.sampling_share - design.training
    share = common + design.training / design.seeds + design.sampling_share / draws
    return float(kernels.difference_variance(design.discordance, drift=drift)) * share


def _pool(design: Design) -> Pool:
    found = Differences(
        discordance=design.discordance,
        drift=design.drift,
        decoding=design.sampling_share,
        training=design.training,
        correlation=design.correlation,
        happens=design.happens if design.ratio else None,
    )
    return pool_of(found, items=design.items_per_cluster, samples=design.samples, seeds=design.seeds)


def pass_chance(design: Design, *, audits: int = AUDITS) -> float:
    """P(PASS) of a design that was checked."""
    found = draw_audits(_pool(design), design.clusters, audits=audits)
    return pass_rate(found, margin=design.margin, alpha=design.alpha, ratio=design.ratio)


def larger_designs(design: Design) -> Iterator[Step]:
    """Samples, then seeds, then items, the cheapest first, each on top of the last: only items have to be written.

    A step that changes nothing, since it is planned already or has no share in the variance, is left out.
    """
    if design.samples < _SAMPLES_ADVISED and design.sampling_share > 0:
        design = replace(design, samples=_SAMPLES_ADVISED)
        yield Step(f"{_SAMPLES_ADVISED} answers to an item", pass_chance(design, audits=_SEARCHED))
    if design.seeds < SEEDS_ADVISED and design.training > 0:
        design = replace(design, seeds=SEEDS_ADVISED)
        yield Step(f"{SEEDS_ADVISED} seeds", pass_chance(design, audits=_SEARCHED))
    yield with_more_items(design)


def with_more_items(design: Design) -> Step:
    """Four times the items of each template."""
    larger = replace(design, items_per_cluster=_ITEMS_TIMES * design.items_per_cluster)
    return Step(f"{_ITEMS_TIMES} times the items of each template", pass_chance(larger, audits=_SEARCHED))


def needed_clusters(design: Design) -> int:
    """Templates with which the design passes with the asked power, to two in a hundred; at least C_min.

    Raises SpecError where more than 20,000 would be needed.
    """
    low = high = max(2, clusters_required(design.margin, design.alpha))
    while high > _MOST_CLUSTERS or not _enough(design, high):
        if high >= _MOST_CLUSTERS:
            raise SpecError(
                f"more than {_MOST_CLUSTERS:,} templates would be needed; plan more samples or seeds, or assume a "
                "smaller drop"
            )
        low, high = high, min(2 * high, _MOST_CLUSTERS)
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if _enough(design, middle) else (middle, high)
    return high


def _enough(design: Design, clusters: int) -> bool:
    return pass_chance(replace(design, clusters=clusters), audits=_SEARCHED) >= design.power


def smallest_margin(design: Design) -> float | None:
    """The smallest margin that is passed with the asked power, to a tenth of a point; None where none below 1 is."""
    audits = draw_audits(_pool(design), design.clusters, audits=_SEARCHED)

    def enough(margin: float) -> bool:
        return pass_rate(audits, margin=margin, alpha=design.alpha) >= design.power

    return _first(enough, 0.0, 0.999)


def smallest_ratio(design: Design) -> float | None:
    """The smallest ratio that is passed with the asked power, to a thousandth; None where none is.

    At most 100, and no more than what happens always.
    """
    audits = draw_audits(_pool(design), design.clusters, audits=_SEARCHED)

    def enough(ratio: float) -> bool:
        return pass_rate(audits, margin=design.margin, alpha=design.alpha, ratio=ratio) >= design.power

    return _first(enough, 1.0, min(100.0, 1 / design.happens) if design.happens else 100.0)


def lowest_drift(design: Design) -> float | None:
    """The lowest true drift that passes with the asked power, to a tenth of a point; None where no gain is enough."""

    def enough(drift: float) -> bool:
        return pass_chance(replace(design, drift=drift), audits=_SEARCHED) >= design.power

    # no drift is larger than the share of items that differ
    return _first(enough, -min(design.margin, design.discordance), design.discordance)


def _first(enough: Callable[[float], bool], low: float, high: float) -> float | None:
    """The lowest value that is enough between one that is not and the highest there is."""
    if not enough(high):
        return None
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _detects(design: Design, deff: float) -> float | None:
    """Power to find a drop of the margin, which takes as many items that differ."""
    if design.discordance < design.margin:
        return None
    variance = _variance(design, -design.margin)
    df = design.clusters - 1
    return float(kernels.detection_power(design.items, design.margin, variance, deff=deff, alpha=design.alpha, df=df))


def spec_snippet(design: Design, clusters: int, suite: str) -> str:
    """The part of a spec that asks for that many templates."""
    limit = f"margins: {{{suite}: {100 * design.margin:g}}}"
    if design.ratio:
        limit = f"ratios: {{{suite}: {design.ratio:g}}}"
    return (
        "evaluate:\n"
        f"  suites: {{{suite}: {{items: {clusters * design.items_per_cluster}}}}}"
        f"  # {clusters} templates of {design.items_per_cluster}\n"
        f"  samples: {design.samples}\n"
        "gate:\n"
        f"  alpha: {design.alpha:g}\n"
        f"  {limit}\n"
    )


_COUNTS = {
    "clusters": _MOST_CLUSTERS,
    "items_per_cluster": _MOST_ITEMS,
    "samples": 10**4,
    "seeds": 10**3,
    "policies": 10**4,
    "arms": 10**3,
}
_SHARES = {"margin": "--margin", "discordance": "--discordance", "power": "--power"}
_PARTS = {"correlation": "--icc", "sampling_share": "--sampling-share", "seed_share": "--seed-share"}


def with_ratio(design: Design, ratio: float | None, happens: float | None) -> Design:
    """The design held to a ratio, where one is given. Raises SpecError for one that cannot be."""
    if ratio is None and happens is None:
        return design
    if ratio is None or not LEAST_RATIO <= ratio <= MOST_RATIO:
        raise SpecError(
            f"--ratio is {ratio}, wanted how many times as often at most, from {LEAST_RATIO} to {MOST_RATIO}"
        )
    check_design(design)
    if happens is None or not 0 < happens < 1:
        raise SpecError(f"--happens is {happens}, wanted how often it happens with the reference, above 0 and below 1")
    if ratio * happens >= 1:
        raise SpecError(
            f"--ratio is {ratio:g}, wanted below {1 / happens:.4g}: of what happens in {happens:g} already, nothing "
            "could happen so many times as often, and the gate would say NOT MEASURABLE"
        )
    lost, gained = (design.discordance - design.drift) / 2, (design.discordance + design.drift) / 2  # shares of items
    if not gained <= happens <= 1 - lost:
        raise SpecError(
            f"--happens is {happens:g}, wanted from {gained:g} to {1 - lost:g}: of the items that differ "
            f"({design.discordance:g}) it happens in what is won back, and not in what is lost"
        )
    return replace(design, ratio=ratio, happens=happens, margin=float(points_of(ratio, happens)))


def check_design(design: Design) -> None:
    """Raise SpecError with the option that is wrong."""
    for name, most in _COUNTS.items():
        value, least = getattr(design, name), 2 if name == "clusters" else 1
        if not least <= value <= most:
            raise SpecError(f"--{name.replace('_', '-')} is {value}, wanted a whole number from {least} to {most}")
    for name, option in _SHARES.items():
        value, scale = getattr(design, name), 100 if name == "margin" else 1
        if not 0 < value < 1:
            raise SpecError(f"{option} is {scale * value:g}, wanted a number above 0 and below {scale}")
    margin_of(100 * design.margin, "--margin")
    if not 0 < design.alpha < 0.5:
        raise SpecError(f"--alpha is {design.alpha:g}, wanted a number above 0 and below 0.5")
    for name, option in _PARTS.items():
        if not 0 <= getattr(design, name) <= 1:
            raise SpecError(f"{option} is {getattr(design, name):g}, wanted a number from 0 to 1")
    if design.rate is not None and not 0 < design.rate < math.inf:
        raise SpecError(f"--rate is {design.rate:g}, wanted answers per second above 0")
    _check_drift(design)


def _check_drift(design: Design) -> None:
    if not design.drift > -design.margin:
        raise SpecError(
            f"--drift is {100 * design.drift:g} pp at a margin of {100 * design.margin:g} pp: no size passes a drop "
            "at or beyond the margin"
        )
    if not abs(design.drift) <= design.discordance:
        raise SpecError(
            f"--discordance is {design.discordance:g}, too small for a drift of {100 * design.drift:g} pp; the share "
            "of items that differ is at least the size of the drift"
        )
