"""Engines in a worker: whatever one does is a reply in its form or one line, and nothing of it is left."""

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
import torch
from engine_inside import CHANGES

from kvaudit.audit.engines.base import GenerationRequest, EngineFailed, Reply, EngineContext
from kvaudit.audit.engines.process import Process
from kvaudit.audit.engines.worker_client import WorkerSession, python_with
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec

INSIDE = Path(__file__).with_name("engine_inside.py")
ASKED = GenerationRequest((5, 6), 4, (1,), 0.0, 1.0, 7)
TOKENS = 100


def work(folder: Path, **part: Any) -> EngineContext:
    """For a model of a hundred tokens, which is all that is asked of it here."""
    model = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(TOKENS, 1))
    own = EngineSpec(**{"start": 20.0, "answer": 20.0, **part})
    return EngineContext(cast(Any, SimpleNamespace(model=model)), own, folder / "logs" / "engine.log", 2)


@contextmanager
def session(folder: Path, does: str, **part: Any) -> Iterator[WorkerSession]:
    with WorkerSession("stand-in", str(INSIDE), {"does": does}, work(folder, **part), sys.executable) as one:
        assert isinstance(one, WorkerSession)
        yield one


def last_words(folder: Path, does: str, **part: Any) -> str:
    """The one line in which an engine ends that is asked two things."""
    with session(folder, does, **part) as one:
        with pytest.raises(EngineFailed) as error:
            one.answer([ASKED, ASKED])
        assert is_gone(int(one.described["pid"]))
    line = str(error.value)
    assert line.isprintable()
    return line


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends in so many seconds; one that nobody has waited for has ended."""
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


def test_replies_come_in_order_whatever_the_engine_prints(tmp_path: Path) -> None:
    with session(tmp_path, "answers") as one:
        asked = [ASKED._replace(most=most) for most in (3, 1, 2)]
        assert one.answer(asked) == [Reply(tuple(range(n)), "length", -0.5 * n) for n in (3, 1, 2)]
        assert one.described["threads"] == "2"
    said = (tmp_path / "logs" / "engine.log").read_text()
    assert said.splitlines() == ["loaded, says the engine on stdout", "thinking, says the engine on stdout"]


@pytest.mark.parametrize("does", sorted(CHANGES))
def test_a_reply_that_cannot_be_one_ends_the_engine(tmp_path: Path, does: str) -> None:
    assert "engine stand-in: it gave a reply that cannot be one to 4 tokens: {" in last_words(tmp_path, does)


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("dies", "engine stand-in: it ended while it had 2 requests; its last words: "),
        ("dies", "out of memory␇"),
        ("says garbage", "it says what is no JSON"),
        ("nests", "it says what is no JSON"),
        ("says a number", "it says 7, wanted replies"),
        ("says no replies", "it says {'replies': {'7': 7}, 'to': 2}, wanted replies"),
        ("forgets a row", "it gave another number of replies than the 2 that were asked for"),
        ("says rows of another form", "it gave a reply that cannot be one to 4 tokens: []"),
        ("refuses", "engine stand-in refuses: RuntimeError: new_scores_size >= num_snapkv_scores"),
    ],
)
def test_what_goes_wrong_is_said(tmp_path: Path, does: str, words: str) -> None:
    assert words in last_words(tmp_path, does)


def test_one_that_hangs_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    assert "it has said nothing for 1 s (engines.stand-in.answer) while it had 2 requests" in last_words(
        tmp_path, "hangs", answer=1.0
    )


def test_one_that_reads_no_more_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    long = ASKED._replace(ids=tuple(range(60_000)))  # more than a pipe holds
    with session(tmp_path, "reads no more", answer=2.0) as one:
        one.answer([ASKED])
        time.sleep(1.0)
        with pytest.raises(EngineFailed, match="it has not read what it was told for 2 s"):
            one.answer([long])
        assert is_gone(int(one.described["pid"]))


def test_a_line_out_of_turn_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    with session(tmp_path, "speaks twice") as one, pytest.raises(EngineFailed, match="it spoke out of turn"):
        one.answer([ASKED])


@pytest.mark.parametrize("does", ["refuses to start", "says no about"])
def test_one_that_does_not_start_is_one_line_and_leaves_nothing(tmp_path: Path, does: str) -> None:
    before = open_files()
    with pytest.raises(EngineFailed) as error, session(tmp_path, does):
        pass
    assert str(error.value).isprintable()
    assert "no property ␛[31mKV_CACHE␛[0m and another" in str(error.value) or "wanted about" in str(error.value)
    assert open_files() == before


def test_an_engine_whose_program_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"it ended while it started; its last words: .*No such file") as error:
        WorkerSession("stand-in", str(INSIDE), {"does": "answers"}, work(tmp_path), str(tmp_path / "python"))
    assert str(error.value).isprintable()


def test_one_that_is_killed_is_said_to_have_ended_and_another_can_be_started(tmp_path: Path) -> None:
    for _ in range(2):
        with session(tmp_path, "answers") as one:
            os.kill(int(one.described["pid"]), signal.SIGKILL)
            with pytest.raises(EngineFailed, match="it ended"):
                one.answer([ASKED])
            with pytest.raises(EngineFailed, match="it ended"):
                one.answer([ASKED])


def test_what_an_engine_started_ends_with_it_and_no_pipe_stays_open(tmp_path: Path) -> None:
    before = open_files()
    with session(tmp_path, "has a child") as one:
        pids = [int(one.described["pid"]), int(one.described["child"])]
        assert not is_gone(pids[1], 0.2)
        assert open_files() > before
    assert all(map(is_gone, pids))
    one.stop()
    assert open_files() == before


def test_an_engine_that_ends_by_itself_takes_its_children_along(tmp_path: Path) -> None:
    with session(tmp_path, "has a child") as one:
        os.kill(int(one.described["pid"]), signal.SIGKILL)
        assert is_gone(int(one.described["child"]))


PARENT = """
import json, sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}, "."]
from test_engines_worker import session
with session(Path({folder!r}), "has a child") as one:
    print(json.dumps(dict(one.described)), flush=True)
    time.sleep(300)
