"""A run killed anywhere and started again ends with the same bits; damage and foreign folders are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_world import Killed, play_for_parity, rows, sha256, sharp, short, silent

from kvaudit.audit.cache.ledger import load_ledgers
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training import checkpoint, grpo, rollouts
from kvaudit.audit.training.checkpoint import TelemetryLog
from kvaudit.audit.training.losses.base import LOSSES
from kvaudit.core.errors import DataError, RunError


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


@pytest.fixture(autouse=True)
def graded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "play", play_for_parity)


@pytest.fixture(scope="module")
def kept(base: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed, in ``whole``, and as a kill after each step finds it, in ``1`` to ``4``.

    A copy is what a killed process leaves: nobody flushes, closes or cleans up.
    """
    folder = tmp_path_factory.mktemp("kept")

    def keep(done: int, _: int, __: dict[str, Any]) -> None:
        shutil.copytree(folder / "whole", folder / str(done))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "play", play_for_parity)
        grpo.train(short(), base, folder / "whole", keep)
    return folder


@pytest.fixture
def whole(kept: Path) -> Path:
    return kept / "whole"


@pytest.fixture
def halfway(kept: Path, tmp_path: Path) -> Path:
    """A run killed after step 3, its last state being that of step 2."""
    return shutil.copytree(kept / "3", tmp_path / "smd")


def assert_same(found: Path, wanted: Path) -> None:
    assert rows(found) == rows(wanted)
    assert sha256(found / "model.safetensors") == sha256(wanted / "model.safetensors")
    for name in ("step-2.safetensors", "step-4.safetensors"):
        one, other = load_ledgers(found / "ledgers" / name)[0], load_ledgers(wanted / "ledgers" / name)[0]
        assert all(torch.equal(a.evicted_at, b.evicted_at) for a, b in zip(one, other, strict=True))
    assert sha256(found / "ledgers" / "final.safetensors") == sha256(wanted / "ledgers" / "final.safetensors")
    assert not list(found.rglob("*.partial"))
    assert not (found / "state").exists()


@pytest.mark.parametrize("step", ["1", "3", "4"])  # before any state, a step behind one, and at the last
def test_a_run_killed_after_any_step_ends_with_the_same_bits(
    step: str, base: LoadedModel, kept: Path, whole: Path, tmp_path: Path
) -> None:
    left = shutil.copytree(kept / step, tmp_path / "smd")
    assert len(rows(left)) == int(step)
    assert_same(grpo.train(short(), base, left, silent), whole)


def _die_at_state(patch: pytest.MonkeyPatch) -> None:
    """Killed with step 4's state written but not renamed: nobody is left to clean up."""
    rename = checkpoint.os.rename

    def stop(source: Path, target: Path) -> None:
        if Path(target).name == "step-000004":
            raise Killed
        rename(source, target)

    patch.setattr(checkpoint.os, "rename", stop)
    patch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)


def _die_at_telemetry(patch: pytest.MonkeyPatch) -> None:
    """Killed with half a line of step 3 on disk."""
    append = TelemetryLog.append

    def stop(log: TelemetryLog, row: dict[str, Any]) -> None:
        if row["step"] == 3:
            with log.path.open("ab") as file:
                file.write(b'{"step": 3, "rew')
            raise Killed
        append(log, row)

    patch.setattr(TelemetryLog, "append", stop)


def _die_at_provenance(patch: pytest.MonkeyPatch) -> None:
    """Killed with the weights in place and provenance.json not yet."""
    write = checkpoint.write_json

    def stop(path: Path, value: dict[str, Any]) -> None:
        if path.name == "provenance.json":
            raise Killed
        write(path, value)

    patch.setattr(checkpoint, "write_json", stop)


def _die_after_provenance(patch: pytest.MonkeyPatch) -> None:
    """Killed when the checkpoint is whole and the state it was resumed from is not gone yet."""

    def stop(_: Path) -> None:
        raise Killed

    patch.setattr(checkpoint, "drop_state", stop)


def _die_while_moving(patch: pytest.MonkeyPatch) -> None:
    """Killed with some of the finished files moved into place."""

    def stop(staged: Path, folder: Path) -> None:
        (staged / "config.json").rename(folder / "config.json")
        raise Killed

    patch.setattr(checkpoint, "move_into", stop)


def _die_at_final_ledger(patch: pytest.MonkeyPatch) -> None:
    """Killed with the last state saved and half of the final rollouts written."""
    save = checkpoint.save_ledgers

    def stop(path: Path, rollouts: Any, policy: Any) -> str:
        if path.name.startswith("final"):
            path.write_bytes(b"half")
            raise Killed
        return save(path, rollouts, policy)

    patch.setattr(checkpoint, "save_ledgers", stop)


