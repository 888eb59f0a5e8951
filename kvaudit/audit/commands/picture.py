"""What a cache kept, as a triangle: one row per query, one column per key, of one layer and KV head.

It is drawn as an SVG document, or in half blocks on a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.style import Style
    from rich.text import Text
    from torch import Tensor

SIDE, LEAST_SIDE, CELL = 720.0, 360.0, 9.0  # pixels of the triangle: at most, at least, and per token between
LEFT, RIGHT, BOTTOM, LINE = 64.0, 24.0, 52.0, 17.0
WIDE, NARROW = 80, 42  # characters of a heading's line over a large and a small triangle

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #30363d; }
.title { font-weight: 600; font-size: 14px; }
.page { fill: #ffffff; }
.seen { fill: #1f6fb2; }
.coded { fill: #e09a3e; }
.passed { fill: #b9d3e8; }
.evicted { fill: #e3e6ea; }
.axis { stroke: #6b7480; fill: none; }
.cut { stroke: #30363d; fill: none; stroke-dasharray: 4 3; }
.under { stroke: #ffffff; fill: none; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #d5dae0; }
  .page { fill: #14181d; }
  .seen { fill: #4fa3e3; }
  .coded { fill: #d98b2b; }
  .passed { fill: #26435a; }
  .evicted { fill: #2b323a; }
  .axis { stroke: #8b949e; }
  .cut { stroke: #d5dae0; }
  .under { stroke: #14181d; }
}
"""
_MARGIN, _NARROWEST, _LABELLED = 6, 10, 10  # characters; every tenth query has its number


class Entry(IntEnum):
    """What a query finds where a key could be; the order breaks ties when cells are merged."""

    SEEN = 0
    CODED = 1  # seen as the quantiser stores it
    PASSED = 2  # there, and not attended to by a query that chose
    EVICTED = 3
    FUTURE = 4


_COLOURS = {Entry.SEEN: "#2f86cf", Entry.CODED: "#e09a3e", Entry.PASSED: "#26435a", Entry.EVICTED: "#6b7480"}
_SHADES = {Entry.SEEN: "█", Entry.CODED: "▒", Entry.PASSED: "░", Entry.EVICTED: "·", Entry.FUTURE: " "}


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
        # a run begins or ends where a key and the one before it differ
        edges = [key for key in range(query + 2) if (key and there[key - 1]) != (key <= query and there[key])]
        return list(zip(edges[::2], edges[1::2], strict=True))

    @property
    def kept(self) -> int:
        """Entries that the last query still sees."""
        last = [keys for query, keys in self.chosen if query == self.tokens - 1]
        held = {key for key, time in enumerate(self.evicted_at) if time >= self.tokens}
        return len(held.intersection(*last))  # an empty last: it attended to all

    @property
    def coded(self) -> int:
        """Entries that the last query sees in lower precision."""
        pairs = zip(self.evicted_at, self.coded_at, strict=True)
        return sum(left >= self.tokens > code for left, code in pairs)

    def states(self) -> Tensor:
        """Entry of every query and key: uint8 [T, T]."""
        import torch

        key = torch.arange(self.tokens)
        query, left, code = key[:, None], torch.tensor(self.evicted_at), torch.tensor(self.coded_at)  # [T, 1], [T], [T]
        seen = torch.where(query < code, Entry.SEEN, Entry.CODED)
        states = torch.where(query < key, Entry.FUTURE, torch.where(query < left, seen, Entry.EVICTED)).to(torch.uint8)
        for number, (row, _) in enumerate(self.chosen):
            for start, stop in self.passed(number):
                states[row, start:stop] = Entry.PASSED
        return states

    def cells(self, most: int) -> list[list[Entry]]:
        """The triangle in at most ``most`` rows and columns, each cell what most of its block is."""
        import torch

        size = math.ceil(self.tokens / most)  # tokens in a cell
        # padded to whole cells
        whole = torch.full((size * math.ceil(self.tokens / size),) * 2, Entry.FUTURE, dtype=torch.uint8)
        whole[: self.tokens, : self.tokens] = self.states()
        blocks = whole.unfold(0, size, size).unfold(1, size, size)  # [n, n, size, size]
        counts = torch.stack([(blocks == entry).sum((2, 3)) for entry in Entry])  # [entries, n, n]
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
    # beyond the last token is never
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


