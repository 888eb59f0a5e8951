"""How far next-token distributions moved on the reference's own answers: measured here, shown by reports.

    displacement/<unit>.json   the row of one unit, with what it was measured from
    displacement.json          all rows, as ``kvaudit.reports.analysis.displacement`` reads them

A unit whose file is there, whole and of the same weights, records and settings is not measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvaudit.audit.again import teacher_forcing, trajectories
from kvaudit.audit.again.finished import Checkpoints
from kvaudit.audit.again.measure import Measure
from kvaudit.audit.again.teacher_forcing import Refusal, StepLogits, UnitDistances
from kvaudit.audit.again.trajectories import DENSE, DisplacementUnit, Trajectory
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
from kvaudit.core.text import inline, length_label
from kvaudit.reports.analysis.displacement import (
    DISPLACEMENT_FILE,
    DISPLACEMENT_FORMAT,
    Displacement,
    load_displacement,
)
from kvaudit.reports.layout.tables import Table
from kvaudit.reports.layout.words import percent
from kvaudit.suites.base import SUITES

FOLDER = "displacement"
MOST_LOGITS = 1 << 26  # numbers of one dense pass held at once
_ROUNDING = 1e-5  # nats: in float32, what a token moves by another road through the same weights, at most
_HEADERS = ("arm", "policy", "tokens", "mean KL, nats", "largest", "same top-1", "RMS dp")


@dataclass(frozen=True)
class ForcedBatch:
    """Answers, and the logits of reference and candidate along them, made as they are asked for."""

    answers: Sequence[Trajectory]
    reference: Iterator[StepLogits]
    candidate: Iterator[StepLogits]

    def __len__(self) -> int:
        return len(self.answers)


class Displace(Measure[DisplacementUnit, ForcedBatch, dict[str, Any]]):
    """The displacement of a run; several processes may share it. A piece comes to its row of displacement.json.

    At most ``tokens`` predicted tokens of a unit are measured, whole sequences, template after template. Raises
    DataError for checkpoints and answers that are missing, RunError where something else stands in the files' place.
    """

    name = "displace"

    def __init__(self, run: RunFolder, *, tokens: int) -> None:
        self._run, self._spec, self._tokens = run, run.spec, tokens
        self._folder, self._checkpoints = run.path / FOLDER, Checkpoints(run)
        self._units = trajectories.units(run.spec)
        self._known: dict[tuple[int, str, int], list[Trajectory]] = {}  # by reference seed, suite and length
        self._refusals: dict[tuple[str, int], Refusal] = {}
        self._weights = {pair: self._read_weights(*pair) for pair in {(unit.arm, unit.seed) for unit in self._units}}
        self._keys = {unit: self._key(unit) for unit in self._units}
        self._check_places()

    @classmethod
    def trial(cls, run: RunFolder) -> Self:
        return cls(run, tokens=64)

    def pieces(self) -> Sequence[DisplacementUnit]:
        return self._units

    def label(self, piece: DisplacementUnit) -> str:
        name, _, fields = piece.policy.canonical.partition(":")
        kind = "floor" if piece.floor else f"{name} {fields.partition(',')[0]}".strip()
        return f"{piece.arm} seed {piece.seed}, {kind}, {piece.suite} {length_label(piece.context_tokens)}"

    def size(self, piece: DisplacementUnit) -> int:
        return len(self._trajectories(piece, self._models(piece)[0].chat))

    def model(self, piece: DisplacementUnit) -> LoadedModel:
        return self._models(piece)[1]

    def served(self, piece: DisplacementUnit, model: LoadedModel) -> Iterator[ForcedBatch]:
        reference, _ = self._models(piece)
        found = self._trajectories(piece, reference.chat)
        for one in (reference, model):
            teacher_forcing.check_lengths(one, found)
        vocabulary = reference.model.get_output_embeddings().weight.shape[0]
        limit = self._spec.evaluate.batch_tokens
        for batch in trajectories.batches(found, tokens=limit, logits=MOST_LOGITS, vocabulary=vocabulary):
            if piece.floor:
                seen = teacher_forcing.again(model, batch)
            elif piece.policy == DENSE:
                seen = teacher_forcing.dense_logits(model, batch)
            else:
                seen = teacher_forcing.served_logits(model, piece.policy, batch)
            yield ForcedBatch(batch, teacher_forcing.dense_logits(reference, batch), seen)

    def summed(self, piece: DisplacementUnit, model: LoadedModel, parts: Iterator[ForcedBatch]) -> dict[str, Any]:  # noqa: ARG002
        tally = UnitDistances(self.refusal(piece, self._models(piece)[0].chat))
        for part in parts:
            try:
                tally.add(part.answers, part.reference, part.candidate)
            except DataError as error:
                raise DataError(f"{piece.name}: {error}") from None
        where = {"arm": piece.arm, "seed": piece.seed, "policy": piece.policy.canonical, "suite": piece.suite}
        return {**where, "context_tokens": piece.context_tokens, "floor": piece.floor, **tally.row()}

    def differs(self, total: dict[str, Any]) -> bool:
        """The reference by another road is the reference; of what is served otherwise nothing is expected."""
        return bool(total["floor"] and total["max_kl"] > _ROUNDING)

    def lines(self, found: Sequence[tuple[DisplacementUnit, dict[str, Any]]]) -> Iterator[Table | str]:  # noqa: ARG002
        """Means over suites and seeds, of the file as reports read it."""
        groups: dict[tuple[str, str, bool], list[Displacement]] = {}
        for row in load_displacement(self._run.path):
            groups.setdefault((row.arm, row.policy, row.floor), []).append(row)
        yield Table(_HEADERS, tuple(_mean_row(*key, own) for key, own in groups.items()))
        written = f"written: {self._run.path / DISPLACEMENT_FILE}; show it with: kvaudit report {self._run.path}"
        yield inline(written)

    def write(self, found: Sequence[tuple[DisplacementUnit, dict[str, Any]]]) -> None:
        """Write displacement.json."""
        measured = {"tokens": self._tokens, "reference": self._spec.gate.reference}
        whole = {"format": DISPLACEMENT_FORMAT, "about": measured, "rows": [row for _, row in found]}
        write_json(self._run.path / DISPLACEMENT_FILE, whole, indent=None)

    def lock(self, piece: DisplacementUnit) -> Path:
        return self._folder / f"{piece.name}.lock"

    def kept(self, piece: DisplacementUnit) -> dict[str, Any] | None:
        """The row of a unit whose file is whole and of this very measurement; any other is written anew."""
        try:
            held = read_json(self._file(piece))
        except DataError:
            return None
        row = held.get("row")
        is_own = held.get("key") == self._keys[piece] and held.get("sha256") == _digest(row)
        return row if is_own else None

    def keep(self, piece: DisplacementUnit, total: dict[str, Any]) -> None:
        write_json(self._file(piece), {"key": self._keys[piece], "row": total, "sha256": _digest(total)}, indent=None)

    def refusal(self, piece: DisplacementUnit, chat: Chat) -> Refusal | None:
        """What a refusal begins with where the suite's prompt spells it out, and the items that should get it."""
        place, suite = (piece.suite, piece.context_tokens), asked_suite(self._spec, piece.suite)
        if suite.refusal and place not in self._refusals:
            items = evaluation_items(self._run.sized, suite, piece.context_tokens, chat.count_tokens)
            wanted = frozenset(item.item_id for item in items if suite.gold(item)[0].startswith(suite.refusal))
            self._refusals[place] = Refusal(chat.encode(suite.refusal)[0], wanted)
        return self._refusals.get(place)

    def _models(self, piece: DisplacementUnit) -> list[LoadedModel]:
        pairs = (self._reference(piece), (piece.arm, piece.seed))
        return self._checkpoints.load(*((*pair, self._weights[pair]) for pair in pairs))

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

    def _reference(self, piece: DisplacementUnit) -> tuple[str, int]:
        return str(self._spec.gate.reference), piece.reference_seed

    def _recorded(self, piece: DisplacementUnit) -> tuple[Unit, UnitFiles, dict[str, Any]]:
        """The unit of the reference's uncompressed answers, which the piece is led along, its files and its seal."""
        whose = Unit(*self._reference(piece), DENSE, piece.suite, piece.context_tokens)
        files = UnitFiles.of(self._run.records, whose)
        if not files.seal.is_file():
            raise DataError(
                f"{str(files.records)!r} is not finished, and the reference's answers are in it; evaluate first: "
                f"kvaudit run --join {self._run.path}"
            )
        return whose, files, read_json(files.seal)

    def _trajectories(self, piece: DisplacementUnit, chat: Chat) -> list[Trajectory]:
        place = (piece.reference_seed, piece.suite, piece.context_tokens)
        if place not in self._known:
            whose, files, seal = self._recorded(piece)
            raw = files.records.read_bytes() if files.records.is_file() else b""
            check_sealed(files.records, hashlib.sha256(raw).hexdigest(), seal)
            found = []
            for number, line in enumerate(raw.splitlines(), 1):
                record = _own_record(
                    line, whose, self._weights[whose.arm, whose.seed], f"{files.records.name}:{number}"
                )
                found.append(trajectories.trajectory(record, chat, self._spec.evaluate.seed))
            self._known[place] = trajectories.first_tokens([one for one in found if one is not None], self._tokens)
            if not self._known[place]:
                raise DataError(f"record file {str(files.records)!r} holds no answer with a token to predict")
        return self._known[place]

    def _key(self, piece: DisplacementUnit) -> str:
        """What a unit's numbers depend on: weights, answers and settings."""
        _, _, seal = self._recorded(piece)
        measured = [DISPLACEMENT_FORMAT, piece.name, piece.reference_seed, self._tokens, str(seal.get("sha256"))]
        settings = [self._spec.dtype, self._spec.evaluate.batch_tokens]
        weights = [self._weights[self._reference(piece)], self._weights[piece.arm, piece.seed]]
        return hashlib.sha256(json.dumps([*measured, *settings, *weights]).encode()).hexdigest()

    def _check_places(self) -> None:
        files = [self._run.path / DISPLACEMENT_FILE, *map(self._file, self._units)]
        if any(path.is_dir() for path in files) or (self._folder.exists() and not self._folder.is_dir()):
            where = str(self._run.path)
            raise RunError(f"{DISPLACEMENT_FILE} and {FOLDER}/ of {where!r} are taken by something else; move it away")

    def _file(self, piece: DisplacementUnit) -> Path:
        return self._folder / f"{piece.name}.json"


