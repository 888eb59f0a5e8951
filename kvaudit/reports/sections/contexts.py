"""What the contexts around items do to the uncompressed reference: its rates on the rows with and without the context.

A context is text, such as small talk, that is put around a published row to make the prompt long (SUITE@CONTEXT).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvaudit.core.facets import FACETS
from kvaudit.core.text import inline
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import percent, points
from kvaudit.reports.verdict.contrast import Answers, Drift
from kvaudit.reports.verdict.verdict import Decided

LARGE = 0.15  # share of the reference's answers: a context that moves more of them changes the task


class ContextEffect(NamedTuple):
    """The effect of one context on one metric (score or facet) of the reference.

    ``bare`` are the answers to the rows as published, ``within`` those to the same rows in the context.
    """

    bare: Answers
    within: Answers
    served: str = ""  # the uncompressed condition, if several engines served

    @property
    def shares(self) -> tuple[float, float]:
        """The rates of the facet's event (or the mean scores): as published, then in the context."""
        return _share(self.bare), _share(self.within)

    @property
    def is_large(self) -> bool:
        """Whether the rate changed by more than ``LARGE``, in either direction."""
        before, after = self.shares
        return abs(after - before) > LARGE


def _share(answers: Answers) -> float:
    facet = FACETS.get(answers.facet)
    if facet is None:
        return answers.hits / answers.answers
    readable = answers.answers - answers.formless
    # hits count the wanted outcome, the share counts the event
    return (answers.hits if facet.wanted else readable - answers.hits) / max(1, readable)


class ContextsSection(Section[tuple[ContextEffect, ...]]):
    name = "contexts"
    title = "What the contexts change without compression"
    explain = (
        "The uncompressed reference on the rows as published, and on the same rows in each context. A context that "
        f"moves a facet by more than {100 * LARGE:g} points changes the task: the effect of compression there is not "
        "its effect on the benchmark."
    )
    order = 70

    def compute(self, inputs: Inputs) -> tuple[ContextEffect, ...] | None:
        return tuple(_effects(inputs.decided.drift)) or None

    def tables(self, value: tuple[ContextEffect, ...], decided: Decided) -> Iterator[Table]:
        """Yield the table of each facet's rates, on the rows as published and in the context, and their difference."""
        several, rows = len({effect.served for effect in value}) > 1, []
        for effect in value:
            before, after = effect.shares
            row = [effect.served] if several else []
            row += [effect.within.suite, str(effect.within.context_tokens or "-"), effect.bare.facet or "score"]
            row += [percent(before), percent(after), points(after - before)]
            rows.append([*row, "more than a context should" if effect.is_large else ""])
        headers = [*(["served under"] if several else []), "suite", "tokens", "facet"]
        yield table_of([*headers, "as published", "in the context", "moved, pp", ""], rows, words=len(headers))

    def finding(self, value: tuple[ContextEffect, ...], decided: Decided) -> str:
        large = [effect for effect in value if effect.is_large and effect.bare.facet]
        return "; ".join(map(_effect_sentence, large[:3])) or f"none moves a facet by more than {100 * LARGE:g} points"


def _effects(drift: Drift) -> Iterator[ContextEffect]:
    """Yield the effect of each context on each metric that was also asked without it."""
    for policy in drift.comparison.uncompressed:
        metrics = drift.answers.get(policy, ())
        bare = {(answers.suite, answers.facet): answers for answers in metrics}
        for answers in metrics:
            name, at, _ = answers.suite.rpartition("@")
            if at and (name, answers.facet) in bare:
                yield ContextEffect(bare[name, answers.facet], answers, drift.comparison.label(policy))


def _effect_sentence(effect: ContextEffect) -> str:
    before, after = effect.shares
    facet = FACETS[effect.bare.facet]
    return inline(f"{effect.within.suite}: {facet.says}, {percent(before)} to {percent(after)}")
