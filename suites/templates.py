"""Compositional templates: every phrase occurs in training, the evaluation's combinations of phrases never do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from kvaudit.core.errors import SpecError
from kvaudit.suites.base import Split


class Template(NamedTuple):
    """One combination of three phrase choices; the shared origin of the items made from it."""

    cluster_id: str
    first: int
    second: int
    third: int


@cache
def templates(suite: str, sizes: tuple[int, int, int], split: Split) -> tuple[Template, ...]:
    """The split's combinations: indices that sum to a multiple of three are for evaluation, the rest for training.

    Every pair of phrases therefore occurs in training as soon as the remaining factor has three values.
    """
    if split not in ("train", "eval"):
        raise SpecError(f"unknown split {split!r}; wanted train or eval")
    chosen = []
    for first in range(sizes[0]):
        for second in range(sizes[1]):
            for third in range(sizes[2]):
                if ((first + second + third) % 3 == 0) == (split == "eval"):
                    chosen.append(Template(f"{suite}-{first}-{second}-{third}", first, second, third))
    return tuple(chosen)


class Place(NamedTuple):
    """Where an item stands in the round robin over clusters and their variants."""

    number: int  # of the cluster
    variant: int  # which twin of its group
    group: int  # twins of one group share every random draw
    turn: int  # rotates over placements, the same within a group


def place(index: int, clusters: int, variants: int) -> Place:
    """The place of item ``index``: clusters first, then variants; ``variants`` rounds give every twin of each."""
    round_, number = divmod(index, clusters)
    group = round_ // variants
    # neighbouring clusters begin with different twins, so that few items already hold every kind
    return Place(number, (number + round_) % variants, group, number // variants + group)


class Slot(NamedTuple):
    """The place of an item made from a template."""

    template: Template
    variant: int
    group: int
    turn: int


def slot(index: int, pool: tuple[Template, ...], variants: int) -> Slot:
    """The place of item ``index`` among the items made from ``pool``."""
    number, *rest = place(index, len(pool), variants)
    return Slot(pool[number], *rest)


def in_turn(order: Sequence[int], clusters: Sequence[str]) -> list[int]:
    """Rows in this order, but every cluster once before any comes again; ``clusters`` has the one of each row."""
    visits, turn = Counter[str](), {}
    for number in order:
        turn[number] = visits[clusters[number]]
        visits[clusters[number]] += 1
    return sorted(order, key=turn.__getitem__)
