"""Every engine of the registry: its conditions have one spelling, a reference that compresses nothing, and one line
for what cannot be. A new engine is held to this without a word here."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvaudit.audit.engines import ENGINES, Condition, parse_condition, parse_serving_mode
from kvaudit.audit.engines.base import GenerationRequest, Engine, EngineFailed, Reply, Settings, EngineContext, require_replies
from kvaudit.audit.policies import POLICIES
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.core.conditions import ENGINE, engine_in, settings_in
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.spec_evaluate import EngineSpec

Check = Callable[[type[Engine], Settings], None]
OF_OURS = {"openvino", "transformers"}  # that the environment of the tests holds; the others have one of their own
AWKWARD = st.sampled_from(
    ["f32", "f16", "u4", "q8_0", "true", "3", "a=b,c", "100%", "+|@:", "  ", "größe", "K\n=1", "%2C"]
)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | AWKWARD
NAMED = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,11}", fullmatch=True).filter(lambda name: name != ENGINE)


def conditions(engine: type[Engine]) -> Iterator[Settings]:
    """Settings of the engine's own: one value that compresses nothing and one that does for each that may."""
    yield from ({}, {"another": "1"})
    for name, plain in engine.compresses.items():
        yield from ({name: word} for word in (*plain[:1], "4"))


def condition(engine: type[Engine], given_: Settings) -> Condition | None:
    """The condition of some settings, None where the engine says that there is none such."""
    try:
        return parse_condition({ENGINE: engine.name, **given_})
    except SpecError:
        return None


def check_its_name_is_no_policys_and_it_says_what_it_is(engine: type[Engine], _: Settings) -> None:
    assert engine.name not in POLICIES.all()
    assert not set(engine.name) & set(":,=+|@ %")
    assert engine.says
    assert engine.says.isprintable()


def check_its_text_parses_back(engine: type[Engine], given_: Settings) -> None:
    found = condition(engine, given_)
    if found is not None:
        assert parse_condition(found.canonical) == found
        assert parse_condition(found.canonical).canonical == found.canonical
        assert parse_serving_mode(found.canonical) == found
        assert engine_in(found.canonical) == engine.name
        assert settings_in(found.canonical) == dict(found.settings)


def check_what_is_given_stays(engine: type[Engine], given_: Settings) -> None:
    found = condition(engine, given_)
    if found is not None:
        assert {name: dict(found.settings).get(name) for name in given_} == given_
        kept = {name: value for name, value in found.settings if name not in engine.compresses}
        there = dict(found.reference.settings)
        assert {name: there.get(name) for name in kept} == kept


def check_its_reference_compresses_nothing(engine: type[Engine], given_: Settings) -> None:
    found = condition(engine, given_)
    if found is not None:
        assert found.reference.compressing == []
        assert found.reference.reference == found.reference
        assert found.reference.engine == engine.name


CHECKS: list[Check] = [value for name, value in list(globals().items()) if name.startswith("check_")]


def hold(engine: type[Engine], check: Check) -> None:
    for given_ in conditions(engine):
        check(engine, given_)


@pytest.fixture(params=sorted(ENGINES.all()))
def engine(request: pytest.FixtureRequest) -> type[Engine]:
    """Every engine of the registry."""
    return ENGINES.get(request.param)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_of_engines(engine: type[Engine], check: Check) -> None:
    hold(engine, check)


@pytest.mark.parametrize("check", CHECKS[1:], ids=lambda check: check.__name__)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_contract_of_engines_whatever_is_asked_for(engine: type[Engine], check: Check, data: st.DataObject) -> None:
    own = [*engine.compresses, *engine.always]
    names = st.sampled_from(own) | NAMED if own else NAMED
    check(engine, data.draw(st.dictionaries(names, WORDS, max_size=4)))


def test_an_engine_that_is_not_installed_is_one_line_with_what_installs_it(
    engine: type[Engine], tmp_path: Path
) -> None:
    if not engine.install:
        pytest.skip("it is installed by nobody: it runs already")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')  # without any packages
    bare.chmod(0o755)
    with pytest.raises(SpecError) as error:
        engine.check(dict(parse_condition({ENGINE: engine.name}).settings), EngineSpec(python=str(bare)))
    assert str(error.value).isprintable()
    lacks = str(error.value).startswith(f"engine {engine.name} lacks ")  # of one that somebody else runs
    assert engine.install in str(error.value) or lacks


def part_of(engine: type[Engine]) -> EngineSpec:
    """Where the tests find an engine; skips where they do not."""
    variable = "KVAUDIT_PYTHON_" + re.sub(r"\W", "_", engine.name).upper()
    part = EngineSpec(python=os.environ.get(variable), start=300.0, at_once=4)
    try:
        engine.check(engine.filled({}), part)
    except SpecError as error:
        pytest.skip(f"{error} ({variable} names a python that has it)")
    return part


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load_model()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OF_OURS else pytest.mark.engines)
        for name, engine in ENGINES.all().items()
        if engine.install
    ],
)
def test_a_setting_that_the_engine_does_not_know_is_refused_by_it(
    name: str, embedded: LoadedModel, tmp_path: Path
) -> None:
    engine = ENGINES.get(name)
    work = EngineContext(embedded, part_of(engine), tmp_path / "log", 1)
    with pytest.raises((EngineFailed, SpecError), match=r"no[_-]such[_-]setting") as error:
        engine.start(engine.filled({"no_such_setting": "1"}), work).stop()
    assert str(error.value).isprintable()


