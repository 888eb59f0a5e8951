"""The folder of a training run: reserved for one configuration, resumed from its last state, finished as a checkpoint.

training.json              the claim: the configuration and base weights that the folder is reserved for
state/step-000020/         weights and moments after that step; only the newest is kept
telemetry.jsonl            one row per step
ledgers/step-20.safetensors    rollouts of that step, with the positions at which cache entries were evicted (ledgers)
ledgers/final.safetensors  rollouts of the finished weights; a policy mixture has final--HASH.safetensors per policy
config.json, model.safetensors, tokenizer files, provenance.json    the finished checkpoint, provenance written last; an
                            adapter has adapter_config.json and adapter_model.safetensors instead
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvaudit import __version__
from kvaudit.audit.cache.ledger import Rollout, save_ledgers
from kvaudit.audit.policies import Policy
from kvaudit.audit.sampling.checkpoints import adapter_sha256
from kvaudit.audit.sampling.model import LoadedModel, hide_progress_bars, verify_folder
from kvaudit.audit.sampling.weights import file_sha256, weights_sha256
from kvaudit.audit.training.adapters import AdaptedModel, save_adapter
from kvaudit.audit.training.config import AnyConfig
from kvaudit.audit.training.learner import Learner
from kvaudit.audit.training.optimiser import Optimiser
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import PARTIAL, read_json, sync, write_json
from kvaudit.core.provenance import PROVENANCE, listed_files

FORMAT = 1
TELEMETRY, CLAIM, STATE, LEDGERS = "telemetry.jsonl", "training.json", "state.json", "ledgers"
FINAL_LEDGER = "final"
STAGED = "final" + PARTIAL  # where a model is saved before its files are moved into place
_TENSORS = "tensors.safetensors"
_STATE_KEYS = {"step", "updates", "telemetry_bytes", "ledgers", "config_hash", "sha256"}


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Turn OSErrors (a full, read-only or missing disk) in the context into a RunError that says how to continue.

    ``path`` is the file or folder that is written; the message names it.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunError(
            f"cannot write {str(path)!r} ({reason}); earlier saved work is intact: "
            "free space or choose another folder, then run again to resume"
        ) from error


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Create the folder ``path``, which must not exist, atomically.

    ``fill`` writes into a temporary folder, which is then renamed.
    """
    partial = path.with_name(path.name + PARTIAL)
    with guarded(path):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            fill(partial)
            # files before the name: a renamed folder with unsynced files would look complete after a crash
            for file in sorted(partial.iterdir()):
                sync(file)
            os.rename(partial, path)
        except BaseException:  # also on an interrupt: free the disk space again
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(path.parent)


def move_into(files: Path, folder: Path) -> None:
    """Move every file of ``files`` into ``folder``, replacing existing ones, then remove ``files``."""
    with guarded(folder):
        for file in sorted(files.iterdir()):
            os.replace(file, folder / file.name)
        shutil.rmtree(files)
        sync(folder)


class TelemetryLog:
    """The append-only file ``telemetry.jsonl``; a line is on disk before ``append`` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """The number of bytes on disk, 0 before the first line."""
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def count(self) -> int:
        """The number of rows on disk, which is that of line ends; 0 if the file cannot be read."""
        try:
            return self.path.read_bytes().count(b"\n")
        except OSError:
            return 0

    def rows(self) -> list[dict[str, Any]]:
        """Return every row so far; raise DataError if one is damaged."""
        return _read_rows(self.path) if self.size else []

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line and sync it to disk; raises RunError if the disk is full or read-only."""
        line = json.dumps(_json_value(row), allow_nan=False) + "\n"
        # a kill may leave half a line: a resumed run truncates to the size in its saved state
        with guarded(self.path), self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes; raises DataError if it is already shorter."""
        if self.size < size:
            raise DataError(
                f"telemetry {str(self.path)!r} has {self.size} bytes, its checkpoint expects {size}; "
                "it was cut: delete the checkpoint folder to train again"
            )
        if self.size > size:
            with guarded(self.path), self.path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())

    def check_steps(self, steps: int) -> None:
        """Raise DataError unless the rows are steps 1 to ``steps``, in order and each once."""
        if steps == 0 and not self.path.exists():
            return
        numbers = [row.get("step") for row in _read_rows(self.path)]
        for expected, number in zip_longest(range(1, steps + 1), numbers):
            if number != expected:
                names = ["the end" if step is None else f"step {step}" for step in (number, expected)]
                raise DataError(
                    f"telemetry {str(self.path)!r} has {names[0]} where {names[1]} is expected: another process "
                    "wrote to it too; delete the checkpoint folder to train again"
                )


def _json_value(value: Any) -> Any:
    """Return ``value`` with None in place of numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"telemetry {str(path)!r} does not exist; was this folder trained?")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"telemetry {str(path)!r} has a line that is not JSON ({error})") from None
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"telemetry {str(path)!r} has a line that is not a JSON object; delete the checkpoint folder to train again"
        )
    return rows


