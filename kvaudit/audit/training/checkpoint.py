"""A training folder: claimed by one configuration, resumed from its last whole state, finished as an HF folder.

training.json              what this folder is of: configuration and base weights
state/step-000020/         weights and moments after that step; replaced by the next one, gone when finished; of
                            several ranks each has a file with its part
telemetry.jsonl            one row per step
ledgers/step-20.safetensors
ledgers/final.safetensors  rollouts of the finished weights; of a mixture final--HASH.safetensors of every policy drawn
config.json, model.safetensors, tokenizer files, provenance.json    the finished checkpoint, provenance last; of an
                            adapter adapter_config.json and adapter_model.safetensors instead
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from kvaudit.audit.training.files import TELEMETRY, TelemetryLog, guarded, move_into, write_folder
from kvaudit.audit.training.learner import Learner
from kvaudit.audit.training.optimiser import Optimiser
from kvaudit.audit.training.ranks import RankGroup, on_all_ranks
from kvaudit.audit.training.ranks import is_sharded, full_state_dict
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import PARTIAL, read_json, sync, write_json
from kvaudit.core.provenance import PROVENANCE, listed_files

FORMAT = 1
CLAIM, STATE, LEDGERS = "training.json", "state.json", "ledgers"
FINAL_LEDGER = "final"
STAGED = "final" + PARTIAL  # where a model is saved before it is moved into its folder, file by file
_TENSORS = "tensors.safetensors"
_PARTS = "parts"  # files of the other ranks, with their sha256
_STATE_KEYS = {"step", "updates", "telemetry_bytes", "ledgers", "config_hash", "sha256"}


@dataclass(frozen=True)
class Position:
    """Where a run stands: steps done, updates taken, bytes of telemetry, and the sha256 of each ledger file."""

    step: int = 0
    updates: int = 0
    telemetry_bytes: int = 0
    ledgers: tuple[tuple[str, str], ...] = ()


class CheckpointFolder:
    """The folder of one training run. Construction claims it, or raises RunError where it is another run's."""

    def __init__(self, path: Path, config: AnyConfig, base_sha256: str, more: Mapping[str, str] | None = None) -> None:
        """``more`` is what the claim holds besides: sha256 of what the configuration only names."""
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
        # a kill while the claim was written leaves its partial file: that folder is still free
        elif any(path.iterdir()) and not (path / (CLAIM + PARTIAL)).exists():
            raise RunError(f"folder {str(path)!r} is not empty and holds no {CLAIM}; choose another folder")
        else:
            with guarded(path / CLAIM):
                write_json(path / CLAIM, self._claim)

    @property
    def finished(self) -> bool:
        """Whether the checkpoint is whole; raises DataError where a file of it was changed or is missing."""
        if not (self.path / PROVENANCE).exists():
            return False
        verify_folder(self.path)
        return True

    def resume(self, learner: Learner | Optimiser, step: int | None = None) -> Position:
        """Put the last saved state back, or that of a step, cut telemetry to it, and say where it stands."""
        # names of states sort as their steps do
        states = self._states() if step is None else [self.path / "state" / _state_name(step)]
        position = self._load(states[-1], learner) if states else Position()
        for name, digest in position.ledgers:
            path = self.path / LEDGERS / name
            if not path.is_file() or file_sha256(path) != digest:
                raise self._broken(f"ledger {str(path)!r} is missing or was changed")
        self.telemetry.truncate(position.telemetry_bytes)
        self.telemetry.check_steps(position.step)
        return position

    def save_state(
        self,
        position: Position,
        tensors: dict[str, torch.Tensor],
        *,
        others: Callable[[Path], dict[str, str]] = lambda _: {},
        keep_older: bool = False,
    ) -> None:
        """Save everything that the next step needs, then drop the state before it unless it is kept too.

        ``others`` has other ranks write their parts into a folder, and gives the sha256 of each.
        """
        # listed before the new one is among them
        older = [] if keep_older else self._states()
        target = self.path / "state" / _state_name(position.step)

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
            parts = others(folder)
            write_json(folder / STATE, state | ({_PARTS: parts} if parts else {}))

        write_folder(target, fill)  # renamed in one step: a state is there whole or not at all
        # not before: until the new state stands, a kill goes back to the older one
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)

    def drop_ledgers_beyond(self, position: Position) -> None:
        """Forget the ledgers of steps that were taken back."""
        kept = {name for name, _ in position.ledgers}
        for path in (self.path / LEDGERS).glob("*.safetensors"):
            if path.name not in kept:
                path.unlink()

    def finish(self, learner: LoadedModel, position: Position) -> None:
        """Turn the folder into an ordinary checkpoint; provenance.json comes last and marks it whole.

        Raises DataError for telemetry that more than one process wrote.
        """
        self.telemetry.check_steps(position.step)
        # hashed where nobody loads them, then moved: a kill in between leaves a state to resume and no provenance
        staged = self.path / STAGED
        with guarded(self.path):
            shutil.rmtree(staged, ignore_errors=True)
            _save_model(learner, staged)
            files = {path.name: file_sha256(path) for path in sorted(staged.iterdir())}
            # the sha256 by which whoever loads the folder knows the model
            base = learner.origin if isinstance(learner, AdaptedModel) else None
            weights = weights_sha256(staged) if base is None else adapter_sha256(staged, base)
        move_into(staged, self.path)  # file by file, each in one step
        said = {"sha256": weights, "files": files, "versions": versions()}
        write_provenance(self.path, self._claim, self._config.disclosed(), position, said)
        drop_state(self.path)

    def _check_claim(self, found: dict[str, Any]) -> None:
        if found == self._claim:
            return
        if found.get("format") != FORMAT or not isinstance(found.get("config"), dict):
            raise self._broken(f"{str(self.path / CLAIM)!r} is not of format {FORMAT}")
        theirs, ours = found["config"], self._config.to_json()
        # what the configurations differ in, else what the claims hold besides
        names = sorted(key for key in set(theirs) | set(ours) if theirs.get(key) != ours.get(key))
        names = names or sorted(
            key for key in {*found, *self._claim} - {"base_sha256"} if found.get(key) != self._claim.get(key)
        )
        what = f"with another {', '.join(names)}" if names else "from other base weights"
        raise RunError(f"folder {str(self.path)!r} was trained {what}; choose another folder or delete it")

    def _states(self) -> list[Path]:
        folder = self.path / "state"
        return sorted(path for path in folder.glob("step-*") if not path.name.endswith(PARTIAL))

    def _load(self, folder: Path, learner: Learner | Optimiser) -> Position:
        if not (folder / _TENSORS).is_file():
            raise self._broken(f"training state {str(folder)!r} lacks {_TENSORS}")
        state = read_json(folder / STATE)
        # a state of one rank has no parts
        if set(state) - {_PARTS} != _STATE_KEYS:
            raise self._broken(f"{str(folder / STATE)!r} holds other keys than a state")
        if file_sha256(folder / _TENSORS) != state["sha256"]:
            raise self._broken(f"training state {str(folder / _TENSORS)!r} does not have the sha256 it was saved with")
        position = self._position(state, folder)
        try:
            learner.load(load_file(folder / _TENSORS), position.updates)
        except SafetensorError as error:
            raise self._broken(f"{str(folder / _TENSORS)!r} holds no tensors ({error})") from None
        return position

    def _position(self, state: dict[str, Any], folder: Path) -> Position:
        step, updates, size = (state[key] for key in ("step", "updates", "telemetry_bytes"))
        numbers = all(type(number) is int and number >= 0 for number in (step, updates, size))
        if (
            not numbers
            or folder.name != _state_name(step)
            or not step <= self._config.steps
            or updates > step * self._config.updates_per_step  # fewer where gradients were not finite
            or state["config_hash"] != self._config.hash
        ):
            raise self._broken(
                f"{str(folder / STATE)!r} holds what no step of this run leaves (step, updates, telemetry_bytes or "
                "config_hash)"
            )
        ledgers = listed_files(state["ledgers"], folder / STATE)
        return Position(step, updates, size, tuple(sorted(ledgers.items())))

    def _broken(self, what: str) -> DataError:
        return DataError(f"{what}; delete {str(self.path)!r} to start over")


