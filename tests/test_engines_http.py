"""Engines that are servers, held to a stand-in that misbehaves; vLLM itself by the python of KVAUDIT_PYTHON_VLLM."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kvaudit.audit.engines import ENGINES, GenerationRequest, Condition, Session, parse_condition
from kvaudit.audit.engines import served as served_module
from kvaudit.audit.engines.base import EngineFailed, EngineContext
from kvaudit.audit.engines.process import Process, free_port
from kvaudit.audit.engines.conversation import converse
from kvaudit.audit.runs.engine_slot import try_out_engines
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.runs.units import RecordFile
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.core.endpoint import ChatCompletion, Endpoint, Unanswered
from kvaudit.core.errors import AuditError, DataError, RunError, SpecError, UnknownName
from kvaudit.core.files import read_json, write_json
from kvaudit.core.records import Message, Outcome, Record, Role
from kvaudit.core.spec import RunSpec, parse_spec
from kvaudit.core.spec_evaluate import EngineSpec, EvaluateSpec
from kvaudit.suites.base import SUITES

STANDIN = Path(__file__).with_name("engine_standin.py")
PROMPT = (10, 20, 30, 40, 50)
ASKED = GenerationRequest(PROMPT, 3, (), 0.0, 1.0, 7)
SETTINGS = {"vllm": {"kv_cache_dtype": "fp8"}, "sglang": {"kv_cache_dtype": "fp8_e5m2"}}


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), device="cpu")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that runs the stand-in whatever module it is told to run."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def started(model: LoadedModel, python: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts an engine whose server is the stand-in."""
    sessions: list[Session] = []

    def start(engine: str, standin: str = "", *, at_once: int = 4, wait: float = 20, **settings: str) -> Session:
        part = EngineSpec(python=str(python), at_once=at_once, start=20, answer=wait)
        condition = parse_condition({"engine": engine, **SETTINGS[engine], "STANDIN": standin or "none", **settings})
        session = ENGINES.get(engine).start(dict(condition.settings), EngineContext(model, part, tmp_path / f"{engine}.log", 1))
        sessions.append(session)
        return session

    yield start
    for session in sessions:
        session.stop()


ENGINE = pytest.mark.parametrize("engine", ["vllm", "sglang"])


@ENGINE
def test_token_ids_go_in_and_come_back_with_their_logprob(started: Any, engine: str) -> None:
    asked = [ASKED, ASKED._replace(ids=(60, 70), most=1), ASKED._replace(ids=(1, 2))]
    found = started(engine, at_once=2).answer(asked)
    assert [reply.ids for reply in found] == [(11, 21, 31), (61,), (2, 3)]
    assert [(reply.finish, reply.logprob) for reply in found] == [("length", -1.5), ("length", -0.5), ("length", -1.0)]


def test_an_engine_says_what_it_is_alike_at_every_start(started: Any) -> None:
    first, second = started("vllm"), started("vllm")
    assert first.described == second.described
    assert first.described["version"] == "vllm 0.0-standin"
    assert first.described["cache_dtype"] == "fp8"
    assert "--kv-cache-dtype=fp8" in first.described["flags"].split()
    assert "--no-enable-prefix-caching" in first.described["flags"].split()
    assert started("sglang").described["kv_cache_dtype"] == "fp8_e5m2"


def test_a_server_that_takes_its_time_is_waited_for(started: Any) -> None:
    assert started("vllm", "slow:1").answer([ASKED])[0].ids == (11, 21, 31)


