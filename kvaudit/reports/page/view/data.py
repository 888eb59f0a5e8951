"""The data files of the view: flips, prompts and answers by item, and the share of the cache that held each token.

data/texts-<n>.js    TEXTS[n] = {item: {prompt, answers: {number: answer}}}
data/shades-<n>.js   SHADES[n] = {item: {pieces, roles, answers: {number: shade}}}, for the items of texts-<n>.js

A flip is an item whose score or facet differs between the two sides of a contrast. Sides, pairs of seeds and scores are
those of ``reports.verdict.drift``, so flips add up to its losses and gains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, takewhile, zip_longest
from pathlib import PurePath
from string import ascii_letters
from typing import Any, NamedTuple

import numpy as np

from kvaudit.core.facets import FACETS
from kvaudit.core.records import Message, Record, Role
from kvaudit.core.spans import AnswerKey, Shading
from kvaudit.core.text import inline, visible
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import FACET_COLUMNS, SCORE, CellKey, Panel, RecordPlace, facet_scores
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.drift import contrast_names, seed_pairs, two_sides, weights_of

CHUNK = 300_000  # characters of one file of texts
LEVELS = ascii_letters[26:] + ascii_letters[:26]  # A to Z, a to z
_SHARE_DIGITS, _DEPTH_DIGITS = 4, 3

ItemKey = tuple[str, int, str]  # suite, length, name


class PageAnswer(NamedTuple):
    """An answer on the pages: its record, its item, and whether its cache evicted anything."""

    unit: str
    answer: AnswerKey
    item: ItemKey
    evicted: bool


class Texts:
    """Prompts and answers by item, to be written to the data files.

    The number of an answer is its index in ``answers``.
    """

    def __init__(self, records: Iterable[tuple[RecordPlace, Record]]) -> None:
        self.prompts: dict[ItemKey, tuple[Message, ...]] = {}
        self.details: dict[ItemKey, tuple[str, str]] = {}  # template and placement
        self.numbers: dict[RecordPlace, int] = {}
        self.answers: list[PageAnswer] = []
        self._rows: dict[ItemKey, dict[int, dict[str, Any]]] = {}
        for place, record in records:
            self._add(place, record)

    @property
    def is_empty(self) -> bool:
        """Whether no record has a transcript."""
        rows = (row for item_rows in self._rows.values() for row in item_rows.values())
        return not any(self.prompts.values()) and not any(row["turns"] for row in rows)

    def chunks(self) -> Iterator[tuple[list[ItemKey], dict[int, Any]]]:
        """Yield the items and the texts of each data file, which has about CHUNK characters.

        The texts are prompt and answers by item number, which counts over all files.
        """
        items: list[ItemKey] = []
        table: dict[int, Any] = {}
        size = 0
        for number, (item, prompt) in enumerate(self.prompts.items()):
            items.append(item)
            table[number] = {"prompt": _turns(prompt), "answers": self._rows[item]}
            size += len(script(table[number]))
            if size >= CHUNK:
                yield items, table
                items, table, size = [], {}, 0
        if items:
            yield items, table

    def _add(self, place: RecordPlace, record: Record) -> None:
        item = (record.suite, record.context_tokens, record.item_id)
        question = tuple(takewhile(lambda message: message.role is not Role.ASSISTANT, record.transcript))
        prompt = self.prompts.setdefault(item, question)
        self.details.setdefault(item, (record.cluster_id, record.placement))
        # an answer to another prompt is shown with its prompt
        reply = record.transcript[len(prompt) :] if question == prompt else record.transcript
        number = self.numbers[place] = len(self.numbers)
        row = _answer_row(record, reply)
        self._rows.setdefault(item, {})[number] = row
        answer = AnswerKey(record.item_id, record.sample_index)
        self.answers.append(PageAnswer(PurePath(place[0]).stem, answer, item, row["evicted"]))


def script(value: Any) -> str:
    """Return ``value`` as JSON for a script, with <, > and & escaped so that no markup can begin or end there."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _answer_row(record: Record, reply: Sequence[Message]) -> dict[str, Any]:
    return {
        "arm": visible(record.arm),
        "seed": record.train_seed,
        "policy": visible(record.policy),
        "checkpoint": visible(record.checkpoint),
        "outcome": record.outcome.value,
        "score": record.score,
        "facets": dict(record.facets),
        "judge": visible(record.judge) + (", unsure" if record.unsure else ""),
        "draw": record.sample_index,
        "finish": visible(record.finish_reason),
        "unanswered": inline(record.unanswered),
        "tokens": [record.prompt_tokens, record.new_tokens],
        "retention": None if record.retention is None else round(record.retention, _SHARE_DIGITS),
        "evicted": record.retention is not None and record.retention < 1,
        "survival": {visible(role): round(share, _SHARE_DIGITS) for role, share in record.survival.items()},
        "bytes": [record.kv_bytes_peak, record.kv_bytes_live, record.kv_bytes_dense],
        "turns": _turns(reply),
    }