class Resumable:
    """What trains in one rank; each saves its own part of the state, and is put back to it, where the first one is."""

    def __init__(self, learner: Learner | Optimiser, ranks: RankGroup) -> None:
        self._learner, self.ranks = learner, ranks

    @on_all_ranks
    def resumed(self, folder: Path, position: Position) -> None:
        """Go on from where the first rank does, by what was saved in its folder."""
        # the first rank has loaded its own already, as it checked the folder
        if self.ranks.number and position.step:
            state = folder / "state" / _state_name(position.step)
            part = state / _part_name(self.ranks.number)
            known = listed_files(read_json(state / STATE).get(_PARTS), state / STATE)
            if not part.is_file() or file_sha256(part) != known.get(part.name):
                raise DataError(
                    f"training state {str(part)!r} is missing or does not have the sha256 it was saved with; delete "
                    f"{str(folder)!r} to start over"
                )
            self._learner.load(load_file(part), position.updates)

    @on_all_ranks
    def save_part(self, folder: Path) -> dict[str, str]:
        """Have every rank but the first write its part of the state; the sha256 of each file."""
        own = dict[str, str]()
        if self.ranks.number:
            path = folder / _part_name(self.ranks.number)
            with guarded(path):
                save_file(self._learner.tensors(), path)
                sync(path)
            own[path.name] = file_sha256(path)
        return {name: digest for part in self.ranks.gathered(own) for name, digest in part.items()}


