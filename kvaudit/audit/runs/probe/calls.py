"""The calls of a probe: what is asked, and a memory of the answers that count.

    calls.jsonl    {"call": sha256 of what was asked, "text": ..., "finish": ...}, a line each, appended as they come;
                   {"call": sha256, "failed": why} where none came, which is asked again

What was answered is never asked again, so a killed probe goes on at the next call.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvaudit.audit.sampling.chat_calls import Answer, wire
from kvaudit.core.endpoint import Unanswered
from kvaudit.core.records import Message
from kvaudit.core.spec import RunSpec
from kvaudit.core.text import is_text
from kvaudit.suites.base import Suite


def request(spec: RunSpec, suite: Suite, transcript: Sequence[Message], seed: int) -> dict[str, Any]:
    """The body of the next call of a conversation."""
    probe, grid = spec.probe, spec.evaluate
    assert probe is not None
    body = {
        "model": spec.model_path,
        "messages": wire(transcript, probe.tool_role),
        "temperature": grid.temperature,
        probe.limit: suite.max_new_tokens,
    }
    body |= {"top_p": grid.top_p} if grid.top_p < 1 else {}
    body |= {"seed": seed} if probe.seeded else {}
    return body | ({"stop": list(suite.until)} if suite.until else {})


class Calls:
    """What was answered, by what was asked; every answer is on disk before it is used. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        raw = path.read_bytes() if path.exists() else b""
        self._torn = bool(raw) and not raw.endswith(b"\n")  # a kill has cut the last line
        self._known = dict(_kept(raw))
        self.model = next((found.model for found in self._known.values() if found.model), "")  # that answered first

    def find(self, key: str) -> Answer | None:
        """The answer to a call, None where there is none yet."""
        return self._known.get(key)

    def keep(self, key: str, found: Answer | Unanswered) -> None:
        """Note an answer, or why there is none."""
        said = {"failed": str(found)} if isinstance(found, Unanswered) else asdict(found)
        with self._lock:
            if isinstance(found, Answer):
                self._known[key] = found
            self._append(json.dumps({"call": key, **said}, ensure_ascii=False))

    def _append(self, line: str) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # one write of a whole line, so that those of another process stay whole too
            os.write(descriptor, ("\n" * self._torn + line + "\n").encode())  # a torn line is ended first
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._torn = False


def call_key(body: Mapping[str, Any], sample: int) -> str:
    """sha256 of what is asked, and for the how manyth time."""
    # endpoints call the limit by two names, which asks the same
    named = {("limit" if key.startswith("max_") else key): value for key, value in body.items()}
    return hashlib.sha256(json.dumps([named, sample], sort_keys=True).encode()).hexdigest()


def _kept(raw: bytes) -> Iterator[tuple[str, Answer]]:
    """What a file holds; a line that is none of ours is left out, and its call made again."""
    for line in raw.splitlines():
        try:
            row = json.loads(line)
            key = row.pop("call")
            found = Answer(**row)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if isinstance(key, str) and _is_answer(found):
            yield key, found


def _is_answer(found: Answer) -> bool:
    words = (found.text, found.model, found.said_in, "" if found.thought is None else found.thought)
    texts = all(isinstance(text, str) and is_text(text) for text in words)
    counts = all(n is None or (type(n) is int and n >= 0) for n in (found.prompt_tokens, found.new_tokens))
    timed = isinstance(found.seconds, float) and math.isfinite(found.seconds)
    return texts and counts and timed and found.finish in ("stop", "length")
