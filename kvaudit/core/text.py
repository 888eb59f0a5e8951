"""Hostile text as plain characters and short lines: what a terminal, page or spreadsheet shows instead of obeying."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def visible(text: str) -> str:
    """The same text with every control, bidirectional, invisible or broken character shown instead of obeyed.

    C0 and DEL become control pictures (ESC as ␛); other control, format, private, surrogate and separator characters
    become ⟨U+202E⟩. Newline and tab stay.
    """
    if text.replace("\n", "").replace("\t", "").isprintable():  # as nearly every text is, and asked at once
        return text
    return "".join(one if one in "\n\t" or one.isprintable() else _picture(ord(one)) for one in text)


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def shipped_folder(name: str) -> Path:
    """Return ``docs`` or ``examples``: inside the installed package, or beside it in a clone."""
    package = Path(__file__).parent.parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def install_command(extras: str) -> str:
    """Return the command that installs optional packages: from the clone that this is, else from an index."""
    clone = Path(__file__).parent.parent.parent
    if not (clone / "pyproject.toml").is_file():
        return f"pip install 'kvaudit[{extras}]'"
    return f"pip install '{'.' if Path.cwd() == clone else clone}[{extras}]'"


def guide_path(page: str) -> str:
    """Where a page of the guides lies in this installation, for an error that sends somebody there."""
    return str(shipped_folder("docs") / page)


def inline(text: str) -> str:
    """Visible text on one line, newlines as ⏎."""
    return visible(text).replace("\n", "⏎").replace("\t", " ")


def clip(text: str, length: int) -> str:
    """At most ``length`` characters and a note, the middle left out."""
    if len(text) <= length:
        return text
    head = (length * 2) // 3
    return f"{text[:head]} […{len(text) - length} characters left out…] {text[len(text) - (length - head) :]}"


def join_names(names: Iterable[str], most: int = 3, *, between: str = ", ", last: str = " and ") -> str:
    """The first names, and how many more there are."""
    known = list(names)
    return between.join(known[:most]) + (f"{last}{len(known) - most} more" if len(known) > most else "")


def length_of(tokens: int) -> str:
    """The length of a context in words: a row as published has none, which is noted as 0."""
    return f"{tokens} tokens" if tokens else "as published"


def length_label(tokens: int) -> str:
    """The same in a column of lengths."""
    return str(tokens) if tokens else "published"


def at_length(tokens: int) -> str:
    """The same after what is asked: "at 512 tokens"."""
    return f"at {tokens} tokens" if tokens else "as published"


def is_text(value: str) -> bool:
    """Whether a file in UTF-8 can hold it: JSON can spell halves of characters that nothing can."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def short_repr(value: Any) -> str:
    """Any value as a short line."""
    return one_line(_repr.repr(value))


def short_text(value: Any) -> str:
    """A name from a file, without line breaks and at most 80 characters."""
    return one_line(value if isinstance(value, str) else short_repr(value))[:80]


def one_line(value: object) -> str:
    """The text of an error without line breaks."""
    return " ".join(str(value).split())[:200]


def reason(error: BaseException) -> str:
    """The class of an exception of somebody else's code and what it says, which may itself fail."""
    try:
        said = inline(one_line(error))
    except (Exception, SystemExit):
        said = "it fails again where it is asked what happened"
    return f"{type(error).__name__}: {said}"
