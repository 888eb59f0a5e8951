"""A blind sheet of a run's answers: the key that says whose they are, and the labels that come back with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvaudit.core.errors import DataError
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import RecordPlace
from kvaudit.reports.verdict.contrast import CellPlace
from kvaudit.reports.verdict.label_pairs import Indices, PairedAnswers, records_digest, pairs_to_label, shown_answers
from kvaudit.reports.verdict.label_sheet import Key, KeyCell, KeyPair, ShownAnswer, key_path, row_names, text_hash
from kvaudit.reports.verdict.human_labels import LABELS_FILE, REMEDY, CellLabels, Labels, load_labels


def sheet_key(
    data: RunData, found: Sequence[PairedAnswers], *, seed: int, concordant: int, spread: bool = True
) -> tuple[Key, dict[str, ShownAnswer]]:
    """The key of a sheet and what each of its rows shows: all of it follows from the records, the seed and F."""
    picks = [pairs_to_label(pairs, concordant, seed, spread=spread) for pairs in found]
    texts = shown_answers(data, list(zip(found, picks, strict=True)))
    hashes = {place: text_hash(text) for place, text in texts.items()}
    distinct = {hashes[place]: texts[place] for place in sorted(texts)}  # what looks the same is one row
    names = dict(zip(distinct, row_names(len(distinct), seed), strict=True))
    rows = {place: names[text] for place, text in hashes.items()}
    key = Key(
        run=data.spec.name,
        records=records_digest(data.records),
        seed=seed,
        concordant=concordant,
        rows={name: text for text, name in names.items()},
        cells=tuple(_key_cell(pairs, indices, rows) for pairs, indices in zip(found, picks, strict=True)),
    )
    return key, {names[text]: row for text, row in distinct.items()}


def _key_cell(pairs: PairedAnswers, indices: Indices, names: Mapping[RecordPlace, str]) -> KeyCell:
    chosen = tuple(
        KeyPair(
            item=str(pairs.items[i]),
            sample=int(pairs.samples[i]),
            candidate_seed=int(pairs.seeds[0][i]),
            reference_seed=int(pairs.seeds[1][i]),
            candidate_row=names[pairs.candidate_places[i]],
            reference_row=names[pairs.reference_places[i]],
        )
        for i in indices
    )
    return KeyCell(*pairs.contrast.place, chosen)


def check_key(key: Key, sheet: Path, data: RunData, answers: Sequence[PairedAnswers]) -> None:
    """Raise DataError where a sheet's key is not what the records give with its seed and number of pairs."""
    known = {pairs.contrast.place: pairs for pairs in answers}
    found = [_gated(known, cell) for cell in key.cells]
    wanted = sheet_key(data, found, seed=key.seed, concordant=key.concordant, spread=key.spread)[0]
    if replace(wanted, format=key.format) != key:  # an older key draws otherwise (``spread``), which its format says
        raise DataError(
            f"{str(key_path(sheet))!r} is not the key of these records with its seed and number of pairs: rows, pairs "
            "or texts were changed; put the first one back, or write another sheet"
        )


def _gated(answers: Mapping[CellPlace, PairedAnswers], cell: KeyCell) -> PairedAnswers:
    if cell.place not in answers:
        where = f"{cell.arm}, {cell.suite}"[:120]
        raise DataError(f"the sheet's key names a cell that is not gated: {where}; write another sheet")
    return answers[cell.place]


def collect_labels(run: Path, reference: str, key: Key, labels: Mapping[str, int]) -> Labels:
    """The labels by the text they are of, and those that the run already has of other cells."""
    cells = []
    for c in key.cells:
        rows = sorted({row for pair in c.pairs for row in (pair.candidate_row, pair.reference_row)})
        own = {key.rows[row]: labels[row] for row in rows}
        cells.append(CellLabels(*c.place, key.seed, key.concordant, own, key.spread))
    new, before = {cell.place for cell in cells}, load_labels(run)
    if before is not None and (before.records, before.reference) != (key.records, reference):
        raise DataError(f"{str(run / 'report' / LABELS_FILE)!r} is about other records; {REMEDY}")
    kept = [cell for cell in before.cells if cell.place not in new] if before else []
    return Labels(key.records, reference, (*kept, *cells))


def earlier_labels(run: Path, key: Key) -> dict[str, int]:
    """Labels of a key's rows that people gave before, on another sheet of this run."""
    before = load_labels(run)
    texts = {text: label for cell in before.cells for text, label in cell.labels.items()} if before else {}
    return {row: texts[text] for row, text in key.rows.items() if text in texts}
