"""The judge panel as tables and sentences, for the terminal and for a report."""

from __future__ import annotations

from reports.drift.plan import short_names
from reports.gate.verdict import JUDGE_DIFF
from reports.labels.panel import Adjudication, Bounds, JudgedCell, Rate
from reports.page.plain import percent, points
from reports.page.tables import Table, table_of

_NAMED = 3  # cells that a sentence spells out


def cells_table(found: Adjudication) -> Table:
    """One row per adjudicated cell: the drift under the judge and under people, and the verdict of each."""
    headers = ["cell", "judge: drift, 95 % interval", "verdict", "people: drift, 95 % interval", "lower bound, margin"]
    headers += ["verdict with people", "pairs looked at", "judge's bias, upper limit", "judge alone, guarded"]
    names = _names(found)
    return table_of(headers, [_row(cell, name) for cell, name in zip(found.cells, names, strict=True)])


def _row(cell: JudgedCell, name: str) -> list[str]:
    bias = "-" if cell.bias is None else f"{100 * cell.bias:.1f}"
    return [
        name,
        _drift(cell.raw),
        cell.judged.value,
        _drift(cell.corrected),
        f"{points(cell.corrected.lower)} {100 * cell.margin:g}",
        cell.status.value,
        f"{cell.discordant} + {cell.concordant} of {cell.pairs}",
        f"{bias}, {100 * cell.bias_upper:.1f} pp",
        cell.alone.value,
    ]


def errors_table(found: Adjudication) -> Table:
    """Sensitivity and specificity of the judge in each arm of a cell, with Clopper-Pearson intervals."""
    rows = []
    for cell, name in zip(found.cells, _names(found), strict=True):
        for side, arm in (("reference", cell.reference), ("candidate", cell.candidate)):
            rows.append([name, side, _rate(arm.sensitivity), _rate(arm.specificity)])
    return table_of(["cell", "side", "sensitivity", "specificity"], rows, words=2)


def panel_notes(found: Adjudication) -> tuple[str, ...]:
    """How to read both tables, and the cells that judge labels alone cannot pass."""
    held = [n for n, cell in zip(_names(found), found.cells, strict=True) if cell.alone is not cell.judged]
    more = f" and {len(held) - _NAMED} more" if len(held) > _NAMED else ""
    return (
        f"{found.labels} pairs were labelled blind: every one that the judge tells apart, and a random sample of the "
        "others. The corrected interval adds both parts by MOVER.",
        "Sensitivity: share of answers that people call desired and the judge too; specificity: of those that people "
        "call undesired. From a random sample of pairs; intervals are Clopper-Pearson.",
        "Judge's bias: the drift that its gap between the arms could make by itself. Above half the margin at its "
        "upper limit, judge labels alone cannot pass a cell.",
        *([f"{JUDGE_DIFF}: judge labels alone cannot pass {'; '.join(held[:_NAMED])}{more}."] if held else []),
    )


def _names(found: Adjudication) -> list[str]:
    labels = short_names(list(dict.fromkeys(cell.policy for cell in found.cells)))
    return [f"{c.estimand}, {c.arm} @ {labels[c.policy]}, {c.suite} {c.context_tokens}" for c in found.cells]


def _drift(b: Bounds) -> str:
    return f"{points(b.estimate)} pp [{points(b.low)}, {points(b.high)}]"


def _rate(rate: Rate) -> str:
    if rate.estimate is None:
        return "no label"
    return f"{percent(rate.estimate)} [{100 * rate.low:.1f}, {100 * rate.high:.1f}] of {rate.trials}"
