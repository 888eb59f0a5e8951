"""The items with the largest losses, with transcripts: the reference got them right, the candidate did not."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np
import pandas as pd

from kvaudit.core.facets import facet_of
from kvaudit.core.records import Message, Role
from kvaudit.core.text import clip
from kvaudit.reports.records.blocks import UNREAD
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import FACET_COLUMNS, ROLES, CellKey, Panel
from kvaudit.reports.sections.base import Inputs, Section, has_two_sides
from kvaudit.reports.sections.shared.tables import Example, ExampleTurn, Passage
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.drift import seed_pairs, two_sides, weights_of
from kvaudit.reports.verdict.verdict import Decided, Decision, Status, Verdict

PER_CELL = 2
_DOUBTFUL = 3  # further losses of an undecided cell; they may be why it is undecided
AT_MOST = 12
_CHARACTERS = 1200  # of one message


class ExamplesSection(Section[tuple[Example, ...]]):
    name = "examples"
    title = "Largest losses"
    explain = (
        "Items the reference got right and the candidate lost; model output is shown as it was, control characters "
        "made visible."
    )
    order = 310
    gated = True
    keys: ClassVar = {"examples": 120}

    def compute(self, inputs: Inputs) -> tuple[Example, ...] | None:
        return largest_losses(inputs.data, inputs.decided.drift, inputs.decided.verdict) or None

    def passage(self, value: tuple[Example, ...], decided: Decided) -> Passage:
        return replace(super().passage(value, decided), examples=value)

    def finding(self, value: tuple[Example, ...], decided: Decided) -> str:
        return f"{len(value)} answers in full."


class LostItem(NamedTuple):
    """An item that one gated cell lost: how much it lost, where both answers are, and whether a grade is doubtful."""

    decision: Decision
    item: str
    amount: float
    candidate: CellKey
    reference: CellKey
    is_doubtful: bool


def largest_losses(data: RunData, drift: Drift, verdict: Verdict) -> tuple[Example, ...]:
    """Return up to ``AT_MOST`` examples of lost items; those of the cell with the lowest drift come first.

    Each cell gives the largest losses of ``PER_CELL`` templates. An undecided cell gives up to ``_DOUBTFUL`` further
    losses, in which the judge was unsure of a grade.
    """
    gated = [d for d in verdict.decisions if has_two_sides(d) and d.effect and d.effect.losses > 0]
    gated.sort(key=lambda d: d.effect.estimate if d.effect else 0.0)
    doubtful = _doubtful_items(data)
    answers: dict[tuple[str, int, str, CellKey], LostItem] = {}
    for d in gated:
        for loss in _largest_of_cell(drift, d, data.panels[d.suite, d.context_tokens], doubtful):
            # an answer may be a loss in two cells: against the reference served alike and the uncompressed one
            answers.setdefault((d.suite, d.context_tokens, loss.item, loss.candidate), loss)
    pairs = {
        loss: [record_of(data, loss, cell, drift.comparison.facets) for cell in (loss.candidate, loss.reference)]
        for loss in list(answers.values())[:AT_MOST]
    }
    texts = data.transcripts({_place(row) for pair in pairs.values() for row in pair})
    return tuple(
        _example(loss, candidate, texts[_place(candidate)], texts[_place(reference)])
        for loss, (candidate, reference) in pairs.items()
    )


def _doubtful_items(data: RunData) -> Mapping[CellKey, frozenset[str]]:
    """Return by cell the items with a doubtful grade: the judge was unsure, or the answer is hardly coherent."""
    records, coherent = data.records, FACET_COLUMNS["coherent"]
    doubt = records["unsure"].astype(bool) if "unsure" in records else pd.Series(False, index=records.index)
    if coherent in records:
        doubt |= records[coherent].isin([0.0, UNREAD])
    return {
        CellKey(str(arm), int(str(seed)), str(policy)): frozenset(map(str, rows["item_id"]))
        for (arm, seed, policy), rows in records[doubt].groupby(["arm", "train_seed", "policy"], observed=True)
    }


def _largest_of_cell(
    drift: Drift, d: Decision, panel: Panel, doubtful: Mapping[CellKey, frozenset[str]]
) -> list[LostItem]:
    """Return the largest losses of a cell over all seeds, one per template; those with an unsure grade come last.

    ``doubtful`` holds, by checkpoint and policy, the items with such a grade.
    """
    losses = []
    for pair in seed_pairs(drift.comparison, panel, d.arm):
        weights = weights_of(drift.comparison, d.estimand, d.arm, pair, d.policy)
        (candidate,), (reference,) = two_sides([weights])
        z = np.nan_to_num(panel.scores[candidate] - panel.scores[reference])  # [N]; unscored items are no loss
        for i in np.flatnonzero(z < 0):
            losses.append((float(z[i]), panel.items[i], int(panel.clusters[i]), candidate, reference))
    by_template: dict[int, LostItem] = {}
    for amount, item, cluster, candidate, reference in sorted(losses):  # the largest loss first
        is_doubtful = any(item in doubtful.get(cell, ()) for cell in (candidate, reference))
        by_template.setdefault(cluster, LostItem(d, item, amount, candidate, reference, is_doubtful))
    ordered = sorted(by_template.values(), key=lambda loss: loss.is_doubtful)
    more = [loss for loss in ordered[PER_CELL:] if loss.is_doubtful][:_DOUBTFUL]
    return ordered[:PER_CELL] + (more if d.status is Status.INCONCLUSIVE else [])


def record_of(data: RunData, loss: LostItem, cell: CellKey, facets: Container[str]) -> pd.Series:
    """Return the record of a lost item on one side, which ``cell`` names (checkpoint and policy).

    Of several samples it is the worst of the candidate, or the best of the reference. ``facets`` holds the names of
    those metrics that are facets.
    """
    records, suite, facet = data.records, loss.decision.suite, None
    if suite in facets:
        suite, facet = facet_of(suite)
    rows = records[
        (records["item_id"] == loss.item)
        & (records["suite"] == suite)
        & (records["context_tokens"] == loss.decision.context_tokens)
        & (records["arm"] == cell.arm)
        & (records["train_seed"] == cell.seed)
        & (records["policy"] == cell.policy)
    ]
    if facet:
        rows = rows[rows[FACET_COLUMNS[facet.name]] != UNREAD]
        rows = rows.assign(score=rows[FACET_COLUMNS[facet.name]] == facet.wanted)
    return rows.sort_values(["score", "sample_index"], ascending=[cell == loss.candidate, True]).iloc[0]


def _place(row: pd.Series) -> tuple[str, int]:
    return str(row["file"]), int(row["line"])


def _example(
    loss: LostItem, record: pd.Series, transcript: tuple[Message, ...], reference: tuple[Message, ...]
) -> Example:
    answer = next((message.content for message in reversed(reference) if message.role is Role.ASSISTANT), "")
    return Example(
        estimand=loss.decision.estimand,
        arm=loss.candidate.arm,
        seed=loss.candidate.seed,
        policy=loss.candidate.policy,
        suite=loss.decision.suite,
        context_tokens=loss.decision.context_tokens,
        item_id=loss.item,
        cluster_id=str(record["cluster_id"]),
        loss=loss.amount,
        outcome=str(record["outcome"]),
        candidate=tuple(ExampleTurn(m.role.value, clip(m.text, _CHARACTERS)) for m in transcript),
        reference_answer=clip(answer, _CHARACTERS),
        kept=tuple((role, float(record[f"survival_{role}"])) for role in ROLES if pd.notna(record[f"survival_{role}"])),
        is_doubtful=loss.is_doubtful,
    )
