"""Work in threads that no end of the process waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from kvaudit.core.network import map_in_order, start_all

HANGING = {
    "an engine's requests": "from kvaudit.audit.engines.http_server import ask_concurrently as ask; more = (1e9,)",
    "a judge's questions": "from kvaudit.core.network import map_in_order as ask; more = ()",
}


@pytest.mark.parametrize(("whose", "sign"), [*zip(HANGING, (signal.SIGINT, signal.SIGTERM), strict=True)])
def test_a_process_whose_server_hangs_ends_when_it_is_told_to(whose: str, sign: signal.Signals) -> None:
    """The threads sleep for ten minutes, which an exit that joins them would wait for."""
    code = (
        f"import os, time; from kvaudit.audit.commands.base import end_on_sigterm; {HANGING[whose]}\n"
        "end_on_sigterm()\n"
        "def work(one):\n    os.write(1, b'asked\\n'); time.sleep(600)\n"
        "ask(work, [1, 2, 3], 2, *more)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["asked\n"] * 2
        process.send_signal(sign)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode != 0


def test_at_most_so_many_run_at_once_and_results_keep_their_order() -> None:
    door, under_way, most = threading.Lock(), [0], [0]
    together = threading.Barrier(3, timeout=60)

    def work(number: int) -> int:
        with door:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        together.wait()
        with door:
            under_way[0] -= 1
        return number * number

    assert map_in_order(work, range(9), 3) == [n * n for n in range(9)]
    assert most == [3]


def test_the_first_error_in_order_is_raised_and_nothing_more_is_begun() -> None:
    held, asked = threading.Event(), list[int]()

    def work(number: int) -> int:
        asked.append(number)
        if number == 1:
            raise ValueError("one")
        assert number == 0 or held.wait(60)
        return number

    with pytest.raises(ValueError, match="one"):
        map_in_order(work, range(9), 1)
    held.set()
    assert asked in ([0, 1], [0, 1, 2])


def test_an_error_tells_work_that_has_begun_to_stop_and_gives_it_time_to_end() -> None:
    stop, both, ended = threading.Event(), threading.Barrier(2, timeout=60), list[int]()

    def work(number: int) -> None:
        both.wait()
        if number == 0:
            raise ValueError("zero")
        assert stop.wait(60)
        time.sleep(0.2)
        ended.append(number)

    with pytest.raises(ValueError, match="zero"):
        map_in_order(work, range(2), 2, stop=stop, grace=60)
    assert ended == [1]


def test_work_that_is_cancelled_in_the_queue_never_starts() -> None:
    held, asked = threading.Event(), list[int]()

    def work(number: int) -> int:
        asked.append(number)
        assert held.wait(60)
        return number

    futures = start_all(work, range(3), 1)
    assert futures[1].cancel()
    held.set()
    assert [futures[0].result(60), futures[2].result(60)] == [0, 2]
    assert asked == [0, 2]
