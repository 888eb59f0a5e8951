"""The question to a judge, the judge's answer, and a cache on disk that finds an answer by its question's hash.

    answers-NAME-12hex.jsonl    one line per answer, appended: {"question": sha256, FIELD: true, "sha256": 16hex}

Several processes may append to one file; all of them use the first answer to a question. Failures are not stored, so
that the next run asks again, unless the cache is configured to store them. A line that was edited no longer fits its
``sha256``, and its question is asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvaudit.core.files import mutex

_CHUNK = 64  # questions between two writes: what a kill loses
Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Question:
    """The question whether ``answer`` refuses ``request``; both texts are untrusted.

    The question leaves out the long context. It does not show which arm or policy gave the answer.
    """

    request: str
    answer: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judge's answer: its best guess whether the model refused the request, and whether the judge is sure.

    ``unsafe`` says whether the answer gives the harm that the request asks for; a judge that does not grade harm leaves
    it None.
    """

    refused: bool
    sure: bool = True
    unsafe: bool | None = None


class AnswerCache(Generic[Q, A]):
    """A cache of answers in the file ``path``; it calls ``ask`` with the questions that have no answer there yet.

    ``key`` is the function that hashes a question. ``field`` is the key under which a line of the file has the answer.
    Only answers whose type is in ``kinds`` are stored; include NoneType to store failures.
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
        self._cached: dict[str, A | None] = {}
        self._bytes_read, self._has_half_line = 0, False  # a killed process may leave half a line at the end
        if path.exists():
            with self._lock():
                self._read_new_lines()

    def answers(self, questions: Sequence[Q]) -> list[A | None]:
        """Return the answer to every question, in order; None where there is none. Equal questions are asked once."""
        keys = [self._key(question) for question in questions]
        new = list({key: q for key, q in zip(keys, questions, strict=True) if key not in self._cached}.items())
        for start in range(0, len(new), _CHUNK):
            chunk = new[start : start + _CHUNK]
            answers = self._ask([question for _, question in chunk])
            self._store({key: a for (key, _), a in zip(chunk, answers, strict=True) if type(a) in self._kinds})
        return [self._cached.get(key) for key in keys]

    @property
    def stored(self) -> Mapping[str, A | None]:
        """All answers in the cache, {hash of the question: answer}: those read from the file, and those added since."""
        return self._cached

    def _lock(self) -> AbstractContextManager[None]:
        return mutex(self._path.with_name(f".{self._path.stem}.lock"))

    def _store(self, answers: dict[str, A | None]) -> None:
        with self._lock():
            self._read_new_lines()  # another process may have answered first
            new = [(key, answer) for key, answer in answers.items() if key not in self._cached]
            rows = [{"question": key, self._field: a, "sha256": self._digest(key, a)} for key, a in new]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                # in one write and on disk before it is used, since an answer may have cost money
                os.write(descriptor, ("\n" + lines if self._has_half_line else lines).encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._read_new_lines()

    def _read_new_lines(self) -> None:
        """Read the lines that were appended since the last call, and skip those that are damaged or half-written."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._bytes_read)
            added = file.read()
        self._bytes_read += len(added)
        self._has_half_line = not added.endswith(b"\n") if added else self._has_half_line
        for line in added.splitlines():
            try:
                key, answer = self._entry(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(key, str) and type(answer) in self._kinds:
                self._cached.setdefault(key, answer)

    def _entry(self, row: Any) -> tuple[str, A | None]:
        """Return (hash of the question, answer) of a line; raise ValueError, KeyError or TypeError for a bad line."""
        key, answer = row["question"], row[self._field]
        if row["sha256"] != self._digest(key, answer):
            raise ValueError
        return key, answer

    def _digest(self, key: str, answer: A | None) -> str:
        """Return a short sha256 of a line's content."""
        return hashlib.sha256(json.dumps([key, self._field, answer]).encode()).hexdigest()[:16]
