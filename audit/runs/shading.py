"""Recorded answers served again in bulk, to keep what the cache still held of every token when each began."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby

from kvaudit.audit.policies import Policy
from kvaudit.audit.runs.checkpoints import load_checkpoint
from kvaudit.audit.runs.evaluate import Evaluator, asked_suite, grid
from kvaudit.audit.runs.explain import check_answers, finished_records, is_same, items_again
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.units import Unit
from kvaudit.audit.sampling.conversations import Played
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.conditions import engine_in
from kvaudit.core.records import Record
from kvaudit.core.shading import ALL, AnswerKey, Shading, read_shadings, write_shadings
from kvaudit.core.text import length_label

AnswersDone = Callable[[int, str], None]  # answers served, the unit under way


def shade(run: RunFolder, wanted: Mapping[str, Collection[AnswerKey]], progress: AnswersDone) -> None:
    """Serve the wanted answers of some units again, checkpoint by checkpoint, and keep what was found batch by batch.

    What was served before is not served again. Raises SpecError for answers that no checkpoint of the run gave,
    DataError where anything changed that they follow from.
    """
    check_answers(run)
    done = 0
    for (arm, seed), units in groupby(grid(run.spec), key=lambda unit: (unit.arm, unit.seed)):
        ours = [unit for unit in units if isinstance(unit.policy, Policy)]  # an engine's cache is out of sight
        missing = {unit: own for unit in ours if (own := _missing(run, unit, wanted.get(unit.name, ())))}
        if not missing:
            continue
        model = load_checkpoint(run, arm, seed, next(iter(next(iter(missing.values())).values())).checkpoint)
        for unit, records in missing.items():
            for found in _served(run, unit, model, records):
                done += found
                progress(
                    done,
                    f"{arm} seed {seed}, {engine_in(unit.policy.canonical)}, {unit.suite} "
                    f"{length_label(unit.context_tokens)}",
                )


def _missing(run: RunFolder, unit: Unit, wanted: Collection[AnswerKey]) -> dict[AnswerKey, Record]:
    """The records of the wanted answers of a unit that were not served again yet."""
    missing = set(wanted) - set(read_shadings(run.path, unit.name)) if wanted else set()
    if not missing:
        return {}
    records = finished_records(run, unit)
    return {answer: record for record in records if (answer := _answer(record)) in missing}


def _served(run: RunFolder, unit: Unit, model: LoadedModel, records: Mapping[AnswerKey, Record]) -> Iterator[int]:
    """Serve some answers of a unit again; yields how many after each batch, when they are on disk."""
    suite, known = asked_suite(run.spec, unit.suite), read_shadings(run.path, unit.name)
    items = items_again(run, model, suite, *records.values())
    chosen = [items[item] for item in dict.fromkeys(answer.item for answer in records)]
    assert isinstance(unit.policy, Policy)
    for rows in Evaluator(model, run.spec).again(unit.policy, suite, chosen):
        asked = {AnswerKey(row.item.item_id, row.sample_index): row for row in rows}
        own = {answer: row for answer, row in asked.items() if answer in records}
        known |= {a: _shading(model, row) if is_same(row, records[a]) else None for a, row in own.items()}
        write_shadings(run.path, unit.name, known)
        yield len(own)


def _answer(record: Record) -> AnswerKey:
    return AnswerKey(record.item_id, record.sample_index)


def _shading(model: LoadedModel, row: Played) -> Shading:
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
