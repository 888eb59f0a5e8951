"""Real sizes: logits a few at a time, adapters, checkpointed layers, split groups; each learns what it would whole."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from training_world import sampled, sharp
from transformers import Gemma2Config, Gemma2ForCausalLM

from audit.core.spec import AdapterSpec
from audit.replay.head import watched
from audit.sampling.model import LoadedModel
from audit.training import learner
from audit.training.adapters import learner_of
from audit.training.batch import Batch
from audit.training.learner import read_tokens


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


@pytest.fixture(scope="module")
def batch(base: LoadedModel) -> Batch:
    return sampled(base, suites=["refusal"])


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No vocabulary is small, and logits of seven tokens are made at a time."""
    monkeypatch.setattr(learner, "WHOLE", 0)
    monkeypatch.setattr(learner, "PIECE", 7 * 300)


def numbers(base: LoadedModel, batch: Batch, view: str) -> list[torch.Tensor]:
    """Log-probs, entropy, the KL to another view, and every weight's gradient, in float64."""
    model = copy.deepcopy(base.model).double()
    read, other = (read_tokens(model, batch.rollouts, 4, kind, 0.9) for kind in (view, "dense"))
    apart = read.distributions.kl(other.distributions)
    (read.logprobs * torch.linspace(-1, 1, len(read.logprobs)) + apart).sum().backward()
    return [read.logprobs.detach(), read.entropy, apart.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("view", ["dense", "shadow"])
def test_logits_made_a_few_at_a_time_change_nothing(
    view: str, base: LoadedModel, batch: Batch, request: pytest.FixtureRequest
) -> None:
    whole = numbers(base, batch, view)
    request.getfixturevalue("in_pieces")
    for found, wanted in zip(numbers(base, batch, view), whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-10)


def test_logits_made_a_few_at_a_time_are_not_kept(base: LoadedModel, batch: Batch, in_pieces: None) -> None:
    shapes = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        read_tokens(base.model, batch.rollouts, 4, "shadow", 1.0)
    head = base.model.lm_head.weight.T.shape
    assert shapes
    assert {shape for shape in shapes if head[1] in shape} == {tuple(head)}


def test_a_head_caps_and_scales_as_the_model_does() -> None:
    settings = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, final_logit_softcapping=0.05,
    )  # fmt: skip
    model, ids = Gemma2ForCausalLM(settings).eval(), torch.tensor([[1, 2, 3]])
    with watched(model) as head:
        wanted = model(ids).logits[0]
    assert wanted.abs().max() < 0.05
    assert torch.equal(head(head.states()[0]), wanted)


# peft asks transformers by a name that transformers has given up
PEFT_ASKS_BY_AN_OLD_NAME = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
ADAPTER = {"rank": 3, "alpha": 6}


def adapted(base: LoadedModel) -> LoadedModel:
    """The base with an adapter that changes it."""
    pytest.importorskip("peft", reason="peft is not installed")
    model = learner_of(base, AdapterSpec(**ADAPTER), 1)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    return model


def test_an_adapters_gradient_under_the_shadow_pass_is_that_of_the_composed_weight(
    base: LoadedModel, batch: Batch
) -> None:
    own = adapted(base).model.double()
    plain = copy.deepcopy(base.model).double()
    pairs = {name: module for name, module in own.named_modules() if hasattr(module, "lora_A")}
    with torch.no_grad():
        for name, module in pairs.items():
            plain.get_submodule(name).weight += 2.0 * module.lora_B["default"].weight @ module.lora_A["default"].weight
    for model in (own, plain):
        read = read_tokens(model, batch.rollouts, 4, "shadow", 1.0)
        (read.logprobs * torch.linspace(-1, 1, len(read.logprobs))).sum().backward()
    assert len(pairs) == 14
    for name, module in pairs.items():
        whole, (a, b) = plain.get_submodule(name).weight.grad, (module.lora_A["default"], module.lora_B["default"])
        torch.testing.assert_close(a.weight.grad, 2.0 * b.weight.T @ whole, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(b.weight.grad, 2.0 * whole @ a.weight.T, rtol=1e-6, atol=1e-6)
        assert module.base_layer.weight.grad is None
