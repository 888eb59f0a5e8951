"""Which prompt tokens the cache still held when an answer began: recorded answers served again in bulk, and stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Self

from kvaudit.audit.policies import Policy
from kvaudit.audit.rerun.finished import AnswerMeasure, AnswerSet, RerunAnswer, finished_records
from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.units import Unit
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.policy_names import engine_name
from kvaudit.core.records import Record
from kvaudit.core.shading import AnswerKey, Shadings, read_shadings, write_shadings
from kvaudit.core.text import length_label


class Shade(AnswerMeasure[Shadings]):
    """The shadings of the requested answers, by name of the run's unit; those already stored are not served again."""

    name = "shade"
    by_item = True

    def __init__(self, run: RunFolder, requested: Mapping[str, Collection[AnswerKey]]) -> None:
        super().__init__(run)
        self._requested = requested

    @classmethod
    def trial(cls, run: RunFolder) -> Self:
        unit = grid(run.spec)[0]
        return cls(run, {unit.name: {_key(record) for record in finished_records(run, unit)}})

    def units(self) -> Sequence[AnswerSet]:
        # a serving engine does not expose its cache
        cells = [(cell, cell.policy) for cell in grid(self._run.spec) if isinstance(cell.policy, Policy)]
        missing = ((policy, self._missing(cell)) for cell, policy in cells)
        return [AnswerSet(policy, records, next(iter(records.values()))) for policy, records in missing if records]

    def label(self, unit: AnswerSet) -> str:
        example = unit.example
        suite = f"{example.suite} {length_label(example.context_tokens)}"
        return f"{example.arm} seed {example.train_seed}, {engine_name(unit.policy.canonical)}, {suite}"

    def reduce(self, unit: AnswerSet, model: LoadedModel, batches: Iterator[list[RerunAnswer]]) -> Shadings:  # noqa: ARG002
        """Write the shadings to disk after every batch; None for an answer that differs from its record."""
        example = unit.example
        name = Unit(example.arm, example.train_seed, unit.policy, example.suite, example.context_tokens).name
        stored, new = read_shadings(self._run.path, name), Shadings()
        for batch in batches:
            for answer in batch:
                key = AnswerKey(answer.row.item.item_id, answer.row.sample_index)
                new[key] = answer.shading if answer.same else None
            write_shadings(self._run.path, name, stored | new)
        return new

    def differs(self, total: Shadings) -> bool:
        return None in total.values()

    def lines(self, results: Sequence[tuple[AnswerSet, Shadings]]) -> Iterator[str]:
        for unit, total in results:
            same = sum(shading is not None for shading in total.values())
            yield f"{self.label(unit)}: {same} of {len(total)} answers came out as recorded"

    def _missing(self, unit: Unit) -> dict[AnswerKey, Record]:
        """Return the records of the requested answers of a unit that have no stored shading."""
        requested = self._requested.get(unit.name, ())
        missing = set(requested) - set(read_shadings(self._run.path, unit.name)) if requested else set()
        records = finished_records(self._run, unit) if missing else ()
        return {key: record for record in records if (key := _key(record)) in missing}


def _key(record: Record) -> AnswerKey:
    return AnswerKey(record.item_id, record.sample_index)
