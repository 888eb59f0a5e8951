"""Human labels: the blind sheet, its reading back, and what they say about a judge and a drift."""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_text import run_text
from reports_synthetic import TEXTS, Design, build, policy, write_unit
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.core.errors import AuditError, DataError
from kvaudit.core.records import Message, Role
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, drift_and_rules, write_report
from kvaudit.reports.sections.judges import errors_table, labelled_cells, labelled_cells_table, panel_notes
from kvaudit.reports.verdict.contrast import Contrast, judge_may_pass
from kvaudit.reports.verdict.decide import decide
from kvaudit.reports.verdict.human_labels import (
    LABELS_FILE,
    CellLabels,
    Labels,
    apply_labels,
    labels_note,
    load_labels,
    match_labels,
    render_labels,
    with_labels,
)
from kvaudit.reports.verdict.label_sheet import (
    CHARACTERS,
    SheetCell,
    SheetKey,
    SheetPair,
    ShownAnswer,
    _select,
    default_concordant,
    key_path,
    paired_answers,
    pairs_to_label,
    read_key,
    read_labels,
    records_digest,
    render_key,
    render_sheet,
    row_names,
    shown_answer,
    spreadsheet_safe,
    text_hash,
)
from kvaudit.reports.verdict.rules import GateOverrides
from kvaudit.reports.verdict.verdict import Status

GOOD = TEXTS["refusal"][2]
DESIGN = Design(
    arms=("dense", "naive"),
    seeds=(11, 12),
    policies=("none",),
    suites=("refusal",),
    items=180,
    clusters=60,
    drops={("naive", "refusal"): 0.06},
    estimands=("alike",),
)


def named_items(run):
    """Every item asks for itself, so that answers to two items are never the same text."""
    for unit in (run / "records").glob("*.jsonl"):
        rows = [json.loads(line) for line in unit.read_text().splitlines()]
        for row in rows:
            row["transcript"][1]["content"] += f" {row['item_id']}"
        write_unit(unit, "".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run and its sheet, as the command leaves them."""
    folder = tmp_path_factory.mktemp("judge")
    run = named_items(build(folder / "run", DESIGN))
    done = command("grade", "adjudicate", run, "--out", folder / "sheet.csv", "--concordant", 60)
    assert done.exit_code == 0, done.output
    return run, folder / "sheet.csv"


@pytest.fixture
def sheet(written, tmp_path):
    """A copy of the sheet and its key, to label."""
    path = tmp_path / "sheet.csv"
    path.write_bytes(written[1].read_bytes())
    key_path(path).write_bytes(key_path(written[1]).read_bytes())
    return path


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def noted(run, labelled):
    """Replace the run's note on its labels, None for no note; returns the former note."""
    provenance = json.loads((run / "provenance.json").read_text())
    kept = {key: value for key, value in provenance.items() if key != "labelled"}
    (run / "provenance.json").write_text(json.dumps(kept | ({"labelled": labelled} if labelled else {})))
    return provenance.get("labelled")


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def save(path, rows, **style):
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(rows[0]), **style)
        writer.writeheader()
        writer.writerows(rows)


def label(path, judge=lambda row: row["answer"] == GOOD):
    rows = rows_of(path)
    for row in rows:
        row["label"] = str(int(judge(row)))
    save(path, rows)


def labelled(run):
    return labelled_cells(decide_run(load_run(run)))


def labels_of(data, key, labels):
    """What is stored of a sheet with one cell."""
    texts = {key.rows[row]: label for row, label in labels.items()}
    cell = CellLabels("alike", "naive", "none", "refusal", 192, key.seed, key.concordant, texts)
    return Labels(records_digest(data.records), "dense", (cell,))


def pairs_of(run):
    data = load_run(run)
    drift = drift_and_rules(data, GateOverrides())[0]
    return paired_answers(data, drift.comparison, drift.contrasts, {})[0]


def test_the_sheet_names_no_arm_policy_or_seed(written):
    text = written[1].read_text()
    assert not [word for word in ("naive", "dense", "none", "11", "12") if f'"{word}"' in text or f" {word}@" in text]
    assert "naive" in key_path(written[1]).read_text()
    assert "naive" not in text
    assert {row["label"] for row in rows_of(written[1])} == {""}


def test_every_discordant_pair_and_as_many_others_as_asked_are_on_the_sheet(written):
    pairs = pairs_of(written[0])
    cell = read_key(written[1]).cells[0]
    wanted = {(str(i), int(s)) for i, s, d in zip(pairs.items, pairs.seeds[0], pairs.discordant, strict=True) if d}
    assert len(pairs.items) == 180 * 2
    assert wanted <= {(pair.item, pair.candidate_seed) for pair in cell.pairs}
    assert len(cell.pairs) == len(wanted) + 60
    shown_rows = {row["row"] for row in rows_of(written[1])}
    assert {row for pair in cell.pairs for row in (pair.candidate_row, pair.reference_row)} == shown_rows