def _digest(row: Any) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _own_record(line: bytes, unit: Unit, weights: str, where: str) -> Record:
    """A record that stands in the file of its own unit and was made with the weights that are there."""
    try:
        record = Record.from_json(line.decode())
    except (DataError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{where}: {error}") from None
    theirs = (record.arm, record.train_seed, record.policy, record.suite, record.context_tokens)
    if theirs != (unit.arm, unit.seed, unit.policy.canonical, unit.suite, unit.context_tokens):
        raise DataError(f"{where}: the record is of another unit; delete the file and its seal, and go on with the run")
    if (record.checkpoint, record.suite_version) != (weights, SUITES.get(unit.suite).version):
        raise DataError(
            f"{where}: the record is of other weights or another version of suite {unit.suite}; evaluate its unit again"
        )
    return record


def _mean_row(arm: str, policy: str, floor: bool, own: Sequence[Displacement]) -> tuple[str, ...]:
    tokens = sum(row.tokens for row in own)
    mean = sum(row.mean_kl * row.tokens for row in own) / tokens
    top1 = sum(row.same_top1 * row.tokens for row in own) / tokens
    # of a root of mean squares, the squares have a mean
    rms = (sum(row.rms_dp**2 * row.tokens for row in own) / tokens) ** 0.5
    name = f"{inline(arm)} again (A/A floor)" if floor else inline(arm)
    largest = f"{max(row.max_kl for row in own):.3g}"
    return name, inline(policy), str(tokens), f"{mean:.3g}", largest, percent(top1), percent(rms)
