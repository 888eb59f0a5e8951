"""Two ranks of a unit train what one process does, and each holds half of the weights and of their moments.

Rank 1 is another process, which runs this file.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from training_world import POLICY, Killed, play_for_parity, rows, same_bits, sampled, sharp, short, silent

from kvaudit.audit.commands.run import RunOptions, plan_workers
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training import grpo, rollouts
from kvaudit.audit.training.checkpoint import Position, Resumable
from kvaudit.audit.training.config import ARMS, TrainConfig
from kvaudit.audit.training.learner import Learner, read_tokens
from kvaudit.audit.training.ranks import ALONE, RankGroup, _pack, _unpack
from kvaudit.core.errors import DataError, RunError, SpecError

ROUNDING = 2e-5  # of loss and gradient; float32, summed in another order
LOSSES = ("grpo", "ppo")
SUMS = (
    3e-4  # of the way that the weights went: where a gradient is near 0, Adam makes a step of what rounding left of it
)


def unit(arm: str, loss: str, **more: object) -> TrainConfig:
    return short(**({"arm": arm, "loss": loss, "group": 2, "steps": 2, "minibatches": 1 + (loss == "ppo")} | {
        "prompts_per_step": 4, "save_every": 1, "ledger_every": 2, "ranks": 2} | more))  # fmt: skip


MIXED = unit("smd", "grpo", policy=f"{POLICY}@2|int8|none", resample=1)
UNITS = [MIXED, unit("sparse-rl", "ppo")]
MORE = [unit(arm, loss) for arm in sorted(ARMS) for loss in LOSSES] + [unit("smd", "online-dpo")]
ADAPTER = {"rank": 4}
PART = "rank-1.safetensors"  # of a saved state
# microbatches of one row, of which the second rank has two more: the first makes up for them
UNLIKE: dict[str, object] = {"prompts_per_step": 5, "microbatch_tokens": 600, "minibatches": 1, "steps": 1}
GRADIENTS = [unit("smd", "ppo", **UNLIKE), unit("smd-distill", "online-dpo", adapter=ADAPTER, **UNLIKE)]
MORE_GRADIENTS = [
    unit(arm, loss, adapter=adapter, **UNLIKE)
    for arm in sorted(ARMS)
    for loss, adapter in (("gspo", ADAPTER), ("online-dpo", None))
] + [
    unit("smd", "dapo", gradient_checkpointing=True, watch={"every": 1, "items": 2}, beta=0.1, **UNLIKE),
    unit("tis", "dr_grpo", gradient_checkpointing=True, adapter=ADAPTER, **UNLIKE),
]


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


@pytest.fixture(scope="module")
def ranks(tiny_folder: Path) -> Iterator[RankGroup]:
    """The first of two; the other does what is asked of it here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
    other = subprocess.Popen([sys.executable, __file__, str(tiny_folder)], env=environment)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
    both = RankGroup(0, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "play", play_for_parity)
        yield both
    both.broadcast(None)
    assert other.wait(60) == 0
    dist.destroy_process_group()


def trained(config: TrainConfig, base: LoadedModel, out: Path, ranks: RankGroup) -> Path:
    with ranks.unit(config.to_json()):
        return grpo.train(config, base, out, silent, ranks=ranks)


def unlike(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs by more than rounding, but for bytes allocated: they are padded to the longest of a rank's rows."""
    assert one.keys() == other.keys()
    pairs = {key: (one[key], other[key]) for key in one if key != "kv_bytes_peak"}
    return {
        key: pair
        for key, pair in pairs.items()
        if not (
            pair[0] == pytest.approx(pair[1], rel=1e-3, abs=1e-5) if isinstance(pair[0], float) else pair[0] == pair[1]
        )
    }


@pytest.mark.parametrize(
    "config",
    [*UNITS, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)],
    ids=lambda one: f"{one.arm}-{one.loss}",
)
def test_two_ranks_train_what_one_does(
    config: TrainConfig, base: LoadedModel, tmp_path: Path, ranks: RankGroup
) -> None:
    alone = trained(config, base, tmp_path / "alone", ALONE)
    shared = trained(config, base, tmp_path / "shared", ranks)
    one, two = (load_file(folder / "model.safetensors") for folder in (alone, shared))
    start = {name: weight.detach() for name, weight in base.model.named_parameters()}
    way, apart = (sum((one[n] - other[n]).square().sum() for n in one) ** 0.5 for other in (start, two))
    assert apart < SUMS * way
    assert [unlike(*pair) for pair in zip(rows(alone), rows(shared), strict=True)] == [{}] * 2