@pytest.mark.parametrize(
    "death",
    [
        _die_at_final_ledger,
        _die_at_state,
        _die_at_telemetry,
        _die_at_provenance,
        _die_after_provenance,
        _die_while_moving,
    ],
)
def test_a_run_killed_while_writing_ends_with_the_same_bits(
    death: Callable[[pytest.MonkeyPatch], None], base: LoadedModel, whole: Path, halfway: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        death(patch)
        with pytest.raises(Killed):
            grpo.train(short(), base, halfway, silent)
    assert_same(grpo.train(short(), base, halfway, silent), whole)


@pytest.mark.parametrize("loss", sorted(set(LOSSES.all()) - {"grpo", "dr_grpo"}))  # those have no state of their own
def test_a_killed_run_of_any_loss_ends_with_the_same_bits(loss: str, base: LoadedModel, tmp_path: Path) -> None:
    settings = short(loss=loss, steps=2, save_every=1, ledger_every=0, minibatches=2)

    def die(done: int, _: int, __: Any) -> None:
        raise Killed

    whole = grpo.train(settings, base, tmp_path / "whole", silent)
    with pytest.raises(Killed):
        grpo.train(settings, base, tmp_path / "killed", die)
    killed = grpo.train(settings, base, tmp_path / "killed", silent)
    assert rows(killed) == rows(whole)
    assert sha256(killed / "model.safetensors") == sha256(whole / "model.safetensors")


@pytest.mark.slow  # a process of its own takes longer to start than to train; copies of the folder stand for it above
def test_a_process_killed_with_signal_nine_goes_on_where_it_was(
    base: LoadedModel, whole: Path, tmp_path: Path, tiny_folder: Path
) -> None:
    script = Path(__file__).with_name("training_world.py")
    environment = os.environ | {"PYTHONPATH": str(script.parents[1])}
    command = [sys.executable, str(script), str(tiny_folder), str(tmp_path / "run"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(rows(tmp_path / "run")) == 3
    assert_same(grpo.train(short(), base, tmp_path / "run", silent), whole)


def test_a_finished_checkpoint_is_not_trained_again(base: LoadedModel, whole: Path) -> None:
    stamp = (whole / "model.safetensors").stat().st_mtime_ns

    def progress(*_: Any) -> None:
        raise AssertionError("a step was taken")

    assert grpo.train(short(), base, whole, progress) == whole
    assert (whole / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_folder_of_another_configuration_is_refused_with_what_differs(base: LoadedModel, whole: Path) -> None:
    with pytest.raises(RunError, match="was trained with another learning_rate, steps"):
        grpo.train(short(steps=5, learning_rate=1e-3), base, whole, silent)


def test_a_folder_of_other_base_weights_is_refused(base: LoadedModel, whole: Path) -> None:
    with pytest.raises(RunError, match="from other base weights"):
        checkpoint.CheckpointFolder(whole, short(), "f" * 64)


def test_a_folder_of_something_else_is_refused(base: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match="is not empty"):
        grpo.train(short(), base, tmp_path, silent)


def test_a_changed_state_is_refused(base: LoadedModel, halfway: Path) -> None:
    path = halfway / "state" / "step-000002" / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    with pytest.raises(DataError, match="does not have the sha256 it was saved with"):
        grpo.train(short(), base, halfway, silent)


def test_a_state_of_another_make_is_refused(base: LoadedModel, halfway: Path) -> None:
    (halfway / "state" / "step-000002" / "state.json").write_text('{"step": 2}')
    with pytest.raises(DataError, match="does not have the keys of a training state"):
        grpo.train(short(), base, halfway, silent)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("step", value) for value in ("x", -1, 10**30, None, 1.5, [2])),
        *(("updates", value) for value in ("x", -1, 3, ["a"], True)),
        *(("telemetry_bytes", value) for value in ("x", -1, None, 1.5)),
        *(("ledgers", value) for value in (["a"], None, {"../../x": "y"}, {"a": ["b"]})),
        ("config_hash", "0" * 12),
    ],
)
def test_a_state_that_no_step_left_is_refused(key: str, value: Any, base: LoadedModel, halfway: Path) -> None:
    changed_state(halfway, **{key: value})
    with pytest.raises(DataError, match=r"state\.json'"):
        grpo.train(short(), base, halfway, silent)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"step": "\\xff"'])
def test_a_state_that_is_not_json_is_refused(text: str, base: LoadedModel, halfway: Path) -> None:
    (halfway / "state" / "step-000002" / "state.json").write_text(text)
    with pytest.raises(DataError, match="is not JSON"):
        grpo.train(short(), base, halfway, silent)


def test_a_state_without_readable_tensors_is_refused(base: LoadedModel, halfway: Path) -> None:
    path = halfway / "state" / "step-000002" / "tensors.safetensors"
    path.write_bytes(b"\xff" * 64)
    changed_state(halfway, sha256=sha256(path))
    with pytest.raises(DataError, match=r"tensors\.safetensors' is not a safetensors file"):
        grpo.train(short(), base, halfway, silent)


@pytest.mark.parametrize("change", [lambda moment: moment * float("nan"), lambda moment: moment.to(torch.float64)])
def test_an_optimiser_moment_that_is_nan_or_of_another_type_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], base: LoadedModel, halfway: Path
) -> None:
    path = halfway / "state" / "step-000002" / "tensors.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith("exp_avg/"))
    save_file(tensors | {name: change(tensors[name])}, path)
    changed_state(halfway, sha256=sha256(path))
    with pytest.raises(DataError, match="training state does not fit the model at 'exp_avg/"):
        grpo.train(short(), base, halfway, silent)


