"""Human labels of a run's answers: the key of the sheet that people label, the stored labels, and the drift by them.

A pair is the reference's and the candidate's answer to one request; it is discordant if the judge graded the two
differently, else concordant. People label every discordant pair, and concordant ones drawn in turn over the templates.
A discordant pair counts once. If a template has n concordant pairs and k of them are labelled, each of these k counts n
/ k times. With these weights the judge's error rates hold for all pairs; their intervals assume that the pairs of a
template are independent. Stored labels name texts by hash, so that their file does not reveal which arm gave an answer:
drift and statuses are computed from the run's own records whenever a report or verdict is made.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvaudit.core.errors import DataError
from kvaudit.core.files import check_plain, read_json
from kvaudit.core.provenance import LABELLED, PROVENANCE
from kvaudit.core.text import one_line
from kvaudit.reports.records.load import RunData
from kvaudit.reports.stats.adjudication import Labelled, adjudicated, label_weights, labelled_pairs
from kvaudit.reports.stats.effect import Array, Effect
from kvaudit.reports.stats.judges import differential_bias, judge_error
from kvaudit.reports.stats.shares import share
from kvaudit.reports.verdict.contrast import CellName, CellPlace, ClusterSums, Contrast, Drift, LabelSummary
from kvaudit.reports.verdict.label_sheet import (
    AnswerPlace,
    Indices,
    PairedAnswers,
    SheetCell,
    SheetKey,
    SheetPair,
    ShownAnswer,
    answer_places,
    check_types,
    key_path,
    pairs_of,
    pairs_to_label,
    records_digest,
    row_names,
    shown_answers,
    text_hash,
)

LABELS_FORMAT = 4
LABELS_FILE = "adjudication.json"
REMEDY = "delete it and read the sheet again (kvaudit grade adjudicate)"
_NOTE = re.compile(r", (\d+) cells, sha256 ([0-9a-f]{64})$")  # the end of provenance's note on labels


# --- the key of a sheet -----------------------------------------------------------------------------------------------


def sheet_key(
    data: RunData, answers: Sequence[PairedAnswers], *, seed: int, concordant: int
) -> tuple[SheetKey, dict[str, ShownAnswer]]:
    """Return the key of a sheet (which row shows which answers), and the content of its rows by row name.

    Both follow from the records, ``seed`` and ``concordant``, the number of pairs to label that the judge graded alike.
    """
    picks = [pairs_to_label(pairs, concordant, seed) for pairs in answers]
    texts = shown_answers(data, list(zip(answers, picks, strict=True)))
    hashes = {place: text_hash(text) for place, text in texts.items()}
    distinct = {hashes[place]: texts[place] for place in sorted(texts)}  # equal texts share a row
    names = dict(zip(distinct, row_names(len(distinct), seed), strict=True))
    rows = {place: names[text] for place, text in hashes.items()}
    key = SheetKey(
        run=data.spec.name,
        records=records_digest(data.records),
        seed=seed,
        concordant=concordant,
        rows={name: text for text, name in names.items()},
        cells=tuple(_sheet_cell(pairs, indices, rows) for pairs, indices in zip(answers, picks, strict=True)),
    )
    return key, {names[text]: row for text, row in distinct.items()}


def _sheet_cell(pairs: PairedAnswers, indices: Indices, names: Mapping[AnswerPlace, str]) -> SheetCell:
    chosen = tuple(
        SheetPair(
            item=str(pairs.items[i]),
            sample=int(pairs.samples[i]),
            candidate_seed=int(pairs.seeds[0][i]),
            reference_seed=int(pairs.seeds[1][i]),
            candidate_row=names[pairs.candidate_places[i]],
            reference_row=names[pairs.reference_places[i]],
        )
        for i in indices
    )
    return SheetCell(*pairs.contrast.place, chosen)


def check_key(key: SheetKey, sheet: Path, data: RunData, answers: Sequence[PairedAnswers]) -> None:
    """Raise DataError if the key of a label sheet is not the one that ``sheet_key`` makes of these records.

    The seed and the number of pairs are taken from the key itself.
    """
    by_place = {pairs.contrast.place: pairs for pairs in answers}
    cells = [_answers_of_gated_cell(by_place, cell) for cell in key.cells]
    if sheet_key(data, cells, seed=key.seed, concordant=key.concordant)[0] != key:
        raise DataError(
            f"{str(key_path(sheet))!r} does not match these records: rows, pairs or texts were changed; restore the "
            "original key, or write another sheet"
        )


def _answers_of_gated_cell(answers: Mapping[CellPlace, PairedAnswers], cell: SheetCell) -> PairedAnswers:
    if cell.place not in answers:
        name = f"{cell.arm}, {cell.suite}"[:120]
        raise DataError(f"the sheet's key names a cell that is not gated: {name}; write another sheet")
    return answers[cell.place]


# --- stored labels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellLabels(CellName):
    """The human labels (1 as wanted, 0 not) of one gated cell, by hash of the labelled text.

    ``seed`` and ``concordant`` (a number) fix which of the pairs that the judge graded alike were drawn.
    """

    seed: int
    concordant: int
    labels: Mapping[str, int]


@dataclass(frozen=True)
class Labels:
    """All human labels of a run. ``records`` is the digest of the scored records, ``reference`` the reference arm."""

    records: str
    reference: str
    cells: tuple[CellLabels, ...]
    format: int = LABELS_FORMAT


def collect_labels(run: Path, reference: str, key: SheetKey, labels: Mapping[str, int]) -> Labels:
    """Return the labels of a sheet, together with those stored for the run's other cells.

    ``labels`` are by row of the sheet; the result has them by hash of the labelled text. Raises DataError if the stored
    labels are about other records.
    """
    cells = []
    for c in key.cells:
        rows = sorted({row for pair in c.pairs for row in (pair.candidate_row, pair.reference_row)})
        by_text = {key.rows[row]: labels[row] for row in rows}
        cells.append(CellLabels(*c.place, key.seed, key.concordant, by_text))
    new, stored = {cell.place for cell in cells}, load_labels(run, may_lack_cells=True)
    if stored is not None and (stored.records, stored.reference) != (key.records, reference):
        raise DataError(f"{str(run / 'report' / LABELS_FILE)!r} is about other records; {REMEDY}")
    kept = [cell for cell in stored.cells if cell.place not in new] if stored else []
    return Labels(key.records, reference, (*kept, *cells))


def earlier_labels(run: Path, key: SheetKey) -> dict[str, int]:
    """Return the labels that people gave to the same texts on earlier sheets of this run, by row of the new sheet."""
    stored = load_labels(run, may_lack_cells=True)
    texts = {text: label for cell in stored.cells for text, label in cell.labels.items()} if stored else {}
    return {row: texts[text] for row, text in key.rows.items() if text in texts}


def render_labels(labels: Labels) -> str:
    """Return the labels as JSON with a sha256 of themselves, for the run folder."""
    body = asdict(labels)
    return json.dumps({**body, "sha256": _labels_sha256(body)}, ensure_ascii=True, allow_nan=False, indent=1) + "\n"


def labels_note(labels: Labels, date: str, earlier: str | None) -> str:
    """Return the note of labels in provenance: the date, the number of labelled cells, and the sha256 of the labels.

    ``earlier`` is the previous note, or None. If it counts more cells, its number is kept, so that lost labels are
    noticed.
    """
    match = _NOTE.search(earlier or "")
    cells = max(len(labels.cells), int(match[1]) if match else 0)
    return f"{date}, {cells} cells, sha256 {hashlib.sha256(render_labels(labels).encode()).hexdigest()}"


def load_labels(run: Path, *, may_lack_cells: bool = False) -> Labels | None:
    """Return the labels stored in a run folder; None if it has none.

    Raises DataError if the file is broken, or is not the one that kvaudit wrote when labels were last read back. Unless
    ``may_lack_cells``, it also raises if the file has labels of fewer cells than the note in provenance counts.
    """
    path = run / "report" / LABELS_FILE
    if not path.exists():
        return None
    check_plain(path)
    try:
        raw = path.read_bytes()
        labels = _parse_labels(json.loads(raw))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{str(path)!r} cannot be used ({one_line(error)}); {REMEDY}") from None
    note = _NOTE.search(str(read_json(run / PROVENANCE).get(LABELLED)))
    if note is None or hashlib.sha256(raw).hexdigest() != note[2]:
        raise DataError(f"{str(path)!r} is not what was last read back, it was edited or replaced; {REMEDY}")
    if len(labels.cells) < int(note[1]) and not may_lack_cells:
        counts = f"{len(labels.cells)} of {note[1]} cells that people labelled"
        raise DataError(f"{str(path)!r} holds {counts}; read the sheets of the others too (kvaudit grade adjudicate)")
    return labels


def _parse_labels(value: Any) -> Labels:
    if value["format"] != LABELS_FORMAT:
        raise ValueError(f"format {str(value['format'])[:20]!r}, wanted {LABELS_FORMAT}")
    body = {name: inner for name, inner in value.items() if name != "sha256"}
    if _labels_sha256(body) != value["sha256"]:
        raise ValueError("it was changed after it was written")
    cells = tuple(_parse_cell(cell) for cell in value["cells"])
    if not cells or len({cell.place for cell in cells}) < len(cells):
        raise ValueError("it names no cell, or a cell twice")
    return Labels(**{**check_types(body, Labels), "cells": cells})


def _parse_cell(value: Any) -> CellLabels:
    check_types(value, CellLabels)
    if value["seed"] < 0 or value["concordant"] < 1:
        raise ValueError("seed or concordant is not a count")
    if not all(isinstance(label, int) and label in (0, 1) for label in value["labels"].values()):
        raise ValueError("a label is not 0 or 1")
    return CellLabels(**value)


def _labels_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


# --- the drift by human labels ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HumanLabels:
    """The pairs [M] of a cell with their human labels, NaN for unlabelled pairs.

    A pair is the reference's and the candidate's answer to one request.
    """

    pairs: PairedAnswers
    candidate: Array
    reference: Array

    @property
    def difference(self) -> Array:
        """The differences candidate - reference [M], NaN for unlabelled pairs."""
        return self.candidate - self.reference

    @property
    def by_template(self) -> Labelled:
        """The human-labelled differences of the pairs, summed and counted by template."""
        return labelled_pairs(self.pairs.discordant, self.difference, self.pairs.clusters)


def with_labels(data: RunData, drift: Drift) -> Drift:
    """Return the drift with the run's human labels applied; raises DataError for labels lost or of other records.

    Labels are ignored if they are about another reference arm than the drift's.
    """
    stored = load_labels(data.run)
    if stored is None and LABELLED in data.provenance:
        path = str(data.run / "report" / LABELS_FILE)
        raise DataError(f"people labelled this run, and {path!r} is missing; restore it, or read their sheet again")
    if stored is None:
        return drift
    if stored.records != records_digest(data.records):
        raise DataError(f"{LABELS_FILE} is about other records than those of {str(data.run)!r}; {REMEDY}")
    return drift if stored.reference != drift.comparison.reference else apply_labels(data, drift, stored)


def apply_labels(data: RunData, drift: Drift, stored: Labels) -> Drift:
    """Return the drift with effects computed from human labels in every labelled cell.

    The labels must be about the records of this drift.
    """
    by_place = {h.pairs.contrast.place: h for h in match_labels(data, drift, stored)}
    contrasts = (_with_human_labels(c, h, drift.alpha) if (h := by_place.get(c.place)) else c for c in drift.contrasts)
    return replace(drift, contrasts=tuple(contrasts))


def match_labels(data: RunData, drift: Drift, stored: Labels) -> list[HumanLabels]:
    """Return the stored labels matched to answers by their text, for every labelled cell that has an effect.

    Raises DataError if labels and answers do not match.
    """
    contrasts = {c.place: c for c in drift.contrasts if c.effect}
    cells = [cell for cell in stored.cells if cell.place in contrasts]
    answers = [pairs_of(data, drift.comparison, contrasts[cell.place]) for cell in cells]
    picks = [pairs_to_label(pairs, cell.concordant, cell.seed) for pairs, cell in zip(answers, cells, strict=True)]
    answers_shown = shown_answers(data, list(zip(answers, picks, strict=True)))
    texts = {place: text_hash(text) for place, text in answers_shown.items()}
    return [
        _match_cell(pairs, indices, cell, texts) for pairs, indices, cell in zip(answers, picks, cells, strict=True)
    ]


def _match_cell(
    pairs: PairedAnswers, indices: Indices, cell: CellLabels, texts: Mapping[AnswerPlace, str]
) -> HumanLabels:
    sides = [[texts[place] for place in column] for column in zip(*answer_places(pairs, indices), strict=True)]
    if {text for side in sides for text in side} != set(cell.labels):
        raise DataError(
            f"{LABELS_FILE} holds labels of other answers than the pairs of {cell.arm[:80]}, {cell.suite[:80]}; "
            f"{REMEDY}"
        )
    candidate, reference = (np.full(len(pairs.items), np.nan) for _ in range(2))
    for column, side in zip((candidate, reference), sides, strict=False):  # ``sides`` is empty without pairs
        column[indices] = [cell.labels[text] for text in side]
    return HumanLabels(pairs, candidate, reference)


def _with_human_labels(c: Contrast, h: HumanLabels, alpha: float) -> Contrast:
    labels = h.by_template
    # sorted names, the order of templates in ``labelled_pairs``
    sums = ClusterSums(c.suite, 1.0, tuple(np.unique(h.pairs.clusters)), labels.totals, labels.pairs)
    return replace(
        c,
        effect=_human_effect(h, labels, alpha),
        sums=(sums,),
        judged=c.effect,
        judged_sums=c.sums,
        worst=None,  # bounds of unscored answers are about the judge's scores
        best=None,
        people=_label_summary(h, labels),
    )


def _human_effect(h: HumanLabels, labels: Labelled, alpha: float) -> Effect:
    """Return the drift by human labels; its bounds are clipped to [-1, 1], since a sum of intervals may exceed that."""
    effect = adjudicated(h.pairs.discordant, h.difference, h.pairs.clusters, alpha=alpha)
    low, high, lower, upper = np.clip((effect.low, effect.high, effect.lower, effect.upper), -1.0, 1.0)
    # the least p-value of a test of the directions of m templates; the bounds of few templates are too narrow
    least = 0.5 ** int(np.count_nonzero(labels.totals))
    drop = float(np.clip(effect.pvalue_drop, least, 1 - least)) if least < 1 else effect.pvalue_drop
    return replace(
        effect,
        low=float(low),
        high=float(high),
        lower=float(lower),
        upper=float(upper),
        pvalue=min(1.0, 2 * min(drop, 1 - drop)),
        pvalue_drop=drop,
    )


def _label_summary(h: HumanLabels, labels: Labelled) -> LabelSummary:
    weights = label_weights(h.pairs.discordant, h.difference, h.pairs.clusters)
    seen = weights > 0
    errors = {
        side: judge_error(getattr(h.pairs, side)[seen], getattr(h, side)[seen].astype(np.int64), weights[seen])
        for side in ("reference", "candidate")
    }
    rate = float(np.average(h.reference[seen], weights=weights[seen]))
    wanted = share(h.reference[seen], h.pairs.clusters[seen].astype(str))
    gap = differential_bias(errors["reference"], errors["candidate"], rate)
    return LabelSummary(
        pairs=len(h.pairs.items),
        discordant=int(h.pairs.discordant.sum()),
        concordant=int(labels.looked.sum()),
        templates=int(np.count_nonzero(labels.alike)),
        unseen=int(labels.unseen),
        reference=errors["reference"],
        candidate=errors["candidate"],
        bias=gap.bound,
        bias_upper=gap.upper,
        rate=float(wanted.rate),
        rate_low=float(wanted.low),
    )
