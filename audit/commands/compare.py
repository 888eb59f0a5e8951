"""``kvaudit compare``: two result files, no run needed and no model loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from audit.commands.command_line import say, wide_console
from audit.core.errors import SpecError
from audit.core.files import write_output
from audit.core.intact import check_checkpoints
from audit.core.text import inline
from reports.compare.files import Compared, Sides, TwoJudges, compare, two_judges
from reports.compare.page import agreement, cells, comparison_banner, judges, pages
from reports.compare.pairing import chosen_metrics
from reports.page.tables import Table as Rows
from reports.records.readers.base import Request
from reports.records.readers.clusters import cluster_rule
from reports.records.readers.find import read_log

MOST_METRICS = 2  # two judges


@dataclass(frozen=True)
class Asked:
    """What the command line says beside the two files; ``margin`` in pp."""

    margin: float
    alpha: float
    cluster: str | None = None
    metrics: tuple[str, ...] = ()
    select_reference: tuple[str, ...] = ()
    select_candidate: tuple[str, ...] = ()
    lower_is_better: bool = False
    out: Path | None = None


def compare_files(reference: Path, candidate: Path, asked: Asked) -> int:
    """Print the comparison, write its pages where asked, and return the exit code of the verdict."""
    if len(asked.metrics) > MOST_METRICS:
        raise SpecError(f"--metric stands {len(asked.metrics)} times; one, or two for two judges of the same answers")
    for path in (reference, candidate):
        check_checkpoints(path)  # a file, or another tool's folder, has none
    rule = cluster_rule(asked.cluster) if asked.cluster is not None else None
    sides = Sides(
        read_log(reference, Request(rule, selectors(asked.select_reference, "--select-a"))),
        read_log(candidate, Request(rule, selectors(asked.select_candidate, "--select-b"))),
        lower_is_better=asked.lower_is_better,
        own_clusters=rule is not None,
    )
    names = chosen_metrics(sides.reference, sides.candidate, asked.metrics)
    found = [compare(sides, name, margin=asked.margin, alpha=asked.alpha) for name in names]
    two = two_judges(*found) if len(found) == MOST_METRICS else None
    shown = next(c for c in found if two is None or c.verdict.status is two.status)
    console = wide_console()
    _print(console, found, shown, two)
    if asked.out is not None:
        for name, text in pages(shown, two).items():
            write_output(asked.out / name, text)
        say(console, f"report: {asked.out / 'compare.html'}")
    return two.exit_code if two else shown.verdict.exit_code


def selectors(words: Sequence[str], option: str) -> dict[str, str]:
    """``arm=naive`` words as a mapping."""
    found = {}
    for word in words:
        key, mark, value = word.partition("=")
        if not (mark and key and value):
            raise SpecError(f"{option} {word!r} is not KEY=VALUE, such as {option} arm=naive")
        found[key] = value
    return found


def _print(console: Console, found: Sequence[Compared], shown: Compared, two: TwoJudges | None) -> None:
    for comparison in found:
        _print_table(console, cells(comparison))
    if two:
        _print_table(console, judges(two))
        for line in agreement(two):
            say(console, inline(line))
    top = comparison_banner(shown)
    say(console, f"verdict: {top.status.value} {top.number}".rstrip())
    for line in (top.sentence, top.about, *top.asides):
        if line:
            say(console, line)


def _print_table(console: Console, rows: Rows) -> None:
    table = Table(*rows.headers)
    for row in rows.rows:
        table.add_row(*row)
    console.print(table, markup=False)
