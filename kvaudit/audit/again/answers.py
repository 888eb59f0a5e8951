"""Recorded answers served again: the same checkpoint, prompt and seed, under their policy or under another."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvaudit.audit.rerun.finished import Checkpoints, check_rerunnable, remake_items
from kvaudit.audit.rerun.measure import Measure, Total
from kvaudit.audit.policies import Policy
from kvaudit.audit.runs.evaluate import Evaluator, row_seed, suite_as_asked
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.errors import DataError
from kvaudit.core.records import Item, Record
from kvaudit.core.shading import ALL, AnswerKey, Shading
from kvaudit.suites.base import Suite


class SomeAnswers(NamedTuple):
    """Answers to items of one suite and length, by one checkpoint under one policy.

    ``records`` are None where the run did not serve that policy. ``known`` is a record of one of the items under
    whatever policy: it says what was asked, and with which weights.
    """

    policy: Policy
    records: Mapping[AnswerKey, Record | None]
    known: Record


@dataclass(frozen=True)
class ServedAgain:
    """An answer that was served again, beside the recorded one if the run served that policy."""

    policy: Policy  # what was drawn of a mixture
    record: Record | None
    played: GradedRow
    shading: Shading

    @property
    def same(self) -> bool | None:
        """Whether the answer is the recorded one, None where none is on record."""
        if self.record is None:
            return None
        own = (self.played.transcript, self.played.new_tokens)
        return own == (self.record.transcript, self.record.new_tokens)

    @property
    def held(self) -> list[float]:
        """The share of layers and KV heads that still held each token before the answer when it began."""
        return [count / self.shading.heads for count in self.shading.held]

    @property
    def outcome(self) -> str:
        """The grade in one line."""
        grade = self.played.grade
        words = {True: "yes", False: "no", None: "could not be read"}
        facets = [f"{name} {words[value]}" for name, value in grade.facets.items()]
        return ", ".join([grade.outcome.value, *facets])


class AnswersAgain(Measure[SomeAnswers, list[ServedAgain], Total], ABC):
    """What is measured of answers with transcripts; raises SpecError where no checkpoint of the run gave them."""

    def __init__(self, run: RunFolder) -> None:
        check_rerunnable(run)
        self._run, self._checkpoints = run, Checkpoints(run)
        self._made: tuple[tuple[str, int, str, int], dict[str, Item]] | None = None  # the last cell, and its items

    def size(self, piece: SomeAnswers) -> int:
        return len(piece.records)

    def model(self, piece: SomeAnswers) -> LoadedModel:
        (model,) = self._checkpoints.load((piece.known.arm, piece.known.train_seed, piece.known.checkpoint))
        return model

    def served(self, piece: SomeAnswers, model: LoadedModel) -> Iterator[list[ServedAgain]]:
        suite, seed = suite_as_asked(self._run.spec, piece.known.suite), self._run.spec.evaluate.seed
        for rows in Evaluator(model, self._run.spec).answer_items(
            piece.policy, suite, self._items(piece, suite, model)
        ):
            own = {AnswerKey(row.item.item_id, row.sample_index): row for row in rows}
            yield [
                ServedAgain(
                    piece.policy.drawn(row_seed(seed, row.item, row.sample_index)),
                    piece.records[answer],
                    row,
                    _shading(model, row),
                )
                for answer, row in own.items()
                if answer in piece.records
            ]

    def _items(self, piece: SomeAnswers, suite: Suite, model: LoadedModel) -> list[Item]:
        known = piece.known
        cell = (known.arm, known.train_seed, known.suite, known.context_tokens)
        if self._made is None or self._made[0] != cell:  # policies of one checkpoint stand together
            self._made = cell, remake_items(self._run, model, suite, known)
        names, items = list(dict.fromkeys(answer.item for answer in piece.records)), self._made[1]
        gone = next((name for name in names if name not in items), None)
        if gone is not None:
            raise DataError(f"suite {suite.name} does not make item {gone!r} any more; its rows or words changed")
        return [items[name] for name in names]


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
            name: alive[:, :, own].double().mean((1, 2)).tolist()  # by layer
            for name, own in {ALL: list(range(start)), **marks}.items()
        },
        marks=marks,
    )
