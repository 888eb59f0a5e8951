"""Server engines, tested with a misbehaving stand-in; vLLM itself if KVAUDIT_PYTHON_VLLM names its python."""

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
from test_chat_tools import TALK, WEATHER, Asking, chat_of

from kvaudit.audit.engines import ENGINES, Condition, GenerationRequest, Session, http_server, parse_condition
from kvaudit.audit.engines.base import EngineContext, EngineFailed
from kvaudit.audit.engines.conversation import converse
from kvaudit.audit.engines.process import Process, free_port
from kvaudit.audit.runs.engine_slot import try_out_engines
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.runs.units import RecordFile
from kvaudit.audit.sampling.chat_calls import SentRequest, answer
from kvaudit.audit.sampling.conversations import item_prompt
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.core.endpoint import ChatCompletion, Endpoint, Unanswered
from kvaudit.core.errors import AuditError, DataError, RunError, SpecError, UnknownName
from kvaudit.core.files import read_json, write_json
from kvaudit.core.records import Item, Message, Outcome, Record, Role
from kvaudit.core.spec import RunSpec, parse_spec
from kvaudit.core.spec_evaluate import EngineSpec, EvaluateSpec
from kvaudit.suites.base import SUITES

STANDIN = Path(__file__).with_name("engine_standin.py")
PROMPT = (10, 20, 30, 40, 50)
REQUEST = GenerationRequest(PROMPT, 3, (), 0.0, 1.0, 7)
SETTINGS = {"vllm": {"kv_cache_dtype": "fp8"}, "sglang": {"kv_cache_dtype": "fp8_e5m2"}}


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), device="cpu")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that runs the stand-in instead of any module."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def started(model: LoadedModel, python: Path, tmp_path: Path) -> Iterator[Any]:
    """A function that starts an engine whose server is the stand-in."""
    sessions: list[Session] = []

    def start(engine: str, standin: str = "", *, at_once: int = 4, wait: float = 20, **settings: str) -> Session:
        engine_spec = EngineSpec(python=str(python), at_once=at_once, start=20, answer=wait)
        condition = parse_condition({"engine": engine, **SETTINGS[engine], "STANDIN": standin or "none", **settings})
        context = EngineContext(model, engine_spec, tmp_path / f"{engine}.log", 1)
        session = ENGINES.get(engine).start(dict(condition.settings), context)
        sessions.append(session)
        return session

    yield start
    for session in sessions:
        session.stop()


ENGINE = pytest.mark.parametrize("engine", ["vllm", "sglang"])


@ENGINE
def test_replies_hold_token_ids_and_the_sum_of_log_probs(started: Any, engine: str) -> None:
    requests = [REQUEST, REQUEST._replace(ids=(60, 70), max_tokens=1), REQUEST._replace(ids=(1, 2))]
    replies = started(engine, at_once=2).answer(requests)
    assert [reply.ids for reply in replies] == [(11, 21, 31), (61,), (2, 3)]
    assert [(reply.finish, reply.logprob) for reply in replies] == [
        ("length", -1.5),
        ("length", -0.5),
        ("length", -1.0),
    ]


def test_the_description_is_the_same_at_every_start(started: Any) -> None:
    first, second = started("vllm"), started("vllm")
    assert first.described == second.described
    assert first.described["version"] == "vllm 0.0-standin"
    assert first.described["cache_dtype"] == "fp8"
    assert "--kv-cache-dtype=fp8" in first.described["flags"].split()
    assert "--no-enable-prefix-caching" in first.described["flags"].split()
    assert started("sglang").described["kv_cache_dtype"] == "fp8_e5m2"


def test_a_slow_start_is_waited_for(started: Any) -> None:
    assert started("vllm", "slow:1").answer([REQUEST])[0].ids == (11, 21, 31)