@dataclass(frozen=True)
class Position:
    """How far a run has come: finished steps, updates, bytes of telemetry, and (name, sha256) of each ledger file."""

    step: int = 0
    updates: int = 0
    telemetry_bytes: int = 0
    ledgers: tuple[tuple[str, str], ...] = ()


class CheckpointFolder:
    """The folder of one training run.

    The constructor reserves it for one configuration and base model: it writes a file that states both (the claim).
    ``more`` adds the sha256 of input files to the claim, because the configuration only names these files. Raises
    RunError if the folder belongs to another run.
    """

    def __init__(self, path: Path, config: AnyConfig, base_sha256: str, more: Mapping[str, str] | None = None) -> None:
        self.path, self._config = path, config
        self.telemetry = TelemetryLog(path / TELEMETRY)
        self._claim = {
            "format": FORMAT,
            "config": config.to_json(),
            "config_hash": config.hash,
            "base_sha256": base_sha256,
            **(more or {}),
        }
        with guarded(path):
            path.mkdir(parents=True, exist_ok=True)
        if (path / CLAIM).exists():
            self._check_claim(read_json(path / CLAIM))
        # a kill while the claim was written leaves its partial file: such a folder is still free
        elif any(path.iterdir()) and not (path / (CLAIM + PARTIAL)).exists():
            raise RunError(f"folder {str(path)!r} is not empty and has no {CLAIM}; choose another folder")
        else:
            with guarded(path / CLAIM):
                write_json(path / CLAIM, self._claim)

    @property
    def finished(self) -> bool:
        """Whether the checkpoint is complete; raises DataError if one of its files is missing or was changed."""
        if not (self.path / PROVENANCE).exists():
            return False
        verify_folder(self.path)
        return True

    def resume(self, learner: Learner | Optimiser, step: int | None = None) -> Position:
        """Load the last saved state, or the one after ``step`` steps, into ``learner``; return the state's position.

        Telemetry of later steps is cut off. Raises DataError if the state, a ledger or the telemetry is damaged.
        """
        # state names sort by step
        states = self._states() if step is None else [self.path / "state" / _state_name(step)]
        position = self._load(states[-1], learner) if states else Position()
        for name, digest in position.ledgers:
            path = self.path / LEDGERS / name
            if not path.is_file() or file_sha256(path) != digest:
                raise self._damage(f"ledger {str(path)!r} is missing or was changed")
        self.telemetry.truncate(position.telemetry_bytes)
        self.telemetry.check_steps(position.step)
        return position

    def save_state(self, position: Position, tensors: dict[str, torch.Tensor], *, keep_older: bool = False) -> None:
        """Save the state that the next step needs, then delete older states unless ``keep_older``."""
        # listed now, before the new state is among them
        older = [] if keep_older else self._states()

        def fill(folder: Path) -> None:
            save_file(tensors, folder / _TENSORS)
            state = {
                "step": position.step,
                "updates": position.updates,
                "telemetry_bytes": position.telemetry_bytes,
                "ledgers": dict(position.ledgers),
                "config_hash": self._config.hash,
                "sha256": file_sha256(folder / _TENSORS),
            }
            write_json(folder / STATE, state)

        write_folder(self.path / "state" / _state_name(position.step), fill)
        # last, so that a kill before this point resumes from the older state
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)

    def drop_ledgers_beyond(self, position: Position) -> None:
        """Delete the ledger files (saved rollouts with their evictions) of steps after ``position``."""
        names = {name for name, _ in position.ledgers}
        for path in (self.path / LEDGERS).glob("*.safetensors"):
            if path.name not in names:
                path.unlink()

    def finish(self, learner: LoadedModel, position: Position) -> None:
        """Turn the folder into an ordinary checkpoint; provenance.json is written last and marks it complete.

        Raises DataError unless telemetry has each step once and in order, as it has if one process alone wrote it.
        """
        self.telemetry.check_steps(position.step)
        # hashed in a staging folder, then moved: a kill in between leaves a state to resume and no provenance
        staged = self.path / STAGED
        with guarded(self.path):
            shutil.rmtree(staged, ignore_errors=True)
            _save_model(learner, staged)
            files = {path.name: file_sha256(path) for path in sorted(staged.iterdir())}
            base = learner.origin if isinstance(learner, AdaptedModel) else None
            weights = weights_sha256(staged) if base is None else adapter_sha256(staged, base)
        move_into(staged, self.path)
        saved = {"sha256": weights, "files": files, "versions": versions()}
        write_provenance(self.path, self._claim, self._config.recipe_summary(), position, saved)
        drop_state(self.path)

    def _check_claim(self, claim: dict[str, Any]) -> None:
        if claim == self._claim:
            return
        if claim.get("format") != FORMAT or not isinstance(claim.get("config"), dict):
            raise self._damage(f"{str(self.path / CLAIM)!r} is not of format {FORMAT}")
        difference = claim_difference(claim, self._claim)
        raise RunError(f"folder {str(self.path)!r} was trained {difference}; choose another folder or delete it")

    def _states(self) -> list[Path]:
        folder = self.path / "state"
        return sorted(path for path in folder.glob("step-*") if not path.name.endswith(PARTIAL))

    def _load(self, folder: Path, learner: Learner | Optimiser) -> Position:
        if not (folder / _TENSORS).is_file():
            raise self._damage(f"training state {str(folder)!r} has no {_TENSORS}")
        state = read_json(folder / STATE)
        if set(state) != _STATE_KEYS:
            raise self._damage(f"{str(folder / STATE)!r} does not have the keys of a training state")
        if file_sha256(folder / _TENSORS) != state["sha256"]:
            raise self._damage(f"training state {str(folder / _TENSORS)!r} does not have the sha256 it was saved with")
        position = self._position(state, folder)
        try:
            learner.load(load_file(folder / _TENSORS), position.updates)
        except SafetensorError as error:
            raise self._damage(f"{str(folder / _TENSORS)!r} is not a safetensors file ({error})") from None
        return position

    def _position(self, state: dict[str, Any], folder: Path) -> Position:
        step, updates, size = (state[key] for key in ("step", "updates", "telemetry_bytes"))
        are_counts = all(type(number) is int and number >= 0 for number in (step, updates, size))
        if (
            not are_counts
            or folder.name != _state_name(step)
            or not step <= self._config.steps
            or updates > step * self._config.updates_per_step  # fewer if updates were skipped
            or state["config_hash"] != self._config.hash
        ):
            raise self._damage(
                f"{str(folder / STATE)!r} was not written by a step of this run (check step, updates, telemetry_bytes "
                "and config_hash)"
            )
        ledgers = listed_files(state["ledgers"], folder / STATE)
        return Position(step, updates, size, tuple(sorted(ledgers.items())))

    def _damage(self, problem: str) -> DataError:
        return DataError(f"{problem}; delete {str(self.path)!r} to start over")


