"""``kvaudit compare``: two result files, no run needed and no model loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.command_line import print_table, say, selectors, user_errors, wide_console
from kvaudit.core.errors import SpecError
from kvaudit.core.files import write_output
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.reports.page.compare_files import Compared, TwoJudges

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
        from kvaudit.reports.page.compare_files import margins_from, ratios_from, read_sides
        from kvaudit.reports.page.compare_pairing import chosen_metrics

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
            select=(selectors(select_a or (), "--select-a"), selectors(select_b or (), "--select-b")),
        )
        names = chosen_metrics(sides.reference, sides.candidate, tuple(metric or ()))
        points, margins = margins_from(tuple(margin or ()))
        ratios, independent = ratios_from(tuple(ratio or ())), items_are_independent
        rules = {"margins": margins, "ratios": ratios}
        found = [
            compared(sides, name, margin=points, alpha=alpha, items_are_independent=independent, **rules)
            for name in names
        ]
        raise typer.Exit(_show(found, out))


def _show(found: Sequence[Compared], out: Path | None) -> int:
    """Print comparisons of one metric, or two; write pages where asked, and return the exit code of the verdict."""
    from kvaudit.reports.page.compare_files import two_judges
    from kvaudit.reports.page.compare_page import comparison_files

    two = two_judges(*found) if len(found) == MOST_METRICS else None
    # of two judges the one whose verdict is that of both
    shown = next(c for c in found if two is None or c.verdict.status is two.status)
    console = wide_console()
    _print(console, found, shown, two)
    if out is not None:
        for name, text in comparison_files(shown, two).items():
            write_output(out / name, text)
        say(console, f"report: {out / 'compare.html'}")
    return two.exit_code if two else shown.verdict.exit_code


def _print(console: Console, found: Sequence[Compared], shown: Compared, two: TwoJudges | None) -> None:
    from kvaudit.reports.page.compare_page import (
        agreement,
        comparison_banner,
        comparison_cautions,
        comparison_table,
        facets,
        judges,
    )

    for comparison in found:
        print_table(console, comparison_table(comparison))
    if by_facet := facets(shown):
        print_table(console, by_facet)
    if two:
        print_table(console, judges(two))
        for line in agreement(two):
            say(console, inline(line))
    top = comparison_banner(shown)
    say(console, f"verdict: {top.status.value} {top.number}".rstrip())
    for line in (top.sentence, top.about, *top.banner_lines, *comparison_cautions(shown)):
        if line:
            say(console, line)


COMMAND = Command("compare", group="Audit", order=6, call=compare)
