"""A packed model gives the answers of the model it was made of, shares its weights and leaves gradients alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bench.models import Served, random_llama
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs import evaluate
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.sampling import packing as module
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.sampling.packing import LARGE, is_packable_dtype, pack_weights
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.serving import engine
from kvaudit.audit.serving.harness import model as lm
from kvaudit.audit.serving.wire import ChatRequest
from kvaudit.audit.training import rollouts
from kvaudit.core.records import Message, Role
from kvaudit.core.spec import parse_spec

pytestmark = pytest.mark.skipif(not is_packable_dtype(torch.float32), reason="this processor has no packed products")
SPEC = """
format: 1
name: packed
model: embedded
evaluate: {policies: [none], suites: {math: {items: 2}}, context_tokens: [192]}
"""
REQUEST = ChatRequest(
    model="embedded@none",
    messages=(Message(Role.USER, "Hello"),),
    max_tokens=2,
    temperature=1.0,
    top_p=1.0,
    seed=1,
    choices=1,
    stop=(),
    logprobs=False,
    stream=False,
    usage_in_stream=False,
)
POLICIES = ["none", "snapkv:budget=24,window=4", "kivi:bits=4,residual=8,group=8"]


@pytest.fixture
def all_large() -> Iterator[None]:
    """Every product counts as large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE", dict.fromkeys(LARGE, 1))
        yield


@pytest.fixture(scope="module")
def wide() -> Served:
    return random_llama(512, 2, vocabulary=1024, spread=0.05)


def layers(model: Any) -> list[str]:
    return [name for name, part in model.named_modules() if type(part) is module._Packed]


