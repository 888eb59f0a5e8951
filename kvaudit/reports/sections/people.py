"""The judge compared with human labels: the labelled cells, and the judge's errors in each arm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvaudit.core.text import join_names, length_label
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, percent, points
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.judges import Proportion
from kvaudit.reports.verdict.contrast import Drift, LabelSummary, judge_may_pass
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.verdict import PASSED, Decided, Decision, Status


class LabelledCell(NamedTuple):
    """A decided cell with human labels, and its name as shown."""

    name: str
    decision: Decision
    margin: float
    people: LabelSummary
    raw: Effect  # by the judge's labels
    corrected: Effect
    judged: Status

    @property
    def judge_only_status(self) -> Status:
        """The verdict on judge labels alone: no PASS if judge bias could cause half the margin."""
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
    """Return the labelled cells in the order of the contrasts."""
    decisions, cells = {d.place: d for d in decided.verdict.decisions}, []
    for c in decided.drift.contrasts:
        d = decisions.get(c.place)
        if d and c.people and c.effect and c.judged and d.judged and d.margin:
            place = f"{decided.comparison.who(c.arm, c.policy)}, {c.suite} {length_label(c.context_tokens)}"
            cells.append(LabelledCell(f"{c.estimand}, {place}", d, d.margin, c.people, c.judged, c.effect, d.judged))
    return tuple(cells)


def labelled_cells_table(cells: LabelledCells) -> Table:
    """Return a row per labelled cell: drift and verdict by the judge and by people."""
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
    """Return notes on both tables, and the cells that judge labels alone cannot pass."""
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
