"""The base class of procedural suites; training has all phrases, but no combination of them that evaluation uses."""

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
from kvaudit.suites.base import CountTokens, Split, Suite, rows_of_split
from kvaudit.suites.haystack import fit


class Template(NamedTuple):
    """A combination of three phrases, given by their indices; the items made from it are one cluster."""

    cluster_id: str
    first: int
    second: int
    third: int


def text_bank(module: str) -> list[list[list[str]]]:
    """Return the .txt file next to a module as sections, each a list of blocks, each a list of lines.

    A line that begins with # starts a section, and a blank line starts a block.
    """
    sections = re.split(r"(?m)^#.*\n", Path(module).with_suffix(".txt").read_text(encoding="utf-8"))[1:]
    return [[block.splitlines() for block in section.strip().split("\n\n")] for section in sections]


@cache
def templates(suite: str, sizes: tuple[int, int, int], split: Split) -> tuple[Template, ...]:
    """Return a split's templates (combinations of three phrases): a third is for evaluation, all others for training.

    If the sum of a template's phrase indices is divisible by three, it is for evaluation. ``sizes`` are the numbers of
    choices for the three phrases. If each is at least three, every pair of phrases occurs in training.
    """
    if split not in ("train", "eval"):
        raise SpecError(f"unknown split {split!r}; expected train or eval")
    chosen = []
    for first in range(sizes[0]):
        for second in range(sizes[1]):
            for third in range(sizes[2]):
                if ((first + second + third) % 3 == 0) == (split == "eval"):
                    chosen.append(Template(f"{suite}-{first}-{second}-{third}", first, second, third))
    return tuple(chosen)


class Slot(NamedTuple):
    """The inputs from which ``make_item`` makes one item: template, variant, length, seed and others.

    ``variant`` says which of the twins (items that share wording but have different right answers) is made. Twins share
    ``draws``, the seed of random draws, and ``origin``, the beginning of their ids. ``placement`` says where the
    decisive text is put.
    """

    template: Template
    variant: int
    origin: str
    draws: str  # seed of the item's random draws
    placement: str
    context_tokens: int
    count_tokens: CountTokens
    pool: Sequence[Template]  # all templates of the split


class Templated(Suite):
    """The base of suites that make items from templates; define ``make_item``, and ``phrases`` or ``pool``.

    ``phrases`` are the numbers of choices for the three phrases of a template.
    """

    source = "procedural, written for this project"
    licence = "Apache-2.0"
    phrases: ClassVar[tuple[int, int, int]]  # how many phrases each part of a template has

    def pool(self, split: Split, seed: int) -> Sequence[Template]:  # noqa: ARG002 - the default order is fixed
        """Return the templates of a split in the order in which items use them."""
        return templates(self.name, self.phrases, split)

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        return [self.item(split, index, seed, context_tokens, count_tokens) for index in range(n)]

    def item(self, split: Split, index: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> Item:
        """Return item ``index`` of the suite's endless sequence.

        Each cluster gives one item before any gives its next.
        """
        pool = self.pool(split, seed)
        round_, number = divmod(index, len(pool))
        group = round_ // self.twins  # twins of a group share all random draws and the placement
        # neighbouring clusters start with different twins, so that a few items already include every kind
        variant = (number + round_) % self.twins
        placement = self.placements[(number // self.twins + group) % len(self.placements)]
        origin = f"{pool[number].cluster_id}-s{seed}-t{context_tokens}-g{group}"
        length = context_tokens, count_tokens
        return self.make_item(Slot(pool[number], variant, origin, f"{split}-{origin}", placement, *length, pool))

    def make_item(self, slot: Slot) -> Item:
        """Make an item from a slot (template, variant, length, seed)."""
        raise NotImplementedError

    def fit_item(
        self,
        slot: Slot,
        twin: str,
        build: Callable[[Sequence[str]], Sequence[str]],
        draw: random.Random,
        payload: Mapping[str, Any],
        spans: tuple[Span, ...],
    ) -> Item:
        """Make an item of two messages with filler lines, as many as the slot's length allows.

        ``build(lines)`` returns the texts of the system's and the user's message. ``draw`` draws the lines. ``twin`` is
        the name of the variant, for the item's id; ``spans`` are the marked texts.
        """
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
    """Return the templates of a split, shuffled; each is one of the ``size`` entries of a text bank (file of texts)."""
    pool = [Template(f"{suite}-{number}", number, 0, 0) for number in rows_of_split(range(size), split)]
    random.Random(f"{suite}-{split}-{seed}").shuffle(pool)
    return tuple(pool)


def interleave_clusters(order: Sequence[int], clusters: Sequence[str]) -> list[int]:
    """Return the row numbers in ``order`` so rearranged that every cluster occurs once before any occurs again.

    ``clusters[number]`` is the cluster of a row.
    """
    visits, turn = Counter[str](), {}
    for number in order:
        turn[number] = visits[clusters[number]]
        visits[clusters[number]] += 1
    return sorted(order, key=turn.__getitem__)
