"""A run that is over, opened to serve its answers again: weights, records and items are held to what they were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvaudit.audit.policies import parse_policy
from kvaudit.audit.replay.interchange import read_rollouts
from kvaudit.audit.replay.rollout_checks import RecordedRollouts
from kvaudit.audit.runs.evaluate import evaluation_items
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.stored import read_records, stored_unit
from kvaudit.audit.runs.units import Unit, UnitFiles
from kvaudit.audit.sampling.checkpoints import load_comparable, load_model_or_adapter
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.arms import get_arm
from kvaudit.audit.training.checkpoint import FINAL_LEDGER, LEDGERS
from kvaudit.audit.training.rollouts import ledger_stem
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.files import read_json
from kvaudit.core.provenance import INPUTS, JUDGED, MODEL, PROVENANCE, ROWS, check_checkpoint, check_same
from kvaudit.core.records import Item, Record
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.suites.base import Suite
from kvaudit.suites.sources import collect_file_hashes


class Checkpoints:
    """The checkpoints of a run, each loaded once as long as it is asked for."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._models: dict[tuple[str, int, str], LoadedModel] = {}

    def load(self, *wanted: tuple[str, int, str]) -> list[LoadedModel]:
        """The models of some arms and seeds, by the sha256 of their weights; see ``load_checkpoint``."""
        # dropped before others are loaded: as many are in memory as are wanted together
        self._models = {key: model for key, model in self._models.items() if key in wanted}
        for key in wanted:
            if key not in self._models:
                self._models[key] = load_checkpoint(self._run, *key)
        return [self._models[key] for key in wanted]


def load_checkpoint(run: RunFolder, arm: str, seed: int, wanted: str) -> LoadedModel:
    """One checkpoint of a run; raises DataError where it is gone, or has another sha256 than ``wanted``."""
    spec, external = run.spec, run.spec.external(arm, seed)
    is_model = arm == BASE_ARM and not spec.starts
    name = external or (spec.model_path if is_model else str(run.checkpoint(arm, seed)))
    if not is_model and external is None and not run.checkpoint(arm, seed).is_dir():
        raise DataError(f"{str(run.path)!r} holds no checkpoint of {arm} seed {seed} any more; put {name!r} back")
    model = load_model_or_adapter(spec.model_path, dtype=spec.dtype, device=spec.device, chat=spec.chat)
    if not is_model:
        model = load_comparable(name, model, dtype=spec.dtype, device=spec.device, chat=spec.chat)
    if model.sha256 != wanted:
        raise DataError(
            f"model {name!r} has weights {model.sha256[:12]}, the run was made with {wanted[:12]}; put those back"
        )
    return model


def check_answers(run: RunFolder) -> None:
    """Raise SpecError where no checkpoint of the run gave its answers."""
    if JUDGED in run.provenance():
        raise SpecError(f"{str(run.path)!r} holds answers of another run, judged again; explain that run's")
    if run.spec.probe is not None:
        raise SpecError(f"{str(run.path)!r} holds answers of an endpoint, whose cache nobody can look into")


def finished_records(run: RunFolder, unit: Unit) -> Iterator[Record]:
    """The records of a unit, none of an unfinished one; raises DataError where they are not the sealed ones."""
    files = UnitFiles.of(run.records, unit)
    if files.seal.is_file():
        stored = stored_unit(files.records)
        stored.check()
        yield from read_records(stored)


def items_again(run: RunFolder, model: LoadedModel, suite: Suite, record: Record) -> dict[str, Item]:
    """The items of a unit by name, as the run asked them; ``record`` is one of the unit's.

    Raises DataError and RunError where suite, rows or model files changed.
    """
    if suite.version != record.suite_version:
        raise DataError(
            f"suite {suite.name} is version {suite.version}, the run asked version {record.suite_version}: the item "
            "may be another; install the kvaudit that the run was made with"
        )
    folder = run.checkpoint(record.arm, record.train_seed)
    if (folder / PROVENANCE).is_file():
        check_checkpoint(folder)
    with collect_file_hashes() as rows:
        items = evaluation_items(run.sized, suite, record.context_tokens, model.chat.count_tokens)
    noted = run.provenance().get(INPUTS)
    if isinstance(noted, dict):  # a run of an earlier version noted none
        check_same(ROWS, {name: noted.get(ROWS, {}).get(name) for name in rows}, rows)
        if record.arm == BASE_ARM and not run.spec.starts:  # by name: a checkpoint that learnt nothing has its weights
            check_same(MODEL, noted.get(MODEL, {}), model.files)
    return {item.item_id: item for item in items}


def checkpoint_rollouts(folder: Path) -> list[RecordedRollouts]:
    """The rollouts a finished checkpoint was left with, by the policies that a mixture drew.

    Raises DataError where files are changed or there are none. Intermediate ledgers came from weights that are not
    kept: they are held to their hashes alone.
    """
    if not (folder / PROVENANCE).is_file():
        raise DataError(
            f"{str(folder)!r} holds no {PROVENANCE}; give the folder of a finished checkpoint, such as "
            "RUN/checkpoints/ARM/seed-N, or --rollouts FILE --model MODEL"
        )
    check_checkpoint(folder)
    provenance = read_json(folder / PROVENANCE)
    try:
        config = provenance["config"]
        trained = parse_policy(str(config["policy"]) if get_arm(config["arm"]).rollout == "compressed" else "none")
        temperature = float(config["temperature"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{str(folder / PROVENANCE)!r} does not say how it was trained ({error!r})") from None
    mixed = len(trained.draws) > 1
    names = {f"{ledger_stem(FINAL_LEDGER, own, mixed=mixed)}.safetensors": own for own in trained.draws}
    kept = {name: own for name, own in names.items() if name in provenance["ledgers"]}
    if not kept:
        raise DataError(
            f"checkpoint {str(folder)!r} keeps no {LEDGERS}/{min(names)}; train it again with ledger_every above 0"
        )
    return [
        replace(read_rollouts(folder / LEDGERS / name), temperature=temperature, trained_policy=own)
        for name, own in kept.items()
    ]
