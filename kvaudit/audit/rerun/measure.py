"""A finished run, reopened with its checkpoints, records and items, and the one loop that serves its answers again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from rich.console import Console

from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.replay.interchange import read_rollouts
from kvaudit.audit.replay.rollout_checks import RecordedRollouts
from kvaudit.audit.runs.evaluate import Evaluator, row_seed, suite_as_asked
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.progress import Meter
from kvaudit.audit.runs.stored import make_items_again, read_records, read_unit
from kvaudit.audit.runs.units import Unit, UnitFiles
from kvaudit.audit.sampling.checkpoints import load_comparable, load_model_or_adapter
from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.checkpoint import FINAL_LEDGER, LEDGERS
from kvaudit.audit.training.config import get_arm
from kvaudit.audit.training.rollouts import ledger_stem
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.files import read_json
from kvaudit.core.plugins import Registry
from kvaudit.core.provenance import INPUTS, JUDGED, MODEL, PROVENANCE, check_checkpoint, check_inputs
from kvaudit.core.records import Item, Record
from kvaudit.core.spans import ALL_TOKENS, AnswerKey, Shading
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.reports.sections.shared.tables import Table
from kvaudit.suites.base import Suite

WorkUnit = TypeVar("WorkUnit")
ServedBatch = TypeVar("ServedBatch", bound=Sized)
Total = TypeVar("Total")


class Measure(ABC, Generic[WorkUnit, ServedBatch, Total]):
    """The base of quantities that are measured by serving recorded items again; subclass it with a ``name``.

    The work is divided into units, each with one result: a file of rollouts, or a run's answers by one checkpoint under
    one policy. A unit is served in batches; the length of a batch is its number of recorded items.
    """

    name: ClassVar[str] = ""
    decides: ClassVar[bool] = False  # whether its command exits with code 3 if something ``differs``
    by_item: ClassVar[bool] = False  # whether progress counts items instead of work units

    @classmethod
    @abstractmethod
    def trial(cls, run: RunFolder) -> Self:
        """Return an instance that serves a part of a finished run again, for the tests of all measures.

        The tests give a run whose first arm was trained on uncompressed rollouts, and whose folder holds the rollouts
        of that arm's last step.
        """

    @abstractmethod
    def units(self) -> Sequence[WorkUnit]:
        """Return all units of work; those of one checkpoint are adjacent, so that each checkpoint is loaded once."""

    @abstractmethod
    def size(self, unit: WorkUnit) -> int:
        """Return the number of recorded items in a unit of work."""

    @abstractmethod
    def model(self, unit: WorkUnit) -> LoadedModel:
        """Return the model that serves a unit of work; adjacent units of one checkpoint share it."""

    @abstractmethod
    def serve(self, unit: WorkUnit, model: LoadedModel) -> Iterator[ServedBatch]:
        """Serve the recorded items of a unit again, in batches.

        Raises DataError if anything that the items depend on has changed.
        """

    @abstractmethod
    def reduce(self, unit: WorkUnit, model: LoadedModel, batches: Iterator[ServedBatch]) -> Total:
        """Return the result of a unit of work from its batches, each served only when ``batches`` reaches it."""

    @abstractmethod
    def differs(self, total: Total) -> bool:
        """Return whether a unit's result differs from the record by more than rounding; False without a record."""

    @abstractmethod
    def lines(self, results: Sequence[tuple[WorkUnit, Total]]) -> Iterator[str | Table]:
        """Yield the lines and tables to print, from the result of each unit.

        Text that comes from a run or a file must be escaped to one line.
        """

    def label(self, unit: WorkUnit) -> str:  # noqa: ARG002
        """Return a short label of a unit of work, for the progress display."""
        return self.name


MEASURES: Registry[Measure[Any, Any, Any]] = Registry(
    "measure",
    "kvaudit.audit.rerun",
    Measure,  # type: ignore[type-abstract]  # registered subclasses are concrete
)


def run_measure(
    measure: Measure[WorkUnit, ServedBatch, Total], console: Console | None = None
) -> list[tuple[WorkUnit, Total]]:
    """Serve again all recorded items that a measure needs; return each of its work units with the result.

    ``console`` shows the progress.
    """
    console = console or Console(file=StringIO())
    units, results, items = measure.units(), list[tuple[WorkUnit, Total]](), 0

    def show_progress(unit: WorkUnit) -> None:
        meter.at(items if measure.by_item else len(results), measure.label(unit))

    def serve(unit: WorkUnit, model: LoadedModel) -> Iterator[ServedBatch]:
        nonlocal items
        for batch in measure.serve(unit, model):
            yield batch
            items += len(batch)  # after the yield: the batch has been reduced
            show_progress(unit)

    total = sum(map(measure.size, units)) if measure.by_item else len(units)
    with Meter(console, measure.name, total) as meter:
        for unit in units:
            show_progress(unit)
            model = measure.model(unit)
            results.append((unit, measure.reduce(unit, model, serve(unit, model))))
        meter.at(total, "all of it")
    return results