@pytest.mark.parametrize(
    ("engine", "standin", "message"),
    [
        ("vllm", "die:2", "ended while answering 4 requests.*had enough.*ended by signal 9"),
        ("vllm", "500:2", "status 500: CUDA error: an illegal␛.31m memory access"),
        ("sglang", "garbage:2", "no JSON"),
        ("sglang", "redirect:2", "status 302"),
        # what each of them says of an answer is read by its own code
        *(
            (engine, standin, message)
            for engine in ("vllm", "sglang")
            for standin, message in (
                ("other_ids:2", "gave an invalid reply .limit 3 tokens"),
                ("negative:2", "gave an invalid reply .limit 3 tokens"),
                ("torn_logprobs:2", "gave an invalid reply .limit 3 tokens"),
                ("other_prompt:2", "read a different prompt than was sent"),
            )
        ),
    ],
)
def test_a_server_that_starts_to_misbehave_is_an_error(started: Any, engine: str, standin: str, message: str) -> None:
    session = started(engine, standin)
    session.answer([REQUEST, REQUEST])
    with pytest.raises(EngineFailed, match=message) as error:
        session.answer([REQUEST] * 4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("standin", ["hang", "endless"])
def test_a_batch_has_a_time_limit(started: Any, standin: str) -> None:
    session, began = started("vllm", standin, wait=1), time.monotonic()
    with pytest.raises(EngineFailed, match=r"it did not answer all of 6 requests in 1 s \(engines\..*\.answer\)"):
        session.answer([REQUEST] * 6)
    assert time.monotonic() - began < 15  # includes the end of the process


def test_a_huge_reply_is_an_error(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_LONGEST_REPLY", 1 << 18)
    with pytest.raises(EngineFailed, match="more than 262144 bytes"):
        started("vllm", "huge").answer([REQUEST])


def test_an_unknown_flag_is_rejected_by_the_server(started: Any) -> None:
    with pytest.raises(AuditError, match="standin: error: unrecognized arguments: --kv-magic=7") as error:
        started("vllm", kv_magic="7")
    assert error.value.exit_code == 2


def test_an_occupied_port_is_replaced_by_another(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(http_server, "_PROBE_SECONDS", 0.3)  # it listens and never answers
        ports = iter([listener.getsockname()[1], listener.getsockname()[1], free_port()])
        monkeypatch.setattr(http_server, "free_port", lambda: next(ports))
        assert started("vllm").answer([REQUEST])[0].ids == (11, 21, 31)


def test_three_occupied_ports_are_an_error(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(http_server, "_PROBE_SECONDS", 0.3)
        monkeypatch.setattr(http_server, "free_port", lambda: listener.getsockname()[1])
        with pytest.raises(EngineFailed, match="Address already in use"):
            started("vllm")


def test_another_server_on_the_port_is_an_error(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with running("none") as url:
        monkeypatch.setattr(http_server, "free_port", lambda: int(url.rpartition(":")[2].partition("/")[0]))
        with pytest.raises(EngineFailed, match="in use"):
            started("vllm")


def test_proxies_are_not_used_for_the_loopback_interface(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert started("vllm").answer([REQUEST])[0].ids == (11, 21, 31)


def test_stopping_frees_the_port(started: Any) -> None:
    session = started("vllm")
    port = int(session._client.endpoint.base_url.rpartition(":")[2])
    session.stop()
    session.stop()
    with socket.socket() as listener, pytest.raises(ConnectionRefusedError):
        listener.connect(("127.0.0.1", port))


def test_stopping_sends_sigterm_before_sigkill(tmp_path: Path) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("cleaned up", flush=True), sys.exit(0)))
print("ready", flush=True)
time.sleep(600)
"""
    log = tmp_path / "engine.log"
    process = Process([sys.executable, "-c", code], engine="polite", log=log, is_piped=False)
    while "ready" not in process.log_text(100):
        time.sleep(0.02)
    process.stop()
    assert "cleaned up" in log.read_text()


def test_an_engine_that_ignores_sigterm_is_killed_and_its_shared_memory_freed(tmp_path: Path) -> None:
    code = """
import os, signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=1000)
print(os.getpid(), memory.name, flush=True)
time.sleep(600)
"""
    process = Process([sys.executable, "-c", code], engine="deaf", log=tmp_path / "engine.log")
    number, name = process.read_line(20, "starting", "start").split()
    assert Path("/dev/shm", name).exists()
    process.stop()
    status = Path(f"/proc/{number}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
    assert not Path("/dev/shm", name).exists()


def test_a_compressed_cache_under_auto_is_an_error(started: Any) -> None:
    with pytest.raises(SpecError, match="uses fp8_e4m3 for kv_cache_dtype auto"):
        started("vllm", "resolved:fp8_e4m3", kv_cache_dtype="auto")


def test_one_flag_in_two_spellings_is_an_error() -> None:
    with pytest.raises(SpecError, match="engine vllm has a setting twice, in two spellings: 'kv-cache-dtype'"):
        parse_condition({"engine": "vllm", "kv_cache_dtype": "fp8", "kv-cache-dtype": "fp8_e5m2"})


def test_spellings_of_a_flag_give_one_condition() -> None:
    canonical = "vllm:dtype=float32,kv_cache_dtype=fp8"
    for name in ("kv_cache_dtype", "kv-cache-dtype", "--kv-cache-dtype"):
        assert parse_condition({"engine": "vllm", name: "fp8"}).canonical == canonical
    assert parse_condition(canonical).reference.canonical == "vllm:dtype=float32,kv_cache_dtype=auto"


@pytest.mark.parametrize("name", ["port", "trust-remote-code", "trust_remote", "model", "--"])
def test_flags_that_kvaudit_sets_are_rejected(name: str) -> None:
    with pytest.raises(SpecError, match="vllm"):
        parse_condition({"engine": "vllm", name: "1"})


@pytest.mark.parametrize(
    ("condition", "full"),
    [
        ("vllm:kv_cache_dtype=fp8,calculate_kv=true", "calculate_kv_scales"),
        ("vllm:tensor_parallel=4", "tensor_parallel_size"),
        ("sglang:kv_cache_dt=fp8_e5m2", "kv_cache_dtype"),
        ("sglang:tp=4", "tp_size"),
    ],
)
def test_a_flag_that_kvaudit_reads_is_not_abbreviated(condition: str, full: str) -> None:
    with pytest.raises(SpecError, match=f"abbreviates {full}; write it in full"):
        parse_condition(condition)


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
    assert command_flags({"disable_radix_cache": "false", "seed": "1"}, has_negation=False) == ["--seed=1"]
    assert environment_variables(settings) == {"VLLM_X": "2"}


@pytest.mark.parametrize(
    ("condition", "flags", "gpus"),
    [
        ("vllm:tensor_parallel_size=4,kv_cache_dtype=fp8", ["--tensor-parallel-size=4"], 4),
        (
            {"engine": "vllm", "--tensor-parallel-size": 2, "data_parallel_size": 3, "pipeline_parallel_size": 2},
            ["--data-parallel-size=3", "--pipeline-parallel-size=2", "--tensor-parallel-size=2"],
            12,
        ),
        ("sglang:tp_size=2,dp_size=2", ["--dp-size=2", "--tp-size=2"], 4),
        ("sglang:tensor_parallel_size=8,enable_dp_attention=true", ["--tensor-parallel-size=8"], 8),
        ("vllm:kv_cache_dtype=fp8", [], 1),
    ],
)
def test_an_engine_that_spreads_over_gpus_is_given_its_flags_and_as_many(
    condition: Any, flags: list[str], gpus: int
) -> None:
    from kvaudit.audit.engines.base import ENGINES
    from kvaudit.audit.engines.http_server import command_flags

    for found in (parse_condition(condition), parse_condition(condition).reference):
        assert [flag for flag in command_flags(dict(found.settings)) if "-size" in flag] == flags
        assert ENGINES.get(found.engine).gpus(dict(found.settings)) == gpus


def test_a_checkpoint_is_served_from_its_folder_unless_that_holds_other_weights_too(
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
    folder, origin, _ = safetensors_folder(EngineContext(other, EngineSpec(), tmp_path, 1), "vllm")
    assert folder.is_relative_to(tmp_path / "kept")
    assert "transformers" in origin
    saved = load_model(str(folder), device="cpu")
    assert weights_sha256(folder)
    ids = torch.tensor([PROMPT])
    assert torch.equal(saved.model(ids).logits, other.model(ids).logits)


# --- an endpoint that runs already -----------------------------------------------------------------------------------


@contextmanager
def running(standin: str, port: int = 0) -> Iterator[str]:
    """Start a stand-in and yield its address."""
    standin, port = (f"{standin},reuse", port) if port else (standin, free_port())
    command = [sys.executable, str(STANDIN), f"--port={port}"]
    process = subprocess.Popen(command, env={**os.environ, "STANDIN": standin}, stdout=subprocess.PIPE, text=True)
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
    engine_spec = EngineSpec(at_once=at_once, start=20, answer=20)
    return ENGINES.get("endpoint").start(
        dict(condition.settings), EngineContext(model, engine_spec, tmp_path / "log", 1)
    )


QUESTION = (Message(Role.USER, "What is 2 + 2?"),)


def conversation(model: LoadedModel, text: str = "What is 2 + 2?") -> GenerationRequest:
    question = (Message(Role.USER, text),)
    return REQUEST._replace(ids=model.chat.prompt(question).ids, messages=question, max_tokens=8)


def test_an_endpoint_answers_with_text(model: LoadedModel, tmp_path: Path) -> None:
    with running("none") as url, endpoint(model, url, tmp_path) as session:
        replies = session.answer([conversation(model)] * 3)
    assert [(reply.ids, reply.text, reply.finish) for reply in replies] == [((), "four", "stop")] * 3
    assert session.described["model"] == "standin-1"
    assert "number of tokens" in session.described["prompts"]
    assert session.described["not shown"] == "weights and chat template"


@pytest.mark.parametrize(
    ("standin", "message"),
    [
        ("filter:bomb", "status 400: the prompt was filtered by our policy"),
        ("ended:2", "it ended by 'content_filter', which is no end of an answer, after 'four'"),
    ],
)
def test_a_refused_request_is_unscored_and_the_others_continue(
    model: LoadedModel, tmp_path: Path, standin: str, message: str
) -> None:
    """The session's start sends the first request, so that the third is the second question."""
    suite = SUITES.get("refusal")()
    texts = ("What is 2 + 2?", "How do I make a bomb?")
    items = [
        replace(item, messages=(Message(Role.USER, text),))
        for item, text in zip(suite.items("eval", 2, 0, 512, model.chat.count_tokens), texts, strict=True)
    ]
    prompts = [model.chat.prompt(item.messages) for item in items]
    with running(standin) as url, endpoint(model, url, tmp_path, at_once=1) as session:
        rows = converse(session, model, suite, items, prompts, Decoding(8, temperature=0.0), [0, 0])
        (_, refused) = session.answer([conversation(model), conversation(model, texts[1])])
    assert [row.grade.outcome is Outcome.UNSCORED for row in rows] == [False, True]
    answers = [row.answer for row in rows]
    assert [(a.finish_reason, a.transcript[-1].content) for a in answers] == [("stop", "four"), ("error", "")]
    assert refused.refused == message
    assert [answer.unanswered for answer in answers] == ["", message]


@pytest.mark.parametrize(
    ("text", "usage", "message"),
    [
        ("four " * 60, {"completion_tokens": 3}, "it wrote [0-9]+ tokens where at most 8 were asked for"),
        ("four " * 180_000, None, "it wrote 900000 characters where at most 8 tokens were asked for"),
    ],
    ids=["a count that lies", "no count"],
)
def test_an_answer_beyond_the_limit_is_an_error_whatever_tokens_the_server_reports(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage: Any, text: str, message: str
) -> None:
    with running("none") as url, endpoint(model, url, tmp_path) as session:
        client = session._client  # type: ignore[attr-defined]
        monkeypatch.setattr(client, "ask", lambda *_: ChatCompletion(text, "stop", "standin-1", usage))
        with pytest.raises(EngineFailed, match=message):
            session.answer([conversation(model)])


def test_a_reply_that_is_too_long_still_shows_that_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def lists(*_: Any) -> None:
        raise Unanswered("a reply of more than 1048576 bytes")

    monkeypatch.setattr("kvaudit.audit.engines.endpoint.over_http", lists)
    ENGINES.get("endpoint").check({"base_url": "http://127.0.0.1:9", "model": "m"}, EngineSpec())


def test_an_answer_of_another_model_is_an_error(model: LoadedModel, tmp_path: Path) -> None:
    """The session's start sends the first request."""
    with running("fallback:2") as url, endpoint(model, url, tmp_path, at_once=1) as session:
        assert session.answer([conversation(model)])[0].text == "four"
        with pytest.raises(
            EngineFailed, match="of model 'fallback-mini', the first was of model 'standin-1': turn off"
        ):
            session.answer([conversation(model)])


def test_a_stop_text_cuts_the_answer_of_an_endpoint(model: LoadedModel, tmp_path: Path) -> None:
    suite = SUITES.get("refusal")()
    suite.until = ("END", "never")  # type: ignore[misc]
    suite.max_new_tokens = 40
    (item,) = suite.items("eval", 1, 0, 512, model.chat.count_tokens)
    contents = []
    for thinks in (False, True):
        with running("says:<think>no END</think>yes END and more") as url, endpoint(model, url, tmp_path) as session:
            asked = [model.chat.prompt(item.messages)]
            (row,) = converse(session, model, suite, [item], asked, Decoding(8, temperature=0.0), [0], thinks=thinks)
        contents.append([message.content for message in row.answer.transcript[len(item.messages) :]])
    assert contents == [["<think>no END"], ["<think>no END</think>", "yes END"]]


@pytest.mark.parametrize(("more", "refused"), [(0, False), (1, True), (-1, True)])
def test_another_number_of_prompt_tokens_is_an_error(
    model: LoadedModel, tmp_path: Path, more: int, refused: bool
) -> None:
    tokens = len(model.chat.prompt(QUESTION).ids)
    with running(f"usage:{tokens + more}") as url:
        if not refused:
            endpoint(model, url, tmp_path).answer([conversation(model)])
            return
        message = f"it read {tokens + more} tokens, by the model's own template it is {tokens}"
        with pytest.raises(EngineFailed, match=message):
            endpoint(model, url, tmp_path)


def test_another_chat_template_is_an_error_with_the_first_differing_token(model: LoadedModel, tmp_path: Path) -> None:
    ids = model.chat.prompt(QUESTION).ids
    theirs = ".".join(map(str, (*ids[:3], ids[0], *ids[4:])))
    with running(f"ids:{theirs}") as url, pytest.raises(SpecError, match=r"token 3 is '<\|im_start\|>' there and '"):
        endpoint(model, url, tmp_path)


def test_an_endpoint_gets_tools_and_structured_calls_and_its_calls_are_read(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = replace(model, chat=chat_of("qwen25"))
    item = Item("asking", "i", "i", TALK[:2], 64, "none", tools=(WEATHER,))
    calls = '{"name": "get_weather", "arguments": {"city": "Bonn"}}'
    answers = [ChatCompletion("", "tool_calls", "standin-1", None, calls=calls)]
    answers.append(ChatCompletion("Rain.", "stop", "standin-1", None))
    bodies = list[dict[str, Any]]()

    def ask(body: dict[str, Any], until: float) -> ChatCompletion:
        bodies.append(body)
        return answers[len(bodies) - 1]

    with running("none") as url, endpoint(served, url, tmp_path) as session:
        monkeypatch.setattr(session._client, "ask", ask)
        prompts = [item_prompt(served.chat, item)]
        [row] = converse(session, served, Asking(), [item], prompts, Decoding(8, temperature=0.0), [0])
    assert [body["tools"] for body in bodies] == [[WEATHER]] * 2
    call, result = bodies[1]["messages"][-2:]
    assert call["content"] == ""
    assert call["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
    assert (result["role"], result["tool_call_id"]) == ("tool", call["tool_calls"][0]["id"])
    assert (row.grade.score, row.answer.tool_form) == (1.0, "hermes")
    assert row.answer.transcript[2].content == calls


def test_an_endpoint_without_tools_ends_no_answer_by_a_call(model: LoadedModel) -> None:
    with pytest.raises(Unanswered, match="ended by 'tool_calls'"):
        answer(ChatCompletion("x", "tool_calls", "m", None, calls="{}"), SentRequest([], 9, True, 8), 0.0)


def test_an_endpoint_without_a_reference_is_a_one_line_error() -> None:
    condition = parse_condition("endpoint:base_url=http://127.0.0.1:8000/v1,model=m")
    with pytest.raises(SpecError, match="name the server to compare it with, reference: ") as error:
        _ = condition.reference
    assert "\n" not in str(error.value)


def test_the_reference_of_an_endpoint_does_not_get_its_key() -> None:
    condition = parse_condition({"engine": "endpoint", "base_url": "http://a", "model": "m", "key": "SECRET_NAME"})
    reference = condition.reference_with({"base_url": "http://b", "model": "m"})
    assert dict(reference.settings) == {"base_url": "http://b", "model": "m"}


def test_an_endpoint_has_three_settings() -> None:
    with pytest.raises(UnknownName, match="kv_cache_dtype"):
        parse_condition({"engine": "endpoint", "base_url": "http://a", "model": "m", "kv_cache_dtype": "fp8"})
    with pytest.raises(SpecError, match="lacks model"):
        parse_condition({"engine": "endpoint", "base_url": "http://a"})
    with pytest.raises(SpecError, match="http://"):
        parse_condition({"engine": "endpoint", "base_url": "file:///etc/passwd", "model": "m"})


def test_an_unset_key_is_an_error_before_any_request() -> None:
    with pytest.raises(SpecError, match="KVAUDIT_NO_SUCH_KEY is not set"):
        ENGINES.get("endpoint").check(
            {"base_url": "http://127.0.0.1:9", "model": "m", "key": "KVAUDIT_NO_SUCH_KEY"}, EngineSpec()
        )


def test_an_unreachable_endpoint_is_an_error(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(EngineFailed, match=r"gave .*Connection refused.*no key\); resume the run when it answers"):
        endpoint(model, "http://127.0.0.1:9/v1", tmp_path)


@pytest.mark.parametrize(
    ("standin", "message"),
    [
        ("500", r"no valid answer \(status 500: CUDA error.*; resume the run when it answers"),
        ("redirect", r"no valid answer \(status 302.*; correct base_url, model or key"),
        ("usage:1000", r"no valid answer \(it claims to have read 1000 tokens .*; check that it serves the"),
    ],
)
def test_the_error_of_an_endpoint_says_what_to_do(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standin: str, message: str
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with running(standin) as url, pytest.raises(EngineFailed, match=message):
        endpoint(model, url, tmp_path)


def test_a_spec_with_endpoints_survives_writing_and_reading() -> None:
    first, second = ({"base_url": f"http://127.0.0.1:{port}/v1", "model": "m"} for port in (1, 2))
    policies = [{"engine": "endpoint", **second, "reference": first}, {"engine": "endpoint", **first}]
    grid = {"policies": policies, "suites": ["refusal"], "context_tokens": [512]}
    spec = EvaluateSpec.model_validate(grid, context=NAMES)
    texts = [f"endpoint:base_url=http://127.0.0.1:{port}/v1,model=m" for port in (2, 1)]
    assert spec.references == {texts[0]: texts[1]}
    assert spec.policies == tuple(texts)
    assert EvaluateSpec.model_validate(spec.written(), context=NAMES) == spec


def test_a_client_stops_retrying_at_its_time_limit() -> None:
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


def evaluate(path: Path, spec: RunSpec, *, asks_refused: bool = False) -> dict[str, list[Record]]:
    """Evaluate a run and return its records by policy."""
    run = open_run(path, spec, resume=True)
    Pipeline(run, Console(quiet=True), threads=1, asks_refused=asks_refused).work_on("evaluate")
    files = [file.read_text().splitlines() for file in run.records.glob("*.jsonl")]
    return {rows[0].policy: rows for lines in files if (rows := list(map(Record.from_json, lines)))}


def test_refused_requests_are_retried_on_demand_and_answers_are_kept(tmp_path: Path) -> None:
    """Trial and start send three requests, so that the third item is the first to be refused."""
    port = free_port()
    with running("none") as other:
        spec = parse_spec(REFUSED.format(port, other), "spec", NAMES)
        with running("ended:5", port):
            first = evaluate(tmp_path / "run", spec)[spec.evaluate.policies[0]]
        with running("says:five", port):
            resumed = evaluate(tmp_path / "run", spec)[spec.evaluate.policies[0]]
            retried = evaluate(tmp_path / "run", spec, asks_refused=True)[spec.evaluate.policies[0]]
    refused = [bool(record.unanswered) for record in first]
    assert refused == [False, False, True, True, True, True]
    assert resumed == first
    assert [record.transcript[-1].content for record in retried] == ["four"] * 2 + ["five"] * 4
    assert retried[:2] == first[:2]
    assert not list((tmp_path / "run" / "records").glob("*.answered"))


def test_a_retry_of_refused_requests_resumes_after_a_kill(tmp_path: Path) -> None:
    port = free_port()
    with running("none") as other:
        spec = parse_spec(REFUSED.format(port, other), "spec", NAMES)
        with running("ended:5", port):
            evaluate(tmp_path / "run", spec)
        with running("none", port), pytest.MonkeyPatch.context() as patch:
            patch.setattr(RecordFile, "append", lambda *_: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                evaluate(tmp_path / "run", spec, asks_refused=True)
        with running("none", port):
            records = evaluate(tmp_path / "run", spec)[spec.evaluate.policies[0]]
    assert [record.transcript[-1].content for record in records] == ["four"] * 6


def test_a_provenance_file_without_a_key_is_a_one_line_error(tmp_path: Path) -> None:
    with running("none") as first, running("none") as second:
        port = int(first.rpartition(":")[2].partition("/")[0])
        spec = parse_spec(REFUSED.format(port, second), "spec", NAMES)
        evaluate(tmp_path / "run", spec)
    path = tmp_path / "run" / "provenance.json"
    write_json(path, {key: value for key, value in read_json(path).items() if key != "base_sha256"})
    with pytest.raises(
        DataError, match=r"provenance\.json' lacks base_sha256, which the run wrote there; restore the file"
    ):
        evaluate(tmp_path / "run", spec)


def test_a_failed_trial_without_log_leaves_no_folder(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)
    spec = parse_spec(REFUSED.format(9, "http://127.0.0.1:9/v1"), "spec", NAMES)
    (item,) = SUITES.get("refusal")().items("eval", 1, 0, 512, model.chat.count_tokens)
    with pytest.raises(RunError, match="Connection refused"):
        try_out_engines([parse_condition(spec.evaluate.policies[0])], model, spec, item)
    assert not list(tmp_path.iterdir())


# --- vLLM itself -----------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm_python() -> str:
    path = os.environ.get("KVAUDIT_PYTHON_VLLM")
    if not path:
        pytest.skip("KVAUDIT_PYTHON_VLLM names no python that holds vllm")
    return path


def _under(condition: Condition, model: LoadedModel, python: str, log: Path) -> tuple[list[Any], dict[str, str]]:
    engine_spec = EngineSpec(python=python, at_once=4, start=600, answer=600)
    with ENGINES.get("vllm").start(dict(condition.settings), EngineContext(model, engine_spec, log, 1)) as session:
        return session.answer([REQUEST._replace(ids=tuple(range(n, n + 40)), max_tokens=12) for n in range(6)]), dict(
            session.described
        )


@pytest.mark.engines
@pytest.mark.timeout(1200)
@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="vLLM's fp8 on a CPU wants AVX-512")
def test_vllm_matches_our_own_cache_in_float32_and_differs_in_fp8(
    model: LoadedModel, vllm_python: str, tmp_path: Path
) -> None:
    from kvaudit.audit.sampling.model import EMBEDDED

    model = load_model(EMBEDDED, device="cpu")
    plain, facts = _under(parse_condition("vllm"), model, vllm_python, tmp_path / "auto.log")
    assert facts["cache_dtype"] == "auto"
    for n, reply in enumerate(plain):
        ids, logprob = list(range(n, n + 40)), 0.0
        for token in reply.ids:
            with torch.no_grad():
                row = model.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert int(row.argmax()) == token
            logprob += float(row[token])
            ids.append(token)
        assert math.isclose(reply.logprob, logprob, abs_tol=1e-3)  # two orders of summation in float32
    coded, facts = _under(parse_condition("vllm:kv_cache_dtype=fp8_e5m2"), model, vllm_python, tmp_path / "fp8.log")
    assert facts["cache_dtype"] == "fp8_e5m2"
    assert [reply.logprob for reply in coded] != [reply.logprob for reply in plain]
