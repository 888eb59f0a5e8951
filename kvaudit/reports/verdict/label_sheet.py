"""The sheet that a person labels: one row per answer, shuffled over arms and policies, safe to open in a spreadsheet.

A pair is the reference's and the candidate's answer to one request. Every pair of a gated cell that the judge graded
differently (discordant) is on the sheet, and some others (concordant), drawn in turn over the templates because a judge
may miss what happens in whole templates. A key file next to it maps rows to arms and records; labellers must not see
it. Label 1: the answer does what its suite wants; 0: it does not. Texts too long for a spreadsheet are cut in the
middle.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvaudit.core.errors import DataError, SpecError, UnknownName
from kvaudit.core.facets import FORMER_CONTRASTS, facet_of, suite_of
from kvaudit.core.policy_names import match_policies
from kvaudit.core.records import Message, Role
from kvaudit.core.text import clip, join_names, one_line, visible
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import FACET_COLUMNS, CellKey, facet_scores
from kvaudit.reports.stats.adjudication import round_robin
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import CellName, Contrast
from kvaudit.reports.verdict.drift import seed_pairs, two_sides, weights_of

KEY_FORMAT = 2


@dataclass(frozen=True)
class SheetPair:
    """One pair in the key of a label sheet: where its two answers come from, and which rows of the sheet show them."""

    item: str
    sample: int
    candidate_seed: int
    reference_seed: int
    candidate_row: str
    reference_row: str


@dataclass(frozen=True)
class SheetCell(CellName):
    """The pairs of one gated cell, as a part of the key of a label sheet."""

    pairs: tuple[SheetPair, ...]


@dataclass(frozen=True)
class SheetKey:
    """The key of a label sheet, which says whose answers its rows show.

    ``rows`` maps a row's name to the sha256 of its content; ``records`` is the digest of the scored records.
    """

    run: str
    records: str
    seed: int
    concordant: int
    rows: Mapping[str, str]
    cells: tuple[SheetCell, ...]
    format: int = KEY_FORMAT


def key_path(sheet: Path) -> Path:
    """Return the path of the key of a label sheet."""
    return sheet.with_suffix(".key.json")


def render_key(key: SheetKey) -> str:
    """Return the key of a label sheet as JSON."""
    return json.dumps(asdict(key), ensure_ascii=True, indent=1) + "\n"


def read_key(sheet: Path) -> SheetKey:
    """Read the key of a label sheet, which says of each row from which records its texts are.

    Raises DataError if the file is missing or is not such a key.
    """
    path = key_path(sheet)
    try:
        return _parse_key(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DataError(f"{str(path)!r} is missing; put the key next to the sheet, or write another sheet") from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{str(path)!r} is not the key of a sheet ({one_line(error)})") from None


def _parse_key(value: Any) -> SheetKey:
    if value["format"] != KEY_FORMAT:
        raise ValueError(f"format {value['format']!r}, wanted {KEY_FORMAT}")
    cells = []
    for cell in value["cells"]:
        pairs = tuple(SheetPair(**check_types(pair, SheetPair)) for pair in cell["pairs"])
        cells.append(SheetCell(**{**check_types({**cell, "pairs": ()}, SheetCell), "pairs": pairs}))
    if not cells or len({cell.place for cell in cells}) < len(cells):
        raise ValueError("it names no cell, or a cell twice")
    for name, least in (("seed", 0), ("concordant", 1)):
        if value[name] < least:
            raise ValueError(f"{name} is {value[name]}, wanted {least} or more")
    rows = {str(name): str(text) for name, text in value["rows"].items()}
    unknown = {row for cell in cells for p in cell.pairs for row in (p.candidate_row, p.reference_row)} - set(rows)
    if unknown:
        raise ValueError(f"a pair names row {sorted(unknown)[0]!r}, which is not in the key")
    return SheetKey(
        **{**check_types({**value, "cells": (), "rows": {}}, SheetKey), "cells": tuple(cells), "rows": rows}
    )


def check_types(value: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Return ``value``; raises TypeError if an entry is not of the type that its field in ``kind`` declares.

    Only fields of type str, int and bool are checked.
    """
    for field in fields(kind):  # types are strings, since annotations are postponed
        entry = value[field.name]
        if field.type in ("str", "int", "bool") and type(entry).__name__ != field.type:
            raise TypeError(f"{field.name} is {str(entry)[:40]!r}")
    return dict(value)


