"""The contract of losses, corrections, arms and rewards: every one that a registry or a table holds is held to it.

Literal numbers stand in ``test_training_losses.py`` and ``test_training_corrections.py``; that each of these tests can
fail, in ``test_training_wrong.py``.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from suite_world import TOKENS, play, rows_from, words, write_rows
from torch import Tensor
from training_world import config, gradients, sampled, sharp

from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training import corrections
from kvaudit.audit.training.batch import Batch, gradient_steps
from kvaudit.audit.training.config import ARMS, get_arm
from kvaudit.audit.training.corrections import Correction, CorrectionRule
from kvaudit.audit.training.losses.base import LOSSES, BatchRewards, ClippedLoss, Loss, LossInputs, StepCounts
from kvaudit.audit.training.rewards.base import REWARDS, Reward, check_scores
from kvaudit.core.records import Grade, Item, Outcome
from kvaudit.suites.base import SUITES, Suite

MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
ADVANTAGES = torch.tensor([[1.0], [-1.0], [0.5]]) * MASK
WIDE = "streaming:budget=900"  # never binds
SMALL = {"suites": ["refusal"], "prompts_per_step": 2}  # answers of 12 tokens


def given(ratios: Tensor | None = None, **options: object) -> LossInputs:
    """A group of three rollouts of unlike length; ratios and weights 1 unless told otherwise, the reference agrees."""
    ratios = torch.ones(3, 3) if ratios is None else ratios
    plain = LossInputs(
        logprobs=ratios.log().requires_grad_(),
        correction=Correction(torch.ones(3, 3), MASK, torch.zeros(3, 3), {}),
        advantages=ADVANTAGES,
        mask=MASK,
        group=3,
        counts=StepCounts.of(ADVANTAGES, MASK, 3, 4),
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.1,
        ref_logprobs=torch.zeros(3, 3),
    )
    return replace(plain, **options)  # type: ignore[arg-type]


def gradient(loss: Loss, inputs: LossInputs) -> Tensor:
    (found,) = torch.autograd.grad(loss(inputs).loss, inputs.logprobs)
    return found


@pytest.fixture(params=LOSSES.all().values(), ids=LOSSES.all())
def loss(request: pytest.FixtureRequest) -> Loss:
    found: Loss = request.param()
    return found


@pytest.fixture(
    params=[found for found in LOSSES.all().values() if issubclass(found, ClippedLoss)], ids=lambda found: found.name
)
def clipped(request: pytest.FixtureRequest) -> Loss:
    found: Loss = request.param()
    return found


def test_a_loss_raises_what_was_better_than_its_group_and_lowers_what_was_worse(loss: Loss) -> None:
    pull = -gradient(loss, given()) * ADVANTAGES
    assert (pull[MASK] > 0).all()
    assert (pull[~MASK] == 0).all()


def test_a_loss_says_what_a_rollout_was_worth_by_its_reward(loss: Loss) -> None:
    mask = MASK.repeat(2, 1)
    rewards, graded = torch.tensor([1.0, 0.0, 0.0, 2.0, 2.0, 2.0]), torch.tensor([True, True, False, True, True, True])
    known = mask & graded[:, None]
    found = loss.estimate(BatchRewards(rewards, graded, known, 3, torch.zeros(6, 3))).advantages
    assert (found[0, 0] > 0 > found[1, 0]) if not loss.critic else (found[0, 0] > found[1, 0])
    assert not found[~known].any()
    assert loss.critic or not found[3:].any()


def test_no_advantage_is_no_gradient(loss: Loss) -> None:
    assert not gradient(loss, given(advantages=torch.zeros(3, 3))).any()


def test_a_clipped_loss_is_linear_in_the_advantage(clipped: Loss) -> None:
    once, thrice = (gradient(clipped, given(advantages=ADVANTAGES * factor)) for factor in (1, 3))
    torch.testing.assert_close(thrice, 3 * once)


def test_the_clip_is_idle_where_sampler_and_learner_agree(loss: Loss) -> None:
    narrow, wide = (gradient(loss, given(epsilon_low=bound, epsilon_high=bound)) for bound in (0.01, 0.9))
    torch.testing.assert_close(narrow, wide, rtol=0, atol=0)


def test_a_loss_follows_the_weights_of_a_correction(loss: Loss) -> None:
    weights = torch.tensor([[2.0, 0.5, 1.0], [0.0, 3.0, 1.0], [0.1, 1.0, 1.0]])
    plain, weighed = (gradient(loss, given(correction=_correction(weights))) for weights in (torch.ones(3, 3), weights))
    torch.testing.assert_close(weighed, plain * weights)


def test_a_token_that_a_correction_drops_leaves_the_others_as_they_are(loss: Loss) -> None:
    keep = MASK & torch.tensor([[True, False, True], [False, True, True], [True, True, True]])
    dropped = gradient(loss, given(correction=_correction(torch.ones(3, 3), keep)))
    torch.testing.assert_close(dropped, gradient(loss, given()) * keep)


def _correction(weights: Tensor, keep: Tensor = MASK) -> Correction:
    return Correction(weights, keep, torch.zeros(3, 3), {})


def test_microbatches_of_a_loss_add_up(loss: Loss) -> None:
    mask, ratios = (
        MASK.repeat(2, 1),
        torch.tensor([[1.3, 1.0, 0.6], [0.7, 1.1, 1.0], [1.5, 1.0, 1.0], *[[0.9] * 3] * 3]),
    )
    advantages = torch.cat([ADVANTAGES, 2 * ADVANTAGES])
    whole = given(
        ratios,
        correction=Correction(torch.ones(6, 3), mask, torch.zeros(6, 3), {}),
        advantages=advantages,
        mask=mask,
        counts=StepCounts.of(advantages, mask, 3, 4),
        ref_logprobs=torch.full((6, 3), -0.2),
        distill_weight=0.3,
        distill_kl=torch.full((6, 3), 0.5),
    )
    parts = [loss(_rows(whole, rows)) for rows in ([0, 1, 2], [3, 4, 5])]
    together = loss(whole)
    torch.testing.assert_close(parts[0].loss + parts[1].loss, together.loss)
    for name, total in together.metrics.items():
        assert sum(part.metrics[name] for part in parts) == pytest.approx(total), name
    assert {"clipped", "kl_ref", "distill_kl"} <= set(together.metrics)


def _rows(whole: LossInputs, rows: list[int]) -> LossInputs:
    assert whole.ref_logprobs is not None
    assert whole.distill_kl is not None
    return replace(
        whole,
        logprobs=whole.logprobs[rows],
        correction=whole.correction.of(rows),
        advantages=whole.advantages[rows],
        mask=whole.mask[rows],
        ref_logprobs=whole.ref_logprobs[rows],
        distill_kl=whole.distill_kl[rows],
    )


@pytest.mark.parametrize("hostile", [float("-inf"), float("nan"), 1e30])
def test_values_in_the_padding_reach_neither_loss_nor_gradient(loss: Loss, hostile: float) -> None:
    values = torch.where(MASK, 0.1, hostile)
    inputs = given(ref_logprobs=values, distill_weight=0.1, distill_kl=values.clone())
    inputs = replace(inputs, logprobs=values.clone().requires_grad_())
    assert math.isfinite(loss(inputs).loss.item())
    assert torch.isfinite(gradient(loss, inputs)).all()


def test_a_reference_pulls_a_clipped_loss_towards_itself(clipped: Loss) -> None:
    for reference, wanted in ((-0.5, 1.0), (0.0, 0.0), (0.5, -1.0)):
        inputs = given(advantages=torch.zeros(3, 3), ref_logprobs=torch.full((3, 3), reference))
        assert (gradient(clipped, inputs).sign() == wanted * MASK).all()


def test_distillation_adds_to_a_loss_by_its_weight(loss: Loss) -> None:
    small, large = (
        loss(given(advantages=torch.zeros(3, 3), distill_weight=weight, distill_kl=torch.ones(3, 3))).loss.item()
        for weight in (0.1, 0.2)
    )
    assert large == pytest.approx(2 * small)
    assert small > 0


@pytest.fixture(params=corrections.CORRECTIONS.values(), ids=corrections.CORRECTIONS)
def rule(request: pytest.FixtureRequest) -> CorrectionRule:
    found: CorrectionRule = request.param
    return found


def test_a_correction_leaves_rollouts_of_the_learner_itself_as_they_are(rule: CorrectionRule) -> None:
    learner = torch.tensor([[-0.1, -2.0, -7.0], [-1.0, -0.5, 0.0], [-3.0, 0.0, 0.0]])
    result = rule(learner, learner.clone(), MASK)
    assert torch.equal(result.weights, MASK.float())
    assert torch.equal(result.keep, MASK)
    assert torch.equal(result.old_logprobs[MASK], learner[MASK])
    assert result.metrics == {"masked_tokens": 0.0, "rejected_sequences": 0.0}


def test_a_correction_stays_finite_and_inside_the_sampled_tokens(rule: CorrectionRule) -> None:
    learner, sampler = torch.tensor([[-120.0, -0.1, -1.0]] * 3), torch.tensor([[-0.1, -120.0, -1.0]] * 3)
    result = rule(learner, sampler, MASK)
    assert (torch.isfinite(result.weights) & (result.weights >= 0)).all()
    assert not result.weights[~MASK].any()
    assert not (result.keep & ~MASK).any()
    assert all(0.0 <= rate <= 1.0 for rate in result.metrics.values())


def test_a_correction_that_claims_to_be_local_gives_a_row_the_same_weights_alone(rule: CorrectionRule) -> None:
    whole = {corrections.CORRECTIONS[name] for name in corrections.NEEDS_WHOLE_BATCH}
    learner, sampler = torch.tensor([[0.3, 1.1, 6.0], [0.9, 1e-6, 1.6], [1.4, 1.0, 1.0]]).log(), torch.zeros(3, 3)
    together = rule(learner, sampler, MASK)
    alone = [rule(learner[[row]], sampler[[row]], MASK[[row]]).weights[0] for row in range(3)]
    assert rule in whole or all(torch.equal(alone[row], together.weights[row]) for row in range(3))


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


@pytest.fixture(scope="module")
def dense(base: LoadedModel) -> Batch:
    """Rollouts of an uncompressed cache."""
    return sampled(base, arm="dense", **SMALL)


def followed(base: LoadedModel, dense: Batch) -> Callable[[str], list[Tensor]]:
    """What arm dense would follow, by the name of the loss; worked out once for all arms."""
    return cache(lambda loss: gradients(base, dense, arm="dense", loss=loss))


@pytest.fixture(scope="module")
def wanted(base: LoadedModel, dense: Batch) -> Callable[[str], list[Tensor]]:
    return followed(base, dense)


@pytest.fixture(scope="module")
def unbound(base: LoadedModel) -> Batch:
    """Rollouts of a compressed cache whose budget never binds."""
    return sampled(base, arm="naive", policy=WIDE, **SMALL)


@pytest.fixture(scope="module")
def compressed(base: LoadedModel) -> Batch:
    return sampled(base, arm="naive", **SMALL | {"prompts_per_step": 4})  # two groups in each half


@pytest.fixture(params=ARMS)
def arm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_arm_says_what_it_is_and_names_a_correction(arm: str) -> None:
    assert get_arm(arm).name == arm
    assert get_arm(arm).summary
    assert get_arm(arm).correction in corrections.CORRECTIONS


def test_a_budget_that_never_binds_samples_dense_rollouts(dense: Batch, unbound: Batch) -> None:
    for one, other in zip(dense.rollouts, unbound.rollouts, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert (other.evicted_at == NEVER).all()


# every arm under one of the losses, and every loss under one of the arms: a correction is worked out before a loss
TOGETHER = list(
    dict.fromkeys([*zip(ARMS, itertools.cycle(LOSSES.all()), strict=False), *(("tis", one) for one in LOSSES.all())])
)


@pytest.mark.parametrize(("arm", "loss"), TOGETHER)
def test_dense_rollouts_make_an_arm_equal_to_dense(
    arm: str, loss: str, base: LoadedModel, unbound: Batch, wanted: Callable[[str], list[Tensor]]
) -> None:
    found = gradients(base, unbound, arm=arm, loss=loss, policy=WIDE)
    assert distance(found, wanted(loss)) < 1e-4  # the sampler's float32 and the learner's differ by 1e-5 nats


def test_microbatches_of_an_arm_add_up(arm: str, base: LoadedModel, compressed: Batch) -> None:
    limits = (10**6, 900)
    plans = [gradient_steps(compressed, config(arm=arm, microbatch_tokens=limit), 0) for limit in limits]
    assert [[len(rows) for rows in step.microbatches] for (step,) in plans] == [[8, 8], [4, 4, 4, 4]]
    whole, split = (gradients(base, compressed, arm=arm, microbatch_tokens=limit) for limit in limits)
    assert distance(split, whole) < 1e-5


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm of what is wanted."""
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in (found, wanted))
    return float((one - other).norm() / other.norm().clamp(min=1e-30))  # 0 where an arm rejects all there is


