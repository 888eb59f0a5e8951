"""The progress of a run, with the work of all its processes: a bar on a terminal, else a line now and then.

It also shows how many answers have been lost and gained against the reference so far. These are only counted, from the
record files; no statistical test is made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.units import PILOT_FOLDER, ROUNDS_FOLDER, Row, Unit, UnitFiles
from kvaudit.core.policy_names import compressed_policies, condition_names, reference_of, short_names
from kvaudit.core.spec import RunSpec

_SECONDS_BETWEEN_LINES, _LONGEST_SILENCE = 20.0, 300.0
_SPEED_PERIOD = 300.0  # seconds over which rich averages the speed for its estimate


def print_line(console: Console, text: str) -> None:
    """Print a line without markup, colours or line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float | None) -> str:
    """Return seconds as ``12 s`` or ``3.5 min``, and None as ``unknown``."""
    if seconds is None:
        return "unknown"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


class _Bar(Progress):
    """A progress bar of the package rich for one task, with lines of text below it; shown on terminals only."""

    def __init__(self, console: Console, *columns: ProgressColumn, total: float | None, done: float = 0.0) -> None:
        self.lines: tuple[str, ...] = ()
        super().__init__(
            *columns,
            console=console,
            transient=True,
            refresh_per_second=2,
            speed_estimate_period=_SPEED_PERIOD,
            get_time=time.monotonic,
            disable=not console.is_terminal,
        )
        self.add_task("", total=total, completed=done)  # type: ignore[arg-type]

    def set_to(self, done: float, total: float) -> None:
        """Set the number of done steps and the total, without an effect on rich's estimate of the speed."""
        self.tasks[0].completed, self.tasks[0].total = done, total
        if done < total:  # more parts after everything was done
            self.tasks[0].finished_time = None

    def restart(self) -> None:
        """Count from zero again, even if the bar was full."""
        self.reset(self.tasks[0].id, total=0)

    def advance_to(self, done: float) -> None:
        """Set the number of done steps, and let rich estimate the speed from the increase."""
        self.update(self.tasks[0].id, completed=done)

    def label(self, text: str) -> None:
        """Show the name of the current work."""
        self.update(self.tasks[0].id, description=text)

    @property
    def eta(self) -> str:
        """The estimated remaining time."""
        return duration(self.tasks[0].time_remaining)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(f"  {line}", overflow="ellipsis", no_wrap=True) for line in self.lines)


class Meter:
    """A progress bar of ``total`` steps, as a context manager; ``done`` of them were done by an earlier run."""

    def __init__(self, console: Console, phase: str, total: int, done: int = 0) -> None:
        self._console, self._phase, self._total, self._done = console, phase, total, done
        self._printed = time.monotonic()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar = _Bar(console, *columns, total=total, done=done)

    def __enter__(self) -> Meter:
        self._bar.label(self._phase)
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if kind is None and not self._console.is_terminal:
            self._print("done")

    def at(self, done: int, text: str) -> None:
        """Show that ``done`` steps of the total are done; ``text`` names the current work."""
        self._done = min(done, self._total)
        self._bar.advance_to(self._done)
        self._bar.label(f"{self._phase} {text}")
        if not self._console.is_terminal and time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            self._print(text)

    def _print(self, text: str) -> None:
        share = 100 * self._done / self._total if self._total else 100.0
        eta = "0 s" if self._done >= self._total else self._bar.eta
        print_line(self._console, f"{self._phase} {self._done}/{self._total} ({share:.0f} %), ETA {eta}: {text}")


class Part(NamedTuple):
    """A unit of work on the progress bar, of ``size`` answers; ``done`` returns how many of them are on disk."""

    name: Hashable
    size: float
    done: Callable[[], float] = lambda: 0.0


