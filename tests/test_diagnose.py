"""A diagnosis names what was planted: outlying key channels, one layer, all layers, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from kvaudit.audit.cache.attention import ATTENTION_NAME
from kvaudit.audit.cache.engine_store import BLOCK, ByChannel, ByToken, Cast, EngineStore
from kvaudit.audit.cli import app
from kvaudit.audit.rerun.diagnose import (
    Case,
    CodedAttention,
    Codes,
    Diagnosis,
    Floats,
    Request,
    count_cases,
    read_back,
    run_diagnosis,
)

LAYERS, SIZE, TOKENS = 13, 32, 50


def tiny(loud: tuple[int, ...] = (), *, by: float = 4.0, outliers: bool = False) -> Any:
    """A random model over embeddings that no layer changes much; of ``loud`` layers the noise is heard."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.02, attention_bias=True, max_position_embeddings=256,
        attn_implementation=ATTENTION_NAME, pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 1e9},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight.data.mul_(50.0)
    model.lm_head.weight.data.mul_(20.0)  # sure of itself, so that what moves inside is heard
    for number, layer in enumerate(model.model.layers):
        part = layer.self_attn
        part.v_proj.weight.data.mul_(4.0)
        part.q_proj.weight.data.mul_(20.0)
        part.k_proj.weight.data.mul_(6.0)
        part.o_proj.weight.data.mul_(by if number in loud else 0.1)
        if outliers:  # a channel of every head that hardly turns with the position stands far out in every key
            part.k_proj.bias.data.view(2, SIZE)[:, SIZE // 2 - 1].fill_(10.0)
    return SimpleNamespace(model=model, device=torch.device("cpu"))


def asked(model: Any, count: int = 4) -> list[Request]:
    """One of every kind, or more."""
    found = []
    for n in range(count):
        ids = torch.randint(1, 61, (TOKENS + n,), generator=torch.Generator().manual_seed(n))
        kv = CodedAttention(model, Case("uncompressed", 0.0, {}))
        with torch.no_grad():
            logits = model.model(input_ids=ids[None], use_cache=False, kv=kv).logits[0, TOKENS - 9 : -1]
        found.append(Request(ids, TOKENS - 8, n % 2 == 0, n % 3 == 0, logits))
    return found


def diagnosed(model: Any, setting: Codes | Floats | None = None, *, count: int = 4) -> Diagnosis:
    """What is found, after as many cases as are said beforehand."""
    setting, harms = setting or Codes(4, SIZE), list[Any]()
    found = run_diagnosis(model, asked(model, count), setting, harms.append)
    assert len(harms) == count_cases(model, setting)
    return found


@torch.no_grad()
def test_uncoded_it_is_the_stock_pass_to_rounding() -> None:
    model = tiny((1, 4))
    for one in asked(model):
        stock = model.model(one.ids[None], use_cache=False).logits[0, one.prompt_length - 1 : -1]
        assert float((stock - one.logits).abs().max()) < 3e-5


@torch.no_grad()
def test_exact_tokens_undo_the_code_and_one_too_few_does_not() -> None:
    model = tiny((1, 4))
    ids = asked(model)[0].ids
    stores = dict.fromkeys(range(LAYERS), EngineStore(ByToken(4, SIZE), ByToken(4, SIZE)))

    def logits(**exact: int) -> torch.Tensor:
        kv = CodedAttention(model, Case("", 0.0, stores, **exact))
        return model.model(input_ids=ids[None], use_cache=False, kv=kv).logits[0]  # type: ignore[no-any-return]

    plain = model.model(ids[None], use_cache=False).logits[0]
    for name in ("sinks", "window"):
        assert float((logits(**{name: len(ids)}) - plain).abs().max()) < 1e-4
        # the last query alone reads one coded entry: the newest of them, or the oldest
        short = (logits(**{name: len(ids) - 1}) - plain).abs().amax(-1)
        assert float(short[:-1].max()) < 1e-4 < float(short[-1])


def test_keys_by_channel_share_a_scale_over_thirty_two_positions_and_no_further() -> None:
    x = torch.randn(1, 2, BLOCK + 1, 4, generator=torch.Generator().manual_seed(1))
    x[:, :, BLOCK] = 1e3  # of the next block
    read = read_back(x, ByChannel(4))
    assert float((read - x)[:, :, :BLOCK].abs().max()) < 0.3
    # alone in its block an entry is its own lowest and highest
    assert torch.allclose(read[:, :, BLOCK], x[:, :, BLOCK], rtol=1e-3)
    assert not torch.allclose(read_back(x[:, :, 1:], ByChannel(4))[:, :, :-1], x[:, :, 1:-1], atol=1.0)


def test_outlying_key_channels_are_found_and_finer_groups_are_advised() -> None:
    found = diagnosed(tiny(tuple(range(LAYERS)), outliers=True), count=6)
    keys, values = found.parts
    assert found.mode == "outlier-crushes-safety"
    assert keys.nats > 10 * values.nats
    assert "keys by channel" in [one.case.name for one in found.effective_remedies]
    assert found.effective_remedies[0].case.bits <= found.overall.case.bits  # at no more memory
    assert found.along_refusals > 5


def test_one_layer_that_carries_the_harm_is_found() -> None:
    found = diagnosed(tiny((7,), by=12.0))
    assert found.mode == "outlier-as-safety"
    (twelfth,) = (one.case for one in found.remedies if one.case.name.startswith("layers"))
    finer = [n for n, store in twelfth.stores.items() if store != found.overall.case.stores[n]]
    assert 7 in finer
    assert len(finer) == 2  # a twelfth of thirteen, rounded up
    assert max(found.layers, key=lambda one: one.nats).case.name == "layer 7"


def test_harm_that_all_layers_share_is_called_so() -> None:
    found = diagnosed(tiny(tuple(range(LAYERS))))
    assert found.mode == "multi-layer dilution"
    assert not [one for one in found.effective_remedies if one.case.name.startswith(("layers", "keys by channel"))]


def test_without_any_harm_nothing_is_advised() -> None:
    found = diagnosed(tiny())
    assert (found.mode, found.effective_remedies) == ("nothing", [])


E4M3, E5M2 = (EngineStore(one, one) for one in (Cast("float8_e4m3fn"), Cast("float8_e5m2")))


def test_for_floats_the_other_format_and_uncompressed_layers_are_tried() -> None:
    loud = tiny((7,), by=12.0)
    found = diagnosed(loud, Floats("fp8_e5m2", E5M2, E4M3))
    tried = {one.case.name: one for one in found.remedies}
    assert next(iter(tried)) == "fp8_e4m3"
    assert tried["fp8_e4m3"].nats < 0.5 * found.overall.nats
    twelfth, quarter = (one for name, one in tried.items() if name.startswith("layers"))
    assert twelfth.case.bits == pytest.approx(8 + 8 * 2 / LAYERS)
    assert quarter.case.bits == pytest.approx(8 + 8 * 4 / LAYERS)
    assert len(twelfth.case.stores) == LAYERS - 2
    assert 7 not in twelfth.case.stores  # stored uncompressed
    assert len(quarter.case.stores) == LAYERS - 4
    assert found.mode == "outlier-as-safety"
    assert (found.fine, found.along_refusals) == (None, None)
    better = diagnosed(loud, Floats("fp8_e4m3", E4M3))
    assert better.overall.nats == tried["fp8_e4m3"].nats
    assert "fp8_e4m3" not in [one.case.name for one in better.remedies]


def test_the_command_takes_a_format_of_vllm(tmp_path: Path) -> None:
    out = tmp_path / "d.json"
    words = ["diagnose", "embedded", "--kv-cache-dtype", "fp8_e5m2", "--prompts", "4", "--threads", "1"]
    result = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert result.exit_code == 0, result.output
    table = json.loads(out.read_text())
    assert table["kv_cache_dtype"] == "fp8_e5m2"
    assert table["remedies"][0]["stored"] == "fp8_e4m3"
    assert not {"bits", "eight_bits", "refusal_direction_reduction"} & set(table)


def test_the_command_prints_it_and_writes_the_same(tmp_path: Path) -> None:
    out = tmp_path / "d.json"
    words = ["diagnose", "embedded", "--prompts", "4", "--threads", "1", "--out", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    table = json.loads(out.read_text())
    assert f"mode: {table['mode']}" in result.output
    assert table["requests"]["asked"] == 4
    assert len(table["layers"]) == 4


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--suite", "maths"], "unknown suite 'maths'. Did you mean 'math'"),
        (["--suite", "math"], "0 of the first 20 requests of suite 'math' must be refused"),
        (["--group", "24"], "does not divide the 32 channels of a head"),
        (["--dtype", "float8"], "unknown dtype 'float8'"),
        (["--kv-cache-dtype", "fp8_e5m3"], "unknown kv_cache_dtype 'fp8_e5m3'. Did you mean 'fp8_e5m2'"),
        (["--kv-cache-dtype", "fp8", "--bits", "4"], "leave out --bits and --group"),
    ],
)
def test_what_cannot_be_diagnosed_is_one_line(words: list[str], line: str) -> None:
    result = CliRunner().invoke(app, ["diagnose", "embedded", *words])
    assert result.exit_code == 2
    assert line in result.output
    assert len(result.output.strip().splitlines()) == 1
