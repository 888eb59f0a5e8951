"""The base class of suites that ask another harness's tasks, and guards around the code of these tasks."""

from __future__ import annotations

import importlib
import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from kvaudit.core.errors import AuditError, DataError, RunError, SpecError
from kvaudit.core.facets import unknown_facets
from kvaudit.core.records import Grade, Item, Message, Outcome
from kvaudit.core.text import normalise
from kvaudit.suites.base import PUBLISHED, CountTokens, Split, Suite
from kvaudit.suites.templates import interleave_clusters

PASS_THRESHOLD = 0.5  # of a score with partial credit
TASK_ERRORS = (Exception, SystemExit, GeneratorExit)  # what a task's code may raise; Ctrl-C passes through
GRADING_SECONDS = 60.0  # per answer
LOADING_SECONDS = 1800.0  # of a task, with the download of its documents
_MIN_CLUSTERS = 59  # that can decide a margin of 5 points


class TaskTimeout(BaseException):
    """The error that a task's code took too long.

    It is a BaseException, so that an ``except Exception`` in that code does not catch it.
    """


@contextmanager
def time_limit(seconds: float = GRADING_SECONDS) -> Iterator[None]:
    """Raise TaskTimeout inside the context after ``seconds``.

    Limits may be nested; the one that ends first raises. In other threads than the main thread, where tasks are loaded
    and answers graded, there is no limit.
    """
    left = signal.getitimer(signal.ITIMER_REAL)[0]  # of the limit around this one; 0 without one
    if threading.current_thread() is not threading.main_thread() or 0 < left <= seconds:
        yield
        return

    def stop(*_: object) -> None:
        raise TaskTimeout(f"it took over {seconds:g} s")

    handler, start = signal.signal(signal.SIGALRM, stop), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - start)))


@contextmanager
def load_quietly(
    package: str, install: str, logger_name: str, message: Callable[[BaseException], str]
) -> Iterator[None]:
    """Silence a logger inside the context, where a task is loaded, and turn errors of the task's code into DataError.

    The DataError's text is ``message(error)``. If ``package`` is not installed, raises RunError, whose text begins with
    ``install``, how to install it.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise RunError(f"{install} ({error})") from error
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with time_limit(LOADING_SECONDS):
            yield
    except AuditError:
        raise
    except (*TASK_ERRORS, TaskTimeout) as error:  # a task is a program and may exit, or never end
        raise DataError(message(error)) from error
    finally:
        logger.setLevel(level)


def merge_clusters(clusters: Sequence[str], questions: Sequence[Sequence[str]]) -> list[str]:
    """Return a cluster for each row: its own or, if an earlier row has equal texts, that of the first such row.

    ``questions`` has the texts of each row; case and blanks are ignored.
    """
    first, keys = dict[tuple[str, ...], str](), [tuple(map(normalise, texts)) for texts in questions]
    return [first.setdefault(key, cluster) for cluster, key in zip(clusters, keys, strict=True)]


def ungraded(note: str, *facets: str) -> Grade:
    """Return the grade of an answer that the task's code could not grade; ``note`` says why, ``facets`` are unknown."""
    return Grade(Outcome.UNSCORED, None, note=note, facets=unknown_facets(facets))


class TaskRow(NamedTuple):
    """A row of a task, ready to become an item; ``label`` names the row in errors."""

    item_id: str
    cluster_id: str
    messages: tuple[Message, ...]
    payload: Mapping[str, Any]
    label: str


class TaskFamily(Suite):
    """The base of suite families (FAMILY:TASK) whose members ask another harness's tasks, one task each.

    A family defines ``task_rows`` and ``stream``, and makes its members with ``of_task``.
    """

    kind = "capability"
    licence = "that of the task's data"
    published, lengths = True, "any"
    row_word: ClassVar[str]  # the harness's word for a row

    @classmethod
    def of_task(cls, clusters: Collection[str], **attributes: Any) -> type[Suite]:
        """Return the suite of one task, as a class with the given attributes; ``clusters`` are the task's clusters."""
        count = len(clusters) if len(clusters) < _MIN_CLUSTERS else None
        return type(f"{cls.__name__}Task", (cls,), {"__doc__": cls.__doc__, "clusters": count, **attributes})

    def task_rows(self, split: Split) -> Sequence[TaskRow]:
        """Return every row of a split in the task's order."""
        raise NotImplementedError

    def stream(self, split: Split, seed: int) -> str:
        """Return the text that seeds the random order of a split's rows."""
        raise NotImplementedError

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        rows = self.task_rows(split)
        if n > len(rows):
            raise SpecError(
                f"suite {self.name}: {n} items requested, but the task has {len(rows)} {self.row_word}s for {split}; "
                "request fewer"
            )
        order = list(range(len(rows)))
        random.Random(self.stream(split, seed)).shuffle(order)
        chosen = [rows[number] for number in interleave_clusters(order, [row.cluster_id for row in rows])[:n]]
        for row in chosen if context_tokens else ():
            length = sum(count_tokens(message.content) for message in row.messages)
            if length > context_tokens:
                raise SpecError(
                    f"suite {self.name}: context_tokens {context_tokens} is too short, {self.row_word} {row.label} "
                    f"takes {length}"
                )
        placement = "none" if context_tokens else PUBLISHED
        return [
            Item(self.name, row.item_id, row.cluster_id, row.messages, context_tokens, placement, row.payload)
            for row in chosen
        ]