class RunBar:
    """The progress bar of a run over all its stages, counted in answers, including those sampled in training.

    Use it as a context manager. Where there is no terminal, it prints a line every 20 seconds, less often in a run of
    hours, followed by the lines that ``summary`` returns. It reads other processes' progress from disk at the same
    intervals.
    """

    def __init__(self, console: Console, summary: Callable[[], Sequence[str]] = tuple) -> None:
        self._console, self._summary = console, summary

    def __enter__(self) -> RunBar:
        self._parts, self._done = dict[Hashable, Part](), dict[Hashable, float]()
        self._claimed = frozenset[Hashable]()
        self._started = self._printed = self._polled = time.monotonic()
        self._round = ""
        columns = (
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = _Bar(self._console, *columns, total=None)
        self._bar.start()
        self.show("loading the model")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def size(self, name: Hashable) -> float:
        """Return the number of answers of a part."""
        return self._parts[name].size

    def restart(self, name: str) -> None:
        """Drop all parts and begin the bar again for the round ``name``; it is unknown how many rounds will follow."""
        self._parts.clear()
        self._done.clear()
        self._round = f" of {name}"
        self._bar.restart()

    def expect(self, parts: Iterable[Part]) -> None:
        """Add parts of the work to the bar, or correct the sizes of those that it has."""
        for part in parts:
            self._parts[part.name] = part
            self._done[part.name] = min(max(part.done(), self._done.get(part.name, 0.0)), part.size)
        self._bar.set_to(sum(self._done.values()), sum(part.size for part in self._parts.values()))

    def claim(self, names: Collection[Hashable]) -> None:
        """Set which parts this process works on; the progress of all other parts is read from disk."""
        self._claimed = frozenset(names)

    def resume(self, name: Hashable, done: float) -> None:
        """Set how many answers of a part were there before this process began; they do not count for the speed."""
        if name in self._parts:
            self._done[name] = min(max(done, self._done[name]), self._parts[name].size)
            self._bar.set_to(sum(self._done.values()), sum(part.size for part in self._parts.values()))

    def count(self, name: Hashable, done: float) -> None:
        """Set how many answers of a part (a unit of work) are done by now, by any process."""
        if name in self._parts and done > self._done[name]:
            self._done[name] = min(done, self._parts[name].size)
            self._bar.advance_to(sum(self._done.values()))

    def show(self, text: str) -> None:
        """Show the name of the current work, and print a line if one is due."""
        self._bar.label(text)
        now = time.monotonic()
        silence = min(_LONGEST_SILENCE, max(_SECONDS_BETWEEN_LINES, (now - self._started) / 20))
        is_due = now - self._printed >= silence
        if is_due or now - self._polled >= _SECONDS_BETWEEN_LINES:
            self._polled = now
            self._bar.lines = tuple(self._summary())
            for name, part in self._parts.items():
                if name not in self._claimed and self._done[name] < part.size:
                    self.count(name, part.done())
        if is_due:
            self._printed = now
            if not self._console.is_terminal:
                share = self._bar.tasks[0].percentage / 100
                line = f"{share:.0%}{self._round} done, ETA {self._bar.eta}: {text}"
                print_line(self._console, "; ".join((line, *self._bar.lines)))


class _Comparison(NamedTuple):
    """A comparison of two sides: its name, and pairs of units (one per side) of the same seed, suite and length."""

    name: str
    pairs: Sequence[tuple[Unit, Unit]]


class _UnitScores:
    """The scores of a unit of the run in ``folder``, read from its record files.

    ``update`` reads the complete lines that were added since the last call. It skips damaged lines; these are reported
    later, when the records are read.
    """

    def __init__(self, folder: Path, unit: Unit) -> None:
        self._folder, self._unit = folder, unit
        self._read: dict[Path, int] = {}
        self.scores: dict[Row, float | None] = {}

    def update(self) -> None:
        rounds = self._folder.glob(f"{ROUNDS_FOLDER}/*")
        for folder in (self._folder / PILOT_FOLDER, self._folder / "records", *rounds):
            path = UnitFiles.of(folder, self._unit).records
            begin = self._read.setdefault(path, 0)
            try:
                with path.open("rb") as file:
                    file.seek(begin)
                    whole, newline, _ = file.read().rpartition(b"\n")
            except FileNotFoundError:
                continue
            self._read[path] += len(whole) + len(newline)
            for line in whole.splitlines():
                with suppress(ValueError, TypeError, KeyError, RecursionError):
                    row = json.loads(line)
                    self.scores[row["item_id"], row["sample_index"]] = row["score"]


class FoundSoFar:
    """The answers lost and gained so far, counted from the record files of the run in ``folder``.

    The reference arm under each policy is compared with itself uncompressed, and each other arm with the reference arm.
    """

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self._spec, self._folder = spec, folder

    @cached_property
    def _comparisons(self) -> list[_Comparison]:
        return list(_comparisons(self._spec))

    @cached_property
    def _row_counts(self) -> dict[Unit, int]:
        units = dict.fromkeys(unit for comparison in self._comparisons for pair in comparison.pairs for unit in pair)
        return {unit: _row_count(self._spec, unit) for unit in units}

    @cached_property
    def _answers(self) -> dict[Unit, _UnitScores]:
        return {unit: _UnitScores(self._folder, unit) for unit in self._row_counts}

    def lines(self) -> list[str]:
        """Return a line for every comparison that has answers: ``int8: no loss so far in 40 of 720 answers``."""
        for unit, answers in self._answers.items():
            is_complete = 0 < self._row_counts[unit] <= len(answers.scores)
            if not is_complete:
                answers.update()
        return [line for comparison in self._comparisons if (line := self._line(comparison)) is not None]

    def _line(self, comparison: _Comparison) -> str | None:
        lost = gained = compared = 0
        for unit, against in comparison.pairs:
            ours, theirs = self._answers[unit].scores, self._answers[against].scores
            for row in ours.keys() & theirs.keys():
                score, reference = ours[row], theirs[row]
                if score is not None and reference is not None:
                    compared += 1
                    lost += score < reference
                    gained += score > reference
        if not compared:
            return None
        changes = (f"{lost} lost" if lost else "no loss") + (f", {gained} gained" if gained else "")
        rows = [self._row_counts[unit] for unit, _ in comparison.pairs]
        total = f" of {sum(rows)}" if all(rows) else ""  # unknown before the pilot for ``all`` and ``auto``
        return f"{comparison.name}: {changes} so far in {compared}{total} answers"


def policy_labels(spec: RunSpec) -> dict[str, str]:
    """Return {policy or engine setting of the evaluation: short label}."""
    policies = spec.evaluate.policies
    return {**short_names(policies), **condition_names(spec.evaluate.references)}


def _comparisons(spec: RunSpec) -> Iterator[_Comparison]:
    if spec.gate.reference is None:
        return
    units = {(u.arm, u.seed, u.policy.canonical, u.suite, u.context_tokens): u for u in grid(spec)}
    reference, references, names = spec.gate.reference, spec.evaluate.references, policy_labels(spec)
    for policy in compressed_policies(spec.evaluate.policies, references):
        reference_policy = reference_of(policy, references)
        yield _Comparison(names[policy], list(_pairs(units, (reference, policy), (reference, reference_policy))))
    plain_policies = [policy for policy in spec.evaluate.policies if reference_of(policy, references) == policy]
    others = dict.fromkeys(arm for arm, _ in spec.arms if arm != reference)
    for arm, reference_policy in ((arm, plain_policies[0]) for arm in others if plain_policies):
        yield _Comparison(
            f"{arm} against {reference}", list(_pairs(units, (arm, reference_policy), (reference, reference_policy)))
        )


def _pairs(
    units: Mapping[tuple[str, int, str, str, int], Unit], ours: tuple[str, str], theirs: tuple[str, str]
) -> Iterator[tuple[Unit, Unit]]:
    """Yield pairs of units that are equal but for arm and policy: one of ``ours`` (arm, policy) with one of ``theirs``.

    The keys of ``units`` are (arm, seed, policy, suite, length).
    """
    for (arm, seed, policy, suite, context), unit in units.items():
        against = units.get((theirs[0], seed, theirs[1], suite, context))
        if (arm, policy) == ours and against is not None:
            yield unit, against


def _row_count(spec: RunSpec, unit: Unit) -> int:
    items = spec.evaluate.suites[unit.suite].items
    return items * spec.evaluate.samples_of(unit.suite) if isinstance(items, int) else 0
