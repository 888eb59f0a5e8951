"""Yes-or-no answers that are kept on disk by the hash of their question, so that nothing is asked twice.

    answers-NAME-12hex.jsonl    {"question": sha256, FIELD: true}, a line each, appended as they come

A failure is not kept: it is asked again the next time. Several processes may append to one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

_CHUNK = 64  # questions between two writes: what a kill loses
Q = TypeVar("Q")


class Answers(Generic[Q]):
    """Asks ``ask`` what the file does not hold yet; ``field`` is what an answer is called there."""

    def __init__(
        self, path: Path, key: Callable[[Q], str], ask: Callable[[Sequence[Q]], list[bool | None]], field: str
    ) -> None:
        self._path, self._key, self._ask, self._field = path, key, ask, field
        self._known = dict(_kept(path, field))

    def answers(self, questions: Sequence[Q]) -> list[bool | None]:
        """An answer for every question, None where it failed; equal questions are asked once."""
        keys = [self._key(question) for question in questions]
        new = {key: q for key, q in zip(keys, questions, strict=True) if key not in self._known}
        todo = list(new.items())
        for start in range(0, len(todo), _CHUNK):
            part = todo[start : start + _CHUNK]
            said = self._ask([question for _, question in part])
            self._keep({key: label for (key, _), label in zip(part, said, strict=True) if label is not None})
        return [self._known.get(key) for key in keys]

    def _keep(self, found: dict[str, bool]) -> None:
        self._known |= found
        lines = "".join(json.dumps({"question": key, self._field: label}) + "\n" for key, label in found.items())
        # one write of whole lines, so that those of another process stay whole too
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, lines.encode())
        finally:
            os.close(descriptor)


def _kept(path: Path, field: str) -> Iterator[tuple[str, bool]]:
    """What the file holds; a line that a kill has cut is left out, and its question asked again."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
            key, label = row["question"], row[field]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(key, str) and isinstance(label, bool):
            yield key, label
