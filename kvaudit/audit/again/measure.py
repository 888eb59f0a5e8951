"""The contract of a measure, and the one loop that serves recorded items again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from functools import partial
from io import StringIO
from itertools import filterfalse
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from rich.console import Console

from kvaudit.audit.runs.claims import Claim, work_through
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.progress import Meter
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.registry import Registry
from kvaudit.reports.layout.tables import Table

Piece = TypeVar("Piece")
ServedBatch = TypeVar("ServedBatch", bound=Sized)
Total = TypeVar("Total")


class Measure(ABC, Generic[Piece, ServedBatch, Total]):
    """What is measured of recorded items that are served again. Subclass in a file of its own, with a ``name``.

    A piece is what is served and summed by itself: a file of rollouts, a unit of a run, an answer under a policy. It
    comes back part by part, the length of a part being the number of recorded items in it.
    """

    name: ClassVar[str] = ""
    decides: ClassVar[bool] = False  # whether its command exits with 3 where something ``differs``
    by_item: ClassVar[bool] = False  # whether progress counts items, where no piece is kept, or pieces

    @classmethod
    @abstractmethod
    def trial(cls, run: RunFolder) -> Self:
        """The measure of a finished run whose first trained arm sampled densely and kept its last rollouts."""

    @abstractmethod
    def pieces(self) -> Sequence[Piece]:
        """Everything that is served again; pieces of one checkpoint stand together."""

    @abstractmethod
    def size(self, piece: Piece) -> int:
        """How many recorded items a piece has."""

    @abstractmethod
    def model(self, piece: Piece) -> LoadedModel:
        """The weights that serve a piece; loaded once for pieces that stand together."""

    @abstractmethod
    def served(self, piece: Piece, model: LoadedModel) -> Iterator[ServedBatch]:
        """Serve a piece again; raises DataError where anything changed that its items follow from."""

    @abstractmethod
    def summed(self, piece: Piece, model: LoadedModel, parts: Iterator[ServedBatch]) -> Total:
        """What the parts of a piece come to; they are served as they are asked for."""

    @abstractmethod
    def differs(self, total: Total) -> bool:
        """Whether what came out is other than what is recorded, beyond rounding; False where nothing says so."""

    @abstractmethod
    def lines(self, found: Sequence[tuple[Piece, Total]]) -> Iterator[str | Table]:
        """What is printed of all pieces; texts of a run or of a file are made visible on one line."""

    def label(self, piece: Piece) -> str:  # noqa: ARG002
        """The piece in a few words, beside the progress where that is shown."""
        return self.name

    def lock(self, piece: Piece) -> Path | None:
        """The lock file of a piece that several processes may share, None where each serves all by itself."""

    def kept(self, piece: Piece) -> Total | None:
        """What an earlier process left of a piece, None where it is to be served."""

    def keep(self, piece: Piece, total: Total) -> None:
        """Keep what a piece comes to for later processes."""


MEASURES: Registry[Measure[Any, Any, Any]] = Registry(
    "measure",
    "kvaudit.audit.again",
    Measure,  # type: ignore[type-abstract]  # its plug-ins are whole
)


def serve_again(
    measure: Measure[Piece, ServedBatch, Total], console: Console | None = None
) -> list[tuple[Piece, Total]]:
    """Serve every piece that is not kept, and return all with what they come to; ``console`` shows the progress."""
    console = console or Console(file=StringIO())
    pieces, totals, finished, items = measure.pieces(), dict[int, Total](), set[int](), 0

    def is_done(number: int) -> bool:
        if number not in totals and (kept := measure.kept(pieces[number])) is not None:
            totals[number] = kept
        return number in totals

    def show(piece: Piece) -> None:
        meter.at(items if measure.by_item else len(finished), measure.label(piece))

    def parts(piece: Piece, model: LoadedModel) -> Iterator[ServedBatch]:
        nonlocal items
        for part in measure.served(piece, model):
            yield part
            items += len(part)  # whoever asks for the next has summed this one
            show(piece)

    def work(number: int, claim: Claim | None = None) -> None:
        piece = pieces[number]
        show(piece)
        model = measure.model(piece)
        found = measure.summed(piece, model, parts(piece, model))
        if claim is not None:
            claim.check()  # whoever took the piece over keeps it
        measure.keep(piece, found)
        totals[number] = found

    waiting = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    numbers, locks = range(len(pieces)), [lock for lock in map(measure.lock, pieces) if lock is not None]
    total = sum(map(measure.size, pieces)) if measure.by_item else len(pieces)
    with Meter(console, measure.name, total, sum(map(is_done, numbers))) as meter:
        if locks:
            at = locks.__getitem__
            work_through(numbers, done=is_done, lock=at, work=work, finished=finished.add, waiting=waiting)
        else:
            finished.update(totals)  # those that are kept
            for number in filterfalse(is_done, numbers):
                work(number)
                finished.add(number)
        meter.at(total, "all of it")
    return [(piece, totals[number]) for number, piece in enumerate(pieces)]
