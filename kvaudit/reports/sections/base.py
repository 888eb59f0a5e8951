"""The base class of report sections: one file per section, from its computation to its presentation.

Sections are found by walking this package; page, report.md and drift.json print them sorted by ``order``. A section may
read the verdict but never changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from kvaudit.core.errors import DataError
from kvaudit.core.plugins import Registry
from kvaudit.core.text import length_label
from kvaudit.reports.records.load import RunData
from kvaudit.reports.sections.shared.tables import Passage, Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, points
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.verdict import Decided, Decision

if TYPE_CHECKING:
    from kvaudit.reports.sections.shared.canvas import Drawing

V = TypeVar("V")


class Depth(IntEnum):
    """How much of a report is computed; each depth includes all sections of the depths before it."""

    VERDICT = 0  # what is shown with every verdict
    DISCLOSURE = 1  # what a model card discloses
    REPORT = 2  # everything


@dataclass(frozen=True)
class Inputs:
    """The input of a section: the decided run and its records."""

    decided: Decided
    data: RunData


class Section(Generic[V]):
    """One section of the report. ``V`` is the type of the frozen value that it computes, which no other section reads.

    If ``gated`` is True, the section is about gated cells only, and its value is None if there are none. ``keys`` maps
    the name of each of its facts in drift.json (such as ``analysis.doses``) to the position there. Facts are written
    even if the section has no value.
    """

    name: ClassVar[str] = ""  # also the anchor of its heading
    title: ClassVar[str] = ""
    explain: ClassVar[str] = ""  # one sentence for a stranger
    reading: ClassVar[str] = ""  # how to read its tables, if that never changes
    order: ClassVar[int]  # position on the page
    gated: ClassVar[bool] = False
    depth: ClassVar[Depth] = Depth.REPORT
    figures: ClassVar[tuple[str, ...]] = ()  # names of its figures
    keys: ClassVar[Mapping[str, int]] = {}
    remarks_at: ClassVar[int] = 0  # position of its ``remarks`` among those of others; 0 if it has none
    banner_lines_at: ClassVar[int] = 0  # the same for its ``banner_lines``

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # former name of the attribute, accepted for one release
        cls.banner_lines_at = vars(cls).get("asides_at", cls.banner_lines_at)

    def compute(self, inputs: Inputs) -> V | None:
        """Return what the section shows, or None to leave it out; raise DataError for files that cannot be used."""
        raise NotImplementedError

    def problems(self, inputs: Inputs) -> Iterator[str]:
        """Yield problems of the files that the section reads, if it can be computed in spite of them."""
        yield from ()

    def facts(self, value: V | None) -> Mapping[str, Any]:
        """Return plain values for drift.json, one for each of ``keys``.

        By default ``value`` must be a tuple of dataclasses, and every key gets them as a list of mappings.
        """
        rows: Any = value or ()
        return {key: [asdict(row) for row in rows] for key in self.keys}

    def tables(self, value: V, decided: Decided) -> Iterator[Table]:
        """Yield the tables of the section; empty ones are not shown."""
        yield from ()

    def notes(self, value: V, decided: Decided) -> Iterator[str]:
        """Yield sentences on how to read the tables; by default the class's ``reading``."""
        yield from [self.reading] if self.reading else ()

    def finding(self, value: V, decided: Decided) -> str:
        """Return the main result in one line, which is shown while the section is folded."""
        return ""

    def draw(self, value: V, decided: Decided) -> Iterator[Drawing | None]:
        """Yield a drawing for each name in the class's ``figures``, in that order; None for one without data."""
        yield from ()

    def passage(self, value: V, decided: Decided) -> Passage:
        """Return the section's title, tables, notes and figures as one Passage."""
        return Passage(
            self.name,
            self.title,
            self.explain,
            figures=self.figures,
            tables=tuple(self.tables(value, decided)),
            notes=tuple(self.notes(value, decided)),
            finding=self.finding(value, decided),
        )

    # lines for other parts of the page

    def suggestions(self, value: V, decided: Decided) -> Iterator[str]:
        """Yield a line for each possible remedy if the verdict is not to ship.

        A section may still define this method by its older name, ``instead``.
        """
        former = getattr(self, "instead", None)  # accepted for one release
        yield from former(value, decided) if former else ()

    def remarks(self, value: V, decided: Decided) -> Iterator[str]:
        """Yield remarks that are shown wherever the verdict is shown."""
        yield from ()

    def banner_lines(self, value: V, decided: Decided, head: Decision | None) -> Iterator[str]:
        """Yield lines for the banner, which quotes the drift of ``head``; ``asides`` is the method's older name."""
        former = getattr(self, "asides", None)  # accepted for one release
        yield from former(value, decided, head) if former else ()

    def limits(self, value: V, decided: Decided) -> Iterator[str]:
        """Yield sentences for the passage "Limits", on what the verdict does not show."""
        yield from ()

    def beside_gate(self, value: V, decided: Decided, gated: Sequence[Decision]) -> Iterator[Table | str]:
        """Yield tables and notes to show below the table of the gated cells."""
        yield from ()

    def of_arm(self, value: V, arm: str, reference: str) -> V:
        """Return the part of ``value`` (what the section computed) that belongs on the model card of one arm."""
        return value


