"""The spans of a prompt that decide an item: their names, and where their texts occur.

A suite gives the text of a span as it appears in the prompt or in a reply of its environment; positions are found
after the chat template has rendered it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SPANS: Mapping[str, str] = {  # the most decisive first
    "rule": "what demands or forbids",
    "order": "an order in what is read",
    "secret": "what is to be kept",
    "needle": "what the answer is found in",
    "question": "what is asked",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One important text under one of the names of SPANS; several of one name are one span with several places."""

    name: str
    text: str


def marked(**texts: str) -> tuple[Span, ...]:
    """Return the spans of an item by name, without empty texts."""
    return tuple(Span(name, text) for name, text in texts.items() if text.strip())


class Place(NamedTuple):
    """Characters ``start`` to ``end`` of a message, by its number."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A span of an answered item: its places, and the share of its tokens' entries kept when the last answer began."""

    share: float
    places: tuple[Place, ...]


def find_spans(spans: Iterable[Span], messages: Sequence[str]) -> dict[str, list[Place]]:
    """Return every place of each span's text without surrounding space, by name; a span that does not occur has none.

    A text that occurs twice has two places, as the model sees both.
    """
    places: dict[str, list[Place]] = {}
    for span in spans:
        pattern = re.escape(span.text.strip())
        for number, text in enumerate(messages if pattern else ()):
            for match in re.finditer(pattern, text):
                places.setdefault(span.name, []).append(Place(number, *match.span()))
    return places


def span_error(spans: Iterable[Span], messages: Sequence[str], *, may_come_later: bool) -> str | None:
    """Return what is wrong with the spans of an item, None if nothing is.

    ``may_come_later``: a span may occur in a reply of the environment instead of the prompt.
    """
    for span in spans:
        if span.name not in SPANS:
            return f"names a span {span.name[:40]!r}; known: {', '.join(SPANS)}"
        if not span.text.strip():
            return f"names a span {span.name!r} without text"
        if not may_come_later and not find_spans([span], messages):
            return f"names a span {span.name!r} whose text is not in the prompt: {span.text[:60]!r}"
    return None
