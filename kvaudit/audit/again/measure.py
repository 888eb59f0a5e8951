"""The contract of a measure, and the one loop that serves recorded items again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from io import StringIO
from typing import Any, ClassVar, Generic, Self, TypeVar

from rich.console import Console

from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.progress import Meter
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.registry import Registry
from kvaudit.reports.sections.shared.tables import Table

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
    by_item: ClassVar[bool] = False  # whether progress counts items or pieces

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


MEASURES: Registry[Measure[Any, Any, Any]] = Registry(
    "measure",
    "kvaudit.audit.rerun",
    Measure,  # type: ignore[type-abstract]  # its plug-ins are whole
)


def serve_again(
    measure: Measure[Piece, ServedBatch, Total], console: Console | None = None
) -> list[tuple[Piece, Total]]:
    """Serve every piece and return all with what they come to; ``console`` shows the progress."""
    console = console or Console(file=StringIO())
    pieces, found, items = measure.pieces(), list[tuple[Piece, Total]](), 0

    def show(piece: Piece) -> None:
        meter.at(items if measure.by_item else len(found), measure.label(piece))

    def parts(piece: Piece, model: LoadedModel) -> Iterator[ServedBatch]:
        nonlocal items
        for part in measure.served(piece, model):
            yield part
            items += len(part)  # whoever asks for the next has summed this one
            show(piece)

    total = sum(map(measure.size, pieces)) if measure.by_item else len(pieces)
    with Meter(console, measure.name, total) as meter:
        for piece in pieces:
            show(piece)
            model = measure.model(piece)
            found.append((piece, measure.summed(piece, model, parts(piece, model))))
        meter.at(total, "all of it")
    return found
