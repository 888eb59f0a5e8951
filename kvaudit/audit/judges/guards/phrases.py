"""The cheapest guard there is: a list of phrases, one a line, any of which blocks what holds it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvaudit.audit.judges.guards.base import Guard, Passage
from kvaudit.core.errors import DataError
from kvaudit.core.files import read_text
from kvaudit.core.options import sha256_of

_LARGEST = 1_000_000  # bytes of a list
_VERSION = 1  # of how phrases are found


@dataclass(frozen=True, kw_only=True)
class PhraseList(Guard):
    """Whole words in their order, whatever their case and however much space is between them.

    ``file`` is a text file in UTF-8; empty lines and those that begin with # say nothing.
    """

    name = "phrases"
    says = "a list of phrases"

    file: str

    @property
    def identity(self) -> str:
        return sha256_of(_VERSION, self._phrases)

    def blocked(self, passages: Sequence[Passage]) -> list[bool | None]:
        return [self._pattern.search(_plain(passage.text)) is not None for passage in passages]

    @cached_property
    def _phrases(self) -> list[str]:
        lines = map(_plain, read_text(Path(self.file), "list of phrases", _LARGEST).splitlines())
        found = sorted({line for line in lines if line and not line.startswith("#")})
        if not found:
            raise DataError(f"guard phrases: {self.file!r} holds no phrase; write one a line")
        return found

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, self._phrases))})(?!\w)")


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
