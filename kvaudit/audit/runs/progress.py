"""Progress of a run: rich's bar on a terminal, a plain line now and then elsewhere, and the work of other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
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

_SECONDS_BETWEEN_LINES, _LONGEST_SILENCE = 20.0, 300.0
_SPEED_PERIOD = 300.0  # seconds over which rich averages the speed for its estimate


def print_line(console: Console, text: str) -> None:
    """Print a line without markup, colours or line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float | None) -> str:
    """Return seconds as ``12 s`` or ``3.5 min``, None as ``unknown``."""
    if seconds is None:
        return "unknown"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


class _Bar(Progress):
    """A rich progress bar of one task, with further lines of text below it; shown on terminals only."""

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
        """Set the state without adding a sample to rich's estimate of the speed."""
        self.tasks[0].completed, self.tasks[0].total = done, total
        if done < total:  # more parts after everything was done
            self.tasks[0].finished_time = None

    def restart(self) -> None:
        """Count from zero again, also after everything was done, which rich would otherwise remember."""
        self.reset(self.tasks[0].id, total=0)

    def advance_to(self, done: float) -> None:
        """Set the state, and count what was done since the last call as a sample of the speed."""
        self.update(self.tasks[0].id, completed=done)

    def label(self, text: str) -> None:
        """Name the work under way."""
        self.update(self.tasks[0].id, description=text)

    @property
    def eta(self) -> str:
        """The estimated time that is left."""
        return duration(self.tasks[0].time_remaining)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(f"  {line}", overflow="ellipsis", no_wrap=True) for line in self.lines)


class Meter:
    """A bar over ``total`` steps of one phase, ``done`` of them by an earlier run; use it as a context manager."""

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
        """Count ``done`` steps of the total; ``text`` names the work under way."""
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
    """A unit of work of ``size`` answers; ``done`` counts those that any process has written to disk so far."""

    name: Hashable
    size: float
    done: Callable[[], float] = lambda: 0.0


class RunBar:
    """The progress of a run over its stages, in answers, including those that training samples.

    Use it as a context manager. Away from a terminal it prints a line every 20 seconds, less often in a run of hours,
    followed by the lines that ``summary`` returns. Parts of other processes are read from disk as often.
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

    @property
    def open_parts(self) -> list[Part]:
        """The parts that are not done yet."""
        return [part for name, part in self._parts.items() if self._done[name] < part.size]

    def size(self, name: Hashable) -> float:
        """The number of answers of a part."""
        return self._parts[name].size

    def restart(self, name: str) -> None:
        """Forget all parts and count those of a round alone, since the number of rounds is not known."""
        self._parts.clear()
        self._done.clear()
        self._round = f" of {name}"
        self._bar.restart()

    def expect(self, parts: Iterable[Part]) -> None:
        """Add parts, or correct their sizes."""
        for part in parts:
            self._parts[part.name] = part
            self._done[part.name] = min(max(part.done(), self._done.get(part.name, 0.0)), part.size)
        self._bar.set_to(sum(self._done.values()), sum(part.size for part in self._parts.values()))

    def claim(self, names: Collection[Hashable]) -> None:
        """Take these parts as the ones that this process works on, and no other."""
        self._claimed = frozenset(names)

    def resume(self, name: Hashable, done: float) -> None:
        """Count answers of an earlier run or another process, which say nothing about the speed of this one."""
        if name in self._parts:
            self._done[name] = min(max(done, self._done[name]), self._parts[name].size)
            self._bar.set_to(sum(self._done.values()), sum(part.size for part in self._parts.values()))

    def count(self, name: Hashable, done: float) -> None:
        """Count the answers of a part that are done by now, by this process or another."""
        if name in self._parts and done > self._done[name]:
            self._done[name] = min(done, self._parts[name].size)
            self._bar.advance_to(sum(self._done.values()))

    def show(self, text: str) -> None:
        """Name the work under way, and print a line if one is due."""
        self._bar.label(text)
        now = time.monotonic()
        silence = min(_LONGEST_SILENCE, max(_SECONDS_BETWEEN_LINES, (now - self._started) / 20))
        is_due = now - self._printed >= silence
        if is_due or now - self._polled >= _SECONDS_BETWEEN_LINES:
            self._polled = now
            self._bar.lines = tuple(self._summary())
            for part in self.open_parts:
                if part.name not in self._claimed:
                    self.count(part.name, part.done())
        if is_due:
            self._printed = now
            if not self._console.is_terminal:
                share = self._bar.tasks[0].percentage / 100
                line = f"{share:.0%}{self._round} done, ETA {self._bar.eta}: {text}"
                print_line(self._console, "; ".join((line, *self._bar.lines)))