def first_moments(state: Path) -> dict[str, torch.Tensor]:
    """A tenth of the clipped gradient of the first step, put together from what every rank has saved of it."""
    parts = [load_file(path) for path in (state / "tensors.safetensors", *sorted(state.glob("rank-*.safetensors")))]
    names = [name for name in parts[0] if name.startswith("exp_avg/")]
    assert names
    return {name: torch.cat([part[name] for part in parts]) for name in names}


@pytest.mark.parametrize(
    "config",
    [*GRADIENTS, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE_GRADIENTS)],
    ids=lambda one: f"{one.arm}-{one.loss}-{'adapter' if one.adapter else 'full'}",
)
def test_loss_and_gradient_of_ranks_are_those_of_one_process(
    config: TrainConfig, base: LoadedModel, tmp_path: Path, ranks: RankGroup
) -> None:
    found = []
    for name, group in (("alone", ALONE), ("shared", ranks)):

        def keep(_: int, __: int, row: Any, out: Path = tmp_path / name) -> None:
            found.append((row["loss"], first_moments(out / "state" / "step-000001"), row["learner_tokens"]))

        with group.unit(config.to_json()):
            grpo.train(config, base, tmp_path / name, keep, ranks=group)
    (loss, one, tokens), (other_loss, other, its_tokens) = found
    assert its_tokens == tokens  # of all ranks, though this one learnt from two of five groups
    apart, length = (torch.stack([(one[n] - k * other[n]).norm() for n in one]).norm() for k in (1, 0))
    assert length > 0
    assert apart < ROUNDING * length
    assert other_loss == pytest.approx(loss, rel=ROUNDING, abs=ROUNDING)


KILLED = unit("smd", "ppo", steps=2, ledger_every=1)


@pytest.fixture(scope="module")
def killed(base: LoadedModel, tmp_path_factory: pytest.TempPathFactory, ranks: RankGroup) -> Path:
    """What both ranks leave that are killed after the first of two steps; to be copied."""
    out = tmp_path_factory.mktemp("killed") / "smd"

    def die(_: int, __: int, ___: Any) -> None:
        raise Killed

    with pytest.raises(Killed), ranks.unit(KILLED.to_json()):
        grpo.train(KILLED, base, out, die, ranks=ranks)
    ranks.broadcast(None)
    return out


def test_ranks_that_were_killed_go_on_with_the_same_bits(
    base: LoadedModel, killed: Path, tmp_path: Path, ranks: RankGroup
) -> None:
    resumed = shutil.copytree(killed, tmp_path / "killed")
    for out in (tmp_path / "whole", resumed):
        trained(KILLED, base, out, ranks)
    assert same_bits(tmp_path / "whole", resumed)
    assert json.loads((resumed / "provenance.json").read_text())["config"]["ranks"] == 2