"""


def test_an_engine_ends_when_whoever_wanted_it_is_killed(tmp_path: Path) -> None:
    code = PARENT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    root = Path(__file__).parent.parent
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        about = json.loads(parent.stdout.readline())
        parent.kill()
    assert is_gone(int(about["pid"]))
    assert is_gone(int(about["child"]))


def test_a_line_without_end_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.audit.engines.process._LONGEST_LINE", 1 << 20)
    process = Process(["sh", "-c", "yes | tr -d '\\n'"], who="endless", log=tmp_path / "log")
    with pytest.raises(EngineFailed, match="engine endless: it says a line of more than 1 MiB"):
        process.hear(20.0, "it was listened to", "answer")


def test_a_python_that_lacks_a_module_is_told_from_one_that_does_not_run(tmp_path: Path) -> None:
    assert python_with(("json",), EngineSpec(python=sys.executable), "x", "pip install x") == sys.executable
    assert python_with(("json",), EngineSpec(), "x", "pip install x") == sys.executable
    for modules in (("json", "no_such_module"), ("no_such_module.inner",)):
        for python in (None, sys.executable):
            with pytest.raises(SpecError, match=r"engine x is not installed.*: pip install x \(no module no_such"):
                python_with(modules, EngineSpec(python=python), "x", "pip install x")
    with pytest.raises(SpecError, match="which is no file; give the python of its environment"):
        python_with(("json",), EngineSpec(python=str(tmp_path / "python")), "x", "pip install x")
    (tmp_path / "python").write_text("no program")
    with pytest.raises(SpecError, match="which does not run; give the python of its environment"):
        python_with(("json",), EngineSpec(python=str(tmp_path / "python")), "x", "pip install x")
