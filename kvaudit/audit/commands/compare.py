"""``kvaudit compare``: two result files, no run needed and no model loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.base import print_table, print_line, parse_pairs, user_errors, wide_console
from kvaudit.core.errors import SpecError
from kvaudit.core.files import write_output
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.reports.page.compare_files import MetricComparison, TwoJudges

MOST_METRICS = 2  # two judges


def compare(
    reference: Annotated[Path, argument(metavar="A", help="The reference's result file.")],
    candidate: Annotated[Path, argument(metavar="B", help="The candidate's result file.")],
    *,
    margin: Annotated[
        list[str] | None,
        typer.Option(
            help="Largest tolerated drop, in percentage points; again as NAME=POINTS for a suite or a facet of records "
            "(refusal.unsafe=3), which then decides too.",
            show_default="5",
        ),
    ] = None,
    ratio: Annotated[
        list[str] | None,
        option(
            help="How many times as often at most what is not wanted may happen, instead of a margin: NAME=TIMES, as "
            "agent.attack_success=1.1; several times."
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="One-sided level.")] = 0.05,
    cluster: Annotated[
        str | None,
        option(
            help="Which items share a template: a field of the file's rows, re:PATTERN of the item's name, or "
            "file:MAP.csv with item and cluster."
        ),
    ] = None,
    items_are_independent: Annotated[
        bool,
        typer.Option("--items-are-independent", help="No items share a template; without --cluster this lets PASS be."),
    ] = False,
    metric: Annotated[
        list[str] | None, option(help="The metric, where there are several; twice for two judges.")
    ] = None,
    lower_is_better: Annotated[bool, typer.Option("--lower-is-better", help="A score of 0 is desired.")] = False,
    higher_is_better: Annotated[
        bool,
        typer.Option("--higher-is-better", help="A score of 1 is desired, though the metric's name speaks of harm."),
    ] = False,
    select_a: Annotated[list[str] | None, option(help="Of a run: arm=, policy=, seed=, suite=, context=.")] = None,
    select_b: Annotated[list[str] | None, option(help="The same for B.")] = None,
    out: Annotated[Path | None, option(help="A folder for the report.")] = None,
) -> None:
    """Compare two result files, of kvaudit or of other tools.

    It reads kvaudit runs and records, and logs of lm-eval, Inspect and AgentDojo, and CSV. Exits as `gate` does.
    """
    with user_errors():
        from kvaudit.reports.page.compare_files import compare as compared
        from kvaudit.reports.page.compare_files import parse_margins, parse_ratios, read_sides
        from kvaudit.reports.page.compare_pairing import choose_metrics

        if len(metric or ()) > MOST_METRICS:
            raise SpecError(
                f"--metric stands {len(metric or ())} times; one, or two for two judges of the same answers"
            )
        sides = read_sides(
            reference,
            candidate,
            cluster=cluster,
            items_are_independent=items_are_independent,
            lower_is_better=lower_is_better,
            higher_is_better=higher_is_better,
            select=(parse_pairs(select_a or (), "--select-a"), parse_pairs(select_b or (), "--select-b")),
        )
        names = choose_metrics(sides.reference, sides.candidate, tuple(metric or ()))
        points, margins = parse_margins(tuple(margin or ()))
        ratios, independent = parse_ratios(tuple(ratio or ())), items_are_independent
        rules = {"margins": margins, "ratios": ratios}
        found = [
            compared(sides, name, margin=points, alpha=alpha, items_are_independent=independent, **rules)
            for name in names
        ]
        raise typer.Exit(_show(found, out))


def _show(found: Sequence[MetricComparison], out: Path | None) -> int:
    """Print comparisons of one metric, or two; write pages where asked, and return the exit code of the verdict."""
    from kvaudit.reports.page.compare_files import compare_judges
    from kvaudit.reports.page.compare_page import comparison_files

    two = compare_judges(*found) if len(found) == MOST_METRICS else None
    # of two judges the one whose verdict is that of both
    shown = next(c for c in found if two is None or c.verdict.status is two.status)
    console = wide_console()
    _print(console, found, shown, two)
    if out is not None:
        for name, text in comparison_files(shown, two).items():
            write_output(out / name, text)
        print_line(console, f"report: {out / 'compare.html'}")
    return two.exit_code if two else shown.verdict.exit_code


def _print(console: Console, found: Sequence[MetricComparison], shown: MetricComparison, two: TwoJudges | None) -> None:
    from kvaudit.reports.page.compare_page import (
        agreement_notes,
        comparison_banner,
        comparison_cautions,
        comparison_table,
        facets_table,
        judges_table,
    )

    for comparison in found:
        print_table(console, comparison_table(comparison))
    if by_facet := facets_table(shown):
        print_table(console, by_facet)
    if two:
        print_table(console, judges_table(two))
        for line in agreement_notes(two):
            print_line(console, inline(line))
    top = comparison_banner(shown)
    print_line(console, f"verdict: {top.status.value} {top.number}".rstrip())
    for line in (top.sentence, top.about, *top.lines, *comparison_cautions(shown)):
        if line:
            print_line(console, line)


COMMAND = Command("compare", group="Audit", order=6, call=compare)
