"""Remedies: what they may be, what is served again, what is called a remedy and what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_text import page_text
from reports_synthetic import Design, build, policy, policy_hash, records_of, write_unit
from rich.console import Console
from test_cli import refused

from bench.remedies import at_the_margin, doing_nothing, found
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.policies.remedy import check_remedies, parse_remedy, remedied
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.runs.remedy import AskedByVerdict, serve_remedies
from kvaudit.core.errors import AuditError, DataError, SpecError
from kvaudit.core.spec import dump_spec, parse_spec
from kvaudit.reports.analysis.remedies import remedies_of
from kvaudit.reports.page.formats import card, drift, markdown, summary
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decided, with_details
from kvaudit.reports.sections.remedies import RemediesSection

SNAPKV = "snapkv:budget=64,window=8"
FAILS, GENTLE, DEAR, IDLE = (policy("snapkv", budget) for budget in (48, 96, 144, 50))


@pytest.mark.parametrize(
    ("written", "text", "served"),
    [
        ("pin=system", "pin=system", f"{SNAPKV},pin=system"),
        (
            {"pin": ["tool", "system"], "budget": 96},
            "pin=tool/system,budget=96",
            "snapkv:budget=96,window=8,pin=system/tool",
        ),
        ("window = 16", "window=16", "snapkv:budget=64,window=16"),
        ("int8", "int8:residual=0,chunk=1024", "int8"),
    ],
)
def test_a_remedy_changes_the_policy_that_fails_or_stands_in_its_place(written: object, text: str, served: str) -> None:
    remedy = parse_remedy(written)
    assert remedy.text == text
    assert remedied(remedy, parse_policy(SNAPKV)) == parse_policy(served)


def test_a_change_of_a_composition_is_its_evictors_or_its_quantisers() -> None:
    composed = parse_policy(f"{SNAPKV}+kivi:bits=2")
    assert remedied(parse_remedy("budget=96"), composed) == parse_policy("snapkv:budget=96,window=8+kivi:bits=2")
    assert remedied(parse_remedy("bits=4"), composed) == parse_policy(f"{SNAPKV}+kivi:bits=4")


@pytest.mark.parametrize(
    ("remedy", "gated", "words"),
    [
        ("pin=system", "kivi:bits=2", "has no field pin"),
        ("pin=system", "none", "no gated policy of our own cache compresses"),
        ("pin=wolf", SNAPKV, "unknown role"),
        ("kivi:bits=4,pin=system", SNAPKV, "unknown field of policy kivi 'pin'"),
        ("none:pin=system", SNAPKV, "unknown field of policy none 'pin'"),
        ("none", SNAPKV, "compresses nothing"),
        ("budget=64", SNAPKV, "is so already"),
        (SNAPKV, SNAPKV, "is a gated policy itself"),
        ("budget=6", SNAPKV, "below sink + window"),
        ("pin=", SNAPKV, "is not field=value"),
        ("budget=9,budget=8", SNAPKV, "given twice"),
        ("pin=system", f"{SNAPKV}|none", "is a mixture"),
    ],
)
def test_a_remedy_without_a_hold_is_one_line(remedy: str, gated: str, words: str) -> None:
    with pytest.raises(AuditError) as error:
        check_remedies([parse_remedy(remedy).text], [parse_policy(gated).canonical])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


SPEC = """
name: again
model: {model}
evaluate:
  policies: [none, "streaming:budget=64,sink=4,window=8"]
  suites: {{math: {{items: 2, max_new_tokens: 4}}}}
  context_tokens: [900]
  temperature: 1.0
