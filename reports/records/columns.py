"""Columns that grow block by block and become a DataFrame: words as categories, numbers as 64-bit arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from audit.core.records import Record, Role

ROLES = (*(role.value for role in Role), "format")
COPIED = (
    *("checkpoint", "arm", "train_seed", "policy", "policy_hash", "suite", "suite_version", "item_id", "cluster_id"),
    *("context_tokens", "sample_index", "finish_reason", "new_tokens", "retention", "kv_bytes_peak", "kv_bytes_dense"),
    *("seconds", "judge"),
)
_KINDS = {name: str(kind) for name, kind in Record.__annotations__.items()}
_WORDS = (*(name for name in COPIED if _KINDS[name] == "str"), "outcome")
WHOLE = tuple(name for name in COPIED if _KINDS[name] == "int")
REAL = (*(name for name in COPIED if _KINDS[name] == "float"), "score", *(f"survival_{role}" for role in ROLES))
Array = npt.NDArray[Any]


class _Numbering(dict[str, int]):
    """Each new word gets the next number."""

    def __missing__(self, word: str) -> int:
        return self.setdefault(word, len(self))


class Columns:
    """The rows read so far; ``file`` and ``line`` say where each one stood."""

    def __init__(self) -> None:
        self._words: dict[str, _Numbering] = {name: _Numbering() for name in (*_WORDS, "file")}
        self._parts: dict[str, list[Array]] = {name: [] for name in (*_WORDS, *WHOLE, *REAL, "file", "line")}
        self.rows = 0

    def add(self, file: str, lines: Sequence[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Add rows; ``values`` has a sequence per copied field, ``outcome``, ``score`` and ``survival_<role>``."""
        count = len(lines)
        for name in _WORDS:
            numbers = map(self._words[name].__getitem__, values[name])
            self._parts[name].append(np.fromiter(numbers, np.int32, count))
        for names, kind in ((WHOLE, np.int64), (REAL, np.float64)):
            for name in names:
                self._parts[name].append(np.array(values[name], dtype=kind))
        self._parts["file"].append(np.full(count, self._words["file"][file], dtype=np.int32))
        self._parts["line"].append(np.array(lines, dtype=np.int64))
        self.rows += count

    def frame(self) -> pd.DataFrame:
        """All rows; empties the columns, so that both are never in memory."""
        return pd.DataFrame({name: self._column(name) for name in list(self._parts)}, copy=False)

    def _column(self, name: str) -> Any:
        parts = self._parts.pop(name)
        values = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        if name not in self._words:
            return values
        words = list(self._words.pop(name))
        order = sorted(range(len(words)), key=words.__getitem__)  # categories sort as their words do
        place = np.empty(len(words), dtype=np.int32)
        place[order] = np.arange(len(words), dtype=np.int32)
        sorted_words = pd.Index([words[i] for i in order], dtype=object)
        return pd.Categorical.from_codes(place[values], categories=sorted_words)
