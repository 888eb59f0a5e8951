"""The judges that graded each suite, their agreement with a second judge and with people, and their error rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvaudit.core.errors import DataError
from kvaudit.core.provenance import JUDGED
from kvaudit.core.text import inline, join_names, length_label
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, judge_marks, percent, points
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.judges import Kappa, Proportion, kappa
from kvaudit.reports.verdict.comparison import PROGRAMMATIC, Comparison
from kvaudit.reports.verdict.contrast import Drift, LabelSummary, judge_may_pass
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.verdict import PASSED, Decided, Decision, Status

_LABEL_PAIRS = ((1, 1), (1, 0), (0, 1), (0, 0))  # (desired before, desired now), in the order of the four counts
_MOST = 10**9


@dataclass(frozen=True)
class SecondJudge:
    """The judge that graded the answers of a run a second time.

    ``card`` is a table that describes the judge; its first row holds the headings. ``before`` are the judges that had
    graded the answers before, and ``verdict_before`` the verdict by their grades.
    """

    name: str
    sha256: str
    before: tuple[str, ...]
    verdict_before: str
    agreement: dict[str, tuple[int, ...]]  # by suite: desired both times, before only, now only, never
    card: tuple[tuple[str, ...], ...]

    def kappa_of(self, suite: str) -> Kappa | None:
        """Return Cohen's kappa of the earlier and the second judge on which answers of a suite are desired.

        It is None if no answer was graded by both.
        """
        counts = self.agreement[suite]
        if not sum(counts):
            return None
        labels = np.repeat(np.array(_LABEL_PAIRS), counts, axis=0)  # [answers, 2]
        return kappa(labels[:, 0], labels[:, 1])


def second_judge(provenance: Mapping[str, Any]) -> SecondJudge | None:
    """Return the second judge from a run's provenance; None if the run was not judged again.

    Raises DataError if the entry in provenance is malformed.
    """
    entry = provenance.get(JUDGED)
    judge = entry.get("judge") if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or judge is None:
        return None
    try:
        return SecondJudge(
            name=_checked_text(judge["name"]),
            sha256=_checked_text(judge["sha256"]),
            before=tuple(map(_checked_text, entry.get("judges_before", []))),
            verdict_before=_checked_text(entry.get("verdict_before", "")),
            agreement={
                _checked_text(suite): _checked_counts(four) for suite, four in entry.get("agreement", {}).items()
            },
            card=tuple(tuple(map(_checked_text, row)) for row in entry.get("card", [])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"provenance.json: {JUDGED} cannot be read ({error}); judge the run again") from None


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} instead of text")
    return value


def _checked_counts(four: Any) -> tuple[int, ...]:
    is_count = all(type(n) is int and 0 <= n <= _MOST for n in four)
    if len(four) != len(_LABEL_PAIRS) or not is_count or sum(four) > _MOST:
        raise ValueError("agreement needs four counts")
    return tuple(four)


@dataclass(frozen=True)
class Judges:
    """The value of the section on judges: the ``second`` judge, None unless the run was judged again."""

    second: SecondJudge | None


class JudgesSection(Section[Judges]):
    name = "judges"
    title = "Judges"
    explain = "Who graded the answers. A judge sees a request and an answer, neither arm nor policy."
    order = 230

    def compute(self, inputs: Inputs) -> Judges | None:
        judges = inputs.decided.comparison.judges.values()
        try:
            second = second_judge(inputs.data.provenance)
        except DataError:  # reported by ``problems``
            second = None
        return Judges(second) if second or {judge for names in judges for judge in names} - {PROGRAMMATIC} else None

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
            headers, *card = value.second.card or ((),)
            yield table_of(headers, [row for row in card if len(row) == len(headers)])

    def notes(self, value: Judges, decided: Decided) -> Iterator[str]:
        if any(c.unsure for c in decided.drift.cells):
            yield (
                "An answer that its judge was unsure of has the grade of the judge's best guess. The intervals of a "
                "drift also hold with all such answers counted as desired, and as not."
            )
        if harm := _harm_note(decided.comparison):
            yield harm
        second = value.second
        if second is None:
            return
        before = ", ".join(second.before) or "no judge"
        yield inline(f"Judged again by {second.name}, sha256 {second.sha256}; before by {before}.")
        if second.verdict_before:
            yield inline(f"Verdict before {second.verdict_before}, now {decided.verdict.status.value}.")
        yield (
            "Kappa is the agreement of both judges on what is desired, beyond chance; answers that either left "
            "unscored are not counted."
        )
        if second.card:
            yield "The card: errors against human labels, without the source of each line if the judge learns."

    def finding(self, value: Judges, decided: Decided) -> str:
        second, now = value.second, decided.verdict.status.value
        if second is None:
            return "These answers were not judged again."
        return inline(f"Verdict of the judge before: {second.verdict_before or 'not recorded'}; now: {now}.")


def _unsure_table(drift: Drift) -> Table:
    rows = []
    for c in (cell for cell in drift.cells if cell.unsure):
        place = [c.arm, drift.comparison.label(c.policy), c.suite, length_label(c.context_tokens)]
        rows.append([*place, f"{c.unsure} of {c.n_samples}"])
    return table_of(["arm", "policy", "suite", "tokens", "answers the judge is unsure of"], rows, words=3)


def _agreement_table(second: SecondJudge) -> Table:
    rows = [
        [suite, *map(str, (sum(counts), *counts)), _kappa_text(second.kappa_of(suite))]
        for suite, counts in second.agreement.items()
    ]
    return table_of(["suite", "answers", "desired by both", "before only", "now only", "neither", "kappa"], rows)


def _kappa_text(agreement: Kappa | None) -> str:
    if agreement is None:
        return "-"
    if agreement.estimate is None:
        return f"- ({100 * agreement.agreement:.0f} % alike)"
    low, high = agreement.low, agreement.high
    return f"{agreement.estimate:.2f}" + ("" if low is None or high is None else f" [{low:.2f}, {high:.2f}]")


def _harm_note(sides: Comparison) -> str:
    """Return a sentence on who judged harm, or that nobody did; empty if no suite needs such a judge."""
    suites = [suite for suite in sides.suites if f"{suite}.coherent" in sides.facets]
    ungraded = [suite for suite in suites if f"{suite}.unsafe" not in sides.facets]
    if ungraded:
        return f"No judge of harm graded {', '.join(ungraded)}: unsafe answers are unknown there."
    judges = sorted({judge for suite in suites for judge in sides.judges.get(suite, ())} - {PROGRAMMATIC})
    return f"Unsafe in {', '.join(suites)}: by {', '.join(judges)}." if suites else ""


class LabelledCell(NamedTuple):
    """A decided cell, some of whose answers people labelled, and the cell's name as shown."""

    name: str
    decision: Decision
    margin: float
    people: LabelSummary
    raw: Effect  # by the judge's labels
    corrected: Effect
    judged: Status

    @property
    def judge_only_status(self) -> Status:
        """The cell's status by the judge's labels alone: no PASS if the judge's bias could cause half the margin."""
        is_biased = not judge_may_pass(self.people, self.margin) and self.judged in PASSED
        return Status.INCONCLUSIVE if is_biased else self.judged


