"""Run trials with time limits; each tries one attack and raises if it succeeds. Used by the files of this folder."""

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
    """Raised by a trial whose expectation did not hold."""


class Trial(NamedTuple):
    """One attack: its name, and the function that tries it and raises Broken if it succeeds."""

    name: str
    run: Callable[[], object]


class SectionResult(NamedTuple):
    """The result of a section; ``broken`` has a line for each trial that did not hold."""

    tried: int
    broken: tuple[str, ...]

    @property
    def held(self) -> int:
        return self.tried - len(self.broken)


def expect(holds: object, fault: str) -> None:
    """Raise Broken with ``fault`` unless ``holds``."""
    if not holds:
        raise Broken(fault)


def records_without_times(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return every record of a run and of its A/A floor without its seconds, which differ between runs."""
    records = {}
    for file in sorted([*run.glob("records/*.jsonl"), *run.glob("floor/*/*.jsonl")]):
        rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        records[str(file.relative_to(run))] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    return records


def check_same_records(run: Path, undisturbed: Path, allowed: str = "") -> None:
    """Raise Broken unless both runs have the same records and ``run`` no leftovers but with the suffix ``allowed``."""
    is_same = records_without_times(run) == records_without_times(undisturbed)
    expect(is_same, "records differ from those of the undisturbed run")
    suffixes = {".partial", ".lock"} - {allowed}
    leftovers = [path.name for path in run.rglob("*") if path.suffix in suffixes and path.name[0] != "."]
    expect(not leftovers, f"left behind: {leftovers}")


def run_trials(
    trials: Iterable[Trial], seconds: float = TRIAL_SECONDS, section_seconds: float = SECTION_SECONDS
) -> SectionResult:
    """Run all trials in order; a trial that the section has no time for counts as broken."""
    tried, broken, until = 0, list[str](), time.monotonic() + section_seconds
    for trial in trials:
        tried += 1
        left = min(seconds, until - time.monotonic())
        if fault := _run_trial(trial, left) if left > 0 else "the section's time was over":
            broken.append(f"{trial.name}: {fault}")
    return SectionResult(tried, tuple(broken))


def _run_trial(trial: Trial, seconds: float) -> str:
    """Run a trial with a time limit; returns its fault, or an empty text if it held."""
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
        return f"still running after {seconds:.0f} s"
