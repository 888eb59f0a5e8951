"""The section on the smallest cache budget and the longest context at which an arm is shown non-inferior.

The comparison is with the uncompressed reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from kvaudit.core.text import length_of
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.safe import SafeBudget, families, safe_budgets
from kvaudit.reports.sections.shared.tables import Passage, Table, table_of
from kvaudit.reports.verdict.verdict import Decided

CLEARED_SHOWN = 3  # sentences; the table has all
_FAR = {"budget": "smallest budget", "length": "longest context"}


class SafeSection(Section[tuple[SafeBudget, ...]]):
    name = "safe"
    reading = (
        "Tested in a fixed sequence from the largest budget down (lengths: from the shortest up), each at the "
        "full level, until the first that does not pass; later ones are not tested. NOT MEASURABLE: "
        "the reference itself has nothing to lose there, or cannot do it."
    )
    order = 160
    keys: ClassVar = {"analysis.safe": 32}

    def compute(self, inputs: Inputs) -> tuple[SafeBudget, ...] | None:
        return safe_budgets(inputs.decided.drift, inputs.decided.rules) or None

    def passage(self, value: tuple[SafeBudget, ...], decided: Decided) -> Passage:
        axes = list(dict.fromkeys(s.axis for s in value))
        explain = (
            f"The {' and the '.join(_FAR[axis] for axis in axes)} at which an arm is non-inferior within its margin to "
            "the uncompressed reference."
        )
        return replace(super().passage(value, decided), title=f"Safe {' and '.join(axes)}", explain=explain)

    def tables(self, value: tuple[SafeBudget, ...], decided: Decided) -> Iterator[Table]:
        """Yield a table of budgets and one of lengths: what passed last, and what failed first, by arm and policy."""
        yield _table([s for s in value if s.axis == "budget"], "policy family")
        yield _table([s for s in value if s.axis == "length"], "policy")

    def finding(self, value: tuple[SafeBudget, ...], decided: Decided) -> str:
        none = sum(s.cleared is None for s in value)
        return f"{len(value) - none} of {len(value)} sequences clear a dose; {none} clear none."

    def limits(self, value: tuple[SafeBudget, ...], decided: Decided) -> Iterator[str]:
        """Yield the budgets that passed, for the gated policy families; arms with the same result share a sentence."""
        gated = {
            family.name
            for family in families(decided.comparison.policies)
            if any(policy in decided.rules.primary for policy in family.policies)
        }
        sentences: dict[tuple[str, str], list[str]] = {}  # by arm and family, one per suite
        for s in value:
            if s.axis == "budget" and s.cleared is not None and s.family in gated:
                sentences.setdefault((s.arm, s.family), []).append(cleared_sentence(s))
        arms_by_text: dict[tuple[str, str], list[str]] = {}  # by family and all its sentences
        for (arm, family), texts in sentences.items():
            arms_by_text.setdefault((family, "; ".join(texts)), []).append(arm)
        for (family, text), arms in list(arms_by_text.items())[:CLEARED_SHOWN]:
            yield f"Safe budget of {', '.join(arms)} @ {family}: {text}."


def _table(budgets: Sequence[SafeBudget], family_header: str) -> Table:
    columns = list(dict.fromkeys((s.suite, s.context_tokens) for s in budgets))
    rows = list(dict.fromkeys((s.arm, s.family) for s in budgets))
    by_place = {(s.arm, s.family, s.suite, s.context_tokens): s for s in budgets}
    several = len({context for _, context in columns}) > 1
    headers = [f"{suite}, {length_of(n)}" if several and n is not None else suite for suite, n in columns]
    cells = [
        [arm, family, *(_cleared_text(by_place.get((arm, family, *column))) for column in columns)]
        for arm, family in rows
    ]
    return table_of(["arm", family_header, *headers], cells, 2 + len(columns))


def _cleared_text(s: SafeBudget | None) -> str:
    if s is None:
        return "-"
    missed = "" if s.failed is None else f"{s.failed}: {s.statuses[s.amounts.index(s.failed)]}"
    if s.cleared is None:
        return f"none ({missed})"
    return f"to {s.cleared}" + (f" (not {missed})" if missed else ", the last tested")


def cleared_sentence(s: SafeBudget) -> str:
    """Return a sentence such as "refusal cleared to budget 96, not at 64".

    The test at budget 96 is the last that passed, the one at 64 the first that did not.
    """
    missed = "" if s.failed is None else f"not at {s.failed}"
    if s.cleared is None:
        return f"{s.suite} cleared at no {s.axis}: {missed}" if missed else f"{s.suite} not tested"
    amount = f"budget {s.cleared}" if s.axis == "budget" else f"{s.cleared} tokens"
    return f"{s.suite} cleared to {amount}" + (f", {missed}" if missed else ", the last one tested")