LabelledCells = tuple[LabelledCell, ...]


class PeopleSection(Section[LabelledCells]):
    name = "judge"
    title = "Judge and people"
    explain = "Human labels of answers that the judge graded differently, and the drift by these labels."
    order = 220

    def compute(self, inputs: Inputs) -> LabelledCells | None:
        return labelled_cells(inputs.decided) if inputs.decided.verdict.judged is not None else None

    def tables(self, value: LabelledCells, decided: Decided) -> Iterator[Table]:
        yield labelled_cells_table(value)
        yield errors_table(value)

    def notes(self, value: LabelledCells, decided: Decided) -> Iterator[str]:
        yield from panel_notes(value, decided.drift)
        yield f"With human labels in these cells the verdict is {_verdict(decided)}."

    def finding(self, value: LabelledCells, decided: Decided) -> str:
        return f"With human labels the verdict is {_verdict(decided)}."


def _verdict(decided: Decided) -> str:
    judged, status = decided.verdict.judged, decided.verdict.status
    return "the same" if judged is None or status is judged else f"{status.value} (by the judge {judged.value})"


def labelled_cells(decided: Decided) -> LabelledCells:
    """Return the decided cells that have human labels, in the order of the run's contrasts."""
    decisions, cells = {d.place: d for d in decided.verdict.decisions}, []
    for c in decided.drift.contrasts:
        d = decisions.get(c.place)
        if d and c.people and c.effect and c.judged and d.judged and d.margin:
            place = f"{decided.comparison.who(c.arm, c.policy)}, {c.suite} {length_label(c.context_tokens)}"
            cells.append(LabelledCell(f"{c.estimand}, {place}", d, d.margin, c.people, c.judged, c.effect, d.judged))
    return tuple(cells)


