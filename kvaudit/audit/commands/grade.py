"""``kvaudit grade``: grade a run's stored answers again, by a judge (``judge``) or by people (``adjudicate``)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import (
    Command,
    Plugins,
    Run,
    check_seed,
    option,
    parse_pairs,
    print_line,
    print_rows,
    print_table,
    set_data_folder,
    typed_command,
    user_errors,
    wide_console,
)
from kvaudit.audit.commands.report import print_verdict, write_report
from kvaudit.core.errors import AuditError, DataError, RunError, SpecError
from kvaudit.core.files import write_output
from kvaudit.core.provenance import LABELLED, check_checkpoints
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.audit.judges.base import Judge
    from kvaudit.audit.runs.judge import SuiteChange
    from kvaudit.core.provenance import Digests
    from kvaudit.core.spec import RunSpec
    from kvaudit.reports.page.findings import Findings
    from kvaudit.reports.verdict.contrast import Contrast, Drift
    from kvaudit.reports.verdict.rules import Rules

DEFAULT_JUDGE = "logistic"  # used if a spec names none, and its packages and labels are present


def judge(
    run: Run,
    *,
    out: Annotated[Path | None, option(help="Folder to write. Default with --judge: RUN/judged/NAME-...")] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--judge",
            help="Judge to use instead of the phrase rules: NAME or NAME:option=value,... (see `kvaudit list judges`).",
        ),
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Also store how often the judge agrees with human labels.")
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Let a judge grade a run's stored answers.

    The result is another run folder; no answer is sampled, and RUN does not change. Without --judge the suites grade,
    as they do in this version.
    """
    with user_errors(*typed_command()):
        from kvaudit.audit.runs.names import load_plugins

        if card and by is None:
            raise SpecError("--card needs the judge whose card it is; give --judge NAME")
        _judge_run(run, out, by, load_plugins(tuple(plugin or ())), card=card)


def judge_with_spec(run: Path, spec: RunSpec, plugins: Digests) -> None:
    """Judge a run's answers by each judge that its spec names, or by the default judge, and write a report for each."""
    for name in spec.judge or _default_judges(spec):
        write_report(_judge_run(run, None, name, plugins, card=False))


def _default_judges(spec: RunSpec) -> tuple[str, ...]:
    """Return the name of the default judge if some suite needs a judge, else nothing.

    If that judge cannot work here, print why and return an empty tuple.
    """
    from kvaudit.audit.judges.base import JUDGES
    from kvaudit.audit.training.rewards.base import asks_a_judge
    from kvaudit.core.plugins import parse_plugin
    from kvaudit.suites.base import SUITES

    suites = [name for name in spec.evaluate.suites if asks_a_judge(SUITES.get(name)())]
    if not suites:
        return ()
    set_data_folder(spec)
    try:
        parse_plugin(JUDGES, DEFAULT_JUDGE).check()
    except AuditError as error:
        print_line(wide_console(), f"graded by phrase rules only: {inline(', '.join(suites))}: {inline(str(error))}")
        return ()
    return (DEFAULT_JUDGE,)


def _judge_run(path: Path, out: Path | None, by: str | None, plugins: Digests, *, card: bool) -> Path:
    """Judge the answers of a run that this judge has not graded yet, and print what changed.

    Returns the folder of the run with the new grades: ``out`` or, by default, one below the run's own folder.
    """
    from rich.console import Console

    from kvaudit.audit.judges.base import JUDGES
    from kvaudit.audit.runs.folder import existing_run
    from kvaudit.audit.runs.judge import Judging, judged_folder
    from kvaudit.core.plugins import parse_plugin

    source = existing_run(path)
    set_data_folder(source.spec)
    chosen_judge = None if by is None else parse_plugin(JUDGES, by)
    folder = out if chosen_judge is None else out or judged_folder(path, chosen_judge)
    if folder is None:
        raise SpecError("--out is missing: give the folder for the run as graded by its suites, or give a --judge")
    judging = Judging(source, folder, Console(stderr=True), plugins, chosen_judge)
    changes = judging.work()
    _print_changes(changes)
    console = wide_console()
    if chosen_judge is not None:
        _check_readable(chosen_judge, changes)
    if failed := sum(change.failed for change in changes):
        print_line(console, f"unscored: the judge failed on {failed} answers; run the same command to retry them")
    if chosen_judge is not None:
        _note_judge(path, folder, chosen_judge, judging.agreement(), console, card=card)
    if judging.unfinished:
        first = inline(judging.unfinished[0])
        print_line(console, f"left out: {len(judging.unfinished)} unfinished units, first {first}")
    command = shlex.join(["kvaudit", "report" if source.spec.probe is None else "probe", str(folder)])
    print_line(console, f"judged: {inline(str(folder))}; show it with: {inline(command)}")
    return folder


