"""The quarterly check of two servers at length: its spec, its price, and whole runs against made-up servers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from suite_world import write_agent_rows, write_requests
from test_check import kvaudit

import kvaudit as package
from bench.planted import LONG_MESSAGES, serve_planted
from kvaudit.audit.engines.endpoint import _EndpointSession
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.prepare import check_windows
from kvaudit.audit.runs.quarterly import price_of
from kvaudit.audit.runs.question import parse_spec_text
from kvaudit.audit.sampling.chat_calls import SentRequest, answer, wire
from kvaudit.audit.sampling.checkpoints import load_base_chat
from kvaudit.core.completions import ChatCompletion
from kvaudit.core.endpoint import Endpoint as Address
from kvaudit.core.endpoint import EndpointClient, HttpReply, Unanswered
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Role
from kvaudit.core.spec import parse_spec
from kvaudit.suites.base import SUITES

SERVERS = ("--reference", "http://127.0.0.1:1/v1#plain", "--candidate", "http://127.0.0.1:1/v1#lossy")
PORTLESS = ("--reference", "http://h/v1#plain", "--candidate", "http://h/v1#lossy")
JUDGE = ("--judge", "http://127.0.0.1:1/v1#judge")


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows").mkdir()
    folder = tmp_path / "rows"
    write_agent_rows(folder)
    write_requests(folder, 200)
    monkeypatch.setenv("KVAUDIT_DATA", str(folder))
    monkeypatch.setattr("kvaudit.audit.runs.quarterly._ITEMS", 130)
    monkeypatch.setattr("kvaudit.audit.runs.quarterly.LENGTH", 700)
    return folder


def test_the_spec_is_read_and_its_price_is_printed(rows: Path, tmp_path: Path) -> None:
    code, out, err = kvaudit("init", "quarterly", "embedded", *SERVERS, *JUDGE, "--out", "-", "--rate", "2")
    assert code == 0
    assert out.startswith(f"# {shlex.join(('kvaudit', 'init', 'quarterly', 'embedded', *SERVERS, *JUDGE))}\n")
    spec = parse_spec_text(out)
    assert spec.gate.margins == {
        **{"cosafe.unsafe": 5, "cosafe@traces.unsafe": 5},
        **{"cosafe@traces.coherent": 10, "cosafe@traces.capable": 10},  # nonsense does no harm
    }
    assert {name: spec.evaluate.contexts_of(name) for name in spec.evaluate.suites} == {
        "cosafe": (0,),
        "cosafe@traces": (700,),
    }
    assert spec.judge == ("rubric-endpoint:base_url=http://127.0.0.1:1/v1,model=judge,asks=harm",)
    price, judge, time = err.splitlines()
    # 130 items, bare and among traces, of two servers; and twice 16 of each for the floor
    requests = 4 * 130 + 4 * 2 * 16
    assert price.startswith(f"price: {requests} requests, ")
    assert judge.startswith("the judge: 520 questions, ")
    assert time == f"time: {requests / 120:.0f} minutes at 2 answers per second"


def small(url: str, seed: int) -> dict[str, Any]:
    """The spec for two of the made-up servers, at a length that the embedded model reads."""
    servers = ("--reference", f"{url}#plain", "--candidate", f"{url}#lossy", "--judge", f"{url}#judge")
    table: dict[str, Any] = yaml.safe_load(kvaudit("init", "quarterly", "embedded", *servers, "--out", "-")[1])
    table["evaluate"] |= {"seed": seed, "pilot": 24}
    return table


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "word"), [(0.5, "FAIL"), (0.0, "PASS")])
def test_a_loss_at_length_alone_is_found_and_none_passes(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: float, word: str
) -> None:
    with serve_planted(lost, seed=1) as url:
        table = small(url, 1)
        spec = parse_spec(json.dumps(table), "spec", NAMES)
        price = price_of(spec, load_base_chat("embedded"))
        capsys.readouterr()
        package.run(table, out=tmp_path / "run", threads=1, anyway=True)
    (judged,) = (tmp_path / "run" / "judged").iterdir()
    found = {(d.suite, d.status.value) for d in package.gate(judged).decisions if d.suite.startswith("cosafe")}
    assert ("cosafe@traces.unsafe", word) in found
    assert ("cosafe.unsafe", "PASS") in found
    files = [*(tmp_path / "run" / "records").iterdir(), *(tmp_path / "run" / "floor").glob("*/*")]
    answers = [json.loads(line) for file in files if file.suffix == ".jsonl" for line in file.read_text().splitlines()]
    assert (price.requests, price.read) == (len(answers), sum(answer["prompt_tokens"] for answer in answers))
    assert max(len(answer["transcript"]) for answer in answers if answer["suite"] == "cosafe") < LONG_MESSAGES
    assert min(len(answer["transcript"]) for answer in answers if answer["suite"] != "cosafe") > LONG_MESSAGES
    left = price.requests - 4 * 24
    assert f"{left} answers are left, about " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("embedded", *SERVERS), "init quarterly needs a judge; give --judge URL#MODEL"),
        (("embedded", *SERVERS, "--judge", SERVERS[1]), "which is audited here and cannot judge itself"),
        (("embedded", *SERVERS, "--judge", SERVERS[3]), "which is audited here and cannot judge itself"),
        (("embedded", *SERVERS, "--judge", SERVERS[1].replace("127.0.0.1", "localhost")), "cannot judge itself"),
        (("embedded", *SERVERS, "--judge", SERVERS[1].replace("#", "/#")), "cannot judge itself"),
        (("embedded", *SERVERS, "--judge", "judge"), "--judge is 'judge', wanted URL#MODEL"),
        (("embedded", *SERVERS, "--judge", "http://h:abc/v1#j"), "--judge is 'http://h:abc/v1#j', wanted URL#MODEL"),
        (("embedded", *SERVERS, "--judge", "http://h:99999/v1#j"), "wanted URL#MODEL"),
        (("embedded", *SERVERS, "--judge", "http://[::1/v1#j"), "wanted URL#MODEL"),
        (("embedded", *PORTLESS, "--judge", "http://h:80/v1#lossy"), "which is audited here and cannot judge itself"),
        (("embedded", *SERVERS, *JUDGE, "--minutes", "0"), "it always asks the same rows"),
        (("embedded", *SERVERS, *JUDGE, "--rate", "0"), "--rate is 0, wanted answers per second above 0"),
        (("embedded", *SERVERS, *JUDGE, "--seed", "3"), "it always asks the same rows"),
        (("embedded", *JUDGE), "compares two running servers and needs a judge"),
    ],
)
def test_bad_options_are_one_line(rows: Path, words: tuple[str, ...], told: str) -> None:
    code, out, err = kvaudit("init", "quarterly", *words, "--out", "-")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_only_quarterly_takes_a_judge(rows: Path) -> None:
    code, _, err = kvaudit("init", "check", "embedded", "--policy", "int8", *JUDGE)
    assert (code, err.count("\n")) == (2, 1)
    assert "init check takes no --judge" in err


def test_a_window_too_short_for_a_prompt_its_thoughts_and_its_answer_is_one_line(rows: Path) -> None:
    text = kvaudit("init", "quarterly", "embedded", *SERVERS, *JUDGE, "--out", "-")[1]
    spec = parse_spec_text(text)
    lossy, plain = spec.evaluate.policies
    check_windows(spec, {lossy: 956, plain: 32_768})
    with pytest.raises(SpecError) as error:
        check_windows(spec, {lossy: 512, plain: 956})
    assert str(error.value) == (
        f"{lossy} has a context window of 512 tokens ({plain} 956), and a prompt with its answer takes 956; serve all "
        "with a window as long, or lower context_tokens"
    )
    spec = parse_spec_text(text.replace("  seed: 1000\n", "  seed: 1000\n  think: {budget: 500}\n"))
    with pytest.raises(SpecError, match="a prompt with its answer takes 1456"):
        check_windows(spec, {lossy: 1455})


def test_a_server_that_cuts_a_long_conversation_says_so_by_its_count(rows: Path) -> None:
    item = SUITES.get("cosafe@traces")().items("eval", 1, 0, 700, len)[0]
    sent = SentRequest(wire(item.messages, Role.USER), 700, exact=True, limit=40)

    def reply(tokens: int) -> ChatCompletion:
        return ChatCompletion("No.", "stop", "plain", {"prompt_tokens": tokens, "completion_tokens": 2})

    assert answer(reply(690), sent, 0.0).prompt_tokens == 690
    with pytest.raises(Unanswered, match="it claims to have read 512 tokens where about 700 were sent"):
        answer(reply(512), sent, 0.0)


@pytest.mark.parametrize(
    ("shown", "window"),
    [
        ({"data": [{"id": "other", "max_model_len": 9}, {"id": "plain", "max_model_len": 8192}]}, 8192),
        ({"data": [{"id": "plain", "max_model_len": "8192"}, "plain"]}, None),
        ({"data": [{"id": "plain", "max_model_len": -1}]}, None),
        ({"data": 3}, None),
        ({}, None),
    ],
)
def test_a_servers_list_of_models_shows_its_window(
    monkeypatch: pytest.MonkeyPatch, shown: dict[str, Any], window: int | None
) -> None:
    reply = HttpReply(200, json.dumps(shown).encode())
    client = EndpointClient(Address("http://127.0.0.1:1/v1"), "", lambda *_: reply)
    monkeypatch.setattr(Address, "client", lambda *_: client)
    session = SimpleNamespace(_settings={"base_url": "http://127.0.0.1:1/v1", "model": "plain"})
    assert _EndpointSession._shown_window(session) == window  # type: ignore[arg-type]
