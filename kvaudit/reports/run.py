"""The way of a run's records: drift, labels, decision, page. The verdict is decided here, once per command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from kvaudit.core.errors import AuditError, DataError
from kvaudit.core.estimands import SELECTIVITY
from kvaudit.core.provenance import PROVENANCE
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.links import viewed
from kvaudit.reports.page.model_card import write_card
from kvaudit.reports.page.page import Page
from kvaudit.reports.records.load import RunData, load_run, problem_lines
from kvaudit.reports.sections.base import Depth, Inputs, SectionResults, compute_sections
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.decide import decide
from kvaudit.reports.verdict.drift import drift_of
from kvaudit.reports.verdict.error_rates import shipped_rates
from kvaudit.reports.verdict.family import gated_facets
from kvaudit.reports.verdict.human_labels import with_labels
from kvaudit.reports.verdict.rules import GateOverrides, Rules, declared_rules
from kvaudit.reports.verdict.selectivity import with_selectivity
from kvaudit.reports.verdict.waivers import active_waivers


def measured(data: RunData, asked: GateOverrides, *, everything: bool = True) -> tuple[Drift, Rules]:
    """The drift of a run as the judge has it, and the rules it is to be decided by.

    Without ``everything`` facets are contrasted only where they may decide, or take apart what does. Raises SpecError
    and DataError, in one line, for rules that cannot be used.
    """
    if data.spec.probe is not None:
        raise DataError(
            f"{str(data.run)!r} is a probe, and drift lies between two: kvaudit compare EARLIER {data.run}; "
            f"kvaudit probe {data.run} prints what it says by itself"
        )
    comparison, rules = declared_rules(data, asked)
    drift = drift_of(data, comparison, rules.alpha, None if everything else gated_facets(comparison, rules))
    return (with_selectivity(drift, rules.primary) if SELECTIVITY in rules.estimands else drift), rules


def decided(data: RunData, asked: GateOverrides | None = None, *, everything: bool = True) -> Findings:
    """A run decided by its spec or as ``asked``, human labels before the judge's, with nothing beside the verdict.

    ``everything`` is as for ``measured``. Raises SpecError for a gate file or waivers that cannot be used, DataError
    for human labels that do not fit the run.
    """
    asked = asked or GateOverrides()
    judged, rules = measured(data, asked, everything=everything)
    drift, waivers = with_labels(data, judged), active_waivers(judged.comparison, asked.waivers, asked.today)
    found = Findings(
        drift=drift,
        rules=rules,
        waivers=waivers,
        verdict=decide(drift, rules, waivers),
        problems=tuple(problem_lines(data)),
        provenance=dict(data.provenance),
        checkpoints=data.checkpoints,
        evidence=data.evidence,
    )
    return _with(found, compute_sections(Inputs(found, data), Depth.VERDICT))


def _with(found: Findings, more: SectionResults) -> Findings:
    return replace(found, values={**found.values, **more.values}, problems=(*found.problems, *more.problems))


def with_details(data: RunData, found: Findings) -> Findings:
    """The findings with what every section finds, how often the gate is wrong, and what lies beside as pages.

    A file of a section that cannot be used decides nothing, so it is named among the problems.
    """
    more = compute_sections(Inputs(found, data), Depth.DISCLOSURE, Depth.REPORT)
    return replace(_with(found, more), calibration=shipped_rates(), viewed=viewed(data))


def disclosed(data: RunData, asked: GateOverrides | None = None) -> Page:
    """The verdict of a run and what it discloses, without the sections of its report.

    Raises as ``decided`` does, and DataError for a file that holds what is to be disclosed and cannot be used.
    """
    from kvaudit.reports.page.remarks import remarks
    from kvaudit.reports.page.run_page import banner
    from kvaudit.reports.page.screen import screen_of

    found = decided(data, asked)
    more = compute_sections(Inputs(found, data), Depth.DISCLOSURE)
    if more.problems:
        raise DataError(more.problems[0])
    found = _with(found, more)
    return Page(found, banner(found), (), tuple(remarks(found)), screen_of(found))


def write_report(run: Path, asked: GateOverrides | None = None) -> Findings:
    """Read a run, write every format into its folder ``report``, a card into every checkpoint; return what was found.

    Raises DataError and SpecError for a run that cannot be read, RunError when the folder cannot be written.
    """
    data = load_run(Path(run))
    return write_decided(data, decided(data, asked))


def write_decided(data: RunData, verdict: Findings) -> Findings:
    """The same of a run that is decided already."""
    from kvaudit.reports.page.formats import (  # they draw figures: a second that a verdict need not wait for
        card,
        write_pages,
    )
    from kvaudit.reports.page.run_page import page_of

    found = with_details(data, verdict)
    page = page_of(found)
    if problems := list(_write_cards(data.run, found, lambda arm: card.render(page, arm))):
        found = replace(found, problems=(*found.problems, *problems))
        page = page_of(found)
    write_pages(data.run / "report", page)
    return found


def _write_cards(run: Path, found: Findings, rendered: Callable[[str], str]) -> Iterator[str]:
    """Put an arm's section into the card of its checkpoints; says where that cannot be, which stops no report.

    A run that was judged has the stories of its checkpoints, and not their weights: no card belongs there.
    """
    sections: dict[str, str] = {}
    for arm, seed in found.checkpoints:
        folder = run / "checkpoints" / arm / f"seed-{seed}"
        if not (folder / PROVENANCE).is_file():
            continue
        if arm not in sections:
            sections[arm] = rendered(arm)
        try:
            write_card(folder, sections[arm], base=found.model)
        except AuditError as error:
            yield str(error)
