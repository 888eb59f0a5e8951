"""The power of a planned run, the size that a wanted power needs, and the number of items that a margin needs.

The chance of a PASS is simulated under the gate's own rule (``verdict.chance``); interval widths and the detectable
drop follow from ``stats.power`` with t quantiles at the planned number of templates. C_min, the fewest templates with
which a margin can pass, and the blind spot, the largest share of broken templates that may go unsampled, are those of
the gate. The inputs are assumptions, never the result of a finished run.

For a facet only the templates with items that have it count towards C_min: if every third item has ``unsafe``, 144
items of a suite of 72 templates have 48 templates for it. One round is every template with each of its twins (items
with different right answers) once; later rounds add items to the same templates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvaudit.core.errors import SpecError
from kvaudit.core.spec_parts import LEAST_RATIO, MOST_RATIO
from kvaudit.reports.stats.effect import Array
from kvaudit.reports.stats.judges import clopper_pearson
from kvaudit.reports.stats.power import detection_power, difference_variance, minimal_detectable
from kvaudit.reports.stats.ratio import points_of
from kvaudit.reports.stats.rule import LARGEST_SHARE, blind_spot, clusters_required, effective_clusters, too_uneven
from kvaudit.reports.stats.seeds import SEEDS_ADVISED
from kvaudit.reports.verdict.chance import (
    AUDITS,
    Differences,
    Pool,
    can_show,
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
_MOST_CLUSTERS = 20_000  # templates; with more, a simulation takes more than a few seconds
_MOST_ITEMS = 2_000  # of a template, for the same reason
_DESIGN_SEARCH = 500  # audits at each step of a search
_SAMPLES_ADVISED = 4
_ITEMS_TIMES = 4  # how many times as many items the last of the larger designs has


@dataclass(frozen=True)
class Design:
    """A planned run. ``margin``, ``drift`` and ``discordance`` are in score units, ``rate`` in answers per second.

    ``discordance`` is the share of items whose single answers differ between the arms. ``sampling_share`` is the share
    of the variance of these differences that is due to decoding noise, which more samples shrink; ``seed_share`` the
    share of the rest that is due to the training run, which more seeds shrink. ``correlation`` says how alike the
    paired differences of one template are (ICC).
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
        """The time that the answers take; None if no rate of answers is assumed."""
        return None if self.rate is None else self.answers / self.rate

    @property
    def deff(self) -> float:
        """The design effect of the templates, 1 + (m - 1) * ICC for m items of each (Kish 1965)."""
        return 1 + (self.items_per_cluster - 1) * self.correlation

    @property
    def training(self) -> float:
        """The share of the variance of differences that is due to the training run: only more seeds shrink it."""
        return (1 - self.sampling_share) * self.seed_share


@dataclass(frozen=True)
class Sizes:
    """The power and precision of a planned run, as ``kvaudit plan`` prints them."""

    design: Design
    deff: float
    error: float  # standard error of the drift
    passes: float  # P(PASS) at the assumed drift
    interval: float  # P(lower bound above -margin): a PASS without the template rules
    detects: float | None  # P(upper bound below 0) at a drop of the margin; None if the discordance is below it
    detectable: float  # smallest drop that a single cell detects with the design's power
    half_width: float  # of the two-sided 95 % interval
    required_clusters: int  # C_min
    blind_spot: float
    lowest_estimate: float | None  # lowest drift that can pass at any precision; None below C_min


class Step(NamedTuple):
    """A change that makes a design larger, in words, and the chance of the larger design to pass."""

    words: str
    passes: float


