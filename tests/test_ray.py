"""Whole runs through ray on one machine: the stages of the default audit, whose bytes no task and no lost node changes.

They need a Python that has ray and this project: KVAUDIT_PYTHON_RAY; ``make test-engines``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench import ray_tasks
from bench.ray_tasks import NICENESS, descendants, run, small_audit

PYTHON = os.environ.get("KVAUDIT_PYTHON_RAY", "")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON, reason="KVAUDIT_PYTHON_RAY names no Python that has ray"),
]


@pytest.fixture(scope="module", autouse=True)
def home() -> Iterator[Path]:
    """Ray's own files and its token in a short folder, since a socket's path has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patched:
        for name, value in {**NICENESS, "HOME": folder, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token"}.items():
            patched.setenv(name, value)
        yield Path(folder)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_audit(tmp_path_factory.mktemp("ray") / "spec.yaml")


@pytest.fixture(scope="module")
def plain(spec: Path) -> dict[str, object]:
    """What the run without ray leaves behind."""
    done = run(PYTHON, spec, spec.parent / "plain")
    assert done.code == 0, done.log
    assert len(done.outcome["seals"]) == 45  # five checkpoints, three policies, three suites
    return done.outcome


def test_four_tasks_leave_what_one_process_leaves(spec: Path, plain: dict[str, object]) -> None:
    done = run(PYTHON, spec, spec.parent / "tasks", tasks=4)
    assert done.code == 0, done.log
    assert all("model: embedded" in text for text in done.worker_logs)
    assert done.outcome == plain


class Cluster(NamedTuple):
    address: str
    second: subprocess.Popen[bytes]


def start_node(log: Path, *words: str) -> subprocess.Popen[bytes]:
    """A node that is up: ray waits 30 seconds for its own processes, so beside other work it takes a second start."""
    command = [str(Path(PYTHON).parent / "ray"), "start", "--block", "--num-cpus=2", "--num-gpus=0"]
    command += ["--object-store-memory=100000000", "--disable-usage-stats", *words]
    for _ in range(3):
        with log.open("wb") as out:
            node = subprocess.Popen(command, stdout=out, stderr=out)
        while node.poll() is None:
            if "Ray runtime started" in log.read_text(errors="replace"):
                return node
            time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace"))


def raylet_of(node: subprocess.Popen[bytes]) -> int:
    (found,) = (pid for pid, words in descendants(node.pid) if "/raylet --" in words)
    return found


@pytest.fixture
def cluster(home: Path) -> Iterator[Cluster]:
    """Two nodes of two tasks each, both on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    subprocess.run([Path(PYTHON).parent / "ray", "get-auth-token", "--generate"], check=True, stdout=subprocess.DEVNULL)
    nodes = [start_node(home / "head.log", "--head", f"--port={port}", "--include-dashboard=false")]
    try:
        second = ("--node-ip-address=127.0.0.2", f"--address=127.0.0.1:{port}")
        nodes.append(start_node(home / "second.log", *second))
        yield Cluster(f"127.0.0.1:{port}", nodes[1])
    finally:
        ray_tasks.end(nodes)


def test_a_run_outlives_one_of_its_nodes(spec: Path, plain: dict[str, object], cluster: Cluster) -> None:
    folder = spec.parent / "lost"
    killed = []

    def kill_once_at_work() -> None:
        busy = [pid for pid, words in descendants(cluster.second.pid) if "exit_with_parent()" in words]
        if busy and not killed and len(list(folder.glob("records/*.done.json"))) >= 6:
            killed.append(raylet_of(cluster.second))
            os.kill(killed[0], signal.SIGKILL)

    done = run(PYTHON, spec, folder, tasks=4, launcher=f"ray:address={cluster.address},gpus=0", watch=kill_once_at_work)
    assert killed, done.log
    assert done.code == 0, done.log
    assert "the node it was running on is dead" in done.log
    assert done.outcome == plain


def test_the_error_says_what_rays_own_log_says(spec: Path) -> None:
    limited = ["prlimit", "--nofile=40"]
    done = run(PYTHON, spec, spec.parent / "none", tasks=2, prefix=limited)
    assert done.code == 2
    line = done.log.strip().splitlines()[-1]
    assert line.startswith("error: ray did not come up at address 'local': ")
    assert "gcs_server.out says: " in line
    assert "Too many open files" in line
    assert line.endswith("; begin a cluster with 'ray start --head' and leave out address=local")


START_ONE = "or try it out with --launcher ray:address=local,gpus=0"
TELL = "try 'ray status --address 127.0.0.1:9'"


@pytest.mark.parametrize(
    ("address", "last", "said", "advice"),
    [
        ("auto", "", "'auto': Could not find any running Ray instance", START_ONE),
        ("auto", "127.0.0.1:9", "Connection refused", START_ONE),
        ("127.0.0.1:9", "", "Connection refused", TELL),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line(
    home: Path, spec: Path, tmp_path: Path, address: str, last: str, said: str, advice: str
) -> None:
    """Ray keeps where its last cluster was, and would itself try a dead one for a quarter of an hour."""
    kept = home / "ray" / "ray_current_cluster"
    kept.parent.mkdir(exist_ok=True)
    kept.unlink(missing_ok=True)
    if last:
        kept.write_text(last)
    done = run(PYTHON, spec, tmp_path / "absent", tasks=2, launcher=f"ray:address={address},gpus=0")
    assert done.code == 2
    assert done.wall < 120  # most of it is the start of this program, beside other work
    assert said in (line := done.log.strip().splitlines()[-1])
    assert line.endswith(advice)
