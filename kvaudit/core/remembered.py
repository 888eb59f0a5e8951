"""Answers that are kept on disk by the hash of their question, so that nothing is asked twice.

    answers-NAME-12hex.jsonl    {"question": sha256, FIELD: true}, a line each, appended as they come

Several processes may append to one file: the first answer to a question stands, and all of them go by it. A failure is
asked again the next time, unless it is of a kind that is kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Generic, TypeVar

from kvaudit.core.files import mutex

_CHUNK = 64  # questions between two writes: what a kill loses
Q = TypeVar("Q")
A = TypeVar("A")


class Answers(Generic[Q, A]):
    """Asks ``ask`` what the file does not hold yet; ``field`` is what an answer is called there.

    ``kinds`` are the types of answers that are kept; with NoneType among them so are failures.
    """

    def __init__(
        self,
        path: Path,
        key: Callable[[Q], str],
        ask: Callable[[Sequence[Q]], Sequence[A | None]],
        field: str,
        kinds: tuple[type, ...] = (bool,),
    ) -> None:
        self._path, self._key, self._ask, self._field, self._kinds = path, key, ask, field, kinds
        self._known: dict[str, A | None] = {}
        self._size, self._cut = 0, False  # bytes read so far; whether they end within a line, which a kill has cut
        if path.exists():
            with self._alone():
                self._take_in()

    def answers(self, questions: Sequence[Q]) -> list[A | None]:
        """An answer for every question, None where it failed; equal questions are asked once."""
        keys = [self._key(question) for question in questions]
        new = {key: q for key, q in zip(keys, questions, strict=True) if key not in self._known}
        todo = list(new.items())
        for start in range(0, len(todo), _CHUNK):
            part = todo[start : start + _CHUNK]
            said = self._ask([question for _, question in part])
            self._keep({key: a for (key, _), a in zip(part, said, strict=True) if type(a) in self._kinds})
        return [self._known.get(key) for key in keys]

    def _alone(self) -> AbstractContextManager[None]:
        return mutex(self._path.with_name(f".{self._path.stem}.lock"))

    def _keep(self, found: dict[str, A | None]) -> None:
        with self._alone():
            self._take_in()  # others may have answered meanwhile, and theirs stand
            rows = [{"question": key, self._field: a} for key, a in found.items() if key not in self._known]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, ("\n" + lines if self._cut else lines).encode())
            finally:
                os.close(descriptor)
            self._take_in()

    def _take_in(self) -> None:
        """Read what was appended since; a line that a kill has cut is left out, and its question asked again."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._size)
            added = file.read()
        self._size += len(added)
        self._cut = not added.endswith(b"\n") if added else self._cut
        for line in added.splitlines():
            try:
                row = json.loads(line)
                key, answer = row["question"], row[self._field]
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(key, str) and type(answer) in self._kinds:
                self._known.setdefault(key, answer)