def changed_state(folder: Path, **values: Any) -> None:
    path = folder / "state" / "step-000002" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_claim_of_another_make_is_refused(base: LoadedModel, halfway: Path) -> None:
    (halfway / "training.json").write_text('{"format": 2}')
    with pytest.raises(DataError, match="is not of format 1"):
        grpo.train(short(), base, halfway, silent)


def test_a_lost_state_file_is_refused(base: LoadedModel, halfway: Path) -> None:
    (halfway / "state" / "step-000002" / "tensors.safetensors").unlink()
    with pytest.raises(DataError, match=r"has no tensors\.safetensors"):
        grpo.train(short(), base, halfway, silent)


def test_a_changed_ledger_is_refused(base: LoadedModel, halfway: Path) -> None:
    (halfway / "ledgers" / "step-2.safetensors").write_bytes(b"other")
    with pytest.raises(DataError, match=r"ledger .* is missing or was changed"):
        grpo.train(short(), base, halfway, silent)


def test_telemetry_that_two_processes_wrote_never_becomes_part_of_a_checkpoint(
    base: LoadedModel, halfway: Path
) -> None:
    def intrude(done: int, _: int, row: dict[str, Any]) -> None:
        if done == 4:
            TelemetryLog(halfway / "telemetry.jsonl").append(row)

    with pytest.raises(DataError, match="has step 4 where the end is expected: another process wrote to it too"):
        grpo.train(short(), base, halfway, intrude)
    assert not (halfway / "provenance.json").exists()


def test_a_state_whose_telemetry_is_out_of_order_is_refused(base: LoadedModel, halfway: Path) -> None:
    lines = (halfway / "telemetry.jsonl").read_bytes().splitlines(keepends=True)
    (halfway / "telemetry.jsonl").write_bytes(b"".join([lines[1], lines[0], lines[2]]))
    state = halfway / "state" / "step-000002" / "state.json"
    assert json.loads(state.read_text())["telemetry_bytes"] == len(lines[0] + lines[1])
    with pytest.raises(DataError, match="has step 2 where step 1 is expected"):
        grpo.train(short(), base, halfway, silent)


def test_a_changed_checkpoint_is_refused(base: LoadedModel, whole: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(whole, tmp_path / "copy")
    (copied / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"config\.json has sha256"):
        grpo.train(short(), base, copied, silent)


def test_a_full_disk_is_one_line_and_loses_nothing(
    base: LoadedModel, whole: Path, halfway: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint, "save_file", lambda tensors, path: full() if "000004" in str(path) else _save(tensors, path)
        )
        with pytest.raises(RunError, match=r"cannot write .*No space left on device.*run again to resume"):
            grpo.train(short(), base, halfway, silent)
    assert [path.name for path in (halfway / "state").iterdir()] == ["step-000002"]
    assert_same(grpo.train(short(), base, halfway, silent), whole)


_save = checkpoint.save_file


def test_a_place_that_cannot_be_written_is_refused_before_training(base: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        grpo.train(short(), base, tmp_path / "file" / "smd", silent)


def test_state_holds_no_pickle(halfway: Path) -> None:
    names = {path.name for path in (halfway / "state" / "step-000002").iterdir()}
    assert names == {"tensors.safetensors", "state.json"}
    assert json.loads((halfway / "state" / "step-000002" / "state.json").read_text())["step"] == 2
