"""How far a run is and how long it takes yet: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

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

from kvaudit.audit.runs.forecast import Forecast

_SECONDS_BETWEEN_LINES, _LONGEST_SILENCE = 20.0, 300.0
_SECONDS_BETWEEN_UPDATES = 1.0  # of the time that is left, which goes through every part


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
            self._bar = Progress(*columns, console=self._console, speed_estimate_period=300, transient=True)
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
        if done <= 0:
            return "unknown"
        seconds = (time.monotonic() - self._started) / done * left
        return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


class RunBar:
    """The one bar of a run, over all its phases; use as a context manager. Within another's body it is that one.

    ``forecast`` knows what is to be done. ``found`` says what the answers so far show, a line each; ``look`` is called
    now and then to tell the forecast what other processes did. Elsewhere than on a terminal a line is printed now and
    then, seldom in a run of hours.
    """

    def __init__(
        self,
        console: Console,
        forecast: Forecast,
        found: Callable[[], Sequence[str]] = tuple,
        look: Callable[[], None] | None = None,
    ) -> None:
        self.forecast = forecast
        self._console, self._found, self._look = console, found, look
        self._started = self._printed = self._looked = self._updated = time.monotonic()
        self._left: float | None = None
        self._what, self._lines = "loading the model", tuple[str, ...]()
        self._bar: _Bar | None = None

    def __enter__(self) -> RunBar:
        if self._console.is_terminal:
            self._bar = _Bar(self)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def worked(self, part: Hashable, done: float, what: str) -> None:
        """So much of the cost of a part is done; ``what`` names the work under way."""
        self.forecast.worked(part, done)
        self._what = what
        self._show()

    @contextmanager
    def apart(self, part: Hashable, what: str) -> Iterator[None]:
        """Time a part that is done at one go, such as the start of an engine."""
        self._what, started = what or self._what, time.monotonic()
        yield
        self.forecast.took(part, time.monotonic() - started)
        self._show()

    @property
    def state(self) -> tuple[str, float, Sequence[str]]:
        """What is under way and how long all of it takes yet, the share that is done, and what was found."""
        # counted down since the forecast was asked last
        left = None if self._left is None else max(0.0, self._left - (time.monotonic() - self._updated))
        return f"{self._what}, {time_left(left)}", self.forecast.last_share, self._lines

    def _show(self) -> None:
        now = time.monotonic()
        since = now - self._started
        # a line each twentieth of the time so far, but within 20 s and 5 min
        due = now - self._printed >= min(_LONGEST_SILENCE, max(_SECONDS_BETWEEN_LINES, since / 20))
        if due or now - self._looked >= _SECONDS_BETWEEN_LINES:
            self._looked = now
            self._lines = tuple(self._found())
            if self._look is not None:
                self._look()
        if due or now - self._updated >= _SECONDS_BETWEEN_UPDATES:
            self._updated, self._left = now, self.forecast.left()
            self.forecast.share()
        if due:
            self._printed = now
            if self._bar is None:
                text = f"{self.forecast.share():.0%} done, {time_left(self._left)}: {self._what}"
                print_line(self._console, "; ".join((text, *self._lines)))


class _Bar(Progress):
    """The bar on a terminal, and below it what was found; it counts down by itself between two reports."""

    def __init__(self, run: RunBar) -> None:
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
        self._run = run
        super().__init__(*columns, console=run._console, transient=True, refresh_per_second=2)
        self._task = self.add_task("", total=1.0)

    def get_renderables(self) -> Iterable[RenderableType]:
        text, share, lines = self._run.state
        for task in self.tasks:
            task.description, task.completed = text, share
        yield self.make_tasks_table(self.tasks)
        yield from (Text(f"  {line}", overflow="ellipsis", no_wrap=True) for line in lines)


def time_left(seconds: float | None) -> str:
    """``about 3 minutes left``, as exact as a forecast is."""
    if seconds is None:
        return "time left not known yet"
    if seconds < 90:
        rounded = round(seconds) if seconds < 10 else 5 * round(seconds / 5)
        return f"about {rounded} s left"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min left"
    return f"about {seconds / 3600:.1f} h left"
