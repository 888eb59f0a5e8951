"""What a training configuration refuses, and how it is told from another."""

from __future__ import annotations

from typing import Any

import pytest
from training_world import config, short

from kvaudit.audit.training.batch import suite_shares
from kvaudit.audit.training.config import StartConfig
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.spec_train import TrainSpec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 1}, "'group' is 1, wanted 2 or more"),
        ({"epsilon_low": 1.0}, "'epsilon_low' is 1.0, wanted less than 1"),
        ({"suites": []}, "wanted at least one suite, each once"),
        ({"suites": ["math", "math"]}, "wanted at least one suite, each once"),
        ({"weights": [1.0, 2.0]}, "wanted 1 numbers of 0 or more, one per suite"),
        ({"weights": [0.0]}, "wanted 1 numbers of 0 or more"),
        ({"loss": "gprc"}, "unknown loss 'gprc'"),
        ({"loss": "online-dpo", "beta": 0.0}, "needs a reference model, and 'beta' is 0"),
        ({"loss": "online-dpo", "group": 1}, "'group' is 1, wanted 2 or more"),
        ({"critic": {"trace": 0.5}}, "'critic' needs a loss with a value head (ppo), loss is 'grpo'"),
        ({"minibatches": 3}, "'minibatches' is 3, wanted a divisor of the 2 prompts of a step"),
        ({"policy": "streaming:budget=4,sink=4,window=8"}, "budget"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        config(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'math'\?"):
        config(suites=["maths"])
    with pytest.raises(UnknownName, match=r"Did you mean 'naive'\?"):
        config(arm="naives")


def test_the_hash_follows_every_field_and_no_spelling() -> None:
    assert config().hash == config(policy="streaming:window=8,sink=4,budget=96").hash
    assert config().hash == config(suites=("math",)).hash
    others = [config(arm="dense"), config(seed=2), config(steps=5), config(learning_rate=0.02), config(weights=[2])]
    assert len({config().hash, *(other.hash for other in others)}) == 6


def test_a_loss_brings_defaults_where_nothing_is_given() -> None:
    asked, told = config(loss="dapo"), config(loss="dapo", epsilon_high=0.2, resample=0)
    assert (asked.epsilon_low, asked.epsilon_high, asked.resample, asked.overlong) == (0.2, 0.28, 3, 0.2)
    assert (told.epsilon_high, told.resample) == (0.2, 0)
    assert (config().epsilon_high, config().resample, config(loss="online-dpo").beta) == (0.2, None, 0.1)


def test_a_null_stands_for_what_the_loss_brings_and_reads_back_as_it_was_written() -> None:
    silent, off = config(loss="dapo", overlong=None, resample=None), config(loss="dapo", overlong=0)
    assert silent.hash == config(loss="dapo").hash
    assert off.overlong == 0
    assert [type(one)(**one.to_json()).hash for one in (silent, off)] == [silent.hash, off.hash]


def test_a_checkpoint_names_its_loss_in_its_recipe() -> None:
    assert config(loss="gspo").recipe_summary()["loss"] == "gspo"


def test_fields_that_came_later_leave_the_hash_of_older_runs_alone() -> None:
    assert short(steps=3).hash == "ca2bc859bb47"
    assert not {"minibatches", "resample", "overlong", "critic"} & set(config().to_json())
    assert config(minibatches=2).hash != config().hash


def test_shares_are_relative() -> None:
    assert suite_shares(config(suites=["math", "refusal"])) == (0.5, 0.5)
    assert suite_shares(config(suites=["math", "refusal"], weights=[1, 3])) == (0.25, 0.75)


def test_a_warm_start_keeps_its_hash_so_that_one_from_before_can_be_gone_on_with() -> None:
    """What a later field adds to ``StartConfig`` must be left out of its JSON while it has its default."""
    section = TrainSpec(arms=["smd"], seeds=[1], policy="none", suites=["math"], sft={"steps": 3})
    assert StartConfig.of(section, 1).hash == "4befad2f0296"
