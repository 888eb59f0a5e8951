"""The server, met by real clients over a real socket: answers, batches, streams, stops, keys and errors."""

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
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import openai
import pytest
import uvicorn
from typer.testing import CliRunner

from kvaudit.audit.cache.store import Store
from kvaudit.audit.cli import app
from kvaudit.audit.commands.serve import _bound, alias_pairs, pairs
from kvaudit.audit.policies import POLICIES, parse_policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Decoding, Sampler
from kvaudit.audit.serving.app import application
from kvaudit.audit.serving.engine import PendingAnswers, SamplingEngine, _RowText
from kvaudit.audit.serving.wire import Choice, read_request
from kvaudit.core import registry
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
        """Status, body and Retry-After of a raw request."""
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.loads(answer.read()), ""
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), error.headers.get("Retry-After", "")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = SamplingEngine({"embedded": load_model()}, {"release": f"embedded@{HIDDEN}"})
    lines: list[str] = []
    config = uvicorn.Config(application(engine, key=KEY, log=lines.append), port=0, log_level="error")
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
    """What the sampler says by itself, greedily."""
    model = load_model()
    prompt = model.chat.prompt([Message(Role(row["role"]), row["content"]) for row in CHAT])
    episode = Sampler(model, parse_policy(policy)).open([prompt.ids], [0], roles=[prompt.roles])
    (done,) = episode.decode(Decoding(new, temperature=0.0))
    assert done is not None
    return model.chat.text(done.ids), done.logprobs


def test_an_answer_is_the_samplers_under_the_policy_that_is_asked_for(server: Server) -> None:
    for policy in ("none", HIDDEN):
        said = server.client().chat.completions.create(
            model=f"embedded@{policy}", messages=CHAT, max_tokens=12, temperature=0, logprobs=True
        )
        text, logprobs = sampled(policy, 12)
        assert said.choices[0].message.content == text
        assert [entry.logprob for entry in said.choices[0].logprobs.content] == pytest.approx(list(logprobs), abs=1e-5)


def test_an_alias_serves_its_policy_without_telling_it(server: Server) -> None:
    ask = server.client().chat.completions.create
    hidden = ask(model="release", messages=CHAT, max_tokens=12, temperature=0)
    open_ = ask(model=f"embedded@{HIDDEN}", messages=CHAT, max_tokens=12, temperature=0)
    assert hidden.choices[0].message.content == open_.choices[0].message.content
    assert HIDDEN not in hidden.model_dump_json()
    assert [model.id for model in server.client().models.list()] == ["embedded", "release"]


def test_two_hundred_requests_at_once_lose_none_and_mix_up_none(server: Server) -> None:
    ask = server.client().chat.completions.create

    def one(seed: int) -> str:
        said = ask(model="embedded", messages=CHAT, max_tokens=6, temperature=3.0, seed=seed % 8)
        return said.choices[0].message.content or ""

    with ThreadPoolExecutor(200) as pool:
        texts = list(pool.map(one, range(200)))
    assert len(texts) == 200
    assert all(texts[n] == texts[n % 8] for n in range(200)), "an answer depends on what shared its batch"
    assert len(set(texts)) > 1


