"""``kvaudit compare``: compare two result files; no run is needed and no model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import (
    Command,
    argument,
    option,
    parse_pairs,
    print_line,
    print_table,
    user_errors,
    wide_console,
)
from kvaudit.core.errors import SpecError
from kvaudit.core.files import write_output
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from kvaudit.reports.page.compare_files import MetricComparison, TwoJudges

MOST_METRICS = 2  # one for each of two judges

Margins = Annotated[
    list[str] | None,
    option(
        metavar="POINTS",
        help="Largest tolerated drop, in percentage points. Default: 5. Repeat as NAME=POINTS for a suite or a "
        "facet of kvaudit records (refusal.unsafe=3), which then counts for the verdict too.",
    ),
]
Ratios = Annotated[
    list[str] | None,
    option(
        metavar="NAME=TIMES",
        help="Instead of a margin: largest tolerated ratio of an unwanted event's rates, candidate to reference, "
        "such as agent.attack_success=1.1. May be repeated.",
    ),
]
Clusters = Annotated[
    str | None,
    option(
        help="How to find items that share a template: a field of the file's rows, re:PATTERN on the item name, "
        "or file:MAP.csv with columns item and cluster."
    ),
]
Selection = Annotated[
    list[str] | None,
    option(
        metavar="NAME=VALUE",
        help="If A is a run: the part to compare, by arm=, policy=, seed=, suite=, context=. May be repeated.",
    ),
]


def compare(
    reference: Annotated[Path, argument(metavar="A", help="Result file or run folder of the reference.")],
    candidate: Annotated[Path, argument(metavar="B", help="Result file or run folder of the candidate.")],
    *,
    margin: Margins = None,
    ratio: Ratios = None,
    alpha: Annotated[float, typer.Option(help="One-sided significance level.")] = 0.05,
    cluster: Clusters = None,
    items_are_independent: Annotated[
        bool,
        typer.Option(
            "--items-are-independent",
            help="Declare that no items share a template; without this or --cluster there is no PASS.",
        ),
    ] = False,
    metric: Annotated[
        list[str] | None,
        option(metavar="METRIC", help="Metric to compare if the files hold several; give two to compare two judges."),
    ] = None,
    lower_is_better: Annotated[bool, typer.Option("--lower-is-better", help="A score of 0 is good.")] = False,
    higher_is_better: Annotated[
        bool,
        typer.Option("--higher-is-better", help="A score of 1 is good, although the metric's name is harm."),
    ] = False,
    select_a: Selection = None,
    select_b: Annotated[list[str] | None, option(metavar="NAME=VALUE", help="The same for B.")] = None,
    out: Annotated[Path | None, option(help="Folder to write the report to.")] = None,
) -> None:
    """Compare two result files, of kvaudit or of other tools.

    Reads kvaudit runs and records, logs of lm-eval, Inspect and AgentDojo, and CSV. Exit codes are those of `gate`.
    """
    with user_errors():
        from kvaudit.reports.page.compare_files import compare as compared
        from kvaudit.reports.page.compare_files import parse_margins, parse_ratios, read_sides
        from kvaudit.reports.page.compare_pairing import choose_metrics

        if len(metric or ()) > MOST_METRICS:
            raise SpecError(
                f"--metric is given {len(metric or ())} times; give one metric, or two to compare two judges of the "
                "same answers"
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
        points, margins = parse_margins(tuple(margin or ()))
        comparisons = [
            compared(
                sides,
                name,
                margin=points,
                margins=margins,
                ratios=parse_ratios(tuple(ratio or ())),
                alpha=alpha,
                items_are_independent=items_are_independent,
            )
            for name in choose_metrics(sides.reference, sides.candidate, tuple(metric or ()))
        ]
        raise typer.Exit(_print_comparisons(comparisons, out))


def _print_comparisons(comparisons: Sequence[MetricComparison], out: Path | None) -> int:
    """Print the comparisons of one or two metrics, write the report to ``out`` if given, and return the exit code."""
    from kvaudit.reports.page.compare_files import compare_judges
    from kvaudit.reports.page.compare_page import comparison_files

    two = compare_judges(*comparisons) if len(comparisons) == MOST_METRICS else None
    # with two judges, show the comparison whose verdict is the common verdict
    main = next(c for c in comparisons if two is None or c.verdict.status is two.status)
    _print_tables(comparisons, main, two)
    if out is not None:
        for name, text in comparison_files(main, two).items():
            write_output(out / name, text)
        print_line(wide_console(), f"report: {out / 'compare.html'}")
    return two.exit_code if two else main.verdict.exit_code


def _print_tables(comparisons: Sequence[MetricComparison], main: MetricComparison, two: TwoJudges | None) -> None:
    from kvaudit.reports.page.compare_page import (
        agreement_notes,
        comparison_banner,
        comparison_cautions,
        comparison_table,
        facets_table,
        judges_table,
    )

    console = wide_console()
    for comparison in comparisons:
        print_table(console, comparison_table(comparison))
    if facet_table := facets_table(main):
        print_table(console, facet_table)
    if two:
        print_table(console, judges_table(two))
        for line in agreement_notes(two):
            print_line(console, inline(line))
    banner = comparison_banner(main)
    print_line(console, f"verdict: {banner.status.value} {banner.number}".rstrip())
    for line in (banner.sentence, banner.about, *banner.lines, *comparison_cautions(main)):
        if line:
            print_line(console, line)


COMMAND = Command("compare", group="Audit", order=6, call=compare)
