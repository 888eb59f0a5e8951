"""Each test of the contract of losses, corrections, arms and rewards fails a plug-in that is wrong in one way."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import test_training_contract as contract
import torch
from torch import Tensor
from training_world import sampled, sharp

from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training import config, corrections, grpo
from kvaudit.audit.training.batch import Batch
from kvaudit.audit.training.config import ARMS, Arm
from kvaudit.audit.training.corrections import CORRECTIONS, Correction, CorrectionRule, no_correction
from kvaudit.audit.training.losses.base import BatchRewards, Estimate, Loss, LossInputs, LossOutputs, clipped_surrogate
from kvaudit.audit.training.losses.published import Grpo
from kvaudit.audit.training.rewards.base import Reward, Scores, SuiteGrade
from kvaudit.core.plugins import sha256_of

Check = Callable[..., None]


class SignFlipped(Grpo):
    def gain(self, ratio: Tensor, inputs: LossInputs) -> Tensor:
        return -super().gain(ratio, inputs)


class PaysAll(Grpo):
    def estimate(self, given: BatchRewards) -> Estimate:
        return Estimate(given.rewards[:, None] * given.mask)


class PullsAnyway(Grpo):
    def gain(self, ratio: Tensor, inputs: LossInputs) -> Tensor:
        return super().gain(ratio, inputs) + 0.1 * ratio


class ClipsTheSamplersOwn(Grpo):
    def gain(self, ratio: Tensor, inputs: LossInputs) -> Tensor:
        return clipped_surrogate(1.5 * ratio, inputs.advantages, inputs.epsilon_low, inputs.epsilon_high)


class IgnoresWeights(Grpo):
    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return super().__call__(replace(inputs, correction=inputs.correction._replace(weights=torch.ones(3, 3))))


class CountsKeptTokens(Grpo):
    def share(self, inputs: LossInputs) -> Tensor:
        return 1.0 / (inputs.correction.keep.sum(dim=1, keepdim=True).clamp(min=1) * inputs.counts.rows)


class CountsItsMicrobatch(Grpo):
    def share(self, inputs: LossInputs) -> Tensor:
        return super().share(replace(inputs, counts=inputs.counts._replace(rows=len(inputs.mask))))


class ReadsPadding(Grpo):
    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio = (inputs.logprobs - inputs.correction.old_logprobs).exp()
        return LossOutputs(-(ratio * inputs.advantages * inputs.mask).sum(), {})


class ForgetsTheReference(Grpo):
    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return super().__call__(replace(inputs, ref_logprobs=None))


class ForgetsDistillation(Grpo):
    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return super().__call__(replace(inputs, distill_kl=None))


def halved(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    plain = no_correction(learner, sampler, mask)
    return plain._replace(weights=plain.weights / 2)


def unclamped(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    return no_correction(learner, sampler, mask)._replace(weights=(learner - sampler).exp() * mask)


def shared(learner: Tensor, sampler: Tensor, mask: Tensor) -> Correction:
    ratios = corrections.token_ratios(learner, sampler, mask)
    return no_correction(learner, sampler, mask)._replace(weights=ratios * mask / ratios[mask].mean())


@dataclass(frozen=True)
class TurnedRound(SuiteGrade):
    def rewards(self, played: Sequence[GradedRow]) -> Scores:
        return [None if score is None else 1.0 - score for score in super().rewards(played)]


@dataclass(frozen=True)
class ZeroForUngraded(SuiteGrade):
    def rewards(self, played: Sequence[GradedRow]) -> Scores:
        return [score or 0.0 for score in super().rewards(played)]


@dataclass(frozen=True)
class AgainstTheOthers(SuiteGrade):
    def rewards(self, played: Sequence[GradedRow]) -> Scores:
        return [(score or 0.0) / len(played) for score in super().rewards(played)]


@dataclass(frozen=True)
class AnotherEveryTime(SuiteGrade):
    @property
    def identity(self) -> str:
        return sha256_of(time.perf_counter_ns())


LOSSES: list[tuple[Check, type[Loss]]] = [
    (contract.test_a_loss_raises_what_was_better_than_its_group_and_lowers_what_was_worse, SignFlipped),
    (contract.test_a_loss_says_what_a_rollout_was_worth_by_its_reward, PaysAll),
    (contract.test_no_advantage_is_no_gradient, PullsAnyway),
    (contract.test_a_clipped_loss_is_linear_in_the_advantage, PullsAnyway),
    (contract.test_the_clip_is_idle_where_sampler_and_learner_agree, ClipsTheSamplersOwn),
    (contract.test_a_loss_follows_the_weights_of_a_correction, IgnoresWeights),
    (contract.test_a_token_that_a_correction_drops_leaves_the_others_as_they_are, CountsKeptTokens),
    (contract.test_microbatches_of_a_loss_add_up, CountsItsMicrobatch),
    (contract.test_values_in_the_padding_reach_neither_loss_nor_gradient, ReadsPadding),
    (contract.test_a_reference_pulls_a_clipped_loss_towards_itself, ForgetsTheReference),
    (contract.test_distillation_adds_to_a_loss_by_its_weight, ForgetsDistillation),
]
RULES: list[tuple[Check, CorrectionRule]] = [
    (contract.test_a_correction_leaves_rollouts_of_the_learner_itself_as_they_are, halved),
    (contract.test_a_correction_stays_finite_and_inside_the_sampled_tokens, unclamped),
    (contract.test_a_correction_that_claims_to_be_local_gives_a_row_the_same_weights_alone, shared),
]
WRONG_ARMS: list[tuple[Check, Arm]] = [
    (contract.test_an_arm_says_what_it_is_and_names_a_correction, Arm("x", "compressed", "dense", "lost", False, "x")),
    (contract.test_dense_rollouts_make_an_arm_equal_to_dense, Arm("x", "compressed", "dense", "halved", False, "x")),
    (contract.test_microbatches_of_an_arm_add_up, Arm("x", "compressed", "dense", "shared", False, "x")),
]
REWARDS: list[tuple[Check, type[Reward]]] = [
    (contract.test_a_reward_is_more_for_the_gold_answer_than_for_none, TurnedRound),
    (contract.test_a_reward_is_none_where_nobody_could_grade, ZeroForUngraded),
    (contract.test_a_reward_depends_on_what_was_played_alone, AgainstTheOthers),
    (contract.test_the_identity_of_a_reward_is_a_hash_that_stays, AnotherEveryTime),
]
answers = contract.answers


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


@pytest.fixture(scope="module")
def batches(base: LoadedModel) -> dict[str, Batch]:
    """The contract's batches by the names of its fixtures."""
    dense, compressed = (sampled(base, arm=arm, prompts_per_step=4) for arm in ("dense", "naive"))
    return {"dense": dense, "unbound": dense, "compressed": compressed}


