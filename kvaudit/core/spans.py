"""The spans of a prompt (texts that decide an item), and how many heads held each token when the answer began.

A suite gives the text of a span as it appears in the prompt or in a reply of its environment; its positions are
searched after the chat template has rendered the prompt. On request an answer is served again, to see which tokens the
cache held when the answer began. What is found is called the answer's shading and stored next to the run's records:

    shading/<unit>.json   the re-served answers of one unit, with the sha256 of its records
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json, write_json
from kvaudit.core.provenance import seal_path

SPANS: Mapping[str, str] = {  # the most decisive first
    "rule": "what demands or forbids",
    "order": "an order in what is read",
    "secret": "what is to be kept",
    "needle": "what the answer is found in",
    "question": "what is asked",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A text that decides an item, such as a rule or a secret; ``name`` is one of SPANS.

    Several texts of one name count as one span with several places.
    """

    name: str
    text: str


def mark_spans(**texts: str) -> tuple[Span, ...]:
    """Return a ``Span`` (text that decides an item, such as a rule) for each NAME=text; empty texts are dropped."""
    return tuple(Span(name, text) for name, text in texts.items() if text.strip())


class Place(NamedTuple):
    """The characters from ``start`` up to, not including, ``end`` of message number ``message``."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A span of an answered item: its places, and the share of its cache entries left when the last answer began."""

    share: float
    places: tuple[Place, ...]


def find_spans(spans: Iterable[Span], messages: Sequence[str]) -> dict[str, list[Place]]:
    """Return where the texts of spans (texts that decide an item) occur in the messages: {name of the span: places}.

    Every occurrence counts as a place, since the model sees them all. White space at the ends of a text is ignored.
    Names without an occurrence are left out.
    """
    places: dict[str, list[Place]] = {}
    for span in spans:
        pattern = re.escape(span.text.strip())
        for number, text in enumerate(messages if pattern else ()):
            for match in re.finditer(pattern, text):
                places.setdefault(span.name, []).append(Place(number, *match.span()))
    return places


def span_error(spans: Iterable[Span], messages: Sequence[str], *, may_come_later: bool) -> str | None:
    """Return what is wrong with an item's spans (texts that decide it), as the end of a sentence; None if nothing is.

    ``messages`` are the texts of the prompt. With ``may_come_later`` a span need not occur there, since it may occur in
    a later reply of the environment.
    """
    for span in spans:
        if span.name not in SPANS:
            return f"names a span {span.name[:40]!r}; known: {', '.join(SPANS)}"
        if not span.text.strip():
            return f"names a span {span.name!r} without text"
        if not may_come_later and not find_spans([span], messages):
            return f"names a span {span.name!r} whose text is not in the prompt: {span.text[:60]!r}"
    return None


SHADING_FOLDER = "shading"
ALL_TOKENS = "all tokens"  # a key of ``depth``, besides the names of marked spans


class AnswerKey(NamedTuple):
    """The key of one recorded answer within a unit (a file of records): item id and sample number."""

    item: str
    sample: int


@dataclass(frozen=True)
class Shading:
    """The tokens before the last answer of one conversation, and how many heads still held each when the answer began.

    For each token, ``pieces`` has its text, ``roles`` the role of its message, and ``held`` the number of heads that
    held it; ``heads`` is the number of all heads (layers x KV heads). ``marks`` maps each marked span to its token
    numbers. ``depth`` maps ALL_TOKENS and each marked span to a list: the share of its entries held, for each layer.
    """

    pieces: list[str]
    roles: list[str]
    held: list[int]
    heads: int
    depth: dict[str, list[float]]
    marks: dict[str, list[int]]


Shadings = dict[AnswerKey, Shading | None]  # None: serving it again gave another answer


def shading_file(run: Path, unit: str) -> Path:
    """Return the path of a unit's shading file, which says what prompt tokens the cache still held."""
    return run / SHADING_FOLDER / f"{unit}.json"


def read_shadings(run: Path, unit: str) -> Shadings:
    """Return a unit's shadings, {answer: which prompt tokens the cache still held}, from its shading file.

    The value is None for an answer that came out differently when it was served again. The result is {} if there is no
    such file, or if the unit's records have changed since. Raises DataError for a damaged file.
    """
    path = shading_file(run, unit)
    if not path.exists():
        return {}
    content = read_json(path)
    rows = content.get("answers")
    if not isinstance(rows, list) or content.get("sha256") != _digest(rows):
        raise DataError(f"{str(path)!r} is not as it was written; delete it to serve its answers again")
    if content.get("records") != records_sha256(run, unit):
        return {}
    return {AnswerKey(row["item"], row["sample"]): row["shading"] and Shading(**row["shading"]) for row in rows}


def write_shadings(run: Path, unit: str, shadings: Mapping[AnswerKey, Shading | None]) -> None:
    """Write a unit's shading file, atomically: which prompt tokens the cache still held, for each answer.

    Raises RunError if that fails.
    """
    rows = [{**answer._asdict(), "shading": shading and asdict(shading)} for answer, shading in shadings.items()]
    path = shading_file(run, unit)
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"records": records_sha256(run, unit), "sha256": _digest(rows), "answers": rows}, indent=None)
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r} ({error.strerror}); make the run's folder writable, or leave shading out: "
            "--shade 0"
        ) from None


def records_sha256(run: Path, unit: str) -> str:
    """Return the sha256 that the seal of a unit's records states; raises DataError if the unit is not finished."""
    return str(read_json(seal_path(run / "records" / f"{unit}.jsonl")).get("sha256"))


def _digest(rows: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
