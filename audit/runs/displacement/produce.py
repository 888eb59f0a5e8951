"""A run folder -> displacement.json: one file per unit, each written whole, gathered when all are there.

    displacement/<unit>.json   the row of one unit, with what it was measured from
    displacement.json          all rows, as ``kvaudit.reports.analysis.displacement`` reads them

A unit whose file is there, whole and of the same weights, records and settings is not measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvaudit.audit.runs.checkpoints import load_checkpoint
from kvaudit.audit.runs.claims import Claim, work_through
from kvaudit.audit.runs.displacement.forced import again, check_lengths, dense_logits, served_logits
from kvaudit.audit.runs.displacement.measure import Refusal, UnitDistances
from kvaudit.audit.runs.displacement.trajectories import Trajectory, batches, first_tokens, tokens_of, trajectory
from kvaudit.audit.runs.displacement.units import DENSE, Measured, units
from kvaudit.audit.runs.evaluate import asked_suite, evaluation_items
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.units import Unit, UnitFiles
from kvaudit.audit.sampling.chat import Chat
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json, write_json
from kvaudit.core.provenance import CHECKPOINTS, check_sealed
from kvaudit.core.records import Record
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.reports.analysis.displacement import DISPLACEMENT_FILE, DISPLACEMENT_FORMAT
from kvaudit.suites.base import SUITES

FOLDER = "displacement"
MOST_LOGITS = 1 << 26  # numbers of one dense pass held at once
UnitsDone = Callable[[int, Measured], None]  # units finished, the one under way
ReferenceCell = tuple[int, str, int]  # reference seed, suite, context length


class Producer:
    """One process's work on the displacement of a run; several may share it.

    At most ``tokens`` predicted tokens of a unit are measured, whole sequences, template after template. Raises
    DataError for checkpoints and answers that are missing, RunError where something else stands in the files' place.
    """

    def __init__(self, run: RunFolder, *, tokens: int) -> None:
        self._run, self._spec, self._tokens = run, run.spec, tokens
        self._folder = run.path / FOLDER
        self.units = units(run.spec)
        self._models: dict[tuple[str, int], LoadedModel] = {}
        self._known: dict[ReferenceCell, list[Trajectory]] = {}
        self._refusals: dict[tuple[str, int], Refusal | None] = {}
        self._weights = {pair: self._read_weights(*pair) for pair in {(unit.arm, unit.seed) for unit in self.units}}
        self._keys = {unit: self._key(unit) for unit in self.units}
        self._done: set[Measured] = set()  # found whole
        self._check_places()

    def finished(self) -> int:
        """How many units are measured already."""
        return sum(map(self._is_done, self.units))

    def work(self, progress: UnitsDone, waiting: Callable[[str], None]) -> Path:
        """Measure what is missing and write displacement.json; returns its path.

        Raises DataError for records or checkpoints that are changed or of another run.
        """
        path, finished = self._run.path / DISPLACEMENT_FILE, set[Measured]()

        def measure(unit: Measured, mine: Claim) -> None:
            progress(len(finished), unit)
            row = self._measure(unit)
            mine.check()  # whoever took the unit over writes its file
            write_json(self._file(unit), {"key": self._keys[unit], "row": row, "sha256": _digest(row)}, indent=None)

        def lock(unit: Measured) -> Path:
            return self._folder / f"{unit.name}.lock"

        work_through(self.units, done=self._is_done, lock=lock, work=measure, finished=finished.add, waiting=waiting)
        rows = [self._row(unit) for unit in self.units]
        about = {"tokens": self._tokens, "reference": self._spec.gate.reference}
        write_json(path, {"format": DISPLACEMENT_FORMAT, "about": about, "rows": rows}, indent=None)
        return path

    def _measure(self, unit: Measured) -> dict[str, Any]:
        reference, candidate = self._pair(unit)
        found = self._trajectories(unit, reference.chat)
        for model in (reference, candidate):
            check_lengths(model, found)
        tally = UnitDistances(self._refusal(unit, reference.chat))
        vocabulary = reference.model.get_output_embeddings().weight.shape[0]
        limit = self._spec.evaluate.batch_tokens
        for batch in batches(found, tokens=limit, logits=MOST_LOGITS, vocabulary=vocabulary):
            if unit.floor:
                seen = again(candidate, batch)
            elif unit.policy == DENSE:
                seen = dense_logits(candidate, batch)
            else:
                seen = served_logits(candidate, unit.policy, batch)
            try:
                tally.add(batch, dense_logits(reference, batch), seen)
            except DataError as error:
                raise DataError(f"{unit.name}: {error}") from None
        about = {"arm": unit.arm, "seed": unit.seed, "policy": unit.policy.canonical, "suite": unit.suite}
        return {**about, "context_tokens": unit.context_tokens, "floor": unit.floor, **tally.row()}

    def _pair(self, unit: Measured) -> tuple[LoadedModel, LoadedModel]:
        wanted = (self._reference(unit), (unit.arm, unit.seed))
        # dropped before others are loaded: two models are in memory, not four
        self._models = {pair: model for pair, model in self._models.items() if pair in wanted}
        for pair in wanted:
            if pair not in self._models:
                self._models[pair] = load_checkpoint(self._run, *pair, self._weights[pair])
        return self._models[wanted[0]], self._models[wanted[1]]

    def _read_weights(self, arm: str, seed: int) -> str:
        """The sha256 that the run's provenance has of a checkpoint."""
        table, key = self._run.provenance(), "base_sha256"
        if arm in self._spec.checkpoints:
            table, key = table.get(CHECKPOINTS, {}), f"{arm}/{seed}"
        elif arm != BASE_ARM or self._spec.starts:
            table, key = read_json(self._run.checkpoint(arm, seed) / "provenance.json"), "sha256"
        digest = table.get(key)
        if not isinstance(digest, str):
            raise DataError(
                f"provenance of {arm} seed {seed} has no {key!r}; go on with the run first: kvaudit run --join RUN"
            )
        return digest

    def _reference(self, unit: Measured) -> tuple[str, int]:
        return str(self._spec.gate.reference), unit.reference_seed

    def _recorded(self, unit: Measured) -> tuple[Unit, UnitFiles]:
        """The reference's uncompressed answers, which the unit is led along."""
        whose = Unit(*self._reference(unit), DENSE, unit.suite, unit.context_tokens)
        return whose, UnitFiles.of(self._run.records, whose)

    def _trajectories(self, unit: Measured, chat: Chat) -> list[Trajectory]:
        place = (unit.reference_seed, unit.suite, unit.context_tokens)
        if place not in self._known:
            whose, files = self._recorded(unit)
            raw = files.records.read_bytes() if files.records.is_file() else b""
            check_sealed(files.records, hashlib.sha256(raw).hexdigest(), self._seal(unit))
            found = []
            for number, line in enumerate(raw.splitlines(), 1):
                record = _record(line, f"{files.records.name}:{number}")
                _check_own(record, whose, self._weights[whose.arm, whose.seed], f"{files.records.name}:{number}")
                found.append(trajectory(record, chat, self._spec.evaluate.seed))
            self._known[place] = first_tokens([one for one in found if one is not None], self._tokens)
            if not self._known[place]:
                raise DataError(f"record file {str(files.records)!r} holds no answer with a token to predict")
        return self._known[place]

    def _seal(self, unit: Measured) -> dict[str, Any]:
        _, files = self._recorded(unit)
        if not files.seal.is_file():
            raise DataError(
                f"{str(files.records)!r} is not finished, and the reference's answers are in it; evaluate first: "
                f"kvaudit run --join {self._run.path}"
            )
        return read_json(files.seal)

    def _refusal(self, unit: Measured, chat: Chat) -> Refusal | None:
        """What a refusal begins with where the suite's prompt spells it out, and the items that should get it."""
        place = (unit.suite, unit.context_tokens)
        if place not in self._refusals:
            suite = asked_suite(self._spec, unit.suite)
            self._refusals[place] = None
            if suite.refusal:
                items = evaluation_items(self._run.sized, suite, unit.context_tokens, chat.count_tokens)
                wanted = frozenset(item.item_id for item in items if suite.gold(item)[0].startswith(suite.refusal))
                self._refusals[place] = Refusal(tokens_of(chat, suite.refusal)[0], wanted)
        return self._refusals[place]

    def _key(self, unit: Measured) -> str:
        """What a unit's numbers depend on: weights, answers and settings."""
        parts = [
            DISPLACEMENT_FORMAT,
            unit.name,
            unit.reference_seed,
            self._tokens,
            str(self._seal(unit).get("sha256")),
            self._spec.dtype,
        ]
        parts += [self._spec.evaluate.batch_tokens, self._weights[self._reference(unit)]]
        return hashlib.sha256(json.dumps([*parts, self._weights[unit.arm, unit.seed]]).encode()).hexdigest()

    def _check_places(self) -> None:
        files = [self._run.path / DISPLACEMENT_FILE, *map(self._file, self.units)]
        if any(path.is_dir() for path in files) or (self._folder.exists() and not self._folder.is_dir()):
            where = str(self._run.path)
            raise RunError(f"{DISPLACEMENT_FILE} and {FOLDER}/ of {where!r} are taken by something else; move it away")

    def _file(self, unit: Measured) -> Path:
        return self._folder / f"{unit.name}.json"

    def _is_done(self, unit: Measured) -> bool:
        """Whether the unit's file is whole and of this very measurement; any other is written anew."""
        if unit not in self._done:
            try:
                held = read_json(self._file(unit))
            except DataError:
                return False
            row = held.get("row")
            if held.get("key") != self._keys[unit] or held.get("sha256") != _digest(row):
                return False
            self._done.add(unit)
        return True

    def _row(self, unit: Measured) -> dict[str, Any]:
        row: dict[str, Any] = read_json(self._file(unit))["row"]
        return row


def _digest(row: Any) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _record(line: bytes, where: str) -> Record:
    try:
        return Record.from_json(line.decode())
    except (DataError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{where}: {error}") from None


def _check_own(record: Record, unit: Unit, weights: str, where: str) -> None:
    """A record stands in the file of its own unit and was made with the weights that are there."""
    theirs = (record.arm, record.train_seed, record.policy, record.suite, record.context_tokens)
    ours = (unit.arm, unit.seed, unit.policy.canonical, unit.suite, unit.context_tokens)
    if theirs != ours:
        raise DataError(f"{where}: the record is of another unit; delete the file and its seal, and go on with the run")
    if (record.checkpoint, record.suite_version) != (weights, SUITES.get(unit.suite).version):
        raise DataError(
            f"{where}: the record is of other weights or another version of suite {unit.suite}; evaluate its unit again"
        )