def plan_sizes(design: Design) -> Sizes:
    """Compute the power and precision of a design; raises SpecError for invalid numbers."""
    check_design(design)
    df = design.clusters - 1
    error = _error(design, design.drift)
    audits = draw_audits(_pool(design), design.clusters)
    return Sizes(
        design=design,
        deff=design.deff,
        error=error,
        passes=pass_rate(audits, margin=design.margin, alpha=design.alpha, ratio=design.ratio),
        interval=interval_rate(audits, margin=design.margin, alpha=design.alpha, ratio=design.ratio),
        detects=_detects(design),
        detectable=minimal_detectable(error, df=df, alpha=design.alpha, power=design.power),
        # power .5 has quantile 0, so this is t at .975 times the error
        half_width=minimal_detectable(error, df=df, alpha=0.025, power=0.5),
        required_clusters=clusters_required(design.margin, design.alpha),
        blind_spot=blind_spot(design.clusters, design.alpha),
        lowest_estimate=lowest_estimate(design.clusters, margin=design.margin, alpha=design.alpha),
    )


def _error(design: Design, drift: float) -> float:
    """Return the standard error of the mean difference at a true ``drift``."""
    draws = design.samples * design.seeds
    # the share of the variance that neither samples nor seeds average out
    common = 1 - design.sampling_share - design.training
    share = common + design.training / design.seeds + design.sampling_share / draws
    variance = difference_variance(design.discordance, drift=drift) * share  # of an item's mean over samples and seeds
    return math.sqrt(variance * design.deff / design.items)


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
    """Return the probability that the gate passes a run of this design, which must be valid."""
    simulated = draw_audits(_pool(design), design.clusters, audits=audits)
    return pass_rate(simulated, margin=design.margin, alpha=design.alpha, ratio=design.ratio)


def larger_designs(design: Design) -> Iterator[Step]:
    """Yield larger designs, cheapest first and cumulative: more samples, then seeds, then items.

    A step that would change nothing is left out.
    """
    if design.samples < _SAMPLES_ADVISED and design.sampling_share > 0:
        design = replace(design, samples=_SAMPLES_ADVISED)
        yield Step(f"{_SAMPLES_ADVISED} answers to an item", pass_chance(design, audits=_DESIGN_SEARCH))
    if design.seeds < SEEDS_ADVISED and design.training > 0:
        design = replace(design, seeds=SEEDS_ADVISED)
        yield Step(f"{SEEDS_ADVISED} seeds", pass_chance(design, audits=_DESIGN_SEARCH))
    yield with_more_items(design)


def with_more_items(design: Design) -> Step:
    """Return the step to a design with four times the items of each template, and its chance to pass."""
    larger = replace(design, items_per_cluster=_ITEMS_TIMES * design.items_per_cluster)
    return Step(f"{_ITEMS_TIMES} times the items of each template", pass_chance(larger, audits=_DESIGN_SEARCH))


def needed_clusters(design: Design) -> int:
    """Return the smallest number of templates with which the design has its power; at least C_min.

    It is found to within 2 %. Raises SpecError if more than 20,000 are needed.
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
    return pass_chance(replace(design, **changes), audits=_DESIGN_SEARCH) >= design.power


def smallest_margin(design: Design) -> float | None:
    """Return the smallest margin (to a tenth of a point) that passes with the design's power; None if none does."""
    audits = draw_audits(_pool(design), design.clusters, audits=_DESIGN_SEARCH)

    def has_power(margin: float) -> bool:
        return pass_rate(audits, margin=margin, alpha=design.alpha) >= design.power

    return _lowest(has_power, 0.0, 0.999)


def smallest_ratio(design: Design) -> float | None:
    """Return the smallest ratio that passes with the design's power, to a thousandth; None if there is none.

    It is at most 100, and at most the ratio at which the event always happens.
    """
    audits = draw_audits(_pool(design), design.clusters, audits=_DESIGN_SEARCH)

    def has_power(ratio: float) -> bool:
        return pass_rate(audits, margin=design.margin, alpha=design.alpha, ratio=ratio) >= design.power

    return _lowest(has_power, 1.0, min(100.0, 1 / design.happens) if design.happens else 100.0)


def lowest_drift(design: Design) -> float | None:
    """Return the lowest true drift (to a tenth of a point) that passes with the design's power; None if none does."""
    # no drift is larger than the share of items that differ
    lowest = -min(design.margin, design.discordance)
    return _lowest(lambda drift: _has_power(design, drift=drift), lowest, design.discordance)