def test_the_harness_gets_the_same_answers_by_its_own_client(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = pytest.importorskip("lm_eval.models.openai_completions", reason="needs the extra lm-eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.api_models import JsonChatStr

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    asked = JsonChatStr(json.dumps(CHAT)), {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0}
    for policy in ("none", HIDDEN):
        client = harness.LocalChatCompletion(f"{server.url}/v1/chat/completions", model=f"embedded@{policy}")
        assert client.generate_until([Instance("generate_until", {}, asked, 0)]) == [sampled(policy, 8)[0]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages that it stands on
def test_inspect_gets_the_same_answer_by_its_own_client(server: Server) -> None:
    inspect = pytest.importorskip("inspect_ai.model", reason="needs the extra inspect")
    roles = {"system": inspect.ChatMessageSystem, "user": inspect.ChatMessageUser}
    chat = [roles[row["role"]](content=row["content"]) for row in CHAT]
    greedy = inspect.GenerateConfig(max_tokens=8, temperature=0)

    async def said() -> str:
        name, url = f"openai-api/kvaudit/embedded@{HIDDEN}", f"{server.url}/v1"
        async with inspect.get_model(name, base_url=url, api_key=KEY, memoize=False) as model:
            return str((await model.generate(chat, config=greedy)).completion)

    assert asyncio.run(said()) == sampled(HIDDEN, 8)[0]


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


def test_a_stream_has_the_log_probs_that_were_asked_for(server: Server) -> None:
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


def test_several_choices_are_drawn_apart(server: Server) -> None:
    ask: Any = server.client().chat.completions.create
    said = ask(model="embedded", messages=CHAT, max_tokens=8, temperature=3.0, n=4, seed=3)
    assert [choice.index for choice in said.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in said.choices}) > 1
    again = ask(model="embedded", messages=CHAT, max_tokens=8, temperature=3.0, n=4, seed=3)
    assert [c.message.content for c in again.choices] == [c.message.content for c in said.choices]


def test_a_wrong_key_is_refused_and_no_key_is_logged(server: Server) -> None:
    status, body, _ = server.post(b"{}", key="another-key")
    assert status == 401
    assert "bearer" in body["error"]["message"]
    assert not any(KEY in line or "another-key" in line for line in server.lines)


def test_a_log_line_holds_nothing_of_what_was_said(server: Server) -> None:
    server.client().chat.completions.create(model="embedded", messages=CHAT, max_tokens=4)
    assert server.lines
    assert not any("moose" in line for line in server.lines)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "unknown model 'other'"),
        ({"model": "embedded@snapvk:budget=4"}, "snapkv"),
        ({"messages": []}, "wanted a list of messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        ({"messages": [{"role": "user", "content": 7}]}, "wanted text"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 30_000}, "positions"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"tools": [{"type": "function"}]}, "cannot do"),
        ({"top_k": 20}, "top_k is 20, which this server cannot do"),
        ({"repetition_penalty": 1.1}, "cannot do"),
        ({"guided_json": {"type": "object"}}, "guided_json is"),
        ({"truncate_prompt_tokens": 8}, "cannot do"),
        ({"messages": [{"role": [], "content": "x"}]}, "has role []"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a character"),
        ({"model": "\ud800"}, "wanted text"),
    ],
)
def test_what_a_client_can_mend_is_one_line(server: Server, change: dict[str, Any], words: str) -> None:
    status, body, _ = server.post(json.dumps({"model": "embedded", "messages": CHAT, **change}).encode())
    assert status == 400
    assert words in body["error"]["message"]
    assert "\n" not in body["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_what_is_no_request_is_refused(server: Server, raw: bytes) -> None:
    assert server.post(raw)[0] == 400


def test_more_requests_than_the_server_holds_are_told_to_come_again() -> None:
    from kvaudit.audit.serving.engine import QueueFull

    engine = SamplingEngine({"embedded": load_model()}, most_waiting=0)
    asked = read_request({"model": "embedded", "messages": CHAT})
    with pytest.raises(QueueFull, match="try again later"):
        engine.submit(asked)
    engine.close()


class Held:
    """A request whose answer does not go on before it is let go."""

    def __init__(self, engine: SamplingEngine, model: str, tokens: int = 4, messages: Any = CHAT) -> None:
        self._free, self._begun = threading.Event(), threading.Event()
        asked = read_request({"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0})
        self.done = engine.submit(asked, self._told)[1]

    def _told(self, _: int, __: str) -> None:
        self._begun.set()
        assert self._free.wait(60)

    def begun(self) -> Held:
        assert self._begun.wait(60)
        return self

    def let_go(self) -> None:
        self._free.set()


def test_a_request_that_nobody_waits_for_any_more_stops_no_other() -> None:
    engine = SamplingEngine({"embedded": load_model()})
    asked = read_request({"model": "embedded", "messages": CHAT, "max_tokens": 2})
    first = Held(engine, "embedded").begun()
    gone, other = engine.submit(asked)[1], engine.submit(asked)[1]
    assert gone.cancel()
    first.let_go()
    assert other.result(timeout=60)
    engine.close()


def test_a_request_under_way_that_nobody_waits_for_ends_at_its_next_token() -> None:
    engine = SamplingEngine({"embedded": load_model()})
    asked = read_request({"model": "embedded", "messages": CHAT, "max_tokens": 12, "temperature": 0})
    calls = itertools.count(1)

    def told(_: int, __: str) -> None:
        if next(calls) == 2:
            begun[0].abandon()

    whole = engine.submit(asked)[1].result(timeout=60)[0]
    held = Held(engine, "embedded").begun()
    begun = [engine.submit(asked, told)[1]]
    held.let_go()
    cut = begun[0].result(timeout=60)[0]
    engine.close()
    assert len(cut.tokens) < len(whole.tokens)


def test_a_whole_answer_is_not_computed_on_once_its_client_has_gone(server: Server) -> None:
    """The sampler is held meanwhile, so that the answer cannot be there before the client goes."""
    held = Held(server.engine, f"embedded@{HIDDEN}").begun()
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
    held.let_go()
    assert any(text.startswith("499") for text in server.lines[before:])


def test_a_prompt_that_no_tokens_could_make_short_enough_is_refused_before_they_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model()
    engine = SamplingEngine({"embedded": model})
    longest = max(map(len, model.chat.tokenizer.get_vocab()))
    text = "a" * (model.max_positions * longest + 1)
    monkeypatch.setattr(type(model.chat), "opening", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(SpecError, match=rf"the prompt has {len(text)} characters, the {model.max_positions} positions"):
        engine.submit(read_request({"model": "embedded", "messages": [{"role": "user", "content": text}]}))
    engine.close()


@pytest.mark.parametrize(("path", "method", "status"), [("/v1/none", "GET", 404), ("/v1/chat/completions", "GET", 405)])
def test_what_is_not_served_is_said_in_json(server: Server, path: str, method: str, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(server.url + path, method=method))
    assert refused.value.code == status
    assert "served are /v1/models" in json.loads(refused.value.read())["error"]["message"]
    refused.value.close()


def test_a_port_is_one_servers_from_before_its_models_are_loaded() -> None:
    with _bound("127.0.0.1", 0) as first, pytest.raises(SpecError, match="cannot be listened on"):
        _bound("127.0.0.1", first.getsockname()[1])


def test_a_server_with_half_a_request_and_one_under_way_ends_when_it_is_told_to() -> None:
    code = "import kvaudit.audit.commands.serve as one; one._GRACE = 1; from kvaudit.audit.cli import app; app()"
    words = [sys.executable, "-c", code, "serve", "embedded", "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = next(text for text in process.stdout if text.startswith("serving: "))
        host, port = line.strip().removesuffix("/v1").rpartition("//")[2].split(":")
        body = json.dumps({"model": "embedded", "messages": CHAT, "max_tokens": 500, "temperature": 4}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        lines = [socket.create_connection((host, int(port))) for _ in range(3)]
        for one, sent in zip(lines, (head + body[:9], head[:20], head + body), strict=True):
            one.sendall(sent)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        for one in lines:
            one.close()
    finally:
        process.kill()
        process.communicate()


def test_requests_that_wait_for_another_batch_count_as_waiting() -> None:
    from kvaudit.audit.serving.engine import QueueFull

    engine = SamplingEngine({"embedded": load_model()}, most_waiting=2)
    held = [
        Held(engine, "embedded").begun(),
        Held(engine, f"embedded@{HIDDEN}"),
        Held(engine, "embedded@h2o:budget=16"),
    ]
    held[0].let_go()
    held[1].begun()  # by now the third is out of the queue, and waits all the same
    held.append(Held(engine, "embedded"))
    with pytest.raises(QueueFull):
        Held(engine, "embedded")
    for each in held:
        each.let_go()
    assert all(each.done.result(timeout=60) for each in held)
    engine.close()


def test_requests_that_come_first_and_at_once_know_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(POLICIES, "_found", None)  # as in a server that nobody has asked yet
    load = importlib.import_module

    def slow(name: str) -> Any:
        time.sleep(0.002)
        return load(name)

    monkeypatch.setattr(registry.importlib, "import_module", slow)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: len(POLICIES.all()), range(8)))
    assert set(found) == {max(found)}
    assert max(found) > 10


def test_a_request_joins_the_batch_under_way_and_is_answered_as_soon_as_it_is_over() -> None:
    engine = SamplingEngine({"embedded": load_model()})
    asked = {"model": "embedded", "messages": CHAT, "temperature": 0, "max_tokens": 12}
    other: list[Future[list[Choice]]] = []
    answered: list[bool] = []
    calls = itertools.count(1)

    def told(_: int, __: str) -> None:  # by the sampling thread, which does not go on meanwhile
        if not other:
            other.append(engine.submit(read_request(asked | {"max_tokens": 2}))[1])
        if next(calls) == 6:
            answered.append(other[0].done())

    (first,) = engine.submit(read_request(asked), told)[1].result(timeout=60)
    assert answered == [True], "it waits for the whole batch"
    assert first.text == sampled("none", 12)[0]
    assert [choice.text for choice in other[0].result(timeout=0)] == [sampled("none", 2)[0]]
    engine.close()


def test_a_request_that_would_join_does_not_overtake_one_that_waits_longer() -> None:
    engine, order = SamplingEngine({"embedded": load_model()}), list[str]()
    first = Held(engine, "embedded", 12).begun()
    for name in (f"embedded@{HIDDEN}", "embedded"):
        done = engine.submit(read_request({"model": name, "messages": CHAT, "max_tokens": 2, "temperature": 0}))[1]
        done.add_done_callback(lambda _, name=name: order.append(name))
    first.let_go()
    assert first.done.result(timeout=60)
    assert done.result(timeout=60)
    engine.close()
    assert order == [f"embedded@{HIDDEN}", "embedded"]


def test_what_the_prompt_of_a_request_does_is_no_fault_of_the_batch_it_would_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, opened = SamplingEngine({"embedded": load_model()}), Sampler.open
    first = Held(engine, "embedded", 12).begun()

    def fails(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(Sampler, "open", opened)
        raise MemoryError

    monkeypatch.setattr(Sampler, "open", fails)
    asked = read_request({"model": "embedded", "messages": CHAT, "max_tokens": 2, "temperature": 0})
    second = engine.submit(asked)[1]
    first.let_go()
    with pytest.raises(RunError, match="sampling failed: MemoryError"):
        second.result(timeout=60)
    assert first.done.result(timeout=60)
    assert engine.submit(asked)[1].result(timeout=60)
    engine.close()


def test_of_requests_that_come_together_one_bad_prompt_is_refused_alone() -> None:
    name = "embedded@snapkv:budget=48,window=8,pin=system"
    engine = SamplingEngine({"embedded": load_model()})
    long = [{"role": "system", "content": "You guard the door list. " * 12}, CHAT[1]]
    asked = [
        {"model": name, "messages": chat, "max_tokens": 2, "temperature": 0} for chat in ([CHAT[1]], long, [CHAT[1]])
    ]
    for first in (None, name):  # a batch of their own, and one to join
        held = Held(engine, first or "embedded", 12).begun()
        done = [engine.submit(read_request(one))[1] for one in asked]
        held.let_go()
        assert [future.exception(timeout=60) is None for future in done] == [True, False, True]
        assert "pin=system holds" in str(done[1].exception())
    engine.close()


def test_a_join_that_fails_ends_the_batch_with_its_cause_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "embedded@snapkv:budget=48,window=8,pin=system"
    engine, join = SamplingEngine({"embedded": load_model()}), Store.join
    first = Held(engine, name, 12, [CHAT[1]]).begun()

    def fails(*_: Any) -> None:
        monkeypatch.setattr(Store, "join", join)
        raise MemoryError

    monkeypatch.setattr(Store, "join", fails)
    long = [{"role": "system", "content": "You guard the door list. " * 12}, CHAT[1]]
    asked = [{"model": name, "messages": chat, "max_tokens": 2, "temperature": 0} for chat in ([CHAT[1]], long)]
    waiting = [engine.submit(read_request(asked[n]))[1] for n in (0, 1, 0)]  # two are prefilled, each by itself
    first.let_go()
    for done in (first.done, waiting[0], waiting[2]):
        with pytest.raises(RunError, match="sampling failed: MemoryError"):
            done.result(timeout=60)
    assert "pin=system holds" in str(waiting[1].exception(timeout=60))
    assert engine.submit(read_request(asked[0]))[1].result(timeout=60)
    engine.close()


def test_a_listener_that_fails_disturbs_nobody() -> None:
    engine = SamplingEngine({"embedded": load_model()})
    asked = read_request({"model": "embedded", "messages": CHAT, "max_tokens": 12, "temperature": 0})

    def told(_: int, __: str) -> None:
        raise RuntimeError("the event loop is closed")

    first = Held(engine, "embedded").begun()
    futures = [engine.submit(asked, told)[1], engine.submit(asked)[1]]
    first.let_go()
    with pytest.raises(RunError, match="sampling failed: RuntimeError"):
        futures[0].result(timeout=60)
    assert futures[1].result(timeout=60)[0].text == sampled("none", 12)[0]
    engine.close()


def test_a_cancelled_request_keeps_nobody_from_joining() -> None:
    engine, order = SamplingEngine({"embedded": load_model()}), list[str]()
    first = Held(engine, "embedded", 12).begun()
    first.done.add_done_callback(lambda _: order.append("first"))
    gone = engine.submit(
        read_request({"model": f"embedded@{HIDDEN}", "messages": CHAT, "max_tokens": 2, "temperature": 0})
    )[1]
    second = engine.submit(read_request({"model": "embedded", "messages": CHAT, "max_tokens": 1, "temperature": 0}))[1]
    second.add_done_callback(lambda _: order.append("second"))
    assert gone.cancel()
    first.let_go()
    assert first.done.result(timeout=60)
    engine.close()
    assert order == ["second", "first"]


def test_every_part_of_a_mixture_goes_on_while_requests_join() -> None:
    engine, order = SamplingEngine({"embedded": load_model()}), list[str]()
    name = f"embedded@{HIDDEN}|none"
    mixture = parse_policy(name.partition("@")[2])
    seeds = {
        part: [n for n in range(99) if mixture.drawn(derive_seed("serve", n, 0)) == part] for part in mixture.draws
    }
    others, (early, late) = [], mixture.draws

    def ask(seed: int, tokens: int, told: Any = None) -> Future[list[Choice]]:
        asked = {"model": name, "messages": CHAT, "max_tokens": tokens, "temperature": 0, "seed": seed}
        return engine.submit(read_request(asked), told)[1]

    def again(done: Future[list[Choice]]) -> None:  # there is always another one of the first part
        order.append("other")
        if len(others) < 12:
            others.append(ask(seeds[early][len(others)], 6))
            others[-1].add_done_callback(again)

    first = Held(engine, "embedded").begun()
    for tokens in (3, 6):  # never over at the same time
        others.append(ask(seeds[early][len(others)], tokens))
    other = ask(seeds[late][0], 8)
    for one in list(others):
        one.add_done_callback(again)
    other.add_done_callback(lambda _: order.append("late"))
    first.let_go()
    assert other.result(timeout=60)
    engine.close()
    assert order.index("late") <= 4, order


def test_a_request_after_the_end_is_refused() -> None:
    engine = SamplingEngine({"embedded": load_model()})
    engine.close()
    with pytest.raises(RunError, match="shutting down"):
        engine.submit(read_request({"model": "embedded", "messages": CHAT}))


def test_a_client_that_leaves_a_stream_is_one_line_and_frees_its_place() -> None:
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


def test_no_part_of_a_character_is_told() -> None:
    told: list[str] = []
    texts = ["ab", "ab�", "ab��", "ab���", "ab😀", "ab😀c"]
    asked = read_request({"model": "embedded", "messages": CHAT, "stop": ["b😀x"]})
    chat = SimpleNamespace(text=lambda ids: texts[len(ids) - 1])
    job = SimpleNamespace(
        asked=asked,
        done=PendingAnswers(),
        served=SimpleNamespace(model=SimpleNamespace(chat=chat)),
        listener=lambda _, text: told.append(text),
    )
    text = _RowText(cast(Any, job), 0)
    for count in range(1, len(texts) + 1):
        text.heard(range(count))
    assert told == ["a", "ab😀c"]


def test_a_free_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_port_that_is_taken_is_one_line_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.audit.sampling.checkpoints.load_named", None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        said = CliRunner().invoke(app, ["serve", "embedded", "--port", str(other.getsockname()[1])])
    assert said.exit_code == 2
    assert "cannot be listened on" in said.stderr
    assert "give another --port" in said.stderr


def test_an_alias_of_nothing_is_refused_at_the_start() -> None:
    with pytest.raises(UnknownName):
        SamplingEngine({"embedded": load_model()}, {"release": "other@none"})


@pytest.mark.parametrize(
    "alias", [["small=small@int8"], ["a=small@int8", "a=small"], ["small@none=small@int8"]], ids=lambda one: one[0]
)
def test_an_alias_takes_the_place_of_no_other_name(alias: list[str]) -> None:
    with pytest.raises(SpecError, match="give it another name"):
        alias_pairs(alias, {"small": "embedded"})


def test_models_are_named_by_their_folder_or_by_the_user() -> None:
    assert pairs(["embedded", "fast=/models/a", "/models/b/"]) == {
        "embedded": "embedded",
        "fast": "/models/a",
        "b": "/models/b/",
    }
    with pytest.raises(SpecError, match="given twice"):
        pairs(["/a/m", "/b/m"])
