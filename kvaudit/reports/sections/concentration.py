"""Where the losses of a gated cell sit: a drop spread over all templates and one that broke are different failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvaudit.core.text import clip, inline
from kvaudit.reports.analysis.sides import BothSides, sides_of_gated
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.results import CellName
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.layout.canvas import INK, LOSS, UNDECIDED, Drawing, blank, named_rows, patch, quiet, save
from kvaudit.reports.layout.tables import Table, table_of
from kvaudit.reports.layout.words import percent, place_name, points
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.stats.churn import concentration_of
from kvaudit.reports.stats.clustered import cr3_effect

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ITEMS = 20
MOST_TEMPLATES = 20
MOST_ROWS = 20
FEWEST_LOST = 3  # items; below, one template carries half by arithmetic alone
_MOST_BARS = 20
_ONE_BY_ONE = 12  # templates drawn one by one


@dataclass(frozen=True)
class TemplateLoss:
    """What one template lost: in items, as a share of the cell's losses, and per item of the template."""

    template: str
    items: int
    losses: float
    gains: float
    share: float


@dataclass(frozen=True)
class ItemLoss:
    """An item that lost score, averaged over samples and seeds."""

    item_id: str
    template: str
    loss: float


@dataclass(frozen=True)
class CellConcentration:
    """Where the losses of a cell sit. ``carrying_half`` is how many templates carry half of them.

    ``chance`` is the Gini of the same losses fallen at random. ``deff`` is what the templates do to the variance of the
    drift: CR3 over the variance of as many independent items, both of differences averaged over samples and seeds.
    """

    cell: CellName
    losses: float
    gini: float
    chance: float
    deff: float
    carrying_half: int
    n_templates: int
    n_losing: int
    templates: tuple[TemplateLoss, ...]  # worst first, those that lost
    dominant: tuple[str, ...]  # templates with more than half of the losses
    items: tuple[ItemLoss, ...]  # worst first

    @property
    def broke(self) -> str | None:
        """The template that carries more than half of the losses; None without one, and where hardly any were lost."""
        return self.dominant[0] if self.dominant and self.losses >= FEWEST_LOST else None


Losses = tuple[CellConcentration, ...]


class ConcentrationSection(Section[Losses]):
    name = "concentration"
    title = "Where the losses sit"
    explain = "Whether a drop is spread over templates or is a few templates that broke."
    order = 190
    gated = True
    figures = ("concentration",)
    keys: ClassVar = {"analysis.concentration": 34}

    def compute(self, inputs: Inputs) -> Losses | None:
        both = sides_of_gated(inputs.decided, inputs.data.panels)
        return tuple(_cell(found, d.name) for d, found in both if (found.difference < 0).any()) or None

    def tables(self, value: Losses, decided: Decided) -> Iterator[Table]:
        yield _cells_table(value, decided.comparison)
        yield _items_table(value, decided.comparison)

    def notes(self, value: Losses, decided: Decided) -> Iterator[str]:
        """How to read the table; the templates that carry more than half of a cell's losses, unless next to none."""
        yield (
            "Gini: 0 where templates lose alike, near 1 where one loses all. By chance: the mean Gini of the same "
            "losses fallen at random; only what is beyond it is concentration. Design effect: how many times the "
            "templates raise the variance of the drift, samples and seeds averaged before."
        )
        for c in value:
            if c.broke is not None:
                where = place_name(decided.comparison, c.cell)
                yield inline(f"{where}: more than half of the losses sit in one template, {clip(c.broke, 80)}.")

    def finding(self, value: Losses, decided: Decided) -> str:
        one = sum(c.broke is not None for c in value)
        return f"In {one} of {len(value)} cells that lost anything, one template carries more than half of it."

    def draw(self, value: Losses, decided: Decided) -> Iterator[Drawing | None]:
        """The losses of every cell stacked by template, the largest first: one broken template is seen at once."""
        found = sorted(value, key=lambda c: -c.losses)[:_MOST_BARS]
        figure = blank(7.6, 1.0 + 0.27 * len(found))
        panel = figure.subplots()
        for y, c in enumerate(found):
            _bar(panel, y, c)
        named_rows(panel, [place_name(decided.comparison, c.cell) for c in found])
        panel.set_xlim(0, 1.12 * max(c.losses for c in found))
        panel.set_xlabel("items lost, by template")
        quiet(panel)
        key = [
            patch("one template each", facecolor=LOSS, alpha=0.8),
            patch("template with over half of the losses", facecolor=LOSS, hatch="///", edgecolor=INK),
            patch("all others", facecolor=UNDECIDED, alpha=0.6),
        ]
        figure.legend(handles=key, loc="outside upper center", ncols=3)
        yield save(figure, "concentration", "Losses of each gated cell stacked by template, worst template first.")


