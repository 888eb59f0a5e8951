"""The learner and its optimiser: gradients that sharing, splitting and padding leave alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_world import config, gradients, sampled, sharp, short

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.conversations import play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.training.batch import Batch, collect, row_seeds, training_items
from kvaudit.audit.training.learner import pass_logprobs, read_tokens
from kvaudit.audit.training.optimiser import Optimiser
from kvaudit.core.errors import DataError


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


@pytest.fixture(scope="module")
def batch(base: LoadedModel) -> Batch:
    return sampled(base)


def assert_all_close(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_learner_tokens_count_each_prompt_once(batch: Batch) -> None:
    prompts = [batch.rollouts[start].prompt_length for start in (0, 4, 8)]
    suffixes = [len(rollout.ids) - rollout.prompt_length for rollout in batch.rollouts]
    assert batch.learner_tokens == sum(prompts) + sum(suffixes)


@pytest.mark.parametrize("view", ["dense", "shadow"])
def test_sharing_the_prompt_changes_neither_log_probs_nor_gradient(base: LoadedModel, batch: Batch, view: str) -> None:
    found = []
    for group in (4, 1):
        model = copy.deepcopy(base.model).double()
        read = read_tokens(model, batch.rollouts, group, view, 1.0)
        (read.logprobs * torch.linspace(-1, 1, len(read.logprobs))).sum().backward()
        found.append([read.logprobs.detach(), *(weight.grad for weight in model.parameters())])
    assert_all_close(found[0], found[1], 1e-5)  # gradients of size 10; Llama's norm rounds to float32 even in float64


def test_tokens_between_two_turns_are_replayed_but_not_learned(base: LoadedModel) -> None:
    episode = Sampler(base, parse_policy(config().policy)).open([tuple(range(40, 190))], [1, 2], group=2)
    first = episode.decode(Decoding(9))
    episode.extend([tuple(range(60, 90)), tuple(range(50, 70))])
    second = episode.decode(Decoding(7))
    rollouts = episode.rollouts()
    batch = collect(rollouts, [1.0, 0.0], 2, base.device)
    drawn = [len(one.ids) + len(two.ids) for one, two in zip(first, second, strict=True) if one and two]
    assert batch.mask.sum(dim=1).tolist() == drawn
    logprobs = pass_logprobs(base.model, batch, "shadow", config())
    torch.testing.assert_close(logprobs, batch.sampler_logprobs, rtol=0, atol=1e-5)
    assert (pass_logprobs(base.model, batch, "dense", config()) - batch.sampler_logprobs).abs().max() > 0.5


def test_temperature_is_the_samplers(base: LoadedModel) -> None:
    settings = short(steps=1)
    sampler = Sampler(base, parse_policy(settings.policy))
    questions = training_items(settings, base.chat.count_tokens)[0]
    played = play(sampler, questions, Decoding(9, temperature=0.7), row_seeds(settings, 0), group=4)
    rollouts = [row.rollout for row in played]
    sampled = torch.cat([rollout.sampler_logprobs[rollout.sampled] for rollout in rollouts])
    warm, plain = (read_tokens(base.model, rollouts, 4, "shadow", t).logprobs.detach() for t in (0.7, 1.0))
    torch.testing.assert_close(warm, sampled, rtol=0, atol=1e-5)
    assert (plain - sampled).abs().max() > 0.1


def test_an_ungraded_rollout_takes_no_gradient(base: LoadedModel, batch: Batch) -> None:
    scores: list[float | None] = [0.0, 1.0, None, None] * 3
    changed = [
        _shout(rollout) if score is None else rollout for rollout, score in zip(batch.rollouts, scores, strict=True)
    ]
    quiet, loud = (gradients(base, collect(r, scores, 4, base.device), arm="naive") for r in (batch.rollouts, changed))
    assert_all_close(loud, quiet, 1e-6)


def _shout(rollout: Rollout) -> Rollout:
    """The same rollout with other words in its answer."""
    ids = rollout.ids.clone()
    ids[rollout.prompt_length :] = 65
    return replace(rollout, ids=ids)


def test_bfloat16_weights_move_by_less_than_their_own_precision() -> None:
    layer = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.constant_(layer.weight, 1.0)
    optimiser = Optimiser(layer, learning_rate=1e-3, warmup_steps=0, max_grad_norm=9.0)
    for _ in range(4):
        layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        assert optimiser.step().norm == 1.0
    assert layer.weight.item() == 0.99609375  # 1 - 4e-3, which no single step of 1e-3 could have reached
    assert optimiser.tensors()["weight/weight"].item() == pytest.approx(0.996, abs=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    before = layer.weight.item()
    optimiser = Optimiser(layer, learning_rate=1.0, warmup_steps=0, max_grad_norm=1.0)
    (layer(torch.ones(1, 1)) * float("inf")).sum().backward()
    assert optimiser.step().norm is None
    assert (layer.weight.item(), optimiser.updates) == (before, 0)


def test_the_rate_warms_up_linearly_and_stays() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    optimiser = Optimiser(layer, learning_rate=0.4, warmup_steps=4, max_grad_norm=1.0)
    moved, at = [], layer.weight.item()
    for _ in range(5):
        layer(torch.ones(1, 1)).sum().backward()
        optimiser.step()
        moved.append(round(at - layer.weight.item(), 4))
        at = layer.weight.item()
    assert moved == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4], abs=1e-3)


def test_weights_that_had_fewer_gradients_than_updates_go_on_to_the_bit():
    """An expert that some updates do not reach, and one that none does."""

    def net():
        torch.manual_seed(4)
        return torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in ("often", "seldom", "never")})

    def update(layers, optimiser, number):
        reached = ("often", "seldom") if number % 2 else ("often",)
        sum(layers[name](torch.full((1, 3), float(number))).square().sum() for name in reached).backward()
        optimiser.step()

    whole = net()
    undisturbed = Optimiser(whole, learning_rate=0.1, warmup_steps=0, max_grad_norm=1.0)
    for number in range(1, 4):
        update(whole, undisturbed, number)
    kept = {name: tensor.clone() for name, tensor in undisturbed.tensors().items()}
    assert kept["step/seldom.weight"] == 2.0
    assert {name for name in kept if "never" in name} == {"weight/never.weight"}
    resumed = net()
    again = Optimiser(resumed, learning_rate=0.1, warmup_steps=0, max_grad_norm=1.0)
    again.load(kept, undisturbed.updates)
    for number in range(4, 6):
        update(whole, undisturbed, number)
        update(resumed, again, number)
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in undisturbed.tensors().items())
    del kept["exp_avg/often.weight"]
    with pytest.raises(DataError, match=r"does not fit the model at 'exp_avg/often\.weight'"):
        again.load(kept, 3)
