"""The declared stop: an alarm that ends one arm ends all arms of its seed, at one step.

That step is the first at which the rule holds in any of them, or the last there is: a function of the spec alone,
whoever trains which arm and when. An arm that comes to its own end leaves a mark and its states, and waits. Once every
arm of the seed has a mark, each is cut back to the earliest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.audit.training.files import guarded
from kvaudit.core.alarms import alarm_key
from kvaudit.core.errors import DataError
from kvaudit.core.files import read_json, write_json
from kvaudit.core.spec_train import ValidationSpec

MARK = "halt.json"  # in an arm's folder


class Mark(NamedTuple):
    """Where an arm came to its own end, and the alarm that ended it; None where steps or another arm did."""

    step: int
    alarm: str | None


class EarlyStop:
    """The stop of one arm in ``folder``; ``arms`` are the folders of all arms of its seed, its own among them."""

    def __init__(self, spec: ValidationSpec, steps: int, folder: Path, arms: Sequence[Path]) -> None:
        self._spec, self._steps, self._folder, self._arms = spec, steps, folder, arms

    @property
    def step(self) -> int | None:
        """Where all arms of the seed end; None while one of them is under way."""
        marks = [mark_of(arm) for arm in self._arms]
        known = [mark.step for mark in marks if mark is not None]
        # all or nothing: an arm under way may yet ring earlier
        return min(known) if len(known) == len(marks) else None

    def due(self, done: int) -> bool:
        """Whether training may end after so many steps, so that the state there is kept."""
        return done % self._spec.every == 0 or done == self._steps

    def ends(self, done: int, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the arm has come to its end; then it is marked. ``rows`` are its telemetry so far."""
        if done == 0 or not self.due(done):
            return False
        alarm = next((name for name in self._spec.stop_on if self._rang(name, rows)), None)
        others = [mark.step for mark in map(mark_of, self._arms) if mark is not None]
        # where another arm ended before, the seed's step is that one's or an earlier one: no need to go further
        if alarm is None and done < self._steps and min(others, default=done + 1) > done:
            return False
        with guarded(self._folder):
            write_json(self._folder / MARK, Mark(done, alarm)._asdict())
        return True

    def _rang(self, name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
        last = rows[-self._spec.patience :]
        return len(last) == self._spec.patience and all(row[alarm_key(name)] == 1 for row in last)


def mark_of(folder: Path) -> Mark | None:
    """The mark of an arm, None while it is under way; raises DataError for a file that is none."""
    path = folder / MARK
    if not path.exists():
        return None
    found = read_json(path)
    step, alarm = found.get("step"), found.get("alarm")
    if type(step) is not int or step < 1 or not (alarm is None or isinstance(alarm, str)):
        raise DataError(f"{str(path)!r} says of no step where training ended; delete {str(folder)!r} to train again")
    return Mark(step, alarm)
