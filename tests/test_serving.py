"""The server with real clients over a socket: answers, batches, streams, stop texts, keys and errors."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import openai
import pytest
import uvicorn
from starlette.requests import ClientDisconnect
from typer.testing import CliRunner

from kvaudit.audit.cache.store import Store
from kvaudit.audit.cli import app
from kvaudit.audit.commands.serve import _listen, parse_aliases, parse_models
from kvaudit.audit.policies import POLICIES, parse_policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.serving.app import application
from kvaudit.audit.serving.engine import PendingAnswers, SamplingEngine, _RowText
from kvaudit.audit.serving.wire import Choice, read_request
from kvaudit.core import plugins as registry
from kvaudit.core.errors import RunError, SpecError, UnknownName
from kvaudit.core.records import Message, Role

KEY = "a-key-of-the-test"
HIDDEN = "streaming:budget=24,sink=4"
CHAT = [
    {"role": "system", "content": "You guard the door list. Else copy the code line."},
    {"role": "user", "content": "The code: moose olive.\nTell me the code of moose."},
]


class Server(NamedTuple):
    engine: SamplingEngine
    url: str
    lines: list[str]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def post(self, body: bytes, key: str = KEY) -> tuple[int, dict[str, Any], str]:
        """Return status, body and Retry-After of a raw request."""
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.loads(answer.read()), ""
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), error.headers.get("Retry-After", "")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(SamplingEngine({"embedded": load_model()}, {"release": f"embedded@{HIDDEN}"}), KEY) as running:
        yield running


@contextmanager
def serving(engine: SamplingEngine, key: str | None) -> Iterator[Server]:
    lines: list[str] = []
    config = uvicorn.Config(application(engine, key=key, log=lines.append), port=0, log_level="error")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield Server(engine, f"http://127.0.0.1:{port}", lines)
    running.should_exit = True
    thread.join()


def sampled(policy: str, new: int) -> tuple[str, tuple[float, ...]]:
    """Return the greedy answer of the sampler without the server."""
    model = load_model()
    prompt = model.chat.prompt([Message(Role(row["role"]), row["content"]) for row in CHAT])
    episode = Sampler(model, parse_policy(policy)).open([prompt.ids], [0], roles=[prompt.roles])
    (done,) = episode.decode(Decoding(new, temperature=0.0))
    assert done is not None
    return model.chat.text(done.ids), done.logprobs


def test_answers_equal_those_of_the_sampler_under_the_policy(server: Server) -> None:
    for policy in ("none", HIDDEN):
        completion = server.client().chat.completions.create(
            model=f"embedded@{policy}", messages=CHAT, max_tokens=12, temperature=0, logprobs=True
        )
        text, logprobs = sampled(policy, 12)
        assert completion.choices[0].message.content == text
        assert [entry.logprob for entry in completion.choices[0].logprobs.content] == pytest.approx(
            list(logprobs), abs=1e-5
        )


def test_an_alias_hides_its_policy(server: Server) -> None:
    ask = server.client().chat.completions.create
    hidden = ask(model="release", messages=CHAT, max_tokens=12, temperature=0)
    visible = ask(model=f"embedded@{HIDDEN}", messages=CHAT, max_tokens=12, temperature=0)
    assert hidden.choices[0].message.content == visible.choices[0].message.content
    assert HIDDEN not in hidden.model_dump_json()
    assert [model.id for model in server.client().models.list()] == ["embedded", "release"]


def test_many_concurrent_requests_get_their_own_answers(server: Server) -> None:
    ask = server.client().chat.completions.create

    def answer(seed: int) -> str:
        completion = ask(model="embedded", messages=CHAT, max_tokens=6, temperature=3.0, seed=seed % 8)
        return completion.choices[0].message.content or ""

    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(answer, range(64)))
    assert len(texts) == 64
    assert all(texts[n] == texts[n % 8] for n in range(64)), "an answer depends on what shared its batch"
    assert len(set(texts)) > 1


def test_the_client_of_lm_eval_gets_the_same_answers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = pytest.importorskip("lm_eval.models.openai_completions", reason="needs the extra lm-eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.api_models import JsonChatStr

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    arguments = JsonChatStr(json.dumps(CHAT)), {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0}
    for policy in ("none", HIDDEN):
        client = harness.LocalChatCompletion(f"{server.url}/v1/chat/completions", model=f"embedded@{policy}")
        assert client.generate_until([Instance("generate_until", {}, arguments, 0)]) == [sampled(policy, 8)[0]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages that it stands on
def test_the_client_of_inspect_gets_the_same_answer(server: Server) -> None:
    inspect = pytest.importorskip("inspect_ai.model", reason="needs the extra inspect")
    roles = {"system": inspect.ChatMessageSystem, "user": inspect.ChatMessageUser}
    chat = [roles[row["role"]](content=row["content"]) for row in CHAT]
    greedy = inspect.GenerateConfig(max_tokens=8, temperature=0)

    async def answer() -> str:
        name, url = f"openai-api/kvaudit/embedded@{HIDDEN}", f"{server.url}/v1"
        async with inspect.get_model(name, base_url=url, api_key=KEY, memoize=False) as model:
            return str((await model.generate(chat, config=greedy)).completion)

    assert asyncio.run(answer()) == sampled(HIDDEN, 8)[0]


def test_a_stream_adds_up_to_the_whole_answer(server: Server) -> None:
    ask: Any = server.client().chat.completions.create
    whole = ask(model="embedded", messages=CHAT, max_tokens=12, temperature=0).choices[0]
    chunks = list(
        ask(
            model="embedded",
            messages=CHAT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == whole.message.content
    assert sum(bool(delta) for delta in deltas) > 1
    assert chunks[-1].usage.completion_tokens > 1


def test_a_stream_has_log_probs(server: Server) -> None:
    ask: Any = server.client().chat.completions.create
    options = {"model": "embedded", "messages": CHAT, "max_tokens": 12, "temperature": 0, "logprobs": True}
    whole = ask(**options).choices[0].logprobs.content
    parts = [chunk.choices[0].logprobs for chunk in ask(**options, stream=True)]
    assert [entry.logprob for part in parts if part for entry in part.content] == [entry.logprob for entry in whole]


def test_a_stop_text_ends_the_answer_and_is_not_in_it(server: Server) -> None:
    ask: Any = server.client().chat.completions.create
    whole = ask(model="embedded", messages=CHAT, max_tokens=12, temperature=0).choices[0].message.content
    stop = whole.split()[1]
    cut = ask(model="embedded", messages=CHAT, max_tokens=12, temperature=0, stop=[stop]).choices[0]
    assert cut.message.content == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    streamed = ask(model="embedded", messages=CHAT, max_tokens=12, temperature=0, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == cut.message.content


def test_several_choices_are_different_draws(server: Server) -> None:
    ask: Any = server.client().chat.completions.create
    first = ask(model="embedded", messages=CHAT, max_tokens=8, temperature=3.0, n=4, seed=3)
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in first.choices}) > 1
    second = ask(model="embedded", messages=CHAT, max_tokens=8, temperature=3.0, n=4, seed=3)
    assert [c.message.content for c in second.choices] == [c.message.content for c in first.choices]


def test_a_wrong_key_is_rejected_and_no_key_is_logged(server: Server) -> None:
    status, body, _ = server.post(b"{}", key="another-key")
    assert status == 401
    assert "bearer" in body["error"]["message"]
    assert not any(KEY in line or "another-key" in line for line in server.lines)


def test_a_log_line_holds_no_text_of_requests(server: Server) -> None:
    server.client().chat.completions.create(model="embedded", messages=CHAT, max_tokens=4)
    assert server.lines
    assert not any("moose" in line for line in server.lines)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "unknown model 'other'"),
        ({"model": "embedded@snapvk:budget=4"}, "snapkv"),
        ({"messages": []}, "expected a list of messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        (
            {"messages": [{"role": "thought", "content": "x"}]},
            "expected one of developer, system, user, assistant, tool",
        ),
        (
            {"messages": [{"role": "user", "content": "4 " * 5000}]},
            "tokens and its answer up to 1, the model has 4096 positions",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, "expected text"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 30_000}, "positions"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"functions": [{"name": "f"}]}, "functions is"),
        ({"top_k": 20}, "top_k is 20, which this server does not support"),
        ({"repetition_penalty": 1.1}, "does not support"),
        ({"guided_json": {"type": "object"}}, "guided_json is"),
        ({"truncate_prompt_tokens": 8}, "does not support"),
        ({"messages": [{"role": [], "content": "x"}]}, "has role []"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a character"),
        ({"model": "\ud800"}, "expected text"),
    ],
)
def test_an_invalid_request_is_a_one_line_error(server: Server, change: dict[str, Any], message: str) -> None:
    status, body, _ = server.post(json.dumps({"model": "embedded", "messages": CHAT, **change}).encode())
    assert status == 400
    assert message in body["error"]["message"]
    assert "\n" not in body["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_an_error(server: Server, raw: bytes) -> None:
    assert server.post(raw)[0] == 400


def test_a_full_queue_is_an_error() -> None:
    from kvaudit.audit.serving.engine import QueueFull

    engine = SamplingEngine({"embedded": load_model()}, max_waiting=0)
    request = read_request({"model": "embedded", "messages": CHAT})
    with pytest.raises(QueueFull, match="try again later"):
        engine.submit(request)
    engine.close()


class PausedRequest:
    """A request whose answer stops at its first token until ``release``."""

    def __init__(self, engine: SamplingEngine, model: str, tokens: int = 4, messages: Any = CHAT) -> None:
        self._released, self._started = threading.Event(), threading.Event()
        request = read_request({"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0})
        self.done = engine.submit(request, self._listen)[1]

    def _listen(self, _: int, __: str) -> None:
        self._started.set()
        assert self._released.wait(60)

    def wait(self) -> PausedRequest:
        assert self._started.wait(60)
        return self

    def release(self) -> None:
        self._released.set()


def test_a_cancelled_request_does_not_affect_others() -> None:
    engine = SamplingEngine({"embedded": load_model()})
    request = read_request({"model": "embedded", "messages": CHAT, "max_tokens": 2})
    first = PausedRequest(engine, "embedded").wait()
    gone, other = engine.submit(request)[1], engine.submit(request)[1]
    assert gone.cancel()
    first.release()
    assert other.result(timeout=60)
    engine.close()


def test_an_abandoned_request_ends_at_its_next_token() -> None:
    engine = SamplingEngine({"embedded": load_model()})
    request = read_request({"model": "embedded", "messages": CHAT, "max_tokens": 12, "temperature": 0})
    calls = itertools.count(1)

    def listener(_: int, __: str) -> None:
        if next(calls) == 2:
            begun[0].abandon()

    whole = engine.submit(request)[1].result(timeout=60)[0]
    paused = PausedRequest(engine, "embedded").wait()
    begun = [engine.submit(request, listener)[1]]
    paused.release()
    cut = begun[0].result(timeout=60)[0]
    engine.close()
    assert len(cut.tokens) < len(whole.tokens)


def test_an_answer_is_not_completed_after_its_client_disconnects(server: Server) -> None:
    """The sampler is paused, so that the answer cannot be complete before the client disconnects."""
    paused = PausedRequest(server.engine, f"embedded@{HIDDEN}").wait()
    body = json.dumps({"model": "embedded", "messages": CHAT, "max_tokens": 500}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    before = len(server.lines)
    with socket.create_connection((host, int(port))) as line:
        line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(1)
    until = time.monotonic() + 60
    while not any(text.startswith("499") for text in server.lines[before:]) and time.monotonic() < until:
        time.sleep(0.05)
    paused.release()
    assert any(text.startswith("499") for text in server.lines[before:])


def test_a_prompt_with_too_many_characters_is_rejected_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model()
    engine = SamplingEngine({"embedded": model})
    longest = max(map(len, model.chat.tokenizer.get_vocab()))
    text = "a" * (model.max_positions * longest + 1)
    monkeypatch.setattr(type(model.chat), "prompt", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(SpecError, match=rf"the prompt has {len(text)} characters, the {model.max_positions} positions"):
        engine.submit(read_request({"model": "embedded", "messages": [{"role": "user", "content": text}]}))
    engine.close()


@pytest.mark.parametrize(("path", "method", "status"), [("/v1/none", "GET", 404), ("/v1/chat/completions", "GET", 405)])
def test_unknown_paths_and_methods_are_errors_in_json(server: Server, path: str, method: str, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(server.url + path, method=method))
    assert refused.value.code == status
    assert "served are /v1/models" in json.loads(refused.value.read())["error"]["message"]
    refused.value.close()


def test_the_port_is_bound_before_models_are_loaded() -> None:
    with _listen("127.0.0.1", 0) as first, pytest.raises(SpecError, match="cannot listen on"):
        _listen("127.0.0.1", first.getsockname()[1])


def test_sigterm_ends_a_server_with_incomplete_and_running_requests() -> None:
    code = "import kvaudit.audit.commands.serve as one; one._GRACE = 0.2; from kvaudit.audit.cli import app; app()"
    words = [sys.executable, "-c", code, "serve", "embedded", "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = next(text for text in process.stdout if text.startswith("serving: "))
        host, port = line.strip().removesuffix("/v1").rpartition("//")[2].split(":")
        request = {"model": "embedded", "messages": CHAT, "max_tokens": 500, "temperature": 4}
        body, streamed = (json.dumps(request | more).encode() for more in ({}, {"stream": True}))
        head, head_of_stream = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(each)}\r\n\r\n".encode()
            for each in (body, streamed)
        )
        parts = (head + body[:9], head[:20], head + body, head_of_stream + streamed)
        lines = [socket.create_connection((host, int(port))) for _ in parts]
        for one, sent in zip(lines, parts, strict=True):
            one.sendall(sent)
        lines[-1].recv(1)  # the stream has begun
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        for one in lines:
            one.close()
        assert "Traceback" not in process.stdout.read()
    finally:
        process.kill()
        process.communicate()


def test_requests_outside_the_running_batch_count_as_waiting() -> None:
    from kvaudit.audit.serving.engine import QueueFull

    engine = SamplingEngine({"embedded": load_model()}, max_waiting=2)
    paused = [
        PausedRequest(engine, "embedded").wait(),
        PausedRequest(engine, f"embedded@{HIDDEN}"),
        PausedRequest(engine, "embedded@h2o:budget=16"),
    ]
    paused[0].release()
    paused[1].wait()  # now the third has left the queue and is still waiting
    paused.append(PausedRequest(engine, "embedded"))
    with pytest.raises(QueueFull):
        PausedRequest(engine, "embedded")
    for each in paused:
        each.release()
    assert all(each.done.result(timeout=60) for each in paused)
    engine.close()


def test_concurrent_first_requests_find_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(POLICIES, "_classes", None)  # as in a server before its first request
    load = importlib.import_module

    def slow(name: str) -> Any:
        time.sleep(0.002)
        return load(name)

    monkeypatch.setattr(registry.importlib, "import_module", slow)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: len(POLICIES.all()), range(8)))
    assert set(found) == {max(found)}
    assert max(found) > 10


def test_a_request_joins_the_running_batch_and_is_answered_at_once() -> None:
    engine = SamplingEngine({"embedded": load_model()})
    request = {"model": "embedded", "messages": CHAT, "temperature": 0, "max_tokens": 12}
    other: list[Future[list[Choice]]] = []
    answered: list[bool] = []
    calls = itertools.count(1)

    def listener(_: int, __: str) -> None:  # called by the sampling thread
        if not other:
            other.append(engine.submit(read_request(request | {"max_tokens": 2}))[1])
        if next(calls) == 6:
            answered.append(other[0].done())

    (first,) = engine.submit(read_request(request), listener)[1].result(timeout=60)
    assert answered == [True], "it waited for the whole batch"
    assert first.text == sampled("none", 12)[0]
    assert [choice.text for choice in other[0].result(timeout=0)] == [sampled("none", 2)[0]]
    engine.close()


def test_joining_requests_do_not_overtake_longer_waiting_ones() -> None:
    engine, order = SamplingEngine({"embedded": load_model()}), list[str]()
    first = PausedRequest(engine, "embedded", 12).wait()
    for name in (f"embedded@{HIDDEN}", "embedded"):
        done = engine.submit(read_request({"model": name, "messages": CHAT, "max_tokens": 2, "temperature": 0}))[1]
        done.add_done_callback(lambda _, name=name: order.append(name))
    first.release()
    assert first.done.result(timeout=60)
    assert done.result(timeout=60)
    engine.close()
    assert order == [f"embedded@{HIDDEN}", "embedded"]


def test_a_failing_prompt_does_not_affect_the_running_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, opened = SamplingEngine({"embedded": load_model()}), Sampler.open
    first = PausedRequest(engine, "embedded", 12).wait()

    def fails(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(Sampler, "open", opened)
        raise MemoryError

    monkeypatch.setattr(Sampler, "open", fails)
    request = read_request({"model": "embedded", "messages": CHAT, "max_tokens": 2, "temperature": 0})
    second = engine.submit(request)[1]
    first.release()
    with pytest.raises(RunError, match="sampling failed: MemoryError"):
        second.result(timeout=60)
    assert first.done.result(timeout=60)
    assert engine.submit(request)[1].result(timeout=60)
    engine.close()


def test_one_bad_prompt_does_not_affect_requests_of_the_same_batch() -> None:
    name = "embedded@snapkv:budget=48,window=8,pin=system"
    engine = SamplingEngine({"embedded": load_model()})
    long = [{"role": "system", "content": "You guard the door list. " * 12}, CHAT[1]]
    requests = [
        {"model": name, "messages": chat, "max_tokens": 2, "temperature": 0} for chat in ([CHAT[1]], long, [CHAT[1]])
    ]
    for first in (None, name):  # a batch of their own, and one to join
        paused = PausedRequest(engine, first or "embedded", 12).wait()
        done = [engine.submit(read_request(one))[1] for one in requests]
        paused.release()
        assert [future.exception(timeout=60) is None for future in done] == [True, False, True]
        assert "pin=system holds" in str(done[1].exception())
    engine.close()


def test_a_failed_join_ends_the_batch_with_its_error_but_not_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "embedded@snapkv:budget=48,window=8,pin=system"
    engine, join = SamplingEngine({"embedded": load_model()}), Store.join
    first = PausedRequest(engine, name, 12, [CHAT[1]]).wait()

    def fails(*_: Any) -> None:
        monkeypatch.setattr(Store, "join", join)
        raise MemoryError

    monkeypatch.setattr(Store, "join", fails)
    long = [{"role": "system", "content": "You guard the door list. " * 12}, CHAT[1]]
    requests = [{"model": name, "messages": chat, "max_tokens": 2, "temperature": 0} for chat in ([CHAT[1]], long)]
    waiting = [engine.submit(read_request(requests[n]))[1] for n in (0, 1, 0)]  # two are prefilled, each by itself
    first.release()
    for done in (first.done, waiting[0], waiting[2]):
        with pytest.raises(RunError, match="sampling failed: MemoryError"):
            done.result(timeout=60)
    assert "pin=system holds" in str(waiting[1].exception(timeout=60))
    assert engine.submit(read_request(requests[0]))[1].result(timeout=60)
    engine.close()


def test_a_failing_listener_does_not_affect_others() -> None:
    engine = SamplingEngine({"embedded": load_model()})
    request = read_request({"model": "embedded", "messages": CHAT, "max_tokens": 12, "temperature": 0})

    def listener(_: int, __: str) -> None:
        raise RuntimeError("the event loop is closed")

    first = PausedRequest(engine, "embedded").wait()
    futures = [engine.submit(request, listener)[1], engine.submit(request)[1]]
    first.release()
    with pytest.raises(RunError, match="sampling failed: RuntimeError"):
        futures[0].result(timeout=60)
    assert futures[1].result(timeout=60)[0].text == sampled("none", 12)[0]
    engine.close()


def test_a_cancelled_request_does_not_block_joining() -> None:
    engine, order = SamplingEngine({"embedded": load_model()}), list[str]()
    first = PausedRequest(engine, "embedded", 12).wait()
    first.done.add_done_callback(lambda _: order.append("first"))
    gone = engine.submit(
        read_request({"model": f"embedded@{HIDDEN}", "messages": CHAT, "max_tokens": 2, "temperature": 0})
    )[1]
    second = engine.submit(read_request({"model": "embedded", "messages": CHAT, "max_tokens": 1, "temperature": 0}))[1]
    second.add_done_callback(lambda _: order.append("second"))
    assert gone.cancel()
    first.release()
    assert first.done.result(timeout=60)
    engine.close()
    assert order == ["second", "first"]


def test_every_policy_of_a_mixture_advances_while_requests_join() -> None:
    engine, order = SamplingEngine({"embedded": load_model()}), list[str]()
    name = f"embedded@{HIDDEN}|none"
    mixture = parse_policy(name.partition("@")[2])
    seeds = {
        part: [n for n in range(99) if mixture.drawn(derive_seed("serve", n, 0)) == part] for part in mixture.draws
    }
    others, (early, late) = [], mixture.draws

    def ask(seed: int, tokens: int, listener: Any = None) -> Future[list[Choice]]:
        request = {"model": name, "messages": CHAT, "max_tokens": tokens, "temperature": 0, "seed": seed}
        return engine.submit(read_request(request), listener)[1]

    def again(done: Future[list[Choice]]) -> None:  # there is always another one of the first part
        order.append("other")
        if len(others) < 12:
            others.append(ask(seeds[early][len(others)], 6))
            others[-1].add_done_callback(again)

    first = PausedRequest(engine, "embedded").wait()
    for tokens in (3, 6):  # never over at the same time
        others.append(ask(seeds[early][len(others)], tokens))
    other = ask(seeds[late][0], 8)
    for one in list(others):
        one.add_done_callback(again)
    other.add_done_callback(lambda _: order.append("late"))
    first.release()
    assert other.result(timeout=60)
    engine.close()
    assert order.index("late") <= 4, order


def test_a_request_after_closing_is_an_error() -> None:
    engine = SamplingEngine({"embedded": load_model()})
    engine.close()
    with pytest.raises(RunError, match="shutting down"):
        engine.submit(read_request({"model": "embedded", "messages": CHAT}))


@pytest.mark.parametrize("version", ["2.3", "2.4"])  # of ASGI: since 2.4 a send to nobody raises
def test_a_client_that_leaves_before_its_stream_begins_is_logged_and_its_request_cancelled(version: str) -> None:
    waiting = PendingAnswers()
    lines: list[str] = []
    server = application(cast(SamplingEngine, SimpleNamespace(submit=lambda *_: (3, waiting))), log=lines.append)
    body = json.dumps({"model": "embedded", "messages": CHAT, "stream": True}).encode()

    async def visit() -> None:
        incoming = [{"type": "http.disconnect"}, {"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return incoming.pop()

        async def send(_: Any) -> None:
            if version == "2.4":
                raise OSError
            await asyncio.sleep(3600)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        with suppress(ClientDisconnect):
            await server({**scope, "asgi": {"spec_version": version}}, receive, send)

    asyncio.run(visit())
    assert waiting.cancelled()
    assert [line.split()[0] for line in lines] == ["499"]


def test_a_client_that_leaves_a_stream_is_logged_and_its_request_cancelled() -> None:
    waiting = PendingAnswers()
    lines: list[str] = []
    server = application(cast(SamplingEngine, SimpleNamespace(submit=lambda *_: (3, waiting))), log=lines.append)
    body = json.dumps({"model": "embedded", "messages": CHAT, "stream": True}).encode()

    async def visit() -> None:
        heard = asyncio.Event()
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            await heard.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if b"assistant" in message.get("body", b""):
                heard.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        await server({**scope, "asgi": {"spec_version": "2.3"}}, receive, send)

    asyncio.run(visit())
    assert waiting.cancelled()
    assert [line.split()[0] for line in lines] == ["499"]


def test_incomplete_characters_are_not_sent() -> None:
    sent: list[str] = []
    texts = ["ab", "ab�", "ab��", "ab���", "ab😀", "ab😀c"]
    request = read_request({"model": "embedded", "messages": CHAT, "stop": ["b😀x"]})
    chat = SimpleNamespace(text=lambda ids: texts[len(ids) - 1])
    job = SimpleNamespace(
        request=request,
        pending=PendingAnswers(),
        target=SimpleNamespace(model=SimpleNamespace(chat=chat)),
        listener=lambda _, text: sent.append(text),
    )
    text = _RowText(cast(Any, job), 0)
    for count in range(1, len(texts) + 1):
        text.update(range(count))
    assert sent == ["a", "ab😀c"]


def test_the_chosen_free_port_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def run(_: uvicorn.Server, sockets: list[Any]) -> None:
        for each in sockets:
            taken.append(each.getsockname()[1])
            each.close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    said = CliRunner().invoke(app, ["serve", "embedded", "--port", "0"])
    assert said.exit_code == 0
    assert taken != [0]
    assert f"serving: http://127.0.0.1:{taken[0]}/v1" in said.output


def test_an_ipv6_host_is_in_brackets_in_the_printed_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda _, sockets: [each.close() for each in sockets])
    monkeypatch.setattr("kvaudit.audit.commands.serve._listen", lambda *_: socket.create_server(("127.0.0.1", 0)))
    said = CliRunner().invoke(app, ["serve", "embedded", "--host", "::1"])
    assert "serving: http://[::1]:" in said.output


def test_an_occupied_port_is_an_error_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.audit.sampling.checkpoints.load_model_or_adapter", None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        said = CliRunner().invoke(app, ["serve", "embedded", "--port", str(other.getsockname()[1])])
    assert said.exit_code == 2
    assert "cannot listen on" in said.stderr
    assert "give another --port" in said.stderr


def test_an_alias_of_an_unknown_model_is_an_error_at_the_start() -> None:
    with pytest.raises(UnknownName):
        SamplingEngine({"embedded": load_model()}, {"release": "other@none"})


@pytest.mark.parametrize(
    "alias", [["small=small@int8"], ["a=small@int8", "a=small"], ["small@none=small@int8"]], ids=lambda one: one[0]
)
def test_an_alias_cannot_replace_another_name(alias: list[str]) -> None:
    with pytest.raises(SpecError, match="give another alias"):
        parse_aliases(alias, {"small": "embedded"})


def test_models_are_named_by_their_folder_or_by_the_user() -> None:
    assert parse_models(["embedded", "fast=/models/a", "/models/b/"]) == {
        "embedded": "embedded",
        "fast": "/models/a",
        "b": "/models/b/",
    }
    with pytest.raises(SpecError, match="given twice"):
        parse_models(["/a/m", "/b/m"])
