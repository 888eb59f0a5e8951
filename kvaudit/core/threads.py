"""Work in several threads that no end of the process waits for.

The threads of ``concurrent.futures`` are joined at exit: a server that does not answer would hold up whoever pressed
ctrl-C for as long as its own time limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

_Q = TypeVar("_Q")
_R = TypeVar("_R")


def begun(work: Callable[[_Q], _R], asked: Sequence[_Q], at_once: int) -> list[Future[_R]]:
    """Begin ``work`` on each, ``at_once`` of them at a time and in order; one that is cancelled in time is left out."""
    futures = [Future[_R]() for _ in asked]
    left, door = iter(zip(futures, asked, strict=True)), threading.Lock()

    def worker() -> None:
        while True:
            with door:
                future, one = next(left, (None, None))
            if future is None:
                return
            if future.set_running_or_notify_cancel():
                _settle(future, work, one)  # type: ignore[arg-type]

    for number in range(min(at_once, len(asked))):
        threading.Thread(target=worker, name=f"asking {number}", daemon=True).start()
    return futures


def _settle(future: Future[_R], work: Callable[[_Q], _R], one: _Q) -> None:
    try:
        future.set_result(work(one))
    except BaseException as error:  # raised where the future is waited for
        future.set_exception(error)


def done_in_order(work: Callable[[_Q], _R], asked: Sequence[_Q], at_once: int) -> list[_R]:
    """What ``work`` gives for each, in order; raises the first error in that order, and begins no more then."""
    futures = begun(work, asked, at_once)
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