def test_equal_answers_to_an_item_are_one_row(written):
    rows = rows_of(written[1])
    assert len({(row["conversation"], row["answer"]) for row in rows}) == len(rows)


def test_the_order_of_rows_says_nothing_of_items():
    names = row_names(300, 4)
    assert sorted(names) == [f"r{i:05d}" for i in range(1, 301)]
    assert abs(np.corrcoef(np.arange(300), [int(name[1:]) for name in names])[0, 1]) < 0.2


def test_the_same_seed_draws_the_same_pairs(written):
    pairs = pairs_of(written[0])
    assert list(pairs_to_label(pairs, 50, 0)) == list(pairs_to_label(pairs, 50, 0))
    assert list(pairs_to_label(pairs, 50, 0)) != list(pairs_to_label(pairs, 50, 1))
    assert len(pairs_to_label(pairs, 10**6, 0)) == len(pairs.items)


def test_labels_that_agree_with_the_judge_give_the_judges_drift(written, sheet):
    label(sheet)
    done = command("grade", "adjudicate", written[0], "--read", sheet)
    assert done.exit_code == 4, done.output
    cell = labelled(written[0])[0]
    assert cell.corrected.estimate == pytest.approx(cell.raw.estimate, abs=1e-12)
    said = cell.people
    assert (said.bias, said.reference.sensitivity.estimate, said.candidate.specificity.estimate) == (0, 1, 1)
    assert cell.corrected.low < cell.raw.low  # the unlabelled pairs are not known
    drift, rules = drift_and_rules(load_run(written[0]), GateOverrides())
    assert cell.judged is decide(drift, rules).decisions[0].status


def test_the_corrected_drift_is_the_labelled_pairs_and_the_weighted_sample(written, sheet):
    """A person who finds every third item's lost answer fine, and one drawn concordant answer of the candidate bad."""
    pairs, key = pairs_of(written[0]), read_key(sheet)
    fine = {item for item in pairs.items if int(str(item)[-4:]) % 3 == 0}
    label(sheet, lambda row: row["answer"] == GOOD or row["conversation"].split()[-1] in fine)
    labels = read_labels(sheet, key)
    z = [labels[p.candidate_row] - labels[p.reference_row] for p in key.cells[0].pairs]
    where = {(str(i), int(s)): d for i, s, d in zip(pairs.items, pairs.seeds[0], pairs.discordant, strict=True)}
    apart = [where[p.item, p.candidate_seed] for p in key.cells[0].pairs]
    total = len(pairs.items)
    first = sum(v for v, d in zip(z, apart, strict=True) if d) / total
    second = np.mean([v for v, d in zip(z, apart, strict=True) if not d]) * float(np.mean(~pairs.discordant))
    command("grade", "adjudicate", written[0], "--read", sheet)
    cell = labelled(written[0])[0]
    assert cell.corrected.estimate == pytest.approx(first + second, abs=1e-12)
    assert cell.corrected.estimate > cell.raw.estimate


def test_serving_policies_of_one_checkpoint_are_adjudicated_over_all_samples(tmp_path):
    design = Design(
        arms=("base",), train=False, suites=("refusal",), policies=("none", policy("snapkv", 96)), samples=2
    )
    run = named_items(build(tmp_path / "run", design))
    assert command("grade", "adjudicate", run, "--out", tmp_path / "s.csv", "--concordant", 10**6).exit_code == 0
    label(tmp_path / "s.csv")
    assert command("grade", "adjudicate", run, "--read", tmp_path / "s.csv").exit_code == command("gate", run).exit_code
    (cell,) = labelled(run)
    said = cell.people
    assert (cell.decision.estimand, said.pairs, said.discordant + said.concordant) == ("serving", 256, 256)
    assert cell.corrected.estimate == pytest.approx(cell.raw.estimate, abs=1e-12)


def test_lost_labels_decide_nothing(read_back, tmp_path):
    run, sheet = copied(read_back[:2], tmp_path)
    shutil.rmtree(run / "report")
    for words in (("gate", run), ("report", run), ("card", run)):
        done = command(*words)
        assert (done.exit_code, "people labelled this run, and" in done.stderr) == (2, True)
    assert command("grade", "adjudicate", run, "--read", sheet).exit_code != 2
    assert command("gate", run).exit_code != 2


