"""Compositional templates: every phrase occurs in training, the evaluation's combinations of phrases never do."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from kvaudit.core.errors import SpecError
from kvaudit.core.records import Item, Message, Role
from kvaudit.core.spans import Span
from kvaudit.suites.base import CountTokens, Split, Suite
from kvaudit.suites.haystack import fit
from kvaudit.suites.published import rows_of_split


class Template(NamedTuple):
    """One combination of three phrase choices; the shared origin of the items made from it."""

    cluster_id: str
    first: int
    second: int
    third: int


def text_bank(module: str) -> list[list[list[str]]]:
    """The .txt file of a module: sections, which begin with a line of #, of blocks between blank lines, of lines."""
    sections = re.split(r"(?m)^#.*\n", Path(module).with_suffix(".txt").read_text(encoding="utf-8"))[1:]
    return [[block.splitlines() for block in section.strip().split("\n\n")] for section in sections]


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
    """What an item is made from. Twins share ``origin`` and all draws; ``variant`` is which of them it is."""

    template: Template
    variant: int
    origin: str
    draws: str  # what random draws are seeded with
    placement: str
    context_tokens: int
    count_tokens: CountTokens
    pool: Sequence[Template]  # all of the split


class Templated(Suite):
    """Items of templates, as many as are asked for; subclass, and write ``make_item`` and ``phrases``, or ``pool``."""

    source = "procedural, written for this project"
    licence = "Apache-2.0"
    phrases: ClassVar[tuple[int, int, int]]  # how many there are of each of the three kinds

    def pool(self, split: Split, seed: int) -> Sequence[Template]:  # noqa: ARG002 - phrases come in one order
        """The templates of a split, in the order in which they are visited."""
        return templates(self.name, self.phrases, split)

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        return [self.item(split, index, seed, context_tokens, count_tokens) for index in range(n)]

    def item(self, split: Split, index: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> Item:
        """Item number ``index`` of the stream."""
        pool = self.pool(split, seed)
        number, variant, group, turn = place(index, len(pool), self.twins)
        origin = f"{pool[number].cluster_id}-s{seed}-t{context_tokens}-g{group}"
        placement = self.placements[turn % len(self.placements)]
        fit = context_tokens, count_tokens
        return self.make_item(Slot(pool[number], variant, origin, f"{split}-{origin}", placement, *fit, pool))

    def make_item(self, slot: Slot) -> Item:
        """The item of a slot."""
        raise NotImplementedError

    def fitted(
        self,
        slot: Slot,
        twin: str,
        build: Callable[[Sequence[str]], Sequence[str]],
        draw: random.Random,
        payload: Mapping[str, Any],
        spans: tuple[Span, ...],
    ) -> Item:
        """The item whose system and user message ``build`` makes of filler lines: see ``fit``."""
        system, user = fit(build, draw, slot.context_tokens, slot.count_tokens)
        return Item(
            self.name,
            f"{slot.origin}-{twin}" if twin else slot.origin,
            slot.template.cluster_id,
            (Message(Role.SYSTEM, system), Message(Role.USER, user)),
            slot.context_tokens,
            slot.placement,
            payload,
            spans,
        )


@cache
def bank_templates(suite: str, size: int, split: Split, seed: int) -> tuple[Template, ...]:
    """The entries of a bank of ``size`` that belong to a split, each a template of its own, shuffled."""
    pool = [Template(f"{suite}-{number}", number, 0, 0) for number in rows_of_split(range(size), split)]
    random.Random(f"{suite}-{split}-{seed}").shuffle(pool)
    return tuple(pool)


def interleave_clusters(order: Sequence[int], clusters: Sequence[str]) -> list[int]:
    """Rows in this order, but every cluster once before any comes again; ``clusters`` has the one of each row."""
    visits, turn = Counter[str](), {}
    for number in order:
        turn[number] = visits[clusters[number]]
        visits[clusters[number]] += 1
    return sorted(order, key=turn.__getitem__)
