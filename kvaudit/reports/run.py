"""Compute from a run's records the drift (by how much behaviour changed), the verdict, and the report's page.

Every command that needs a verdict computes it here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from kvaudit.core.errors import AuditError, DataError
from kvaudit.core.facets import SELECTIVITY
from kvaudit.core.provenance import PROVENANCE
from kvaudit.reports.page.banner import run_banner
from kvaudit.reports.page.findings import Findings, contrasts_with_pages
from kvaudit.reports.page.page import Page, screen_of
from kvaudit.reports.page.publish import write_card
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.records.load import RunData, load_run, problem_lines
from kvaudit.reports.sections.base import Depth, Inputs, SectionResults, compute_sections
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.controls import shipped_rates
from kvaudit.reports.verdict.decide import decide
from kvaudit.reports.verdict.drift import drift_of
from kvaudit.reports.verdict.family import gated_facets
from kvaudit.reports.verdict.human_labels import with_labels
from kvaudit.reports.verdict.rules import GateOverrides, Rules, declared_rules
from kvaudit.reports.verdict.selectivity import with_selectivity
from kvaudit.reports.verdict.verdict import active_waivers


def drift_and_rules(data: RunData, overrides: GateOverrides, *, everything: bool = True) -> tuple[Drift, Rules]:
    """Return the drift of a run, computed from the judge's labels, and the rules of its gate.

    Without ``everything``, facets (yes-or-no properties of answers) are compared only in cells that the verdict needs
    (``gated_facets``). Raises SpecError and DataError for rules that cannot be used.
    """
    if data.spec.probe is not None:
        raise DataError(
            f"{str(data.run)!r} is a probe, and drift needs two: kvaudit compare EARLIER {data.run}; "
            f"kvaudit probe {data.run} prints the probe alone"
        )
    comparison, rules = declared_rules(data, overrides)
    drift = drift_of(data, comparison, rules.alpha, None if everything else gated_facets(comparison, rules))
    return (with_selectivity(drift, rules.primary) if SELECTIVITY in rules.estimands else drift), rules


def decide_run(data: RunData, overrides: GateOverrides | None = None, *, everything: bool = True) -> Findings:
    """Decide a run by the gate of its spec, or by ``overrides``; where people labelled answers, their labels decide.

    ``everything`` is explained in ``drift_and_rules``. Of the report's sections only those that the verdict needs are
    computed. Raises SpecError for a gate file or waivers that cannot be used, DataError for human labels that do not
    fit the run.
    """
    overrides = overrides or GateOverrides()
    judged, rules = drift_and_rules(data, overrides, everything=everything)
    drift, waivers = with_labels(data, judged), active_waivers(judged.comparison, overrides.waivers, overrides.today)
    findings = Findings(
        drift=drift,
        rules=rules,
        waivers=waivers,
        verdict=decide(drift, rules, waivers),
        problems=tuple(problem_lines(data)),
        provenance=dict(data.provenance),
        checkpoints=data.checkpoints,
        evidence=data.evidence,
    )
    return _with_values(findings, compute_sections(Inputs(findings, data), Depth.VERDICT))


def _with_values(findings: Findings, section_values: SectionResults) -> Findings:
    return replace(
        findings,
        values={**findings.values, **section_values.values},
        problems=(*findings.problems, *section_values.problems),
    )


def with_report_sections(data: RunData, findings: Findings) -> Findings:
    """Return the findings with all that a report shows beyond the verdict.

    That is the value of every section, the gate's simulated error rates, and the contrasts for which ``kvaudit view``
    wrote pages of changed answers, to which the report links. A section's file that cannot be used becomes a problem;
    it does not change the verdict.
    """
    findings = _with_values(findings, compute_sections(Inputs(findings, data), Depth.DISCLOSURE, Depth.REPORT))
    return replace(findings, calibration=shipped_rates(), linked_contrasts=contrasts_with_pages(data))


def disclosure_page(data: RunData, overrides: GateOverrides | None = None) -> Page:
    """Return the page from which a disclosure (a section of a model card) is rendered, without report sections.

    Raises what ``decide_run`` raises, and DataError for a file of the disclosure that cannot be used.
    """
    findings = decide_run(data, overrides)
    section_values = compute_sections(Inputs(findings, data), Depth.DISCLOSURE)
    if section_values.problems:
        raise DataError(section_values.problems[0])
    findings = _with_values(findings, section_values)
    return Page(findings, run_banner(findings), (), tuple(remarks(findings)), screen_of(findings))


def write_report(run: Path, overrides: GateOverrides | None = None) -> Findings:
    """Decide a run, write its report folder and a card for every checkpoint; return the findings.

    Raises DataError and SpecError for a run that cannot be read, RunError if the folder cannot be written.
    """
    data = load_run(Path(run))
    return write_decided_run(data, decide_run(data, overrides))


def write_decided_run(data: RunData, verdict: Findings) -> Findings:
    """Write the report of a decided run and the sections of its model cards; return the findings with every section."""
    # the formats import matplotlib, which takes a second that a verdict need not wait for
    from kvaudit.reports.page.formats import write_pages
    from kvaudit.reports.page.formats.disclosure import render_card

    findings = with_report_sections(data, verdict)
    page = page_of(findings)
    if problems := list(_write_cards(data.run, findings, lambda arm: render_card(page, arm))):
        findings = replace(findings, problems=(*findings.problems, *problems))
        page = page_of(findings)
    write_pages(data.run / "report", page)
    return findings


def _write_cards(run: Path, findings: Findings, render: Callable[[str], str]) -> Iterator[str]:
    """Write an arm's section, from ``render``, into the model card of each of the arm's checkpoints.

    Yields a message for each card that cannot be written, which does not stop the report. A folder without provenance
    gets no card: a judged run holds the metadata of its checkpoints, not their weights.
    """
    sections: dict[str, str] = {}
    for arm, seed in findings.checkpoints:
        folder = run / "checkpoints" / arm / f"seed-{seed}"
        if not (folder / PROVENANCE).is_file():
            continue
        if arm not in sections:
            sections[arm] = render(arm)
        try:
            write_card(folder, sections[arm], base=findings.model)
        except AuditError as error:
            yield str(error)
