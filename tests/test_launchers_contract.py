"""Every launcher of the registry: its workers do the run's words, and each that fails is one line that says where."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cli import SPEC, refused

from kvaudit.audit.runs.launchers import local, slurm
from kvaudit.audit.runs.launchers.base import LAUNCHERS, Job, Launcher, PrintLine, WorkerGroup, parse_launcher
from kvaudit.audit.runs.launchers.local import Local, local_workers, run_worker
from kvaudit.audit.runs.launchers.slurm import Slurm
from kvaudit.audit.runs.stages import train
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.text import install_command

NEEDS = {"slurm": "submitit", "ray": "ray"}
Check = Callable[[Launcher, Path], None]


def trial(name: str) -> Launcher:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    return parse_launcher(LAUNCHERS.get(name).trial)


@pytest.fixture(params=sorted(LAUNCHERS.all()))
def launcher(request: pytest.FixtureRequest) -> Launcher:
    """Every launcher of the registry, as it works on one machine."""
    return trial(request.param)


def worked(launcher: Launcher, count: int, job: Job) -> list[str]:
    """What is said while a crew works to its end."""
    said: list[str] = []
    launcher.check()
    with launcher.start_workers(count, job, said.append) as crew:
        crew.wait(lambda: False)
    return said


def check_it_says_what_it_is_and_how_to_try_it(launcher: Launcher, _: Path) -> None:
    assert launcher.says
    assert launcher.trial.partition(":")[0] == launcher.name


def check_every_worker_does_the_words_and_says_what_ended_it(launcher: Launcher, folder: Path) -> None:
    said = worked(launcher, 2, Job(["run", "--join", "--nowhere"], folder / "logs", folder))
    failed = sorted(line for line in said if line.startswith("worker "))
    assert len(failed) == 2
    for number, line in enumerate(failed, 1):
        assert line.startswith(f"worker {number} stopped with exit code 2; its claims go back to the others; see ")
        assert "No such option" in (folder / "logs" / f"worker-{number}.log").read_text()


def check_nothing_is_said_of_a_good_end(launcher: Launcher, folder: Path) -> None:
    said = worked(launcher, 1, Job(["--version"], folder / "logs", folder))
    assert not [line for line in said if line.startswith("worker ")]
    assert "kvaudit" in (folder / "logs" / "worker-1.log").read_text()


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_launcher_keeps_the_contract(launcher: Launcher, check: Check, tmp_path: Path) -> None:
    check(launcher, tmp_path)


@dataclass(frozen=True, kw_only=True)
class Mute(Launcher):
    """Says nothing of a worker that failed."""

    trial = "mute"

    @contextmanager
    def start_workers(self, count: int, job: Job, say: PrintLine) -> Iterator[WorkerGroup]:
        with parse_launcher("local").start_workers(count, job, lambda _: None) as crew:
            yield crew


class Chatty(Launcher):
    """Says of a worker that it ended well."""

    trial = "chatty"

    @contextmanager
    def start_workers(self, count: int, job: Job, say: PrintLine) -> Iterator[WorkerGroup]:
        with parse_launcher("local").start_workers(count, job, say) as crew:
            yield crew
        say("worker 1 stopped with exit code 0")


class Nameless(Launcher):
    """Says neither where its workers are nor how it is tried."""


@pytest.mark.parametrize(
    ("check", "launcher"),
    [
        (check_every_worker_does_the_words_and_says_what_ended_it, Mute()),
        (check_nothing_is_said_of_a_good_end, Chatty()),
        (check_it_says_what_it_is_and_how_to_try_it, Nameless()),
    ],
)
def test_a_wrong_launcher_breaks_the_contract(check: Check, launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(launcher, tmp_path)


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_a_missing_package_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NEEDS[name], None)
    with pytest.raises(RunError, match=re.escape(install_command(name))):
        parse_launcher(name).check()


def test_a_machine_without_slurm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    trial("slurm")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RunError, match=r"finds no sbatch and srun here; .* --launcher slurm:cluster=local,gpus=0"):
        parse_launcher("slurm:partition=gpu").check()
    with pytest.raises(RunError, match="cluster is 'lsf', wanted slurm, or local"):
        parse_launcher("slurm:cluster=lsf").check()


@pytest.fixture
def broken_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ray that quotes a traceback and ends the process, after its own server has logged why."""
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("[2026-01-01 00:00:00,000 E 1 1] (raylet) a.cc:1: of another day\n")
    os.utime(logs / "raylet.out", (0, 0))

    def init(**_: object) -> None:
        said = (
            "[2026-11-27 19:27:16,968 I 2 2] (gcs_server) b.cc:2: starts\n[2026-11-27 19:27:16,969 C 2 2] (gcs_server) "
        )
        (logs / "gcs_server.out").write_text(f"{said}c.cc:3:  You found a bug. Check failed: no room\x1b\n*** Trace\n")
        try:
            raise RuntimeError("Traceback (most recent call last):\n  File x\nray.Error: no token was found.\n")
        except RuntimeError as why:
            raise SystemExit(15) from why

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))