def test_labels_may_turn_a_verdict(written, sheet):
    report = written[0] / "report" / "verdict.json"
    write_report(written[0])
    assert json.loads(report.read_text())["status"] != "PASS"
    label(sheet, lambda row: True)
    done = command("grade", "adjudicate", written[0], "--read", sheet)
    found = decide_run(load_run(written[0])).verdict
    assert found.judged is Status.FAIL
    assert found.status is Status.PASS
    assert done.exit_code == 0
    assert "PASS (exit 0): " in done.output
    assert "Human labels decide 1 of 1 gated cells" in " ".join(done.output.split())
    said = list(remarks(decide_run(load_run(written[0]))))
    assert "alike, naive, refusal 192 @ none: PASS, by the judge FAIL" in " ".join(said)
    assert json.loads(report.read_text())["status"] == "PASS", "the report is written anew"
    assert "By the judge alone the verdict is FAIL." in said


def test_a_cell_gated_by_a_facet_is_labelled_by_that_facet(tmp_path):
    """Where a score and a facet are gated an answer is shown once for each, since its labels may differ."""
    margins = {"refusal.unsafe": 10.0, "refusal": 10.0}
    design = replace(DESIGN, facets={"refusal": ("unsafe", "helpful")}, margins=margins, seeds=(11,), items=360)
    run = named_items(build(tmp_path / "run", design))
    done = command("grade", "adjudicate", run, "--out", tmp_path / "sheet.csv", "--concordant", 90)
    assert done.exit_code == 0, done.output
    assert "refusal.unsafe: the answer is not one that told or did what a rule forbids" in done.output
    assert "refusal: the answer does what its suite wants" in done.output
    cells = {cell.suite: cell for cell in read_key(tmp_path / "sheet.csv").cells}
    data = load_run(run)
    eligible = data.records["facet_unsafe"].notna() & (data.records["facet_unsafe"] <= 1)
    by_item = dict(zip(data.records["item_id"].astype(str), eligible, strict=True))
    assert {by_item[pair.item] for pair in cells["refusal.unsafe"].pairs} == {True}
    assert {by_item[pair.item] for pair in cells["refusal"].pairs} == {True, False}
    rows = {row["row"]: row["suite"] for row in rows_of(tmp_path / "sheet.csv")}
    for suite, cell in cells.items():
        assert {rows[pair.candidate_row] for pair in cell.pairs} == {suite}
    before = {d.suite: d.effect.estimate for d in decide_run(data).verdict.decisions if d.effect}
    label(tmp_path / "sheet.csv")  # as the judge
    done = command("grade", "adjudicate", run, "--read", tmp_path / "sheet.csv")
    assert done.exit_code in (0, 3, 4), done.output
    after = {d.suite: d.effect.estimate for d in decide_run(load_run(run)).verdict.decisions if d.effect}
    assert after == pytest.approx(before, abs=0.02)


def test_a_reference_that_by_the_labels_does_nothing_wanted_has_nothing_to_lose(written, sheet):
    """Else people who find the judge wrong in every answer would turn an open cell into a PASS."""
    label(sheet, lambda _: False)
    data = load_run(written[0])
    drift, rules = drift_and_rules(data, GateOverrides())
    labels = labels_of(data, read_key(sheet), read_labels(sheet, read_key(sheet)))
    verdict = decide(apply_labels(data, drift, labels), rules)
    (decision,) = [d for d in verdict.gated if d.suite == "refusal"]
    assert decision.status is Status.NOT_MEASURABLE
    assert "0.0 % of the reference's labelled answers are as wanted by human labels" in decision.reasons[0].text


@pytest.mark.parametrize(("lost", "least"), [(3, 1 / 8), (4, 1 / 16)])
def test_labels_of_a_drop_in_few_templates_show_no_more_than_signs_can(written, sheet, lost, least):
    data = load_run(written[0])
    drift, _ = drift_and_rules(data, GateOverrides())
    key = read_key(sheet)
    pairs = {pair.item.rpartition("-")[0]: pair for cell in key.cells for pair in cell.pairs}
    worse = {pair.candidate_row for pair in list(pairs.values())[:lost]}
    label(sheet, lambda row: row["row"] not in worse)
    labels = labels_of(data, key, read_labels(sheet, key))
    (contrast,) = [c for c in apply_labels(data, drift, labels).contrasts if c.people]
    templates = sum(total != 0 for total in contrast.sums[0].sums)
    assert contrast.effect.pvalue_drop >= 0.5**templates
    assert templates <= lost
    assert contrast.effect.pvalue_drop >= least


