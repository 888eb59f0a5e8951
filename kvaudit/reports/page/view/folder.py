"""Flips -> a folder of static pages: one script reads data files that assign constants, since file:// fetches nothing.

index.html, view.css, *.js   the same for every run: no text of a run stands in markup
data/flips.js                the list: a column per field, words by number
data/texts-<n>.js            prompts and answers of some items, read when one of them is opened, and to be searched
data/shades-<n>.js           what the cache held of their tokens, where that is known
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
from kvaudit.core.shading import AnswerKey, Shadings, read_shadings
from kvaudit.core.text import visible
from kvaudit.reports.page.view.flips import flip_key, flips_of, places_of
from kvaudit.reports.page.view.data import ItemShades, in_turn, severity_rank
from kvaudit.reports.page.view.data import ItemKey, Texts, script
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import SCORE
from kvaudit.reports.verdict.comparison import Comparison

STATIC = ("view.css", "list.js", "flip.js", "view.js", "index.html")  # the page last: where it stands the rest is there
DATA, LIST, TEXTS, SHADES = "data", "flips.js", "texts-{}.js", "shades-{}.js"
LOST = ("nothing", "something, shown", "something, not shown yet")  # what a flip's caches lost
_DATA_FILE = re.compile(r"flips\.js|(texts|shades)-\d+\.js")
_DIGITS = 4  # of shares: more than a page shows

T = TypeVar("T")


class RunView:
    """The pages of a run's flips.

    Raises DataError for a run without flips or without transcripts.
    """

    def __init__(self, data: RunData, comparison: Comparison) -> None:
        self._data, self._comparison = data, comparison
        self.flips = sorted(flips_of(data, comparison), key=severity_rank)  # lost safety first
        if not self.flips:
            raise DataError(
                f"{str(data.run)!r}: no item differs between two sides that are compared; there is nothing to see"
            )
        pairs = places_of(data, self.flips)
        self._texts = Texts(data.records_at(dict.fromkeys(place for pair in pairs for place in pair)))
        if self._texts.silent:
            raise DataError(f"{str(data.run)!r} holds no transcripts, so there is nothing to see; evaluate it again")
        self._answers = [[self._texts.numbers[place] for place in pair] for pair in pairs]  # reference, candidate
        self._items = _numbered(self._texts.prompts)
        self._files: list[list[ItemKey]] = []

    @property
    def served(self) -> bool:
        """Whether checkpoints of the run gave the answers, so that they can be served again."""
        return self._data.spec.probe is None and JUDGED not in self._data.provenance

    def write(self, out: Path) -> None:
        """Write the pages into a folder, over an older view; raises RunError for one that holds anything else."""
        for path in _old_files(out):  # the page first: one that is half written is none
            path.unlink()
        self._files = []
        for number, (items, table) in enumerate(self._texts.chunks()):
            self._files.append(items)
            write_output(out / DATA / TEXTS.format(number), f"TEXTS[{number}] = {script(table)};\n")
        self.write_shades(out)
        for name in STATIC:
            write_output(out / name, (Path(__file__).parent / "static" / name).read_text(encoding="utf-8"))

    def write_shades(self, out: Path) -> None:
        """Write what lies beside the run of what the caches held, and the list that says where it does."""
        shaded = self._shaded()
        for number, items in enumerate(self._files):
            table = {self._items[item]: shaded[item].table() for item in items if item in shaded}
            if table:
                write_output(out / DATA / SHADES.format(number), f"SHADES[{number}] = {script(table)};\n")
        write_output(out / DATA / LIST, f"const VIEW = {script(self._table(shaded))};\n")

    def shaded_counts(self) -> tuple[int, int]:
        """Of how many flips is shown what their caches lost, and how many there are whose caches lost something."""
        codes = [self._lost(pair, shaded) for shaded in [self._shaded()] for pair in self._answers]
        return codes.count(1), codes.count(1) + codes.count(2)

    def missing_shades(self, number: int) -> dict[str, set[AnswerKey]]:
        """By unit, the answers of the first so many flips whose caches lost something, and of which it is not known."""
        lost = [n for n in in_turn(self.flips) if any(self._texts.shown[a].evicted for a in self._answers[n])]
        known: dict[str, Shadings] = {}
        found: dict[str, set[AnswerKey]] = {}
        for shown in (self._texts.shown[a] for n in lost[:number] for a in self._answers[n]):
            if shown.evicted and f"{shown.unit}.jsonl" not in self._data.incomplete:
                if shown.unit not in known:
                    known[shown.unit] = read_shadings(self._data.run, shown.unit)
                if shown.answer not in known[shown.unit]:
                    found.setdefault(shown.unit, set()).add(shown.answer)
        return found

    def _shaded(self) -> dict[ItemKey, ItemShades]:
        """What lies beside the run of the answers that are shown, by item."""
        known: dict[str, Shadings] = {}
        found: dict[ItemKey, ItemShades] = {}
        for number, shown in enumerate(self._texts.shown):
            if shown.evicted and shown.unit not in known:
                known[shown.unit] = read_shadings(self._data.run, shown.unit)
            if shown.evicted and shown.answer in known[shown.unit]:
                found.setdefault(shown.item, ItemShades()).add(number, known[shown.unit][shown.answer])
        return found

    def _table(self, shaded: Mapping[ItemKey, ItemShades]) -> dict[str, Any]:
        metrics = [SCORE, *(name for name in FACETS if any(m.endswith(f".{name}") for m in self._comparison.facets))]
        short, policies = self._comparison.labels, _numbered(self._comparison.policies)
        flips = self.flips
        arms, kinds = _numbered(flip.candidate.arm for flip in flips), _numbered(flip.kind for flip in flips)
        return {
            "run": {
                "name": visible(self._data.spec.name),
                "reference": visible(self._comparison.reference),
                "served": self.served,
                "path": visible(str(self._data.run)),
            },
            "arms": [visible(arm) for arm in arms],
            "kinds": list(kinds),
            "policies": [{"text": visible(policy), "short": visible(short[policy])} for policy in policies],
            "metrics": [_metric(name) for name in metrics],
            "lost": LOST,
            "items": self._item_columns(shaded),
            # by columns, which is smaller than by rows
            "flips": {
                "key": [flip_key(f.kind, f.suite, f.context_tokens, f.item, f.candidate) for f in flips],
                "kind": [kinds[flip.kind] for flip in flips],
                "arm": [arms[flip.candidate.arm] for flip in flips],
                "seed": [flip.candidate.seed for flip in flips],
                "policy": [policies[flip.candidate.policy] for flip in flips],
                "item": [self._items[flip.suite, flip.context_tokens, flip.item] for flip in flips],
                "changes": [
                    [(metrics.index(c.metric), _short(c.reference), _short(c.candidate)) for c in flip.changes]
                    for flip in flips
                ],
                "answers": self._answers,
                "lost": [self._lost(pair, shaded) for pair in self._answers],
            },
        }

    def _item_columns(self, shaded: Mapping[ItemKey, ItemShades]) -> dict[str, list[Any]]:
        told = self._texts.told
        return {
            "suite": [visible(suite) for suite, _, _ in self._items],
            "length": [length for _, length, _ in self._items],
            "name": [visible(name) for _, _, name in self._items],
            "template": [visible(told[item][0]) for item in self._items],
            "placement": [visible(told[item][1]) for item in self._items],
            "file": [number for number, items in enumerate(self._files) for _ in items],
            "shades": [int(any(item in shaded for item in items)) for items in self._files],  # of every file
        }

    def _lost(self, answers: Iterable[int], shaded: Mapping[ItemKey, ItemShades]) -> int:
        """Which of LOST holds for a flip."""
        lost = [answer for answer in answers if self._texts.shown[answer].evicted]
        seen = [(item := self._texts.shown[answer].item) in shaded and answer in shaded[item] for answer in lost]
        return 0 if not lost else 1 if all(seen) else 2


def _old_files(out: Path) -> list[Path]:
    """The files of an older view, its page first; raises RunError where a folder holds what no view has."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{str(out)!r} is no folder; give another --out")
    own = {out / name.removesuffix(PARTIAL) for name in STATIC}
    found: list[Path] = []
    strange: list[Path] = []
    for path in sorted(path for folder in (out, out / DATA) if folder.is_dir() for path in folder.iterdir()):
        name = path.name.removesuffix(PARTIAL)
        ours = path.parent / name in own or (path.parent == out / DATA and _DATA_FILE.fullmatch(name))
        if path != out / DATA:
            (found if ours and path.is_file() else strange).append(path)
    if strange:
        raise RunError(f"{str(strange[0])!r} is no part of a view, and none is written beside it; give another --out")
    return sorted(found, key=lambda path: path.suffix != ".html")


def _metric(name: str) -> dict[str, Any]:
    """A metric's name, what it says in words, and whether yes is the wanted answer; a score has no words."""
    if name == SCORE:
        return {"name": name, "says": "", "wanted": True}
    return {"name": name, "says": FACETS[name].says, "wanted": FACETS[name].wanted}


def _numbered(words: Iterable[T]) -> dict[T, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def _short(share: float) -> float | int:
    return int(share) if share in (0.0, 1.0) else round(share, _DIGITS)
