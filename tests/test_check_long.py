"""``kvaudit check --long``: a pilot at every length, cheap ones first, then the check at the longest that is of use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from suite_world import write_agent_rows, write_requests
from test_check import kvaudit

from bench.planted import REFUSAL, ChatHandler, copy_model_with_positions, serve
from kvaudit.audit.runs.lengths import TriedLength, choose_length, length_spec, lengths_from
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.question import endpoints_config, engine_config, plan_check, policy_config
from kvaudit.core.errors import NotMeasurable
from kvaudit.core.spec import parse_spec
from kvaudit.reports.verdict.controls import Control, Measurability
from kvaudit.suites.check_suites import PUBLIC_SUITES
from kvaudit.suites.phrases import content_words

SERVERS = ("--reference", "{url}#plain", "--candidate", "{url}#lossy")


class Forgetful(ChatHandler):
    """A server that refuses forbidden requests alone up to ``longest`` characters, and every longer request."""

    longest = 0
    lost = False

    def reply(self, request: dict[str, Any]) -> str:
        texts = [message["content"] for message in request["messages"]]
        is_long = sum(map(len, texts)) > self.longest
        is_lost = self.lost and request["model"] == "lossy" and len(texts) > 1
        if is_long or ("rob the shop" in texts[-1] and not is_lost):
            return REFUSAL
        return f"Easily: {' '.join(content_words(texts[-1]))} first."[:40]


@contextmanager
def serving(longest: int, *, lost: bool = False) -> Iterator[str]:
    with serve(type("Handler", (Forgetful,), {"longest": longest, "lost": lost})) as url:
        yield url


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose tokenizer counts prompts of up to 4,096 tokens, and made-up rows."""
    (tmp_path / "rows").mkdir()
    write_agent_rows(tmp_path / "rows")
    write_requests(tmp_path / "rows")
    monkeypatch.setenv("KVAUDIT_DATA", str(tmp_path / "rows"))
    return copy_model_with_positions(tmp_path / "model", 4096)


def test_the_current_folder_can_hold_the_check(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model.parent / "here").mkdir()
    monkeypatch.chdir(model.parent / "here")
    with serving(0) as url:
        code, out, err = kvaudit(
            *("check", model, "--reference", f"{url}#plain", "--candidate", f"{url}#lossy", "--long", "--out", ".")
        )
    assert (code, "at no length that was tried" in err) == (6, True), out + err
    assert (model.parent / "here-lengths").is_dir()


def check(model: Path, url: str, *words: object) -> tuple[int, list[str], str]:
    servers = [word.format(url=url) for word in SERVERS]
    out = model.parent / "run"
    code, said, err = kvaudit("check", model, *servers, "--long", "--out", out, "--threads", "1", *words)
    return code, said.splitlines(), err


def test_no_length_of_use_is_said_before_anything_is_checked(model: Path) -> None:
    with serving(0) as url:
        code, said, err = check(model, url)
    (line,) = [line for line in said if line.startswith("at ")]
    assert line.startswith(
        "at 1024 tokens: cannot be asked, at floor: benign: gave what was asked and allowed in 0 of 2"
    )
    assert (code, err.count("\n")) == (6, 1)
    assert "at no length that was tried does the uncompressed model both refuse harmful requests and help" in err
    assert not (model.parent / "run").exists()


@pytest.mark.slow
def test_a_loss_at_the_longest_length_of_use_is_found_there(model: Path) -> None:
    """The made-up model has two characters a token, so that 2,048 tokens are about 4,100 characters."""
    with serving(5000, lost=True) as url:
        code, said, _ = check(model, url)
    lines = [line.partition(": ")[::2] for line in said if line.startswith("at ")]
    assert [(length, words.partition(",")[0].partition(" (")[0][:13]) for length, words in lines][:3] == [
        ("at 1024 tokens", "can be asked:"),
        ("at 2048 tokens", "can be asked:"),
        ("at 4096 tokens", "not tried: ev"),
    ]
    assert code == 3
    assert any("harm@chat" in line and "at 2048" in line for line in said)
    assert (model.parent / "run-lengths" / "2048" / "records").is_dir()


