"""A limit on the ratio of the rates of an unwanted event, applied to one contrast. Pure.

"No more than a tenth more attacks succeed" is a ratio of 1.1. Such a cell is decided like one with a margin: PASS needs
the upper bound of the ratio below the limit, enough templates, and the template rule; FAIL needs a significant drop in
the family, since a ratio of 1 is a drift of 0. The loss that the limit allows, (limit - 1) * the reference's rate, is
the margin that decides how many templates are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvaudit.reports.stats.ratio import Events, Times, points_of, shows_ratio, times_of, widest
from kvaudit.reports.verdict.contrast import Contrast, UnwantedEvents


@dataclass(frozen=True)
class Ratio:
    """The ratio of the rates of an unwanted event, and its ``limit``."""

    limit: float
    times: Times

    @property
    def is_within(self) -> bool:
        """Whether the ratio is shown to lie below the limit."""
        return self.times.upper < self.limit


def ratio_of(c: Contrast, limit: float) -> Ratio | None:
    """Return the ratio of a contrast over every reading of uncertain answers; None for a contrast without two sides."""
    if c.effect is None or not c.unwanted:
        return None
    floor = min(1.0, (c.judged or c.effect).deff)  # below 1 only for averaged draws and graded scores
    return Ratio(limit, widest([times_of(_events(events, floor), alpha=c.effect.alpha) for events in c.unwanted]))


def templates_show_ratio(c: Contrast, limit: float, alpha: float) -> bool:
    """Return whether the template rule holds for the ratio of a contrast, under every reading of uncertain answers."""
    return all(bool(shows_ratio(e.reference, e.candidate, e.counts, limit=limit, alpha=alpha)) for e in c.unwanted)


def allowed_points(c: Contrast, limit: float) -> float | None:
    """Return the loss in score units that a limit allows at the reference's rate; None without a number."""
    return None if c.rates is None else float(points_of(limit, 1 - c.rates.reference))


def _events(e: UnwantedEvents, floor: float) -> Events:
    # the events of a side are those on both sides plus those on that side only
    both = np.asarray(e.reference.sum() - e.before)
    return Events(
        both, np.asarray(e.before), np.asarray(e.after), e.reference, e.candidate, e.counts, np.asarray(floor)
    )
