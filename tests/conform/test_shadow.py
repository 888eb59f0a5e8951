"""The identity, for every replayable policy: what was sampled, its shadow pass and decoding written out are one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from conform.policies import (
    further,
    one_of_each,
    policies_for,
    policy_id,
    pytest_generate_tests,
    record_of,
    schedule_of,
    shape_of,
    small,
    small_policies,
)
from conform.stepwise import stepwise_logits
from conform.world import Played, feed, gap, ledger_of, new_cache, played_once, prompts, shared, two_turns
from kvaudit import shadow
from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.cache.rotary import find_rotary
from kvaudit.audit.policies import POLICIES, Policy, evictor_of, quantiser_of
from kvaudit.audit.replay.ranking_check import repeat_choices
from kvaudit.audit.replay.rollout_checks import eviction_breach, quantisation_breach

__all__ = ["pytest_generate_tests"]


def test_shadow_pass_equals_the_sampler_over_two_turns(asking: Policy) -> None:
    """Beside a layer with a window of its own; other families meet the simulator and the public cache."""
    assert gap(shared("gemma3"), played_once(asking, "gemma3"), "shadow") < 1e-12


def test_shadow_pass_is_exact_under_every_schedule(replayed_variant: Policy) -> None:
    assert gap(shared(), played_once(replayed_variant), "shadow") < 1e-12


def test_shadow_pass_is_exact_in_float32(recorded: Policy) -> None:
    # weights as wide as in the float64 tests draw logits of 20 and more, whose float32 rounding alone reaches 1e-5
    loaded = shared(dtype=torch.float32, spread=0.2)
    played = two_turns(loaded, recorded, lengths=(40, 9), short=True)
    assert gap(loaded, played, "shadow") < 1e-5


@pytest.mark.slow
def test_bfloat16_rounds_and_the_gap_is_printed(lossy: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = shared(dtype=torch.bfloat16, spread=0.1)
    played = two_turns(loaded, lossy, lengths=(40, 9), short=True)
    exact, dense = gap(loaded, played, "shadow"), gap(loaded, played, "dense")
    with capsys.disabled():
        print(f"\n{policy_id(lossy)}: bfloat16 max |log p_sampler - log p_shadow| {exact:.4f} nats, dense {dense:.4f}")
    assert exact < max(dense / 2, 0.05)


def test_a_dense_pass_or_a_record_off_by_one_is_caught(lossy: Policy) -> None:
    played = played_once(lossy)
    assert gap(shared(), played, "dense") > (1e-2 if evictor_of(lossy).evicts else 1e-5)
    tables = [("evicted_at", 1e-4)] if evictor_of(lossy).evicts else []
    tables += [("keys_quantised_at", 1e-6), ("values_quantised_at", 1e-6)] if quantiser_of(lossy) else []
    for (table, least), by in itertools.product(tables, (1, -1)):
        shifted = [replace(r, **{table: shift(getattr(r, table), by)}) for r in played.rollouts]
        assert gap(shared(), played._replace(rollouts=shifted), "shadow") > least


def shift(times: Tensor, by: int) -> Tensor:
    """Every time ``by`` queries later; an entry's own query sees it still."""
    own = torch.arange(1, times.shape[-1] + 1, dtype=torch.int32)
    return torch.where(times < NEVER, torch.maximum(times + by, own), NEVER)


def test_group_members_share_one_prompt_and_stay_exact(asking: Policy) -> None:
    played = two_turns(shared(), asking, group=3, lengths=(40, 9), short=True)
    assert gap(shared(), played, "shadow", group=3) < 1e-12
    assert gap(shared(), played, "shadow", group=1) < 1e-12
    drawn = {tuple(r.ids[r.prompt_length :].tolist()) for r in played.rollouts[:3]}
    assert len(drawn) == 3, "members draw their own tokens"


def test_sampler_equals_decoding_written_out(recorded: Policy) -> None:
    sampler_equals_decoding_written_out("llama-gqa", recorded)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["snapkv", "adakv", "kivi", "quest"])
def test_sampler_equals_decoding_written_out_beside_a_layer_with_a_window(name: str) -> None:
    sampler_equals_decoding_written_out("gemma3", small(POLICIES.get(name)))


def sampler_equals_decoding_written_out(model: str, policy: Policy) -> None:
    played, logits = written_out(policy, model)
    expected = torch.tensor(played.logprobs[0], dtype=torch.float64)
    torch.testing.assert_close(drawn_logprobs(logits, played.rollouts[0]), expected, rtol=0, atol=1e-12)


@cache
def written_out(policy: Policy, model: str) -> tuple[Played, Tensor]:
    """One row's play, and its logits [T, V] token by token, from which gradients flow."""
    played = two_turns(shared(model), policy, lengths=(18,), short=True)
    return played, stepwise_logits(shared(model).model, played.rollouts[0])


def drawn_logprobs(logits: Tensor, rollout: Rollout) -> Tensor:
    """Log-probs of the sampled tokens of one row, from logits [T, V]."""
    logprobs = logits[:-1].log_softmax(-1).gather(1, rollout.ids[1:, None])[:, 0]
    return logprobs[rollout.sampled[1:]]


