"""What a section of the report is: one idea, in one file, from what is computed to what is shown.

A section stands beside the verdict and never changes it: it sees what was decided and decides nothing. It is found by
walking this package; page, report.md and drift.json print whatever is found, in the order that the sections name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from kvaudit.core.errors import DataError
from kvaudit.core.plugins import Registry
from kvaudit.reports.records.load import RunData
from kvaudit.reports.sections.base import contrasts_table, lowest_drift
from kvaudit.reports.sections.shared.tables import Passage, Table
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.verdict import Decided, Decision

if TYPE_CHECKING:
    from kvaudit.reports.sections.shared.canvas import Drawing

V = TypeVar("V")


class Depth(IntEnum):
    """How much is asked about a run; what is computed for less is there for more."""

    VERDICT = 0  # what is read with every verdict
    DISCLOSURE = 1  # what a model card owes its reader
    REPORT = 2  # everything


@dataclass(frozen=True)
class Inputs:
    """What a section may look at: what was decided, and the records that it was decided from."""

    decided: Decided
    data: RunData


class Section(Generic[V]):
    """One section. ``V`` is what it found: a frozen value, which it alone knows the inside of.

    ``gated`` sections are about gated cells alone: where nothing is gated they find nothing. ``keys`` are the places of
    its facts in drift.json, by name (``analysis.doses``), whether it found anything or not.
    """

    name: ClassVar[str] = ""  # also the anchor of its heading
    title: ClassVar[str] = ""
    explain: ClassVar[str] = ""  # one sentence for a stranger
    reading: ClassVar[str] = ""  # how to read its tables, where that is always the same
    order: ClassVar[int]  # its place on the page
    gated: ClassVar[bool] = False
    depth: ClassVar[Depth] = Depth.REPORT
    figures: ClassVar[tuple[str, ...]] = ()  # names of what it draws
    keys: ClassVar[Mapping[str, int]] = {}
    remarks_at: ClassVar[int] = 0  # the place of its remarks among others, where it makes any
    banner_lines_at: ClassVar[int] = 0  # of its lines in the banner

    def compute(self, inputs: Inputs) -> V | None:
        """What it finds in a run, None for nothing to say; raises DataError for files that cannot be used."""
        raise NotImplementedError

    def problems(self, inputs: Inputs) -> Iterator[str]:
        """What is wrong with files that it reads, where that does not keep it from reading on."""
        yield from ()

    def facts(self, value: V | None) -> Mapping[str, Any]:
        """What drift.json holds under each of ``keys``, as plain values: of a tuple of dataclasses its rows."""
        rows: Any = value or ()
        return {key: [asdict(row) for row in rows] for key in self.keys}

    def tables(self, value: V, decided: Decided) -> Iterator[Table]:
        """Its tables; empty ones are left out."""
        yield from ()

    def notes(self, value: V, decided: Decided) -> Iterator[str]:
        """How to read them."""
        yield from [self.reading] if self.reading else ()

    def finding(self, value: V, decided: Decided) -> str:
        """What it found, in one line that is read without opening it."""
        return ""

    def draw(self, value: V, decided: Decided) -> Iterator[Drawing | None]:
        """Its ``figures``, None for one that has nothing to show."""
        yield from ()

    def passage(self, value: V, decided: Decided) -> Passage:
        """All of that under its heading."""
        return Passage(
            self.name,
            self.title,
            self.explain,
            figures=self.figures,
            tables=tuple(self.tables(value, decided)),
            notes=tuple(self.notes(value, decided)),
            finding=self.finding(value, decided),
        )

    # what a section may say outside of itself

    def instead(self, value: V, decided: Decided) -> Iterator[str]:
        """What could be done where the answer is not to ship, a line each."""
        yield from ()

    def remarks(self, value: V, decided: Decided) -> Iterator[str]:
        """What must be read wherever the verdict is read."""
        yield from ()

    def banner_lines(self, value: V, decided: Decided, head: Decision | None) -> Iterator[str]:
        """What the banner says beside its number, which is that of ``head``."""
        yield from ()

    def limits(self, value: V, decided: Decided) -> Iterator[str]:
        """What belongs to the limits of the verdict."""
        yield from ()

    def beside_gate(self, value: V, decided: Decided, gated: Sequence[Decision]) -> Iterator[Table | str]:
        """Tables and notes that stand by the gated cells."""
        yield from ()

    def of_arm(self, value: V, arm: str, reference: str) -> V:
        """What of it belongs on the card of one arm."""
        return value


class ContrastsSection(Section[tuple[Contrast, ...]]):
    """A section that shows the contrasts of one estimand."""

    def tables(self, value: tuple[Contrast, ...], decided: Decided) -> Iterator[Table]:
        yield contrasts_table(decided.comparison, value)

    def finding(self, value: tuple[Contrast, ...], decided: Decided) -> str:
        return lowest_drift(decided.comparison, value)


SECTIONS: Registry[Section[Any]] = Registry("section", "kvaudit.reports.sections", Section)
Values = Mapping[str, Any]  # by the section's name: what it found; a section that found nothing is not there


@cache
def sections() -> tuple[Section[Any], ...]:
    """Every section, as the page has them."""
    return tuple(sorted((kind() for kind in SECTIONS.all().values()), key=lambda section: section.order))


def sections_in(values: Values) -> Iterator[tuple[Section[Any], Any]]:
    """The sections that found something, as the page has them, and what each found."""
    return ((section, values[section.name]) for section in sections() if section.name in values)


class SectionResults(NamedTuple):
    """What sections found, and what is wrong with the files that they read."""

    values: Values
    problems: tuple[str, ...]


def compute_sections(inputs: Inputs, *depths: Depth) -> SectionResults:
    """What the sections of these depths find.

    A file that cannot be used decides nothing: it is named among the problems, and its section left out.
    """
    values, problems = dict[str, Any](), list[str]()
    # by name, so that problems come in one order wherever sections stand
    for section in sorted(sections(), key=lambda section: section.name):
        if section.depth not in depths:
            continue
        try:
            problems += section.problems(inputs)
            value = section.compute(inputs)
        except DataError as error:
            problems.append(str(error))
        else:
            if value is not None:
                values[section.name] = value
    return SectionResults(values, tuple(problems))
