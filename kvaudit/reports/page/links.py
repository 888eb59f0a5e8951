"""Where a report's numbers lead: the flips behind a cell, as addresses within the view that lies beside the report."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

from kvaudit.core.facets import facet_of
from kvaudit.core.text import visible
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.view.flips import flip_key, kinds_of
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import SCORE, CellKey
from kvaudit.reports.sections.shared.tables import Example
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.verdict import Decision

VIEW = "../view/index.html#"  # from RUN/report
COMMAND = "kvaudit view RUN"


def viewed(data: RunData) -> frozenset[str]:
    """The contrasts whose flips lie beside a run's report as pages; none where there are no pages."""
    return kinds_of(data) if (Path(data.run) / "view" / "index.html").is_file() else frozenset()


def flips_link(findings: Findings, of: Decision | Contrast) -> str:
    """The address of the list of one cell's flips; empty where there is none."""
    estimand = _shown(findings.comparison, of.estimand, of.policy)
    if estimand not in (findings.viewed or ()):
        return ""
    suite, facet = facet_of(of.suite) if of.suite in findings.comparison.facets else (of.suite, None)
    chosen = {
        "kind": estimand,
        "suite": visible(suite),
        "what": facet.name if facet else SCORE,
        "arm": visible(of.arm),
        "policy": visible(findings.comparison.label(of.policy)),
        "length": str(of.context_tokens),
    }
    return VIEW + urlencode(chosen)


def _shown(sides: Comparison, estimand: str, policy: str) -> str:
    """The contrast whose flips are shown: uncompressed, alike and deployed are the same difference."""
    return "alike" if estimand == "deployed" and sides.is_uncompressed(policy) else estimand


def flip_link(findings: Findings, example: Example) -> str:
    """The address of the page of one example; empty where there is none."""
    estimand = _shown(findings.comparison, example.estimand, example.policy)
    if estimand not in (findings.viewed or ()):
        return ""
    suite = facet_of(example.suite)[0] if example.suite in findings.comparison.facets else example.suite
    cell = CellKey(example.arm, example.seed, example.policy)
    return VIEW + urlencode({"flip": flip_key(estimand, suite, example.context_tokens, example.item_id, cell)})