def claim_difference(claim: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return in words how two claims differ: the names of the settings or entries, or else "other base weights"."""
    for one, other in ((claim["config"], current["config"]), (claim, current)):
        if names := [key for key in {**one, **other} if key != "base_sha256" and one.get(key) != other.get(key)]:
            return f"with another {', '.join(sorted(names))}"
    return "from other base weights"


def write_provenance(
    folder: Path, claim: Mapping[str, Any], recipe: Mapping[str, Any], position: Position, saved: Mapping[str, Any]
) -> None:
    """Write provenance.json, which marks a checkpoint complete.

    ``claim`` is the content of training.json. ``recipe`` says how the checkpoint was trained, ``position`` how far.
    ``saved`` has ``sha256`` (of the weights), ``files`` (the sha256 of each file) and ``versions`` (of the software).
    """
    config, telemetry = claim["config"], {TELEMETRY: file_sha256(folder / TELEMETRY)}
    provenance = {
        **claim,
        "arm": config["arm"],
        "recipe": dict(recipe),
        "seed": config["seed"],
        "steps": position.step,
        "updates": position.updates,
        "sha256": saved["sha256"],
        "files": saved["files"] | telemetry,
        "ledgers": dict(position.ledgers),
        "versions": saved["versions"],
    }
    with guarded(folder / PROVENANCE):
        write_json(folder / PROVENANCE, provenance)


def write_ledgers(folder: Path, stem: str, policy: Policy, rollouts: Sequence[Rollout]) -> tuple[str, str]:
    """Write rollouts with their ledgers (when each cache entry was evicted), atomically.

    Returns name and sha256 of the file, ``ledgers/<stem>.safetensors``.
    """
    path = folder / LEDGERS / f"{stem}.safetensors"
    partial = path.with_name(path.name + PARTIAL)
    with guarded(path):
        digest = save_ledgers(partial, rollouts, policy)
        os.replace(partial, path)
    return path.name, digest


def _state_name(step: int) -> str:
    return f"step-{step:06d}"


def drop_state(folder: Path) -> None:
    """Delete the states that a process, killed right after finishing, has left in its finished checkpoint."""
    shutil.rmtree(folder / "state", ignore_errors=True)


def _save_model(learner: LoadedModel, folder: Path) -> None:
    if isinstance(learner, AdaptedModel):
        save_adapter(learner, folder)
        return
    with hide_progress_bars():  # progress bars would break the run's progress line
        learner.model.save_pretrained(folder, safe_serialization=True)
        learner.chat.tokenizer.save_pretrained(folder)


def versions(**hosts: str) -> dict[str, str]:
    """Return the versions, by name, of the software that trains; ``hosts`` adds others, such as TRL's."""
    software = {"kvaudit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**software, **hosts, "python": platform.python_version()}