@pytest.fixture(params=sorted(REWARDS.all()))
def reward(request: pytest.FixtureRequest, classifier_folder: Path) -> Reward:
    """Every reward of the registry; one that goes by something wants a value here, by the name of its first field."""
    first = next((field.name for field in fields(REWARDS.get(request.param))), "")  # type: ignore[arg-type]
    value, options = {
        "": (None, {}),
        "judge": ("phrases", {}),
        "classifier": (str(classifier_folder), {"pays": "SAFE"}),
        "function": (f"{__name__}:grades", {}),
    }[first]
    return REWARDS.get(request.param).of(value, options)


def grades(played: Sequence[GradedRow]) -> list[float | None]:
    """A reward of somebody else's."""
    return [row.grade.score for row in played]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[GradedRow, GradedRow]]:
    """Some items of every registered suite, answered right and not at all."""
    with rows_from(write_rows(tmp_path_factory.mktemp("rows"))):
        asked = [
            (suite := cls(), suite.items("train", suite.item_count("train", 8, 1), 1, TOKENS, words))
            for cls in SUITES.all().values()
            if not cls.one_sided  # nobody trains on a pool
        ]
    return [
        (answered(suite, item, suite.gold(item)), answered(suite, item, [""]))
        for suite, items in asked
        for item in items
    ]


