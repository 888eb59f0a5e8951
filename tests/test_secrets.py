"""Keys and passwords are neither printed nor written."""

from __future__ import annotations

import time

import pytest
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.engines import parse_condition
from kvaudit.core.endpoint import Endpoint
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.network import download
from kvaudit.core.spec import parse_spec
from kvaudit.core.text import hide_passwords, is_secret_name

SERVERS = ("--candidate", "http://127.0.0.1:9/v1#m")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("ask http://me:PW@host/v1 now", "ask http://[not shown]@host/v1 now"),
        ("http://me:P@W/x@host/v1", "http://[not shown]@host/v1"),
        ("'https:/me:PW@host/v1#m'", "'https:/[not shown]@host/v1#m'"),
        ("redis://:PW@host", "redis://[not shown]@host"),
        ("http://host/v1?key=PW&a=b#m", "http://host/v1?[not shown]#m"),
        ("HTTP://ME:PW@HOST and http://b:PW@c", "HTTP://[not shown]@HOST and http://[not shown]@c"),
        ("inspect:/tasks/a.py@door", "inspect:/tasks/a.py@door"),
        ("lm-eval:door@place of me@example.com", "lm-eval:door@place of me@example.com"),
        ("http://host:8000/v1#m", "http://host:8000/v1#m"),
    ],
)
def test_addresses_are_shown_without_user_password_and_query(said: str, shown: str) -> None:
    assert hide_passwords(said) == shown


@pytest.mark.parametrize("part", ["://", "https:/", "a://", "http://a?"])
def test_passwords_are_hidden_in_a_long_line_at_once(part: str) -> None:
    start = time.process_time()
    hide_passwords(part * 50_000)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    "words",
    [
        ("check", "embedded", "--reference", "http://me:PASSW0RD@127.0.0.1:9/v1#m", *SERVERS),
        ("check", "embedded", "--reference", "http://127.0.0.1:9/v1?key=PASSW0RD#m", *SERVERS),
        ("check", "embedded", "--reference", "http://127.0.0.1:9/v1#m", *SERVERS, "--set", "key=PASSW0RD"),
        ("check", "embedded", "--engine", "vllm", "--set", "HF_TOKEN=PASSW0RD"),
        ("check", "embedded", "--engine", "openvino", "--set", "HF_TOKEN=PASSW0RD", "--kv", "u4"),
        ("check", "embedded", "--engine", "vllm", "--set", "HTTP_PROXY=http://me:PASSW0RD@h", "--kv", "fp8"),
        ("data", "fetch", "strongreject", "--from", "http://me:PASSW0RD@127.0.0.1:9/x"),
        ("data", "fetch", "strongreject", "--from", "ftp://me:PASSW0RD@127.0.0.1:9/x"),
        ("run", "http://me:PASSW0RD@h/spec.yaml"),
        ("compare", "http://me:PASSW0RD@h/a", "http://me:PASSW0RD@h/b"),
        ("serve", "embedded", "--key-env", "PASSW0RD"),
    ],
)
def test_no_command_prints_a_password_from_its_arguments(
    words: tuple[str, ...], tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path))
    monkeypatch.delenv("KVAUDIT_DATA", raising=False)
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert "PASSW0RD" not in done.stderr
    assert "PASSW0RD" not in done.stdout


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "api-key", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "password", "authorization", "cookie"],
)
def test_a_setting_with_a_secret_is_an_error_without_its_value(name: str) -> None:
    assert is_secret_name(name)
    with pytest.raises(SpecError) as refused:
        parse_condition({"engine": "openvino", "KV_CACHE_PRECISION": "u4", name: "PASSW0RD"})
    assert "PASSW0RD" not in str(refused.value)


@pytest.mark.parametrize("value", ["Bearer PASSW0RD-1", "hf_PASSW0RDPASSW0RD00", "X: sk-PASSW0RDPASSW0RD00"])
def test_a_setting_whose_value_is_a_key_is_an_error_without_it(value: str) -> None:
    with pytest.raises(SpecError, match="holds a secret") as refused:
        parse_condition({"engine": "openvino", "KV_CACHE_PRECISION": "u4", "hf_overrides": value})
    assert "PASSW0RD" not in str(refused.value)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "key", "ssl_keyfile", "key_cache_precision", "TOKENIZER"])
def test_a_setting_with_a_similar_name_is_no_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_a_key_in_place_of_the_name_of_its_variable_is_not_shown() -> None:
    for key, shown in (("sk_abc123PASSW0RD", False), ("AKIA123PASSW0RD", False), ("MY_VENDOR_KEY", True)):
        with pytest.raises(SpecError, match="is not set") as refused:
            Endpoint("http://127.0.0.1:9", key).client("judge")
        assert (key in str(refused.value)) is shown


def test_a_key_in_place_of_the_name_of_its_variable_in_a_plan_is_not_shown() -> None:
    plan = (
        "name: p\nmodel: m\nprobe: {key: PASSW0RD-of-mine}\nevaluate: {suites: [refusal], context_tokens: [200, 400]}"
    )
    with pytest.raises(SpecError, match=r"probe\.key is \[not shown\], wanted up to 100 letters"):
        parse_spec(plan, "plan.yaml")


def test_an_address_with_a_password_is_not_fetched_and_one_that_fails_shows_no_query() -> None:
    with pytest.raises(SpecError, match="has a user or a password in it") as refused:
        download("http://me:PASSW0RD@127.0.0.1:9/x")
    with pytest.raises(RunError, match="cannot be reached") as failed:
        download("http://127.0.0.1:9/x?token=PASSW0RD")
    assert "PASSW0RD" not in str(refused.value) + str(failed.value)
