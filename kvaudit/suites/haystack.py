"""Procedural filler text of an exact length from a small vocabulary, and needles inserted into it.

The vocabulary is small enough that a model of a million parameters can learn every word.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvaudit.core.errors import SpecError
from kvaudit.suites.base import CountTokens

PLACEMENTS = ("system", "start", "middle", "end")
_MAX_MISSES = 24  # tries at a last line that still fits


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CLERKS = _split("adam beth clara david edith frank gina henry")  # only in filler: no rule or order names them
PEOPLE = _split(
    "anna bob carl dora emil fay gus hana ivan jane kurt lena mark nora omar paul rosa sam tina uma vera zed"
)
ANIMALS = _split(
    "bear wolf fox owl crow hawk lion tiger deer goat horse sheep whale seal shark frog toad snake eagle robin "
    "mouse rabbit otter badger camel zebra panda koala beaver moose lynx duck"
)
SECRET_CODES = _split(
    "amber ruby jade pearl coral ivory olive lemon mint plum cherry maple cedar birch willow lotus rose iris lily "
    "daisy river lake ocean island desert canyon valley forest storm thunder snow frost"
)
NOUNS = _split(
    "lamp table chair window carpet clock kettle basket ladder bucket hammer mirror blanket candle bottle pillow "
    "shelf broom drawer curtain"
)
VERBS = _split("moved cleaned counted painted checked fixed sold found bought lost")
STATES = _split("old clean broken heavy empty new late ready wet warm")
PLACES = _split("hall yard shop barn attic garage office kitchen")


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
    """Return distinct lines that take at most ``room`` tokens, with line breaks, and fall short by less than a line.

    Lines of a kind (such as log lines or tickets) come in runs, as in real files. Raises SpecError if the vocabulary
    allows no further line.
    """
    lines: list[str] = []
    seen: set[str] = set()
    misses = repeats = 0
    kind = draw.choice(_KINDS)
    while misses < _MAX_MISSES and room > 0:
        if draw.random() < 0.25:  # runs of four lines on average
            kind = draw.choice(_KINDS)
        line = kind(draw)
        if line in seen:
            repeats += 1
            if repeats > 10_000:
                raise SpecError(f"the filler vocabulary has no new line after {len(lines)}; use a shorter context")
            continue
        cost = count_tokens(line + "\n")
        if cost > room:
            misses += 1
            continue
        repeats, room = 0, room - cost
        seen.add(line)
        lines.append(line)
    return lines


def scatter(draw: random.Random, lines: Sequence[str], needles: Sequence[str]) -> list[str]:
    """Return ``lines`` with ``needles`` inserted at random places, without changing the order of either."""
    places = sorted(draw.randrange(len(lines) + 1) for _ in needles)
    mixed_lines = list(lines)
    # from the end, so that earlier places stay valid
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        mixed_lines.insert(place, needle)
    return mixed_lines


def insert_at(lines: Sequence[str], needles: Sequence[str], placement: str) -> list[str]:
    """Return ``lines`` with ``needles`` inserted together at the start, middle or end (``placement``).

    Placement "system" inserts nothing, because the needles are in the system prompt then.
    """
    if placement == "system":
        return list(lines)
    position = {"start": 0, "middle": len(lines) // 2, "end": len(lines)}[placement]
    return [*lines[:position], *needles, *lines[position:]]


def weave(
    seed: str | float, lines: Sequence[str], facts: Sequence[str], needles: Sequence[str], placement: str
) -> list[str]:
    """Return ``lines`` with ``facts`` at random places among them, and ``needles`` inserted at ``placement``.

    ``placement`` is as in ``insert_at``. The same ``seed`` gives the same places.
    """
    return insert_at(scatter(random.Random(seed), lines, facts), needles, placement)


def check_room(item_tokens: int, context_tokens: int) -> int:
    """Return the tokens left for a context around an item; raises SpecError if the item alone is too long."""
    if item_tokens > context_tokens:
        raise SpecError(f"context_tokens {context_tokens} is too short: an item alone takes {item_tokens}; raise it")
    return context_tokens - item_tokens


def fit(
    build: Callable[[Sequence[str]], Sequence[str]], draw: random.Random, context_tokens: int, count_tokens: CountTokens
) -> list[str]:
    """Return ``build(lines)``, the texts of an item, with filler lines until they have ``context_tokens`` tokens.

    They never have more tokens, and fall short by less than a line (plus a token or two if the tokenizer merges across
    line ends). ``build`` must be pure. Raises SpecError if ``build([])`` already has more tokens.
    """

    def total(lines: Sequence[str]) -> int:
        return sum(count_tokens(text) for text in build(lines))

    lines = filler_lines(draw, check_room(total([]), context_tokens), count_tokens)
    while total(lines) > context_tokens:  # joined lines may take more tokens than the sum of their counts
        lines = lines[:-1]
    return list(build(lines))