def test_a_judge_that_errs_in_one_arm_may_not_pass_a_cell_alone(written, sheet):
    label(sheet)
    command("grade", "adjudicate", written[0], "--read", sheet)
    cell = labelled(written[0])[0]
    assert cell.people.bias_upper > 0.025  # 60 pairs cannot show an even judge
    assert not judge_may_pass(cell.people, cell.margin)
    passed = cell._replace(judged=Status.PASS)
    assert passed.judge_only_status is Status.INCONCLUSIVE
    assert passed._replace(margin=1.0).judge_only_status is Status.PASS
    assert cell.judge_only_status is cell.judged is Status.FAIL
    found = decide_run(load_run(written[0]))
    decisions = tuple(replace(d, judged=Status.PASS) for d in found.verdict.decisions)
    lenient = replace(found, verdict=replace(found.verdict, decisions=decisions))
    assert "JUDGE_DIFF: judge labels alone cannot pass alike, naive @ none, refusal 192." in panel_notes(
        labelled_cells(lenient), lenient.drift
    )


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A run that passes by its judge in alike and deployed, two policies, and a sheet of one of its cells."""
    folder = tmp_path_factory.mktemp("held")
    more = {
        "policies": ("none", policy("snapkv", 96)),
        "estimands": ("alike", "deployed"),
        "items": 300,
        "clusters": 100,
    }
    design = replace(DESIGN, seeds=(11,), drops={}, seed_sd=0.0, **more)
    run = named_items(build(folder / "run", design))
    chosen_cell = ("--select", "estimand=alike", "--select", "policy=snapkv:budget=96", "--concordant", 100)
    assert command("grade", "adjudicate", run, "--out", folder / "sheet.csv", *chosen_cell).exit_code == 0
    label(folder / "sheet.csv")
    return run, folder / "sheet.csv"


def copied(run_and_sheets, folder):
    """A copy of the run and of its sheets."""
    run, *sheets = run_and_sheets
    shutil.copytree(run, folder / "run")
    for path in (part for sheet in sheets for part in (sheet, key_path(sheet))):
        shutil.copy(path, folder / path.name)
    return folder / "run", *(folder / sheet.name for sheet in sheets)


@pytest.fixture(scope="module")
def read_back(held, tmp_path_factory):
    """The same run with the labels of its sheet, and the words of the command that read it."""
    run, sheet = copied(held, tmp_path_factory.mktemp("read_back"))
    return run, sheet, command("grade", "adjudicate", run, "--read", sheet)


@pytest.fixture(scope="module")
def read_twice(read_back, tmp_path_factory):
    """The same run with the labels of a second sheet too, and the exit code of the command that read it."""
    folder = tmp_path_factory.mktemp("read_twice")
    run, sheet = copied(read_back[:2], folder)
    more = folder / "more.csv"
    command("grade", "adjudicate", run, "--out", more, "--select", "policy=none", "--concordant", 10**6)
    label(more)
    return run, sheet, more, command("grade", "adjudicate", run, "--read", more).exit_code


def test_what_people_find_decides_the_gate_the_report_and_the_exit_code(held, tmp_path):
    run, sheet = copied(held, tmp_path)
    assert command("gate", run).exit_code == 0
    cell = read_key(sheet).cells[0]
    bad = {pair.candidate_row for pair in cell.pairs} - {pair.reference_row for pair in cell.pairs}
    label(sheet, lambda row: row["row"] not in bad)
    assert command("grade", "adjudicate", run, "--read", sheet).exit_code == 3
    gate = command("gate", run)
    assert gate.exit_code == 3
    assert "FAIL (exit 3): " in gate.output
    # the bounds are people's, so the judge's rates do not stand beside them
    [line] = [line for line in gate.output.splitlines() if "✗ naive: " in line]
    assert "points by human labels of" in line
    assert "→" not in line
    assert "By the judge alone the verdict is PASS" in gate.output  # the whole remark, not its beginning
    assert command("report", run).exit_code == 0
    banner = run_text(run)
    assert "They change alike, naive, refusal 192 @ snapkv 96: FAIL, by the judge PASS." in banner
    assert "Human labels decide 1 of 3 gated cells." in banner
    body = json.loads((run / "report" / "drift.json").read_text())["verdict"]
    found = [d for d in body["decisions"] if d["estimand"] == "alike" and d["policy"] != "none"]
    assert [(d["status"], d["judged"], d["adjusted_by"]) for d in found] == [("FAIL", "PASS", "Holm")]


def test_judge_labels_alone_pass_no_cell_of_answers_that_the_judge_may_tell_apart(read_back):
    run, _, done = read_back
    assert (done.exit_code, command("gate", run).exit_code) == (4, 4)
    assert "JUDGE_DIFF" in done.output
    verdict = decide_run(load_run(run)).verdict
    found = {(d.estimand, d.policy == "none"): d for d in verdict.decisions if d.gated}
    assert found["deployed", False].reasons[0].code == "JUDGE_DIFF"
    assert found["deployed", False].status is Status.INCONCLUSIVE
    assert found["alike", True].status is Status.PASS  # another policy: other answers
    assert found["alike", False].judged is Status.PASS  # people decide here


def test_an_even_judge_may_pass_the_cells_that_nobody_labelled(held, tmp_path):
    run, _ = copied(held, tmp_path)
    chosen_cell = ("--select", "estimand=alike", "--select", "policy=snapkv:budget=96", "--concordant", 10**6)
    command("grade", "adjudicate", run, "--out", tmp_path / "all.csv", *chosen_cell)
    label(tmp_path / "all.csv")
    assert command("grade", "adjudicate", run, "--read", tmp_path / "all.csv").exit_code == 0
    report = decide_run(load_run(run))
    (cell,) = labelled_cells(report)
    assert judge_may_pass(cell.people, cell.margin)
    assert report.verdict.status is Status.PASS


def test_labels_leave_every_other_cell_as_it_was(held, read_back):
    before, after = (decide_run(load_run(run)).verdict for run in (held[0], read_back[0]))
    others = [(d, e) for d, e in zip(before.decisions, after.decisions, strict=True) if not e.judged]
    assert len(others) == 2
    assert all((d.effect, d.pvalue_drop, d.adjusted_by) == (e.effect, e.pvalue_drop, e.adjusted_by) for d, e in others)


def test_another_sheet_adds_its_cells_and_keeps_the_others(read_twice):
    found = [cell.decision for cell in labelled(read_twice[0])]
    assert {(c.estimand, c.policy == "none") for c in found} == {("alike", False), ("alike", True)}


def test_stored_labels_that_were_edited_are_refused(read_back, tmp_path):
    run, _ = copied(read_back[:2], tmp_path)
    stored = run / "report" / LABELS_FILE
    text = stored.read_text()
    assert "PASS" not in text, "nothing that follows from the labels is stored"
    stored.write_text(text.replace('": 0', '": 1'))
    for name in ("gate", "report"):
        done = command(name, run)
        assert done.exit_code == 2
        assert "it was changed after it was written" in done.output


def test_stored_labels_that_were_edited_and_hashed_again_are_refused(read_back, tmp_path):
    run, sheet = copied(read_back[:2], tmp_path)
    path = run / "report" / LABELS_FILE
    (cell,) = load_labels(run).cells
    first, written = path.read_text(), command("gate", run)
    flipped = replace(cell, labels=dict.fromkeys(cell.labels, 1))
    path.write_text(render_labels(replace(load_labels(run), cells=(flipped,))))
    for words in (("gate", run), ("report", run), ("grade", "adjudicate", run, "--read", sheet)):
        done = command(*words)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert "adjudication.json' is not what was last read back, it was edited or replaced; delete it" in done.stderr
    note = noted(run, None)
    assert "is not what was last read back" in command("gate", run).stderr, "nobody is known to have labelled"
    noted(run, "2026-01-02T03:04:05+00:00")
    assert "is not what was last read back" in command("gate", run).stderr, "a date alone names no labels"
    noted(run, note)
    path.write_text(first)
    assert command("gate", run).output == written.output
    path.unlink()
    assert command("grade", "adjudicate", run, "--read", sheet).exit_code == written.exit_code


def test_labels_that_were_lost_are_missed_until_every_sheet_is_read_again(read_twice, tmp_path):
    *files, both = read_twice
    run, sheet, more = copied(files, tmp_path)
    (run / "report" / LABELS_FILE).unlink()
    some = command("grade", "adjudicate", run, "--read", sheet)
    assert (some.exit_code, "holds 1 of 2 cells that people labelled; read the sheets" in some.stderr) == (2, True)
    assert command("gate", run).exit_code == 2
    assert command("grade", "adjudicate", run, "--read", more).exit_code == both != 2


def test_stored_labels_of_other_answers_are_refused(read_back, tmp_path):
    run, _ = copied(read_back[:2], tmp_path)
    stored = load_labels(run)
    (cell,) = stored.cells
    short = dict(list(cell.labels.items())[1:])
    for labels in (short, {**cell.labels, "0" * 64: 1}):
        changed = replace(stored, cells=(replace(cell, labels=labels),))
        (run / "report" / LABELS_FILE).write_text(render_labels(changed))
        noted(run, labels_note(changed, "2026-01-02", None))
        done = command("gate", run)
        assert done.exit_code == 2
        assert "holds labels of other answers than the pairs of naive, refusal" in done.output


def swapped(key):
    for pair in key["cells"][0]["pairs"]:
        pair["candidate_row"], pair["reference_row"] = pair["reference_row"], pair["candidate_row"]


def merged(key):
    for pair in key["cells"][0]["pairs"]:
        pair["candidate_row"] = pair["reference_row"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swapped, "does not match these records"),
        (merged, "does not match these records"),
        (lambda key: key["cells"][0]["pairs"].pop(), "does not match these records"),
        (lambda key: key.update(seed=5), "does not match these records"),
        (lambda key: key.update(seed=10**400), "does not match these records"),
        (lambda key: key.update(concordant=10**40), "does not match these records"),
        (lambda key: key.update(seed=-5), "seed is -5, wanted 0 or more"),
        (lambda key: key.update(concordant=0), "concordant is 0, wanted 1 or more"),
        (lambda key: key.update(cells=[]), "it names no cell, or a cell twice"),
        (lambda key: key.update(cells=key["cells"] * 2), "it names no cell, or a cell twice"),
    ],
)
def test_a_key_that_is_not_that_of_the_records_is_one_line_and_stores_nothing(held, tmp_path, change, said):
    run, sheet = copied(held, tmp_path)
    key = json.loads(key_path(sheet).read_text())
    change(key)
    key_path(sheet).write_text(json.dumps(key))
    done = command("grade", "adjudicate", run, "--read", sheet)
    assert done.exit_code == 2, done.exception
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert not (run / "report" / LABELS_FILE).exists()


def test_error_rates_weigh_a_label_by_the_pairs_it_stands_for(written, sheet):
    """One concordant pair of every template is labelled; all of the candidate's answers are found desired."""
    label(sheet, lambda row: True)
    pairs, key, data = pairs_of(written[0]), read_key(sheet), load_run(written[0])
    drift = drift_and_rules(data, GateOverrides())[0]
    (h,) = match_labels(data, drift, labels_of(data, key, read_labels(sheet, key)))
    alike = {name: np.sum((pairs.clusters == name) & ~pairs.discordant) for name in set(pairs.clusters)}
    weights = np.array([1 if d else alike[c] for c, d in zip(pairs.clusters, pairs.discordant, strict=True)])
    seen = ~np.isnan(h.candidate)
    assert seen.sum() == pairs.discordant.sum() + 60
    wanted = np.average(pairs.candidate[seen], weights=weights[seen])
    found = apply_labels(data, drift, labels_of(data, key, read_labels(sheet, key)))
    (people,) = [c.people for c in found.contrasts if c.people]
    assert people.candidate.sensitivity.estimate == pytest.approx(wanted, abs=1e-12)
    assert people.candidate.sensitivity.trials == pytest.approx(len(pairs.items) / max(alike.values()))
    assert (people.templates, people.unseen) == (60, 0)