def test_gradients_of_the_shadow_pass_are_those_of_decoding_written_out(recorded: Policy) -> None:
    model, (played, logits) = shared().model, written_out(recorded, "llama-gqa")
    (rollout,) = played.rollouts
    weights = torch.linspace(-1, 2, int(rollout.sampled.sum()), dtype=torch.float64)
    gradients = []
    for both in (shadow_logits(model, rollout), logits):
        loss = (drawn_logprobs(both, rollout) * weights).sum()
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    assert gradients[1].norm() > 1
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 1e-12


def shadow_logits(model: Any, rollout: Rollout) -> Tensor:
    with shadow(model, ledger_of(rollout)):
        logits: Tensor = model(rollout.ids[None]).logits
    return logits[0]


def test_batch_mates_and_padding_change_nothing(variant: Policy) -> None:
    together = played_once(variant)
    # a schedule, or a composition, adds no ranking of its own
    for row in (1, 2) if variant.name and variant == small(type(variant)) else (1,):
        alone = two_turns(shared(), variant, only=row, short=True)
        assert together.rollouts[row].ids.tolist() == alone.rollouts[0].ids.tolist()
        assert torch.equal(together.rollouts[row].evicted_at, alone.rollouts[0].evicted_at)
        assert together.logprobs[row] == pytest.approx(alone.logprobs[0], abs=1e-11)


def test_the_same_run_twice_is_the_same(policy: Policy) -> None:
    first = played_once(policy)
    torch.rand(1)  # or a policy that seeds the generator would leave it as it was after the first run
    random_state = torch.get_rng_state()
    again = two_turns(shared(), policy, short=True)
    assert first.logprobs == again.logprobs
    for a, b in zip(first.rollouts, again.rollouts, strict=True):
        assert torch.equal(a.evicted_at, b.evicted_at)
    assert torch.equal(torch.get_rng_state(), random_state), "draws derive from seeds, never from the global generator"


def test_caches_that_share_a_policy_object_share_nothing_else(policy: Policy) -> None:
    loaded, texts = shared(), prompts(40, 33)
    apart = []
    for row, text in enumerate(texts):
        evicting = new_cache(loaded, replace(policy), [row])
        apart.append([feed(loaded, evicting, [text[:30]]), feed(loaded, evicting, [text[30:]])])
    caches = [new_cache(loaded, policy, [row]) for row in range(2)]
    first = [feed(loaded, c, [text[:30]]) for c, text in zip(caches, texts, strict=True)]
    second = [feed(loaded, c, [text[30:]]) for c, text in zip(caches, texts, strict=True)]
    for row in range(2):
        assert torch.equal(apart[row][0], first[row])
        assert torch.equal(apart[row][1], second[row])


# --- a verifier finds nothing in what was recorded: here, because these plays are those of above --------------------


def scheduled_by(policy: Policy) -> object:
    """What a ledger is held to by counting, whatever the policy ranks by."""
    quantiser = quantiser_of(policy)
    return record_of(policy), schedule_of(policy), shape_of(policy), None if quantiser is None else quantiser.canonical


def on(policies: Sequence[Policy]) -> list[tuple[Policy, str]]:
    """Policies on a plain model, and those that ask a model for the same beside a layer with a window of its own."""
    beside = set(policies_for("asking", small_policies()))
    return [*((p, "llama-gqa") for p in policies), *((p, "gemma3") for p in policies if p in beside)]


def plays(played: Sequence[tuple[Policy, str]]) -> list[Any]:
    """Plays as parameters, slow where the conformance suite has them so."""
    return [
        pytest.param(policy, name, id=f"{policy_id(policy)}-{name}", marks=[pytest.mark.slow] * (policy in further()))
        for policy, name in played
    ]


SCHEDULED = on(one_of_each(policies_for("variant", small_policies()), scheduled_by))
COMPRESSED = on([policy for policy in policies_for("compressed", small_policies()) if policy.replayable])


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> None:
    """Skip a play of the registered policies where those of a file are under test."""
    if request.config.getoption("policy_file"):
        pytest.skip("plays the registered policies")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("played", "model"), plays(SCHEDULED))
def test_no_ledger_of_our_sampler_breaks_its_policy_s_rules(played: Policy, model: str) -> None:
    plans = layer_plans(shared(model).model.config, played)
    for rollout in played_once(played, model).rollouts:
        assert eviction_breach(rollout, plans) is None
        assert quantisation_breach(rollout, played) is None


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("played", "model"), plays(COMPRESSED))
def test_a_policy_chooses_its_own_victims_again(played: Policy, model: str) -> None:
    loaded, rotary = shared(model), find_rotary(shared(model).model, played)
    # where rows draw by their keys, members of a group share that of their prompt
    seeded = evictor_of(played).seeded
    rollouts = (
        two_turns(loaded, played, group=2, lengths=(40, 9), short=True) if seeded else played_once(played, model)
    ).rollouts
    made = [repeat_choices(loaded.model, rollout, played, rotary) for rollout in rollouts]
    assert [one.repeated for one in made] == [one.evicted for one in made]
    assert made[0].evicted > 0
