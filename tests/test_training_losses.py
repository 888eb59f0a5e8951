"""Losses as literal numbers, and their gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvaudit.audit.training.batch import earned_groups
from kvaudit.audit.training.corrections import Correction
from kvaudit.audit.training.losses.base import (
    BatchRewards,
    LossInputs,
    StepCounts,
    best_and_worst,
    clipped_surrogate,
    full_kl,
    generalised_advantages,
    group_advantages,
    k3,
    overlong_penalty,
)
from kvaudit.audit.training.losses.published import Dapo, DrGrpo, Grpo, Gspo, OnlineDpo

RATIOS = torch.tensor([[1.3, 1.0], [0.7, 1.0]])
MASK = torch.tensor([[True, True], [True, False]])


def inputs(
    ratios: torch.Tensor = RATIOS,
    mask: torch.Tensor = MASK,
    *,
    weights: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    **options: object,
) -> LossInputs:
    """Two rollouts with advantages +1 and -1, old log-probs 0, weights 1."""
    plain = LossInputs(
        logprobs=ratios.log().requires_grad_(),
        correction=Correction(
            weights=torch.ones_like(ratios) if weights is None else weights,
            keep=mask if keep is None else keep,
            old_logprobs=torch.zeros_like(ratios),
            metrics={},
        ),
        advantages=torch.tensor([[1.0], [-1.0]]) * mask,
        mask=mask,
        group=2,
        counts=StepCounts(rows=2, tokens=int(mask.sum()), pairs=1, max_tokens=4),
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    return replace(plain, **options)


def test_grpo_averages_tokens_within_a_rollout_then_rollouts() -> None:
    outputs = Grpo()(inputs())
    # row 0: (min(1.3, 1.2) + 1) / 2 = 1.1; row 1: min(-.7, -.8) = -.8
    assert outputs.loss.item() == pytest.approx(-(1.1 - 0.8) / 2)
    assert outputs.metrics == {"clipped": 2.0}


def test_dr_grpo_divides_by_a_constant() -> None:
    assert DrGrpo()(inputs()).loss.item() == pytest.approx(-(1.2 + 1.0 - 0.8) / (2 * 4))


def test_the_upper_clip_bound_is_its_own() -> None:
    outputs = Grpo()(inputs(epsilon_high=0.28))
    assert outputs.loss.item() == pytest.approx(-((1.28 + 1.0) / 2 - 0.8) / 2)


def test_clipping_never_hides_a_worse_outcome() -> None:
    ratio = torch.tensor([[0.5, 2.0], [0.5, 2.0]])
    gain = clipped_surrogate(ratio, torch.tensor([[1.0], [-1.0]]), 0.2, 0.2)
    torch.testing.assert_close(gain, torch.tensor([[0.5, 1.2], [-0.8, -2.0]]))


def test_grpo_gradient_at_ratio_one_is_minus_advantage_over_length_and_rows() -> None:
    given = inputs(torch.ones(2, 2))
    Grpo()(given).loss.backward()
    torch.testing.assert_close(given.logprobs.grad, torch.tensor([[-0.25, -0.25], [0.5, 0.0]]))


def test_correction_weights_scale_a_tokens_gradient() -> None:
    given = inputs(torch.ones(2, 2), weights=torch.tensor([[2.0, 0.5], [1.0, 1.0]]))
    Grpo()(given).loss.backward()
    torch.testing.assert_close(given.logprobs.grad, torch.tensor([[-0.5, -0.125], [0.5, 0.0]]))


def test_a_token_that_is_not_kept_has_no_gradient_but_still_counts_in_the_length() -> None:
    given = inputs(torch.ones(2, 2), keep=torch.tensor([[True, False], [True, False]]))
    Grpo()(given).loss.backward()
    torch.testing.assert_close(given.logprobs.grad, torch.tensor([[-0.25, 0.0], [0.5, 0.0]]))


def test_a_rollout_without_sampled_tokens_adds_nothing() -> None:
    outputs = Grpo()(inputs(mask=torch.tensor([[True, True], [False, False]])))
    assert outputs.loss.item() == pytest.approx(-1.1 / 2)


def test_k3_is_the_ratio_minus_its_log_minus_one() -> None:
    value = k3(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
    assert value.item() == pytest.approx(0.5 - math.log(0.5) - 1)


def test_k3_as_a_loss_pulls_to_the_reference_while_the_log_ratio_does_not() -> None:
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    policy = logits.log_softmax(0)
    expected = (policy.exp().detach() * k3(policy, reference.log())).sum()
    (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    torch.testing.assert_close(gradient, policy.exp().detach() - reference)  # that of KL(ref || pi)
    plain = (policy.exp().detach() * (policy - reference.log())).sum()
    (useless,) = torch.autograd.grad(plain, logits)
    torch.testing.assert_close(useless, torch.zeros(3, dtype=torch.float64))


def test_beta_weighs_the_kl_like_the_policy_term() -> None:
    reference = torch.log(torch.tensor([[0.5, 1.0], [2.0, 1.0]]))
    given = inputs(torch.ones(2, 2), beta=0.1, ref_logprobs=reference, advantages=torch.zeros(2, 2))
    outputs = Grpo()(given)
    first, second = 0.5 + math.log(2) - 1, 2 - math.log(2) - 1
    assert outputs.loss.item() == pytest.approx(0.1 * (first / 2 + second) / 2)
    assert outputs.metrics["kl_ref"] == pytest.approx(first + second)


def test_full_kl_is_exact_and_leaves_the_teacher_alone() -> None:
    student = torch.tensor([0.5, 0.5]).log().requires_grad_()
    teacher = torch.tensor([0.25, 0.75]).log().requires_grad_()
    value = full_kl(student, teacher)
    value.backward()
    assert value.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    # d KL / d logit_v = p_v (log p_v/q_v - KL)
    wanted = 0.5 * (math.log(2) - value.item())
    torch.testing.assert_close(student.grad, torch.tensor([wanted, -wanted]))
    assert teacher.grad is None


def test_distillation_is_added_with_its_weight() -> None:
    given = inputs(
        torch.ones(2, 2), advantages=torch.zeros(2, 2), distill_weight=0.1, distill_kl=torch.full((2, 2), 3.0)
    )
    outputs = Grpo()(given)
    assert outputs.loss.item() == pytest.approx(0.3)
    assert outputs.metrics["distill_kl"] == pytest.approx(9.0)


def test_a_group_that_earned_nothing_is_no_teacher() -> None:
    rewards, graded = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 1.0]), torch.tensor([True, True, True, True, True, False])
    assert earned_groups(rewards, graded, 2).tolist() == [False, False, True, True, False, False]


def test_advantages_are_standardised_within_a_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    graded = torch.ones(8, dtype=torch.bool)
    third = math.sqrt(3) / 3
    wanted = torch.tensor([math.sqrt(3), -third, -third, -third, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(group_advantages(rewards, graded, 4, by_std=True), wanted)


def test_advantages_without_std_are_centred_rewards() -> None:
    rewards, graded = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.ones(4, dtype=torch.bool)
    wanted = torch.tensor([0.75, -0.25, -0.25, -0.25])
    torch.testing.assert_close(group_advantages(rewards, graded, 4, by_std=False), wanted)


def test_an_ungraded_rollout_has_no_advantage_and_moves_no_mean() -> None:
    rewards, graded = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([True, True, False])
    torch.testing.assert_close(group_advantages(rewards, graded, 3, by_std=True), torch.tensor([1.0, -1.0, 0.0]))


def rewarded(rewards: list[float], mask: torch.Tensor, group: int, **options: object) -> BatchRewards:
    return BatchRewards(torch.tensor(rewards), torch.ones(len(rewards), dtype=torch.bool), mask, group, **options)


def test_dapo_divides_by_all_sampled_tokens_of_the_step() -> None:
    assert Dapo()(inputs(epsilon_high=0.28)).loss.item() == pytest.approx(-(1.28 + 1.0 - 0.8) / 3)


def test_overlong_rollouts_pay_for_their_last_tokens() -> None:
    found = overlong_penalty(torch.tensor([80, 81, 90, 100, 120]), torch.tensor(100), 0.2)
    torch.testing.assert_close(found, torch.tensor([0.0, -0.05, -0.5, -1.0, -1.0]))


def test_gspo_clips_the_ratio_of_the_sequence_and_not_of_its_tokens() -> None:
    within = Gspo()(inputs(torch.tensor([[1.3, 1 / 1.3], [1.0, 1.0]])))
    assert within.metrics["clipped"] == 0
    beyond = Gspo()(inputs(torch.tensor([[1.5, 1.0], [1.0, 1.0]])))
    assert beyond.metrics["clipped"] == 2  # both tokens of the row: sqrt(1.5) is over 1.2
    assert beyond.loss.item() == pytest.approx(-(1.2 - 1.0) / 2)


def test_ppo_counts_time_in_sampled_tokens_and_pays_at_the_last() -> None:
    mask = torch.tensor([[True, False, True, False]])  # a tool spoke in between
    values = torch.tensor([[0.5, 9.0, 0.25, 9.0]])
    found = generalised_advantages(rewarded([1.0], mask, 1, values=values, discount=0.5, trace=0.5))
    last, first = 0.75, 0.5 * 0.25 - 0.5 + 0.25 * 0.75
    torch.testing.assert_close(found.advantages, torch.tensor([[first, 0.0, last, 0.0]]))
    torch.testing.assert_close(found.returns, torch.tensor([[first + 0.5, 0.0, 1.0, 0.0]]))


def test_the_best_and_the_worst_of_a_group_are_a_pair_and_equals_are_none() -> None:
    rewards, graded = torch.tensor([0.5, 1.0, 0.0, 1.0, 1.0, 1.0, 2.0, 0.0]), torch.ones(8, dtype=torch.bool)
    assert best_and_worst(rewards, graded, 4).tolist() == [0.0, 1.0, -1.0, 0.0, 0.0, 0.0, 1.0, -1.0]
    assert not best_and_worst(torch.ones(4), graded[:4], 4).any()
    assert not best_and_worst(rewards[:4], torch.tensor([True, False, False, False]), 4).any()


def test_a_preference_weighs_what_its_tokens_add_to_the_gradient_and_keeps_its_value() -> None:
    ratios, weights = torch.tensor([[2.0, 1.0], [0.5, 1.0]]), torch.tensor([[2.0, 0.0], [0.5, 1.0]])
    plain = inputs(ratios, beta=0.5, ref_logprobs=torch.zeros(2, 2))
    weighed = inputs(ratios, beta=0.5, ref_logprobs=torch.zeros(2, 2), weights=weights)
    losses = [OnlineDpo()(given).loss for given in (plain, weighed)]
    assert losses[0].item() == losses[1].item() == pytest.approx(math.log(1 + 0.5))  # sigma(.5 log 4) = 2/3
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(plain.logprobs.grad, 0.5 / 3 * torch.tensor([[-1.0, -1.0], [1.0, 0.0]]))
    torch.testing.assert_close(weighed.logprobs.grad, plain.logprobs.grad * weights)