def test_labels_of_some_templates_pass_nothing_and_say_how_many_more_it_takes(written, tmp_path):
    run, path = tmp_path / "run", tmp_path / "few.csv"
    shutil.copytree(written[0], run)
    done = command("grade", "adjudicate", run, "--out", path, "--concordant", 59)
    assert "too few for a PASS: 59 concordant pairs of 60 templates; give --concordant 60" in done.output
    label(path, lambda row: True)
    assert command("grade", "adjudicate", run, "--read", path).exit_code == 4
    (decision,) = [d for d in decide_run(load_run(run)).verdict.decisions if d.gated]
    assert [r.code for r in decision.reasons] == ["LABELS"]
    assert decision.reasons[0].text == (
        "in 1 of 60 templates no pair that the judge graded alike has a label: label 1 more, one of each "
        "(kvaudit grade adjudicate --concordant 60 or more)"
    )
    assert decision.effect.lower > -0.05


def test_few_labels_ask_for_labels_and_not_for_templates(written, tmp_path):
    run, path = tmp_path / "run", tmp_path / "few.csv"
    shutil.copytree(written[0], run)
    command("grade", "adjudicate", run, "--out", path, "--concordant", 20)
    label(path, lambda row: True)
    assert command("grade", "adjudicate", run, "--read", path).exit_code == 4
    (decision,) = [d for d in decide_run(load_run(run)).verdict.decisions if d.gated]
    assert [r.code for r in decision.reasons] == ["LABELS", "MARGIN"]
    assert "in 40 of 60 templates" in decision.reasons[0].text
    assert decision.larger is None


