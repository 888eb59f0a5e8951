"""Validation while training, and alarms: what they say, and that training is the same with and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_world import by_parity, killed_and_resumed, play_for_parity, rows, same_bits, sha256, sharp, short, silent

from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training import grpo, rollouts
from kvaudit.audit.training.batch import training_items
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.validation import held_out
from kvaudit.core.alarms import ALARMS, active_alarms, alarm_numbers
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.spec_train import ValidationSpec

QUIET = {"mismatch/overlap_p5": 0.86, "mismatch/ess": 0.3, "mismatch/frac_sequences_vetoed": 0.2}
QUIET |= {"mismatch/frac_not_finite": 0.0, "frac_reward_zero_std": 0.5, "entropy": 0.1}


def watched(**more: Any) -> TrainConfig:
    plain = {"arm": "naive", "steps": 2, "group": 2, "save_every": 1, "ledger_every": 0}
    return short(**(plain | {"watch": {"every": 2, "items": 3, "suites": ["math", "refusal"]}} | more))


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


@pytest.fixture(scope="module")
def trained(base: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_parity(watched(), base, tmp_path_factory.mktemp("watched"))


@pytest.fixture(autouse=True)
def graded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "play", play_for_parity)


def test_a_checkpoint_is_the_same_with_validation_and_without(base: LoadedModel, trained: Path, tmp_path: Path) -> None:
    without = grpo.train(watched(watch=None), base, tmp_path, silent)
    assert sha256(trained / "model.safetensors") == sha256(without / "model.safetensors")
    own = [{k: v for k, v in row.items() if not k.startswith("validation/")} for row in rows(trained)]
    assert own == rows(without)


def test_validation_comes_when_it_is_due_in_both_views(trained: Path) -> None:
    found = [{key for key in row if key.startswith("validation/")} for row in rows(trained)]
    views = {f"validation/{view}/{of}" for view in ("dense", "compressed") for of in ("math", "refusal", "degenerate")}
    assert found == [set(), views | {"validation/overlap_p5", "validation/k3_kl"}]


def test_a_watched_run_that_was_killed_ends_with_the_same_bits(
    base: LoadedModel, trained: Path, tmp_path: Path
) -> None:
    assert same_bits(killed_and_resumed(watched(), base, tmp_path), trained)


def test_held_out_items_are_none_that_training_meets(base: LoadedModel) -> None:
    settings, count = watched(), base.chat.count_tokens
    met = training_items(settings, count)
    spec = ValidationSpec(every=1, items=3)
    own = held_out(settings, spec, count, met)
    assert len(own) == 6
    assert not {item.messages for _, item in own} & {item.messages for step in met for _, item in step}
    with pytest.raises(SpecError, match="the run trains on every item of suite math"):
        held_out(settings, spec, count, [own])


def test_suites_to_watch_are_known_and_named_once() -> None:
    with pytest.raises(UnknownName, match="maths"):
        watched(watch={"every": 1, "suites": ["maths"]})
    with pytest.raises(SpecError, match=r"train\.watch\.suites names math twice"):
        watched(watch={"every": 1, "suites": ["math", "math"]})


def test_a_patience_longer_than_the_training_is_refused() -> None:
    with pytest.raises(SpecError, match=r"'watch.patience' is 9, wanted at most the 2 steps of training"):
        watched(watch={"every": 1, "stop_on": ["ess"], "patience": 9})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("overlap_p5", {"mismatch/overlap_p5": 0.85}),
        ("ess", {"mismatch/ess": 0.29}),
        ("frac_sequences_vetoed", {"mismatch/frac_sequences_vetoed": 0.21}),
        ("frac_not_finite", {"mismatch/frac_not_finite": 0.01}),
        ("flat_rewards", {"frac_reward_zero_std": 0.51}),
        ("entropy", {"entropy": 0.09}),
    ],
)
def test_an_alarm_rings_beyond_its_bound_and_not_at_it(name: str, change: dict[str, float]) -> None:
    first = QUIET | {"entropy": 1.0}
    assert active_alarms(alarm_numbers(QUIET, first)) == []
    assert active_alarms(alarm_numbers(QUIET | change, first)) == [ALARMS[name]]


def test_numbers_that_are_missing_ring_no_alarm() -> None:
    assert active_alarms(alarm_numbers(dict.fromkeys(QUIET), dict.fromkeys(QUIET))) == []


def test_every_row_says_of_every_alarm_whether_it_rings(trained: Path) -> None:
    for row in rows(trained):
        said = {key.removeprefix("alarm/"): value for key, value in row.items() if key.startswith("alarm/")}
        assert set(said) == set(ALARMS)
        assert said["overlap_p5"] == int(row["mismatch/overlap_p5"] < 0.86)
