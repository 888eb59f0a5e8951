"""Draw prompts as SVG, each token shaded by the share of layers and KV heads that still held it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from kvaudit.core.text import inline

COLUMNS = 110  # characters per line
WIDTH, HEIGHT, MARGIN = 7.3, 19.0, 20.0  # of a character, of a line, around the page; in pixels
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
_MOST_OPACITY = 0.55  # of the shade, so that the text stays readable


class ShadedPrompt(NamedTuple):
    """A prompt under a policy: its tokens' texts and the shares that held them; ``caption`` describes the answer."""

    heading: str
    caption: str
    pieces: Sequence[str]
    held: Sequence[float]


class _PlacedToken(NamedTuple):
    line: int
    column: int
    text: str
    share: float
    number: int


def shading_svg(title: str, prompts: Sequence[ShadedPrompt]) -> str:
    """Return the prompts below one another, for light and dark mode; tokens that nothing holds are struck through."""
    width, y = 2 * MARGIN + COLUMNS * WIDTH, MARGIN
    body: list[str] = []
    for prompt in prompts:
        tokens = list(_place_tokens(prompt))
        body.append(f'<text class="head" x="{MARGIN:g}" y="{y:g}">{_escape(prompt.heading)}</text>')
        body.append(f'<text class="about" x="{MARGIN:g}" y="{y + HEIGHT:g}">{_escape(prompt.caption)}</text>')
        top = y + HEIGHT * 2.4
        body += [element for token in tokens for element in _token_elements(token, top)]
        y = top + HEIGHT * (max((token.line for token in tokens), default=0) + 2)
    caption = "Every token is shaded by the share of layers and KV heads that still held it when the answer began."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {y:g}" width="{width:g}" height="{y:g}" '
            'role="img" aria-labelledby="title about">',
            f'<title id="title">{_escape(title)}</title>',
            f'<desc id="about">{caption}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width:g}" height="{y:g}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _place_tokens(prompt: ShadedPrompt) -> Iterator[_PlacedToken]:
    """Yield the tokens with their places, cut at the end of a line; a line break of the text begins a new line."""
    line = column = 0
    for number, (piece, share) in enumerate(zip(prompt.pieces, prompt.held, strict=True)):
        text = inline(piece) or "·"  # so that an invisible token has a place
        while text:
            # a token is cut only if it is longer than a line
            if column >= COLUMNS or (column + len(text) > COLUMNS >= len(text)):
                line, column = line + 1, 0
            head, text = text[: COLUMNS - column], text[COLUMNS - column :]
            yield _PlacedToken(line, column, head, share, number)
            column += len(head)
        if "\n" in piece:
            line, column = line + 1, 0


def _token_elements(token: _PlacedToken, top: float) -> Iterator[str]:
    x, y, width = MARGIN + WIDTH * token.column, top + HEIGHT * token.line, WIDTH * len(token.text)
    yield f"<g><title>token {token.number}: held by {100 * token.share:.0f} %</title>"
    if token.share > 0:
        shade = f'width="{width:g}" height="17" fill-opacity="{_MOST_OPACITY * token.share:.3f}"'
        yield f'<rect class="held" x="{x:g}" y="{y - 13:g}" {shade}/>'
    kind = ' class="gone"' if token.share == 0 else ""
    # textLength: the same width in any font
    yield f'<text{kind} x="{x:g}" y="{y:g}" textLength="{width:g}" xml:space="preserve">{escape(token.text)}</text></g>'


def _escape(text: str) -> str:
    return escape(inline(text))