def test_a_larger_sheet_keeps_the_labels_of_a_smaller_one(read_back, tmp_path):
    run, sheet = copied(read_back[:2], tmp_path)
    chosen_cell = ("--select", "estimand=alike", "--select", "policy=snapkv:budget=96", "--concordant", 150)
    done = command("grade", "adjudicate", run, "--out", tmp_path / "more.csv", *chosen_cell)
    rows = rows_of(tmp_path / "more.csv")
    given, kept = (
        {(row["conversation"], row["answer"]): row["label"] for row in own} for own in (rows_of(sheet), rows)
    )
    assert f"{len(given)} answers are filled in with labels that this run already has" in done.output
    assert {text: word for text, word in kept.items() if word} == given
    assert 50 <= len(rows) - len(given) <= 100


def test_two_concordant_pairs_of_every_template_are_drawn_unless_told(written, tmp_path):
    done = command("grade", "adjudicate", written[0], "--out", tmp_path / "s.csv")
    assert "too few" not in done.output
    assert read_key(tmp_path / "s.csv").concordant == 120
    pairs = pairs_of(written[0])
    assert default_concordant([replace(pairs, clusters=pairs.clusters[:4].repeat(90))]) == 100


def test_human_labels_carry_the_totals_of_their_templates_and_leave_the_judges_to_the_family(written, tmp_path):
    """Nobody finds a loss: the template rule sees none, and max-T sees those of the judge."""
    run, path = tmp_path / "run", tmp_path / "sheet.csv"
    shutil.copytree(written[0], run)
    shutil.copy(written[1], path)
    shutil.copy(key_path(written[1]), key_path(path))
    data = load_run(run)
    before = drift_and_rules(data, GateOverrides())[0]
    label(path, lambda row: True)
    command("grade", "adjudicate", run, "--read", path)
    (c, judged) = next(
        (c, judged) for c, judged in zip(with_labels(data, before).contrasts, before.contrasts, strict=True) if c.people
    )
    assert not c.sums[0].sums.any()
    assert c.sums[0].counts.sum() == 360
    assert c.judged_sums == judged.sums
    assert c.judged == judged.effect


