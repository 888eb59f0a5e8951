"""The power of a planned run, and the size that a wanted power needs. Pure.

The chance of a PASS is simulated under the gate's own rule (``verdict.chance``); interval widths and the detectable
drop follow from ``stats.power`` with t quantiles at the planned number of templates; C_min and the blind spot are those
of the gate. The inputs are assumptions, never the result of a finished run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

DEFAULT_CORRELATION = 0.1  # of paired differences within a template
DEFAULT_SAMPLING_SHARE = 0.5  # fits the simulated power of 1, 4 and 8 samples at temperature 1
DEFAULT_SEED_SHARE = 0.85  # at least .84 in the cells of the default audit that moved little
_ARMS = 2  # reference and candidate
SECONDS_PER_HOUR = 3600.0
_MOST_CLUSTERS, _MOST_ITEMS = 20_000, 2_000  # templates, items of each; larger simulations take more than seconds
_SEARCHED = 500  # audits at each step of a search
_SAMPLES_ADVISED, _ITEMS_TIMES = 4, 4


@dataclass(frozen=True)
class Design:
    """A planned run. ``margin``, ``drift`` and ``discordance`` are in score units, ``rate`` in answers per second.

    ``discordance`` is the share of items whose single answers differ between the arms. ``sampling_share`` is the share
    of that variance due to decoding noise, which more samples shrink; ``seed_share`` the share of the rest due to the
    training run, which more seeds shrink. ``correlation`` is the ICC of the paired difference.
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
    ratio: float | None = None  # decides instead of the margin, which is then the loss that it allows
    happens: float | None = None  # the reference's rate of the unwanted event, for a ratio

    @property
    def items(self) -> int:
        """The number of items of one suite at one length."""
        return self.clusters * self.items_per_cluster

    @property
    def answers(self) -> int:
        """The number of answers over all arms, seeds and policies."""
        return self.items * self.samples * self.policies * self.arms * self.seeds

    @property
    def seconds(self) -> float | None:
        """The time that the answers take, None without a rate."""
        return None if self.rate is None else self.answers / self.rate

    @property
    def training(self) -> float:
        """The share of the variance that more seeds shrink and more samples do not."""
        return (1 - self.sampling_share) * self.seed_share


@dataclass(frozen=True)
class Sizes:
    """The power and precision of a design."""

    design: Design
    deff: float
    error: float  # standard error of the drift
    passes: float  # P(PASS) at the assumed drift
    interval: float  # P(lower bound above -margin): a PASS without the template rules
    detects: float | None  # P(upper bound below 0) at a drop of the margin; None if too few items differ for one
    detectable: float  # smallest drop that a single cell detects with the design's power
    half_width: float  # of the two-sided 95 % interval
    required_clusters: int  # C_min
    blind_spot: float
    lowest_estimate: float | None  # lowest drift that can pass at any precision; None below C_min


class Step(NamedTuple):
    """A description of a larger design, and its chance to pass."""

    words: str
    passes: float


def plan_sizes(design: Design) -> Sizes:
    """Compute the power and precision of a design; raises SpecError for invalid numbers."""
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
        # power .5 has quantile 0, so this is t at .975 times the error
        half_width=float(kernels.minimal_detectable(error, df=df, alpha=0.025, power=0.5)),
        required_clusters=clusters_required(design.margin, design.alpha),
        blind_spot=blind_spot(design.clusters, design.alpha),
        lowest_estimate=lowest_estimate(design.clusters, margin=design.margin, alpha=design.alpha),
    )


def _variance(design: Design, drift: float) -> float:
    """Return the variance of an item's difference at a true ``drift``, averaged over samples and seeds."""
    draws = design.samples * design.seeds
    # the share that neither samples nor seeds average out
    common = 1 - design.sampling_share - design.training
    share = common + design.training / design.seeds + design.sampling_share / draws
    return float(kernels.difference_variance(design.discordance, drift=drift)) * share


def _pool(design: Design) -> Pool:
    differences = Differences(
        discordance=design.discordance,
        drift=design.drift,
        decoding=design.sampling_share,
        training=design.training,
        correlation=design.correlation,
        happens=design.happens if design.ratio else None,
    )
    return pool_of(differences, items=design.items_per_cluster, samples=design.samples, seeds=design.seeds)


def pass_chance(design: Design, *, audits: int = AUDITS) -> float:
    """Return P(PASS) of a valid design."""
    drawn = draw_audits(_pool(design), design.clusters, audits=audits)
    return pass_rate(drawn, margin=design.margin, alpha=design.alpha, ratio=design.ratio)


