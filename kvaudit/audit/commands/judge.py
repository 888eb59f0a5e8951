"""``kvaudit grade judge``: grade the stored transcripts of a run again, into another run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command, option
from kvaudit.audit.commands.base import Plugins, Run, print_line, set_data_folder, user_errors, wide_console
from kvaudit.core.errors import AuditError, RunError, SpecError
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.audit.judges.base import Judge
    from kvaudit.audit.runs.judge import SuiteChange
    from kvaudit.core.provenance import Digests
    from kvaudit.core.spec import RunSpec

By = Annotated[
    str | None,
    typer.Option("--judge", help="NAME or NAME:option=value,... (kvaudit list judges) instead of the phrase rules."),
]


def judge(
    run: Run,
    *,
    out: Annotated[Path | None, option(help="The folder of the judged run; RUN/judged/NAME-... without.")] = None,
    by: By = None,
    card: Annotated[bool, typer.Option("--card", help="Store the judge's card with the judged run.")] = False,
    plugin: Plugins = None,
) -> None:
    """Let a judge grade a run's stored answers.

    The judged run is another folder: nothing is sampled, and the run stays as it is. Without --judge suites grade as
    they do now.
    """
    words = [word for name, value in (("--out", out), ("--judge", by)) if value for word in (name, value)]
    with user_errors("kvaudit", "grade", "judge", run, *words):
        from kvaudit.audit.runs.names import load_plugins

        if card and by is None:
            raise SpecError("--card is of the judge that --judge names; name one")
        _judge(run, out, by, load_plugins(tuple(plugin or ())), card=card)


DEFAULT = "logistic"  # where its packages and its labels are there, and a spec names no judge


def judge_all(run: Path, spec: RunSpec, plugins: Digests) -> None:
    """Judge a run by each of its spec's judges, or by the default one, and write the report of each."""
    from kvaudit.audit.commands.report import write_report

    for text in spec.judge or _default(spec):
        write_report(_judge(run, None, text, plugins, card=False))


def _default(spec: RunSpec) -> tuple[str, ...]:
    """The default judge where suites leave answers to one; none, and why, where it cannot work here."""
    from kvaudit.audit.judges.base import JUDGES
    from kvaudit.audit.training.rewards.base import asks_a_judge
    from kvaudit.core.plugins import parse_plugin
    from kvaudit.suites.base import SUITES

    asking = [name for name in spec.evaluate.suites if asks_a_judge(SUITES.get(name)())]
    if not asking:
        return ()
    set_data_folder(spec)
    try:
        parse_plugin(JUDGES, DEFAULT).check()
    except AuditError as why:
        print_line(wide_console(), f"phrase rules alone graded {inline(', '.join(asking))}: {inline(str(why))}")
        return ()
    return (DEFAULT,)


def _judge(path: Path, out: Path | None, by: str | None, plugins: Digests, *, card: bool) -> Path:
    """Judge what is not judged yet, print what changed by suite and how to see the rest; returns where it lies."""
    from rich.console import Console

    from kvaudit.audit.judges.base import JUDGES
    from kvaudit.audit.runs.folder import existing_run
    from kvaudit.audit.runs.judge import Judging, judged_folder
    from kvaudit.core.plugins import parse_plugin

    source = existing_run(path)
    set_data_folder(source.spec)
    chosen = None if by is None else parse_plugin(JUDGES, by)
    place = out if chosen is None else out or judged_folder(path, chosen)
    if place is None:
        raise SpecError("give --out FOLDER for the run as suites grade it now; only a --judge has a folder of its own")
    judging = Judging(source, place, Console(stderr=True), plugins, chosen)
    changes = judging.work()
    _print(changes)
    console = wide_console()
    if chosen is not None:
        _check_spoke(chosen, changes)
    if failed := sum(change.failed for change in changes):
        print_line(console, f"unscored: the judge failed on {failed} answers; the same command asks it again")
    if chosen is not None:
        _note(path, place, chosen, judging.agreement(), console, card=card)
    if judging.unfinished:
        print_line(
            console, f"left out: {len(judging.unfinished)} unfinished units, first {inline(judging.unfinished[0])}"
        )
    shown = "report" if source.spec.probe is None else "probe"
    print_line(console, f"judged: {inline(str(place))}; show it with: kvaudit {shown} {inline(str(place))}")
    return place


def _check_spoke(judge: Judge, changes: Sequence[SuiteChange]) -> None:
    """Raise RunError where the judge failed on all that it was asked."""
    failed, judged = (sum(part) for part in zip(*((change.failed, change.judged) for change in changes), strict=True))
    if failed and failed == judged:
        quoted = f": {inline(judge.unread[0])}" if judge.unread else ""
        raise RunError(
            f"judge {judge.name} failed on all {failed} answers that it was asked about{quoted}; wanted a judge whose "
            "replies can be read: give another model or options, the same command asks again"
        )


def _note(
    run: Path, out: Path, judge: Judge, agreement: Mapping[str, Sequence[int]], console: Console, *, card: bool
) -> None:
    """Keep with the judged run what the report says of its judge: the verdict before it, agreement, its card."""
    from kvaudit.audit.runs.folder import existing_run

    noted: dict[str, object] = {"agreement": agreement}
    if existing_run(run).spec.probe is None:  # a probe has no verdict by itself
        noted |= _verdicts(run, out, judge, console)
    if card:
        from kvaudit.audit.judges.labels import HEADINGS, card_rows, sources

        noted["card"] = [list(HEADINGS), *card_rows(judge, sources())]
    existing_run(out).note(judged=noted)


def _verdicts(run: Path, out: Path, judge: Judge, console: Console) -> dict[str, object]:
    """Say the verdict before and after the judge, and return the one before with who had judged."""
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decide_run
    from kvaudit.reports.verdict.comparison import PROGRAMMATIC

    before, now = (decide_run(load_run(folder)) for folder in (run, out))
    verdicts = [found.verdict.status.value for found in (before, now)]
    print_line(console, f"verdict: {verdicts[0]} as the run was judged before, {verdicts[1]} by {judge.label}")
    judges = {name for judges in before.comparison.judges.values() for name in judges}
    return {"verdict_before": verdicts[0], "judges_before": sorted(judges - {PROGRAMMATIC})}


def _print(changes: Sequence[SuiteChange]) -> None:
    from rich.table import Table

    table = Table(
        "suite", "version", "answers", "scores changed", "outcomes changed", "judged", "unsure", "judge failed"
    )
    for change in changes:
        table.add_row(inline(change.suite), inline(change.versions), *map(str, change[2:]))
    wide_console().print(table, markup=False)


COMMAND = Command("judge", group="grade", order=1, call=judge, old={"judge": "grade judge"})
