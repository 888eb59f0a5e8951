"""The findings of a run, from which its page is written, and links from its numbers to the answers behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kvaudit.core.facets import facet_of, suite_of
from kvaudit.core.text import visible
from kvaudit.reports.page.view.data import flip_key, kinds_shown
from kvaudit.reports.records.load import Evidence, RunData
from kvaudit.reports.records.rows import SCORE, CellKey
from kvaudit.reports.sections.base import Values
from kvaudit.reports.sections.shared.tables import Example
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.controls import ErrorRates
from kvaudit.reports.verdict.verdict import Decided, Decision

_VIEW = "../view/index.html#"  # from RUN/report


@dataclass(frozen=True)
class Findings(Decided):
    """A run with its verdict, what each report section found, and metadata of the run and its checkpoints."""

    values: Values = field(default_factory=dict)
    calibration: ErrorRates | None = None
    problems: tuple[str, ...] = ()  # in the files
    linked_contrasts: frozenset[str] | None = None  # contrasts with a view to link to; None: not the report of a run
    evidence: Evidence = field(default_factory=Evidence)
    checkpoints: Mapping[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)  # (arm, seed) -> metadata
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model as the run resolved it, else as the spec names it."""
        return str(self.provenance.get("model") or self.comparison.model)


def contrasts_with_pages(data: RunData) -> frozenset[str]:
    """Return the kinds of contrast for which the run folder has pages of flips (items whose answers differ).

    The set is empty if the folder has no such pages.
    """
    return kinds_shown(data) if (Path(data.run) / "view" / "index.html").is_file() else frozenset()


def flips_link(findings: Findings, cell: Decision | Contrast) -> str:
    """Return the address of the list of items whose answers differ in this cell; empty if there is no such page."""
    estimand = _linked_estimand(findings.comparison, cell.estimand, cell.policy)
    if estimand not in (findings.linked_contrasts or ()):
        return ""
    suite, facet = facet_of(cell.suite) if cell.suite in findings.comparison.facets else (cell.suite, None)
    query = {
        "kind": estimand,
        "suite": visible(suite),
        "what": facet.name if facet else SCORE,
        "arm": visible(cell.arm),
        "policy": visible(findings.comparison.label(cell.policy)),
        "length": str(cell.context_tokens),
    }
    return _VIEW + urlencode(query)


def flip_link(findings: Findings, example: Example) -> str:
    """Return the address of the page that shows one example; empty if there is none."""
    estimand = _linked_estimand(findings.comparison, example.estimand, example.policy)
    if estimand not in (findings.linked_contrasts or ()):
        return ""
    suite = suite_of(example.suite)
    cell = CellKey(example.arm, example.seed, example.policy)
    return _VIEW + urlencode({"flip": flip_key(estimand, suite, example.context_tokens, example.item_id, cell)})


def _linked_estimand(sides: Comparison, estimand: str, policy: str) -> str:
    """Return the kind of difference (estimand) under which the pages list a cell's flips: its own, with one exception.

    Under an uncompressed policy "deployed" and "alike" are the same difference, and the pages list it as "alike".
    """
    return "alike" if estimand == "deployed" and sides.is_uncompressed(policy) else estimand
