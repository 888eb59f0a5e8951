"""Procedural filler of an exact length, with needles placed in it: logs, tickets, mail and tables, no line twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvaudit.core.errors import SpecError
from kvaudit.suites.base import CountTokens
from kvaudit.suites.haystack import CLERKS, NOUNS, PLACES, STATES, VERBS

PLACEMENTS = ("system", "start", "middle", "end")
_PATIENCE = 24  # tries at a last line that still fits the room left


def _log(draw: random.Random) -> str:
    return f"Log: {draw.choice(CLERKS)} {draw.choice(VERBS)} the {draw.choice(STATES)} {draw.choice(NOUNS)}."


def _ticket(draw: random.Random) -> str:
    number = "".join(draw.choice("0123456789") for _ in range(3))
    return f"Ticket {number}: the {draw.choice(NOUNS)} in the {draw.choice(PLACES)} is {draw.choice(STATES)}."


def _mail(draw: random.Random) -> str:
    return f"Mail to {draw.choice(CLERKS)}: {draw.choice(CLERKS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)}."


def _table(draw: random.Random) -> str:
    return f"| {draw.choice(PLACES)} | {draw.choice(NOUNS)} | {draw.choice(STATES)} | {draw.randrange(10)} |"


_KINDS: tuple[Callable[[random.Random], str], ...] = (_log, _ticket, _mail, _table)


def filler_lines(draw: random.Random, room: int, count_tokens: CountTokens) -> list[str]:
    """Distinct lines that with their line breaks take at most ``room`` tokens, short of it by less than one line.

    The kinds come in runs, as in real files. Raises SpecError when the vocabulary has no new line left.
    """
    lines: list[str] = []
    seen: set[str] = set()
    misses = stale = 0
    kind = draw.choice(_KINDS)
    while misses < _PATIENCE and room > 0:
        if draw.random() < 0.25:  # runs of four lines on an average
            kind = draw.choice(_KINDS)
        line = kind(draw)
        if line in seen:
            stale += 1
            if stale > 10_000:
                raise SpecError(f"haystack: no new line after {len(lines)}; ask for a shorter context")
            continue
        cost = count_tokens(line + "\n")
        if cost > room:
            misses += 1
            continue
        stale, room = 0, room - cost
        seen.add(line)
        lines.append(line)
    return lines


def scatter(draw: random.Random, lines: Sequence[str], needles: Sequence[str]) -> list[str]:
    """``lines`` in their order with ``needles`` in theirs, at uniformly drawn places."""
    places = sorted(draw.randrange(len(lines) + 1) for _ in needles)
    woven = list(lines)
    # the last first, so that the places before it stay where they are
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        woven.insert(place, needle)
    return woven


def insert_at(lines: Sequence[str], needle: str, placement: str) -> list[str]:
    """``lines`` with ``needle`` first, halfway or last; a system placement is not in the haystack at all."""
    if placement == "system":
        return list(lines)
    position = {"start": 0, "middle": len(lines) // 2, "end": len(lines)}[placement]
    return [*lines[:position], needle, *lines[position:]]


def fit(
    build: Callable[[Sequence[str]], Sequence[str]], draw: random.Random, context_tokens: int, count_tokens: CountTokens
) -> list[str]:
    """The texts that ``build(filler lines)`` gives when the filler makes them take ``context_tokens`` together.

    ``build`` must be pure. Never longer than asked, shorter by less than one line and a token or two for tokenizers
    that merge across line ends. Raises SpecError when the texts alone are too long.
    """

    def total(lines: Sequence[str]) -> int:
        return sum(count_tokens(text) for text in build(lines))

    bare = total([])
    if bare > context_tokens:
        raise SpecError(
            f"context_tokens {context_tokens} is too short: this item alone takes {bare}; ask for {bare} or more"
        )
    lines = filler_lines(draw, context_tokens - bare, count_tokens)
    while total(lines) > context_tokens:  # texts together may take more than the sum of their lines
        lines = lines[:-1]
    return list(build(lines))