def load_checkpoint(run: RunFolder, arm: str, seed: int, sha256: str) -> LoadedModel:
    """Load the checkpoint of one arm (way of training) and seed of a run.

    Raises DataError if it is missing or its weights have another sha256.
    """
    spec, external = run.spec, run.spec.external_source(arm, seed)
    is_model = arm == BASE_ARM and not spec.starts
    name = external or (spec.model_path if is_model else str(run.checkpoint(arm, seed)))
    if not is_model and external is None and not run.checkpoint(arm, seed).is_dir():
        raise DataError(f"{str(run.path)!r} holds no checkpoint of {arm} seed {seed} any more; put {name!r} back")
    model = load_model_or_adapter(spec.model_path, dtype=spec.dtype, device=spec.device, chat=spec.chat)
    if not is_model:
        model = load_comparable(name, model, dtype=spec.dtype, device=spec.device, chat=spec.chat)
    if model.sha256 != sha256:
        raise DataError(
            f"model {name!r} has weights {model.sha256[:12]}, the run was made with {sha256[:12]}; put those back"
        )
    return model


def check_rerunnable(run: RunFolder) -> None:
    """Raise SpecError if the answers in a run's folder were not given by checkpoints of that run.

    They may have been given in another run and only judged in this one, or by an endpoint.
    """
    if JUDGED in run.provenance():
        raise SpecError(f"{str(run.path)!r} holds answers of another run, judged again; explain that run's")
    if run.spec.probe is not None:
        raise SpecError(f"{str(run.path)!r} holds answers of an endpoint, whose cache cannot be inspected")


def finished_records(run: RunFolder, unit: Unit) -> Iterator[Record]:
    """Yield the records of a unit of the run; none if it is unfinished.

    Raises DataError if the records were changed since they were written.
    """
    files = UnitFiles.of(run.records, unit)
    if files.seal.is_file():
        stored = read_unit(files.records)
        stored.check()
        yield from read_records(stored)


def remake_items(run: RunFolder, model: LoadedModel, suite: Suite, record: Record) -> dict[str, Item]:
    """Return the items of a unit, made again, as {item id: item}; ``record`` is any record of the unit.

    Raises DataError or RunError if suite, rows or model files changed, SpecError if another harness runs the suite.
    """
    if suite.played_by:
        raise SpecError(f"suite {suite.name} is run by another harness, so kvaudit cannot serve its answers again")
    if suite.version != record.suite_version:
        raise DataError(
            f"suite {suite.name} is version {suite.version}, the run used version {record.suite_version}, so the item "
            "may differ; install the kvaudit that the run was made with"
        )
    folder = run.checkpoint(record.arm, record.train_seed)
    if (folder / PROVENANCE).is_file():
        check_checkpoint(folder)
    items = make_items_again(run, suite, record.context_tokens, model.chat.count_tokens)
    inputs = run.provenance().get(INPUTS)
    # by arm, not by sha256: a checkpoint that learnt nothing has the base model's weights
    if isinstance(inputs, dict) and record.arm == BASE_ARM and not run.spec.starts:  # early versions have no inputs
        check_inputs(MODEL, inputs.get(MODEL, {}), model.files)
    return items