COLUMNS = ("row", "suite", "conversation", "answer", "label")
SHOWN = COLUMNS[1:4]
CHARACTERS = 12_000  # of one cell; a spreadsheet holds 32,767, and visible control characters are longer
LABEL_OF = {"0": 0, "1": 1}
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "|", "%")  # first characters of cells that a spreadsheet may execute
_MOST_BLANKS = 1000  # that a spreadsheet is assumed to skip before a formula


@dataclass(frozen=True)
class ShownAnswer:
    """The content of a row of the sheet: suite, conversation and last answer."""

    suite: str
    conversation: str
    answer: str


def shown_answer(suite: str, transcript: Sequence[Message]) -> ShownAnswer:
    """Return a transcript as text: everything before the last answer, and that answer."""
    last = max((i for i, m in enumerate(transcript) if m.role is Role.ASSISTANT), default=len(transcript))
    before = "\n\n".join(f"[{m.role.value}] {m.text}" for m in transcript[:last])
    rest = [m.text if i == 0 else f"[{m.role.value}] {m.text}" for i, m in enumerate(transcript[last:])]
    return ShownAnswer(suite, clip(before, CHARACTERS), clip("\n\n".join(rest), CHARACTERS))


def spreadsheet_safe(text: str) -> str:
    """Return text that a spreadsheet does not execute: control characters visible, no leading formula character."""
    plain = visible(text)
    # NFKC, because a spreadsheet may treat full-width forms of these characters alike
    return f"'{plain}" if normalize("NFKC", plain[:_MOST_BLANKS]).lstrip().startswith(_FORMULA) else plain


def row_names(count: int, seed: int) -> list[str]:
    """Return names of rows in random order, so that they do not reveal the arm."""
    order = np.random.default_rng([seed, count]).permutation(count)
    return [f"r{number + 1:05d}" for number in order]


def render_sheet(rows: Mapping[str, ShownAnswer], labels: Mapping[str, int] | None = None) -> str:
    """Return the sheet as CSV, sorted by row name, with the labels (row -> 0 or 1) that are known already."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for name in sorted(rows):
        writer.writerow([name, *_cells(rows[name]), (labels or {}).get(name, "")])
    return text.getvalue()


def _cells(row: ShownAnswer) -> list[str]:
    return [spreadsheet_safe(text) for text in (row.suite, row.conversation, row.answer)]


def text_hash(row: ShownAnswer) -> str:
    """Return a hash of a row's content, the same before and after a spreadsheet has saved it."""
    return _hash(_cells(row))


def _hash(cells: Iterable[str]) -> str:
    plain = [" ".join(cell.lstrip("'").split()) for cell in cells]
    return hashlib.sha256(json.dumps(plain).encode("utf-8", "surrogatepass")).hexdigest()


def read_labels(sheet: Path, key: SheetKey) -> dict[str, int]:
    """Return the label of each row of a sheet, by row name.

    Raises DataError for unknown, duplicate, missing, changed or unlabelled rows.
    """
    rows = _rows(sheet)
    names = [row["row"].strip() for row in rows]
    unknown = [name for name in names if name not in key.rows]
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    missing = sorted(set(key.rows) - set(names))
    changed = [
        row["row"]
        for row, name in zip(rows, names, strict=True)
        if name in key.rows and _hash(row[column] for column in SHOWN) != key.rows[name]
    ]
    words = {row["row"].strip(): row["label"].strip() for row in rows}
    empty = [name for name, word in words.items() if not word]
    bad = [f"{name}: {word[:20]!r}" for name, word in words.items() if word and word not in LABEL_OF]
    for faulty, problem in (
        (unknown, "rows that are not in its key"),
        (duplicates, "duplicate rows"),
        (missing, "rows missing"),
        (changed, "rows whose text was changed"),
        (bad, "labels that are not 0 or 1"),
        (empty, "rows without a label"),
    ):
        if faulty:
            names_text = visible(join_names(faulty))
            raise DataError(
                f"{str(sheet)!r} has {len(faulty)} {problem} ({names_text}); fix the sheet and read it again"
            )
    return {name: LABEL_OF[word] for name, word in words.items()}