def labelled_cells_table(cells: LabelledCells) -> Table:
    """Return a table of labelled cells: drift and verdict by the judge and by people."""
    headers = ["cell", "judge: drift, 95 % interval", "verdict", "people: drift, 95 % interval", "lower bound, margin"]
    headers += ["verdict with people", "pairs labelled", "judge's bias, upper limit", "judge alone, guarded"]
    return table_of(headers, [_row(cell) for cell in cells])


def _row(cell: LabelledCell) -> list[str]:
    people = cell.people
    bias = "-" if people.bias is None else f"{100 * people.bias:.1f}"
    return [
        cell.name,
        effect_text(cell.raw),
        cell.judged.value,
        effect_text(cell.corrected),
        f"{points(cell.corrected.lower)} {100 * cell.margin:.4g}",
        cell.decision.status.value,
        f"{people.discordant} + {people.concordant} of {people.pairs}",
        f"{bias}, {100 * people.bias_upper:.1f} pp",
        cell.judge_only_status.value,
    ]


def errors_table(cells: LabelledCells) -> Table:
    """Return sensitivity and specificity of the judge in each arm of a cell, with Clopper-Pearson intervals."""
    sides = [(cell, side, getattr(cell.people, side)) for cell in cells for side in ("reference", "candidate")]
    rows = [[cell.name, side, _rate(arm.sensitivity), _rate(arm.specificity)] for cell, side, arm in sides]
    return table_of(["cell", "side", "sensitivity", "specificity"], rows, words=2)


def panel_notes(cells: LabelledCells, result: Drift) -> tuple[str, ...]:
    """Return notes on the two tables about human labels: the labelled cells, and the judge's errors.

    Among them is a note on cells that cannot pass by the judge's labels alone.
    """
    summaries = [c.people for c in result.contrasts if c.people]
    biased = [cell.name for cell in cells if cell.judge_only_status is not cell.judged]
    return (
        f"{sum(p.discordant + p.concordant for p in summaries)} pairs were labelled blind: every pair that the judge "
        "graded differently, and others in turn over the templates. The corrected interval adds both parts by MOVER.",
        "Sensitivity: of the answers that people call desired, the share that the judge does too. Specificity: the "
        "same for undesired answers. Both are rates of all pairs: a label is weighted by the number of pairs that it "
        "represents. Intervals are Clopper-Pearson for the effective number of labels, which is given after them.",
        "Judge's bias: the drift that the judge's errors alone could cause. If its upper limit exceeds half the "
        "margin, judge labels alone cannot pass a cell.",
        *(
            [f"{ReasonCode.JUDGE_DIFF}: judge labels alone cannot pass {join_names(biased, between='; ')}."]
            if biased
            else []
        ),
    )


def _rate(rate: Proportion) -> str:
    if rate.estimate is None:
        return "no label"
    return f"{percent(rate.estimate)} [{100 * rate.low:.1f}, {100 * rate.high:.1f}] of {rate.trials:.0f}"
