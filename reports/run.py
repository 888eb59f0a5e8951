"""The way of a run's records: drift, labels, decision, page. The verdict is decided here, once per command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvaudit.core.errors import AuditError, DataError
from kvaudit.core.provenance import PROVENANCE
from kvaudit.reports.analysis.curves import curves
from kvaudit.reports.analysis.displacement import load_displacement
from kvaudit.reports.analysis.examples import largest_losses
from kvaudit.reports.analysis.floor import FloorUnit, floor_of
from kvaudit.reports.analysis.guarded import guard_effects
from kvaudit.reports.analysis.remedies import remedies_of
from kvaudit.reports.drift.drift import drift_of
from kvaudit.reports.drift.results import Drift
from kvaudit.reports.drift.selectivity import SELECTIVITY, with_selectivity
from kvaudit.reports.gate.decide import decide
from kvaudit.reports.gate.error_rates import shipped_rates
from kvaudit.reports.gate.family import gated_facets
from kvaudit.reports.gate.rules import Asked, Rules, declared
from kvaudit.reports.gate.waivers import waivers_for
from kvaudit.reports.labels.relabelled import with_labels
from kvaudit.reports.labels.second import second_judge
from kvaudit.reports.page.behind import viewed
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.model_card import write_card
from kvaudit.reports.page.page import Page
from kvaudit.reports.records.floor import FLOOR_FOLDER
from kvaudit.reports.records.load import RunData, load_run, problem_lines

T = TypeVar("T")


def measured(data: RunData, asked: Asked, *, everything: bool = True) -> tuple[Drift, Rules]:
    """The drift of a run as the judge has it, and the rules it is to be decided by.

    Without ``everything`` facets are contrasted only where they may decide, or take apart what does. Raises SpecError
    and DataError, in one line, for rules that cannot be used.
    """
    if data.spec.probe is not None:
        raise DataError(
            f"{str(data.run)!r} is a probe, and drift lies between two: kvaudit compare EARLIER {data.run}; "
            f"kvaudit probe {data.run} prints what it says by itself"
        )
    comparison, rules = declared(data, asked)
    drift = drift_of(data, comparison, rules.alpha, None if everything else gated_facets(comparison, rules))
    return (with_selectivity(drift, rules.primary) if SELECTIVITY in rules.estimands else drift), rules


def decided(data: RunData, asked: Asked | None = None, *, everything: bool = True) -> Findings:
    """A run decided by its spec or as ``asked``, human labels before the judge's, with nothing beside the verdict.

    ``everything`` is as for ``measured``. Raises SpecError for a gate file or waivers that cannot be used, DataError
    for human labels that do not fit the run.
    """
    asked = asked or Asked()
    judged, rules = measured(data, asked, everything=everything)
    drift, waivers = with_labels(data, judged), waivers_for(judged.comparison, asked.waivers, asked.today)
    problems = list(problem_lines(data))
    floor: tuple[FloorUnit, ...] = _or_problem(lambda: _floor(data, drift, problems), (), problems)
    return Findings(
        drift=drift,
        rules=rules,
        waivers=waivers,
        verdict=decide(drift, rules, waivers),
        floor=floor,
        problems=tuple(problems),
        provenance=dict(data.provenance),
        checkpoints=data.checkpoints,
        evidence=data.evidence,
    )


def _floor(data: RunData, drift: Drift, problems: list[str]) -> tuple[FloorUnit, ...]:
    """What changed when engines were asked again; what is wrong with its files is noted."""
    if not drift.comparison.references:
        return ()
    asked = data.floor
    problems += [f"{FLOOR_FOLDER}/{one.file}:{one.line}: {one.reason}" for one in asked.problems]
    problems += [f"{FLOOR_FOLDER}/{name}: not finished (no seal); resume the run" for name in asked.unfinished]
    return floor_of(data.records, asked, drift.comparison)


def with_details(data: RunData, found: Findings) -> Findings:
    """The findings with what stands beside the verdict: curves, examples, analyses, displacement, calibration.

    A file of these that cannot be used decides nothing, so it is named among the problems and left out.
    """
    from kvaudit.reports.analysis.analyse import analyse  # scipy's optimisers take a while to import
    from kvaudit.reports.analysis.mechanism import mechanism

    problems = list(found.problems)
    return replace(
        found,
        curves=curves(data.telemetry, found.comparison.arms),
        examples=largest_losses(data, found.drift, found.verdict),
        analysis=analyse(found.drift, found.rules, found.verdict, data.panels),
        mechanism=mechanism(found.drift, data.panels, data.records),
        displacement=_or_problem(lambda: load_displacement(data.run), (), problems),
        guards=_or_problem(lambda: guard_effects(data, found.drift, found.rules), (), problems),
        remedies=_or_problem(lambda: remedies_of(data, found.drift, found.rules, found.verdict), None, problems),
        calibration=shipped_rates(),
        second=_or_problem(lambda: second_judge(data.provenance), None, problems),
        problems=tuple(problems),
        viewed=viewed(data),
    )


def disclosed(data: RunData, asked: Asked | None = None) -> Page:
    """The verdict of a run and what it discloses, without the sections of its report; raises as ``decided`` does."""
    from kvaudit.reports.page.remarks import remarks
    from kvaudit.reports.page.story import banner

    found = decided(data, asked)
    guards = guard_effects(data, found.drift, found.rules)
    remedies = remedies_of(data, found.drift, found.rules, found.verdict)
    found = replace(found, curves=curves(data.telemetry, found.comparison.arms), guards=guards, remedies=remedies)
    return Page(found, banner(found), (), tuple(remarks(found)))


def write_report(run: Path, asked: Asked | None = None) -> Findings:
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
    from kvaudit.reports.page.story import page_of

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
            write_card(folder, sections[arm], base=found.comparison.model)
        except AuditError as error:
            yield str(error)


def _or_problem(load: Callable[[], T], otherwise: T, problems: list[str]) -> T:
    try:
        return load()
    except DataError as error:
        problems.append(str(error))
        return otherwise