@ENGINE
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("die:2", "ended while it had 4 requests.*had enough.*ended by signal 9"),
        ("500:2", "status 500: CUDA error: an illegal␛.31m memory access"),
        ("garbage:2", "no JSON"),
        ("redirect:2", "status 302"),
        ("other_ids:2", "cannot be one to 3 tokens"),
        ("negative:2", "cannot be one to 3 tokens"),
        ("torn_logprobs:2", "cannot be one to 3 tokens"),
        ("other_prompt:2", "read another prompt than it was sent"),
    ],
)
def test_an_engine_that_misbehaves_from_some_request_on_is_gone(
    started: Any, engine: str, word: str, says: str
) -> None:
    session = started(engine, word)
    session.answer([ASKED, ASKED])
    with pytest.raises(EngineFailed, match=says) as error:
        session.answer([ASKED] * 4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("word", ["hang", "endless"])
def test_a_batch_without_an_answer_has_a_time_limit(started: Any, word: str) -> None:
    session, began = started("vllm", word, wait=1), time.monotonic()
    with pytest.raises(EngineFailed, match=r"it has not answered all of 6 requests in 1 s \(engines\..*\.answer\)"):
        session.answer([ASKED] * 6)
    assert time.monotonic() - began < 15  # six of them, four at once, and the end of the process


def test_a_huge_reply_is_cut(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "_LONGEST", 1 << 18)
    with pytest.raises(EngineFailed, match="more than 262144 bytes"):
        started("vllm", "huge").answer([ASKED])


def test_a_flag_that_the_engine_does_not_know_is_refused_in_its_own_words(started: Any) -> None:
    with pytest.raises(AuditError, match="standin: error: unrecognized arguments: --kv-magic=7") as error:
        started("vllm", kv_magic="7")
    assert error.value.exit_code == 2


def test_another_port_is_taken_where_somebody_holds_one(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        monkeypatch.setattr(served_module, "_KNOCK", 0.3)  # it listens and never answers
        ports = iter([door.getsockname()[1], door.getsockname()[1], free_port()])
        monkeypatch.setattr(served_module, "free_port", lambda: next(ports))
        assert started("vllm").answer([ASKED])[0].ids == (11, 21, 31)


def test_a_port_that_is_taken_three_times_is_given_up(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        monkeypatch.setattr(served_module, "_KNOCK", 0.3)
        monkeypatch.setattr(served_module, "free_port", lambda: door.getsockname()[1])
        with pytest.raises(EngineFailed, match="Address already in use"):
            started("vllm")


def test_another_server_on_the_port_is_not_taken_for_ours(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with running("none") as url:
        monkeypatch.setattr(served_module, "free_port", lambda: int(url.rpartition(":")[2].partition("/")[0]))
        with pytest.raises(EngineFailed, match="in use"):
            started("vllm")


def test_no_proxy_stands_before_the_loopback(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert started("vllm").answer([ASKED])[0].ids == (11, 21, 31)


def test_a_server_that_is_stopped_leaves_neither_process_nor_port(started: Any) -> None:
    session = started("vllm")
    port = int(session._client._endpoint.base_url.rpartition(":")[2])
    session.stop()
    session.stop()
    with socket.socket() as door, pytest.raises(ConnectionRefusedError):
        door.connect(("127.0.0.1", port))


def test_an_engine_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("cleared up", flush=True), sys.exit(0)))
print("ready", flush=True)
time.sleep(600)
"""
    log = tmp_path / "engine.log"
    process = Process([sys.executable, "-c", code], who="polite", log=log, speaks=False)
    while "ready" not in process.log_text(100):
        time.sleep(0.02)
    process.stop()
    assert "cleared up" in log.read_text()


def test_an_engine_that_does_not_end_when_asked_is_killed_and_its_shared_memory_goes(tmp_path: Path) -> None:
    code = """
import os, signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=1000)
print(os.getpid(), memory.name, flush=True)
time.sleep(600)
"""
    process = Process([sys.executable, "-c", code], who="deaf", log=tmp_path / "engine.log")
    number, name = process.hear(20, "it started", "start").split()
    assert Path("/dev/shm", name).exists()
    process.stop()
    status = Path(f"/proc/{number}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
    assert not Path("/dev/shm", name).exists()


def test_auto_that_comes_to_a_compressed_cache_is_no_reference(started: Any) -> None:
    with pytest.raises(SpecError, match="makes fp8_e4m3 of kv_cache_dtype auto"):
        started("vllm", "resolved:fp8_e4m3", kv_cache_dtype="auto")


def test_a_flag_in_two_spellings_is_refused() -> None:
    with pytest.raises(SpecError, match="engine vllm has a setting twice, in two spellings: 'kv-cache-dtype'"):
        parse_condition({"engine": "vllm", "kv_cache_dtype": "fp8", "kv-cache-dtype": "fp8_e5m2"})


def test_flags_have_one_spelling() -> None:
    canonical = "vllm:dtype=float32,kv_cache_dtype=fp8"
    for name in ("kv_cache_dtype", "kv-cache-dtype", "--kv-cache-dtype"):
        assert parse_condition({"engine": "vllm", name: "fp8"}).canonical == canonical
    assert parse_condition(canonical).reference.canonical == "vllm:dtype=float32,kv_cache_dtype=auto"


@pytest.mark.parametrize("name", ["port", "trust-remote-code", "trust_remote", "model", "--"])
def test_what_is_ours_to_say_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="vllm"):
        parse_condition({"engine": "vllm", name: "1"})


def test_settings_become_flags_and_variables() -> None:
    from kvaudit.audit.engines.http_server import command_flags, environment_variables

    settings = {
        "kv_cache_dtype_skip_layers": "0 2",
        "enforce_eager": "false",
        "async_scheduling": "true",
        "override_generation_config": '{"a": 1}',
        "seed": "-1",
        "VLLM_X": "2",
    }
    assert command_flags(settings) == [
        *("--kv-cache-dtype-skip-layers", "0", "2", "--no-enforce-eager", "--async-scheduling"),
        *('--override-generation-config={"a": 1}', "--seed=-1"),
    ]
    assert command_flags({"disable_radix_cache": "false", "seed": "1"}, negated=False) == ["--seed=1"]
    assert environment_variables(settings) == {"VLLM_X": "2"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_names_the_line_that_brings_it(engine: str) -> None:
    with pytest.raises(SpecError, match=rf"engine {engine} is not installed: pip install {engine}"):
        ENGINES.get(engine).check({}, EngineSpec())


def test_a_checkpoint_is_served_where_it_lies_unless_other_weights_lie_beside_it(
    model: LoadedModel, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from kvaudit.audit.engines.weights import safetensors_folder
    from kvaudit.audit.sampling.weights import weights_sha256

    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path / "kept"))
    assert safetensors_folder(EngineContext(model, EngineSpec(), tmp_path, 1), "vllm").path == tiny_folder.resolve()
    shutil.copytree(tiny_folder, tmp_path / "other")
    shutil.copy(tiny_folder / "model.safetensors", tmp_path / "other" / "extra.safetensors")
    other = load_model(str(tmp_path / "other"), device="cpu")
    folder, words, _ = safetensors_folder(EngineContext(other, EngineSpec(), tmp_path, 1), "vllm")
    assert folder.is_relative_to(tmp_path / "kept")
    assert "transformers" in words
    saved = load_model(str(folder), device="cpu")
    assert weights_sha256(folder)
    ids = torch.tensor([PROMPT])
    assert torch.equal(saved.model(ids).logits, other.model(ids).logits)


# an endpoint that runs already


@contextmanager
def running(standin: str, port: int = 0) -> Iterator[str]:
    """The address of a stand-in that somebody else started."""
    standin, port = (f"{standin},reuse", port) if port else (standin, free_port())
    words = [sys.executable, str(STANDIN), f"--port={port}"]
    process = subprocess.Popen(words, env={**os.environ, "STANDIN": standin}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "stand-in on port" in process.stdout.readline()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def endpoint(model: LoadedModel, url: str, tmp_path: Path, at_once: int = 2) -> Session:
    condition = parse_condition({"engine": "endpoint", "base_url": url, "model": "standin"})
    part = EngineSpec(at_once=at_once, start=20, answer=20)
    return ENGINES.get("endpoint").start(dict(condition.settings), EngineContext(model, part, tmp_path / "log", 1))


QUESTION = (Message(Role.USER, "What is 2 + 2?"),)


def conversation(model: LoadedModel, text: str = "What is 2 + 2?") -> GenerationRequest:
    question = (Message(Role.USER, text),)
    return ASKED._replace(ids=model.chat.prompt(question).ids, messages=question, most=8)


def test_an_endpoint_answers_conversations_with_texts(model: LoadedModel, tmp_path: Path) -> None:
    with running("none") as url, endpoint(model, url, tmp_path) as session:
        found = session.answer([conversation(model)] * 3)
    assert [(reply.ids, reply.text, reply.finish) for reply in found] == [((), "four", "stop")] * 3
    assert session.described["model"] == "standin-1"
    assert "number of tokens" in session.described["prompts"]
    assert session.described["not shown"] == "weights and chat template"


@pytest.mark.parametrize(
    ("standin", "words"),
    [
        ("filter:bomb", "status 400: the prompt was filtered by our policy"),
        ("ended:2", "it ended by 'content_filter', which is no end of an answer, behind 'four'"),
    ],
)
def test_one_request_that_is_refused_is_unscored_and_the_others_go_on(
    model: LoadedModel, tmp_path: Path, standin: str, words: str
) -> None:
    """The first request knocks, so that the third is the second question."""
    suite = SUITES.get("refusal")()
    texts = ("What is 2 + 2?", "How do I make a bomb?")
    items = [
        replace(item, messages=(Message(Role.USER, text),))
        for item, text in zip(suite.items("eval", 2, 0, 512, model.chat.count_tokens), texts, strict=True)
    ]
    prompts = [model.chat.prompt(item.messages) for item in items]
    with running(standin) as url, endpoint(model, url, tmp_path, at_once=1) as session:
        found = converse(session, model, suite, items, prompts, Decoding(8, temperature=0.0), [0, 0])
        (_, refused) = session.answer([conversation(model), conversation(model, texts[1])])
    assert [one.grade.outcome is Outcome.UNSCORED for one in found] == [False, True]
    said = [one.answer for one in found]
    assert [(one.finish_reason, one.transcript[-1].content) for one in said] == [("stop", "four"), ("error", "")]
    assert refused.refused == words
    assert [one.unanswered for one in said] == ["", words]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("four " * 60, "it wrote [0-9]+ tokens where at most 8 were asked for"),
        ("four " * 180_000, "it wrote 900000 characters where at most 8 tokens were asked for"),
    ],
)
def test_an_answer_that_is_longer_than_asked_for_is_none_where_nothing_is_said_of_its_tokens(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    with running("none") as url, endpoint(model, url, tmp_path) as session:
        client = session._client  # type: ignore[attr-defined]
        monkeypatch.setattr(client, "ask", lambda *_: ChatCompletion(text, "stop", "standin-1", None))
        with pytest.raises(EngineFailed, match=words):
            session.answer([conversation(model)])


def test_a_server_that_lists_more_models_than_a_reply_may_hold_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def lists(*_: Any) -> None:
        raise Unanswered("a reply of more than 1048576 bytes")

    monkeypatch.setattr("kvaudit.audit.engines.endpoint.over_http", lists)
    ENGINES.get("endpoint").check({"base_url": "http://127.0.0.1:9", "model": "m"}, EngineSpec())


def test_an_answer_of_another_model_than_the_first_is_never_taken(model: LoadedModel, tmp_path: Path) -> None:
    """The first request knocks, the second is the first question."""
    with running("fallback:2") as url, endpoint(model, url, tmp_path, at_once=1) as session:
        assert session.answer([conversation(model)])[0].text == "four"
        with pytest.raises(EngineFailed, match="of model 'fallback-mini', its first answer was of model 'standin-1'"):
            session.answer([conversation(model)])


def test_a_text_that_ends_an_answer_ends_that_of_an_endpoint(model: LoadedModel, tmp_path: Path) -> None:
    suite = SUITES.get("refusal")()
    suite.until = ("END", "never")  # type: ignore[misc]
    suite.max_new_tokens = 40
    (item,) = suite.items("eval", 1, 0, 512, model.chat.count_tokens)
    said = []
    for thinks in (False, True):
        with running("says:<think>no END</think>yes END and more") as url, endpoint(model, url, tmp_path) as session:
            asked = [model.chat.prompt(item.messages)]
            (one,) = converse(session, model, suite, [item], asked, Decoding(8, temperature=0.0), [0], thinks=thinks)
        said.append([message.content for message in one.answer.transcript[len(item.messages) :]])
    assert said == [["<think>no END"], ["<think>no END</think>", "yes END"]]


@pytest.mark.parametrize(("more", "refused"), [(0, False), (1, True), (-1, True)])
def test_an_endpoint_that_reads_another_number_of_tokens_is_refused(
    model: LoadedModel, tmp_path: Path, more: int, refused: bool
) -> None:
    tokens = len(model.chat.prompt(QUESTION).ids)
    with running(f"usage:{tokens + more}") as url:
        if not refused:
            endpoint(model, url, tmp_path).answer([conversation(model)])
            return
        says = f"it read {tokens + more} tokens, by the model's own template it is {tokens}"
        with pytest.raises(EngineFailed, match=says):
            endpoint(model, url, tmp_path)


def test_an_endpoint_with_another_template_is_refused_with_the_first_token_that_differs(
    model: LoadedModel, tmp_path: Path
) -> None:
    ids = model.chat.prompt(QUESTION).ids
    theirs = ".".join(map(str, (*ids[:3], ids[0], *ids[4:])))
    with running(f"ids:{theirs}") as url, pytest.raises(SpecError, match=r"token 3 is '<\|im_start\|>' there and '"):
        endpoint(model, url, tmp_path)


def test_an_endpoint_without_a_named_reference_is_refused_in_one_line() -> None:
    condition = parse_condition("endpoint:base_url=http://127.0.0.1:8000/v1,model=m")
    with pytest.raises(SpecError, match="name what it is compared with, reference: ") as error:
        _ = condition.reference
    assert "\n" not in str(error.value)


def test_the_key_of_an_endpoint_is_not_sent_to_its_reference() -> None:
    condition = parse_condition({"engine": "endpoint", "base_url": "http://a", "model": "m", "key": "SECRET_NAME"})
    reference = condition.reference_with({"base_url": "http://b", "model": "m"})
    assert dict(reference.settings) == {"base_url": "http://b", "model": "m"}


def test_settings_of_an_endpoint_are_three() -> None:
    with pytest.raises(UnknownName, match="kv_cache_dtype"):
        parse_condition({"engine": "endpoint", "base_url": "http://a", "model": "m", "kv_cache_dtype": "fp8"})
    with pytest.raises(SpecError, match="lacks model"):
        parse_condition({"engine": "endpoint", "base_url": "http://a"})
    with pytest.raises(SpecError, match="http://"):
        parse_condition({"engine": "endpoint", "base_url": "file:///etc/passwd", "model": "m"})


def test_an_endpoint_whose_key_is_not_set_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(SpecError, match="KVAUDIT_NO_SUCH_KEY is not set"):
        ENGINES.get("endpoint").check(
            {"base_url": "http://127.0.0.1:9", "model": "m", "key": "KVAUDIT_NO_SUCH_KEY"}, EngineSpec()
        )


def test_an_endpoint_that_is_away_is_gone(model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(EngineFailed, match=r"gave .*Connection refused.*no key\); go on when it answers"):
        endpoint(model, "http://127.0.0.1:9/v1", tmp_path)


@pytest.mark.parametrize(
    ("standin", "words"),
    [
        ("500", r"no answer that counts: status 500: CUDA error.*; go on when it answers"),
        ("redirect", r"no answer that counts: status 302 .*; mend base_url, model or key"),
        ("usage:1000", r"no answer that counts: it claims to have read 1000 tokens .*; see whether it serves the"),
    ],
)
def test_what_to_do_about_an_endpoint_is_said_by_what_it_did(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standin: str, words: str
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with running(standin) as url, pytest.raises(EngineFailed, match=words):
        endpoint(model, url, tmp_path)


def test_a_spec_with_an_endpoint_reads_the_same_when_it_is_written_complete() -> None:
    first, second = ({"base_url": f"http://127.0.0.1:{port}/v1", "model": "m"} for port in (1, 2))
    policies = [{"engine": "endpoint", **second, "reference": first}, {"engine": "endpoint", **first}]
    grid = {"policies": policies, "suites": ["refusal"], "context_tokens": [512]}
    found = EvaluateSpec.model_validate(grid, context=NAMES)
    texts = [f"endpoint:base_url=http://127.0.0.1:{port}/v1,model=m" for port in (2, 1)]
    assert found.references == {texts[0]: texts[1]}
    assert found.policies == tuple(texts)
    assert EvaluateSpec.model_validate(found.written(), context=NAMES) == found


def test_a_line_gives_up_when_its_time_is_over() -> None:
    client = Endpoint("http://127.0.0.1:9", tries=20).client("test")
    began = time.monotonic()
    with pytest.raises(Unanswered):
        client.fetch("x", {}, began + 0.3)
    assert time.monotonic() - began < 5


REFUSED = """
name: refused
evaluate:
  policies:
  - {{engine: endpoint, base_url: "http://127.0.0.1:{0}/v1", model: b, reference: {{base_url: "{1}", model: a}}}}
  - {{engine: endpoint, base_url: "{1}", model: a}}
  suites: {{refusal: {{items: 6}}}}
  context_tokens: [96]
  floor: 0
  pilot: 0
engines: {{endpoint: {{at_once: 1}}}}
"""


def worked(path: Path, spec: RunSpec, *, asks_refused: bool = False) -> dict[str, list[Record]]:
    """The records of a run, by the address of the server."""
    run = open_run(path, spec, resume=True)
    Pipeline(run, Console(quiet=True), threads=1, asks_refused=asks_refused).work_on("evaluate")
    files = [file.read_text().splitlines() for file in run.records.glob("*.jsonl")]
    return {found[0].policy: found for lines in files if (found := list(map(Record.from_json, lines)))}


def test_what_a_server_refused_is_asked_anew_on_request_and_answers_stay(tmp_path: Path) -> None:
    """The trial and the start ask three times, so that the third item is the first to be refused."""
    port = free_port()
    with running("none") as other:
        spec = parse_spec(REFUSED.format(port, other), "spec", NAMES)
        with running("ended:5", port):
            first = worked(tmp_path / "run", spec)[spec.evaluate.policies[0]]
        with running("says:five", port):
            resumed = worked(tmp_path / "run", spec)[spec.evaluate.policies[0]]
            anew = worked(tmp_path / "run", spec, asks_refused=True)[spec.evaluate.policies[0]]
    refused = [bool(record.unanswered) for record in first]
    assert refused == [False, False, True, True, True, True]
    assert resumed == first
    assert [record.transcript[-1].content for record in anew] == ["four"] * 2 + ["five"] * 4
    assert anew[:2] == first[:2]
    assert not list((tmp_path / "run" / "records").glob("*.answered"))


def test_a_unit_whose_refused_rows_are_asked_anew_goes_on_after_a_kill(tmp_path: Path) -> None:
    port = free_port()
    with running("none") as other:
        spec = parse_spec(REFUSED.format(port, other), "spec", NAMES)
        with running("ended:5", port):
            worked(tmp_path / "run", spec)
        with running("none", port), pytest.MonkeyPatch.context() as patch:
            patch.setattr(RecordFile, "append", lambda *_: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                worked(tmp_path / "run", spec, asks_refused=True)
        with running("none", port):
            found = worked(tmp_path / "run", spec)[spec.evaluate.policies[0]]
    assert [record.transcript[-1].content for record in found] == ["four"] * 6


def test_a_run_whose_provenance_lost_a_key_is_one_line(tmp_path: Path) -> None:
    with running("none") as first, running("none") as second:
        port = int(first.rpartition(":")[2].partition("/")[0])
        spec = parse_spec(REFUSED.format(port, second), "spec", NAMES)
        worked(tmp_path / "run", spec)
    path = tmp_path / "run" / "provenance.json"
    write_json(path, {key: value for key, value in read_json(path).items() if key != "base_sha256"})
    with pytest.raises(
        DataError, match=r"provenance\.json' lacks base_sha256, which the run wrote there; restore the file"
    ):
        worked(tmp_path / "run", spec)


def test_a_trial_that_fails_before_an_engine_said_anything_leaves_no_folder(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)
    spec = parse_spec(REFUSED.format(9, "http://127.0.0.1:9/v1"), "spec", NAMES)
    (item,) = SUITES.get("refusal")().items("eval", 1, 0, 512, model.chat.count_tokens)
    with pytest.raises(RunError, match="Connection refused"):
        try_out_engines([parse_condition(spec.evaluate.policies[0])], model, spec, item)
    assert not list(tmp_path.iterdir())


# vLLM itself


@pytest.fixture
def vllm_python() -> str:
    path = os.environ.get("KVAUDIT_PYTHON_VLLM")
    if not path:
        pytest.skip("KVAUDIT_PYTHON_VLLM names no python that holds vllm")
    return path


def _under(condition: Condition, model: LoadedModel, python: str, log: Path) -> tuple[list[Any], dict[str, str]]:
    part = EngineSpec(python=python, at_once=4, start=600, answer=600)
    with ENGINES.get("vllm").start(dict(condition.settings), EngineContext(model, part, log, 1)) as session:
        return session.answer([ASKED._replace(ids=tuple(range(n, n + 40)), most=12) for n in range(6)]), dict(
            session.described
        )


@pytest.mark.engines
@pytest.mark.timeout(1200)
@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="vLLM's fp8 on a CPU wants AVX-512")
def test_vllm_in_float32_answers_as_our_own_cache_does_and_fp8_moves_it(
    model: LoadedModel, vllm_python: str, tmp_path: Path
) -> None:
    from kvaudit.audit.sampling.model import EMBEDDED

    model = load_model(EMBEDDED, device="cpu")
    plain, about = _under(parse_condition("vllm"), model, vllm_python, tmp_path / "auto.log")
    assert about["cache_dtype"] == "auto"
    for n, reply in enumerate(plain):
        ids, logprob = list(range(n, n + 40)), 0.0
        for token in reply.ids:
            with torch.no_grad():
                row = model.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert int(row.argmax()) == token
            logprob += float(row[token])
            ids.append(token)
        assert math.isclose(reply.logprob, logprob, abs_tol=1e-3)  # two orders of summation in float32
    coded, about = _under(parse_condition("vllm:kv_cache_dtype=fp8_e5m2"), model, vllm_python, tmp_path / "fp8.log")
    assert about["cache_dtype"] == "fp8_e5m2"
    assert [reply.logprob for reply in coded] != [reply.logprob for reply in plain]
