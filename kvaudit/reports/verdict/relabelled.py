"""People's labels as they are stored, and the judge held against them: its errors in both arms, the drift without them.

Concordant pairs are drawn in turn over the templates: a labelled one stands for its share of those of its template, a
discordant one for itself. Error rates weigh them so, and are rates of all pairs. Their intervals are those of the
simple random sample that thinning by the weights would leave; pairs of one template are taken for independent.

Labels are stored as what was said of which text, known by its hash: no file says whose answer it was. That, the drift
and every status are worked out from the run's own records whenever a report or a verdict is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvaudit.core.errors import DataError
from kvaudit.core.text import one_line
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import RecordPlace
from kvaudit.reports.stats.adjudication import Labelled, adjudicated, label_weights, labelled_pairs
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.judges import differential_bias, judge_error
from kvaudit.reports.verdict.contrast import CellName, ClusterSums, Contrast, Drift, LabelSummary
from kvaudit.reports.verdict.label_pairs import (
    Indices,
    PairedAnswers,
    records_digest,
    pairs_of,
    pairs_to_label,
    answer_places,
    shown_answers,
)
from kvaudit.reports.verdict.label_sheet import text_hash, check_types

LABELS_FORMAT = 3
_SIMPLE_LABELS = 2  # labels of before the pairs were spread over templates
LABELS_FILE = "adjudication.json"
REMEDY = "delete it and read the sheet again (kvaudit grade adjudicate)"
_PartialLabels = npt.NDArray[np.float64]


# --- labels as they are stored ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellLabels(CellName):
    """The labels of one gated cell: hash of the text -> 0 or 1, for the pairs that ``seed`` and ``concordant`` draw.

    ``spread`` says whether these were drawn in turn over the templates, or all at once as before.
    """

    seed: int
    concordant: int
    labels: Mapping[str, int]
    spread: bool = True


@dataclass(frozen=True)
class Labels:
    """All labels of a run. ``records`` is the digest of what was scored, ``reference`` the arm compared with."""

    records: str
    reference: str
    cells: tuple[CellLabels, ...]
    format: int = LABELS_FORMAT


def render_labels(labels: Labels) -> str:
    """As JSON with its own sha256, for the run folder."""
    body = asdict(labels)
    return json.dumps({**body, "sha256": _labels_sha256(body)}, ensure_ascii=True, allow_nan=False, indent=1) + "\n"


def load_labels(run: Path) -> Labels | None:
    """The labels stored in a run folder, None where there are none; raises DataError for a broken or edited file."""
    path = run / "report" / LABELS_FILE
    if not path.exists():
        return None
    try:
        return _parsed_labels(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        text = one_line(error)
        raise DataError(f"{str(path)!r} cannot be used ({text}); {REMEDY}") from None


def _parsed_labels(value: Any) -> Labels:
    if value["format"] not in (_SIMPLE_LABELS, LABELS_FORMAT):
        raise ValueError(f"format {str(value['format'])[:20]!r}, wanted {LABELS_FORMAT}")
    body = {name: inner for name, inner in value.items() if name != "sha256"}
    if _labels_sha256(body) != value["sha256"]:
        raise ValueError("it was changed after it was written")
    simple = {"spread": False} if value["format"] == _SIMPLE_LABELS else {}
    cells = tuple(_stored_cell({**cell, **simple}) for cell in value["cells"])
    if not cells or len({cell.place for cell in cells}) < len(cells):
        raise ValueError("it names no cell, or one twice")
    return Labels(**{**check_types(body, Labels), "cells": cells, "format": LABELS_FORMAT})


def _stored_cell(value: Any) -> CellLabels:
    check_types(value, CellLabels)
    if value["seed"] < 0 or value["concordant"] < 1:
        raise ValueError("seed or concordant is no count")
    if not all(isinstance(label, int) and label in (0, 1) for label in value["labels"].values()):
        raise ValueError("a label is not 0 or 1")
    return CellLabels(**value)


def _labels_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


# --- the drift that follows from them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class HumanLabels:
    """A cell's pairs [M] and the labels of the chosen ones, NaN where nobody looked."""

    pairs: PairedAnswers
    candidate: _PartialLabels
    reference: _PartialLabels

    @property
    def difference(self) -> _PartialLabels:
        """candidate - reference [M], NaN where nobody looked."""
        return self.candidate - self.reference

    @property
    def inside_templates(self) -> Labelled:
        """What was labelled, counted in every template."""
        return labelled_pairs(self.pairs.discordant, self.difference, self.pairs.clusters)