def _check_readable(judge: Judge, changes: Sequence[SuiteChange]) -> None:
    """Raise RunError if the judge failed on every answer that it was asked about."""
    failed, judged = sum(change.failed for change in changes), sum(change.judged for change in changes)
    if failed and failed == judged:
        reply = f", replying {inline(judge.unread[0])}" if judge.unread else ""
        raise RunError(
            f"judge {judge.name} failed on all {failed} answers{reply}; its replies cannot be read: give another model "
            "or other options and run the same command again"
        )


def _note_judge(
    run: Path, out: Path, judge: Judge, agreement: Mapping[str, Sequence[int]], console: Console, *, card: bool
) -> None:
    """Store in the run folder ``out`` what its report says of this judge.

    That is the earlier verdict, ``agreement`` (by suite, how often the judge agrees with earlier grades), and with
    ``card`` how often it agrees with human labels.
    """
    from kvaudit.audit.runs.folder import existing_run

    notes: dict[str, object] = {"agreement": agreement}
    if existing_run(run).spec.probe is None:  # a probe has no verdict
        notes |= _compare_verdicts(run, out, judge, console)
    if card:
        from kvaudit.audit.judges.labels import HEADINGS, card_rows, sources

        notes["card"] = [list(HEADINGS), *card_rows(judge, sources())]
    existing_run(out).note(judged=notes)


def _compare_verdicts(run: Path, out: Path, judge: Judge, console: Console) -> dict[str, object]:
    """Print the verdicts before and after the judge; return what to store of the one before.

    The keys are ``verdict_before``, its status, and ``judges_before``, the names of the judges it was based on.
    """
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decide_run
    from kvaudit.reports.verdict.comparison import PROGRAMMATIC

    before, after = (decide_run(load_run(folder)) for folder in (run, out))
    verdict = before.verdict.status.value
    print_line(console, f"verdict: {verdict} before this judge, {after.verdict.status.value} by {judge.label}")
    judges = {name for names in before.comparison.judges.values() for name in names}
    return {"verdict_before": verdict, "judges_before": sorted(judges - {PROGRAMMATIC})}


def _print_changes(changes: Sequence[SuiteChange]) -> None:
    headings = ["suite", "version", "answers", "scores changed", "outcomes changed", "judged", "unsure", "judge failed"]
    rows = ([inline(change.suite), inline(change.versions), *map(str, change[2:])] for change in changes)
    print_rows(wide_console(), headings, rows)


def adjudicate(
    run: Run,
    *,
    out: Annotated[Path, typer.Option(help="Sheet of answers to write; its key file is written next to it.")] = Path(
        "sheet.csv"
    ),
    read: Annotated[Path | None, option(help="Labelled sheet to read back; its key file must be next to it.")] = None,
    concordant: Annotated[
        int | None,
        option(
            min=1,
            help="Number of pairs per cell to label although the judge grades both answers alike. Default: two per "
            "template, at least 100. A PASS needs at least one per template.",
        ),
    ] = None,
    select: Annotated[
        list[str] | None,
        option(
            metavar="NAME=VALUE",
            help="Only the gated cells with suite=, arm=, policy=, estimand= or context=. May be repeated.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn pairs and of the sheet's order.")] = 0,
) -> None:
    """Let people label a run's answers, blind.

    Writes a sheet of answers to label; with --read, decides by the labels and exits as `gate` does.
    """
    with user_errors():
        if read is not None:
            raise typer.Exit(_read_sheet(run, read))
        _write_sheet(run, out, tuple(select or ()), concordant=concordant, seed=seed)