def test_a_sheet_that_a_spreadsheet_saved_again_reads_the_same(written, sheet):
    label(sheet)
    key = read_key(sheet)
    wanted = read_labels(sheet, key)
    rows = [{name: value.replace("\n", "\r\n") for name, value in row.items()} for row in reversed(rows_of(sheet))]
    save(sheet, [{**row, "remark": "seen"} for row in rows], lineterminator="\n", quoting=csv.QUOTE_MINIMAL)
    sheet.write_bytes(b"\xef\xbb\xbf" + sheet.read_bytes())
    assert read_labels(sheet, key) == wanted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[3].update(label=""), "1 rows without a label"),
        (lambda rows: rows[3].update(label="2"), "1 labels that are not 0 or 1"),
        (lambda rows: rows[3].update(label="yes"), "1 labels that are not 0 or 1"),
        (lambda rows: rows[3].update(row="r99999"), "1 rows that are not in its key (r99999)"),
        (lambda rows: rows[3].update(answer="other"), "1 rows whose text was changed"),
        (lambda rows: rows[3].update(conversation=""), "1 rows whose text was changed"),
        (lambda rows: rows.append(dict(rows[3])), "1 duplicate rows"),
        (lambda rows: rows.pop(3), "1 rows missing"),
        (lambda rows: [row.pop("label") for row in rows], "lacks a column"),
    ],
)
def test_a_sheet_that_cannot_be_read_back_is_one_line_and_changes_nothing(written, sheet, change, said):
    label(sheet)
    stored = written[0] / "report" / LABELS_FILE
    before = stored.read_bytes() if stored.exists() else None
    rows = rows_of(sheet)
    change(rows)
    save(sheet, rows)
    done = command("grade", "adjudicate", written[0], "--read", sheet)
    assert done.exit_code == 2
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert (stored.read_bytes() if stored.exists() else None) == before


def test_a_missing_or_foreign_key_is_one_line(written, sheet):
    for text in (None, "{}", "[]", "not json", '{"format": 1}'):
        key_path(sheet).unlink(missing_ok=True)
        if text is not None:
            key_path(sheet).write_text(text)
        done = command("grade", "adjudicate", written[0], "--read", sheet)
        assert done.exit_code == 2
        assert len(done.output.strip().splitlines()) == 1


def test_labels_of_other_records_are_refused(sheet, held):
    label(sheet)
    done = command("grade", "adjudicate", held[0], "--read", sheet)
    assert done.exit_code == 2
    assert "holds other records than" in done.output


def test_a_sheet_is_never_written_over(written):
    done = command("grade", "adjudicate", written[0], "--out", written[1])
    assert done.exit_code == 2
    assert "may hold labels" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--select", "suite=mth"], "unknown suite among the gated cells 'mth'"),
        (["--select", "colour=red"], "unknown selector 'colour'"),
        (["--select", "suite"], "wanted KEY=VALUE"),
    ],
)
def test_a_selection_without_cells_is_one_line(written, tmp_path, words, said):
    done = command("grade", "adjudicate", written[0], "--out", tmp_path / "s.csv", *words)
    assert done.exit_code == 2
    assert said in done.output


