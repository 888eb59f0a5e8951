"""A trial is one thing that is tried; it holds, or says what broke. Every trial and every section has a time limit."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

PATIENCE = float(os.environ.get("ATTACK_PATIENCE", "1"))  # multiplies every limit, for a machine that others keep busy
TRIAL_SECONDS, SECTION_SECONDS = 120.0 * PATIENCE, 1800.0 * PATIENCE


class Broken(AssertionError):
    """What was tried did not hold."""


class Trial(NamedTuple):
    """What is tried, and the function that does it: it raises where it does not hold."""

    name: str
    run: Callable[[], object]


class Found(NamedTuple):
    """What a section came to; ``broken`` has a line for each trial that did not hold."""

    tried: int
    broken: tuple[str, ...]

    @property
    def held(self) -> int:
        return self.tried - len(self.broken)


def expect(holds: object, what: str) -> None:
    """Raise Broken where something does not hold."""
    if not holds:
        raise Broken(what)


def timeless(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return every record of a run without its seconds."""
    files = sorted(run.glob("records/*.jsonl"))
    rows = {file.name: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files}
    return {name: [{k: v for k, v in row.items() if k != "seconds"} for row in own] for name, own in rows.items()}


def attacked(trials: Iterable[Trial], seconds: float = TRIAL_SECONDS, most: float = SECTION_SECONDS) -> Found:
    """Try everything, one after the other; what is not tried before the section's time is over is broken too."""
    tried, broken, until = 0, list[str](), time.monotonic() + most
    for trial in trials:
        tried += 1
        left = min(seconds, until - time.monotonic())
        if why := _tried(trial, left) if left > 0 else "the section's time was over":
            broken.append(f"{trial.name}: {why}")
    return Found(tried, tuple(broken))


def _tried(trial: Trial, seconds: float) -> str:
    """Why a trial did not hold, empty where it did."""
    done = Future[str]()

    def work() -> None:
        try:
            trial.run()
        except Broken as error:
            done.set_result(str(error) or "it did not hold")
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            done.set_result(f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}:{place.lineno})")
        else:
            done.set_result("")

    threading.Thread(target=work, daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        return f"not over after {seconds:.0f} s"
