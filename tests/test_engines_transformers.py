"""transformers' own caches: dynamic and static match ours; quantisation acts from the second token of an answer on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_world import World, world

from kvaudit.audit.engines import parse_condition
from kvaudit.audit.engines.base import EngineFailed, Session
from kvaudit.core.errors import SpecError
from kvaudit.core.spec_evaluate import EngineSpec

PYTHON = os.environ.get("KVAUDIT_PYTHON_TRANSFORMERS")
PART = EngineSpec(at_once=4, start=300.0)


@pytest.fixture(scope="module")
def here() -> World:
    return world()


@pytest.fixture(scope="module")
def plain(here: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A session with a dynamic cache."""
    with here.start("transformers", tmp_path_factory.mktemp("plain"), PART) as session:
        yield session


def test_a_dynamic_cache_matches_our_own_cache(here: World, plain: Session) -> None:
    replies = plain.answer(here.asked)
    assert plain.described["cache"] == "DynamicCache"
    alone = [plain.answer([one])[0] for one in here.asked[:2]]
    assert here.matches(replies)
    assert max(here.gaps(replies)) < 1e-5  # float32, another batch size
    assert [reply.ids for reply in alone] == [reply.ids for reply in replies[:2]]


def test_a_static_cache_matches_our_own_cache(here: World, tmp_path: Path) -> None:
    with here.start("transformers:cache=static", tmp_path, PART) as static:
        assert static.described["cache"] == "StaticCache"
        replies = static.answer(here.asked)
    assert here.matches(replies)
    assert max(here.gaps(replies)) < 1e-5
    with pytest.raises(SpecError, match="nbits has no effect with cache static; write cache: quantized"):
        parse_condition({"engine": "transformers", "cache": "static", "nbits": 4})


def test_quantisation_takes_effect_from_the_second_token_on(here: World, tmp_path: Path) -> None:
    with here.start("transformers:backend=fp8", tmp_path, PART) as session:
        assert session.described["cache"] == "QuantizedCache"
        assert "Fp8QuantizedLayer" in session.described["layer"]
        first = session.answer([one._replace(max_tokens=1) for one in here.asked])
        whole = session.answer(here.asked)
    pairs = list(zip(first, here.own, strict=True))
    assert max(abs(float(reply.logprob or 0) - own.logprobs[0]) for reply, own in pairs) < 1e-4
    assert here.mean_gap(whole) > 1e-3


def test_each_row_has_its_own_stops_limit_and_seed(here: World, plain: Session) -> None:
    stop = here.own[0].ids[3]
    requests = [here.asked[0]._replace(stops=(stop,)), here.asked[1]._replace(max_tokens=5, stops=(stop,))]
    sampled = [one._replace(temperature=1.0, top_p=0.9) for one in here.asked]
    stopped, short = plain.answer(requests)
    first = plain.answer(sampled)
    assert [reply.ids for reply in plain.answer(sampled[::-1])] == [reply.ids for reply in first[::-1]]
    assert plain.answer([one._replace(seed=one.seed + 100) for one in sampled]) != first
    assert stopped.finish == "stop"
    assert stopped.ids == here.own[0].ids[: here.own[0].ids.index(stop) + 1]
    assert (short.finish, short.ids) == ("length", here.own[1].ids[:5])


def test_unknown_settings_and_settings_without_effect_are_errors(here: World, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nbits has no effect with cache dynamic; write cache: quantized"):
        parse_condition({"engine": "transformers", "cache": "dynamic", "nbits": 4})
    with pytest.raises(EngineFailed, match=r"The `fp8` backend quantizes per-tensor and does not support \['nbits'\]"):
        here.start("transformers:backend=fp8,nbits=4", tmp_path, PART)
    with pytest.raises(EngineFailed, match="Unknown quantization backend `int3`"):
        here.start("transformers:backend=int3", tmp_path, PART)
    with pytest.raises(SpecError, match="it reads the checkpoint itself; remove it"):
        here.start("transformers", tmp_path, EngineSpec(weights="/nowhere"))


def test_the_backend_is_written_out() -> None:
    condition = parse_condition({"engine": "transformers", "nbits": 4})
    assert condition.canonical == (
        "transformers:attn_implementation=sdpa,backend=quanto,cache=quantized,dtype=float32,nbits=4"
    )
    assert condition.reference.canonical == "transformers:attn_implementation=sdpa,cache=dynamic,dtype=float32"


@pytest.mark.engines
@pytest.mark.skipif(
    PYTHON is None, reason="KVAUDIT_PYTHON_TRANSFORMERS names no python that has hqq and optimum-quanto"
)
@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_fewer_bits_move_the_log_probs_further(here: World, tmp_path: Path, backend: str) -> None:
    axis = {"quanto": "axis_key=0,axis_value=0", "hqq": "axis_key=1,axis_value=1"}[backend]
    gaps = {}
    for bits in (4, 2):
        text = f"transformers:backend={backend},nbits={bits},q_group_size=32,{axis}"
        with here.start(text, tmp_path, PART.model_copy(update={"python": PYTHON})) as session:
            gaps[bits] = here.mean_gap(session.answer(here.asked))
            assert f"nbits={bits}" in session.described["layer"]
    assert 1e-3 < gaps[4] < gaps[2]
    with pytest.raises(EngineFailed, match=r"`nbits` for `\w+` backend has to be one of"):
        here.start(f"transformers:backend={backend},nbits=5", tmp_path, PART.model_copy(update={"python": PYTHON}))