def _cell(found: BothSides, name: CellName) -> CellConcentration:
    z = found.difference
    by_template = concentration_of(z, np.array(found.templates, dtype=object).astype(str))
    worst = [i for i in np.argsort(z, kind="stable") if z[i] < 0][:MOST_ITEMS]  # the most lost first
    lost = [entry for entry in by_template.clusters if entry.losses > 0]
    return CellConcentration(
        cell=name,
        losses=by_template.losses,
        gini=by_template.gini,
        chance=by_template.chance,
        deff=cr3_effect(z, found.clusters).deff,
        carrying_half=by_template.carrying_half,
        n_templates=len(by_template.clusters),
        n_losing=len(lost),
        templates=tuple(
            TemplateLoss(str(t.label), int(t.items), t.losses, t.gains, t.share) for t in lost[:MOST_TEMPLATES]
        ),
        dominant=tuple(str(label) for label in by_template.dominant),
        items=tuple(ItemLoss(found.items[i], found.templates[i], float(-z[i])) for i in worst),
    )


def _cells_table(value: Losses, sides: Comparison) -> Table:
    found = sorted(value, key=lambda c: -c.losses)
    headers = ["cell", "items lost", "templates that lost", "carry half", "Gini (by chance)", "design effect"]
    rows = []
    for c in found:
        row = [place_name(sides, c.cell), f"{c.losses:.3g}", f"{c.n_losing} of {c.n_templates}", str(c.carrying_half)]
        row += [f"{c.gini:.2f} ({c.chance:.2f})", f"{c.deff:.2f}", c.templates[0].template]
        rows.append([*row, percent(c.templates[0].share) + " (over half)" * (c.broke is not None)])
    return table_of([*headers, "worst template", "its share"], rows)


def _items_table(value: Losses, sides: Comparison) -> Table:
    found: dict[tuple[str, str], list[tuple[ItemLoss, CellName]]] = {}
    for c in value:
        for item in c.items:
            found.setdefault((c.cell.suite, item.item_id), []).append((item, c.cell))
    worst = [(max(losses, key=lambda entry: entry[0].loss), len(losses)) for losses in found.values()]
    worst.sort(key=lambda entry: (-entry[0][0].loss, -entry[1], entry[0][0].item_id))
    rows = [
        [item.item_id, item.template, place_name(sides, cell), points(-item.loss), str(count)]
        for (item, cell), count in worst[:MOST_ROWS]
    ]
    return table_of(["item", "template", "lost most by", "change, pp", "cells that lost it"], rows, words=3)


def _bar(panel: Axes, y: int, c: CellConcentration) -> None:
    start = 0.0
    for place, t in enumerate(c.templates[:_ONE_BY_ONE]):
        look: dict[str, Any] = {"facecolor": LOSS, "alpha": 0.9 if place % 2 == 0 else 0.55, "linewidth": 0}
        if t.template == c.broke:
            look |= {"hatch": "///", "edgecolor": INK, "linewidth": 0.4}
        panel.barh(y, t.losses, left=start, height=0.68, **look)
        start += t.losses
    panel.barh(y, c.losses - start, left=start, height=0.68, color=UNDECIDED, alpha=0.6, linewidth=0)
    if c.broke is not None:
        panel.text(c.losses, y, f" {inline(clip(c.broke, 40))}", va="center", fontsize=7)
