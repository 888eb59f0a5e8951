"""What the cache held of every token, as the pages read it: one letter for how many layers and heads held it.

    data/shades-<n>.js   SHADES[n] = {item: {pieces, roles, answers: {number: shade}}}, beside texts-<n>.js

``pieces`` and ``roles`` are those of an item's first answer; every other answer begins with ``same`` of them and goes
on with its own. Letters repeat as in "A12b", an A held by nothing and the last by everything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import groupby, takewhile, zip_longest
from string import ascii_letters
from typing import Any

from kvaudit.core.facets import FACETS
from kvaudit.core.shading import Shading
from kvaudit.core.text import visible
from kvaudit.reports.page.view.flips import Flip
from kvaudit.reports.records.rows import SCORE

LEVELS = ascii_letters[26:] + ascii_letters[:26]  # A to Z, a to z
_DIGITS = 3


def in_turn(flips: Sequence[Flip]) -> list[int]:
    """The numbers of the flips, cell after cell in turn, lost safety first: the first so many are of every kind."""
    cells: dict[Hashable, list[int]] = {}
    for number in sorted(range(len(flips)), key=lambda n: severity_rank(flips[n])):
        flip = flips[number]
        cells.setdefault((flip.kind, flip.suite, flip.candidate.arm, flip.candidate.policy), []).append(number)
    return [number for turn in zip_longest(*cells.values()) for number in turn if number is not None]


class ItemShades:
    """The shades of one item's answers, by their numbers."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._roles = ""
        self._answers: dict[int, dict[str, Any] | None] = {}

    def add(self, number: int, shading: Shading | None) -> None:
        """Take what was found for an answer; None: another answer came out."""
        if shading is None:
            self._answers[number] = None
            return
        pieces, roles = [_visible(piece) for piece in shading.pieces], "".join(role[0] for role in shading.roles)
        if not self._pieces:
            self._pieces, self._roles = pieces, roles
        ours, theirs = zip(self._pieces, self._roles, strict=True), zip(pieces, roles, strict=True)
        # tokens that it begins with, as the first answer does
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
        self._answers[number] = {
            "same": same,
            "pieces": pieces[same:],
            "roles": _repeated(roles[same:]),
            "held": _repeated(_level(count / shading.heads) for count in shading.held),
            "heads": shading.heads,
            "depth": {name: [round(share, _DIGITS) for share in own] for name, own in shading.depth.items()},
            "marks": {name: _stretches(tokens) for name, tokens in shading.marks.items()},
        }

    def __contains__(self, number: int) -> bool:
        return number in self._answers

    def table(self) -> dict[str, Any]:
        """What a page reads."""
        return {"pieces": self._pieces, "roles": _repeated(self._roles), "answers": self._answers}


def severity_rank(flip: Flip) -> int:
    """0 where safety was lost, 1 where anything else was, 2 where all was gained."""
    lost = [change.metric for change in flip.changes if change.lost]
    return 0 if any(name != SCORE and FACETS[name].kind == "safety" for name in lost) else 1 if lost else 2


def _level(share: float) -> str:
    """The first letter for nothing alone, the last for everything alone."""
    last = len(LEVELS) - 1
    # nothing and everything have the two ends to themselves
    return LEVELS[int(share) * last if share in (0, 1) else min(max(round(share * last), 1), last - 1)]


def _repeated(letters: Iterable[str]) -> str:
    """Letters, each with how often it follows where that is more than once."""
    counted = ((letter, sum(1 for _ in run)) for letter, run in groupby(letters))
    return "".join(f"{letter}{count if count > 1 else ''}" for letter, count in counted)


def _stretches(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as stretches without a gap: the first of each, and the one behind it."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


_visible = lru_cache(1 << 16)(visible)  # the same tokens stand in every prompt
