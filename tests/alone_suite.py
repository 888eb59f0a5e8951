"""A suite for tests of rounds: sums that the model that ships can do, each row a cluster of its own."""

from __future__ import annotations

from dataclasses import replace

from kvaudit.core.records import Item
from kvaudit.suites.base import CountTokens, Split
from kvaudit.suites.math import Math

ROWS = 160


class Alone(Math):
    """The sums of ``math``, as if no two shared a template."""

    name = "alone"

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        own = Math().items(split, n, seed, context_tokens, count_tokens)
        named = [(item, f"alone-made-{number}") for number, item in enumerate(own)]
        return [replace(item, suite=self.name, item_id=name, cluster_id=name) for item, name in named]

    def rows(self, split: Split, seed: int = 0) -> int | None:
        return ROWS
