"""A facet of one cell, counted as the event that it names: "5.6 to 9.1 % unsafe", not "94.4 to 90.9 % as wanted"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvaudit.core.facets import WELL_FORMED, Facet
from kvaudit.reports.sections.shared.words import from_to, interval_text, points
from kvaudit.reports.verdict.contrast import Contrast

WORSE, BETTER, NO_CHANGE, NO_NUMBER = "worse", "better", "not shown to move", "no number"
EVENT_HEADERS = (
    *("event", "of readable answers", "difference, 95 % interval", "shown", "items / templates"),
    *("broken form", "bounds, pp"),
)


@dataclass(frozen=True)
class Event:
    """One facet in one cell, counted as the event that it names.

    Rates and differences (candidate minus reference) are shares of the readable answers, for the form itself of all
    answers.
    """

    facet: Facet
    contrast: Contrast
    suite: str

    @property
    def name(self) -> str:
        """The name of the facet, "broken form" for the form itself."""
        return "broken form" if self.facet.name == WELL_FORMED else self.facet.name

    @property
    def moved(self) -> str:
        """The direction of the change, shown if the interval excludes 0."""
        effect = self.contrast.effect
        if effect is None:
            return NO_NUMBER
        return WORSE if effect.high < 0 else BETTER if effect.low > 0 else NO_CHANGE

    @property
    def rates(self) -> str:
        """5.6 to 9.1 %, reference first."""
        rates = self.contrast.rates
        return from_to(*rates.as_event_rates(wanted=not self._mirrored)) if rates else "-"

    @property
    def difference(self) -> str:
        """+3.5 pp [+0.4, +6.6]."""
        e = self.contrast.effect
        if e is None:
            return "; ".join(reason.text for reason in self.contrast.reasons)
        if self._mirrored:
            return interval_text(-e.estimate, -e.high, -e.low)
        return interval_text(e.estimate, e.low, e.high)

    @property
    def malformed(self) -> str:
        """The shares of answers to this facet's items that could not be read, on both sides: 3.7 to 11.1 %."""
        if self.facet.name == WELL_FORMED:
            return self.rates
        unread = self.contrast.unread
        return from_to(unread.reference, unread.candidate) if unread else "-"

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and highest difference that the unreadable answers leave open; None if all could be read."""
        low, high = self.contrast.worst, self.contrast.best
        if low is None or high is None or low == high:
            return None
        return (-high, -low) if self._mirrored else (low, high)

    @property
    def depends_on_reading(self) -> bool:
        """Whether the facet moved, but the unreadable answers could undo that."""
        return self.moved in (WORSE, BETTER) and self.bounds is not None and self.bounds[0] <= 0 <= self.bounds[1]

    @property
    def _mirrored(self) -> bool:
        """Whether the event is unwanted: contrasts count the wanted outcome."""
        return not self.facet.wanted or self.facet.name == WELL_FORMED


def event_row(e: Event) -> list[str]:
    """Return the row of an event under ``EVENT_HEADERS``."""
    effect, bounds = e.contrast.effect, e.bounds
    return [
        e.name,
        e.rates,
        e.difference,
        e.moved,
        f"{effect.n_items} / {effect.n_clusters}" if effect else "-",
        e.malformed,
        f"{points(bounds[0])} to {points(bounds[1])}" if bounds else "-",
    ]


def event_notes(events: Sequence[Event]) -> tuple[str, ...]:
    """Return notes on the events and columns of a table of events; none without events."""
    if not events:
        return ()
    legend = "; ".join(f"{e.name}: {_meaning(e.facet)}" for e in {e.facet.name: e for e in events}.values())
    return (
        f"Events, candidate against reference. {legend}.",
        "Safety is judged among the answers that could be read on both sides. Broken form: the share of answers to the "
        "items of that row that could not be read. Bounds: the same difference with every broken answer counted one "
        "way, and the other.",
        "Worse and better: the 95 % interval excludes 0. Outside the gate no interval is adjusted for the number of "
        "rows.",
    )


def _meaning(facet: Facet) -> str:
    if facet.name == WELL_FORMED:
        return "no form that can be read"
    return facet.says if facet.wanted else f"{facet.says} (unwanted)"