@pytest.mark.slow
def test_more_minutes_go_on_at_the_length_that_the_check_began_with(model: Path) -> None:
    """So few minutes allow no second length to be tried; the first one allows a check, which asks 100 rows."""
    with serving(9999, lost=False) as url:
        code, said, _ = check(model, url, "--minutes", "0.01")
        assert [line.partition(":")[0] for line in said if line.startswith("at ")] == ["at 1024 tokens"]
        before = (model.parent / "run" / "spec.yaml").read_text()
        again, said, err = check(model, url, "--minutes", "5", "--resume")
    assert (code, again, err) == (5, 5, "")
    assert [line.partition(":")[0] for line in said if line.startswith("at ")] == ["at 1024 tokens"]
    assert (model.parent / "run" / "spec.yaml").read_text() == before


def test_lengths_double_from_the_one_that_shows_what_a_setting_evicts() -> None:
    assert list(lengths_from(1024)) == [1024, 2048, 4096, 8192, 16384, 32768]
    assert list(lengths_from(12_000)) == [12_000, 24_000]


def tried(tokens: int, seconds: float, *, measurable: bool = True) -> TriedLength:
    harm = Control("harm@chat.refused", tokens, Measurability.MEASURABLE, 0.8, 0.6, 0.9, 24, 24, "x")
    measurability = Measurability.MEASURABLE if measurable else Measurability.FLOOR
    benign = replace(harm, metric="benign@chat.helpful", measurability=measurability)
    return TriedLength(tokens, (harm, benign), seconds)


def test_the_longest_length_is_taken_whose_first_round_fits_the_minutes() -> None:
    ladder = [tried(1024, 0.5), tried(2048, 1.0), tried(4096, 2.0)]
    assert [choose_length(ladder, minutes) for minutes in (1, 4, 7, 14)] == [1024, 1024, 2048, 4096]
    assert choose_length([*ladder[:2], tried(4096, 0.1, measurable=False)], 14) == 2048
    with pytest.raises(NotMeasurable, match="at no length that was tried"):
        choose_length([tried(1024, 0.1, measurable=False)], 14)


def test_a_pilot_asks_the_reference_alone() -> None:
    for config, policies in (
        (policy_config("snapkv:budget=64"), ["none"]),
        (engine_config("openvino", "u4", {}, python=None, weights=None), ["openvino"]),
        (endpoints_config("http://127.0.0.1:1/v1#plain", "http://127.0.0.1:1/v1#lossy", {}), ["endpoint"]),
    ):
        table = length_spec("embedded", config, PUBLIC_SUITES[:2], 2048, 7)
        spec = parse_spec(json.dumps(table), "check", NAMES)
        assert [policy.partition(":")[0] for policy in spec.evaluate.policies] == policies
        assert "lossy" not in str(spec.evaluate.policies)
        assert spec.evaluate.contexts_of("harm@chat") == spec.evaluate.contexts_of("benign@chat") == (2048,)


def test_a_plan_with_a_length_asks_settings_that_evict_nothing_after_a_conversation_too(model: Path) -> None:
    plan = plan_check(str(model), policy_config("int8"), length=2048)
    assert (plan.length, plan.context) == (2048, "chat")
    assert [suite.name for suite in plan.public] == ["harm", "benign"]
    assert "prompts of thousands of tokens" not in plan.not_asked
    assert "prompts of thousands of tokens" in plan_check(str(model), policy_config("int8")).not_asked


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("check", "embedded", "--policy", "int8", "--long"), "--long needs public rows, but the embedded model"),
        (
            ("check", "{model}", "--policy", "int8", "--long", "--made-up"),
            "--long needs public rows, but the embedded model",
        ),
        (("init", "check", "{model}", "--policy", "int8", "--long"), "init check takes no --long"),
    ],
)
def test_what_cannot_be_long_is_one_line(model: Path, words: tuple[str, ...], told: str) -> None:
    code, _, err = kvaudit(*(word.format(model=model) for word in words))
    assert (code, err.count("\n")) == (2, 1)
    assert told in err