@pytest.mark.usefixtures("broken_ray")
@pytest.mark.parametrize(
    ("options", "tries", "advice"),
    [
        ("address=local,gpus=0", 3, "begin a cluster with 'ray start --head' and leave out address=local"),
        (
            "gpus=0",
            1,
            "begin a cluster with 'ray start --head', or try it out with --launcher ray:address=local,gpus=0",
        ),
        ("address=ray://a:1", 1, "try 'ray status --address ray://a:1'"),
    ],
)
def test_where_ray_does_not_come_up_its_own_log_is_quoted(
    tmp_path: Path, options: str, tries: int, advice: str
) -> None:
    said: list[str] = []
    launcher = parse_launcher(f"ray:{options}")
    with pytest.raises(RunError) as error, launcher.start_workers(1, Job([], tmp_path / "logs", tmp_path), said.append):
        pass
    line = str(error.value)
    assert line.startswith("ray did not come up at address ")
    assert ": ray.Error: no token was found; ray's log " in line
    assert line.endswith(f"gcs_server.out says: no room␛; {advice}")
    assert f"--launcher ray:{options}" not in line
    assert len(said) == tries - 1
    assert all(text.endswith("; tries again") for text in said)


START_ONE = "begin a cluster with 'ray start --head', or try it out with --launcher ray:address=local,gpus=0"


