"""Network requests in daemon threads with deadlines, and file downloads.

Threads of ``concurrent.futures`` are joined at exit, so a server that does not answer would delay ctrl-C until the
timeout. And a socket's timeout restarts with every byte, so a slow reply needs a separate deadline.
"""

from __future__ import annotations

import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from http.client import HTTPException
from typing import Any, TypeVar

from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.text import has_password, hide_passwords, inline, one_line

_Q = TypeVar("_Q")
_R = TypeVar("_R")
_LARGEST = 100 << 20  # bytes of a file, the most that GitHub takes
_CHUNK = 1 << 16
_SECONDS = 600.0  # for a whole file
_SLICE = 1.0  # seconds of one wait


def start_all(work: Callable[[_Q], _R], arguments: Sequence[_Q], threads: int) -> list[Future[_R]]:
    """Start ``work`` on each argument in ``threads`` threads; return a future per argument, in order.

    A future can be cancelled as long as its work has not begun.
    """
    futures = [Future[_R]() for _ in arguments]
    queue, lock = iter(zip(futures, arguments, strict=True)), threading.Lock()

    def worker() -> None:
        while True:
            with lock:
                future, argument = next(queue, (None, None))
            if future is None:
                return
            if future.set_running_or_notify_cancel():
                _run(future, work, argument)

    for number in range(min(threads, len(arguments))):
        threading.Thread(target=worker, name=f"network {number}", daemon=True).start()
    return futures


def map_in_order(
    work: Callable[[_Q], _R],
    arguments: Sequence[_Q],
    threads: int,
    *,
    stop: threading.Event | None = None,
    grace: float = 0.0,
) -> list[_R]:
    """Return the results of ``work`` on each argument, in order; if one raises an error, stop and raise the error.

    On an error, work that has not begun is cancelled, and ``stop`` is set, which running work may watch. Running work
    gets ``grace`` seconds to end.
    """
    futures = start_all(work, arguments, threads)
    try:
        results = []
        for future in futures:
            wait_in_slices([future])
            results.append(future.result())
        return results
    except BaseException:
        if stop is not None:
            stop.set()
        wait([future for future in futures if not future.cancel()], grace)
        raise


def wait_in_slices(
    futures: Collection[Future[_R]], seconds: float = math.inf, return_when: str = ALL_COMPLETED
) -> tuple[set[Future[_R]], set[Future[_R]]]:
    """Wait as ``concurrent.futures.wait`` does, but in slices of a second; return the (done, not done) futures.

    A signal does not wake the main thread if it arrives just before the thread sleeps, or in another thread. A single
    long wait could therefore miss ctrl-C and SIGTERM.
    """
    end = time.monotonic() + seconds
    while True:
        done, pending = wait(futures, max(0.0, min(_SLICE, end - time.monotonic())), return_when)
        has_failed = any(not future.cancelled() and future.exception() for future in done)
        if not pending or time.monotonic() >= end or (return_when == FIRST_EXCEPTION and has_failed):
            return done, pending


def call_with_timeout(work: Callable[[], _R], seconds: float) -> _R:
    """Return the result of ``work``; after ``seconds``, abandon its thread and raise TimeoutError."""
    future = Future[_R]()
    threading.Thread(target=lambda: _run(future, lambda _: work(), None), daemon=True).start()
    return future.result(seconds)


def _run(future: Future[_R], work: Callable[[Any], _R], argument: Any) -> None:
    try:
        future.set_result(work(argument))
    except BaseException as error:  # raised where the future is read
        future.set_exception(error)


def download(url: str, seconds: float = _SECONDS) -> bytes:
    """Download the bytes at a public address; raises RunError if there is no network or no such file."""
    if not url.startswith(("http://", "https://")):
        raise SpecError(f"address {hide_passwords(url)[:80]!r} wants http:// or https://")
    address = hide_passwords(url)
    if has_password(url):  # the DNS lookup of the host would leak it
        raise SpecError(f"address {address!r} has a user or a password in it, wanted one that needs none")
    try:
        deadline = time.monotonic() + seconds
        return call_with_timeout(lambda: _read(url, deadline), seconds)
    except TimeoutError:
        raise RunError(
            f"{address} gives more than {_LARGEST >> 20} MiB, or takes over {seconds:g} s; try later"
        ) from None
    except urllib.error.HTTPError as error:
        with error:
            raise RunError(f"{address} answers {error.code}; nothing was written") from None
    except (OSError, HTTPException, ValueError) as error:
        why = hide_passwords(inline(one_line(error))) or type(error).__name__
        raise RunError(
            f"{address} cannot be reached ({why}); fetch where there is a network, or copy the file into the folder of "
            "public rows by hand"
        ) from None


def _read(url: str, deadline: float) -> bytes:
    """Read a response up to the deadline; raises TimeoutError if it is too large or too slow."""
    body = bytearray()
    with urllib.request.urlopen(url, timeout=deadline - time.monotonic()) as reply:  # noqa: S310 - the scheme was checked
        while chunk := reply.read1(_CHUNK):  # what has arrived, so that the deadline is checked often
            body += chunk
            if len(body) > _LARGEST or time.monotonic() > deadline:
                raise TimeoutError
    return bytes(body)
