"""Tasks of other harnesses as suites: what all families have in common whose members are tasks that somebody names."""

from __future__ import annotations

import importlib
import logging
import random
import signal
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from kvaudit.core.errors import AuditError, DataError, RunError, SpecError
from kvaudit.core.records import Item, Message
from kvaudit.suites.base import PUBLISHED, CountTokens, Split, Suite
from kvaudit.suites.templates import interleave_clusters

PASS_THRESHOLD = 0.5  # of a score that gives parts of a point
TASK_ERRORS = (Exception, SystemExit, GeneratorExit)  # what a task's code may raise; ctrl-C comes through
GRADING_SECONDS = 60.0  # of one answer
_FEWEST_CLUSTERS = 59  # that can decide a margin of five points


@contextmanager
def load_quietly(package: str, needed: str, remarks: str, failed: Callable[[BaseException], str]) -> Iterator[None]:
    """Load a task without the package's ``remarks``; what it or the task's code raises becomes the line ``failed``.

    ``needed`` says what to install where the package is not here.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise RunError(f"{needed} ({error})") from error
    logger = logging.getLogger(remarks)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except AuditError:
        raise
    except TASK_ERRORS as error:  # a task is a program, which may end itself
        raise DataError(failed(error)) from error
    finally:
        logger.setLevel(level)


class TaskTimeout(BaseException):
    """A task's code was stopped; no ``except Exception`` of its own holds this up."""


@contextmanager
def time_limit(seconds: float = GRADING_SECONDS) -> Iterator[None]:
    """Stop what a task's code does in the body after so many seconds, with TookTooLong.

    Only the main thread can be stopped so, which is where answers are graded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TaskTimeout

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refuse_task(label: str, reasons: Mapping[str, bool], wanted: str) -> None:
    """Raise SpecError for the first of the ``reasons`` that holds why a task cannot be a suite."""
    for why, holds in reasons.items():
        if holds:
            raise SpecError(f"{label} {why}; {wanted} can be suites")


def merge_clusters(clusters: Sequence[str], asked: Sequence[Hashable]) -> list[str]:
    """The cluster of every row, that of the first row that asks the same: a copy of a question is no new evidence."""
    first = dict[Hashable, str]()
    return [first.setdefault(question, cluster) for cluster, question in zip(clusters, asked, strict=True)]


class TaskRow(NamedTuple):
    """A row of a task as it is asked; ``shown`` is how an error names it."""

    item_id: str
    cluster_id: str
    messages: tuple[Message, ...]
    payload: Mapping[str, Any]
    shown: str


class TaskFamily(Suite):
    """Subclass and write ``task_rows`` and ``stream``; ``of_task`` makes a member."""

    kind = "capability"
    licence = "that of the task's data"
    published, lengths = True, "any"
    row_word: ClassVar[str]  # what the harness calls a row

    @classmethod
    def of_task(cls, clusters: Collection[str], **attributes: Any) -> type[Suite]:
        """The suite of one task, with the class attributes that it gives."""
        few = len(clusters) if len(clusters) < _FEWEST_CLUSTERS else None
        return type(f"{cls.__name__}Task", (cls,), {"__doc__": cls.__doc__, "clusters": few, **attributes})

    def task_rows(self, split: Split) -> Sequence[TaskRow]:
        """Every row of a split, in the task's order."""
        raise NotImplementedError

    def stream(self, split: Split, seed: int) -> str:
        """What the order of the rows is drawn from."""
        raise NotImplementedError

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        rows = self.task_rows(split)
        if n > len(rows):
            raise SpecError(
                f"suite {self.name}: {n} items are asked for, the task has {len(rows)} {self.row_word}s to "
                f"{'train on' if split == 'train' else 'evaluate'}; ask for no more"
            )
        order = list(range(len(rows)))
        random.Random(self.stream(split, seed)).shuffle(order)
        chosen = [rows[number] for number in interleave_clusters(order, [row.cluster_id for row in rows])[:n]]
        for row in chosen if context_tokens else ():
            length = sum(count_tokens(message.content) for message in row.messages)
            if length > context_tokens:
                raise SpecError(
                    f"suite {self.name}: context_tokens {context_tokens} is too short, {self.row_word} {row.shown} "
                    f"takes {length}"
                )
        placement = "none" if context_tokens else PUBLISHED
        return [
            Item(self.name, row.item_id, row.cluster_id, row.messages, context_tokens, placement, row.payload)
            for row in chosen
        ]

    def until_stop(self, text: str) -> str:
        """An answer up to the first text that ends it."""
        return text[: min((at for stop in self.until if (at := text.find(stop)) >= 0), default=len(text))]
