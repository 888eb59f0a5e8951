"""``kvaudit grade adjudicate``: a blind sheet for human labels, and what they say when it is read back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command, option
from kvaudit.audit.commands.command_line import Run, check_seed, print_table, say, selectors, user_errors, wide_console
from kvaudit.audit.commands.report import print_verdict
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import write_output
from kvaudit.core.provenance import check_checkpoints

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.reports.page.findings import Findings
    from kvaudit.reports.verdict.contrast import Contrast, Drift
    from kvaudit.reports.verdict.rules import Rules


def adjudicate(
    run: Run,
    *,
    out: Annotated[Path, typer.Option(help="The sheet to write; its key is written beside it.")] = Path("sheet.csv"),
    read: Annotated[Path | None, option(help="A labelled sheet to read back, with its key beside it.")] = None,
    concordant: Annotated[
        int | None,
        option(
            min=1,
            help="How many pairs that the judge calls equal to label too, of each cell; default: two of each template, "
            "100 at least. A PASS takes one of each.",
        ),
    ] = None,
    select: Annotated[
        list[str] | None, option(help="Only these gated cells: suite=, arm=, policy=, estimand=, context=.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Let people label a run's answers, blind.

    Writes a sheet of answers to label; --read decides by its labels, and exits as `gate` does.
    """
    with user_errors():
        if read is not None:
            raise typer.Exit(_read(run, read))
        _write(run, out, tuple(select or ()), concordant=concordant, seed=seed)


def _write(run: Path, out: Path, select: Sequence[str], *, concordant: int | None, seed: int) -> None:
    """Write the sheet and its key; refuses to overwrite a sheet, which may hold labels."""
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import measured
    from kvaudit.reports.verdict.human_labels import earlier_labels, sheet_key
    from kvaudit.reports.verdict.label_pairs import concordant_templates, default_concordant, paired_answers
    from kvaudit.reports.verdict.label_sheet import key_path, render_key, render_sheet
    from kvaudit.reports.verdict.rules import GateOverrides

    check_checkpoints(run)
    check_seed(seed)
    for path in (out, key_path(out)):
        if path.exists():
            raise RunError(f"{str(path)!r} exists and may hold labels; choose another --out")
    data = load_run(run)
    drift, rules = measured(data, GateOverrides(), everything=False)
    found = paired_answers(data, drift.comparison, _gated_contrasts(drift, rules), selectors(select, "--select"))
    wanted, needed = concordant or default_concordant(found), concordant_templates(found)
    key, shown = sheet_key(data, found, seed=seed, concordant=wanted)
    # the key first: a sheet without one cannot be read back
    write_output(key_path(out), render_key(key))
    known = earlier_labels(run, key)
    write_output(out, render_sheet(shown, known))
    console = wide_console()
    apart = sum(int(pairs.discordant.sum()) for pairs in found)
    total = sum(len(cell.pairs) for cell in key.cells)
    say(
        console, f"sheet: {out}: {len(shown)} answers of {total} pairs ({apart} discordant) in {len(found)} gated cells"
    )
    if wanted < needed:
        say(
            console,
            f"too few for a PASS: {wanted} concordant pairs of {needed} templates; --concordant {needed} or more",
        )
    say(console, f"key: {key_path(out)}: whose answers they are; keep it from whoever labels")
    if known:
        say(console, f"{len(known)} answers hold the labels that this run already has")
    say(console, "label each row 1 (the answer does what its suite wants) or 0, then:")
    say(console, f"kvaudit grade adjudicate {run} --read {out}")


def _gated_contrasts(drift: Drift, rules: Rules) -> list[Contrast]:
    from kvaudit.reports.verdict.family import gated_cells

    firsts = ((cell.estimand, cell.rows[0].contrast) for cell in gated_cells(drift, rules))
    return [c for estimand, c in firsts if c.estimand == estimand]


def _read(run: Path, sheet: Path) -> int:
    """Read the labels back, store them in the run folder, print what they say and return the gate's exit code."""
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decided, measured
    from kvaudit.reports.verdict.human_labels import LABELS_FILE, apply_labels, check_key, collect_labels, render_labels
    from kvaudit.reports.verdict.label_pairs import paired_answers, records_digest
    from kvaudit.reports.verdict.label_sheet import read_key, read_labels
    from kvaudit.reports.verdict.rules import GateOverrides

    check_checkpoints(run)
    key = read_key(sheet)
    labels = read_labels(sheet, key)
    data = load_run(run)
    if records_digest(data.records) != key.records:
        raise DataError(f"{str(run)!r} holds other records than {str(sheet)!r} was made from; write another sheet")
    drift, rules = measured(data, GateOverrides(), everything=False)
    check_key(key, sheet, data, paired_answers(data, drift.comparison, _gated_contrasts(drift, rules), {}))
    stored = collect_labels(run, drift.comparison.reference, key, labels)
    apply_labels(data, drift, stored)  # nothing is stored that cannot be read back
    write_output(run / "report" / LABELS_FILE, render_labels(stored))
    # which reads the labels that were just written
    findings = decided(data, everything=False)
    console = wide_console()
    if findings.verdict.judged is not None:
        _print(console, findings)
    print_verdict(console, findings)
    say(console, f"written: {run / 'report' / LABELS_FILE}")
    return findings.verdict.exit_code


def _print(console: Console, findings: Findings) -> None:
    from kvaudit.reports.sections.people import labelled_cells, labelled_cells_table, panel_notes

    cells = labelled_cells(findings)
    print_table(console, labelled_cells_table(cells))
    for line in panel_notes(cells, findings.drift):
        say(console, line)


COMMAND = Command("adjudicate", group="grade", order=3, call=adjudicate, old={"adjudicate": "grade adjudicate"})