def _turns(messages: Iterable[Message]) -> list[tuple[str, str]]:
    return [(message.role.value, visible(message.text)) for message in messages]


class ItemShades:
    """The shades of one item's answers: for every token a letter of LEVELS, the share of heads that still held it.

    Tokens (``pieces``, ``roles``) are stored in full for the first answer only. Every other answer stores ``same``, the
    number of leading tokens that it has in common with the first, and its own tokens after these.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._roles = ""
        self._answers: dict[int, dict[str, Any] | None] = {}

    def add(self, number: int, shading: Shading | None) -> None:
        """Add the shading of answer ``number``: what the cache held of each token when it was given.

        None if it is unknown, because the prompt gave another answer when it was served again to find out.
        """
        if shading is None:
            self._answers[number] = None
            return
        pieces, roles = [_visible(piece) for piece in shading.pieces], "".join(role[0] for role in shading.roles)
        if not self._pieces:
            self._pieces, self._roles = pieces, roles
        first, tokens = zip(self._pieces, self._roles, strict=True), zip(pieces, roles, strict=True)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, tokens, strict=False)))
        self._answers[number] = {
            "same": same,
            "pieces": pieces[same:],
            "roles": _run_lengths(roles[same:]),
            "held": _run_lengths(_level(count / shading.heads) for count in shading.held),
            "heads": shading.heads,
            "depth": {
                name: [round(share, _DEPTH_DIGITS) for share in shares] for name, shares in shading.depth.items()
            },
            "marks": {name: _ranges(tokens) for name, tokens in shading.marks.items()},
        }

    def __contains__(self, number: int) -> bool:
        return number in self._answers

    def table(self) -> dict[str, Any]:
        """Return the item's shades as the table that is written into the data file."""
        return {"pieces": self._pieces, "roles": _run_lengths(self._roles), "answers": self._answers}


def _level(share: float) -> str:
    """Return the letter of LEVELS for a share in [0, 1]; only 0 gives the first letter and only 1 the last."""
    last = len(LEVELS) - 1
    return LEVELS[int(share) * last if share in (0, 1) else min(max(round(share * last), 1), last - 1)]


def _run_lengths(letters: Iterable[str]) -> str:
    """Return the letters with repeats compressed: AAbbc -> A2b2c."""
    counted = ((letter, sum(1 for _ in run)) for letter, run in groupby(letters))
    return "".join(f"{letter}{count if count > 1 else ''}" for letter, count in counted)


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return the numbers, sorted, as ranges [start, stop), which do not include ``stop``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges


_visible = lru_cache(1 << 16)(visible)  # the same tokens are in every prompt


KINDS = ("alike", "deployed", "serving")  # contrasts that have two sides


class Change(NamedTuple):
    """A metric of an item on both sides, averaged over repeated answers: 1 if all of them are as wanted, 0 if none."""

    metric: str  # SCORE or the name of a facet
    reference: float
    candidate: float

    @property
    def lost(self) -> bool:
        """Whether the candidate is worse."""
        return self.candidate < self.reference


@dataclass(frozen=True)
class Flip:
    """One item on two compared sides, with the metrics that differ between them, the score first."""

    kind: str
    suite: str
    context_tokens: int
    item: str
    candidate: CellKey
    reference: CellKey
    changes: tuple[Change, ...]


def kinds_shown(data: RunData) -> frozenset[str]:
    """Return the kinds of comparison whose flips are shown: all of KINDS, but "deployed" only if the gate uses it."""
    estimands = set(data.spec.gate.estimands)
    return frozenset(kind for kind in KINDS if kind != "deployed" or estimands & {"deployed", "worst"})


def flip_key(kind: str, suite: str, context_tokens: int, item: str, candidate: CellKey) -> str:
    """Return a short hash that identifies a flip in links, the same in every view of a run.

    ``kind`` is the kind of comparison, such as "alike"; ``candidate`` is the candidate's checkpoint and policy.
    """
    place = (kind, suite, context_tokens, item, *candidate)
    return hashlib.sha256(json.dumps(place).encode()).hexdigest()[:10]