def with_labels(data: RunData, drift: Drift) -> Drift:
    """The drift with the run's human labels in their place; raises DataError for labels that do not fit its records.

    Labels of pairs with another reference arm than the drift's say nothing of it.
    """
    stored = load_labels(data.run)
    if stored is None:
        return drift
    if stored.records != records_digest(data.records):
        raise DataError(f"{LABELS_FILE} is about other records than those of {str(data.run)!r}; {REMEDY}")
    return drift if stored.reference != drift.comparison.reference else apply_labels(data, drift, stored)


def apply_labels(data: RunData, drift: Drift, stored: Labels) -> Drift:
    """The drift with these labels, of its very records: where people labelled a cell, theirs is its effect."""
    found = {h.pairs.contrast.place: h for h in match_labels(data, drift, stored)}
    contrasts = (
        _with_people(c, h, drift.alpha) if (h := found.get(c.place)) is not None else c for c in drift.contrasts
    )
    return replace(drift, contrasts=tuple(contrasts))


def match_labels(data: RunData, drift: Drift, stored: Labels) -> list[HumanLabels]:
    """The labels of every stored cell that has a number, by the text of the answers; raises DataError for a gap."""
    known = {c.place: c for c in drift.contrasts if c.effect}
    cells = [cell for cell in stored.cells if cell.place in known]
    pairs = [pairs_of(data, drift.comparison, known[cell.place]) for cell in cells]
    picks = [
        pairs_to_label(own, cell.concordant, cell.seed, spread=cell.spread)
        for own, cell in zip(pairs, cells, strict=True)
    ]
    texts = {
        place: text_hash(text) for place, text in shown_answers(data, list(zip(pairs, picks, strict=True))).items()
    }
    return [_looked_up(own, indices, cell, texts) for own, indices, cell in zip(pairs, picks, cells, strict=True)]


def _looked_up(
    pairs: PairedAnswers, indices: Indices, cell: CellLabels, texts: Mapping[RecordPlace, str]
) -> HumanLabels:
    sides = [[texts[place] for place in column] for column in zip(*answer_places(pairs, indices), strict=True)]
    shown = {text for side in sides for text in side}
    if shown != set(cell.labels):
        raise DataError(
            f"{LABELS_FILE} holds labels of other answers than the pairs of {cell.arm[:80]}, {cell.suite[:80]}; "
            f"{REMEDY}"
        )
    candidate, reference = (np.full(len(pairs.items), np.nan) for _ in range(2))
    for column, side in zip((candidate, reference), sides, strict=False):  # without pairs there are no sides
        column[indices] = [cell.labels[text] for text in side]
    return HumanLabels(pairs, candidate, reference)


def _with_people(c: Contrast, h: HumanLabels, alpha: float) -> Contrast:
    """What unscored answers could change is about the judge's scores, so it goes with them."""
    x = h.inside_templates
    # sorted names, which is how ``labelled_pairs`` orders its templates
    sums = ClusterSums(c.suite, 1.0, tuple(np.unique(h.pairs.clusters)), x.totals, x.pairs)
    return replace(
        c,
        effect=_corrected(h, alpha),
        sums=(sums,),
        judged=c.effect,
        judged_sums=c.sums,
        worst=None,
        best=None,
        people=_people(h, x),
    )


def _corrected(h: HumanLabels, alpha: float) -> Effect:
    """The drift on the human scale; no bound of a sum of two parts lies beyond what a rate can lose or gain."""
    found = adjudicated(h.pairs.discordant, h.difference, h.pairs.clusters, alpha=alpha)
    low, high, lower, upper = np.clip((found.low, found.high, found.lower, found.upper), -1.0, 1.0)
    return replace(found, low=float(low), high=float(high), lower=float(lower), upper=float(upper))


def _people(h: HumanLabels, x: Labelled) -> LabelSummary:
    weights = label_weights(h.pairs.discordant, h.difference, h.pairs.clusters)
    seen = weights > 0
    errors = {
        side: judge_error(getattr(h.pairs, side)[seen], getattr(h, side)[seen].astype(np.int64), weights[seen])
        for side in ("reference", "candidate")
    }
    rate = float(np.average(h.reference[seen], weights=weights[seen]))
    gap = differential_bias(errors["reference"], errors["candidate"], rate)
    return LabelSummary(
        pairs=len(h.pairs.items),
        discordant=int(h.pairs.discordant.sum()),
        concordant=int(x.looked.sum()),
        templates=int(np.count_nonzero(x.alike)),
        unseen=int(x.unseen),
        reference=errors["reference"],
        candidate=errors["candidate"],
        bias=gap.bound,
        bias_upper=gap.upper,
    )