def _lowest(has_power: Callable[[float], bool], low: float, high: float) -> float | None:
    """Return the lowest value from ``low`` to ``high`` with which ``has_power`` holds; None if it fails at ``high``."""
    if not has_power(high):
        return None
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (low, middle) if has_power(middle) else (middle, high)
    return high


def _detects(design: Design) -> float | None:
    """Return the power to detect a drop of the margin; None if too few answers differ for such a drop."""
    if design.discordance < design.margin:
        return None
    error = _error(design, -design.margin)
    return detection_power(design.margin, error, df=design.clusters - 1, alpha=design.alpha)


def spec_snippet(design: Design, clusters: int, suite: str) -> str:
    """Return the lines of a spec for a run of this design, but with ``clusters`` templates."""
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
    """Return the design with ``ratio`` as its limit, and the margin that follows; unchanged if neither option is given.

    ``ratio`` limits how many times as often the unwanted event may happen under the candidate as under the reference;
    ``happens`` is the assumed rate of that event under the reference. Both together give the margin in score units.
    Raises SpecError for an invalid ratio or rate.
    """
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
    """Raise SpecError for the first option of a planned run that is invalid."""
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


# --- the numbers of items of a run -----------------------------------------------------------------------------------


LEAST_CHURN = 0.05  # lowest discordance that a pilot plans with
ASSUMED_CHURN = 0.10  # discordance without a pilot
CHURN_LEVEL = 0.5  # of the two-sided interval of a pilot's churn; one run in four has more churn than its upper end
_ITEM_SEARCH = 200  # audits at each step of a search
_STEP = 1.1  # a search ends when its bounds differ by this factor


class LayoutItem(NamedTuple):
    """One item of a suite as planning sees it: its template and its facets."""

    cluster: str
    facets: tuple[str, ...]


Layout = Sequence[LayoutItem]  # one round, in the order in which items are asked


class Metric(NamedTuple):
    """A metric that a planned run is to pass, a suite's score or one of its facets, with its margin in score units."""

    suite: str
    facet: str | None
    margin: float

    @property
    def name(self) -> str:
        """The name of the metric as in ``gate.margins``: SUITE or SUITE.FACET."""
        return self.suite if self.facet is None else f"{self.suite}.{self.facet}"


class PlannedItems(NamedTuple):
    """A number of items, and the chance to pass with it if there is no drift."""

    items: int
    chance: float


@dataclass(frozen=True)
class Shortfall:
    """Why a metric cannot pass with ``items`` items: the templates that it has and needs, the items that suffice."""

    metric: Metric
    items: int
    templates: int  # effective number
    required: int
    most: int  # templates of a round
    enough: int | None  # the fewest items that suffice; None if a whole round does not

    @property
    def line(self) -> str:
        """One line for the user that says what is missing; it never suggests fewer items."""
        need = f"{self.metric.name}: {100 * self.metric.margin:g} points need {self.required} effective templates"
        if self.enough is None:
            return f"{need}, the suite has at most {self.most}: no number of items would suffice"
        if self.templates < self.required:
            return f"{need}, {self.items} items have {self.templates}: {self.enough} items would suffice"
        return (
            f"{need} of similar size; {self.items} items have {self.templates}, some of them larger than this margin "
            f"allows: {self.enough} items would suffice, spread evenly"
        )


def template_counts(layout: Layout, items: int, facet: str | None) -> Array:
    """Return how many of the first ``items`` items each template has [C]; templates that have none are left out.

    With a ``facet`` (a yes-or-no property of answers) only items that are graded by it count.
    """
    rounds, rest = divmod(items, len(layout))
    counts: dict[str, int] = {}
    for place, item in enumerate(layout):
        if facet is None or facet in item.facets:
            # the last round may be incomplete
            counts[item.cluster] = counts.get(item.cluster, 0) + rounds + (place < rest)
    return np.array([count for count in counts.values() if count], dtype=np.float64)


