"""One recorded answer served again: the same checkpoint, prompt and seed under its policy, or under another."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvaudit.audit.policies import Policy
from kvaudit.audit.runs.checkpoints import load_checkpoint
from kvaudit.audit.runs.evaluate import Evaluator, asked_suite, evaluation_items, grid, row_seed
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.stored import records_of, stored_unit
from kvaudit.audit.runs.units import Unit, UnitFiles
from kvaudit.audit.sampling.conversations import Played
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.provenance import INPUTS, JUDGED, MODEL, PROVENANCE, ROWS, check_checkpoint, check_same
from kvaudit.core.records import Item, Record
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.suites.base import Suite
from kvaudit.suites.sources import watched

_CLOSE = 3  # names that a refusal proposes


class Where(NamedTuple):
    """Which answer: ``length`` None where the item's name stands at one length alone."""

    item: str
    arm: str
    seed: int
    length: int | None
    sample: int


@dataclass(frozen=True)
class ServedAgain:
    """An answer that was served again, beside the recorded one if the run served that policy.

    ``pieces`` are the texts of the tokens before the answer, ``held`` the share of layers and KV heads that still held
    each when the answer began, ``depth`` the share of them that each layer still held.
    """

    policy: Policy  # what was drawn of a mixture
    record: Record | None
    played: Played
    pieces: tuple[str, ...]
    held: tuple[float, ...]
    depth: tuple[float, ...]

    @property
    def same(self) -> bool | None:
        """Whether the answer is the recorded one, None where none is on record."""
        return None if self.record is None else is_same(self.played, self.record)


def is_same(played: Played, record: Record) -> bool:
    """Whether an answer that was served again is the recorded one."""
    return (played.transcript, played.new_tokens) == (record.transcript, record.new_tokens)


def explain(run: RunFolder, where: Where, policies: Sequence[Policy]) -> list[ServedAgain]:
    """The answer to an item under each policy.

    Raises SpecError for an item, arm, seed, length or sample that the run has not, DataError where anything changed
    that the answer follows from.
    """
    check_answers(run)
    units = _units(run, where)
    kept = {policy: _kept(run, own) for policy, own in units.items()}
    suite_name, length = _place(kept, where)
    records = {policy: rows.get((suite_name, length, where.item, where.sample)) for policy, rows in kept.items()}
    some = next((record for record in records.values() if record is not None), None)
    if some is None:
        raise SpecError(
            f"--sample is {where.sample}, the run has {run.spec.evaluate.samples_of(suite_name)} of an item"
        )
    if not some.transcript:
        raise DataError(f"{str(run.path)!r} holds no transcripts, so no answer to compare with; evaluate it again")
    model = load_checkpoint(run, where.arm, where.seed, some.checkpoint)
    suite = asked_suite(run.spec, suite_name)
    item = items_again(run, model, suite, some)[some.item_id]
    evaluator = Evaluator(model, run.spec)
    seed = row_seed(run.spec.evaluate.seed, item, where.sample)
    found = []
    for policy in policies:
        (rows,) = evaluator.again(policy, suite, [item])
        found.append(_served(model, policy.drawn(seed), records.get(policy.canonical), rows[where.sample]))
    return found


def check_answers(run: RunFolder) -> None:
    """Raise SpecError where no checkpoint of the run gave its answers."""
    if JUDGED in run.provenance():
        raise SpecError(f"{str(run.path)!r} holds answers of another run, judged again; explain that run's")
    if run.spec.probe is not None:
        raise SpecError(f"{str(run.path)!r} holds answers of an endpoint, whose cache nobody can look into")


def _units(run: RunFolder, where: Where) -> dict[str, list[Unit]]:
    """The units of the chosen checkpoint by policy."""
    found: dict[str, list[Unit]] = {}
    for unit in grid(run.spec):
        if (unit.arm, unit.seed) == (where.arm, where.seed):
            found.setdefault(unit.policy.canonical, []).append(unit)
    if not found:
        known = ", ".join(f"{arm} {seed}" for arm, seed in run.spec.arms)
        raise SpecError(f"the run has no arm {where.arm!r} with seed {where.seed}; it has {known}")
    return found


RecordsByRow = dict[tuple[str, int, str, int], Record]  # by suite, length, item and sample


def _kept(run: RunFolder, units: Sequence[Unit]) -> RecordsByRow:
    return {
        (record.suite, record.context_tokens, record.item_id, record.sample_index): record
        for unit in units
        for record in finished_records(run, unit)
    }


def finished_records(run: RunFolder, unit: Unit) -> Iterator[Record]:
    """The records of a unit, none of an unfinished one; raises DataError where they are not the sealed ones."""
    files = UnitFiles.of(run.records, unit)
    if files.seal.is_file():
        stored = stored_unit(files.records)
        stored.check()
        yield from records_of(stored)


def _place(kept: dict[str, RecordsByRow], where: Where) -> tuple[str, int]:
    """Suite and length of the item; raises SpecError for none, and for several."""
    keys = {key for rows in kept.values() for key in rows}
    found = sorted({(suite, length) for suite, length, item, _ in keys if item == where.item})
    chosen = [place for place in found if where.length in (None, place[1])]
    if len(chosen) == 1:
        return chosen[0]
    if found:
        places = ", ".join(f"{suite} at {length}" for suite, length in found)
        raise SpecError(f"item {where.item!r} stands in {places}; choose one with --length")
    close = difflib.get_close_matches(where.item, {item for _, _, item, _ in keys}, n=_CLOSE, cutoff=0.3)
    near = f"; near are {', '.join(close)}" if close else ""
    raise SpecError(f"item {where.item!r} is not among the finished answers of {where.arm} seed {where.seed}{near}")


def items_again(run: RunFolder, model: LoadedModel, suite: Suite, *records: Record) -> dict[str, Item]:
    """The items of a unit as the run asked them, those of its ``records`` (one at least) among them.

    Raises DataError and RunError where suite, rows or model files changed.
    """
    record = records[0]
    if suite.version != record.suite_version:
        raise DataError(
            f"suite {suite.name} is version {suite.version}, the run asked version {record.suite_version}: the item "
            "may be another; install the kvaudit that the run was made with"
        )
    folder = run.checkpoint(record.arm, record.train_seed)
    if (folder / PROVENANCE).is_file():
        check_checkpoint(folder)
    with watched() as rows:
        items = evaluation_items(run.sized, suite, record.context_tokens, model.chat.count_tokens)
    noted = run.provenance().get(INPUTS)
    if isinstance(noted, dict):  # a run of an earlier version noted none
        check_same(ROWS, {name: noted.get(ROWS, {}).get(name) for name in rows}, rows)
        if record.arm == BASE_ARM and not run.spec.starts:  # by name: a checkpoint that learnt nothing has its weights
            check_same(MODEL, noted.get(MODEL, {}), model.files)
    found = {item.item_id: item for item in items}
    gone = next((record.item_id for record in records if record.item_id not in found), None)
    if gone is not None:
        raise DataError(f"suite {suite.name} does not make item {gone!r} any more; its rows or words changed")
    return found


def _served(model: LoadedModel, policy: Policy, record: Record | None, played: Played) -> ServedAgain:
    rollout = played.rollout
    start = rollout.answer_start
    alive = (rollout.evicted_at[:, :, :start] > start).double()  # [L, H, T]
    return ServedAgain(
        policy=policy,
        record=record,
        played=played,
        pieces=tuple(model.chat.pieces(rollout.ids[:start].tolist())),
        held=tuple(alive.mean((0, 1)).tolist()),
        depth=tuple(alive.mean((1, 2)).tolist()),
    )