# --- sections of the contrasts of one estimand ------------------------------------------------------------------------


class ContrastsSection(Section[tuple[Contrast, ...]]):
    """A section that shows one kind of measured difference (estimand), such as the interaction, as a table."""

    def tables(self, value: tuple[Contrast, ...], decided: Decided) -> Iterator[Table]:
        rows = []
        for c in value:
            drift = effect_text(c.effect) if c.effect else "; ".join(map(str, c.reasons))
            recipe = f"[{points(c.recipe.low)}, {points(c.recipe.high)}]" if c.recipe else "-"
            place = [c.arm, decided.comparison.label(c.policy), c.suite, length_label(c.context_tokens)]
            rows.append([*place, drift, recipe])
        yield table_of(
            ["arm", "policy", "suite", "tokens", "drift, 95 % interval", "with seed variance"], rows, words=3
        )

    def finding(self, value: tuple[Contrast, ...], decided: Decided) -> str:
        return lowest_drift(decided.comparison, value)


def contrasts_of(decided: Decided, estimand: str, *, gated_only: bool = False) -> list[Contrast]:
    """Return the contrasts (measured differences) of one kind, ``estimand``.

    With ``gated_only``, only contrasts under gated policies are returned; but if there are none, all are.
    """
    contrasts = [c for c in decided.contrasts if c.estimand == estimand]
    return [c for c in contrasts if gated_only and c.policy in decided.rules.primary] or contrasts


def lowest_drift(sides: Comparison, contrasts: Sequence[Contrast]) -> str:
    """Return a sentence that names the contrast (arm, policy, suite) with the lowest drift."""
    measured = [(c.effect, c) for c in contrasts if c.effect]
    if not measured:
        return "No cell has a number."
    effect, c = min(measured, key=lambda pair: pair[0].estimate)
    return f"The lowest of {len(measured)}: {sides.who(c.arm, c.policy)}, {c.suite}: {effect_text(effect)}."


# --- all sections -----------------------------------------------------------------------------------------------------

SECTIONS: Registry[Section[Any]] = Registry("section", "kvaudit.reports.sections", Section)
Values = Mapping[str, Any]  # values of sections by name, without those that computed None


@cache
def sections() -> tuple[Section[Any], ...]:
    """Return every section in the order of the page."""
    return tuple(sorted((kind() for kind in SECTIONS.all().values()), key=lambda section: section.order))


def sections_in(values: Values) -> Iterator[tuple[Section[Any], Any]]:
    """Yield every section that has a value, with the value, in the order of the page."""
    return ((section, values[section.name]) for section in sections() if section.name in values)


class SectionResults(NamedTuple):
    """What the sections computed, by section name, and the problems of the files that they read, as texts."""

    values: Values
    problems: tuple[str, ...]


def compute_sections(inputs: Inputs, *depths: Depth) -> SectionResults:
    """Compute the sections whose ``depth`` (how complete a report needs them) is one of ``depths``.

    A section that finds a file unusable has no value, and the reason is added to the problems.
    """
    values, problems = dict[str, Any](), list[str]()
    # by name, so that the order of the problems does not depend on the order of the page
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


def has_two_sides(d: Decision) -> bool:
    """Return whether a decision is gated, has an effect, and compares two cells (no difference of differences)."""
    return d.gated and d.estimand in ("alike", "deployed", "serving") and d.effect is not None