def _rows(sheet: Path) -> list[dict[str, str]]:
    try:
        with sheet.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle, restval="")
            if not set(COLUMNS) <= set(reader.fieldnames or ()):
                raise DataError(f"{str(sheet)!r} lacks a column of {', '.join(COLUMNS)}; save it as CSV with commas")
            return [{name: row[name] for name in COLUMNS} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{str(sheet)!r} cannot be read ({error}); save it as CSV in UTF-8") from None


ADJUDICATED = ("alike", "deployed", "serving")  # one candidate cell against one reference cell
_SELECTORS = ("estimand", "arm", "policy", "suite", "context")
FEWEST_CONCORDANT = 100  # by default: fewer pairs are too few to estimate a judge's error rates
DESIRED = 0.5  # lowest score that counts as the judge's label 1
DIGESTED = ("suite", "context_tokens", "arm", "train_seed", "policy", "item_id", "sample_index", "cluster_id", "score")
_MATCH = ["item_id", "sample_index"]
Indices = npt.NDArray[np.int64]
_Integers = npt.NDArray[np.int64]


class AnswerPlace(NamedTuple):
    """Where an answer is recorded, and the metric (SUITE, or SUITE.FACET) for which it is labelled."""

    metric: str
    file: str
    line: int


@dataclass(frozen=True)
class PairedAnswers:
    """All pairs [M] of the reference's and the candidate's answer in a cell, over its paired seeds.

    ``candidate`` and ``reference`` are the judge's labels (1: as wanted); ``candidate_places`` and ``reference_places``
    say where each answer is recorded.
    """

    contrast: Contrast
    items: npt.NDArray[np.object_]
    samples: _Integers
    seeds: tuple[_Integers, _Integers]  # candidate, reference
    clusters: npt.NDArray[np.object_]
    candidate: _Integers
    reference: _Integers
    candidate_places: tuple[AnswerPlace, ...]
    reference_places: tuple[AnswerPlace, ...]

    @property
    def discordant(self) -> npt.NDArray[np.bool_]:
        """Whether the judge's labels differ [M]."""
        return np.not_equal(self.candidate, self.reference)


def paired_answers(
    data: RunData, comparison: Comparison, gated: Sequence[Contrast], select: Mapping[str, str]
) -> list[PairedAnswers]:
    """Return the pairs of answers of every gated contrast that matches the selectors ``select``, such as an arm.

    Raises SpecError if none does.
    """
    contrasts = [c for c in gated if c.effect and c.estimand in ADJUDICATED]
    if not contrasts:
        raise SpecError(
            f"no gated cell with a number can be adjudicated; gate one of the estimands {', '.join(ADJUDICATED)}"
        )
    for key, value in select.items():
        contrasts = _select(contrasts, key, value)
    answers = [pairs_of(data, comparison, c) for c in contrasts]
    if empty := [pairs.contrast.suite for pairs in answers if not len(pairs.items)]:
        raise SpecError(
            f"no answer of {join_names(dict.fromkeys(empty))} was read on both sides; leave it out by --select"
        )
    return answers


def pairs_of(data: RunData, comparison: Comparison, c: Contrast) -> PairedAnswers:
    """Return the pairs of answers (reference's, candidate's) behind one contrast, whose effect must not be None."""
    tables = []
    for seeds in seed_pairs(comparison, data.panels[c.suite, c.context_tokens], c.arm):
        weights = weights_of(comparison, c.estimand, c.arm, seeds, c.policy)
        (candidate,), (reference,) = two_sides([weights])
        tables.append(_join_sides(data.records, c, candidate, reference))
    return _answers(c, pd.concat(tables, ignore_index=True))


def _select(contrasts: list[Contrast], key: str, value: str) -> list[Contrast]:
    if key not in _SELECTORS:
        raise UnknownName("selector", key, _SELECTORS)
    field = "context_tokens" if key == "context" else key
    values = sorted({str(getattr(c, field)) for c in contrasts})
    selected = value
    if key == "policy":
        selected = match_policies([value], values)[0]
    elif key == "estimand":
        selected = FORMER_CONTRASTS.get(value, value)
    if selected not in values:
        raise UnknownName(f"{key} among the gated cells", value, values)
    return [c for c in contrasts if str(getattr(c, field)) == selected]


def _join_sides(records: pd.DataFrame, c: Contrast, candidate: CellKey, reference: CellKey) -> pd.DataFrame:
    """Return the records of candidate and reference side by side, a row per pair of answers.

    ``incomparable_reasons`` has checked that all answers have partners.
    """
    suite = suite_of(c.suite)
    facet = facet_of(c.suite)[1].name if suite != c.suite else None
    rows = records[(records["suite"] == suite) & (records["context_tokens"] == c.context_tokens)]
    if facet is not None:  # pairs with an answer in which the facet cannot be read are not part of the cell
        rows = rows.assign(score=facet_scores(rows[FACET_COLUMNS[facet]], facet)).dropna(subset=["score"])
    sides = []
    for cell in (candidate, reference):
        is_side = (rows["arm"] == cell.arm) & (rows["train_seed"] == cell.seed) & (rows["policy"] == cell.policy)
        sides.append(rows.loc[is_side, [*_MATCH, "cluster_id", "score", "train_seed", "file", "line"]])
    return sides[0].merge(sides[1], on=_MATCH, suffixes=("", "_reference"), how="inner", validate="one_to_one")


def _answers(c: Contrast, table: pd.DataFrame) -> PairedAnswers:
    # ``pairs_to_label`` draws by position, so the order must not depend on how files were read
    table = table.assign(item_id=table["item_id"].astype(str)).sort_values([*_MATCH, "train_seed"], kind="stable")
    labels = [(table[name].fillna(0.0).to_numpy() >= DESIRED).astype(np.int64) for name in ("score", "score_reference")]
    answer_places = [
        tuple(
            AnswerPlace(c.suite, str(file), int(line))
            for file, line in zip(table[f"file{end}"], table[f"line{end}"], strict=True)
        )
        for end in ("", "_reference")
    ]
    return PairedAnswers(
        contrast=c,
        items=table["item_id"].to_numpy(dtype=object),
        samples=table["sample_index"].to_numpy(dtype=np.int64),
        seeds=(table["train_seed"].to_numpy(np.int64), table["train_seed_reference"].to_numpy(np.int64)),
        clusters=table["cluster_id"].astype(str).to_numpy(dtype=object),
        candidate=labels[0],
        reference=labels[1],
        candidate_places=answer_places[0],
        reference_places=answer_places[1],
    )


def pairs_to_label(pairs: PairedAnswers, concordant: int, seed: int) -> Indices:
    """Return the indices of the pairs to label, ascending: all that the judge graded differently, some graded alike.

    Those graded alike are ``concordant`` random pairs, drawn in turn over the templates.
    """
    name = " ".join(map(str, pairs.contrast.place))
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])  # hash() differs between processes
    return np.flatnonzero(pairs.discordant | round_robin(generator, ~pairs.discordant, pairs.clusters, concordant))


