"""The contract of every engine in the registry; a new engine is tested without a change here."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvaudit.audit.engines import ENGINES, Condition, parse_condition, parse_serving_mode
from kvaudit.audit.engines.base import (
    Engine,
    EngineContext,
    EngineFailed,
    GenerationRequest,
    Reply,
    Settings,
    require_replies,
)
from kvaudit.audit.engines.sglang import check_auto_dtype
from kvaudit.audit.policies import POLICIES
from kvaudit.audit.sampling.model import load_model
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.policy_names import ENGINE, engine_name, engine_settings
from kvaudit.core.spec_evaluate import EngineSpec

Check = Callable[[type[Engine], Settings], None]
INSTALLED = {"openvino", "transformers"}  # in the environment of the tests; the others have their own
AWKWARD = st.sampled_from(
    ["f32", "f16", "u4", "q8_0", "true", "3", "a=b,c", "100%", "+|@:", "  ", "größe", "K\n=1", "%2C"]
)
VALUES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | AWKWARD
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,11}", fullmatch=True).filter(lambda name: name != ENGINE)


def example_settings(engine: type[Engine]) -> Iterator[Settings]:
    """Yield for each compressing setting a value that compresses nothing, if there is one, and one that does."""
    yield from ({}, {"another": "1"})
    for name, plain in engine.compresses.items():
        yield from ({name: value} for value in (*plain[:1], "4"))


def condition_or_none(engine: type[Engine], chosen: Settings) -> Condition | None:
    """Return the condition, None if the engine rejects the settings."""
    try:
        return parse_condition({ENGINE: engine.name, **chosen})
    except SpecError:
        return None


def check_name_is_no_policy_and_description_is_one_line(engine: type[Engine], _: Settings) -> None:
    assert engine.name not in POLICIES.all()
    assert not set(engine.name) & set(":,=+|@ %")
    assert engine.says
    assert engine.says.isprintable()


def check_canonical_parses_back(engine: type[Engine], chosen: Settings) -> None:
    condition = condition_or_none(engine, chosen)
    if condition is not None:
        assert parse_condition(condition.canonical) == condition
        assert parse_condition(condition.canonical).canonical == condition.canonical
        assert parse_serving_mode(condition.canonical) == condition
        assert engine_name(condition.canonical) == engine.name
        assert engine_settings(condition.canonical) == dict(condition.settings)


def check_chosen_settings_stay(engine: type[Engine], chosen: Settings) -> None:
    condition = condition_or_none(engine, chosen)
    if condition is not None:
        assert {name: dict(condition.settings).get(name) for name in chosen} == chosen
        kept = {name: value for name, value in condition.settings if name not in engine.compresses}
        reference = dict(condition.reference.settings)
        assert {name: reference.get(name) for name in kept} == kept


def check_reference_compresses_nothing(engine: type[Engine], chosen: Settings) -> None:
    condition = condition_or_none(engine, chosen)
    if condition is not None:
        assert condition.reference.compressing == []
        assert condition.reference.reference == condition.reference
        assert condition.reference.engine == engine.name


CHECKS: list[Check] = [value for name, value in list(globals().items()) if name.startswith("check_")]


def run_check(engine: type[Engine], check: Check) -> None:
    for chosen in example_settings(engine):
        check(engine, chosen)


@pytest.fixture(params=sorted(ENGINES.all()))
def engine(request: pytest.FixtureRequest) -> type[Engine]:
    """Every engine of the registry."""
    return ENGINES.get(request.param)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(engine: type[Engine], check: Check) -> None:
    run_check(engine, check)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_contract_with_random_settings(engine: type[Engine], data: st.DataObject) -> None:
    engine_names = [*engine.compresses, *engine.always]
    names = st.sampled_from(engine_names) | NAMES if engine_names else NAMES
    chosen = data.draw(st.dictionaries(names, VALUES, max_size=4))
    for check in CHECKS:
        check(engine, chosen)


def test_a_missing_engine_is_a_one_line_error_that_says_how_to_install_it(engine: type[Engine], tmp_path: Path) -> None:
    if not engine.install:
        pytest.skip("nothing to install: the server runs already")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')  # without any packages
    bare.chmod(0o755)
    with pytest.raises(SpecError) as error:
        engine.check(dict(parse_condition({ENGINE: engine.name}).settings), EngineSpec(python=str(bare)))
    assert str(error.value).isprintable()
    assert engine.install in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in INSTALLED else pytest.mark.engines)
        for name, engine in ENGINES.all().items()
        if engine.install
    ],
)
def test_an_unknown_setting_is_rejected_by_the_engine(name: str, tmp_path: Path) -> None:
    engine = ENGINES.get(name)
    variable = "KVAUDIT_PYTHON_" + re.sub(r"\W", "_", name).upper()
    spec = EngineSpec(python=os.environ.get(variable), start=300.0, at_once=4)
    try:
        engine.check(engine.filled({}), spec)
    except SpecError as error:
        pytest.skip(f"{error} ({variable} names a python that has it)")
    context = EngineContext(load_model(), spec, tmp_path / "log", 1)
    with pytest.raises((EngineFailed, SpecError), match=r"no[_-]such[_-]setting") as failed:
        engine.start(engine.filled({"no_such_setting": "1"}), context).stop()
    assert str(failed.value).isprintable()


REQUESTS = [GenerationRequest((5, 6), 3, (9,), 0.0, 1.0, seed) for seed in (1, 2)]
GOOD = Reply((7, 9), "stop")


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([GOOD], "engine it gave 1 replies to 2 requests"),
        ([GOOD, GOOD, GOOD], "gave 3 replies to 2"),
        ([GOOD, Reply((1, 2, 3, 4), "length")], "an answer of 4 tokens; the limit was 3"),
        ([Reply((7, 9, 8), "length"), GOOD], "continued an answer after a stop token"),
    ],
)
def test_impossible_replies_of_any_engine_are_rejected(replies: list[Reply], message: str) -> None:
    require_replies(REQUESTS, [GOOD, Reply((1, 2, 3), "length")], "it")
    require_replies(REQUESTS, [Reply((), "stop", text="a text"), Reply((), "error", refused="no")], "it")
    with pytest.raises(EngineFailed, match=message):
        require_replies(REQUESTS, replies, "it")


def test_repeated_or_empty_settings_are_rejected() -> None:
    for text, message in (
        ("openvino:KV_CACHE_PRECISION=u8,KV_CACHE_PRECISION=u4", "has a setting twice"),
        ("openvino:KV_CACHE_PRECISION", "setting KV_CACHE_PRECISION is '', expected a word or a number"),
        ("openvino:=u4", "engine 'openvino': '' cannot be the name of a setting"),
    ):
        with pytest.raises(SpecError, match=message):
            parse_condition(text)
    for name, value, message in (
        ("a,b", 1, "cannot be the name of a setting"),
        ("a", "\ud800", "expected a word or a number"),
        ("a", [1], "expected a word or a number"),
        ("a", "x" * 501, "expected a word or a number"),
    ):
        with pytest.raises(SpecError, match=message) as error:
            parse_condition({ENGINE: "openvino", name: value})
        assert str(error.value).isprintable()
    with pytest.raises(UnknownName, match=r"Did you mean 'llama\.cpp'"):
        parse_condition("llama.ccp:type_k=q8_0")


# --- engines that break the contract ---------------------------------------------------------------------------------

PLUGIN = '''
from typing import ClassVar
from kvaudit.audit.engines.base import Engine


class Coded(Engine):
    """An engine of a test."""

    name, says, install = "coded", "a test", "pip install coded"
    compresses: ClassVar = {{"kv": ("f16",)}}
    {body}
'''


def load_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> type[Engine]:
    """Load an engine from a plug-in file; it is unregistered after the test."""
    monkeypatch.setattr(ENGINES, "_classes", dict(ENGINES.all()))
    file = folder / "coded_engine.py"
    file.write_text(PLUGIN.format(body=body))
    ENGINES.load_file(file)
    return ENGINES.get("coded")


METHOD = "@classmethod\n    def {}(cls, settings):\n        return {}"


@pytest.mark.parametrize(
    ("check", "body"),
    [
        (check_reference_compresses_nothing, 'uncompressed: ClassVar = {"kv": "q4"}'),
        (check_reference_compresses_nothing, METHOD.format("reference", "settings")),
        (check_reference_compresses_nothing, METHOD.format("filled", '{"x": "1", **settings}')
            + "\n    " + METHOD.format("reference", '{"x": settings["x"] + "1", "kv": "f16"}')),
        (check_chosen_settings_stay, METHOD.format("filled", '{**settings, "kv": "q8"}')),
        (check_chosen_settings_stay, METHOD.format("reference", '{"kv": "f16"}')),
        (check_canonical_parses_back, METHOD.format("filled", '{**settings, "run": settings.get("run", "") + "1"}')),
        (check_name_is_no_policy_and_description_is_one_line, 'says = ""'),
    ],
)  # fmt: skip
def test_a_wrong_engine_fails_the_contract(
    check: Check, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_plugin(tmp_path, monkeypatch, body)
    with pytest.raises(AssertionError):
        run_check(engine, check)


def test_an_engine_with_the_name_of_a_policy_fails_the_contract() -> None:
    class Snap(Engine):
        name: ClassVar = "snapkv"
        says: ClassVar = "a test"

    with pytest.raises(AssertionError):
        check_name_is_no_policy_and_description_is_one_line(Snap, {})


def test_a_right_engine_passes_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = load_plugin(tmp_path, monkeypatch, 'uncompressed: ClassVar = {"kv": "f16"}')
    for check in CHECKS:
        run_check(engine, check)


def test_the_kv_option_of_transformers_is_backend_and_bits() -> None:
    engine = ENGINES.get("transformers")
    assert engine.kv("hqq-4") == {"cache": "quantized", "backend": "hqq", "nbits": "4"}
    assert engine.kv("fp8") == {"cache": "quantized", "backend": "fp8"}
    for text in ("", "hqq-", "hqq-four", "-4"):
        with pytest.raises(SpecError, match="expected BACKEND-BITS"):
            engine.kv(text)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_kv_option_of_a_server_is_one_word(name: str) -> None:
    engine = ENGINES.get(name)
    assert engine.kv("fp8_e5m2") == {"kv_cache_dtype": "fp8_e5m2"}
    for text in ("", "kv_cache_dtype=fp8", "fp8/fp8", "--fp8", "fp8 fp4"):
        with pytest.raises(SpecError, match=f"engine {name}: --kv is .*, expected a value of kv_cache_dtype"):
            engine.kv(text)


@pytest.mark.parametrize(
    ("quantisation", "dtype", "refused"),
    [
        ({"kv_cache_scheme": {"num_bits": 8}}, "auto", True),
        ({"kv_cache_quant_algo": "FP8"}, "auto", True),
        ({"kv_cache_quant_algo": "FP8"}, "bf16", False),
        ({"kv_cache_scheme": None, "quant_method": "awq"}, "auto", False),
        (None, "auto", False),
    ],
)
def test_a_checkpoint_that_compresses_its_cache_is_no_uncompressed_reference(
    quantisation: dict[str, Any] | None, dtype: str, refused: bool
) -> None:
    with pytest.raises(SpecError, match="set kv_cache_dtype, such as bf16") if refused else nullcontext():
        check_auto_dtype({"kv_cache_dtype": dtype}, {"quantization_config": quantisation})
