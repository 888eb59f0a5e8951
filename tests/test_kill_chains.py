"""Kill -9 at random instants over train, evaluate and report: nothing lost, doubled or corrupt, and the same end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_launchers import is_alive

from bench.kills import LIMITS, SPEC

ROOT = Path(__file__).parent.parent


def killed(kills: int, seed: int) -> dict[str, Any]:
    """The figures of ``python -m bench.kills``, in a process that has computed nothing, so that it can fork."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bench.kills", str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_runs_survive_a_handful_of_kills() -> None:
    found = killed(3, 1)
    assert found["kills"] >= 3
    assert {kind: found[kind] for kind in LIMITS} == LIMITS


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_runs_of_one_and_two_processes_survive_two_hundred_kills() -> None:
    found = killed(200, 0)
    assert found["kills"] >= 200
    assert {kind: found[kind] for kind in LIMITS} == LIMITS
    assert (
        min(found[f"{phase}, {who} at work"] for phase in ("train", "evaluate", "report") for who in ("one", "two")) > 0
    )


LONG = SPEC.replace("steps: 2,", "steps: 20,").replace("items: 2}", "items: 8}")


def with_worker(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A run under way with one worker that is at work too, and the worker's process number."""
    (folder / "spec.yaml").write_text(LONG)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "kvaudit.audit.cli",
        "run",
        folder / "spec.yaml",
        "--out",
        folder / "run",
        "--workers",
        "2",
        "--anyway",
    ]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    log = folder / "run" / "logs" / "worker-1.log"
    while not (log.exists() and "model: embedded" in log.read_text()):
        assert run.poll() is None
        time.sleep(0.05)
    table = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(maxsplit=2) for line in table.splitlines()]
    (worker,) = (int(pid) for pid, parent, words in rows if int(parent) == run.pid and "exit_with_parent()" in words)
    return run, worker


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_ends_with_its_run(tmp_path: Path, number: signal.Signals) -> None:
    run, worker = with_worker(tmp_path)
    run.send_signal(number)
    _, err = run.communicate()
    until = time.monotonic() + 20  # a busy machine; an idle one takes a blink
    while is_alive(worker) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_alive(worker)
    assert (run.returncode, "terminated; continue with: " in err) in ((-9, False), (143, True))


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_says_so_and_is_whole(tmp_path: Path) -> None:
    run, worker = with_worker(tmp_path)
    os.kill(worker, signal.SIGKILL)
    _, err = run.communicate()
    assert "worker 1 was killed by SIGKILL (out of memory?); its claims go back to the others" in err
    assert run.returncode == 0
    assert len(list((tmp_path / "run" / "records").glob("*.done.json"))) == 4