def picture_svg(drawn: Picture) -> str:
    """The picture as a document of its own, for a light and a dark page. Every key is a bar from its own query down."""
    side = min(SIDE, max(LEAST_SIDE, CELL * drawn.tokens))
    lines = wrapped(drawn.heading, WIDE if side > LEAST_SIDE else NARROW)
    top = 26.0 + LINE * (len(lines) + 2)
    width, height = LEFT + side + RIGHT, top + side + BOTTOM
    title, caption = escape(f"{drawn.heading}, {drawn.place}"), escape(picture_sentence(drawn))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-labelledby="title about">',
            f'<title id="title">{title}</title>',
            f'<desc id="about">{caption}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width:g}" height="{height:g}"/>',
            *_head(drawn, lines),
            f'<g transform="translate({LEFT:g} {top:g})">',
            *_bars(drawn, side / drawn.tokens),
            *_axes(drawn, side),
            "</g>",
            "</svg>",
            "",
        ]
    )


def wrapped(text: str, most: int) -> list[str]:
    """Break a spec string after commas, plus and bar signs into lines of about ``most`` characters."""
    # \0 stands where a line may end
    lines = [""]
    for sign in ("+", "|"):
        text = text.replace(sign, f"{sign},\0")
    for part in text.replace(",\0", "\0").replace(",", ",\0").split("\0"):
        if len(lines[-1]) + len(part) > most and lines[-1]:
            lines.append("")
        lines[-1] += part
    return lines


def ticks(tokens: int) -> list[int]:
    """Round positions along an axis, four to eight of them, 0 first."""
    step = next(step for power in range(9) for step in (10**power, 2 * 10**power, 5 * 10**power) if 8 * step >= tokens)
    return list(range(0, tokens, step))


def _head(drawn: Picture, lines: list[str]) -> list[str]:
    y = 26.0
    parts = []
    for line in lines:
        parts.append(f'<text class="title" x="{LEFT:g}" y="{y:g}">{escape(line)}</text>')
        y += LINE
    parts.append(f'<text x="{LEFT:g}" y="{y:g}">{escape(drawn.place)}; {escape(picture_sentence(drawn))}</text>')
    y, x = y + LINE, LEFT
    for kind, words in legend(drawn):
        parts.append(f'<rect class="{kind.name.lower()}" x="{x:g}" y="{y - 10:g}" width="11" height="11"/>')
        parts.append(f'<text x="{x + 16:g}" y="{y:g}">{words}</text>')
        x += 34 + 6.4 * len(words)
    return parts


def _bars(drawn: Picture, cell: float) -> list[str]:
    parts = []
    for key, (left, code) in enumerate(zip(drawn.evicted_at, drawn.coded_at, strict=True)):
        # a key's bar from above: seen, then as its code if it ever was, then evicted
        edges = (key, min(code, left), left, drawn.tokens)
        for entry, start, stop in zip((Entry.SEEN, Entry.CODED, Entry.EVICTED), edges[:-1], edges[1:], strict=True):
            if stop > start:
                place = f'x="{key * cell:.2f}" y="{start * cell:.2f}"'
                size = f'width="{cell:.2f}" height="{(stop - start) * cell:.2f}"'
                parts.append(f'<rect class="{entry.name.lower()}" {place} {size}/>')
    for number, (query, _) in enumerate(drawn.chosen):
        for start, stop in drawn.passed(number):
            place = f'x="{start * cell:.2f}" y="{query * cell:.2f}"'
            size = f'width="{(stop - start) * cell:.2f}" height="{cell:.2f}"'
            parts.append(f'<rect class="passed" {place} {size}/>')
    return parts


