"""Flips -> a folder of static pages: one script reads data files that assign constants, since file:// fetches nothing.

index.html, view.css, view.js   the same for every run: no text of a run stands in markup
data/flips.js                   the list: a column per field, words by number
data/texts-<n>.js               prompts and answers of some items, read when one of them is opened
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from audit.core.errors import DataError, RunError
from audit.core.facets import FACETS
from audit.core.files import PARTIAL, write_output
from audit.core.policy_names import short_names
from audit.core.provenance import JUDGED
from audit.core.records import Message, Record, Role
from audit.core.text import visible
from reports.drift.comparison import Comparison
from reports.records.load import RunData
from reports.view.flips import SCORE, Flip, Place, flips_of, places_of

STATIC = ("view.css", "view.js", "index.html")  # the page last: where it stands the rest is there
DATA, LIST, TEXTS = "data", "flips.js", "texts-{}.js"
_DATA_FILE = re.compile(r"flips\.js|texts-\d+\.js")
CHUNK = 300_000  # characters of one file of texts
_DIGITS = 4  # of shares: more than a page shows

T = TypeVar("T")
Item = tuple[str, int, str]  # suite, length, name


@dataclass
class _Texts:
    """What the records behind the flips say: the prompt of every item once, and every answer once."""

    prompts: dict[Item, tuple[Message, ...]] = field(default_factory=dict)
    told: dict[Item, tuple[str, str]] = field(default_factory=dict)  # template and placement
    answers: dict[Item, dict[int, dict[str, Any]]] = field(default_factory=dict)
    numbers: dict[Place, int] = field(default_factory=dict)

    def add(self, place: Place, record: Record) -> None:
        item = (record.suite, record.context_tokens, record.item_id)
        asked = tuple(takewhile(lambda message: message.role is not Role.ASSISTANT, record.transcript))
        prompt = self.prompts.setdefault(item, asked)
        self.told.setdefault(item, (record.cluster_id, record.placement))
        # one that was asked something else is shown whole
        said = record.transcript[len(prompt) :] if asked == prompt else record.transcript
        number = self.numbers[place] = len(self.numbers)
        self.answers.setdefault(item, {})[number] = _answer(record, said)

    def every_answer(self) -> Iterator[dict[str, Any]]:
        return (answer for own in self.answers.values() for answer in own.values())


def write_view(data: RunData, comparison: Comparison, out: Path) -> list[Flip]:
    """Write the pages of a run into a folder, over an older view of it; returns the flips they show.

    Raises RunError for a folder that holds anything else, DataError for a run without flips or without transcripts.
    """
    old = _old_files(out)
    flips = list(flips_of(data, comparison))
    if not flips:
        raise DataError(
            f"{str(data.run)!r}: no item differs between two sides that are compared; there is nothing to see"
        )
    pairs = places_of(data, flips)
    texts = _Texts()
    for place, record in data.records_at(dict.fromkeys(place for pair in pairs for place in pair)):
        texts.add(place, record)
    if not any(texts.prompts.values()) and not any(answer["turns"] for answer in texts.every_answer()):
        raise DataError(f"{str(data.run)!r} holds no transcripts, so there is nothing to see; evaluate it again")
    for path in old:  # the page first: one that is half written is none
        path.unlink()
    chunks = _write_texts(texts, out)
    answers = [[texts.numbers[place] for place in pair] for pair in pairs]
    table = _table(data, comparison, flips, answers, texts, chunks)
    write_output(out / DATA / LIST, f"const VIEW = {_script(table)};\n")
    for name in STATIC:
        write_output(out / name, (Path(__file__).parent / "page" / name).read_text(encoding="utf-8"))
    return flips


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


def _write_texts(texts: _Texts, out: Path) -> list[int]:
    """Write prompts and answers, a file for so many items in order; returns the file of every item."""
    files: list[int] = []
    chunk: list[str] = []
    last = len(texts.prompts) - 1
    for number, (item, prompt) in enumerate(texts.prompts.items()):
        chunk.append(f"{number}:{_script({'prompt': _turns(prompt), 'answers': texts.answers[item]})}")
        files.append(name := files[-1] + (len(chunk) == 1) if files else 0)
        if number == last or sum(map(len, chunk)) >= CHUNK:
            write_output(out / DATA / TEXTS.format(name), f"TEXTS[{name}] = {{{','.join(chunk)}}};\n")
            chunk = []
    return files


def _answer(record: Record, said: Sequence[Message]) -> dict[str, Any]:
    """What a page shows of one record."""
    return {
        "arm": visible(record.arm),
        "seed": record.train_seed,
        "policy": visible(record.policy),
        "checkpoint": visible(record.checkpoint),
        "outcome": record.outcome.value,
        "score": record.score,
        "facets": dict(record.facets),
        "judge": visible(record.judge),
        "draw": record.sample_index,
        "finish": visible(record.finish_reason),
        "tokens": [record.prompt_tokens, record.new_tokens],
        "retention": round(record.retention, _DIGITS),
        "survival": {visible(role): round(share, _DIGITS) for role, share in record.survival.items()},
        "bytes": [record.kv_bytes_peak, record.kv_bytes_dense],
        "turns": _turns(said),
    }


def _turns(messages: Iterable[Message]) -> list[tuple[str, str]]:
    return [(message.role.value, visible(message.content)) for message in messages]


def _table(
    data: RunData,
    comparison: Comparison,
    flips: Sequence[Flip],
    answers: Sequence[Sequence[int]],
    texts: _Texts,
    chunks: Sequence[int],
) -> dict[str, Any]:
    """The list: words once, then a column of numbers per field of the items and of the flips."""
    metrics = [SCORE, *(name for name in FACETS if any(m.endswith(f".{name}") for m in comparison.facets))]
    short, policies = short_names(comparison.policies), _numbered(comparison.policies)
    arms, kinds = _numbered(flip.candidate.arm for flip in flips), _numbered(flip.kind for flip in flips)
    items = _numbered(texts.prompts)
    # `kvaudit explain` needs the checkpoints that gave the answers
    served = data.spec.probe is None and JUDGED not in data.provenance
    return {
        "run": {
            "name": visible(data.spec.name),
            "reference": visible(comparison.reference),
            "served": served,
            "path": visible(str(data.run)),
        },
        "arms": [visible(arm) for arm in arms],
        "kinds": list(kinds),
        "policies": [{"text": visible(policy), "short": visible(short[policy])} for policy in policies],
        "metrics": [_metric(name) for name in metrics],
        "items": {
            "suite": [visible(suite) for suite, _, _ in items],
            "length": [length for _, length, _ in items],
            "name": [visible(name) for _, _, name in items],
            "template": [visible(texts.told[item][0]) for item in items],
            "placement": [visible(texts.told[item][1]) for item in items],
            "file": list(chunks),
        },
        "flips": {
            "key": list(map(_key, flips)),
            "kind": [kinds[flip.kind] for flip in flips],
            "arm": [arms[flip.candidate.arm] for flip in flips],
            "seed": [flip.candidate.seed for flip in flips],
            "policy": [policies[flip.candidate.policy] for flip in flips],
            "item": [items[flip.suite, flip.context_tokens, flip.item] for flip in flips],
            "changes": [
                [(metrics.index(c.metric), _short(c.reference), _short(c.candidate)) for c in flip.changes]
                for flip in flips
            ],
            "answers": list(answers),  # reference, candidate
        },
    }


def _metric(name: str) -> dict[str, Any]:
    """A metric's name, what it says in words, and whether yes is the wanted answer; a score has no words."""
    if name == SCORE:
        return {"name": name, "says": "", "wanted": True}
    return {"name": name, "says": FACETS[name].says, "wanted": FACETS[name].wanted}


def _key(flip: Flip) -> str:
    """What a link names a flip by; the same in every view of a run."""
    where = (flip.kind, flip.suite, flip.context_tokens, flip.item, *flip.candidate)
    return hashlib.sha256(json.dumps(where).encode()).hexdigest()[:10]


def _script(value: Any) -> str:
    """JSON that stays data in any script: no markup begins or ends in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _numbered(words: Iterable[T]) -> dict[T, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def _short(share: float) -> float | int:
    return int(share) if share in (0.0, 1.0) else round(share, _DIGITS)