def _write_sheet(run: Path, out: Path, select: Sequence[str], *, concordant: int | None, seed: int) -> None:
    """Write a sheet of answers for people to label, and a key file that says which records they come from.

    Raises RunError if one of the files exists, since it may hold labels. Raises SpecError for a run in rounds.
    """
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import drift_and_rules
    from kvaudit.reports.verdict.human_labels import earlier_labels, sheet_key
    from kvaudit.reports.verdict.label_sheet import (
        concordant_templates,
        default_concordant,
        key_path,
        label_meaning,
        paired_answers,
        render_key,
        render_sheet,
    )
    from kvaudit.reports.verdict.rules import GateOverrides

    check_checkpoints(run)
    check_seed(seed)
    for path in (out, key_path(out)):
        if path.exists():
            raise RunError(f"{str(path)!r} exists and may hold labels; give another --out")
    data = load_run(run)
    if data.spec.evaluate.rounds is not None:
        raise SpecError(
            f"{str(run)!r} is a run in rounds, of which human labels decide nothing: its rows ended where the judge's "
            "labels had decided; label a run with a fixed number of items (kvaudit run)"
        )
    drift, rules = drift_and_rules(data, GateOverrides(), everything=False)
    pairs = paired_answers(data, drift.comparison, _gated_contrasts(drift, rules), parse_pairs(select, "--select"))
    count, templates = concordant or default_concordant(pairs), concordant_templates(pairs)
    key, answers = sheet_key(data, pairs, seed=seed, concordant=count)
    write_output(key_path(out), render_key(key))  # first: a sheet without its key cannot be read back
    labels = earlier_labels(run, key)
    write_output(out, render_sheet(answers, labels))
    discordant = sum(int(cell.discordant.sum()) for cell in pairs)
    total = sum(len(cell.pairs) for cell in key.cells)
    counts = f"{len(answers)} answers of {total} pairs ({discordant} discordant) in {len(pairs)} gated cells"
    lines = [f"sheet: {out}: {counts}"]
    if count < templates:
        lines.append(
            f"too few for a PASS: {count} concordant pairs of {templates} templates; give --concordant {templates}"
        )
    lines.append(f"key: {key_path(out)}: which answer is whose; keep it from the people who label")
    if labels:
        lines.append(f"{len(labels)} answers are filled in with labels that this run already has")
    lines += [
        "label each row 1 or 0; 1 means, by the column suite:",
        *(f"  {label_meaning(metric)}" for metric in dict.fromkeys(cell.contrast.suite for cell in pairs)),
        "then:",
        shlex.join(["kvaudit", "grade", "adjudicate", str(run), "--read", str(out)]),
    ]
    console = wide_console()
    for line in lines:
        print_line(console, line)


def _gated_contrasts(drift: Drift, rules: Rules) -> list[Contrast]:
    """Return the first contrast of each gated cell, whose answers people label.

    Cells that only combine several comparisons, such as the worst case over policies, are left out.
    """
    from kvaudit.reports.verdict.family import gated_cells

    firsts = ((cell.estimand, cell.rows[0].contrast) for cell in gated_cells(drift, rules))
    return [contrast for estimand, contrast in firsts if contrast.estimand == estimand]


def _read_sheet(run: Path, sheet: Path) -> int:
    """Store the labels of a sheet in the run folder, print the verdict by them, and return the gate's exit code.

    A report that exists is written anew, so that its verdict is the printed one.
    """
    from kvaudit.audit.runs.folder import RunFolder, utc_now
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decide_run, drift_and_rules, write_decided_run
    from kvaudit.reports.verdict.human_labels import (
        LABELS_FILE,
        apply_labels,
        check_key,
        collect_labels,
        labels_note,
        render_labels,
    )
    from kvaudit.reports.verdict.label_sheet import paired_answers, read_key, read_labels, records_digest
    from kvaudit.reports.verdict.rules import GateOverrides

    check_checkpoints(run)
    key = read_key(sheet)
    sheet_labels = read_labels(sheet, key)
    data = load_run(run)
    if records_digest(data.records) != key.records:
        raise DataError(f"{str(run)!r} holds other records than {str(sheet)!r} was made from; write a new sheet")
    drift, rules = drift_and_rules(data, GateOverrides(), everything=False)
    check_key(key, sheet, data, paired_answers(data, drift.comparison, _gated_contrasts(drift, rules), {}))
    labels = collect_labels(run, drift.comparison.reference, key, sheet_labels)
    apply_labels(data, drift, labels)  # raises before anything is stored that could not be read back
    path = run / "report" / LABELS_FILE
    write_output(path, render_labels(labels))
    RunFolder(run, data.spec).note(**{LABELLED: labels_note(labels, utc_now(), data.provenance.get(LABELLED))})
    has_report = (run / "report" / "verdict.json").exists()
    findings = decide_run(data, everything=has_report)  # reads the labels just written
    if has_report:
        write_decided_run(data, findings)
    console = wide_console()
    if findings.verdict.judged is not None:
        _print_labelled_cells(console, findings)
    print_verdict(console, findings)
    print_line(console, f"written: {path}")
    return findings.verdict.exit_code


def _print_labelled_cells(console: Console, findings: Findings) -> None:
    from kvaudit.reports.sections.judges import labelled_cells, labelled_cells_table, panel_notes

    cells = labelled_cells(findings)
    print_table(console, labelled_cells_table(cells))
    for line in panel_notes(cells, findings.drift):
        print_line(console, line)


GRADE = Command("grade", group="Stored answers", order=2, help="Grade stored answers again: by a judge or people.")
JUDGE = Command("judge", group="grade", order=1, call=judge, former_names={"judge": "grade judge"})
ADJUDICATE = Command(
    "adjudicate", group="grade", order=3, call=adjudicate, former_names={"adjudicate": "grade adjudicate"}
)
