"""Engines in a worker: each misbehaviour is a valid reply or a one-line error, and leaves no process or file open."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine_inside import INVALID_FIELDS

from kvaudit.audit.engines.base import EngineContext, EngineFailed, GenerationRequest, Reply
from kvaudit.audit.engines.process import Process
from kvaudit.audit.engines.worker_client import WorkerSession, python_with
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec

INSIDE = Path(__file__).with_name("engine_inside.py")
REQUEST = GenerationRequest((5, 6), 4, (1,), 0.0, 1.0, 7)
VOCABULARY = 100


def make_context(folder: Path, **spec: Any) -> EngineContext:
    """Return a context whose model has only a vocabulary; no torch, so that a process of a test starts at once."""
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=SimpleNamespace(shape=(VOCABULARY, 1))))
    engine_spec = EngineSpec(**{"start": 20.0, "answer": 20.0, **spec})
    return EngineContext(cast(Any, SimpleNamespace(model=model)), engine_spec, folder / "logs" / "engine.log", 2)


@contextmanager
def running(folder: Path, behaviour: str, **spec: Any) -> Iterator[WorkerSession]:
    setup, context = {"behaviour": behaviour}, make_context(folder, **spec)
    with WorkerSession("stand-in", str(INSIDE), setup, context, sys.executable) as session:
        assert isinstance(session, WorkerSession)
        yield session


def failure(folder: Path, behaviour: str, **spec: Any) -> str:
    """Return the one-line error of an engine that gets two requests."""
    with running(folder, behaviour, **spec) as session:
        with pytest.raises(EngineFailed) as error:
            session.answer([REQUEST, REQUEST])
        assert is_gone(int(session.described["pid"]))
    line = str(error.value)
    assert line.isprintable()
    return line


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    """Return whether a process ends within the time; a zombie has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_replies_are_in_order_and_prints_of_the_engine_go_to_the_log(tmp_path: Path) -> None:
    with running(tmp_path, "answers") as session:
        requests = [REQUEST._replace(max_tokens=limit) for limit in (3, 1, 2)]
        assert session.answer(requests) == [Reply(tuple(range(n)), "length", -0.5 * n) for n in (3, 1, 2)]
        assert session.described["threads"] == "2"
    log = (tmp_path / "logs" / "engine.log").read_text()
    assert log.splitlines() == ["loaded, says the engine on stdout", "thinking, says the engine on stdout"]


@pytest.mark.parametrize("behaviour", sorted(INVALID_FIELDS))
def test_an_invalid_reply_ends_the_engine(tmp_path: Path, behaviour: str) -> None:
    assert "engine stand-in: it gave an invalid reply (limit 4 tokens): {" in failure(tmp_path, behaviour)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("dies", "engine stand-in: it ended while answering 2 requests; last log lines: "),
        ("dies", "out of memory␇"),
        ("writes garbage", "it sent a line that is not JSON"),
        ("writes deeply nested JSON", "it sent a line that is not JSON"),
        ("writes a number", "it sent 7, expected 'replies'"),
        ("replies are no list", "it sent {'replies': {'7': 7}, 'to': 2}, expected 'replies'"),
        ("drops a row", "it gave 1 replies to 2 requests"),
        ("rows are lists", "it gave an invalid reply (limit 4 tokens): []"),
        ("raises", "engine stand-in refuses: RuntimeError: new_scores_size >= num_snapkv_scores"),
    ],
)
def test_the_error_names_what_went_wrong(tmp_path: Path, behaviour: str, message: str) -> None:
    assert message in failure(tmp_path, behaviour)


def test_an_engine_that_hangs_is_ended_at_its_time_limit(tmp_path: Path) -> None:
    message = "no output for 1 s (engines.stand-in.answer) while answering 2 requests"
    assert message in failure(tmp_path, "hangs", answer=1.0)


def test_an_engine_that_stops_reading_is_ended_at_its_time_limit(tmp_path: Path) -> None:
    long = REQUEST._replace(ids=tuple(range(60_000)))  # more than a pipe holds
    with running(tmp_path, "stops reading", answer=2.0) as session:
        session.answer([REQUEST])
        time.sleep(1.0)
        with pytest.raises(EngineFailed, match="it did not read its input for 2 s"):
            session.answer([long])
        assert is_gone(int(session.described["pid"]))


