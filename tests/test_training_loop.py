"""The training loop on a tiny random model: pairing, views, gradients, checkpoints."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from training_world import config, play_for_parity, rows, sampled, sha256, sharp, short, silent
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvaudit.audit.cache.ledger import NEVER, load_ledgers
from kvaudit.audit.sampling.conversations import play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model, locate
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.training import grpo, rollouts
from kvaudit.audit.training.batch import batch_rewards, deal_slots, gradient_steps, training_items
from kvaudit.audit.training.config import ARMS
from kvaudit.audit.training.learner import Learner, read_tokens
from kvaudit.core.records import Grade, Outcome
from kvaudit.suites.base import SUITES


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


class Trained(NamedTuple):
    """Every arm, trained for two steps, and what each asked its sampler for: items, seeds, decoding and group."""

    folders: dict[str, Path]
    asked: dict[str, list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def runs(base: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out, asked = tmp_path_factory.mktemp("arms"), dict[str, list[tuple[Any, ...]]]()

    def train(arm: str) -> Path:
        def watch(
            sampler: Sampler, questions: Any, decoding: Decoding, seeds: list[int], group: int, at_once: int
        ) -> Any:
            asked.setdefault(arm, []).append(([item.item_id for _, item in questions], seeds, decoding, group))
            return play_for_parity(sampler, questions, decoding, seeds, group=group, at_once=at_once)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollouts, "play", watch)
            return grpo.train(short(arm=arm, steps=2), base, out / arm, silent)

    return Trained({arm: train(arm) for arm in ARMS}, asked)


@pytest.fixture(scope="module")
def trained(runs: Trained) -> dict[str, Path]:
    return runs.folders


def test_two_arms_differ_in_the_arm_and_in_nothing_else(trained: dict[str, Path]) -> None:
    found = {arm: json.loads((path / "provenance.json").read_text()) for arm, path in trained.items()}
    configs = {arm: provenance["config"] for arm, provenance in found.items()}
    for arm, settings in configs.items():
        assert settings.pop("arm") == arm
    assert all(settings == configs["dense"] for settings in configs.values())
    assert len({provenance["base_sha256"] for provenance in found.values()}) == 1
    assert len({provenance["sha256"] for provenance in found.values()}) == len(ARMS)
    assert {provenance["updates"] for provenance in found.values()} == {2}


def test_all_arms_meet_the_same_items_with_the_same_seeds(runs: Trained) -> None:
    assert all(asked == runs.asked["dense"] for asked in runs.asked.values())
    first, second, final = runs.asked["dense"]
    assert not set(first[0]) & set(second[0])
    assert not set(first[1]) & set(second[1])
    assert final[0] == second[0]
    assert not set(final[1]) & (set(first[1]) | set(second[1]))


def test_compressed_arms_sample_the_same_first_rollouts(trained: dict[str, Path]) -> None:
    first = {arm: rows(path)[0] for arm, path in trained.items() if ARMS[arm].rollout == "compressed"}
    assert len({row["reward_mean"] for row in first.values()}) == 1
    assert len({row["length_mean"] for row in first.values()}) == 1


@pytest.mark.parametrize("arm", ARMS)
def test_a_learner_that_sees_what_the_sampler_saw_explains_it_and_no_other_does(
    arm: str, trained: dict[str, Path]
) -> None:
    sees_the_same = (ARMS[arm].rollout == "compressed") == (ARMS[arm].learner == "shadow")
    for row in rows(trained[arm]):
        if sees_the_same:
            assert row["mismatch/max_abs_gap"] <= 1e-5
            assert row["mismatch/k3_kl"] <= 1e-8
            assert row["mismatch/overlap_p5"] >= 0.9999
        else:
            assert row["mismatch/max_abs_gap"] > 0.5
            assert row["mismatch/k3_kl"] > 1e-2


def test_ledger_steps_certify_the_rollouts_of_every_arm(trained: dict[str, Path]) -> None:
    for path in trained.values():
        before, certified = rows(path)
        assert before["shadow/max_abs_gap"] is None
        assert certified["shadow/max_abs_gap"] <= 2e-5  # float32: processors round differently, one to 1.00136e-5


def test_telemetry_holds_every_key_and_no_nan(trained: dict[str, Path]) -> None:
    text = (trained["smd-distill"] / "telemetry.jsonl").read_text()
    assert "NaN" not in text
    row = json.loads(text.splitlines()[0])
    wanted = """step reward_mean reward_std frac_reward_zero_std length_mean loss grad_norm entropy clip_fraction kl_ref
        learner_tokens kv_bytes_peak kv_bytes_dense token_savings seconds_rollout seconds_learner seconds_shadow_check
        reward/refusal mismatch/kl mismatch/k3_kl mismatch/chi2_token mismatch/chi2_seq mismatch/ess
        mismatch/ess_clamped mismatch/max_abs_log_ratio mismatch/overlap_p5 mismatch/overlap_mean
        mismatch/frac_ratio_below_1e-4 mismatch/masked_tokens mismatch/max_abs_gap"""
    assert not set(wanted.split()) - set(row)
    assert row["distill_kl"] > 0
    assert 0 < row["token_savings"] < 1
    assert row["grad_variance"] > 0
    assert -1 <= row["grad_half_cosine"] <= 1


def test_ungraded_rollouts_are_counted(base: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        return [replace(row, grade=Grade(Outcome.UNSCORED, None)) for row in play(*args, **options)]

    monkeypatch.setattr(rollouts, "play", refuse)
    (row,) = rows(grpo.train(short(steps=1), base, tmp_path, silent))
    assert (row["frac_unscored"], row["reward_mean"], row["reward/refusal"], row["entropy"]) == (1.0, None, None, None)


def test_a_group_that_earns_nothing_is_not_distilled(
    base: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "play", play)  # a random model earns nothing from the suite's own grader
    (row,) = rows(grpo.train(short(steps=1, arm="smd-distill"), base, tmp_path / "1", silent))
    assert (row["reward_mean"], row["distill_kl"], row["grad_norm"]) == (0.0, 0.0, 0.0)
    settings = short(steps=1, arm="smd-distill", distill_where="everywhere")
    (anyway,) = rows(grpo.train(settings, base, tmp_path / "2", silent))
    assert anyway["grad_norm"] > 0


def test_either_view_can_be_the_teacher(base: LoadedModel) -> None:
    batch, found = sampled(base, **{"suites": ["refusal"], "prompts_per_step": 2}), []
    for teacher in ("shadow", "dense"):
        settings = config(arm="smd-distill", distill_towards=teacher, distill_where="everywhere")
        learner = Learner(copy.deepcopy(base.model), settings, None)
        with torch.no_grad():
            views = [read_tokens(learner.model, batch.rollouts, 4, view, 1.0) for view in ("dense", "shadow")]
            found.append(learner.distillation_kl(batch, views[1]))
        one, other = (view.distributions.logits(view.distributions.states).log_softmax(-1) for view in views)
        if teacher == "dense":
            one, other = other, one
        torch.testing.assert_close(found[-1][batch.sampled], (one.exp() * (one - other)).sum(-1))
    assert (found[0] - found[1]).abs().max() > 0.1


def test_several_updates_keep_the_old_policy_and_meet_the_clip(
    base: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "play", play_for_parity)
    settings = short(steps=1, updates_per_batch=3, learning_rate=0.05, warmup_steps=0)
    (row,) = rows(grpo.train(settings, base, tmp_path, silent))
    assert row["clip_fraction"] > 0
    assert row["mismatch/max_abs_gap"] <= 1e-5
    assert json.loads((tmp_path / "provenance.json").read_text())["updates"] == 3


def test_minibatches_are_gradient_steps_of_their_own_and_meet_the_clip(
    base: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "play", play_for_parity)
    settings = short(steps=1, arm="naive-ratio", minibatches=2, learning_rate=0.05, warmup_steps=0)
    (row,) = rows(grpo.train(settings, base, tmp_path, silent))
    assert row["clip_fraction"] > 0
    assert json.loads((tmp_path / "provenance.json").read_text())["updates"] == 2


def test_minibatches_deal_every_group_out_once_and_otherwise_in_the_next_pass(base: LoadedModel) -> None:
    batch = sampled(base, prompts_per_step=4)
    plan = gradient_steps(batch, config(prompts_per_step=4, minibatches=2, updates_per_batch=2), 0)
    assert [sorted(plan[i].rows + plan[i + 1].rows) for i in (0, 2)] == [list(range(16))] * 2
    assert plan[0].rows != plan[2].rows
    assert plan == gradient_steps(batch, config(prompts_per_step=4, minibatches=2, updates_per_batch=2, arm="tis"), 0)


def test_a_group_whose_rewards_are_all_alike_is_sampled_again_with_other_seeds(
    base: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def watch(sampler: Sampler, questions: Any, decoding: Decoding, seeds: list[int], group: int, at_once: int) -> Any:
        asked.append(seeds)
        found = play(sampler, questions, decoding, seeds, group=group, at_once=at_once)
        if len(asked) == 1:
            found[0] = replace(found[0], grade=Grade(Outcome.DESIRED, 1.0))
        return found

    monkeypatch.setattr(rollouts, "play", watch)
    (row,) = rows(grpo.train(short(steps=1, resample=2, ledger_every=0), base, tmp_path, silent))
    assert row["groups_sampled_again"] == 2  # the second group, twice; the first had one reward
    assert [len(seeds) for seeds in asked] == [8, 4, 4]
    assert len({seed for seeds in asked for seed in seeds}) == 16


def test_length_costs_by_what_the_rollouts_own_suite_allows(
    base: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[int] = []

    def watch(batch: Any, values: Any, settings: Any, most: torch.Tensor) -> Any:
        allowed.extend(most.tolist())
        return batch_rewards(batch, values, settings, most)

    monkeypatch.setattr(grpo, "batch_rewards", watch)
    grpo.train(
        config(suites=["refusal", "math"], group=2, steps=1, overlong=0.2, ledger_every=0), base, tmp_path, silent
    )
    assert allowed == [SUITES.get(name)().max_new_tokens for name in ("refusal", "refusal", "math", "math")]
    assert allowed[0] < allowed[2]


def test_the_reference_is_the_base_model_under_the_learners_view(
    base: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "play", play_for_parity)
    first, second = rows(grpo.train(short(steps=2, beta=0.1), base, tmp_path, silent))
    assert first["kl_ref"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl_ref"] > 1e-6


def test_training_leaves_the_base_model_as_it_was(
    base: LoadedModel, trained: dict[str, Path], tiny_folder: Path
) -> None:
    fresh = sharp(tiny_folder).model.state_dict()
    assert all(torch.equal(weight, fresh[name]) for name, weight in base.model.state_dict().items())


def test_a_checkpoint_is_an_ordinary_hugging_face_folder(trained: dict[str, Path], base: LoadedModel) -> None:
    plain = AutoModelForCausalLM.from_pretrained(trained["smd"])
    ours = load_model(str(trained["smd"]))
    assert AutoTokenizer.from_pretrained(trained["smd"]).chat_template == base.chat.tokenizer.chat_template
    provenance = json.loads((trained["smd"] / "provenance.json").read_text())
    assert ours.sha256 == provenance["sha256"] != base.sha256
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(plain(ids).logits, ours.model(ids).logits, rtol=0, atol=1e-5)


def test_saved_ledgers_match_their_provenance(trained: dict[str, Path]) -> None:
    provenance = json.loads((trained["smd"] / "provenance.json").read_text())
    assert sorted(provenance["ledgers"]) == ["final.safetensors", "step-2.safetensors"]
    for name, digest in provenance["ledgers"].items():
        rollouts, policy = load_ledgers(trained["smd"] / "ledgers" / name, sha256=digest)
        assert (len(rollouts), policy.canonical) == (8, config().policy)


def test_final_rollouts_come_from_the_finished_weights_and_the_steps_do_not(trained: dict[str, Path]) -> None:
    model = load_model(str(trained["smd"])).model
    gaps = {}
    for name in ("step-2", "final"):
        rollouts = load_ledgers(trained["smd"] / "ledgers" / f"{name}.safetensors")[0]
        with torch.no_grad():
            replayed = read_tokens(model, rollouts, 4, "shadow", 1.0).logprobs
        recorded = torch.cat([rollout.sampler_logprobs[rollout.sampled] for rollout in rollouts])
        gaps[name] = float((recorded - replayed).abs().max())
    assert gaps["final"] < 1e-3
    assert gaps["step-2"] > 0.1


def test_dense_arms_keep_final_rollouts_of_an_uncompressed_cache(trained: dict[str, Path]) -> None:
    rollouts, policy = load_ledgers(trained["dense"] / "ledgers" / "final.safetensors")
    assert policy.canonical == "none"
    assert all(bool((rollout.evicted_at == NEVER).all()) for rollout in rollouts)


def test_final_rollouts_change_no_weight(
    base: LoadedModel, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "play", play_for_parity)
    without = grpo.train(short(steps=2, ledger_every=0), base, tmp_path, silent)
    assert not (without / "ledgers").exists()
    assert sha256(without / "model.safetensors") == sha256(trained["smd"] / "model.safetensors")


def test_suites_take_turns_by_their_weight() -> None:
    assert deal_slots([0.5, 0.25, 0.25], 8) == [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 1), (2, 1), (0, 3)]
    assert deal_slots([1.0, 0.0], 3) == [(0, 0), (0, 1), (0, 2)]


def test_another_seed_asks_other_questions(base: LoadedModel) -> None:
    asked = [
        {item.messages for step in training_items(config(seed=seed), base.chat.count_tokens) for _, item in step}
        for seed in (1, 2)
    ]
    assert not asked[0] & asked[1]


@pytest.mark.skipif(not (locate("embedded") / "model.safetensors").exists(), reason="no embedded weights in this tree")
@pytest.mark.parametrize("arm", ["naive", "smd"])
def test_the_embedded_model_trains_and_its_ledger_explains_it(arm: str, tmp_path: Path) -> None:
    settings = config(arm=arm, suites=["refusal"], steps=2, context_tokens=160, policy="snapkv:budget=96,window=16")
    first, second = rows(grpo.train(settings, load_model("embedded"), tmp_path, silent))
    gap = second["mismatch/max_abs_gap"]
    assert gap <= 1e-4 if arm == "smd" else gap > 1e-3
    assert second["shadow/k3_kl"] <= 1e-8
    assert first["reward_mean"] > 0
