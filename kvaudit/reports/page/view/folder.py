"""Flips (items whose answers differ) -> a folder of static pages.

The data files are scripts, since a page opened as file:// cannot fetch JSON. A shade is the share of layers and heads
whose cache still held a token when an answer began; only answers whose cache evicted entries have shades.

index.html, view.css, *.js   the same for every run, without any text of a run
data/flips.js                the list, a column per field
data/texts-<n>.js            prompts and answers of some items, loaded when one is opened or searched
data/shades-<n>.js           the shades of their tokens, if known
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvaudit.core.errors import DataError, RunError
from kvaudit.core.facets import FACETS
from kvaudit.core.files import PARTIAL, write_output
from kvaudit.core.provenance import JUDGED
from kvaudit.core.spans import AnswerKey, Shadings, read_shadings
from kvaudit.core.text import visible
from kvaudit.reports.page.view.data import (
    ItemKey,
    ItemShades,
    Texts,
    flip_key,
    flips_of,
    interleave_cells,
    places_of,
    script,
    severity_rank,
)
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import SCORE
from kvaudit.reports.verdict.comparison import Comparison

STATIC = ("view.css", "list.js", "flip.js", "view.js", "index.html")  # index.html last: it marks a complete view
DATA, LIST, TEXTS, SHADES = "data", "flips.js", "texts-{}.js", "shades-{}.js"
LOST = ("nothing", "something, shown", "something, not shown yet")  # whether a flip's caches evicted entries
_DATA_FILE = re.compile(r"flips\.js|(texts|shades)-\d+\.js")
_DIGITS = 4  # of shares

T = TypeVar("T")


class RunView:
    """The pages of a run's flips. Raises DataError for a run without flips or without transcripts."""

    def __init__(self, data: RunData, comparison: Comparison) -> None:
        self._data, self._comparison = data, comparison
        self.flips = sorted(flips_of(data, comparison), key=severity_rank)  # lost safety first
        if not self.flips:
            raise DataError(
                f"{str(data.run)!r}: no item differs between the sides of a contrast, so there is nothing to show"
            )
        pairs = places_of(data, self.flips)
        self._texts = Texts(data.records_at(dict.fromkeys(place for pair in pairs for place in pair)))
        if self._texts.is_empty:
            raise DataError(f"{str(data.run)!r} holds no transcripts, so there is nothing to show; evaluate it again")
        self._answers = [[self._texts.numbers[place] for place in pair] for pair in pairs]  # reference, candidate
        self._items = _number(self._texts.prompts)
        self._files: list[list[ItemKey]] = []

    @property
    def is_servable(self) -> bool:
        """Whether the run has the checkpoints that gave the answers, so that they can be served again."""
        return self._data.spec.probe is None and JUDGED not in self._data.provenance

    def write(self, out: Path) -> None:
        """Write the pages, replacing an older view; raises RunError if the folder holds anything else."""
        for path in _old_files(out):
            path.unlink()
        self._files = []
        for number, (items, table) in enumerate(self._texts.chunks()):
            self._files.append(items)
            write_output(out / DATA / TEXTS.format(number), f"TEXTS[{number}] = {script(table)};\n")
        self.write_shades(out)
        for name in STATIC:
            write_output(out / name, (Path(__file__).parent / "static" / name).read_text(encoding="utf-8"))

    def write_shades(self, out: Path) -> None:
        """Write the shades, and the list of flips, which points to them."""
        shaded = self._shades_by_item()
        for number, items in enumerate(self._files):
            table = {self._items[item]: shaded[item].table() for item in items if item in shaded}
            if table:
                write_output(out / DATA / SHADES.format(number), f"SHADES[{number}] = {script(table)};\n")
        write_output(out / DATA / LIST, f"const VIEW = {script(self._table(shaded))};\n")

    def shaded_counts(self) -> tuple[int, int]:
        """Return two counts: the flips with evictions that have shades to show, and all flips with evictions."""
        shaded = self._shades_by_item()
        codes = [self._eviction_code(pair, shaded) for pair in self._answers]
        return codes.count(1), codes.count(1) + codes.count(2)

    def missing_shades(self, number: int) -> dict[str, set[AnswerKey]]:
        """Return which answers have no shades yet, by unit (record file).

        Only the first ``number`` flips with evictions are searched.
        """
        answers = self._texts.answers
        evicted_flips = [n for n in interleave_cells(self.flips) if any(answers[a].evicted for a in self._answers[n])]
        shadings: dict[str, Shadings] = {}
        missing: dict[str, set[AnswerKey]] = {}
        for answer in (answers[a] for n in evicted_flips[:number] for a in self._answers[n]):
            if answer.evicted and f"{answer.unit}.jsonl" not in self._data.incomplete:
                if answer.unit not in shadings:
                    shadings[answer.unit] = read_shadings(self._data.run, answer.unit)
                if answer.answer not in shadings[answer.unit]:
                    missing.setdefault(answer.unit, set()).add(answer.answer)
        return missing

    def _shades_by_item(self) -> dict[ItemKey, ItemShades]:
        """Return by item the shades that the run folder stores."""
        shadings: dict[str, Shadings] = {}
        shades: dict[ItemKey, ItemShades] = {}
        for number, answer in enumerate(self._texts.answers):
            if answer.evicted and answer.unit not in shadings:
                shadings[answer.unit] = read_shadings(self._data.run, answer.unit)
            if answer.evicted and answer.answer in shadings[answer.unit]:
                shades.setdefault(answer.item, ItemShades()).add(number, shadings[answer.unit][answer.answer])
        return shades

    def _table(self, shaded: Mapping[ItemKey, ItemShades]) -> dict[str, Any]:
        metrics = [SCORE, *(name for name in FACETS if any(m.endswith(f".{name}") for m in self._comparison.facets))]
        short, policies = self._comparison.labels, _number(self._comparison.policies)
        flips = self.flips
        arms, kinds = _number(flip.candidate.arm for flip in flips), _number(flip.kind for flip in flips)
        return {
            "run": {
                "name": visible(self._data.spec.name),
                "reference": visible(self._comparison.reference),
                "served": self.is_servable,
                "path": visible(str(self._data.run)),
            },
            "arms": [visible(arm) for arm in arms],
            "kinds": list(kinds),
            "policies": [{"text": visible(policy), "short": visible(short[policy])} for policy in policies],
            "metrics": [_metric(name) for name in metrics],
            "lost": LOST,
            "items": self._item_columns(shaded),
            # columns take less space than rows
            "flips": {
                "key": [flip_key(f.kind, f.suite, f.context_tokens, f.item, f.candidate) for f in flips],
                "kind": [kinds[flip.kind] for flip in flips],
                "arm": [arms[flip.candidate.arm] for flip in flips],
                "seed": [flip.candidate.seed for flip in flips],
                "policy": [policies[flip.candidate.policy] for flip in flips],
                "item": [self._items[flip.suite, flip.context_tokens, flip.item] for flip in flips],
                "changes": [
                    [
                        (metrics.index(c.metric), _rounded_share(c.reference), _rounded_share(c.candidate))
                        for c in flip.changes
                    ]
                    for flip in flips
                ],
                "answers": self._answers,
                "lost": [self._eviction_code(pair, shaded) for pair in self._answers],
            },
        }

    def _item_columns(self, shaded: Mapping[ItemKey, ItemShades]) -> dict[str, list[Any]]:
        details = self._texts.details
        return {
            "suite": [visible(suite) for suite, _, _ in self._items],
            "length": [length for _, length, _ in self._items],
            "name": [visible(name) for _, _, name in self._items],
            "template": [visible(details[item][0]) for item in self._items],
            "placement": [visible(details[item][1]) for item in self._items],
            "file": [number for number, items in enumerate(self._files) for _ in items],
            "shades": [int(any(item in shaded for item in items)) for items in self._files],  # by file
        }

    def _eviction_code(self, answers: Iterable[int], shaded: Mapping[ItemKey, ItemShades]) -> int:
        """Return the index in LOST of the text about a flip's two ``answers``.

        0: neither cache evicted entries; 1: some did, and all of these have shades; 2: some have no shades yet.
        """
        evicted = [answer for answer in answers if self._texts.answers[answer].evicted]
        has_shades = [answer in shaded.get(self._texts.answers[answer].item, ()) for answer in evicted]
        return 0 if not evicted else 1 if all(has_shades) else 2


