"""Split scripts into words, commands and here-documents, each with its first line; expands no variable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from kvaudit.audit.scan.sheet import Unreadable

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\f\v]+|\\\r?\n)
    |(?P<newline>\n)
    |(?P<single>'[^']*')
    |(?P<double>"(?:\\.|[^"\\])*")
    |(?P<escape>\\.)
    |(?P<expansion>\$\{[^{}]*\}|\$\([^()]*\)|`[^`]*`)
    |(?P<operator><<<|<<-?|[;&|()<>])
    |(?P<plain>[^\s\\'"`;&|()<>$]+|\$)""",
    re.VERBOSE | re.DOTALL,
)
_LONGEST_WORD = 20_000  # characters


class Word(NamedTuple):
    """A word without its quotes, and its first line."""

    text: str
    line: int


class ShellCommand(NamedTuple):
    """The words of a command, or of an array that any command may use."""

    words: list[Word]
    array: bool = False


class HereDocument(NamedTuple):
    """The body of a here-document, often a configuration."""

    text: str
    line: int


def parts_of(text: str, line: int) -> Iterator[ShellCommand | HereDocument]:
    """Yield commands, arrays and here-documents in order; raises Unreadable at an unclosed quote."""
    return _Parser(text, line).parts()


class _Parser:
    """Splits a script into words, and words into commands, in one pass."""

    def __init__(self, text: str, line: int) -> None:
        self.text, self.line = text, line
        self.open: list[ShellCommand] = [ShellCommand([])]  # the current command, and an open array on top of it
        self.word: Word | None = None
        self.ends: list[str] = []  # end words of here-documents that begin after this line
        self.awaits_end = False  # whether the next word is an end word
        self.done: list[ShellCommand | HereDocument] = []

    def parts(self) -> Iterator[ShellCommand | HereDocument]:
        at = 0
        while at < len(self.text):
            if self.text[at] == "#" and self.word is None:
                at = _end_of_line(self.text, at)
                continue
            match = _TOKEN.match(self.text, at)
            if match is None:
                raise Unreadable("a quote is never closed", self.line)
            at = self._take(str(match.lastgroup), match[0], match.end())
            yield from self.done
            self.done.clear()
        self._end_word()
        yield from reversed(self.open)

    def _take(self, kind: str, piece: str, at: int) -> int:
        """Process a token; returns where the next one begins."""
        if kind == "operator":
            self._operator(piece)
        elif kind in ("blank", "newline"):
            self._end_word()
            if kind == "newline" and len(self.open) == 1:
                self._end_command()
        else:
            word = self.word or Word("", self.line)
            if len(word.text) < _LONGEST_WORD:  # longer words are data
                self.word = Word(word.text + _unquote(kind, piece), word.line)
        self.line += piece.count("\n")
        while kind == "newline" and self.ends:
            body, at = _here_document(self.text, at, self.ends.pop(0))
            self.done.append(HereDocument(body, self.line))
            self.line += body.count("\n") + 1
        return at

    def _operator(self, piece: str) -> None:
        opens_array = piece == "(" and self.word is not None and self.word.text[-1:] == "="
        self._end_word()
        self.awaits_end = piece in ("<<", "<<-")
        if opens_array:
            self.open.append(ShellCommand([], array=True))
        elif piece == ")" and len(self.open) > 1:
            self.done.append(self.open.pop())
        elif piece in ";&|()" and len(self.open) == 1:
            self._end_command()

    def _end_word(self) -> None:
        if self.word is not None:
            self.open[-1].words.append(self.word)
            if self.awaits_end:
                self.ends.append(self.word.text)
            self.awaits_end = False
        self.word = None

    def _end_command(self) -> None:
        self.done.append(self.open.pop())
        self.open.append(ShellCommand([]))


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _here_document(text: str, at: int, end: str) -> tuple[str, int]:
    """Return the body and the position after its end word."""
    start = at
    while at < len(text):
        stop = _end_of_line(text, at)
        if text[at:stop].strip() == end:
            return text[start:at], stop + 1
        at = stop + 1
    return text[start:], len(text)


def _unquote(kind: str, piece: str) -> str:
    if kind == "single":
        return piece[1:-1]
    if kind == "double":
        return re.sub(r'\\(["\\$`])', r"\1", piece[1:-1])  # continuations stay, so that line numbers stay right
    return piece[1:] if kind == "escape" else piece
