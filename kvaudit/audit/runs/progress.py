"""How far a run is and how long it still takes: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_SECONDS_BETWEEN_LINES, _LONGEST_SILENCE = 20.0, 300.0
_SPEED_PERIOD = 300.0  # seconds over which rich averages the speed that its estimate goes by


def print_line(console: Console, text: str) -> None:
    """Print a line as it is: no markup, no colours, no breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Meter:
    """Counts ``total`` steps of one phase, of which an earlier run did ``done``; use as a context manager."""

    def __init__(self, console: Console, phase: str, total: int, done: int = 0) -> None:
        self._console, self._phase, self._total = console, phase, total
        self._done = self._first = done
        self._started = self._printed = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Meter:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, speed_estimate_period=_SPEED_PERIOD, transient=True)
            self._task = self._bar.add_task(self._phase, total=self._total, completed=self._done)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._line("done")

    def at(self, done: int, what: str) -> None:
        """``done`` of the total are finished; ``what`` names the work under way."""
        self._done = min(done, self._total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, description=f"{self._phase} {what}")
        elif time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            self._line(what)

    def _line(self, what: str) -> None:
        share = 100 * self._done / self._total if self._total else 100.0
        text = f"{self._phase} {self._done}/{self._total} ({share:.0f} %), ETA {self._eta()}: {what}"
        print_line(self._console, text)

    def _eta(self) -> str:
        done, left = self._done - self._first, self._total - self._done
        if left <= 0:
            return "0 s"
        return duration((time.monotonic() - self._started) / done * left if done > 0 else None)


class RunBar:
    """The one bar of a run over all its phases; use as a context manager.

    It counts answers, those that training samples included. ``found`` returns what the answers so far show, a line
    each; ``look`` is called now and then to count what other processes did. Elsewhere than on a terminal a line is
    printed now and then, seldom in a run of hours.
    """

    def __init__(
        self, console: Console, found: Callable[[], Sequence[str]] = tuple, look: Callable[[], None] | None = None
    ) -> None:
        self._console, self._found, self._look = console, found, look
        self._sizes, self._done = dict[Hashable, float](), dict[Hashable, float]()
        self._started = self._printed = self._looked = time.monotonic()
        self._what, self._of = "loading the model", ""
        self._bar = _Bar(console)

    def __enter__(self) -> RunBar:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    @property
    def open_parts(self) -> list[Hashable]:
        """The names of the parts that are not done yet."""
        return [name for name, size in self._sizes.items() if self._done[name] < size]

    def restart(self, of: str) -> None:
        """Forget all parts and count those of something else, which is named: of what follows nobody knows how much."""
        self._sizes.clear()
        self._done.clear()
        self._of = f" of {of}"
        self._bar.set_to(0.0, 0.0)

    def size(self, part: Hashable) -> float:
        """The number of answers of a part."""
        return self._sizes[part]

    def expect(self, part: Hashable, size: float, done: float = 0.0) -> None:
        """Add a part of so many answers, or correct its size."""
        self._sizes[part] = size
        self._done[part] = min(max(done, self._done.get(part, 0.0)), size)
        self._bar.set_to(sum(self._done.values()), sum(self._sizes.values()))

    def known(self, part: Hashable, done: float) -> None:
        """Count answers of an earlier run, from which no speed follows."""
        if part in self._sizes:
            self.expect(part, self._sizes[part], done)

    def count(self, part: Hashable, done: float) -> None:
        """Count the answers of a part that are done by now, by this process or another."""
        if part in self._sizes and done > self._done[part]:
            self._done[part] = min(done, self._sizes[part])
            self._bar.advance_to(sum(self._done.values()))

    def worked(self, part: Hashable, done: float, what: str) -> None:
        """Count the answers of a part that are done by now, and name the work under way."""
        self.count(part, done)
        self.show(what)

    def show(self, what: str) -> None:
        """Name the work under way, and print a line where one is due."""
        self._what = what
        self._bar.label(what)
        now = time.monotonic()
        # a line each twentieth of the time so far, but within 20 s and 5 min
        quiet = min(_LONGEST_SILENCE, max(_SECONDS_BETWEEN_LINES, (now - self._started) / 20))
        due = now - self._printed >= quiet
        if due or now - self._looked >= _SECONDS_BETWEEN_LINES:
            self._looked = now
            self._bar.lines = tuple(self._found())
            if self._look is not None:
                self._look()
        if due:
            self._printed = now
            if not self._console.is_terminal:
                text = f"{self._bar.share:.0%}{self._of} done, ETA {duration(self._bar.seconds_left)}: {self._what}"
                print_line(self._console, "; ".join((text, *self._bar.lines)))


class _Bar(Progress):
    """The bar on a terminal, and below it what was found."""

    def __init__(self, console: Console) -> None:
        columns = (
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self.lines: tuple[str, ...] = ()
        super().__init__(
            *columns,
            console=console,
            transient=True,
            refresh_per_second=2,
            speed_estimate_period=_SPEED_PERIOD,
            get_time=time.monotonic,
        )
        self._only = self.add_task("", total=None)

    def set_to(self, done: float, total: float) -> None:
        """Correct the state without a sample of the speed."""
        self.tasks[0].completed, self.tasks[0].total = done, total

    def advance_to(self, done: float) -> None:
        """Count what was done since the last call, which rich takes for a sample of the speed."""
        self.update(self._only, completed=done)

    def label(self, what: str) -> None:
        """Name the work under way."""
        self.update(self._only, description=what)

    @property
    def share(self) -> float:
        """The share that is done, from 0 to 1."""
        return self.tasks[0].percentage / 100

    @property
    def seconds_left(self) -> float | None:
        """Rich's estimate, None before it has one."""
        return self.tasks[0].time_remaining

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(f"  {line}", overflow="ellipsis", no_wrap=True) for line in self.lines)


def duration(seconds: float | None) -> str:
    """Seconds as ``12 s`` or ``3.5 min``, None as ``unknown``."""
    if seconds is None:
        return "unknown"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
