"""What a cache kept, as a triangle: one row per query, one column per key, of one layer and KV head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Entry(IntEnum):
    """What a query finds where a key could be; the order breaks ties when cells are merged."""

    SEEN = 0
    CODED = 1  # seen as the quantiser stores it
    PASSED = 2  # there, and not attended to by a query that chose
    EVICTED = 3
    FUTURE = 4


@dataclass(frozen=True)
class Picture:
    """One head's entries. ``evicted_at`` and ``coded_at`` give each key's first query that missed it or saw its code.

    A time beyond the last token means never. ``chosen`` has the queries that attended to some keys only, and to which.
    """

    heading: str
    place: str
    prompt_length: int
    evicted_at: tuple[int, ...]
    coded_at: tuple[int, ...]
    chosen: tuple[tuple[int, frozenset[int]], ...] = ()

    @property
    def tokens(self) -> int:
        """Rows and columns."""
        return len(self.evicted_at)

    @property
    def compressed(self) -> bool:
        """Whether anything left, lost precision or was passed over."""
        return min(*self.evicted_at, *self.coded_at) < self.tokens or any(map(self.passed, range(len(self.chosen))))

    def passed(self, number: int) -> list[tuple[int, int]]:
        """Half-open runs of keys that choosing query ``number`` did not attend to though they were there."""
        query, keys = self.chosen[number]
        there = [key not in keys and query < self.evicted_at[key] for key in range(query + 1)]
        edges = [key for key in range(query + 2) if (key and there[key - 1]) != (key <= query and there[key])]
        return list(zip(edges[::2], edges[1::2], strict=True))

    @property
    def kept(self) -> int:
        """Entries that the last query still sees."""
        last = [keys for query, keys in self.chosen if query == self.tokens - 1]
        held = {key for key, time in enumerate(self.evicted_at) if time >= self.tokens}
        return len(held.intersection(*last))

    @property
    def coded(self) -> int:
        """Entries that the last query sees in lower precision."""
        pairs = zip(self.evicted_at, self.coded_at, strict=True)
        return sum(left >= self.tokens > code for left, code in pairs)

    def states(self) -> Tensor:
        """Entry of every query and key: uint8 [T, T]."""
        import torch

        key = torch.arange(self.tokens)
        query, left, code = key[:, None], torch.tensor(self.evicted_at), torch.tensor(self.coded_at)
        seen = torch.where(query < code, Entry.SEEN, Entry.CODED)
        states = torch.where(query < key, Entry.FUTURE, torch.where(query < left, seen, Entry.EVICTED)).to(torch.uint8)
        for number, (row, _) in enumerate(self.chosen):
            for start, stop in self.passed(number):
                states[row, start:stop] = Entry.PASSED
        return states

    def cells(self, most: int) -> list[list[Entry]]:
        """The triangle in at most ``most`` rows and columns, each cell what most of its block is."""
        import torch

        size = math.ceil(self.tokens / most)
        whole = torch.full((size * math.ceil(self.tokens / size),) * 2, Entry.FUTURE, dtype=torch.uint8)
        whole[: self.tokens, : self.tokens] = self.states()
        blocks = whole.unfold(0, size, size).unfold(1, size, size)
        counts = torch.stack([(blocks == entry).sum((2, 3)) for entry in Entry])
        return [[Entry(code) for code in row] for row in counts.argmax(0).tolist()]


def picture(
    heading: str,
    place: str,
    prompt_length: int,
    evicted_at: Tensor,
    coded: tuple[Tensor | None, Tensor | None],
    chosen: tuple[tuple[int, frozenset[int]], ...] = (),
) -> Picture:
    """One head's picture from its ledger row [T] and the times [T] at which keys and values were quantised, if any."""
    import torch

    from kvaudit.audit.cache.ledger import NEVER

    tokens = len(evicted_at)
    earliest = torch.full((tokens,), NEVER, dtype=torch.int32)
    for times in coded:
        if times is not None:
            earliest = torch.minimum(earliest, times[:tokens])
    left, code = (tuple(times.clamp(max=tokens).tolist()) for times in (evicted_at, earliest))
    return Picture(heading, place, prompt_length, left, code, chosen)


def picture_sentence(drawn: Picture) -> str:
    """The picture in one sentence."""
    coded = f", {drawn.coded} of them in lower precision" if drawn.coded else ""
    return f"the last of {drawn.tokens} queries sees {drawn.kept} entries{coded}"


def legend(drawn: Picture) -> list[tuple[Entry, str]]:
    """What is in the picture, in words."""
    words = [(Entry.SEEN, "seen"), (Entry.CODED, "seen in lower precision")]
    words += [(Entry.PASSED, "not attended to"), (Entry.EVICTED, "evicted")]
    there = {Entry.SEEN: True, Entry.CODED: min(drawn.coded_at) < drawn.tokens}
    there[Entry.PASSED] = any(map(drawn.passed, range(len(drawn.chosen))))
    there[Entry.EVICTED] = min(drawn.evicted_at) < drawn.tokens
    return [(entry, text) for entry, text in words if there[entry]]