def larger_designs(design: Design) -> Iterator[Step]:
    """Yield larger designs, cheapest first and cumulative: more samples, then seeds, then items.

    A step that would change nothing is left out.
    """
    if design.samples < _SAMPLES_ADVISED and design.sampling_share > 0:
        design = replace(design, samples=_SAMPLES_ADVISED)
        yield Step(f"{_SAMPLES_ADVISED} answers to an item", pass_chance(design, audits=_SEARCHED))
    if design.seeds < SEEDS_ADVISED and design.training > 0:
        design = replace(design, seeds=SEEDS_ADVISED)
        yield Step(f"{SEEDS_ADVISED} seeds", pass_chance(design, audits=_SEARCHED))
    yield with_more_items(design)


def with_more_items(design: Design) -> Step:
    """Return the design with four times the items of each template."""
    larger = replace(design, items_per_cluster=_ITEMS_TIMES * design.items_per_cluster)
    return Step(f"{_ITEMS_TIMES} times the items of each template", pass_chance(larger, audits=_SEARCHED))


def needed_clusters(design: Design) -> int:
    """Return the number of templates with which the design has its power, to 2 %, at least C_min.

    Raises SpecError if more than 20,000 are needed.
    """
    low = high = max(2, clusters_required(design.margin, design.alpha))
    while high > _MOST_CLUSTERS or not _has_power(design, clusters=high):
        if high >= _MOST_CLUSTERS:
            raise SpecError(
                f"more than {_MOST_CLUSTERS:,} templates would be needed; plan more samples or seeds, or assume a "
                "smaller drop"
            )
        low, high = high, min(2 * high, _MOST_CLUSTERS)
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if _has_power(design, clusters=middle) else (middle, high)
    return high


def _has_power(design: Design, **changes: Any) -> bool:
    return pass_chance(replace(design, **changes), audits=_SEARCHED) >= design.power


def smallest_margin(design: Design) -> float | None:
    """Return the smallest margin that the design passes with its power, to a tenth of a point; None below 1 if none."""
    audits = draw_audits(_pool(design), design.clusters, audits=_SEARCHED)

    def has_power(margin: float) -> bool:
        return pass_rate(audits, margin=margin, alpha=design.alpha) >= design.power

    return _lowest(has_power, 0.0, 0.999)


def smallest_ratio(design: Design) -> float | None:
    """Return the smallest ratio that the design passes with its power, to a thousandth; None if there is none.

    It is at most 100, and at most the ratio at which the event always happens.
    """
    audits = draw_audits(_pool(design), design.clusters, audits=_SEARCHED)

    def has_power(ratio: float) -> bool:
        return pass_rate(audits, margin=design.margin, alpha=design.alpha, ratio=ratio) >= design.power

    return _lowest(has_power, 1.0, min(100.0, 1 / design.happens) if design.happens else 100.0)


def lowest_drift(design: Design) -> float | None:
    """Return the lowest true drift that passes with the design's power, to a tenth of a point; None if none does."""
    # no drift is larger than the share of items that differ
    lowest = -min(design.margin, design.discordance)
    return _lowest(lambda drift: _has_power(design, drift=drift), lowest, design.discordance)


def _lowest(has_power: Callable[[float], bool], low: float, high: float) -> float | None:
    """Return the lowest value between ``low`` and ``high`` that has the power; None if ``high`` has not."""
    if not has_power(high):
        return None
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (low, middle) if has_power(middle) else (middle, high)
    return high


def _detects(design: Design, deff: float) -> float | None:
    """Return the power to detect a drop of the margin; None if fewer items differ."""
    if design.discordance < design.margin:
        return None
    variance = _variance(design, -design.margin)
    df = design.clusters - 1
    return float(kernels.detection_power(design.items, design.margin, variance, deff=deff, alpha=design.alpha, df=df))


def spec_snippet(design: Design, clusters: int, suite: str) -> str:
    """Return the part of a spec for that many templates."""
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
    """Return the design with a ratio, if one is given; raises SpecError for an invalid one."""
    if ratio is None and happens is None:
        return design
    if ratio is None or not LEAST_RATIO <= ratio <= MOST_RATIO:
        raise SpecError(f"--ratio is {ratio}, wanted a limit on the ratio of rates, from {LEAST_RATIO} to {MOST_RATIO}")
    check_design(design)
    if happens is None or not 0 < happens < 1:
        raise SpecError(f"--happens is {happens}, wanted the reference's rate of the event, above 0 and below 1")
    if ratio * happens >= 1:
        raise SpecError(
            f"--ratio is {ratio:g}, wanted below {1 / happens:.4g}: an event with rate {happens:g} cannot happen that "
            "many times as often, so the gate would say NOT MEASURABLE"
        )
    lost, gained = (design.discordance - design.drift) / 2, (design.discordance + design.drift) / 2  # shares of items
    if not gained <= happens <= 1 - lost:
        raise SpecError(
            f"--happens is {happens:g}, wanted from {gained:g} to {1 - lost:g}: of the items that differ "
            f"({design.discordance:g}) the reference has the event in the gains, and not in the losses"
        )
    return replace(design, ratio=ratio, happens=happens, margin=float(points_of(ratio, happens)))


def check_design(design: Design) -> None:
    """Raise SpecError for the first invalid option."""
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
