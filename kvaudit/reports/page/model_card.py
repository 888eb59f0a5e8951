"""Model cards: the disclosure between its two marks, in anybody's card or in one of its own for a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from kvaudit.core.errors import DataError
from kvaudit.core.files import read_text, write_output

BEGIN, END = "<!-- kvaudit:disclosure -->", "<!-- /kvaudit:disclosure -->"
_LARGEST = 4_000_000  # bytes
_REMEDY = f"put {BEGIN} and {END} once each on lines of their own, in this order"


def read_card(path: Path) -> str:
    """The text of a model card; raises DataError where it cannot be read."""
    return read_text(path, "model card", _LARGEST)


def placed(card: str, section: str, name: str) -> str:
    """The card with the section between its marks, put at its end where it has none yet; raises DataError."""
    whole, newline = f"{BEGIN}\n{section}{END}\n", "\r\n" if "\r\n" in card else "\n"
    span = _span(card, name)
    if span is None:
        span = len(card), len(card)
        whole = ("" if not card else "\n" if card.endswith("\n") else "\n\n") + whole
    return card[: span[0]] + whole.replace("\n", newline) + card[span[1] :]


def section_of(card: str, name: str) -> str:
    """What stands between the marks of a card; raises DataError where there is nothing to hold against a run."""
    span = _span(card, name)
    if span is None:
        raise DataError(f"{name!r} holds no disclosure; write one with: kvaudit card RUN --into {name}")
    return card[span[0] : span[1]].replace("\r\n", "\n").removeprefix(BEGIN + "\n").removesuffix("\n").removesuffix(END)


def _span(card: str, name: str) -> tuple[int, int] | None:
    """Where the marks and what is between them stand, None without any; raises DataError for marks that do not pair."""
    begins, ends = card.count(BEGIN), card.count(END)
    if not begins and not ends:
        return None
    start, stop = card.find(BEGIN), card.find(END)
    # the first mark ends its line
    alone = card.startswith(("\n", "\r\n"), start + len(BEGIN))
    if begins != 1 or ends != 1 or not (alone and start < stop):
        raise DataError(f"{name!r} holds {begins} marks that begin a disclosure and {ends} that end one; {_REMEDY}")
    stop += len(END)
    # with the line break behind the last mark, so that putting it in twice changes nothing
    return start, stop + next((len(end) for end in ("\n", "\r\n") if card.startswith(end, stop)), 0)


def write_card(folder: Path, section: str, *, base: str) -> None:
    """Put the section into the README.md of a checkpoint, which gets the hub's front matter where there was none."""
    path = folder / "README.md"
    front = f"---\nlibrary_name: transformers\nbase_model: {json.dumps(base)}\ntags: [kv-cache-compression]\n---\n"
    card = read_card(path) if path.exists() else front
    write_output(path, placed(card, section, str(path)))
