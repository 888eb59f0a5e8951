"""Whether a number of items can decide a margin at all, and how many items have the wanted power. Pure.

A cell needs C_min templates, and a facet counts only templates of items that have it: 144 items of a suite of 72
templates whose third twin is the unsafe one have 48 templates for ``unsafe``. One round is every template with each of
its twins once; later rounds add items to the same templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvaudit.reports.stats.binomial import clopper_pearson
from kvaudit.reports.stats.effect import Array
from kvaudit.reports.stats.rule import LARGEST_SHARE, clusters_required, effective_clusters, too_uneven
from kvaudit.reports.verdict.chance import can_show
from kvaudit.reports.verdict.sizes import Design, pass_chance

LEAST_CHURN = 0.05  # lowest discordance that a pilot plans with
ASSUMED_CHURN = 0.10  # discordance without a pilot
CHURN_LEVEL = 0.5  # two-sided level of the pilot's churn; its upper end is planned with, so one run in four churns more
_SEARCHED = 200  # audits at each step of a search
_STEP = 1.1


class LayoutItem(NamedTuple):
    """The template and facets of one item."""

    cluster: str
    facets: tuple[str, ...]


Layout = Sequence[LayoutItem]  # one round, in the order in which items are asked


class Metric(NamedTuple):
    """A metric with its margin in score units: a suite's score, or one of its facets."""

    suite: str
    facet: str | None
    margin: float

    @property
    def name(self) -> str:
        """SUITE or SUITE.FACET, as in ``gate.margins``."""
        return self.suite if self.facet is None else f"{self.suite}.{self.facet}"


class PlannedItems(NamedTuple):
    """A number of items, and the chance to pass with them without a drift."""

    items: int
    chance: float


@dataclass(frozen=True)
class Shortfall:
    """A metric that cannot pass with ``items``: its templates, the required ones, and a sufficient number of items."""

    metric: Metric
    items: int
    templates: int  # effective number
    required: int
    most: int  # templates of a round
    enough: int | None  # sufficient items, if any number is

    @property
    def line(self) -> str:
        """One line for a person; it only ever suggests more items."""
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
    """Return how many of the first ``items`` have the facet, for each template [C] with any."""
    rounds, rest = divmod(items, len(layout))
    counts: dict[str, int] = {}
    for place, item in enumerate(layout):
        if facet is None or facet in item.facets:
            # the last round may be incomplete
            counts[item.cluster] = counts.get(item.cluster, 0) + rounds + (place < rest)
    return np.array([count for count in counts.values() if count], dtype=np.float64)


def can_pass(counts: Array, margin: float, alpha: float) -> bool:
    """Return whether templates with ``counts`` [C] items are enough, and not too uneven in size."""
    return len(counts) > 0 and can_show(counts, margin, alpha)


def passing_counts(layout: Layout, metric: Metric, alpha: float, limit: int) -> list[int]:
    """Return the numbers of items, up to ``limit``, with which a metric can pass; larger ones may be too uneven."""
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
    """Return the smallest number of items within a round with which a metric can pass, None if there is none."""
    return next(iter(passing_counts(layout, metric, alpha, len(layout))), None)


def shortfall_of(layout: Layout, metric: Metric, items: int, alpha: float) -> Shortfall | None:
    """Return why a metric cannot pass with so many items, None if it can."""
    counts = template_counts(layout, items, metric.facet)
    if can_pass(counts, metric.margin, alpha):
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
    """Return the discordance to plan with: the upper end of the pilot's churn, at least ``LEAST_CHURN``."""
    if not pairs:
        return ASSUMED_CHURN
    return max(LEAST_CHURN, min(clopper_pearson(differing, pairs, level=CHURN_LEVEL).high, 0.99))


def plan_items(layout: Layout, metric: Metric, design: Design, limit: int) -> PlannedItems:
    """Return the fewest items, to a tenth, that pass with the design's power; the largest number if none do.

    Templates and items of ``design`` are ignored. A metric that cannot pass at all gets one round of items.
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
    return pass_chance(sized, audits=_SEARCHED)