def hold(check: Check, **given: object) -> None:
    """One test of the contract, called as pytest would."""
    check(**{name: given[name] for name in inspect.signature(check).parameters})


@pytest.mark.parametrize(("check", "wrong"), LOSSES, ids=lambda value: value.__name__)
def test_a_wrong_loss_fails(check: Check, wrong: type[Loss]) -> None:
    with pytest.raises(AssertionError):
        hold(check, loss=wrong(), clipped=wrong(), hostile=float("nan"))


@pytest.mark.parametrize(("check", "wrong"), RULES, ids=lambda value: value.__name__)
def test_a_wrong_correction_fails(check: Check, wrong: CorrectionRule) -> None:
    with pytest.raises(AssertionError):
        hold(check, rule=wrong)


@pytest.mark.parametrize(("check", "wrong"), WRONG_ARMS, ids=lambda value: value.__name__ if callable(value) else "x")
def test_a_wrong_arm_fails(
    check: Check, wrong: Arm, base: LoadedModel, batches: dict[str, Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "ARMS", {**ARMS, wrong.name: wrong})
    monkeypatch.setattr(grpo, "CORRECTIONS", {**CORRECTIONS, "halved": halved, "shared": shared})
    wanted = contract.followed(base, batches["dense"])
    with pytest.raises(AssertionError):
        hold(check, arm=wrong.name, loss="grpo", base=base, wanted=wanted, **batches)


@pytest.mark.parametrize(("check", "wrong"), REWARDS, ids=lambda value: value.__name__)
def test_a_wrong_reward_fails(check: Check, wrong: type[Reward], answers: list[tuple[GradedRow, GradedRow]]) -> None:
    with pytest.raises(AssertionError):
        hold(check, reward=wrong(), answers=answers)


def test_a_budget_that_binds_is_seen(batches: dict[str, Batch]) -> None:
    with pytest.raises(AssertionError):
        contract.test_a_budget_that_never_binds_samples_dense_rollouts(batches["dense"], batches["compressed"])


def test_every_test_of_the_contract_has_a_wrong_plug_in_that_fails_it() -> None:
    proved = {check.__name__ for check, _ in (*LOSSES, *RULES, *WRONG_ARMS, *REWARDS)}
    checks = {name for name in vars(contract) if name.startswith("test_")}
    assert checks - proved == {"test_a_budget_that_never_binds_samples_dense_rollouts"}  # of the sampler; seen above