def test_an_arm_with_the_former_name_of_a_difference_can_be_selected():
    contrasts = [Contrast("alike", "E1", "none", "math", 192)]
    assert _select(contrasts, "arm", "E1") == contrasts
    assert _select(contrasts, "estimand", "E1") == contrasts


def test_the_digest_follows_scores_and_not_the_order_of_rows(written):
    records = load_run(written[0]).records
    mixed = records.sample(frac=1, random_state=1)
    assert records_digest(mixed) == records_digest(records)
    changed = records.copy()
    changed.loc[0, "score"] = 1 - changed.loc[0, "score"]
    assert records_digest(changed) != records_digest(records)


@pytest.mark.parametrize(
    "text",
    ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", " =1", "\r=1", '=HYPERLINK("x")', "|x", "%x", "\uff1d1+1", " \uff20A1"],
)
def test_no_cell_starts_like_a_formula(text):
    assert spreadsheet_safe(text)[0] not in "=+-@\t\r|% \uff1d"
    assert spreadsheet_safe(text).startswith(("'", "␉", "␍"))


def test_control_characters_are_shown():
    assert spreadsheet_safe("a\x1b[31mb\x00") == "a␛[31mb␀"


def test_a_row_shows_the_last_answer_apart_and_cuts_what_no_spreadsheet_holds():
    talk = (
        Message(Role.SYSTEM, "Rule."),
        Message(Role.ASSISTANT, "First."),
        Message(Role.USER, "Q" * 40_000),
        Message(Role.ASSISTANT, "Last."),
        Message(Role.TOOL, "ok"),
    )
    row = shown_answer("agent", talk)
    assert row.answer == "Last.\n\n[tool] ok"
    assert row.conversation.startswith("[system] Rule.\n\n[assistant] First.\n\n[user] Q")
    assert len(row.conversation) < CHARACTERS + 60
    assert shown_answer("x", talk[:1]) == ShownAnswer("x", "[system] Rule.", "")


@settings(max_examples=15, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_comes_back_from_the_sheet_unchanged(tmp_path_factory, conversation, answer):
    row = ShownAnswer("s", conversation, answer)
    path = tmp_path_factory.mktemp("s") / "sheet.csv"
    path.write_text(render_sheet({"r1": row}), encoding="utf-8", newline="")
    key = SheetKey("run", "d", 0, 1, {"r1": text_hash(row)}, ())
    with pytest.raises(DataError, match="rows without a label"):
        read_labels(path, key)
    rows = rows_of(path)
    rows[0]["label"] = "1"
    save(path, rows)
    assert read_labels(path, key) == {"r1": 1}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEY = SheetKey(
    "run", "d", 0, 1, {"r1": "h"}, (SheetCell("alike", "a", "none", "s", 8, (SheetPair("i", 0, 1, 1, "r1", "r1"),)),)
)


def test_a_key_reads_back_as_it_was_written(tmp_path):
    path = tmp_path / "s.csv"
    key_path(path).write_text(render_key(KEY))
    assert read_key(path) == KEY


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["run", "records", "seed", "rows", "cells", "format", "extra"]), JSON, st.booleans())
def test_a_broken_key_or_store_never_raises_anything_but_an_audit_error(tmp_path_factory, field, value, deep):
    folder = tmp_path_factory.mktemp("k")
    body = json.loads(render_key(KEY))
    (body["cells"][0] if deep else body)[field] = value
    key_path(folder / "s.csv").write_text(json.dumps(body))
    (folder / "report").mkdir()
    (folder / "report" / LABELS_FILE).write_text(json.dumps(body))
    for read in (lambda: read_key(folder / "s.csv"), lambda: load_labels(folder)):
        try:
            read()
        except AuditError:
            continue


def test_a_run_without_labels_has_no_panel(tmp_path):
    assert load_labels(tmp_path) is None


def test_the_panel_prints_both_drifts_and_the_judges_rates(written, sheet):
    label(sheet)
    command("grade", "adjudicate", written[0], "--read", sheet)
    found = decide_run(load_run(written[0]))
    (row,) = labelled_cells_table(labelled_cells(found)).rows
    assert row[0] == "alike, naive @ none, refusal 192"
    assert row[2] == "FAIL"
    assert len(errors_table(labelled_cells(found)).rows) == 2
    assert "100.0 % [" in errors_table(labelled_cells(found)).rows[0][2]
