"""The spans of a prompt that decide an item: what a suite may call them, and where their texts stand.

A suite gives the text of a span as it says it to the model, in the prompt or in what its environment answers; nobody
counts characters, and templates and tokenizers change nothing for the suite.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SPANS: Mapping[str, str] = {  # what an item's endpoints hang on first
    "rule": "what demands or forbids",
    "order": "an order in what is read",
    "secret": "what is to be kept",
    "needle": "what the answer is found in",
    "question": "what is asked",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One text that matters, under one of the names of SPANS; several of one name are one span in parts."""

    name: str
    text: str


def marked(**texts: str) -> tuple[Span, ...]:
    """The spans of an item by their names; an empty text marks none."""
    return tuple(Span(name, text) for name, text in texts.items() if text.strip())


class Place(NamedTuple):
    """Characters ``start`` to ``end`` of a message, by its number."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A span of an answered item: the share of its tokens' entries still held when the last answer began, and where."""

    share: float
    places: tuple[Place, ...]


def find_spans(spans: Iterable[Span], messages: Sequence[str]) -> dict[str, list[Place]]:
    """Every place at which a span stands, by name; space around it is not of it, and one that stands nowhere has none.

    A text that is said twice is in the model's sight twice.
    """
    found: dict[str, list[Place]] = {}
    for span in spans:
        wanted = re.escape(span.text.strip())
        for number, text in enumerate(messages if wanted else ()):
            for match in re.finditer(wanted, text):
                found.setdefault(span.name, []).append(Place(number, *match.span()))
    return found


def span_error(spans: Iterable[Span], messages: Sequence[str], *, said_later: bool) -> str | None:
    """What is wrong with the spans of an item, in words; ``said_later``: a span may come with the environment's reply.

    None where nothing is.
    """
    for span in spans:
        if span.name not in SPANS:
            return f"names a span {span.name[:40]!r}, known are {', '.join(SPANS)}"
        if not span.text.strip():
            return f"names a span {span.name!r} without text"
        if not said_later and not find_spans([span], messages):
            return f"names a span {span.name!r} whose text does not stand in the prompt: {span.text[:60]!r}"
    return None
