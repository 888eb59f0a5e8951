"""Prompts as an SVG document: every token shaded by the share of layers and KV heads that still held it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from kvaudit.core.text import inline

COLUMNS, WIDTH, HEIGHT, MARGIN = 110, 7.3, 19.0, 20.0  # characters of a line; pixels of one, of a line, around
_STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1b1f24; white-space: pre; }
.head { font: 600 13px system-ui, sans-serif; }
.about { font: 12px system-ui, sans-serif; }
.page { fill: #ffffff; }
.held { fill: #2f86cf; }
.gone { fill: #8b949e; text-decoration: line-through; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb; }
  .page { fill: #14171b; }
  .gone { fill: #6b7480; }
}
"""
_DEEPEST = 0.55  # opacity of a token that everything still holds, so that its text stays readable


class ShadedPrompt(NamedTuple):
    """One policy's prompt: texts and shares of its tokens, with a line on what became of the answer."""

    heading: str
    caption: str
    pieces: Sequence[str]
    held: Sequence[float]


class _Spot(NamedTuple):
    line: int
    column: int
    text: str
    share: float
    number: int


def shading_svg(title: str, parts: Sequence[ShadedPrompt]) -> str:
    """The prompts under one another, for a light and a dark page; tokens that nothing holds are struck through."""
    width, y = 2 * MARGIN + COLUMNS * WIDTH, MARGIN
    body: list[str] = []
    for part in parts:
        spots = list(_spots(part))
        body.append(f'<text class="head" x="{MARGIN:g}" y="{y:g}">{_inert(part.heading)}</text>')
        body.append(f'<text class="about" x="{MARGIN:g}" y="{y + HEIGHT:g}">{_inert(part.caption)}</text>')
        top = y + HEIGHT * 2.4
        body += [element for spot in spots for element in _token(spot, top)]
        y = top + HEIGHT * (max((spot.line for spot in spots), default=0) + 2)
    caption = "Every token is shaded by the share of layers and KV heads that still held it when the answer began."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {y:g}" width="{width:g}" height="{y:g}" '
            'role="img" aria-labelledby="title about">',
            f'<title id="title">{_inert(title)}</title>',
            f'<desc id="about">{caption}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width:g}" height="{y:g}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _spots(part: ShadedPrompt) -> Iterator[_Spot]:
    """Where every token stands, cut where a line ends; a line of the text begins a line of the picture."""
    line = column = 0
    for number, (piece, share) in enumerate(zip(part.pieces, part.held, strict=True)):
        text = inline(piece) or "·"  # what shows nothing has a place all the same
        while text:
            # a token that fits into a line is not cut
            if column >= COLUMNS or (column + len(text) > COLUMNS >= len(text)):
                line, column = line + 1, 0
            head, text = text[: COLUMNS - column], text[COLUMNS - column :]
            yield _Spot(line, column, head, share, number)
            column += len(head)
        if "\n" in piece:
            line, column = line + 1, 0


def _token(spot: _Spot, top: float) -> Iterator[str]:
    x, y, wide = MARGIN + WIDTH * spot.column, top + HEIGHT * spot.line, WIDTH * len(spot.text)
    yield f"<g><title>token {spot.number}: held by {100 * spot.share:.0f} %</title>"
    if spot.share > 0:
        deep = _DEEPEST * spot.share
        yield f'<rect class="held" x="{x:g}" y="{y - 13:g}" width="{wide:g}" height="17" fill-opacity="{deep:.3f}"/>'
    kind = ' class="gone"' if spot.share == 0 else ""
    # textLength: as wide as its columns, whatever the font
    yield f'<text{kind} x="{x:g}" y="{y:g}" textLength="{wide:g}" xml:space="preserve">{escape(spot.text)}</text></g>'


def _inert(text: str) -> str:
    return escape(inline(text))
