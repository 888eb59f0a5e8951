"""What the cache still held of every token when an answer began: recorded answers served again in bulk, and kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Self

from kvaudit.audit.rerun.finished import AnswerMeasure, RerunAnswer, AnswerSet
from kvaudit.audit.rerun.finished import finished_records
from kvaudit.audit.policies import Policy
from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.units import Unit
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.conditions import engine_in
from kvaudit.core.records import Record
from kvaudit.core.shading import AnswerKey, Shadings, read_shadings, write_shadings
from kvaudit.core.text import length_label


class Shades(AnswerMeasure[Shadings]):
    """What caches held of the wanted answers of some units; what was served again before is not served once more."""

    name = "shade"
    by_item = True

    def __init__(self, run: RunFolder, wanted: Mapping[str, Collection[AnswerKey]]) -> None:
        super().__init__(run)
        self._wanted = wanted

    @classmethod
    def trial(cls, run: RunFolder) -> Self:
        unit = grid(run.spec)[0]
        return cls(run, {unit.name: {_answer(record) for record in finished_records(run, unit)}})

    def pieces(self) -> Sequence[AnswerSet]:
        # an engine's cache is out of sight
        ours = ((unit, unit.policy) for unit in grid(self._run.spec) if isinstance(unit.policy, Policy))
        found = ((policy, self._missing(unit, self._wanted.get(unit.name, ()))) for unit, policy in ours)
        return [AnswerSet(policy, records, next(iter(records.values()))) for policy, records in found if records]

    def label(self, piece: AnswerSet) -> str:
        known = piece.known
        where = f"{known.suite} {length_label(known.context_tokens)}"
        return f"{known.arm} seed {known.train_seed}, {engine_in(piece.policy.canonical)}, {where}"

    def summed(self, piece: AnswerSet, model: LoadedModel, parts: Iterator[list[RerunAnswer]]) -> Shadings:  # noqa: ARG002
        """What the answers' caches held, on disk part by part; None where another answer came out."""
        known = piece.known
        unit = Unit(known.arm, known.train_seed, piece.policy, known.suite, known.context_tokens).name
        kept, found = read_shadings(self._run.path, unit), Shadings()
        for part in parts:
            for one in part:
                answer = AnswerKey(one.played.item.item_id, one.played.sample_index)
                found[answer] = one.shading if one.same else None
            write_shadings(self._run.path, unit, kept | found)
        return found

    def differs(self, total: Shadings) -> bool:
        return None in total.values()

    def lines(self, found: Sequence[tuple[AnswerSet, Shadings]]) -> Iterator[str]:
        for piece, total in found:
            same = sum(shading is not None for shading in total.values())
            yield f"{self.label(piece)}: {same} of {len(total)} answers came out as recorded"

    def _missing(self, unit: Unit, wanted: Collection[AnswerKey]) -> dict[AnswerKey, Record]:
        """The records of the wanted answers of a unit that were not served again yet."""
        missing = set(wanted) - set(read_shadings(self._run.path, unit.name)) if wanted else set()
        records = finished_records(self._run, unit) if missing else ()
        return {answer: record for record in records if (answer := _answer(record)) in missing}


def _answer(record: Record) -> AnswerKey:
    return AnswerKey(record.item_id, record.sample_index)
