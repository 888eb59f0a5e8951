"""``kvaudit adjudicate``: a blind sheet for human labels, and what they say when it is read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from audit.commands.compare import selectors
from audit.commands.console import check_seed, say, wide_console
from audit.errors import DataError, RunError
from reports.adjudication import Indices, PairedAnswers, Place, chosen, digest, paired_answers, places
from reports.drift import drift_report
from reports.gate import Decision, decide
from reports.judge import adjudicate, human_labels
from reports.judge_panel import FILE, Adjudication, render
from reports.judge_tables import cells_table, panel_notes
from reports.load import RunData, load_run
from reports.sheet import Shown, read_labels, render_sheet, row_names, shown, text_hash
from reports.sheet_key import Key, KeyCell, KeyPair, key_path, read_key, render_key
from reports.write import write_whole


def write_sheet(run: Path, out: Path, select: Sequence[str], *, concordant: int, seed: int) -> None:
    """Write the sheet and its key; refuses to overwrite a sheet, which may hold labels."""
    check_seed(seed)
    for path in (out, key_path(out)):
        if path.exists():
            raise RunError(f"{str(path)!r} exists and may hold labels; choose another --out")
    data = load_run(run)
    report = drift_report(data)
    found = paired_answers(data, report, decide(report), selectors(select, "--select"))
    picks = [chosen(pairs, concordant, seed) for pairs in found]
    names, rows = _rows(data, found, picks, seed)
    key = Key(
        run=report.run,
        records=digest(data.records),
        seed=seed,
        concordant=concordant,
        rows={name: text_hash(row) for name, row in rows.items()},
        cells=tuple(_key_cell(pairs, indices, names) for pairs, indices in zip(found, picks, strict=True)),
    )
    write_whole(key_path(out), render_key(key))
    write_whole(out, render_sheet(rows))
    console = wide_console()
    apart = sum(int(pairs.discordant.sum()) for pairs in found)
    total = sum(map(len, picks))
    say(console, f"sheet: {out}: {len(rows)} answers of {total} pairs ({apart} discordant) in {len(found)} gated cells")
    say(console, f"key: {key_path(out)}: whose answers they are; keep it from whoever labels")
    say(console, "label each row 1 (the answer does what its suite wants) or 0, then:")
    say(console, f"kvaudit adjudicate {run} --read {out}")


def _rows(
    data: RunData, found: Sequence[PairedAnswers], picks: Sequence[Indices], seed: int
) -> tuple[dict[Place, str], dict[str, Shown]]:
    """Row name of every answer that is shown, and what each row shows; equal answers to an item share a row."""
    suites = {
        place: pairs.decision.suite
        for pairs, indices in zip(found, picks, strict=True)
        for pair in places(pairs, indices)
        for place in pair
    }
    texts = data.transcripts(suites)
    whole = {place: (suite, texts[place]) for place, suite in suites.items()}
    distinct = list(dict.fromkeys(whole[place] for place in sorted(whole)))
    names = dict(zip(distinct, row_names(len(distinct), seed), strict=True))
    return {place: names[answer] for place, answer in whole.items()}, {
        name: shown(*answer) for answer, name in names.items()
    }


def _key_cell(pairs: PairedAnswers, indices: Indices, names: Mapping[Place, str]) -> KeyCell:
    d = pairs.decision
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


def read_sheet(run: Path, sheet: Path) -> Adjudication:
    """Read the labels back, store what they say in the run folder and print it."""
    key = read_key(sheet)
    labels = read_labels(sheet, key)
    data = load_run(run)
    if digest(data.records) != key.records:
        raise DataError(f"{str(run)!r} holds other records than {str(sheet)!r} was made from; write another sheet")
    report = drift_report(data)
    verdict = decide(report)
    answers = {_name(pairs.decision): pairs for pairs in paired_answers(data, report, verdict, {})}
    found = []
    for cell in key.cells:
        pairs = answers.get((cell.estimand, cell.arm, cell.policy, cell.suite, cell.context_tokens))
        if pairs is None:
            where = f"{cell.arm}, {cell.suite}"[:120]
            raise DataError(f"the sheet's key names a cell that is not gated: {where}; write another sheet")
        found.append(human_labels(pairs, cell, labels))
    done = adjudicate(verdict, found, alpha=report.plan.alpha, seed=key.seed, records=key.records)
    write_whole(run / "report" / FILE, render(done))
    console = wide_console()
    _print(console, done, run)
    return done


def _name(d: Decision) -> tuple[str, str, str, str, int]:
    return d.estimand, d.arm, d.policy, d.suite, d.context_tokens


def _print(console: Console, done: Adjudication, run: Path) -> None:
    rows = cells_table(done)
    table = Table(*rows.headers)
    for row in rows.rows:
        table.add_row(*row)
    console.print(table, markup=False)
    for line in panel_notes(done):
        say(console, line)
    labelled = f"with human labels in {len(done.cells)} cells"
    say(console, f"verdict: {done.status.value} {labelled}; {done.judged.value} without")
    say(console, f"written: {run / 'report' / FILE}")