"""


def test_a_spec_without_remedies_keeps_its_hash_and_one_with_them_reads_back() -> None:
    text = SPEC.format(model="tiny")
    plain, more = parse_spec(text, "spec", NAMES), parse_spec(text + "remedies: [{pin: system}, int8]", "spec", NAMES)
    assert "remedies" not in plain.written()
    assert more.remedies == ("pin=system", "int8:residual=0,chunk=1024")
    assert more.sha256 != plain.sha256
    assert parse_spec(dump_spec(more), "again") == parse_spec(dump_spec(more), "again", NAMES) == more


def test_what_fails_is_served_again_once_with_the_same_items_and_seeds(tmp_path: Path, tiny_folder: Path) -> None:
    spec = parse_spec(SPEC.format(model=tiny_folder) + 'remedies: ["window=60"]', "spec", NAMES)
    run = open_run(tmp_path / "run", spec, resume=False)
    asked = AskedByVerdict([("base", spec.gate.primary[0])], spec.gate.primary, [900])

    def work(*added: str) -> dict[str, bytes]:
        pipeline = Pipeline(run, Console(quiet=True), 1)
        pipeline.evaluate()
        serve_remedies(pipeline, run, asked, added)
        return {path.name: path.read_bytes() for path in (run.path / "remedies").iterdir() if path.suffix == ".jsonl"}

    first = work()
    more = work("int8")
    assert len(first) == 1
    assert len(more) == 2
    assert first.items() <= more.items()  # nothing is asked twice
    tried = json.loads((run.path / "remedies" / "tried.json").read_text())["tried"]
    assert [(one["remedy"], one["declared"]) for one in tried] == [
        ("window=60", "with the run"),
        ("int8:residual=0,chunk=1024", "after the run"),
    ]
    data = load_run(run.path)
    key = ["item_id", "sample_index"]
    asked_first = data.records[data.records["policy"] == "none"][key].astype(str).to_numpy().tolist()
    for _, part in data.remedies.records.groupby("policy", observed=True):
        assert part[key].astype(str).to_numpy().tolist() == asked_first


def made(folder: Path, tried: list[tuple[str, str]], serving: dict[str, float], **more: object) -> Path:
    """A run whose gated policy fails, with remedies served beside it: each a name and a policy."""
    design = Design(
        **{"train": False, "arms": ("base",), "suites": ("refusal",), "clusters": 80, "items": 240, **more},
        policies=("none", FAILS),
        primary=(FAILS,),
        serving={FAILS: 0.4, **serving},
    )
    run = build(folder / "run", design)
    (run / "remedies").mkdir()
    others = Design(**{**vars(design), "policies": ("none", *(p for _, p in tried)), "primary": ()})
    for unit, rows in records_of(others):
        if rows[0].policy != "none":
            write_unit(run / "remedies" / f"{unit}.jsonl", "".join(row.to_json() + "\n" for row in rows))
    rows = [{"remedy": name, "declared": "with the run", "instead": {FAILS: p}} for name, p in tried]
    write_tried(run, rows)
    return run


def write_tried(run: Path, rows: list[dict[str, object]]) -> None:
    body = {"format": "kvaudit.remedies", "version": 1, "tried": rows}
    (run / "remedies" / "tried.json").write_text(json.dumps(body))


def told(run: Path) -> list[str]:
    """What the banner says of remedies."""
    data = load_run(run)
    found = decided(data)
    remedies = remedies_of(data, found.drift, found.rules, found.verdict)
    return list(RemediesSection().remarks(remedies, found)) if remedies else []


def test_the_cheapest_remedy_that_is_held_stands_in_every_banner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvaudit.reports.run.shipped_rates", lambda: None)
    run = made(tmp_path, [("budget=144", DEAR), ("budget=96", GENTLE), ("budget=50", IDLE)], {IDLE: 0.4})
    data = load_run(run)
    page = page_of(with_details(data, decided(data)))
    line = "the cheapest policy that passes is snapkv 48 with budget=96"
    assert line in page_text(page)
    for form in (markdown, card, summary):
        assert "Instead of snapkv 48, for base: snapkv 48 with budget=96 passes." in form.render(page)
    assert "2 of 3 tried in order hold" in page.remarks[0]
    [mended] = json.loads(drift.render(page))["remedies"]["mended"]
    assert [one["status"] for one in mended["remedies"]][2] == "FAIL"
    assert mended["chosen"] == 1


def test_what_is_tested_behind_a_remedy_that_is_none_is_not_held(tmp_path: Path) -> None:
    run = made(tmp_path, [("budget=50", IDLE), ("budget=96", GENTLE)], {IDLE: 0.4})
    [line] = told(run)
    assert "none of 2 tried in order passes, though snapkv 48 with budget=96 would alone" in line


def test_a_remedy_that_passes_and_wins_nothing_back_is_none(tmp_path: Path) -> None:
    """An unlucky draw may fail within the margin: the gate alone would call the next one a remedy."""
    run = made(tmp_path, [("budget=96", GENTLE)], {})
    data = load_run(run)
    found = decided(data)
    [mended] = remedies_of(data, found.drift, found.rules, found.verdict).mended
    remedy = mended.remedies[0]
    assert remedy.mends
    nothing = replace(remedy.won[0], effect=replace(remedy.won[0].effect, lower=0.0))
    assert not replace(remedy, won=(nothing,)).mends


def test_an_arm_that_does_not_pass_uncompressed_is_named_and_tried_on_nothing(tmp_path: Path) -> None:
    arms, drops = ("dense", "naive"), {("naive", "refusal"): 0.3}
    run = made(tmp_path, [("budget=96", GENTLE)], {}, train=True, arms=arms, seeds=(11,), drops=drops)
    mended, lost = told(run)
    assert "dense under snapkv 48 fails as deployed" in mended
    assert "none is tried on naive (refusal -" in lost


def test_a_remedy_that_was_not_served_yet_holds_nothing_behind_it(tmp_path: Path) -> None:
    run = made(tmp_path, [("budget=144", DEAR), ("budget=96", GENTLE)], {})
    for path in (run / "remedies").glob(f"*{policy_hash(DEAR)}*.done.json"):
        path.unlink()
    assert "none of 2 tried in order passes" in told(run)[0]


@pytest.mark.parametrize(
    "rows",
    [[{"remedy": 5, "declared": "with the run", "instead": {}}], [{"remedy": "x"}], 7, [["pin=system"]]],
)
def test_a_family_that_no_run_writes_is_refused_and_stops_no_report(tmp_path: Path, rows: list) -> None:
    run = made(tmp_path, [("budget=96", GENTLE)], {}, items=80)
    write_tried(run, rows)
    with pytest.raises(DataError, match="delete the folder"):
        _ = load_run(run).remedies


def test_remedies_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    run = made(tmp_path, [("budget=96", GENTLE)], {}, items=80)
    [unit] = (run / "remedies").glob("*.jsonl")
    rows = [json.loads(line) | {"checkpoint": "0" * 64} for line in unit.read_text().splitlines()]
    write_unit(unit, "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="another checkpoint"):
        _ = load_run(run).remedies


def test_a_line_of_a_remedy_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = made(tmp_path, [("budget=96", GENTLE)], {}, items=80)
    [unit] = (run / "remedies").glob("*.jsonl")
    write_unit(unit, unit.read_text() + "no record\n")
    data = load_run(run)
    [problem] = with_details(data, decided(data)).problems
    assert problem.startswith(f"remedies/{unit.name}:81: record is not JSON")


GONE = """
name: gone
model: embedded
train: {arms: [dense], seeds: [1], suites: [refusal], policy: "streaming:budget=96"}
evaluate: {policies: [none, "streaming:budget=96"], suites: {refusal: {items: 3}}, context_tokens: [192]}
"""


def test_bad_remedies_and_lost_checkpoints_are_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", parse_spec(GONE, "spec", NAMES), resume=False)
    assert "names no remedies" in refused("replay", "remedy", run.path)
    assert "is not field=value" in refused("replay", "remedy", run.path, "--policy", "pin=")
    assert "unknown field" in refused("replay", "remedy", run.path, "--policy", "int8:pin=system")
    [failing] = [policy for policy in run.spec.evaluate.policies if policy != "none"]
    pipeline = Pipeline(run, Console(quiet=True), 1)
    with pytest.raises(DataError, match="is missing or unfinished"):
        serve_remedies(pipeline, run, AskedByVerdict([("dense", failing)], [failing], [192]), ["budget=128"])
    with pytest.raises(SpecError, match="has no field kernel"):
        serve_remedies(pipeline, run, AskedByVerdict([("dense", failing)], [failing], [192]), ["kernel=3"])
    assert not (run.path / "remedies").exists()


def test_what_is_no_remedy_is_called_one_at_the_level_however_many_are_tried() -> None:
    """The cheapest of all that pass is a lucky one; ``python -m bench.remedies`` has the figures of more audits."""
    rng = np.random.default_rng(5)
    margin = [at_the_margin(kind, 6, 300, rng) for kind in ("spread", "broken")]
    nothing = doing_nothing(-0.03, 6, 300, rng)
    assert min(rates.all_that_pass for rates in (*margin, nothing)) > 0.1
    assert max(rates.in_order for rates in (*margin, nothing)) < 0.08


def test_in_order_finds_what_holm_cannot_with_72_templates() -> None:
    power = found((True, True, False), 100, np.random.default_rng(6))
    assert power.holm == 0.0
    assert power.in_order > 0.8
