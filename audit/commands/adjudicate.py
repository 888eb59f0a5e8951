"""``kvaudit adjudicate``: a blind sheet for human labels, and what they say when it is read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from audit.commands.command_line import check_seed, say, wide_console
from audit.commands.compare import selectors
from audit.commands.report import print_verdict
from audit.core.errors import DataError, RunError
from audit.core.files import write_output
from audit.core.intact import check_checkpoints
from reports.drift.results import Contrast, Drift
from reports.gate.gate_file import Asked
from reports.gate.gated import gated_cells
from reports.gate.rules import Rules
from reports.labels.pairs import Indices, PairedAnswers, Place, cell_name, chosen, digest, paired_answers, texts_of
from reports.labels.relabelled import relabelled
from reports.labels.sheet import Shown, read_labels, render_sheet, row_names, text_hash
from reports.labels.sheet_key import Key, KeyCell, KeyPair, key_path, read_key, render_key
from reports.labels.stored import FILE, REMEDY, CellLabels, CellName, Labels, load_labels, render
from reports.page.findings import Findings
from reports.page.judge_tables import cells_table, panel_notes
from reports.records.load import RunData, load_run
from reports.run import decided, measured


def write_sheet(run: Path, out: Path, select: Sequence[str], *, concordant: int, seed: int) -> None:
    """Write the sheet and its key; refuses to overwrite a sheet, which may hold labels."""
    check_checkpoints(run)
    check_seed(seed)
    for path in (out, key_path(out)):
        if path.exists():
            raise RunError(f"{str(path)!r} exists and may hold labels; choose another --out")
    data = load_run(run)
    drift, rules = measured(data, Asked())
    found = paired_answers(data, drift.comparison, _gated_contrasts(drift, rules), selectors(select, "--select"))
    key, shown = _key(data, found, seed=seed, concordant=concordant)
    write_output(key_path(out), render_key(key))
    write_output(out, render_sheet(shown))
    console = wide_console()
    apart = sum(int(pairs.discordant.sum()) for pairs in found)
    total = sum(len(cell.pairs) for cell in key.cells)
    say(
        console, f"sheet: {out}: {len(shown)} answers of {total} pairs ({apart} discordant) in {len(found)} gated cells"
    )
    say(console, f"key: {key_path(out)}: whose answers they are; keep it from whoever labels")
    say(console, "label each row 1 (the answer does what its suite wants) or 0, then:")
    say(console, f"kvaudit adjudicate {run} --read {out}")


def _gated_contrasts(drift: Drift, rules: Rules) -> list[Contrast]:
    """The contrasts that are gated cells by themselves."""
    firsts = ((cell.estimand, cell.rows[0].contrast) for cell in gated_cells(drift, rules))
    return [c for estimand, c in firsts if c.estimand == estimand]


def _key(data: RunData, found: Sequence[PairedAnswers], *, seed: int, concordant: int) -> tuple[Key, dict[str, Shown]]:
    """The key of a sheet and what each of its rows shows: all of it follows from the records, the seed and F."""
    picks = [chosen(pairs, concordant, seed) for pairs in found]
    texts = texts_of(data, list(zip(found, picks, strict=True)))
    hashes = {place: text_hash(text) for place, text in texts.items()}
    distinct = {hashes[place]: texts[place] for place in sorted(texts)}  # what looks the same is one row
    names = dict(zip(distinct, row_names(len(distinct), seed), strict=True))
    rows = {place: names[text] for place, text in hashes.items()}
    key = Key(
        run=data.spec.name,
        records=digest(data.records),
        seed=seed,
        concordant=concordant,
        rows={name: text for text, name in names.items()},
        cells=tuple(_key_cell(pairs, indices, rows) for pairs, indices in zip(found, picks, strict=True)),
    )
    return key, {names[text]: row for text, row in distinct.items()}


def _key_cell(pairs: PairedAnswers, indices: Indices, names: Mapping[Place, str]) -> KeyCell:
    d = pairs.contrast
    return KeyCell(
        estimand=d.estimand,
        arm=d.arm,
        policy=d.policy,
        suite=d.suite,
        context_tokens=d.context_tokens,
        pairs=tuple(
            KeyPair(
                item=str(pairs.items[i]),
                sample=int(pairs.samples[i]),
                candidate_seed=int(pairs.seeds[0][i]),
                reference_seed=int(pairs.seeds[1][i]),
                candidate_row=names[pairs.candidate_places[i]],
                reference_row=names[pairs.reference_places[i]],
            )
            for i in indices
        ),
    )


def read_sheet(run: Path, sheet: Path) -> int:
    """Read the labels back, store them in the run folder, print what they say and return the gate's exit code."""
    check_checkpoints(run)
    key = read_key(sheet)
    labels = read_labels(sheet, key)
    data = load_run(run)
    if digest(data.records) != key.records:
        raise DataError(f"{str(run)!r} holds other records than {str(sheet)!r} was made from; write another sheet")
    drift, rules = measured(data, Asked())
    gated = paired_answers(data, drift.comparison, _gated_contrasts(drift, rules), {})
    answers = {cell_name(pairs.contrast): pairs for pairs in gated}
    found = [_gated(answers, cell) for cell in key.cells]
    if _key(data, found, seed=key.seed, concordant=key.concordant)[0] != key:
        raise DataError(
            f"{str(key_path(sheet))!r} is not the key of these records with its seed and number of pairs: rows, pairs "
            "or texts were changed; put the first one back, or write another sheet"
        )
    stored = _stored(run, drift.comparison.reference, key, labels)
    relabelled(data, drift, stored)  # nothing is stored that cannot be read back
    write_output(run / "report" / FILE, render(stored))
    findings = decided(data)
    console = wide_console()
    if findings.verdict.judged is not None:
        _print(console, findings)
    print_verdict(console, findings)
    say(console, f"written: {run / 'report' / FILE}")
    return findings.verdict.exit_code


def _gated(answers: Mapping[CellName, PairedAnswers], cell: KeyCell) -> PairedAnswers:
    name = (cell.estimand, cell.arm, cell.policy, cell.suite, cell.context_tokens)
    if name not in answers:
        where = f"{cell.arm}, {cell.suite}"[:120]
        raise DataError(f"the sheet's key names a cell that is not gated: {where}; write another sheet")
    return answers[name]


def _stored(run: Path, reference: str, key: Key, labels: Mapping[str, int]) -> Labels:
    """The labels by the text they are of, and those that the run already has of other cells."""
    cells = [
        CellLabels(
            c.estimand, c.arm, c.policy, c.suite, c.context_tokens, key.seed, key.concordant, _of_texts(c, key, labels)
        )
        for c in key.cells
    ]
    new, before = {cell.name for cell in cells}, load_labels(run)
    if before is not None and (before.records, before.reference) != (key.records, reference):
        raise DataError(f"{str(run / 'report' / FILE)!r} is about other records; {REMEDY}")
    kept = [cell for cell in before.cells if cell.name not in new] if before else []
    return Labels(key.records, reference, (*kept, *cells))


def _of_texts(cell: KeyCell, key: Key, labels: Mapping[str, int]) -> dict[str, int]:
    rows = sorted({row for pair in cell.pairs for row in (pair.candidate_row, pair.reference_row)})
    return {key.rows[row]: labels[row] for row in rows}


def _print(console: Console, findings: Findings) -> None:
    rows = cells_table(findings)
    table = Table(*rows.headers)
    for row in rows.rows:
        table.add_row(*row)
    console.print(table, markup=False)
    for line in panel_notes(findings):
        say(console, line)
