"""Whether the items that are asked can decide a margin at all, and how many do with the wanted power. Pure.

A cell passes with C_min templates or more, and a facet counts only the templates of items that carry it: 144 items of a
suite of 72 templates whose third twin is the unsafe one hold 48 templates for ``unsafe``. One round is every template
with each of its twins once; what comes after a round is more items of the same templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvaudit.reports.stats.binomial import clopper_pearson
from kvaudit.reports.stats.effect import Array
from kvaudit.reports.stats.rule import LARGEST_SHARE, clusters_required, effective_clusters, too_uneven
from kvaudit.reports.verdict.sizes import Design, pass_chance

LEAST_CHURN = 0.05  # discordance: no pilot sizes a run for fewer items that differ
ASSUMED_CHURN = 0.10  # discordance that is assumed where no pilot saw a pair
CHURN_LEVEL = 0.5  # two-sided, of the pilot's churn, whose upper end is planned with: one in four churns more
_SEARCHED = 200  # audits at each step of a search
_STEP = 1.1


class LayoutItem(NamedTuple):
    """What of an item decides how much it counts."""

    cluster: str
    facets: tuple[str, ...]


Layout = Sequence[LayoutItem]  # one round, in the order in which items are asked


class Metric(NamedTuple):
    """What a margin (in score units) is declared for: a suite's score, or one facet of it."""

    suite: str
    facet: str | None
    margin: float

    @property
    def name(self) -> str:
        """SUITE or SUITE.FACET, as in ``gate.margins``."""
        return self.suite if self.facet is None else f"{self.suite}.{self.facet}"


class PlannedItems(NamedTuple):
    """A number of items, and the chance to pass with them where nothing is lost."""

    items: int
    chance: float


@dataclass(frozen=True)
class Shortfall:
    """A cell that cannot pass with ``items``: what it has, what it needs, and the number that would do, if any does."""

    metric: Metric
    items: int
    templates: int  # effective ones: as many of equal weight tell as much
    required: int
    most: int  # templates that a round holds
    enough: int | None

    @property
    def line(self) -> str:
        """For a person; that more may be lost is nobody's advice."""
        need = f"{self.metric.name}: {100 * self.metric.margin:g} points need {self.required} effective templates"
        if self.enough is None:
            return f"{need}, the suite has {self.most} at the most: no number of items would do"
        if self.templates < self.required:
            return f"{need}, {self.items} items hold {self.templates}: {self.enough} items would do"
        return (
            f"{need} that hold about as many items each; {self.items} items come to {self.templates}, of which some "
            f"hold more than this margin allows: {self.enough} items would do, spread evenly"
        )


def template_counts(layout: Layout, items: int, facet: str | None) -> Array:
    """How many of the first ``items`` carry the facet in each template [C] that has any; round after round."""
    rounds, rest = divmod(items, len(layout))
    found: dict[str, int] = {}
    for place, one in enumerate(layout):
        if facet is None or facet in one.facets:
            # the last round may end before its place
            found[one.cluster] = found.get(one.cluster, 0) + rounds + (place < rest)
    return np.array([count for count in found.values() if count], dtype=np.float64)


def can_pass(counts: Array, margin: float, alpha: float) -> bool:
    """Whether templates with ``counts`` [C] items are enough, and neither one nor the largest hold too many."""
    if not len(counts):
        return False
    enough = effective_clusters(counts) >= clusters_required(margin, alpha) - 1e-9
    return enough and not too_uneven(counts, margin, alpha)


def passing_counts(layout: Layout, metric: Metric, alpha: float, most: int) -> list[int]:
    """The numbers of items, up to ``most``, with which a metric can pass; more may be too many of one template."""
    required, counts = clusters_required(metric.margin, alpha), dict[str, int]()
    total, squares, largest, found = 0, 0, 0, list[int]()
    for items in range(1, most + 1):
        one = layout[(items - 1) % len(layout)]
        if metric.facet is None or metric.facet in one.facets:
            own = counts[one.cluster] = counts.get(one.cluster, 0) + 1
            total, squares, largest = total + 1, squares + 2 * own - 1, max(largest, own)  # a square grows by 2 n - 1
        enough = total > 0 and total**2 / squares >= required - 1e-9
        enough = enough and largest <= LARGEST_SHARE * metric.margin * total * (1 + 1e-9)
        # last, since it sorts all sizes at every number of items
        if enough and not too_uneven(np.array(list(counts.values())), metric.margin, alpha):
            found.append(items)
    return found


def fewest_items(layout: Layout, metric: Metric, alpha: float) -> int | None:
    """The smallest number of items with which a metric can pass, None where none within a round is enough."""
    return next(iter(passing_counts(layout, metric, alpha, len(layout))), None)


def shortfall_of(layout: Layout, metric: Metric, items: int, alpha: float) -> Shortfall | None:
    """Why a metric cannot pass with so many items; None where it can."""
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
    """The share of items that is planned to differ: the upper end of the pilot's churn, or ``LEAST_CHURN``."""
    if not pairs:
        return ASSUMED_CHURN
    return max(LEAST_CHURN, min(clopper_pearson(differing, pairs, level=CHURN_LEVEL).high, 0.99))


def plan_items(layout: Layout, metric: Metric, design: Design, most: int) -> PlannedItems:
    """The fewest items, to a tenth, that pass with the design's power; ``most``, and their chance, where none do.

    ``design`` says all but templates and items. What cannot pass at all takes a round, which describes as well as any.
    """
    numbers = passing_counts(layout, metric, design.alpha, most)
    if not numbers:
        return PlannedItems(min(len(layout), most), 0.0)
    low, high = 0, len(numbers) - 1
    if (found := _chance(layout, metric, design, numbers[low])) >= design.power:
        return PlannedItems(numbers[low], found)
    if (best := _chance(layout, metric, design, numbers[high])) < design.power:
        return PlannedItems(numbers[high], best)
    while high > low + 1 and numbers[high] > numbers[low] * _STEP + 1:
        middle = (low + high) // 2
        found = _chance(layout, metric, design, numbers[middle])
        low, high, best = (low, middle, found) if found >= design.power else (middle, high, best)
    return PlannedItems(numbers[high], best)


def _chance(layout: Layout, metric: Metric, design: Design, items: int) -> float:
    counts = template_counts(layout, items, metric.facet)
    # of uneven templates their mean size
    sized = replace(design, clusters=len(counts), items_per_cluster=max(1, round(float(counts.mean()))))
    return pass_chance(sized, audits=_SEARCHED)
