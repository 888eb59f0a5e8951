"""A sweep: which arms a run has when they are trained under several policies, what they are called, how served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.training.config import TrainConfig
from kvaudit.core.errors import AuditError
from kvaudit.core.policy_names import folder_names
from kvaudit.core.spec import RunSpec, dump_spec, load_spec
from kvaudit.reports.verdict.comparison import comparison_of
from kvaudit.reports.verdict.drift import AMPLIFICATION, contrast_names

INT8, SNAPKV = NAMES.policy("int8"), NAMES.policy("snapkv:budget=112")


def spec(*, own: bool = False, **train: Any) -> RunSpec:
    section = {"arms": ["dense", "naive", "smd"], "seeds": [1, 2], "suites": ["math"], **train}
    served = {
        "policies": ["none", INT8, SNAPKV],
        "suites": ["refusal"],
        "context_tokens": [192],
        "own_policy_only": own,
    }
    return RunSpec.model_validate({"name": "sweep", "train": section, "evaluate": served}, context=NAMES)


def swept(**more: Any) -> RunSpec:
    return spec(policies=["int8", "snapkv:budget=112"], **more)


def names(run: RunSpec) -> list[str]:
    return list(dict.fromkeys(arm for arm, _ in run.arms))


def test_every_arm_is_trained_under_every_policy_and_dense_once() -> None:
    assert names(swept()) == ["dense", "naive_int8", "naive_snapkv-112", "smd_int8", "smd_snapkv-112"]
    assert len(swept().arms) == 10


def test_an_arm_may_be_trained_under_some_policies_only() -> None:
    assert names(swept(only={"smd": ["int8"]})) == ["dense", "naive_int8", "naive_snapkv-112", "smd_int8"]


def test_an_arm_of_a_sweep_is_the_training_run_of_that_policy_alone() -> None:
    alone, section = spec(policy="int8").train, swept().train
    assert alone is not None
    assert section is not None
    assert TrainConfig.of(section, "naive_int8", 2).to_json() == TrainConfig.of(alone, "naive", 2).to_json()
    assert TrainConfig.of(section, "dense", 2).rollout_policy.canonical == "none"


def test_a_written_sweep_reads_back_with_and_without_plugins(tmp_path: Path) -> None:
    run = swept(own=True, only={"smd": ["snapkv:budget=112"]})
    (tmp_path / "spec.yaml").write_text(dump_spec(run))
    assert load_spec(tmp_path / "spec.yaml", NAMES) == load_spec(tmp_path / "spec.yaml") == run
    assert names(load_spec(tmp_path / "spec.yaml")) == names(run)


def test_a_run_without_a_sweep_writes_nothing_of_one() -> None:
    row = spec(policy="int8").written()
    assert not {"policies", "only"} & set(row["train"])
    assert "own_policy_only" not in row["evaluate"]


def test_names_of_folders_differ_wherever_policies_do_and_say_little_else() -> None:
    texts = [
        "snapkv:budget=48,window=8",
        "snapkv:budget=48,window=4",
        "h2o:budget=9|none@3",
        "int8",
        "a:x=1/2",
        "a:x=1-2",
    ]
    found = folder_names(texts)
    assert list(found.values())[:4] == ["snapkv-48-window-8", "snapkv-48-window-4", "h2o-9-or-none-x3", "int8"]
    assert len(set(found.values())) == len(texts)
    (long,) = folder_names(["+".join(f"kivi{n}:bits=2" for n in range(30))]).values()
    assert len(long) == 48


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"policies": []}, "train.policies is empty; give one policy at least, or policy: alone"),
        ({"policies": ["int8", "int8:residual=0"]}, "train.policies names int8:residual=0,chunk=1024 twice"),
        ({"policies": ["int8"], "policy": "int8"}, "train has policy and policies; give policies alone"),
        ({"policies": ["streaming:budget=64,reposition=true"]}, "wanted a policy that can be replayed"),
        ({"policies": ["int8"], "only": {"tis": ["int8"]}}, "unknown arm in train.only 'tis'. Known: naive, smd"),
        ({"policies": ["int8"], "only": {"dense": ["int8"]}}, "unknown arm in train.only 'dense'"),
        ({"policies": ["int8"], "only": {"smd": ["fp8"]}}, "unknown policy in train.only.smd 'fp8"),
        ({"policies": ["int8"], "only": {"smd": []}}, "train.only.smd names no policy; leave the arm out"),
        ({"policy": "int8", "only": {"smd": ["int8"]}}, "train.only selects policies of a sweep for an arm; give"),
        ({"policies": ["kivi:bits=4"], "own": True}, "unknown policy of training in evaluate.policies 'kivi:bits=4"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_in_one_line(train: dict[str, Any], message: str) -> None:
    with pytest.raises(AuditError, match=message) as caught:
        spec(**train)
    assert "\n" not in str(caught.value)


def test_checkpoints_may_be_served_under_their_own_policy_and_none_alone() -> None:
    run = swept(own=True, only={"smd": ["int8"]})
    asked = {(unit.arm, unit.policy.canonical) for unit in grid(run)}
    own = {("naive_int8", INT8), ("naive_snapkv-112", SNAPKV), ("smd_int8", INT8)}
    assert asked == {(arm, "none") for arm in names(run)} | own | {("dense", INT8), ("dense", SNAPKV)}


def test_what_is_not_served_is_neither_missing_nor_contrasted() -> None:
    columns = {name: pd.Series(dtype=object) for name in ("arm", "suite", "policy", "judge", "context_tokens")}
    found = comparison_of(swept(own=True), pd.DataFrame(columns), {})
    own = {("naive_int8", INT8), ("smd_int8", INT8), ("naive_snapkv-112", SNAPKV), ("smd_snapkv-112", SNAPKV)}
    candidates = {(unit.arm, unit.policy) for unit in found.planned if unit.arm != "dense" and unit.policy != "none"}
    assert candidates == own
    assert {(arm, policy) for estimand, arm, policy in contrast_names(found) if estimand == "interaction"} == own
    assert found.trained_under == {
        "naive_int8": INT8,
        "naive_snapkv-112": SNAPKV,
        "smd_int8": INT8,
        "smd_snapkv-112": SNAPKV,
    }
    assert {(arm, policy) for estimand, arm, policy in contrast_names(found) if estimand == AMPLIFICATION} == own
