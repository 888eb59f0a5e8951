"""Extra workers of a run: their failure stops nothing, and they end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvaudit.audit.runs.launchers import local
from kvaudit.audit.runs.launchers.base import Job
from kvaudit.audit.runs.launchers.local import ExtraWorker, idle_cores, local_workers, usable_cores

TIED = (
    "import time; from kvaudit.audit.runs.launchers.local import exit_with_parent; exit_with_parent(); "
    "print('here', flush=True); time.sleep(600)"
)
PARENT = """
import sys, time
from pathlib import Path
from kvaudit.audit.runs.launchers import local
from kvaudit.audit.runs.launchers.base import Job
local.PROGRAM = (sys.executable, "-c", sys.argv[1])
with local.local_workers(2, Job([], Path(sys.argv[2]), Path()), print) as started:
    print(*(one.process.pid for one in started), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that end only if somebody ends them."""
    monkeypatch.setattr(local, "PROGRAM", (sys.executable, "-c", TIED))


def wait_for(log: Path) -> None:
    while "here" not in log.read_text():
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL (out of memory?)"), (signal.SIGSEGV, "SIGSEGV")]
)
def test_a_worker_that_is_killed_is_named(tmp_path: Path, endless: None, number: signal.Signals, name: str) -> None:
    said: list[str] = []
    with local_workers(2, Job([], tmp_path / "logs", tmp_path), said.append) as started:
        wait_for(tmp_path / "logs" / "worker-2.log")
        started[1].process.send_signal(number)
        while not said:
            time.sleep(0.01)
        raised = said[0]
        started[0].process.stdin.close()
    assert raised.startswith(f"worker 2 was killed by {name}; its claims go back")


def test_workers_are_stopped_when_the_body_fails(tmp_path: Path, endless: None) -> None:
    said: list[str] = []
    started: list[ExtraWorker] = []

    def body() -> None:
        with local_workers(2, Job([], tmp_path / "logs", tmp_path), said.append) as found:
            started.extend(found)
            wait_for(tmp_path / "logs" / "worker-1.log")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        body()
    assert [one.process.returncode for one in started] == [-signal.SIGTERM] * 2
    assert said == []


def test_all_workers_are_asked_to_end_before_one_of_them_is_waited_for(
    tmp_path: Path, endless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("ask_to_end", "stop"):
        plain = getattr(ExtraWorker, name)

        def noted(self: ExtraWorker, *args: float, name: str = name, plain: Any = plain) -> None:
            calls.append(f"{name} {self._number}")
            plain(self, *args)

        monkeypatch.setattr(ExtraWorker, name, noted)
    with pytest.raises(KeyboardInterrupt), local_workers(2, Job([], tmp_path / "logs", tmp_path), print):
        raise KeyboardInterrupt
    assert calls[:3] == ["ask_to_end 1", "ask_to_end 2", "stop 1"]


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, TIED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    for log in ("worker-1.log", "worker-2.log"):
        wait_for(tmp_path / log)
    parent.kill()
    parent.communicate()
    while any(map(is_alive, pids)):  # for ever, and the test's own limit ends it, where they outlive their parent
        time.sleep(0.01)
    for log in ("worker-1.log", "worker-2.log"):
        assert "the process that started this worker has ended" in (tmp_path / log).read_text()


def test_a_worker_leaves_an_interrupt_of_the_terminal_to_its_parent(tmp_path: Path, endless: None) -> None:
    said: list[str] = []
    with local_workers(1, Job([], tmp_path / "logs", tmp_path), said.append) as started:
        wait_for(tmp_path / "logs" / "worker-1.log")
        started[0].process.send_signal(signal.SIGINT)
        started[0].process.stdin.close()
        assert started[0].process.wait() == 143


def test_there_is_always_one_core() -> None:
    assert idle_cores() >= 1


def test_cores_are_counted_where_no_process_has_an_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity")  # as on macOS
    assert usable_cores() == os.cpu_count()
