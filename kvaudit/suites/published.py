"""Base class of suites that ask rows of public benchmarks unchanged: every message is a row's own text.

A suite's docstring says which texts had to be added (how tools are called, a control that the benchmark lacks).
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
ItemMaker = Callable[[], Item]  # makes an item when it is needed


class Published(Suite):
    """Subclass it and write ``groups``. No row is asked twice; for more answers a spec asks for more samples."""

    published, lengths = True, "none"
    placements = (PUBLISHED,)

    def groups(self, split: Split, seed: int) -> Sequence[Sequence[ItemMaker]]:
        """Return the items of each cluster, twins in turn; within a cluster the ends of ``item_id`` differ."""
        raise NotImplementedError

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:  # noqa: ARG002
        groups = self._shuffled(split, seed)
        if n > (count := sum(map(len, groups))):
            raise SpecError(
                f"suite {self.name}: {n} items requested, but its rows make {count} for {split}; request fewer, or all "
                "of them with items: all"
            )
        return [make_item() for make_item in islice(round_robin(groups), n)]

    def row_item(
        self,
        cluster: str,
        rest: str,
        messages: Iterable[Message],
        payload: Mapping[str, Any],
        tools: Iterable[Mapping[str, Any]] = (),
        **spans: str,
    ) -> Item:
        """Return a row as an item with the id ``cluster``-``rest``; for ``spans`` see ``marked``."""
        name, spans_marked = f"{self.name}-{cluster}", marked(**spans)
        return Item(
            self.name, f"{name}-{rest}", name, tuple(messages), 0, PUBLISHED, payload, spans_marked, tuple(tools)
        )

    def rows(self, split: Split, seed: int = 0) -> int:
        return sum(map(len, self._shuffled(split, seed)))

    def _shuffled(self, split: Split, seed: int) -> list[Sequence[ItemMaker]]:
        groups = [group for group in self.groups(split, seed) if group]
        if not groups:
            raise DataError(f"suite {self.name} has no rows for {split}")
        random.Random(f"{self.name}-{split}-{seed}").shuffle(groups)
        return groups


def round_robin(groups: Sequence[Sequence[T]]) -> Iterator[T]:
    """Yield the first of every group, then the second of every group that has one, and so on."""
    for turn in range(max(map(len, groups), default=0)):
        yield from (group[turn] for group in groups if turn < len(group))


def rotate(twins: Sequence[T], by: int) -> list[T]:
    """Rotate the twins, so that a few items already include every kind."""
    start = by % len(twins)
    return [*twins[start:], *twins[:start]]


def rows_of_split(rows: Iterable[T], split: Split, *, every: int = 3, first: int = 0) -> list[T]:
    """Return the rows of a split: one in ``every``, starting with index ``first``, is for training."""
    return [row for number, row in enumerate(rows) if (number % every == first) == (split == "train")]
