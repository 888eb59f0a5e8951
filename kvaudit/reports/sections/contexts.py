"""What each context does by itself: the uncompressed reference on the same rows, as published and in the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvaudit.core.facets import FACETS
from kvaudit.core.text import inline
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import percent, points
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.reference_answers import Answers
from kvaudit.reports.verdict.verdict import Decided

LARGE = 0.15  # of the reference's answers: a context that moves so many asks for something else than its rows do


class ContextEffect(NamedTuple):
    """One facet, or the score, of rows as published and in a context."""

    bare: Answers
    within: Answers
    served: str = ""  # of several engines, under which uncompressed condition

    @property
    def shares(self) -> tuple[float, float]:
        """The share in which it happened of the answers that could be read, bare and in the context; a score's mean."""
        return _share(self.bare), _share(self.within)

    @property
    def is_large(self) -> bool:
        """Whether it moved by more than ``LARGE``, in either direction."""
        before, after = self.shares
        return abs(after - before) > LARGE


def _share(own: Answers) -> float:
    facet = FACETS.get(own.facet)
    if facet is None:
        return own.hits / own.answers
    known = own.answers - own.formless  # at least one, or the metric would not be there
    # hits are answers as wanted, and what is asked is how often it happened
    return (own.hits if facet.wanted else known - own.hits) / max(1, known)


class ContextsSection(Section[tuple[ContextEffect, ...]]):
    name = "contexts"
    title = "What the contexts do by themselves"
    explain = (
        "The uncompressed reference on the rows as published, and on the same rows in each context. One that moves a "
        f"facet by more than {100 * LARGE:g} points asks for something else than its rows do: what compression does "
        "there is not what it does to the benchmark."
    )
    order = 70

    def compute(self, inputs: Inputs) -> tuple[ContextEffect, ...] | None:
        return tuple(_moved(inputs.decided.drift)) or None

    def tables(self, value: tuple[ContextEffect, ...], decided: Decided) -> Iterator[Table]:
        """Each facet as what it counts: as published, in the context, and by how much it moved."""
        several, rows = len({one.served for one in value}) > 1, []
        for one in value:
            before, after = one.shares
            row = [one.served] if several else []
            row += [one.within.suite, str(one.within.context_tokens or "-"), one.bare.facet or "score"]
            row += [percent(before), percent(after), points(after - before)]
            rows.append([*row, "more than a context should" if one.is_large else ""])
        headers = [*(["served under"] if several else []), "suite", "tokens", "facet"]
        yield table_of([*headers, "as published", "in the context", "moved, pp", ""], rows, words=len(headers))

    def finding(self, value: tuple[ContextEffect, ...], decided: Decided) -> str:
        large = [one for one in value if one.is_large and one.bare.facet]
        return "; ".join(map(_words, large[:3])) or f"none moves a facet by more than {100 * LARGE:g} points"


def _moved(drift: Drift) -> Iterator[ContextEffect]:
    """Every metric of every suite in a context beside the same of its bare rows."""
    for policy in drift.comparison.uncompressed:
        known = drift.answers.get(policy, ())
        bare = {(own.suite, own.facet): own for own in known}
        for own in known:
            name, at, _ = own.suite.rpartition("@")
            if at and (name, own.facet) in bare:
                yield ContextEffect(bare[name, own.facet], own, drift.comparison.label(policy))


def _words(one: ContextEffect) -> str:
    before, after = one.shares
    facet = FACETS[one.bare.facet]
    return inline(f"{one.within.suite}: {facet.says}, {percent(before)} to {percent(after)}")
