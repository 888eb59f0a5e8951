"""Training under a mixture: every group draws one policy, the same in every arm, and is replayed under it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rerun_world import verify
from training_world import POLICY, by_parity, killed_and_resumed, rows, same_bits, sharp, short

from kvaudit.audit.cache.ledger import load_ledgers
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.rerun.measure import checkpoint_rollouts
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.rollouts import group_policies
from kvaudit.core.errors import SpecError

MIXTURE = f"{POLICY}@2|int8|none"


def mixed(**more: Any) -> TrainConfig:
    plain = {"policy": MIXTURE, "steps": 2, "prompts_per_step": 4, "group": 2, "save_every": 1, "ledger_every": 1}
    return short(**(plain | more))


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


@pytest.fixture(scope="module")
def trained(base: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_parity(mixed(), base, tmp_path_factory.mktemp("mixed"))


def test_groups_draw_by_seed_step_and_place_in_the_shares_of_the_mixture() -> None:
    draws = [policy for step in range(200) for policy in group_policies(mixed(), step)]
    shares = [draws.count(part) / len(draws) for part in parse_policy(MIXTURE).draws]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.05)  # three standard errors of 800 draws
    assert group_policies(mixed(), 3) == group_policies(mixed(arm="naive"), 3)
    assert draws[:8] != [policy for step in (0, 1) for policy in group_policies(mixed(seed=2), step)]


def test_telemetry_and_ledgers_say_what_every_group_drew(trained: Path) -> None:
    policy = mixed().rollout_policy
    wanted = [group_policies(mixed(), step) for step in (0, 1)]
    assert [row["group_policies"] for row in rows(trained)] == [
        [policy.draws.index(p) for p in step] for step in wanted
    ]
    kept = [load_ledgers(path) for path in sorted((trained / "ledgers").glob("step-2--*"))]
    assert {named: len(own) // 2 for own, named in kept} == {p: wanted[1].count(p) for p in wanted[1]}
    assert len(kept) > 1


def test_every_group_is_replayed_under_the_policy_it_drew(trained: Path) -> None:
    assert max(row["shadow/max_abs_gap"] for row in rows(trained)) < 1e-3
    files = checkpoint_rollouts(trained)
    assert {recorded.policy for recorded in files} == set(group_policies(mixed(), 2))
    assert [verify(load_model(str(trained)), recorded).explained for recorded in files] == [True] * len(files)


def test_a_run_under_a_mixture_that_was_killed_ends_with_the_same_bits(
    base: LoadedModel, trained: Path, tmp_path: Path
) -> None:
    assert same_bits(killed_and_resumed(mixed(), base, tmp_path), trained)


def test_a_mixture_with_a_policy_that_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(SpecError, match="wanted a policy that can be replayed"):
        mixed(policy="none|streaming:budget=96,sink=4,window=8,reposition=true")