def test_a_rank_saves_half_of_the_weights_and_moments_and_goes_on_from_nothing_else(
    base: LoadedModel, killed: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(killed, tmp_path / "killed")
    state = out / "state" / "step-000001"
    saved = [load_file(state / name) for name in ("tensors.safetensors", PART)]
    own, other = (sum(t.numel() for name, t in part.items() if not name.startswith("critic/")) for part in saved)
    whole = 3 * sum(weight.numel() for weight in base.model.parameters())
    assert own + other == whole
    assert max(own, other) < 0.51 * whole
    (state / PART).write_bytes(b"changed")
    known = json.loads((state / "state.json").read_text())["parts"]
    assert known.keys() == {PART}
    resumed = Resumable(Learner(base.model, KILLED, None), RankGroup(1, 2))
    with pytest.raises(DataError, match=r"rank-1\.safetensors' is missing or does not have the sha256"):
        resumed.resume_rank(out, Position(step=1))


def test_an_idle_pass_takes_gradients_of_nothing(base: LoadedModel) -> None:
    batch = sampled(base)
    model = copy.deepcopy(base.model)
    Learner(model, unit("smd-distill", "ppo"), None).dummy_pass(batch)
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


def test_rows_passed_apart_say_what_a_shared_prompt_says(base: LoadedModel) -> None:
    batch = sampled(base)
    for view in ("dense", "shadow"):
        shared, apart = (read_tokens(base.model, batch.rollouts, 4, view, 1.0, whole_rows=own) for own in (False, True))
        assert (shared.logprobs - apart.logprobs).abs().max() < 1e-4
        # the last token of the longest row is predicted by the last column of its own
        assert int(apart.columns[1].max()) == max(len(rollout.ids) for rollout in batch.rollouts) - 2


def test_more_ranks_than_prompts_of_a_gradient_step_are_refused() -> None:
    with pytest.raises(SpecError, match="'ranks' is 3, wanted at most the 2 prompts of a gradient step"):
        unit("dense", "ppo", ranks=3)


def test_ranks_that_were_launched_are_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = SimpleNamespace(train=unit("dense", "grpo"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert plan_workers(RunOptions(), spec, None) == (1, None)
    with pytest.raises(SpecError, match="leave out --workers"):
        plan_workers(RunOptions(workers=2), spec, None)


def test_one_rank_leaves_the_hash_of_a_run_alone() -> None:
    assert "ranks" not in unit("dense", "grpo", ranks=1).to_json()


def unalike(base: LoadedModel) -> LoadedModel:
    """The same model with norms that an engine can tell apart; those of a fresh one are all ones."""
    model = copy.deepcopy(base.model)
    norms = [weight for weight in model.parameters() if weight.dim() == 1]
    with torch.no_grad():
        for n, weight in enumerate(norms):
            weight.mul_(1 + 0.001 * (n + 1))
    return replace(base, model=model, sha256="ba" * 32)


U4 = "openvino:KV_CACHE_PRECISION=u4,cache_size=0.05"
DRAWN = {
    "rollouts": U4,
    "policy": "none",
    "suites": ["math", "refusal"],
    "ledger_every": 1,
    "temperature": 1.5,
    "steps": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["full", "adapter"])
def test_every_rank_draws_its_share_from_an_engine_of_its_own(
    adapter: dict[str, int] | None, base: LoadedModel, tmp_path: Path, ranks: RankGroup
) -> None:
    pytest.importorskip("openvino_genai", reason="needs kvaudit[openvino]")
    config = unit("tis", "grpo", adapter=adapter, learning_rate=1e-3, **DRAWN)
    base = unalike(base)
    alone, shared = (rows(trained(config, base, tmp_path / str(own.count), own)) for own in (ALONE, ranks))
    for one, two in zip(alone, shared, strict=True):
        # float32, and rows in other batches: the same tokens, and what was said of them but for rounding
        assert one["reward_mean"] == two["reward_mean"]
        assert one["length_mean"] == two["length_mean"]
        assert one["engine/dense_rms"] == pytest.approx(two["engine/dense_rms"], rel=1e-2)
    assert shared[-1]["engine/dense_rms"] > 1e-3


def test_every_rank_s_engine_has_the_weights_of_the_step_whole(
    base: LoadedModel, tmp_path: Path, ranks: RankGroup
) -> None:
    pytest.importorskip("openvino_genai", reason="needs kvaudit[openvino]")
    exact = DRAWN | {"rollouts": U4.replace("u4", "f32")}
    config = unit("naive", "grpo", adapter=ADAPTER, learning_rate=1e-2, **exact)
    for row in rows(trained(config, unalike(base), tmp_path / "shared", ranks)):
        assert row["engine/dense_rms"] < 1e-4  # nats a token, of both ranks' rollouts, after every step


def test_ranks_replay_what_their_engines_stored(base: LoadedModel, tmp_path: Path, ranks: RankGroup) -> None:
    pytest.importorskip("openvino_genai", reason="needs kvaudit[openvino]")
    config, base = unit("smd", "grpo", learning_rate=1e-3, **DRAWN), unalike(base)
    alone, shared = (rows(trained(config, base, tmp_path / str(own.count), own)) for own in (ALONE, ranks))
    for one, two in zip(alone, shared, strict=True):
        assert two["engine/replay_rms"] < 1e-4
        assert two["engine/dense_rms"] > 1e-3
        assert one["length_mean"] == two["length_mean"]
        for name in ("reward_mean", "loss", "grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-2)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, ("KVAUDIT_RAN", "1")


@pytest.mark.parametrize(
    "sent", [Runs(), os.path.join, Path.unlink, subprocess.Popen], ids=["call", "function", "method", "class"]
)
def test_what_another_rank_sends_is_data_or_refused(sent: object) -> None:
    with pytest.raises(RunError, match="another rank sent something that is not data"):
        _unpack(_pack({"rewards": [sent]}))


def main(folder: str) -> None:
    """Be rank 1."""
    torch.set_num_threads(1)
    rollouts.play = play_for_parity
    dist.init_process_group("gloo")
    both, base = RankGroup(1, 2), sharp(Path(folder))
    while (config := both.receive()) is not None:
        known = TrainConfig(**config)
        run = grpo.TrainingRun(known, unalike(base) if known.rollouts else base, Path(folder), both)
        try:
            both.follow_rank0(run)
        finally:
            run.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