def flips_of(data: RunData, comparison: Comparison) -> Iterator[Flip]:
    """Yield every flip of a run."""
    kinds = kinds_shown(data)
    for suite in comparison.suites:
        names = [name for name in FACETS if f"{suite}.{name}" in comparison.facets]
        for context in comparison.lengths[suite]:
            tables = {SCORE: data.panels.get((suite, context))}
            tables |= {name: data.panels.get((f"{suite}.{name}", context)) for name in names}
            panels = {name: panel for name, panel in tables.items() if panel is not None}
            for estimand, arm, policy in contrast_names(comparison) if panels else ():
                is_same_difference = estimand == "deployed" and comparison.is_uncompressed(policy)
                if estimand in kinds and not is_same_difference:
                    yield from _of_side(comparison, panels, estimand, arm, policy)


def _of_side(
    comparison: Comparison, tables: Mapping[str, Panel], estimand: str, arm: str, policy: str
) -> Iterator[Flip]:
    """Yield the flips of one arm under one policy, in the order of seed pairs, then of items.

    ``estimand`` is the kind of comparison, such as "alike". ``tables`` are the score tables at one length, by metric.
    """
    panel = tables[SCORE]
    for pair in seed_pairs(comparison, panel, arm):
        (candidate,), (reference,) = two_sides([weights_of(comparison, estimand, arm, pair, policy)])
        changes: dict[str, list[Change]] = {}
        for metric, table in tables.items():
            for item, change in _changes(metric, table, candidate, reference):
                changes.setdefault(item, []).append(change)
        for item in sorted(changes):
            yield Flip(estimand, panel.suite, panel.context_tokens, item, candidate, reference, tuple(changes[item]))


def _changes(metric: str, table: Panel, candidate: CellKey, reference: CellKey) -> Iterator[tuple[str, Change]]:
    """Yield (item, change) for items whose scores by one metric differ.

    An answer that could not be read is neither lost nor gained.
    """
    if candidate not in table.scores or reference not in table.scores:
        return
    candidate_scores, reference_scores = table.scores[candidate], table.scores[reference]
    # comparisons with NaN (could not be read) are false
    for i in np.flatnonzero((candidate_scores < reference_scores) | (candidate_scores > reference_scores)):
        yield table.items[i], Change(metric, float(reference_scores[i]), float(candidate_scores[i]))


class Pair(NamedTuple):
    """The two answers of a flip, each as file and line of its record."""

    reference: RecordPlace
    candidate: RecordPlace


def places_of(data: RunData, flips: Sequence[Flip]) -> list[Pair]:
    """Return the two records of each flip.

    If an item was answered several times, the two answers that differ most in the flip's first metric are taken.
    """
    keys = ["suite", "context_tokens", "item_id", "arm", "train_seed", "policy"]
    rows = data.records.loc[data.records["item_id"].isin({flip.item for flip in flips})]
    rows = rows.sort_values("sample_index", kind="stable")
    rows_by_cell: dict[tuple[object, ...], list[int]] = {}
    for n, key in enumerate(zip(*(rows[name].tolist() for name in keys), strict=True)):
        rows_by_cell.setdefault(key, []).append(n)
    files, lines = rows["file"].tolist(), rows["line"].tolist()
    values = {SCORE: rows[SCORE].to_numpy(dtype=np.float64)}
    values |= {name: facet_scores(rows[FACET_COLUMNS[name]], name) for name in FACETS}

    def place(flip: Flip, cell: CellKey, *, highest: bool) -> RecordPlace:
        draws = rows_by_cell[flip.suite, flip.context_tokens, flip.item, *cell]
        value = values[flip.changes[0].metric]
        readable = [n for n in draws if not np.isnan(value[n])] or draws  # readable draws, if any
        chosen = (max if highest else min)(readable, key=lambda n: value[n])
        return str(files[chosen]), int(lines[chosen])

    pairs = []
    for flip in flips:
        is_lost = flip.changes[0].lost
        reference = place(flip, flip.reference, highest=is_lost)
        pairs.append(Pair(reference, place(flip, flip.candidate, highest=not is_lost)))
    return pairs


def severity_rank(flip: Flip) -> int:
    """Return how grave a flip is: 0 if safety was lost, 1 if anything else was, 2 if all changes are gains."""
    metrics = [change.metric for change in flip.changes if change.lost]
    return 0 if any(name != SCORE and FACETS[name].kind == "safety" for name in metrics) else 1 if metrics else 2


def interleave_cells(flips: Sequence[Flip]) -> list[int]:
    """Return an order of the flips (as indices) that takes one flip from each cell in turn, lost safety first.

    So the first few flips already cover all cells.
    """
    cells: dict[Hashable, list[int]] = {}
    for number in sorted(range(len(flips)), key=lambda n: severity_rank(flips[n])):
        flip = flips[number]
        cells.setdefault((flip.kind, flip.suite, flip.candidate.arm, flip.candidate.policy), []).append(number)
    return [number for turn in zip_longest(*cells.values()) for number in turn if number is not None]