def _old_files(out: Path) -> list[Path]:
    """Return the files of an older view, index.html first; raises RunError if the folder holds other files."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{str(out)!r} is not a folder; give another --out")
    static_files = {out / name.removesuffix(PARTIAL) for name in STATIC}
    files: list[Path] = []
    others: list[Path] = []
    for path in sorted(path for folder in (out, out / DATA) if folder.is_dir() for path in folder.iterdir()):
        name = path.name.removesuffix(PARTIAL)
        is_ours = path.parent / name in static_files or (path.parent == out / DATA and _DATA_FILE.fullmatch(name))
        if path != out / DATA:
            (files if is_ours and path.is_file() else others).append(path)
    if others:
        raise RunError(f"{str(others[0])!r} is not part of a view, so no view is written here; give another --out")
    return sorted(files, key=lambda path: path.suffix != ".html")


def _metric(name: str) -> dict[str, Any]:
    """Return a metric as the pages need it: name, meaning in words (empty for a score), and whether a yes is wanted."""
    if name == SCORE:
        return {"name": name, "says": "", "wanted": True}
    return {"name": name, "says": FACETS[name].says, "wanted": FACETS[name].wanted}


def _number(words: Iterable[T]) -> dict[T, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def _rounded_share(share: float) -> float | int:
    return int(share) if share in (0.0, 1.0) else round(share, _DIGITS)
