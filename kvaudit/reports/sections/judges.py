"""Who graded the answers: each suite's judges, how the last one agrees with the one before it, and its card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvaudit.core.errors import DataError
from kvaudit.core.provenance import JUDGED
from kvaudit.core.text import inline, length_label
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import judge_marks
from kvaudit.reports.stats.judges import Kappa, kappa
from kvaudit.reports.verdict.comparison import PROGRAMMATIC, Comparison
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.verdict import Decided

_DESIRED = ((1, 1), (1, 0), (0, 1), (0, 0))  # before, and now: what the four counts are of
_MOST = 10**9


@dataclass(frozen=True)
class SecondJudge:
    """Who judges now; ``verdict_before`` is that of the run as it was judged before. ``card`` has headings first."""

    name: str
    sha256: str
    before: tuple[str, ...]
    verdict_before: str
    agreement: dict[str, tuple[int, ...]]  # by suite: desired both times, before, now, never
    card: tuple[tuple[str, ...], ...]

    def agreed(self, suite: str) -> Kappa | None:
        """Agreement of both judges on what is desired, None without an answer."""
        counts = self.agreement[suite]
        if not sum(counts):
            return None
        labels = np.repeat(np.array(_DESIRED), counts, axis=0)  # [answers, 2]
        return kappa(labels[:, 0], labels[:, 1])


def second_judge(provenance: Mapping[str, Any]) -> SecondJudge | None:
    """What a judged run says of its judges, None for any other; raises DataError where that is of another form."""
    told = provenance.get(JUDGED)
    judge = told.get("judge") if isinstance(told, Mapping) else None
    if not isinstance(told, Mapping) or judge is None:
        return None
    try:
        return SecondJudge(
            name=_text(judge["name"]),
            sha256=_text(judge["sha256"]),
            before=tuple(map(_text, told.get("judges_before", []))),
            verdict_before=_text(told.get("verdict_before", "")),
            agreement={_text(suite): _counts(four) for suite, four in told.get("agreement", {}).items()},
            card=tuple(tuple(map(_text, row)) for row in told.get("card", [])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"provenance.json: what {JUDGED} says of the judge cannot be read ({error}); judge the run again"
        ) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where text is wanted")
    return value


def _counts(four: Any) -> tuple[int, ...]:
    if len(four) != len(_DESIRED) or not all(type(n) is int and 0 <= n <= _MOST for n in four) or sum(four) > _MOST:
        raise ValueError("agreement wants four counts")
    return tuple(four)


@dataclass(frozen=True)
class Judges:
    """The second judge of a run that was judged again, None for any other."""

    second: SecondJudge | None


class JudgesSection(Section[Judges]):
    name = "judges"
    title = "Judges"
    explain = "Who decided what the answers were. A judge sees a request and an answer, neither arm nor policy."
    order = 230

    def compute(self, inputs: Inputs) -> Judges | None:
        judges = inputs.decided.comparison.judges.values()
        try:
            second = second_judge(inputs.data.provenance)
        except DataError:  # among the problems; who judges is known without it
            second = None
        return Judges(second) if second or {judge for own in judges for judge in own} - {PROGRAMMATIC} else None

    def problems(self, inputs: Inputs) -> Iterator[str]:
        try:
            second_judge(inputs.data.provenance)
        except DataError as error:
            yield str(error)

    def tables(self, value: Judges, decided: Decided) -> Iterator[Table]:
        sides = decided.comparison
        rows = [[suite + judge_marks(sides, suite), ", ".join(sides.judges.get(suite, ()))] for suite in sides.suites]
        yield table_of(["suite", "judges"], rows, words=2)
        yield _unsure_table(decided.drift)
        if value.second:
            yield _agreement_table(value.second)
            heads, *card = value.second.card or ((),)
            yield table_of(heads, [row for row in card if len(row) == len(heads)])

    def notes(self, value: Judges, decided: Decided) -> Iterator[str]:
        if any(c.unsure for c in decided.drift.cells):
            yield (
                "An answer that its judge was unsure of has the grade of its best guess. The intervals of a drift also "
                "hold with all such answers counted as desired, and as not."
            )
        if harm := _harm_note(decided.comparison):
            yield harm
        second = value.second
        if second is None:
            return
        before = ", ".join(second.before) or "nobody"
        yield inline(f"Judged again by {second.name}, sha256 {second.sha256}; before by {before}.")
        if second.verdict_before:
            yield inline(f"Verdict before {second.verdict_before}, now {decided.verdict.status.value}.")
        yield (
            "Kappa is the agreement of both judges on what is desired, beyond chance; answers that either left "
            "unscored are not counted."
        )
        if second.card:
            yield "The card: errors against human labels, without the source of each line where the judge learns."

    def finding(self, value: Judges, decided: Decided) -> str:
        second, now = value.second, decided.verdict.status.value
        if second is None:
            return "No second judge has looked at these answers."
        return inline(f"Under the judge before the verdict was {second.verdict_before or 'not kept'}, now it is {now}.")


def _unsure_table(drift: Drift) -> Table:
    rows = []
    for c in (cell for cell in drift.cells if cell.unsure):
        where = [c.arm, drift.comparison.label(c.policy), c.suite, length_label(c.context_tokens)]
        rows.append([*where, f"{c.unsure} of {c.n_samples}"])
    return table_of(["arm", "policy", "suite", "tokens", "answers the judge is unsure of"], rows, words=3)


def _agreement_table(second: SecondJudge) -> Table:
    rows = [
        [suite, *map(str, (sum(counts), *counts)), _agreed(second.agreed(suite))]
        for suite, counts in second.agreement.items()
    ]
    return table_of(["suite", "answers", "desired by both", "before only", "now only", "neither", "kappa"], rows)


def _agreed(found: Kappa | None) -> str:
    if found is None:
        return "-"
    if found.estimate is None:
        return f"- ({100 * found.agreement:.0f} % alike)"
    interval = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.estimate:.2f}{interval}"


def _harm_note(sides: Comparison) -> str:
    """Who said what is unsafe, or that nobody did, where suites leave that to a grader of harm."""
    asked = [suite for suite in sides.suites if f"{suite}.coherent" in sides.facets]
    open_still = [suite for suite in asked if f"{suite}.unsafe" not in sides.facets]
    if open_still:
        return f"No grader of harm spoke: of {', '.join(open_still)} nobody knows which answers are unsafe."
    judges = sorted({judge for suite in asked for judge in sides.judges.get(suite, ())} - {PROGRAMMATIC})
    return f"Unsafe in {', '.join(asked)}: by {', '.join(judges)}." if asked else ""
