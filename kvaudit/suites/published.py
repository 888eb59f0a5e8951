"""Rows of public benchmarks, asked as their authors ask them: every message is a row's own text, and nothing of ours.

What a row has no words for (how a tool is called, a control that the benchmark lacks) is said in the suite's docstring.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.records import Item, Message
from kvaudit.core.spans import marked
from kvaudit.suites.base import PUBLISHED, CountTokens, Split, Suite

T = TypeVar("T")
ItemMaker = Callable[[], Item]  # an item, when it is its turn


class Published(Suite):
    """Subclass and write ``groups``. No row is asked twice: who wants more answers asks for more samples."""

    published, lengths = True, "none"
    placements = (PUBLISHED,)

    def groups(self, split: Split, seed: int) -> Sequence[Sequence[ItemMaker]]:
        """The items of every cluster, twins in turn; those of one cluster are told apart by the end of ``item_id``."""
        raise NotImplementedError

    def items(
        self,
        split: Split,
        n: int,
        seed: int,
        context_tokens: int,  # noqa: ARG002 - 0: the row is as long as it is
        count_tokens: CountTokens,  # noqa: ARG002
    ) -> list[Item]:
        groups = self._shuffled(split, seed)
        if n > (held := sum(map(len, groups))):
            raise SpecError(
                f"{n} items are asked for, its rows make {held} to {'train on' if split == 'train' else 'evaluate'}; "
                "ask for no more (items: all takes every one)"
            )
        return [made() for made in islice(round_robin(groups), n)]

    def row_item(
        self, cluster: str, rest: str, messages: Iterable[Message], payload: Mapping[str, Any], **spans: str
    ) -> Item:
        """A row as an item, called ``cluster``-``rest``; ``spans`` as ``marked`` takes them."""
        name = f"{self.name}-{cluster}"
        return Item(self.name, f"{name}-{rest}", name, tuple(messages), 0, PUBLISHED, payload, marked(**spans))

    def rows(self, split: Split, seed: int = 0) -> int:
        return sum(map(len, self._shuffled(split, seed)))

    def _shuffled(self, split: Split, seed: int) -> list[Sequence[ItemMaker]]:
        groups = [group for group in self.groups(split, seed) if group]
        if not groups:
            raise DataError(f"the rows of suite {self.name} hold nothing for {split}")
        random.Random(f"{self.name}-{split}-{seed}").shuffle(groups)
        return groups


def round_robin(groups: Sequence[Sequence[T]]) -> Iterator[T]:
    """The first of every group, then the second of those that have one, and so on."""
    for turn in range(max(map(len, groups), default=0)):
        yield from (group[turn] for group in groups if turn < len(group))


def rotate(twins: Sequence[T], by: int) -> list[T]:
    """The twins beginning with another one, so that few items already hold every kind."""
    start = by % len(twins)
    return [*twins[start:], *twins[:start]]


def rows_of_split(rows: Iterable[T], split: Split, *, every: int = 3, first: int = 0) -> list[T]:
    """Those of the rows that belong to a split: one of ``every``, from ``first`` on, is for training."""
    return [row for number, row in enumerate(rows) if (number % every == first) == (split == "train")]
