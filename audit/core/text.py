"""Hostile text as plain characters: what a terminal, a page or a spreadsheet shows instead of obeying."""

from __future__ import annotations

_KEPT = "\n\t"


def visible(text: str) -> str:
    """The same text with every control, bidirectional, invisible or broken character shown instead of obeyed.

    C0 and DEL become control pictures (ESC as ␛); other control, format, private, surrogate and separator characters
    become ⟨U+202E⟩. Newline and tab stay.
    """
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in _KEPT or character.isprintable():
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def inline(text: str) -> str:
    """Visible text on one line, newlines as ⏎."""
    return visible(text).replace("\n", "⏎").replace("\t", " ")


def clip(text: str, length: int) -> str:
    """At most ``length`` characters and a note, the middle left out."""
    if len(text) <= length:
        return text
    head = (length * 2) // 3
    return f"{text[:head]} […{len(text) - length} characters left out…] {text[len(text) - (length - head) :]}"


def is_text(value: str) -> bool:
    """Whether a file in UTF-8 can hold it: JSON can spell halves of characters that nothing can."""
    return not any("\ud800" <= character <= "\udfff" for character in value)