def test_an_unrequested_line_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    message = "it sent an answer to no current request"
    with running(tmp_path, "answers twice") as session, pytest.raises(EngineFailed, match=message):
        session.answer([REQUEST])


@pytest.mark.parametrize("behaviour", ["start fails", "description is a list"])
def test_a_failed_start_is_a_one_line_error_and_leaves_no_file_open(tmp_path: Path, behaviour: str) -> None:
    before = open_files()
    with pytest.raises(EngineFailed) as error, running(tmp_path, behaviour):
        pass
    assert str(error.value).isprintable()
    assert "no property ␛[31mKV_CACHE␛[0m and another" in str(error.value) or "expected 'about'" in str(error.value)
    assert open_files() == before


def test_a_missing_python_is_a_one_line_error(tmp_path: Path) -> None:
    setup, context = {"behaviour": "answers"}, make_context(tmp_path)
    with pytest.raises(EngineFailed, match=r"it ended while starting; last log lines: .*No such file") as error:
        WorkerSession("stand-in", str(INSIDE), setup, context, str(tmp_path / "python"))
    assert str(error.value).isprintable()


def test_after_a_killed_engine_another_one_can_be_started(tmp_path: Path) -> None:
    for _ in range(2):
        with running(tmp_path, "answers") as session:
            os.kill(int(session.described["pid"]), signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(EngineFailed, match="it ended"):
                    session.answer([REQUEST])


def test_stopping_ends_child_processes_and_closes_all_pipes(tmp_path: Path) -> None:
    before = open_files()
    with running(tmp_path, "has a child") as session:
        pids = [int(session.described["pid"]), int(session.described["child"])]
        assert not is_gone(pids[1], 0.2)
        assert open_files() > before
    assert all(map(is_gone, pids))
    session.stop()
    assert open_files() == before


def test_child_processes_of_a_killed_engine_end(tmp_path: Path) -> None:
    with running(tmp_path, "has a child") as session:
        os.kill(int(session.described["pid"]), signal.SIGKILL)
        assert is_gone(int(session.described["child"]))


PARENT = """
import json, sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}, "."]
from test_engines_worker import running
with running(Path({folder!r}), "has a child") as session:
    print(json.dumps(dict(session.described)), flush=True)
    time.sleep(300)
"""


def test_an_engine_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    code = PARENT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    root = Path(__file__).parent.parent
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        described = json.loads(parent.stdout.readline())
        parent.kill()
    assert is_gone(int(described["pid"]))
    assert is_gone(int(described["child"]))


def test_an_endless_line_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.audit.engines.process._LONGEST_LINE", 1 << 20)
    process = Process(["sh", "-c", "yes | tr -d '\\n'"], engine="endless", log=tmp_path / "log")
    with pytest.raises(EngineFailed, match="engine endless: it sent a line of more than 1 MiB"):
        process.read_line(20.0, "starting", "answer")


def test_a_missing_module_and_a_python_that_does_not_run_are_different_errors(tmp_path: Path) -> None:
    assert python_with(("json",), EngineSpec(python=sys.executable), "x", "pip install x") == sys.executable
    assert python_with(("json",), EngineSpec(), "x", "pip install x") == sys.executable
    for modules in (("json", "no_such_module"), ("no_such_module.inner",)):
        for python in (None, sys.executable):
            with pytest.raises(SpecError, match=r"engine x is not installed.*: pip install x \(no module no_such"):
                python_with(modules, EngineSpec(python=python), "x", "pip install x")
    spec = EngineSpec(python=str(tmp_path / "python"))
    with pytest.raises(SpecError, match="which is not a file; give the python of its environment"):
        python_with(("json",), spec, "x", "pip install x")
    (tmp_path / "python").write_text("no program")
    with pytest.raises(SpecError, match="which does not run; give the python of its environment"):
        python_with(("json",), spec, "x", "pip install x")