@pytest.mark.parametrize(
    ("address", "variable", "said"),
    [
        ("127.0.0.1:9", "", "'127.0.0.1:9': REFUSED; try 'ray status --address 127.0.0.1:9'"),
        ("auto", "", f"'auto' (127.0.0.1:9): REFUSED; {START_ONE}"),
        (
            "auto",
            "127.0.0.1:8",
            "'auto' (127.0.0.1:8): REFUSED; set RAY_ADDRESS to a running cluster, or unset it",
        ),
    ],
)
def test_a_cluster_that_nothing_listens_for_is_said_at_once(
    address: str, variable: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last one, whose address ray keeps when it is gone."""
    monkeypatch.setenv("RAY_ADDRESS", variable)
    services = SimpleNamespace(canonicalize_bootstrap_address={"auto": "127.0.0.1:9"}.__getitem__)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=pytest.fail))
    monkeypatch.setitem(sys.modules, "ray._private", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray._private.services", services)
    launcher = parse_launcher(f"ray:address={address},gpus=0")
    with (
        pytest.raises(RunError) as error,
        launcher.start_workers(1, Job([], tmp_path / "logs", tmp_path), print),
    ):
        pass
    text = re.sub(r"\[Errno \d+\] Connection refused", "REFUSED", str(error.value))
    assert text == f"ray did not come up at address {said}"


def test_a_wrong_option_is_one_line() -> None:
    with pytest.raises(SpecError, match=r"unknown option of launcher slurm 'partitions'. Did you mean 'partition'"):
        parse_launcher("slurm:partitions=gpu")


def test_what_slurm_is_asked_for_is_what_the_options_say() -> None:
    pytest.importorskip("submitit", reason="submitit is not installed")
    from submitit.slurm.slurm import _make_sbatch_string

    asked = Slurm(partition="gpu", account="lab", gpus=2, cpus=8, memory=64, hours=1.5)._parameters()
    own = {key.removeprefix("slurm_"): value for key, value in asked.items() if key.startswith("slurm_")}
    assert own == {"partition": "gpu", "account": "lab"}
    assert (asked["timeout_min"], asked["gpus_per_node"], asked["cpus_per_task"], asked["mem_gb"]) == (90, 2, 8, 64)
    assert "#SBATCH --partition=gpu" in _make_sbatch_string("true", "logs", **own)


def child_of(pid: int) -> int:
    return int(subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, check=True).stdout)


SLEEPS_ONCE = """
import os, sys, time
if "-c" in sys.orig_argv and not os.path.exists("begun"):
    open("begun", "w").close()
    time.sleep(600)
"""


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The first worker sleeps before it does its words; called, this waits until one does."""
    (tmp_path / "sitecustomize.py").write_text(SLEEPS_ONCE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def wait() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)

    return wait


def test_a_job_that_is_preempted_is_queued_again(tmp_path: Path, begun: Callable[[], None]) -> None:
    launcher = trial("slurm")
    said: list[str] = []
    with launcher.start_workers(1, Job(["--version"], tmp_path / "logs", tmp_path), said.append) as crew:
        begun()
        os.kill(child_of(crew._left[1]._process.pid), signal.SIGUSR2)
        crew.wait(lambda: False)
    assert "kvaudit" in (tmp_path / "logs" / "worker-1.log").read_text()
    assert not [line for line in said if line.startswith("worker ")]


def test_a_job_that_ends_without_a_word_is_said(
    tmp_path: Path, begun: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = trial("slurm")
    from submitit import LocalJob

    monkeypatch.setattr(LocalJob, "_results_timeout_s", 0)
    said: list[str] = []
    with launcher.start_workers(1, Job(["--version"], tmp_path / "logs", tmp_path), said.append) as crew:
        begun()
        job = child_of(crew._left[1]._process.pid)
        left = [job, child_of(job)]  # a cluster would end them with the job; here they would sleep on
        crew._left[1]._process.kill()
        crew.wait(lambda: False)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(said) == 2
    assert said[1].startswith("worker 1, slurm job ")
    assert "without a result; its claims go back to the others; " in said[1]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Tests that run in the background of a shell inherit that interrupts are ignored, and so would their jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_job_still_queued_when_all_is_done_is_cancelled(
    tmp_path: Path, begun: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = trial("slurm")
    monkeypatch.setattr(slurm, "GRACE_SECONDS", 0.0)
    with launcher.start_workers(1, Job(["--version"], tmp_path / "logs", tmp_path), print) as crew:
        begun()
        crew.wait(lambda: True)
        process = crew._left[1]._process
        assert process.poll() is None
    process.wait()  # for ever, and the test's own limit ends it, where the job is left alone


def test_a_folder_that_a_node_does_not_see_is_said(tmp_path: Path) -> None:
    said = run_worker(Job(["--version"], tmp_path / "run" / "logs", tmp_path), 3)
    assert said.startswith(f"worker 3: {socket.gethostname()!r} sees no {str(tmp_path / 'run' / 'logs')!r}; ")
    assert "put the run on a file system that every node sees" in said


@pytest.mark.parametrize(("visible", "turns"), [("3,5", ["5", "3", "5"]), (None, [None] * 3)])
def test_workers_take_the_gpus_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, turns: list[str | None]
) -> None:
    if visible is None:
        monkeypatch.delenv(local.VISIBLE, raising=False)
    else:
        monkeypatch.setenv(local.VISIBLE, visible)
    monkeypatch.setattr(
        local, "PROGRAM", (sys.executable, "-c", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))")
    )
    with local_workers(3, Job([], tmp_path / "logs", tmp_path), print) as started:
        assert all(one.wait() for one in started)
    found = [(tmp_path / "logs" / f"worker-{number}.log").read_text().strip() for number in (1, 2, 3)]
    assert found == [str(turn) for turn in turns]


def test_a_run_that_names_its_gpu_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(local.VISIBLE, "3,5")
    monkeypatch.setattr(
        local, "PROGRAM", (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    )
    with local_workers(1, Job([], tmp_path / "logs", tmp_path, any_gpu=False), print) as started:
        assert started[0].wait()
    assert (tmp_path / "logs" / "worker-1.log").read_text().strip() == "3,5"


def test_a_run_without_workers_left_says_what_is_open(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launching process works nothing itself, and loads no model."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(model=tiny_folder))
    monkeypatch.setattr(LAUNCHERS, "get", lambda _: Idle)
    line = refused("run", spec, "--out", tmp_path / "run", "--launcher", "idle", "--workers", 2)
    assert "all workers have stopped with 2 checkpoints and 4 units unfinished; finished work is kept" in line


def test_a_gpu_that_is_too_small_is_one_line(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(model=tiny_folder))

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(train, "train", full)
    line = refused("run", spec, "--out", tmp_path / "run", "--threads", 1)
    assert line.startswith("error: the GPU's memory is too small for dense seed 1 (CUDA out of memory); finished work")


class Idle(Launcher):
    """No worker at all."""

    @contextmanager
    def start_workers(self, count: int, job: Job, say: PrintLine) -> Iterator[WorkerGroup]:
        assert (count, job.arguments[:2]) == (2, ["run", "--join"])
        with Local().start_workers(0, job, say) as crew:
            yield crew


class Former(Launcher):
    """Starts its workers in a method of the former name."""

    def start_workers(self, count: int, job: Job, print_line: PrintLine) -> AbstractContextManager[WorkerGroup]:
        return parse_launcher("local").start_workers(count, job, print_line)


def test_a_launcher_with_the_former_name_of_the_hook_still_works(tmp_path: Path) -> None:
    assert worked(Former(), 1, Job(["--version"], tmp_path / "logs", tmp_path)) == []
    assert "kvaudit" in (tmp_path / "logs" / "worker-1.log").read_text()
    with pytest.raises(NotImplementedError):
        Nameless().start_workers(1, Job([], tmp_path, tmp_path), print)
