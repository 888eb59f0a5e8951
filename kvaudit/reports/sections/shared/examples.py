"""The items that cost the most: transcripts of what the reference got right and the candidate lost."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from kvaudit.core.facets import facet_of
from kvaudit.core.records import Message, Role
from kvaudit.core.text import clip
from kvaudit.reports.records.blocks import UNREAD
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import FACET_COLUMNS, ROLES, CellKey, Panel
from kvaudit.reports.sections.shared.both_sides import two_sided
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.drift import seed_pairs, two_sides, weights_of
from kvaudit.reports.verdict.verdict import Decision, Verdict

PER_CELL = 2
AT_MOST = 12
_CHARACTERS = 1200  # of one message


@dataclass(frozen=True)
class ExampleTurn:
    """One message of an example; ``text`` is the model's or the suite's and must be escaped."""

    role: str
    text: str


@dataclass(frozen=True)
class Example:
    """An item the reference got right and the candidate lost.

    ``kept`` is the share of the prompt's entries that the candidate's cache still held when its last answer began, by
    role; nothing of an engine that shows nobody its cache.
    """

    estimand: str
    arm: str
    seed: int
    policy: str
    suite: str
    context_tokens: int
    item_id: str
    cluster_id: str
    loss: float
    outcome: str
    candidate: tuple[ExampleTurn, ...]
    reference_answer: str
    kept: tuple[tuple[str, float], ...] = ()

    @property
    def asked(self) -> str:
        """The last that was said to the candidate before its last answer."""
        return next((t.text for t in reversed(self.candidate) if t.role != Role.ASSISTANT.value), "")

    @property
    def answer(self) -> str:
        """The candidate's last answer."""
        return next((t.text for t in reversed(self.candidate) if t.role == Role.ASSISTANT.value), "")


class LostItem(NamedTuple):
    """A lost item of one cell: where the candidate and the reference were, and by how much."""

    decision: Decision
    item: str
    amount: float
    candidate: CellKey
    reference: CellKey


def largest_losses(data: RunData, drift: Drift, verdict: Verdict) -> tuple[Example, ...]:
    """Up to ``AT_MOST`` examples, the cells with the lowest drift first, ``PER_CELL`` templates of each."""
    tables = data.panels
    gated = [d for d in verdict.decisions if two_sided(d) and d.effect and d.effect.losses > 0]
    gated.sort(key=lambda d: d.effect.estimate if d.effect else 0.0)
    doubtful = _doubtful(data)
    every = [loss for d in gated for loss in _losses(drift, d, tables[d.suite, d.context_tokens], doubtful)]
    facets = drift.comparison.facets
    shown: dict[tuple[str, int, str, CellKey], LostItem] = {}
    for loss in every:  # an answer may be lost to the reference served alike and to the uncompressed one
        shown.setdefault((loss.decision.suite, loss.decision.context_tokens, loss.item, loss.candidate), loss)
    losses = list(shown.values())[:AT_MOST]
    places = {
        loss: [record_of(data, loss, cell, facets) for cell in (loss.candidate, loss.reference)] for loss in losses
    }
    texts = data.transcripts({_place(row) for pair in places.values() for row in pair})
    return tuple(_example(loss, own, texts[_place(own)], texts[_place(other)]) for loss, (own, other) in places.items())


def _doubtful(data: RunData) -> Mapping[CellKey, frozenset[str]]:
    """By cell the items whose grade says little: its judge was unsure, or the answer can hardly be read as one."""
    records, coherent = data.records, FACET_COLUMNS["coherent"]
    doubt = records["unsure"].astype(bool) if "unsure" in records else pd.Series(False, index=records.index)
    if coherent in records:
        doubt |= records[coherent].isin([0.0, UNREAD])
    own = records[doubt]
    return {
        CellKey(str(arm), int(str(seed)), str(policy)): frozenset(map(str, rows["item_id"]))
        for (arm, seed, policy), rows in own.groupby(["arm", "train_seed", "policy"], observed=True)
    }


def _losses(drift: Drift, d: Decision, panel: Panel, doubtful: Mapping[CellKey, frozenset[str]]) -> list[LostItem]:
    """The worst items of a cell, one per template: first those of whose grade there is no doubt on either side.

    Among seeds it is the one that lost most.
    """
    found = []
    for pair in seed_pairs(drift.comparison, panel, d.arm):
        weights = weights_of(drift.comparison, d.estimand, d.arm, pair, d.policy)
        (candidate,), (reference,) = two_sides([weights])
        # [N]; what is unscored on a side is no loss
        z = np.nan_to_num(panel.scores[candidate] - panel.scores[reference])
        for i in np.flatnonzero(z < 0):
            found.append((float(z[i]), panel.items[i], int(panel.clusters[i]), candidate, reference))
    chosen: dict[int, LostItem] = {}
    # the most negative first, so that a template keeps its worst item
    for amount, item, cluster, candidate, reference in sorted(found):
        chosen.setdefault(cluster, LostItem(d, item, amount, candidate, reference))

    def is_doubtful(loss: LostItem) -> bool:
        return any(loss.item in doubtful.get(cell, ()) for cell in (loss.candidate, loss.reference))

    return sorted(chosen.values(), key=is_doubtful)[:PER_CELL]


def record_of(data: RunData, loss: LostItem, cell: CellKey, facets: Container[str]) -> pd.Series:
    """The record of an item in a cell: the candidate's lowest score, the reference's highest; of a facet likewise."""
    records, suite, facet = data.records, loss.decision.suite, None
    if suite in facets:
        suite, facet = facet_of(suite)
    own = records[
        (records["item_id"] == loss.item)
        & (records["suite"] == suite)
        & (records["context_tokens"] == loss.decision.context_tokens)
        & (records["arm"] == cell.arm)
        & (records["train_seed"] == cell.seed)
        & (records["policy"] == cell.policy)
    ]
    if facet:
        # what cannot be read of a facet is neither its lowest nor its highest
        read = own[own[FACET_COLUMNS[facet.name]] != UNREAD]
        own = read.assign(score=read[FACET_COLUMNS[facet.name]] == facet.wanted)
    return own.sort_values(["score", "sample_index"], ascending=[cell == loss.candidate, True]).iloc[0]


def _place(row: pd.Series) -> tuple[str, int]:
    return str(row["file"]), int(row["line"])


def _example(loss: LostItem, own: pd.Series, text: tuple[Message, ...], other: tuple[Message, ...]) -> Example:
    answer = next((message.content for message in reversed(other) if message.role is Role.ASSISTANT), "")
    return Example(
        estimand=loss.decision.estimand,
        arm=loss.candidate.arm,
        seed=loss.candidate.seed,
        policy=loss.candidate.policy,
        suite=loss.decision.suite,
        context_tokens=loss.decision.context_tokens,
        item_id=loss.item,
        cluster_id=str(own["cluster_id"]),
        loss=loss.amount,
        outcome=str(own["outcome"]),
        candidate=tuple(ExampleTurn(m.role.value, clip(m.text, _CHARACTERS)) for m in text),
        reference_answer=clip(answer, _CHARACTERS),
        kept=tuple((role, float(own[f"survival_{role}"])) for role in ROLES if pd.notna(own[f"survival_{role}"])),
    )