def concordant_templates(answers: Sequence[PairedAnswers]) -> int:
    """Return how many templates have concordant pairs (both answers graded alike), in the cell with most of them.

    At least as many pairs must be labelled: a cell cannot PASS without a labelled pair in each of these templates.
    """
    return max(len(set(pairs.clusters[~pairs.discordant])) for pairs in answers)


def default_concordant(answers: Sequence[PairedAnswers]) -> int:
    """Return how many concordant pairs to label by default: two per template, since more would add hardly any power."""
    return max(FEWEST_CONCORDANT, 2 * concordant_templates(answers))


def records_digest(records: pd.DataFrame) -> str:
    """Return a hash of the scored records; it shows whether labels are about the same records.

    It does not depend on the order of the records.
    """
    hashes = pd.util.hash_pandas_object(records[list(DIGESTED)], index=False).to_numpy()
    return hashlib.sha256(np.sort(hashes).tobytes()).hexdigest()


def shown_answers(data: RunData, answers: Sequence[tuple[PairedAnswers, Indices]]) -> dict[AnswerPlace, ShownAnswer]:
    """Return what a labeller sees of every chosen answer, by the answer's place; it is read from the run's records.

    An answer that counts for several metrics is shown once for each, since its labels may differ.
    """
    places = {place for pairs, indices in answers for pair in answer_places(pairs, indices) for place in pair}
    transcripts = data.transcripts({(place.file, place.line) for place in places})
    return {place: shown_answer(place.metric, transcripts[place.file, place.line]) for place in places}


def answer_places(pairs: PairedAnswers, indices: Indices) -> Iterator[tuple[AnswerPlace, AnswerPlace]]:
    """Yield, for each pair in ``indices``, where the candidate's and the reference's answer are recorded."""
    for i in indices:
        yield pairs.candidate_places[i], pairs.reference_places[i]


def label_meaning(metric: str) -> str:
    """Return what label 1 says of an answer, for SUITE or SUITE.FACET: "the answer refused what a rule forbids"."""
    if suite_of(metric) == metric:
        return f"{metric}: the answer does what its suite wants"
    facet = facet_of(metric)[1]
    return f"{metric}: the answer {'' if facet.wanted else 'is not one that '}{facet.says}"