def checkpoint_rollouts(folder: Path) -> list[RecordedRollouts]:
    """Return the rollouts of a finished checkpoint's last training step; a ``Mixture`` has one set for each policy.

    Rollouts of earlier steps cannot be replayed, since the weights that sampled them are not kept. Raises DataError if
    files were changed or there are no rollouts.
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
    files = {f"{ledger_stem(FINAL_LEDGER, policy, mixed=mixed)}.safetensors": policy for policy in trained.draws}
    kept_files = {name: policy for name, policy in files.items() if name in provenance["ledgers"]}
    if not kept_files:
        raise DataError(
            f"checkpoint {str(folder)!r} keeps no {LEDGERS}/{min(files)}; train it again with ledger_every above 0"
        )
    return [
        replace(read_rollouts(folder / LEDGERS / name), temperature=temperature, trained_policy=policy)
        for name, policy in kept_files.items()
    ]


# --- answers served again -------------------------------------------------------------------------------------------


class AnswerSet(NamedTuple):
    """The answers to serve again: to items of one suite and length, by one checkpoint under one policy.

    ``records`` maps the key of each answer to its record, or to None if the run did not serve that policy. ``example``
    is a record of one of the items under any policy, which identifies suite, length and checkpoint.
    """

    policy: Policy
    records: Mapping[AnswerKey, Record | None]
    example: Record


@dataclass(frozen=True)
class RerunAnswer:
    """An answer that was served again under one policy.

    ``record`` is the recorded answer, None if the run did not serve that policy. ``row`` is the new answer. ``shading``
    says, for each token before the new answer, by how many heads the cache still held it.
    """

    policy: Policy  # the one drawn, of a mixture
    record: Record | None
    row: GradedRow
    shading: Shading

    @property
    def is_same(self) -> bool | None:
        """Whether the answer equals the recorded one; None without a record."""
        if self.record is None:
            return None
        return (self.row.transcript, self.row.new_tokens) == (self.record.transcript, self.record.new_tokens)

    @property
    def held_shares(self) -> list[float]:
        """The share of KV heads, over all layers, that held each earlier token when the answer began."""
        return [count / self.shading.heads for count in self.shading.held]

    @property
    def outcome(self) -> str:
        """The grade in one line, with every facet, such as "undesired, refused no"."""
        texts = {True: "yes", False: "no", None: "could not be read"}
        facets = [f"{name} {texts[value]}" for name, value in self.row.grade.facets.items()]
        return ", ".join([self.row.grade.outcome.value, *facets])


class AnswerMeasure(Measure[AnswerSet, list[RerunAnswer], Total], ABC):
    """The base of measures that serve a run's answers again.

    Raises SpecError if the answers were not given by the run's own checkpoints.
    """

    def __init__(self, run: RunFolder) -> None:
        check_rerunnable(run)
        self._run = run
        self._model: tuple[tuple[str, int, str], LoadedModel] | None = None  # the last one, by arm, seed and sha256
        self._cell: tuple[str, int, str, int] | None = None
        self._cell_items: dict[str, Item] = {}

    def size(self, unit: AnswerSet) -> int:
        return len(unit.records)

    def model(self, unit: AnswerSet) -> LoadedModel:
        key = (unit.example.arm, unit.example.train_seed, unit.example.checkpoint)
        if self._model is None or self._model[0] != key:
            self._model = None  # freed before the next one is loaded
            self._model = key, load_checkpoint(self._run, *key)
        return self._model[1]

    def serve(self, unit: AnswerSet, model: LoadedModel) -> Iterator[list[RerunAnswer]]:
        suite, seed = suite_as_asked(self._run.spec, unit.example.suite), self._run.spec.evaluate.seed
        for rows in Evaluator(model, self._run.spec).answer_items(unit.policy, suite, self._items(unit, suite, model)):
            keys = {AnswerKey(row.item.item_id, row.sample_index): row for row in rows}
            yield [
                RerunAnswer(
                    unit.policy.drawn(row_seed(seed, row.item, row.sample_index)),
                    unit.records[key],
                    row,
                    _shading(model, row),
                )
                for key, row in keys.items()
                if key in unit.records
            ]

    def _items(self, unit: AnswerSet, suite: Suite, model: LoadedModel) -> list[Item]:
        example = unit.example
        cell = (example.arm, example.train_seed, example.suite, example.context_tokens)
        if self._cell != cell:  # policies of one checkpoint are adjacent and share the items
            self._cell, self._cell_items = cell, remake_items(self._run, model, suite, example)
        names = list(dict.fromkeys(key.item for key in unit.records))
        missing = next((name for name in names if name not in self._cell_items), None)
        if missing is not None:
            raise DataError(f"suite {suite.name} does not make item {missing!r} any more; its rows or words changed")
        return [self._cell_items[name] for name in names]


def _shading(model: LoadedModel, row: GradedRow) -> Shading:
    rollout = row.rollout
    start = rollout.answer_start
    marks = {name: [token for token in tokens if token < start] for name, tokens in row.marks.items()}
    marks = {name: tokens for name, tokens in marks.items() if tokens}
    alive = rollout.evicted_at[:, :, :start] > start  # [L, H, T]
    return Shading(
        pieces=model.chat.pieces(rollout.ids[:start].tolist()),
        roles=list(row.roles[:start]),
        held=alive.sum((0, 1)).tolist(),  # by token: how many heads hold it
        heads=alive.shape[0] * alive.shape[1],
        depth={
            name: alive[:, :, tokens].double().mean((1, 2)).tolist()  # by layer
            for name, tokens in {ALL_TOKENS: list(range(start)), **marks}.items()
        },
        marks=marks,
    )