def answered(suite: Suite, item: Item, completions: Sequence[str]) -> GradedRow:
    transcript = play(suite, item, completions)
    return GradedRow(item, transcript, suite.grade(item, transcript), NOTHING, "stop", 5, 4, {}, 0, 0.1)


NOTHING = Rollout(torch.zeros(9), 5, torch.zeros(9), torch.zeros(9), torch.zeros(1, 1, 9), 0, 0, 1.0, answer_start=5)


def test_a_reward_is_more_for_the_gold_answer_than_for_none(
    reward: Reward, answers: list[tuple[GradedRow, GradedRow]]
) -> None:
    most, least = (check_scores(reward, reward.rewards(list(rows)), len(rows)) for rows in zip(*answers, strict=True))
    for (gold, _), high, low in zip(answers, most, least, strict=True):
        assert high is not None, gold.item.item_id
        assert low is not None, gold.item.item_id
        assert high > low >= 0, gold.item.item_id


def test_a_reward_is_none_where_nobody_could_grade(reward: Reward, answers: list[tuple[GradedRow, GradedRow]]) -> None:
    lost = replace(answers[0][0], grade=Grade(Outcome.UNSCORED, None), finish_reason="error")
    assert list(reward.rewards([lost])) == [None]


def test_a_reward_depends_on_what_was_played_alone(reward: Reward, answers: list[tuple[GradedRow, GradedRow]]) -> None:
    played = [row for pair in answers[::8] for row in pair]
    together = reward.rewards(played)
    assert together == pytest.approx(list(reward.rewards(played[::-1]))[::-1], rel=1e-5)
    assert together == pytest.approx([score for row in played for score in reward.rewards([row])], rel=1e-5)


def test_the_identity_of_a_reward_is_a_hash_that_stays(reward: Reward) -> None:
    again = copy.deepcopy(reward)
    assert re.fullmatch("[0-9a-f]{64}", reward.identity)
    assert again.identity == reward.identity
    assert reward.inputs == again.inputs
