"""What the cache still held of every token when an answer began: recorded answers served again in bulk, and kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from kvaudit.audit.again.finished import Checkpoints, check_answers, finished_records, is_same, items_again
from kvaudit.audit.again.measure import Measure
from kvaudit.audit.policies import Policy
from kvaudit.audit.runs.evaluate import Evaluator, asked_suite, grid
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.units import Unit
from kvaudit.audit.sampling.conversations import Played
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.conditions import engine_in
from kvaudit.core.records import Record
from kvaudit.core.shading import ALL, AnswerKey, Shading, Shadings, read_shadings, write_shadings
from kvaudit.core.text import length_label


class ShadedUnit(NamedTuple):
    """The answers of a unit that are to be served again."""

    unit: Unit
    records: Mapping[AnswerKey, Record]


class Shades(Measure[ShadedUnit, Shadings, Shadings]):
    """What caches held of the wanted answers of some units; what was served again before is not served once more.

    Raises SpecError for answers that no checkpoint of the run gave.
    """

    name = "shade"
    says = "what the cache still held of every token of a prompt when the answer began"
    needs = "finished units of our own cache, with transcripts"
    by_item = True

    def __init__(self, run: RunFolder, wanted: Mapping[str, Collection[AnswerKey]]) -> None:
        check_answers(run)
        self._run, self._wanted, self._checkpoints = run, wanted, Checkpoints(run)

    @classmethod
    def trial(cls, run: RunFolder) -> Self:
        unit = next(unit for unit in grid(run.spec) if unit.arm == run.spec.arms[0][0])
        return cls(run, {unit.name: {_answer(record) for record in finished_records(run, unit)}})

    def pieces(self) -> Sequence[ShadedUnit]:
        # an engine's cache is out of sight
        ours = (unit for unit in grid(self._run.spec) if isinstance(unit.policy, Policy) and unit.name in self._wanted)
        found = (ShadedUnit(unit, self._missing(unit, self._wanted[unit.name])) for unit in ours)
        return [piece for piece in found if piece.records]

    def label(self, piece: ShadedUnit) -> str:
        unit = piece.unit
        where = f"{unit.suite} {length_label(unit.context_tokens)}"
        return f"{unit.arm} seed {unit.seed}, {engine_in(unit.policy.canonical)}, {where}"

    def size(self, piece: ShadedUnit) -> int:
        return len(piece.records)

    def model(self, piece: ShadedUnit) -> LoadedModel:
        weights = next(iter(piece.records.values())).checkpoint
        (model,) = self._checkpoints.load((piece.unit.arm, piece.unit.seed, weights))
        return model

    def served(self, piece: ShadedUnit, model: LoadedModel) -> Iterator[Shadings]:
        suite, policy = asked_suite(self._run.spec, piece.unit.suite), piece.unit.policy
        items = items_again(self._run, model, suite, *piece.records.values())
        chosen = [items[item] for item in dict.fromkeys(answer.item for answer in piece.records)]
        assert isinstance(policy, Policy)
        for rows in Evaluator(model, self._run.spec).again(policy, suite, chosen):
            own = {AnswerKey(row.item.item_id, row.sample_index): row for row in rows}
            yield {
                answer: shading_of(model, row) if is_same(row, piece.records[answer]) else None
                for answer, row in own.items()
                if answer in piece.records
            }

    def summed(self, piece: ShadedUnit, model: LoadedModel, parts: Iterator[Shadings]) -> Shadings:  # noqa: ARG002
        """What the answers' caches held, on disk part by part."""
        known, found = read_shadings(self._run.path, piece.unit.name), Shadings()
        for part in parts:
            found |= part
            write_shadings(self._run.path, piece.unit.name, known | found)
        return found

    def differs(self, piece: ShadedUnit, total: Shadings) -> bool:  # noqa: ARG002
        return None in total.values()

    def lines(self, found: Sequence[tuple[ShadedUnit, Shadings]]) -> Iterator[str]:
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


def shading_of(model: LoadedModel, row: Played) -> Shading:
    """What a row's cache still held when its last answer began."""
    rollout = row.rollout
    start = rollout.answer_start
    marks = {name: [token for token in tokens if token < start] for name, tokens in row.marks.items()}
    marks = {name: tokens for name, tokens in marks.items() if tokens}
    alive = rollout.evicted_at[:, :, :start] > start  # [L, H, T]
    return Shading(
        pieces=model.chat.pieces(rollout.ids[:start].tolist()),
        roles=list(row.roles[:start]),
        held=alive.sum((0, 1)).tolist(),
        heads=alive.shape[0] * alive.shape[1],
        depth={
            name: alive[:, :, own].double().mean((1, 2)).tolist()
            for name, own in {ALL: list(range(start)), **marks}.items()
        },
        marks=marks,
    )