def _axes(drawn: Picture, side: float) -> list[str]:
    cell = side / drawn.tokens
    cut = drawn.prompt_length * cell
    parts = [f'<path class="axis" d="M0 0V{side:g}H{side:g}"/>']
    if drawn.prompt_length < drawn.tokens:
        # a light line below the dashed one
        parts += [f'<path class="{name}" d="M0 {cut:.2f}H{cut:.2f}V{side:g}"/>' for name in ("under", "cut")]
        parts.append(f'<text x="{cut + 8:.2f}" y="{cut - 6:.2f}">decoded from here</text>')
    for tick in ticks(drawn.tokens):
        at = (tick + 0.5) * cell  # the middle of its cell
        parts.append(f'<path class="axis" d="M{at:.2f} {side:g}v5M0 {at:.2f}h-5"/>')
        parts.append(f'<text x="{at:.2f}" y="{side + 19:g}" text-anchor="middle">{tick}</text>')
        parts.append(f'<text x="-9" y="{at + 4:.2f}" text-anchor="end">{tick}</text>')
    parts.append(f'<text x="{side / 2:g}" y="{side + 40:g}" text-anchor="middle">key: position of the entry</text>')
    parts.append(f'<text transform="translate(-46 {side / 2:g}) rotate(-90)" text-anchor="middle">query</text>')
    return parts


def terminal(drawn: Picture, width: int, *, colours: bool) -> Iterator[Text]:
    """The triangle in half blocks, two queries to a line, then the keys' positions and what the shades mean."""
    from rich.text import Text

    cells = drawn.cells(max(_NARROWEST, width - _MARGIN))
    step = -(-drawn.tokens // len(cells))  # tokens in a cell
    # one row more, for an odd number of them
    rows = [*cells, [Entry.FUTURE] * len(cells)]
    for top in range(0, len(cells), 2):
        label = f"{top * step:>{_MARGIN - 1}} " if top % _LABELLED == 0 else " " * _MARGIN
        line = Text(label)
        for upper, lower in zip(rows[top], rows[top + 1], strict=True):
            line.append(*_half(upper, lower) if colours else (_uncoloured(upper, lower), ""))
        line.rstrip()
        yield line
    yield Text(" " * _MARGIN + _scale(drawn.tokens, step))
    yield _words(drawn, colours=colours)


def _half(upper: Entry, lower: Entry) -> tuple[str, Style]:
    """A character whose two halves have the colours of two entries."""
    from rich.style import Style

    above, below = _COLOURS.get(upper), _COLOURS.get(lower)
    if above is None:  # what is yet to come has no colour
        return ("▄", Style(color=below)) if below else (" ", Style())
    return ("█", Style(color=above)) if above == below else ("▀", Style(color=above, bgcolor=below))


def _uncoloured(upper: Entry, lower: Entry) -> str:
    """The same without colours, where a half can only be full or empty."""
    if upper is lower:
        return _SHADES[upper]
    if Entry.CODED in (upper, lower):
        return "▓" if Entry.SEEN in (upper, lower) else "▒"
    if Entry.SEEN in (upper, lower):
        return "▀" if upper is Entry.SEEN else "▄"
    return _SHADES[Entry.PASSED if Entry.PASSED in (upper, lower) else Entry.EVICTED]


def _scale(tokens: int, step: int) -> str:
    line = ""
    for tick in ticks(tokens):
        # where there is room for it behind the one before
        if tick // step >= len(line) + bool(line):
            line = f"{line:<{tick // step}}{tick}"
    return line


def _words(drawn: Picture, *, colours: bool) -> Text:
    from rich.style import Style
    from rich.text import Text

    line = Text(" " * _MARGIN)
    for entry, words in legend(drawn):
        line.append(_SHADES[Entry.SEEN] if colours else _SHADES[entry], Style(color=_COLOURS[entry]) if colours else "")
        line.append(f" {words}   ")
    line.append("rows: queries, columns: keys")
    if drawn.prompt_length < drawn.tokens:
        line.append(f"; decoded from {drawn.prompt_length}")
    return line