def passing_counts(layout: Layout, metric: Metric, alpha: float, limit: int) -> list[int]:
    """Return the numbers of items, up to ``limit``, with which a metric can pass.

    A larger number may fail where a smaller one passes, because its templates differ more in size.
    """
    required, counts = clusters_required(metric.margin, alpha), dict[str, int]()
    total, squares, largest, numbers = 0, 0, 0, list[int]()
    for items in range(1, limit + 1):
        item = layout[(items - 1) % len(layout)]
        if metric.facet is None or metric.facet in item.facets:
            count = counts[item.cluster] = counts.get(item.cluster, 0) + 1
            # the square of a count grows by 2 n - 1
            total, squares, largest = total + 1, squares + 2 * count - 1, max(largest, count)
        may_pass = total > 0 and total**2 / squares >= required - 1e-9
        may_pass = may_pass and largest <= LARGEST_SHARE * metric.margin * total * (1 + 1e-9)
        # the slowest check last: it sorts all sizes at every number of items
        if may_pass and not too_uneven(np.array(list(counts.values())), metric.margin, alpha):
            numbers.append(items)
    return numbers


def fewest_items(layout: Layout, metric: Metric, alpha: float) -> int | None:
    """Return the smallest number of items with which a metric can pass; None if all items of ``layout`` are too few."""
    return next(iter(passing_counts(layout, metric, alpha, len(layout))), None)


def shortfall_of(layout: Layout, metric: Metric, items: int, alpha: float) -> Shortfall | None:
    """Return why a metric cannot pass with this number of items, None if it can."""
    counts = template_counts(layout, items, metric.facet)
    if len(counts) and can_show(counts, metric.margin, alpha):
        return None
    return Shortfall(
        metric=metric,
        items=items,
        templates=int(effective_clusters(counts) + 1e-9) if len(counts) else 0,
        required=clusters_required(metric.margin, alpha),
        most=len(template_counts(layout, len(layout), metric.facet)),
        enough=fewest_items(layout, metric, alpha),
    )


def planned_discordance(differing: int, pairs: int) -> float:
    """Return the share of differing answers to plan with, if ``differing`` of ``pairs`` answers differed in a pilot.

    It is the upper end of the interval of the pilot's share, at least ``LEAST_CHURN``. Without pairs it is
    ``ASSUMED_CHURN``.
    """
    if not pairs:
        return ASSUMED_CHURN
    return max(LEAST_CHURN, min(clopper_pearson(differing, pairs, level=CHURN_LEVEL).high, 0.99))


def plan_items(layout: Layout, metric: Metric, design: Design, limit: int) -> PlannedItems:
    """Return the fewest items (to within 10 %) with which a metric passes with the design's power, and the chance.

    If no number up to ``limit`` has that power, the result is the largest with which the metric can pass; for a metric
    that cannot pass at all, one round of items. The numbers of templates and items in ``design`` are ignored.
    """
    numbers = passing_counts(layout, metric, design.alpha, limit)
    if not numbers:
        return PlannedItems(min(len(layout), limit), 0.0)
    low, high = 0, len(numbers) - 1
    if (chance := _chance(layout, metric, design, numbers[low])) >= design.power:
        return PlannedItems(numbers[low], chance)
    if (high_chance := _chance(layout, metric, design, numbers[high])) < design.power:
        return PlannedItems(numbers[high], high_chance)
    while high > low + 1 and numbers[high] > numbers[low] * _STEP + 1:
        middle = (low + high) // 2
        chance = _chance(layout, metric, design, numbers[middle])
        if chance >= design.power:
            high, high_chance = middle, chance
        else:
            low = middle
    return PlannedItems(numbers[high], high_chance)


def _chance(layout: Layout, metric: Metric, design: Design, items: int) -> float:
    counts = template_counts(layout, items, metric.facet)
    # uneven templates count with their mean size
    sized = replace(design, clusters=len(counts), items_per_cluster=max(1, round(float(counts.mean()))))
    return pass_chance(sized, audits=_ITEM_SEARCH)
