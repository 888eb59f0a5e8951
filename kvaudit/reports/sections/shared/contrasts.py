"""The contrasts of one estimand as a table, and the lowest of them in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from kvaudit.core.text import length_label
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, points
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.verdict import Decided


def contrasts_of(decided: Decided, name: str, *, gated_only: bool = False) -> list[Contrast]:
    """Those of one estimand; under the gated policies only, where any of them has one."""
    found = [c for c in decided.contrasts if c.estimand == name]
    return [c for c in found if gated_only and c.policy in decided.rules.primary] or found


def contrasts_table(sides: Comparison, contrasts: Sequence[Contrast]) -> Table:
    """A row per contrast, with seed variance where there is one."""
    rows = []
    for c in contrasts:
        told = effect_text(c.effect) if c.effect else "; ".join(map(str, c.reasons))
        recipe = f"[{points(c.recipe.low)}, {points(c.recipe.high)}]" if c.recipe else "-"
        rows.append([c.arm, sides.label(c.policy), c.suite, length_label(c.context_tokens), told, recipe])
    return table_of(["arm", "policy", "suite", "tokens", "drift, 95 % interval", "with seed variance"], rows, words=3)


def lowest_drift(sides: Comparison, contrasts: Sequence[Contrast]) -> str:
    """The lowest of several drifts; it is picked for being that."""
    known = [(c.effect, c) for c in contrasts if c.effect]
    if not known:
        return "No cell has a number."
    effect, c = min(known, key=lambda pair: pair[0].estimate)
    where = f"{sides.who(c.arm, c.policy)}, {c.suite}"
    return f"The lowest of {len(known)}: {where}: {effect_text(effect)}."
