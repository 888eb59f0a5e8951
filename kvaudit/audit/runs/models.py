"""The models of a run: its base model and its checkpoints (an arm and seed each), checked against the stored hashes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from kvaudit.audit.cache.layers import describe_governed_layers
from kvaudit.audit.runs.evaluate import Batches, Evaluator
from kvaudit.audit.runs.folder import RunFolder, check_inputs_unchanged, noted_value, utc_now, versions_line
from kvaudit.audit.runs.prepare import Prepared, prepare_run
from kvaudit.audit.runs.recipe import copy_provenance, joined_recipe, refusal_set
from kvaudit.audit.sampling.checkpoints import (
    adapter_sha256,
    checkpoint_files,
    checkpoint_sha256,
    is_adapter,
    load_comparable,
)
from kvaudit.audit.sampling.model import LoadedModel, load_model, locate, to_path
from kvaudit.audit.sampling.packing import has_packable_weights
from kvaudit.audit.sampling.weights import file_sha256, files_read, tensors_sha256
from kvaudit.audit.training.adapters import load_trained_adapter
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json, write_json
from kvaudit.core.provenance import (
    CHECKPOINT_FILES,
    CHECKPOINTS,
    INPUTS,
    LOADED,
    MODEL,
    RECIPE,
    ROWS,
    VERSIONS_USED,
    check_inputs,
    table_of,
)
from kvaudit.core.spec import EMBEDDED, RunSpec
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.core.text import inline

Pair = tuple[str, int]  # arm, seed


def trained_pairs(spec: RunSpec) -> list[Pair]:
    """Return the (arm, seed) of every checkpoint that the run trains, supervised warm starts first."""
    return [*spec.starts, *(() if spec.train is None else spec.train.pairs)]


def _check_weights(began_with: str | None, name: str, sha256: str) -> None:
    if began_with is not None and began_with != sha256:
        raise RunError(
            f"the run was started with base weights {began_with[:12]}, {name!r} now has {sha256[:12]}; give another "
            "--out"
        )


def _check_checkpoint(began_with: str, name: str, sha256: str) -> None:
    if began_with != sha256:
        raise RunError(
            f"checkpoint {name!r} has weights {sha256[:12]}, but the run began with {began_with[:12]}; restore those, "
            "or give another --out"
        )


def check_models_unchanged(run: RunFolder) -> None:
    """Raise RunError if a model of a finished run now has other weights or files; skip models not on this machine.

    A finished run loads no model. Its old verdict would otherwise be printed as that of the changed model. The files
    are only hashed.
    """
    provenance, name = run.provenance(), run.spec.model_path
    began_with = provenance.get("base_sha256")
    if name.endswith(".gguf"):
        path = to_path(name)
        if path.is_file():
            _check_weights(began_with, name, file_sha256(path))
            check_inputs_unchanged(run, MODEL, files_read(path.parent))
    elif _is_here(name):
        _check_weights(began_with, name, checkpoint_sha256(locate(name)))
        if files := checkpoint_files(locate(name)):  # none are listed of an adapter's GGUF file
            check_inputs_unchanged(run, MODEL, files)
    for arm, checkpoints in run.spec.checkpoints.items():
        for seed in checkpoints.seeds:
            source, key = run.spec.external_source(arm, seed), f"{arm}/{seed}"
            stored = table_of(provenance, CHECKPOINTS).get(key)
            if stored is None or source is None or not _is_here(source):
                continue
            folder = locate(source)
            if is_adapter(folder):
                _check_checkpoint(stored, source, adapter_sha256(folder, str(began_with)))
            else:
                _check_checkpoint(stored, source, checkpoint_sha256(folder))
                files = files_read(folder)
                check_inputs(f"files of {key}", run.keep(CHECKPOINT_FILES, key, files), files)


def _is_here(name: str) -> bool:
    """Return whether a model needs no download."""
    return name == EMBEDDED or to_path(name).is_dir()


class Models:
    """Loads the models of a run, each when it is first needed.

    ``prepared``, if given, is the base model with its items. ``processes`` is the number of processes that work on
    the run on this machine. ``batches`` are the items made so far, by suite and context length.
    """

    def __init__(
        self,
        run: RunFolder,
        spec: RunSpec,
        print_line: Callable[[str], None],
        prepared: Prepared | None = None,
        processes: int = 1,
    ) -> None:
        self._run, self._spec, self._print_line = run, spec, print_line
        self._prepared, self._processes = prepared, processes
        self._base: LoadedModel | None = None
        self.batches: Batches = {} if prepared is None else prepared.batches

    def resized(self, spec: RunSpec, suites: Collection[str]) -> Models:
        """Return these models for a ``spec`` with other numbers of items of ``suites``; these items are made anew."""
        batches = {key: parts for key, parts in self.batches.items() if key[0] not in suites}
        prepared = None if self._prepared is None else self._prepared._replace(batches=batches)
        models = Models(self._run, spec, self._print_line, prepared, self._processes)
        models._base, models.batches = self._base, batches
        return models

    def base(self) -> LoadedModel:
        """Return the model before training; raise RunError if the run was started with other weights."""
        if self._base is None:
            is_trained = all(map(self.is_trained, trained_pairs(self._spec)))
            began_with = table_of(table_of(self._run.provenance(), INPUTS), ROWS)
            model, batches, rows = self._prepared or prepare_run(
                self._spec, trains=not is_trained, began_with=began_with
            )
            self.batches.update(batches)
            sha256 = self._run.provenance().get("base_sha256")
            _check_weights(sha256, model.name, model.sha256)
            check_inputs_unchanged(self._run, ROWS, rows)
            check_inputs_unchanged(self._run, MODEL, model.files)
            self._note_base(model)
            self._describe_base(model)
            self._base = model
        return self._base

    def _note_base(self, model: LoadedModel) -> None:
        """Store in provenance.json the versions, hash of the weights, device and chat format of the base model."""
        layout = ", large products packed" if has_packable_weights(model) else ""  # packed products round differently
        self._run.keep(VERSIONS_USED, versions_line() + layout, utc_now())
        self._run.note(base_sha256=model.sha256, device=str(model.device), dtype=str(model.dtype))
        self._run.note(chat=model.chat.to_json())
        # store no path: the spec has a variable here, and its value would reveal too much about the machine
        if model.name != self._spec.model:
            folder = Path(model.name)
            self._run.note(model=folder.resolve().name if folder.is_dir() else model.name)

    def _describe_base(self, model: LoadedModel) -> None:
        """Print the base model, the layers that a policy compresses, and notes about its chat template."""
        threads, workers = torch.get_num_threads(), self._processes
        sharing = f"{workers} process{'es' * (workers > 1)} of {threads} thread{'s' * (threads > 1)}"
        self._print_line(f"model: {model.name} ({model.sha256[:12]}) on {model.device}, {sharing}")
        if text := describe_governed_layers(model.model.config):
            self._print_line(f"cache: {text}")
        for text in model.chat.role_notes():
            self._print_line(f"chat: {text}")

    def start(self, seed: int) -> LoadedModel:
        """Return the model from which the arms of a seed are trained: the base model, or its supervised warm start."""
        section = self._spec.train
        if section is None or section.sft is None:
            return self.base()
        self.trained_sha256((BASE_ARM, seed))
        folder = self._run.checkpoint(BASE_ARM, seed)
        if section.adapter is not None:
            return load_trained_adapter(self.base(), section.adapter, folder)
        return load_model(str(folder), dtype=self._spec.dtype, device=self._spec.device, chat=self._spec.chat)

    def checkpoint(self, pair: Pair) -> LoadedModel:
        """Return the model with which an arm and seed are evaluated."""
        if self._is_base(pair):
            return self.base()
        if (external := self._spec.external_source(*pair)) is not None:
            return self._load_external(pair, external)
        self.trained_sha256(pair)
        spec, folder = self._spec, str(self._run.checkpoint(*pair))
        return load_comparable(folder, self.base(), dtype=spec.dtype, device=spec.device, chat=spec.chat)

    def _load_external(self, pair: Pair, name: str) -> LoadedModel:
        """Load a checkpoint trained elsewhere; raise RunError if its files are not those that the run stored."""
        spec, key = self._spec, f"{pair[0]}/{pair[1]}"
        model = load_comparable(name, self.base(), dtype=spec.dtype, device=spec.device, chat=spec.chat)
        sha256 = self._run.keep(CHECKPOINTS, key, model.sha256)
        _check_checkpoint(sha256, name, model.sha256)
        # a config decides as much as weights do: rope, scaling, the tokens that end an answer
        check_inputs(f"files of {key}", self._run.keep(CHECKPOINT_FILES, key, model.files), model.files)
        self._keep_loaded(key, model)
        self._keep_loaded(f"{BASE_ARM}/0", self.base())
        # copy it before its first answer is sealed: a run that has all answers no longer needs the folder
        copy_provenance(locate(name), self._run.checkpoint(*pair))
        if spec.train is None and not (self._run.path / RECIPE).exists():
            Evaluator(self.base(), spec, self.batches).prepare()  # the pilot may have changed the number of items
            joined = joined_recipe(self._run, refusal_set(spec, self.batches))
            if joined is not None:
                write_json(self._run.path / RECIPE, joined)
        return model

    def _keep_loaded(self, key: str, model: LoadedModel) -> None:
        """Store the hash of the loaded weights, so that a report sees whether two checkpoints are the same model."""
        if key not in table_of(self._run.provenance(), LOADED):  # hashing takes seconds for a large model
            self._run.keep(LOADED, key, tensors_sha256(model.model))

    def sha256_of(self, pair: Pair) -> str:
        """Return the sha256 of the weights with which an arm and seed are evaluated, without loading them."""
        if self._is_base(pair):
            return str(noted_value(self._run, "base_sha256"))
        if pair[0] in self._spec.checkpoints:
            return str(noted_value(self._run, CHECKPOINTS, f"{pair[0]}/{pair[1]}"))
        return self.trained_sha256(pair)

    def trained_sha256(self, pair: Pair) -> str:
        """Return the sha256 of the weights of a checkpoint trained in this run.

        Raises DataError if it is unfinished, or if its folder holds another arm's or seed's checkpoint.
        """
        path = self._run.checkpoint(*pair)
        if not self.is_trained(pair):
            raise DataError(
                f"checkpoint {str(path)!r} is missing or unfinished; train it first: kvaudit run --only train SPEC"
            )
        provenance = read_json(path / "provenance.json")
        arm, seed = str(provenance.get("arm")), provenance.get("seed")
        # in a sweep over policies the folder is named ARM_POLICY
        is_own = seed == pair[1] and (pair[0] == arm or pair[0].startswith(f"{arm}_"))
        if not is_own:
            raise DataError(
                f"{str(path)!r} holds the checkpoint of arm {inline(arm[:40])}, seed {inline(str(seed)[:20])}; put "
                "every checkpoint back into its own folder"
            )
        return str(provenance["sha256"])

    def is_trained(self, pair: Pair) -> bool:
        """Return whether the checkpoint of an arm and seed is finished."""
        return (self._run.checkpoint(*pair) / "provenance.json").exists()

    def _is_base(self, pair: Pair) -> bool:
        return pair[0] == BASE_ARM and pair not in self._spec.starts