TWO = [GenerationRequest((5, 6), 3, (9,), 0.0, 1.0, seed) for seed in (1, 2)]
GOOD = Reply((7, 9), "stop")


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        ([GOOD], "engine it gave 1 replies to 2 requests"),
        ([GOOD, GOOD, GOOD], "gave 3 replies to 2"),
        ([GOOD, Reply((1, 2, 3, 4), "length")], "an answer of 4 tokens where 3 were the most"),
        ([Reply((7, 9, 8), "length"), GOOD], "went on behind a token that ends an answer"),
    ],
)
def test_replies_that_cannot_be_are_refused_whoever_brought_the_engine(replies: list[Reply], words: str) -> None:
    require_replies(TWO, [GOOD, Reply((1, 2, 3), "length")], "it")
    require_replies(TWO, [Reply((), "stop", text="a text"), Reply((), "error", refused="no")], "it")
    with pytest.raises(EngineFailed, match=words):
        require_replies(TWO, replies, "it")


def test_text_that_says_a_thing_twice_or_nothing_is_refused() -> None:
    for text, words in (
        ("openvino:KV_CACHE_PRECISION=u8,KV_CACHE_PRECISION=u4", "has a setting twice"),
        ("openvino:KV_CACHE_PRECISION", "setting KV_CACHE_PRECISION is '', wanted a word or a number"),
        ("openvino:=u4", "engine 'openvino' can have no setting ''"),
    ):
        with pytest.raises(SpecError, match=words):
            parse_condition(text)
    for name, value, words in (
        ("a,b", 1, "can have no setting"),
        ("a", "\ud800", "wanted a word or a number"),
        ("a", [1], "wanted a word or a number"),
        ("a", "x" * 501, "wanted a word or a number"),
    ):
        with pytest.raises(SpecError, match=words) as error:
            parse_condition({ENGINE: "openvino", name: value})
        assert str(error.value).isprintable()
    with pytest.raises(UnknownName, match=r"Did you mean 'llama\.cpp'"):
        parse_condition("llama.ccp:type_k=q8_0")


# --- engines that break the contract ---------------------------------------------------------------------------------

WRONG = '''
from typing import ClassVar
from kvaudit.audit.engines.base import Engine


class Coded(Engine):
    """Its reference keeps what compresses."""

    name, says, install = "coded", "a test", "pip install coded"
    compresses: ClassVar = {{"kv": ("f16",)}}
    {body}
'''


def wrong(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> type[Engine]:
    """An engine of a file from outside, gone with the test."""
    monkeypatch.setattr(ENGINES, "_found", dict(ENGINES.all()))
    file = folder / "coded_engine.py"
    file.write_text(WRONG.format(body=body))
    ENGINES.load_file(file)
    return ENGINES.get("coded")


METHOD = "@classmethod\n    def {}(cls, settings):\n        return {}"


@pytest.mark.parametrize(
    ("check", "body"),
    [
        (check_its_reference_compresses_nothing, 'uncompressed: ClassVar = {"kv": "q4"}'),
        (check_its_reference_compresses_nothing, METHOD.format("reference", "settings")),
        (check_its_reference_compresses_nothing, METHOD.format("filled", '{"x": "1", **settings}')
            + "\n    " + METHOD.format("reference", '{"x": settings["x"] + "1", "kv": "f16"}')),
        (check_what_is_given_stays, METHOD.format("filled", '{**settings, "kv": "q8"}')),
        (check_what_is_given_stays, METHOD.format("reference", '{"kv": "f16"}')),
        (check_its_text_parses_back, METHOD.format("filled", '{**settings, "run": settings.get("run", "") + "1"}')),
        (check_its_name_is_no_policys_and_it_says_what_it_is, 'says = ""'),
    ],
)  # fmt: skip
def test_a_wrong_engine_breaks_the_contract(
    check: Check, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = wrong(tmp_path, monkeypatch, body)
    with pytest.raises(AssertionError):
        hold(engine, check)


def test_an_engine_that_is_called_as_a_policy_is_caught() -> None:
    class Snap(Engine):
        name: ClassVar = "snapkv"
        says: ClassVar = "a test"

    with pytest.raises(AssertionError):
        check_its_name_is_no_policys_and_it_says_what_it_is(Snap, {})


def test_a_right_engine_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = wrong(tmp_path, monkeypatch, 'uncompressed: ClassVar = {"kv": "f16"}')
    for check in CHECKS:
        hold(engine, check)


def test_transformers_takes_backend_and_bits_as_its_kv_setting() -> None:
    engine = ENGINES.get("transformers")
    assert engine.kv("hqq-4") == {"cache": "quantized", "backend": "hqq", "nbits": "4"}
    assert engine.kv("fp8") == {"cache": "quantized", "backend": "fp8"}
    for text in ("", "hqq-", "hqq-four", "-4"):
        with pytest.raises(SpecError, match="wanted BACKEND-BITS"):
            engine.kv(text)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_servers_kv_setting_is_one_word(name: str) -> None:
    engine = ENGINES.get(name)
    assert engine.kv("fp8_e5m2") == {"kv_cache_dtype": "fp8_e5m2"}
    for text in ("", "kv_cache_dtype=fp8", "fp8/fp8", "--fp8", "fp8 fp4"):
        with pytest.raises(SpecError, match=f"engine {name}: --kv is .*, wanted what stands behind kv_cache_dtype="):
            engine.kv(text)
