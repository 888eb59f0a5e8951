"""The judge held against people: the cells that people labelled, and the judge's errors in each arm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvaudit.core.text import join_names, length_label
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, percent, points
from kvaudit.reports.stats.binomial import Proportion
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.verdict.contrast import Drift, LabelSummary, judge_may_pass
from kvaudit.reports.verdict.reasons import ReasonCode
from kvaudit.reports.verdict.verdict import PASSED, Decided, Decision, Status


class LabelledCell(NamedTuple):
    """A decided cell whose answers people labelled, by a name for the reader."""

    name: str
    decision: Decision
    margin: float
    people: LabelSummary
    raw: Effect  # by the judge's labels
    corrected: Effect
    judged: Status

    @property
    def alone(self) -> Status:
        """The verdict on judge labels alone: no PASS where the judge could have made half the margin itself."""
        held = not judge_may_pass(self.people, self.margin) and self.judged in PASSED
        return Status.INCONCLUSIVE if held else self.judged


LabelledCells = tuple[LabelledCell, ...]


class PeopleSection(Section[LabelledCells]):
    name = "judge"
    title = "Judge and people"
    explain = "What people said of answers that the judge told apart, and the drift that their labels give."
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
    """In the order of the contrasts."""
    decisions, found = {d.place: d for d in decided.verdict.decisions}, []
    for c in decided.drift.contrasts:
        d = decisions.get(c.place)
        if d and c.people and c.effect and c.judged and d.judged and d.margin:
            where = f"{decided.comparison.who(c.arm, c.policy)}, {c.suite} {length_label(c.context_tokens)}"
            name = f"{c.estimand}, {where}"
            found.append(LabelledCell(name, d, d.margin, c.people, c.judged, c.effect, d.judged))
    return tuple(found)


def labelled_cells_table(cells: LabelledCells) -> Table:
    """One row per adjudicated cell: the drift under the judge and under people, and the verdict of each."""
    headers = ["cell", "judge: drift, 95 % interval", "verdict", "people: drift, 95 % interval", "lower bound, margin"]
    headers += ["verdict with people", "pairs looked at", "judge's bias, upper limit", "judge alone, guarded"]
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
        cell.alone.value,
    ]


def errors_table(cells: LabelledCells) -> Table:
    """Sensitivity and specificity of the judge in each arm of a cell, with Clopper-Pearson intervals."""
    sides = [(cell, side, getattr(cell.people, side)) for cell in cells for side in ("reference", "candidate")]
    rows = [[cell.name, side, _rate(arm.sensitivity), _rate(arm.specificity)] for cell, side, arm in sides]
    return table_of(["cell", "side", "sensitivity", "specificity"], rows, words=2)


def panel_notes(cells: LabelledCells, drift: Drift) -> tuple[str, ...]:
    """How to read both tables, and the cells that judge labels alone cannot pass."""
    everyone = [c.people for c in effect_text.contrasts if c.people]
    held = [cell.name for cell in cells if cell.alone is not cell.judged]
    return (
        f"{sum(p.discordant + p.concordant for p in everyone)} pairs were labelled blind: every one that the judge "
        "tells apart, and others in turn over the templates. The corrected interval adds both parts by MOVER.",
        "Sensitivity: share of answers that people call desired and the judge too; specificity: of those that people "
        "call undesired. Rates of all pairs: a label counts for those it stands for. Intervals are Clopper-Pearson, of "
        "as many labels as would be worth the same if all counted alike; that number stands behind them.",
        "Judge's bias: the drift that its gap between the arms could make by itself. Above half the margin at its "
        "upper limit, judge labels alone cannot pass a cell.",
        *(
            [f"{ReasonCode.JUDGE_DIFF}: judge labels alone cannot pass {join_names(held, between='; ')}."]
            if held
            else []
        ),
    )


def _rate(rate: Proportion) -> str:
    if rate.estimate is None:
        return "no label"
    return f"{percent(rate.estimate)} [{100 * rate.low:.1f}, {100 * rate.high:.1f}] of {rate.trials:.0f}"