@pytest.fixture(params=["AVX2", "AVX512"])
def widest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A processor with these instructions and no wider ones, for what is decided by them."""
    monkeypatch.setattr(module, "_instruction_set", lambda: request.param)
    return str(request.param)


def test_large_products_are_packed_and_no_others(wide: Served, widest: str) -> None:
    found = layers(pack_weights(wide).model)
    large = [
        name
        for name, part in wide.model.named_modules()
        if isinstance(part, nn.Linear) and part.out_features * part.in_features >= LARGE[widest]
    ]
    assert found == large
    of_both = {"gate_proj", "up_proj", "down_proj", "lm_head"}
    smaller = {"AVX2": set(), "AVX512": {"q_proj", "k_proj", "v_proj", "o_proj"}}[widest]  # from 256 x 512 on
    assert {name.rpartition(".")[2] for name in found} == of_both | smaller
    assert layers(wide.model) == []  # which is what learns


def test_weights_are_shared(wide: Served) -> None:
    ours, theirs = (
        dict(model.named_parameters(remove_duplicate=False)) for model in (pack_weights(wide).model, wide.model)
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in theirs)


@pytest.mark.parametrize("rows", [1, 2, 4, 9])
def test_logits_differ_by_rounding(wide: Served, rows: int, widest: str) -> None:
    ids = torch.randint(0, 1024, (rows, 1), generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        wanted, found = (plain(model)(ids) for model in (wide.model, pack_weights(wide).model))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    # one row is left to the product that reads weights as they are stored, where that is as fast
    assert torch.equal(found, wanted) == (rows == 1 and widest == "AVX2")


def plain(model: Any) -> Any:
    """Hidden states to logits: the large products alone, one after the other."""

    def run(ids: torch.Tensor) -> torch.Tensor:
        hidden = model.model.embed_tokens(ids)
        for layer in model.model.layers:
            hidden = hidden + layer.mlp(hidden)
        found: torch.Tensor = model.lm_head(hidden)
        return found

    return run


def test_gradients_are_those_of_the_model(wide: Served) -> None:
    part = pack_weights(wide).model.model.layers[0].mlp.down_proj
    given = torch.randn(8, part.in_features, requires_grad=True)
    part(given).square().sum().backward()
    found, weight = given.grad, part.weight.grad
    assert found is not None
    assert weight is not None
    wanted = 2 * (given.detach() @ part.weight.detach().T) @ part.weight.detach()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    part.weight.grad = None


@pytest.mark.skipif(not is_packable_dtype(torch.bfloat16), reason="this processor has no packed products of bfloat16")
def test_bfloat16_is_packed_too() -> None:
    half = random_llama(512, 1, vocabulary=1024, spread=0.05)
    half.model.bfloat16()
    ids = torch.arange(6)[:, None]
    served = pack_weights(half)
    assert layers(served.model)
    with torch.no_grad():
        wanted, found = (plain(model)(ids).float() for model in (half.model, served.model))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_and_ledgers_stay(policy: str) -> None:
    model, prompts = load_model(), [list(range(20, 20 + n)) for n in (60, 47, 71, 33)]
    served = pack_weights(model)
    assert served.model is not model.model
    assert served.sha256 == model.sha256
    found = []
    for one in (model, served):
        episode = Sampler(one, parse_policy(policy)).open(prompts, list(range(8)), group=2)
        answers = episode.decode(Decoding(12, temperature=1.0))
        found.append(([answer.ids for answer in answers if answer], episode.rollouts()))
    (ids, wanted), (again, rollouts) = found
    assert ids == again
    for one, other in zip(wanted, rollouts, strict=True):
        assert torch.equal(one.evicted_at, other.evicted_at)
        torch.testing.assert_close(one.sampler_logprobs, other.sampler_logprobs, rtol=0, atol=1e-4)


def test_the_embedded_model_stays_as_it_is() -> None:
    model = load_model()
    assert pack_weights(model) is model


@pytest.mark.usefixtures("all_large")
def test_a_copy_that_takes_too_much_of_the_memory_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model()
    size = sum(part.weight.nbytes for part in model.model.modules() if isinstance(part, nn.Linear))
    monkeypatch.setattr(module.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(module, "total_bytes", lambda: 12 * size - 1)
    assert pack_weights(model) is model
    monkeypatch.setattr(module, "total_bytes", lambda: 12 * size)
    assert pack_weights(model) is not model


@pytest.mark.usefixtures("all_large")
def test_a_model_on_a_gpu_stays_as_it_is() -> None:
    model = load_model()
    elsewhere = LoadedModel(**{**vars(model), "device": SimpleNamespace(type="cuda")})
    assert pack_weights(elsewhere) is elsewhere


def test_a_layer_that_somebody_listens_to_is_left_alone() -> None:
    model = random_llama(512, 1, vocabulary=1024)
    mlp = model.model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda *_: None)
    mlp.down_proj.forward = mlp.down_proj.forward
    assert {"up_proj", "down_proj"}.isdisjoint(name.rpartition(".")[2] for name in layers(pack_weights(model).model))
    assert "model.layers.0.mlp.gate_proj" in layers(pack_weights(model).model)


def test_autocast_is_heeded(wide: Served) -> None:
    part = pack_weights(wide).model.lm_head
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert part(torch.randn(8, part.in_features)).dtype == torch.bfloat16


@pytest.mark.skipif(is_packable_dtype(torch.bfloat16), reason="this processor packs bfloat16")
def test_bfloat16_is_left_alone_where_the_processor_cannot() -> None:
    half = random_llama(512, 1, vocabulary=1024)
    half.model.bfloat16()
    assert pack_weights(half) is half


@pytest.mark.usefixtures("all_large")
def test_weights_are_packed_for_answering_and_not_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluator, the server and the harness, by the models that their samplers are given."""
    model, sampled = load_model(), list[Any]()

    class Heard(Sampler):
        def open(self, *asked: Any, **options: Any) -> Any:
            sampled.append(self.model)
            return super().open(*asked, **options)

    for where in (evaluate, engine, lm, rollouts):
        monkeypatch.setattr(where, "Sampler", Heard)
    spec = parse_spec(SPEC, "packed", NAMES)
    evaluator, suite = evaluate.Evaluator(model, spec), evaluate.suite_as_asked(spec, "math")
    items = evaluate.evaluation_items(spec, suite, 192, model.chat.count_tokens)
    list(evaluator.answer_items(parse_policy("none"), suite, items))
    served = engine.SamplingEngine({"embedded": model})
    served.submit(REQUEST)[1].result(60)
    served.close()
    assert len(sampled) == 2
    assert all(layers(one.model) for one in sampled)
    assert layers(lm.KvauditLM()._sampler.model.model)
    for path in Path(rollouts.__file__).parent.rglob("*.py"):
        assert "sampling.packing" not in path.read_text(encoding="utf-8"), path