def write_provenance(
    folder: Path, claim: Mapping[str, Any], disclosed: Mapping[str, Any], done: Position, said: Mapping[str, Any]
) -> None:
    """Write provenance.json, which comes last and marks a checkpoint whole; ``said`` are sha256, files and versions."""
    config, telemetry = claim["config"], {TELEMETRY: file_sha256(folder / TELEMETRY)}
    provenance = {
        **claim,
        **{"arm": config["arm"], "recipe": dict(disclosed), "seed": config["seed"]},
        **{"steps": done.step, "updates": done.updates, "sha256": said["sha256"]},
        **{"files": said["files"] | telemetry, "ledgers": dict(done.ledgers), "versions": said["versions"]},
    }
    with guarded(folder / PROVENANCE):
        write_json(folder / PROVENANCE, provenance)


def write_ledgers(folder: Path, stem: str, policy: Policy, rollouts: Sequence[Rollout]) -> tuple[str, str]:
    """Write rollouts to ``ledgers/<stem>.safetensors`` of a folder; returns the file's name and sha256."""
    path = folder / LEDGERS / f"{stem}.safetensors"
    partial = path.with_name(path.name + PARTIAL)
    with guarded(path):
        digest = save_ledgers(partial, rollouts, policy)
        os.replace(partial, path)  # in one step, so that a kill leaves no half ledger under this name
    return path.name, digest


def _part_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _state_name(step: int) -> str:
    return f"step-{step:06d}"


def drop_state(folder: Path) -> None:
    """Forget what a finished checkpoint was resumed from; a kill right after its end leaves that behind."""
    shutil.rmtree(folder / "state", ignore_errors=True)


def _save_model(learner: LoadedModel, folder: Path) -> None:
    if isinstance(learner, AdaptedModel):
        save_adapter(learner, folder)
        return
    with hide_progress_bars():  # a bar per shard would break the progress line of the run
        weights = full_state_dict(learner.model) if is_sharded(learner.model) else None
        learner.model.save_pretrained(folder, safe_serialization=True, state_dict=weights)
        learner.chat.tokenizer.save_pretrained(folder)


def versions(**hosts: str) -> dict[str, str]:
    """What a checkpoint was trained with."""
    ours = {"kvaudit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**ours, **hosts, "python": platform.python_version()}
