"""What a run discloses: every fact, in every format, held to the published schemas; and cards held to their runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import date
from importlib import resources
from pathlib import Path

import cyclonedx.schema._res as cyclonedx_schemas
import jsonschema
import junitparser
import pytest
import sarif_pydantic
import yaml
from huggingface_hub import parse_eval_result_entries
from referencing import Registry, Resource
from report_text import run_text
from reports_synthetic import Design, build, policy
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.scan.questionnaire import blank_answers
from kvaudit.audit.training.config import TrainConfig
from kvaudit.core.errors import DataError
from kvaudit.reports.page.disclosure import disclosure_of
from kvaudit.reports.page.formats.ci import render_junit
from kvaudit.reports.page.formats.disclosure import render_bom
from kvaudit.reports.page.publish import BEGIN, END, extract_section, insert_section
from kvaudit.reports.records.load import RunData, load_run
from kvaudit.reports.run import disclosure_page, write_report
from kvaudit.reports.sections.shared.words import NOT_APPLICABLE, UNKNOWN, Fact
from kvaudit.reports.verdict.rules import GateOverrides
from kvaudit.reports.verdict.verdict import Status, read_waivers

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "disclosure.schema.json").read_text())
SNAPKV = policy("snapkv", 96)
DESIGN = Design(
    arms=("dense", "naive", "smd"),
    policies=("none", SNAPKV),
    suites=("refusal", "math"),
    clusters=72,
    items=144,
    seeds=(11,),
    drops={("naive", "refusal"): 0.3},
    telemetry=4,
    facets={"refusal": ("unsafe", "helpful")},
)
RECIPES = {
    "dense": {"rollouts": "none", "rollouts_hash": "30471b7f240f", "learner": "dense", "correction": "none"},
    "naive": {"rollouts": SNAPKV, "rollouts_hash": "a" * 12, "learner": "dense", "correction": "none"},
    "smd": {"rollouts": SNAPKV, "rollouts_hash": "a" * 12, "learner": "shadow", "correction": "none"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoints say how they were trained, with its report written."""
    run = build(tmp_path_factory.mktemp("disclosed") / "run", DESIGN)
    for arm, recipe in RECIPES.items():
        for seed in DESIGN.seeds:
            folder = run / "checkpoints" / arm / f"seed-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            story = {
                "config": {"loss": "grpo", "suites": ["refusal"], "ledger_every": 2, "steps": 4},
                "recipe": {**recipe, "distillation": False, "reward": "grade"},
                "ledgers": {},
                "files": {},
                "sha256": f"{seed:064x}",
            }
            (folder / "provenance.json").write_text(json.dumps(story))
    write_report(run)
    return run


@pytest.fixture(scope="module")
def told(run: Path) -> dict:
    return json.loads((run / "report" / "disclosure.json").read_text())


def invoke(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def recipe_of(told: dict, arm: str) -> dict:
    return next(recipe for recipe in told["recipes"] if recipe["arm"] == arm)


def test_the_disclosure_keeps_to_its_schema(told: dict) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(told)


def test_a_recipe_says_how_its_rollouts_were_compressed(told: dict) -> None:
    naive, dense = recipe_of(told, "naive"), recipe_of(told, "dense")
    assert (naive["role"], dense["role"]) == ("candidate", "reference")
    assert naive["facts"]["rollouts"] == {"state": "known", "value": SNAPKV}
    assert naive["facts"]["constitution"] == {"state": "not applicable"}
    assert naive["mask_schedule"]["share_of_steps_logged"] == {"state": "known", "value": 0.5}
    assert dense["mask_schedule"]["share_of_steps_logged"] == {"state": "not applicable"}


def test_what_nobody_wrote_down_is_unknown_and_not_left_out(told: dict) -> None:
    assert told["not_evaluated"]["mechanisms"] == {"state": "unknown"}
    assert told["model"]["base_sha256"]["state"] in ("known", "unknown")


def test_every_gated_cell_stands_with_its_interval_margin_and_verdict(told: dict, run: Path) -> None:
    cells = [row for row in told["drift"] if row["verdict"] != "not gated"]
    decided = json.loads((run / "report" / "drift.json").read_text())["verdict"]["decisions"]
    assert len(cells) == sum(d["gated"] for d in decided) == 12
    failed = [row for row in cells if row["verdict"] == "FAIL"]
    assert {(row["arm"], row["metric"]) for row in failed} == {("naive", "refusal")}
    assert all(row["low"] < row["estimate"] < row["high"] for row in cells)


def test_facets_that_nobody_gated_are_disclosed_too(told: dict) -> None:
    assert {"refusal.unsafe", "refusal.helpful"} <= {row["metric"] for row in told["drift"]}


def test_a_rollout_policy_that_was_not_served_is_not_evaluated(run: Path) -> None:
    data = load_run(run)
    for story in data.checkpoints.values():
        if story["recipe"]["rollouts"] != "none":
            story["recipe"]["rollouts"] = "h2o:budget=8"
    left = disclosure_of(disclosure_page(data)).not_evaluated["rollout_policies"]
    assert left == Fact("known", ["h2o:budget=8"])


def left_out(data: RunData, declared: dict[str, str]) -> object:
    """The rollout policies that a run did not serve, where its arms are declared and say nothing themselves."""
    told = {arm: {"rollouts": text} for arm, text in declared.items()}
    data = replace(data, checkpoints={}, provenance={**data.provenance, "declared": told})
    return disclosure_of(disclosure_page(data)).not_evaluated["rollout_policies"]


def test_a_declared_rollout_policy_that_was_not_served_is_not_evaluated_either(run: Path) -> None:
    data, every = load_run(run), {"dense": "none", "naive": SNAPKV, "smd": "none"}
    assert left_out(data, {**every, "smd": "fp8 in the engine"}) == Fact("known", ["fp8 in the engine"])
    assert left_out(data, every) == NOT_APPLICABLE
    assert left_out(data, {**every, "smd": "unknown"}) == UNKNOWN
    assert left_out(data, {}) == UNKNOWN


def test_a_checkpoint_that_claims_no_steps_says_nothing_of_its_schedule(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints" / "naive").glob("*/provenance.json"):
        story = json.loads(path.read_text())
        path.write_text(json.dumps({**story, "config": {**story["config"], "steps": 0, "ledger_every": 1}}))
    write_report(copy)
    told = json.loads((copy / "report" / "disclosure.json").read_text())
    assert recipe_of(told, "naive")["mask_schedule"]["share_of_steps_logged"] == {"state": "unknown"}


def test_a_scan_and_a_vendors_answers_in_the_folder_are_disclosed_as_declared(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (tmp_path / "serve.sh").write_text("vllm serve some/model --kv-cache-dtype fp8\n")
    assert invoke("scan", tmp_path / "serve.sh", "--json", copy / "scan.json")[0] == 3
    (copy / "answers.json").write_text(json.dumps(blank_answers() | {"vendor": "Ada <b>"}))
    code, card = invoke("card", copy)
    assert code == 0
    assert "fp8" in card
    assert "Ada <b>" not in card
    assert "rollout.eviction: unknown" in card.replace("\\", "")


@pytest.mark.parametrize(
    "text",
    ['{"format": "kvaudit.scan", "version": 2, "found": []}', '{"format": "kvaudit.scan", "version": 1, "found": {}}'],
)
def test_evidence_of_another_kind_does_not_pass_for_none(run: Path, tmp_path: Path, text: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "scan.json").write_text(text)
    code, output = invoke("card", copy)
    assert code == 2
    assert "not of format kvaudit.scan version 1" in " ".join(output.split())


def test_a_checkpoint_says_how_its_rollouts_were_sampled() -> None:
    config = TrainConfig(arm="sparse-rl", seed=1, policy="snapkv:budget=96", suites=("refusal",))
    said = config.recipe_summary()
    assert (said["correction"], said["learner"], said["distillation"]) == ("sparse-rl", "dense", False)
    assert said["rollouts"].startswith("snapkv:budget=96")
    dense = TrainConfig(arm="dense", seed=1, policy="snapkv:budget=96", suites=("refusal",))
    assert dense.recipe_summary()["rollouts"] == "none"


# --- published schemas ---------------------------------------------------------------------------------------------


def test_the_bill_of_materials_is_cyclonedx(run: Path) -> None:
    folder = resources.files(cyclonedx_schemas)
    stored = {
        "http://cyclonedx.org/schema/spdx.schema.json": "spdx.SNAPSHOT.schema.json",
        "http://cyclonedx.org/schema/jsf-0.82.schema.json": "jsf-0.82.SNAPSHOT.schema.json",
        "http://cyclonedx.org/schema/bom-1.6.schema.json": "bom-1.6.SNAPSHOT.schema.json",
    }
    texts = {uri: json.loads((folder / name).read_text()) for uri, name in stored.items()}
    registry = Registry().with_resources((uri, Resource.from_contents(text)) for uri, text in texts.items())
    bom = json.loads((run / "report" / "bom.json").read_text())
    schema = texts["http://cyclonedx.org/schema/bom-1.6.schema.json"]
    jsonschema.Draft7Validator(schema, registry=registry).validate(bom)
    metrics = [
        metric
        for component in bom["components"]
        for metric in component["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    ]
    assert len(metrics) == 12
    assert all(set(m["confidenceInterval"]) == {"lowerBound", "upperBound"} for m in metrics)


def test_a_gated_cell_without_a_number_stands_in_the_bill_of_materials_all_the_same(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for path in [*(copy / "records").glob("naive*.jsonl"), *(copy / "records").glob("naive*.done.json")]:
        path.unlink()
    write_report(copy)
    bom = json.loads((copy / "report" / "bom.json").read_text())
    (naive,) = (each for each in bom["components"] if each["name"] == "naive")
    silent = [row["value"] for row in naive["properties"] if row["name"] == "kvaudit:no_number"]
    assert len(silent) == 6
    assert all("INVALID" in line for line in silent)
    names = {row["name"] for row in bom["metadata"]["properties"]}
    assert {"kvaudit:not_evaluated:rollout_policies", "kvaudit:reference:weights_sha256"} <= names


def test_what_does_not_pass_is_a_sarif_result(run: Path) -> None:
    text = (run / "report" / "gate.sarif").read_text()
    results = sarif_pydantic.Sarif.model_validate_json(text).runs[0].results
    assert results[0].rule_id == "KVAUDIT-VERDICT"
    assert sum(result.rule_id == "KVAUDIT-FAIL" for result in results) == 3


def test_gated_cells_are_test_cases(run: Path) -> None:
    (suite,) = junitparser.JUnitXml.fromfile(str(run / "report" / "junit.xml"))
    assert (suite.tests, suite.failures, suite.errors) == (13, 4, 6)
    failed = {case.name for case in suite if not case.is_passed}
    assert "verdict" in failed
    assert "alike naive @ none, refusal at 192 tokens" in failed


def test_a_test_case_follows_the_exit_code_of_the_gate(run: Path) -> None:
    text = render_junit(disclosure_page(load_run(run), GateOverrides(on_inconclusive="warn")))
    suite = junitparser.TestSuite.fromstring(text.encode())
    assert (suite.failures, suite.errors, suite.skipped) == (4, 0, 6)
    assert sum(case.is_skipped for case in suite) == 6


def test_another_waiver_is_another_bill_of_materials(run: Path, tmp_path: Path) -> None:
    data = load_run(run)

    def serial(who: str | None) -> str:
        path = tmp_path / "waivers.yaml"
        row = {"who": who, "why": "known", "expires": str(date.today()), "status": "FAIL", "cells": {"arm": "naive"}}
        path.write_text(yaml.safe_dump({"waivers": [row]}))
        asked = GateOverrides(waivers=read_waivers(path) if who else None)
        return json.loads(render_bom(disclosure_page(data, asked)))["serialNumber"]

    ada = serial("Ada")
    assert len({serial(None), ada, serial("Grace")}) == 3
    assert serial("Ada") == ada


# --- cards ---------------------------------------------------------------------------------------------------------


def test_the_hub_reads_the_results_of_an_arm(run: Path, tmp_path: Path) -> None:
    code, output = invoke("card", run, "--hub", tmp_path, "--benchmark", "us/cache-drift", "--arm", "naive")
    assert code == 0, output
    files = sorted((tmp_path / ".eval_results").iterdir())
    assert len(files) == 3  # two policies, served alike; one as deployed
    entries = [entry for path in files for entry in parse_eval_result_entries(yaml.safe_load(path.read_text()))]
    told = json.loads((run / "report" / "disclosure.json").read_text())["drift"]
    gated = [row for row in told if row["arm"] == "naive" and row["verdict"] != "not gated"]
    wanted = sorted(100 * row["estimate"] for row in gated)
    assert sorted(entry.value for entry in entries) == pytest.approx(wanted, abs=1e-4)
    assert {entry.dataset_id for entry in entries} == {"us/cache-drift"}
    assert {entry.task_id for entry in entries} >= {"alike-refusal-192", "deployed-math-192"}
    assert all(entry.notes.startswith(("FAIL: ", "INCONCLUSIVE: ", "PASS")) for entry in entries)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arm", "naive"), "--hub needs --benchmark"),
        (("--benchmark", "us/x"), "if there are several arms, --arm"),
        (("--benchmark", "../x", "--arm", "naive"), "is not a dataset of the hub"),
        (("--benchmark", "us/x", "--arm", "dense"), "no gated cell of arm 'dense' has a number"),
    ],
)
def test_hub_results_without_an_arm_or_a_benchmark_are_one_line(
    run: Path, tmp_path: Path, words: tuple, message: str
) -> None:
    code, output = invoke("card", run, "--hub", tmp_path, *words)
    assert code == 2
    assert message in output


def test_a_card_is_put_in_twice_and_stands_once(run: Path, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# My model\n\nText before.\n")
    assert invoke("card", run, "--into", card)[0] == 0
    once = card.read_text()
    assert invoke("card", run, "--into", card)[0] == 0
    assert card.read_text() == once
    assert once.startswith("# My model\n\nText before.\n")
    assert once.count("## KV-cache compression") == 1


def test_the_card_of_a_run_is_that_of_its_report(run: Path) -> None:
    code, printed = invoke("card", run)
    assert code == 0
    assert printed == (run / "report" / "card.md").read_text()
    assert "declared about the stack" not in printed


@pytest.fixture(scope="module")
def section(run: Path) -> str:
    """The section that the run puts into a card."""
    return insert_section("", (run / "report" / "card.md").read_text(), "card")


def test_a_card_that_says_other_than_its_run_exits_with_3(run: Path, tmp_path: Path, section: str) -> None:
    card = tmp_path / "README.md"
    card.write_text(section)
    assert invoke("card", run, "--check", card)[0] == 0
    card.write_text(section.replace("**FAIL**", "**PASS**"))
    code, output = invoke("card", run, "--check", card)
    assert code == 3
    assert "the run: **FAIL**" in " ".join(output.split())


@pytest.mark.parametrize("other", ["\r", "\u2028"])
def test_a_card_whose_lines_are_run_together_says_other_than_its_run(
    run: Path, tmp_path: Path, section: str, other: str
) -> None:
    card = tmp_path / "README.md"
    card.write_bytes(section.replace("\n|", f"{other}|").encode())
    assert invoke("card", run, "--check", card)[0] == 3


def test_nothing_is_written_where_one_of_two_outputs_cannot_be(run: Path, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text(BEGIN + "\nhalf")
    hub = ("--hub", tmp_path / "hub", "--benchmark", "us/x", "--arm", "naive")
    assert invoke("card", run, *hub, "--into", card)[0] == 2
    assert not (tmp_path / "hub").exists()


def test_a_benchmark_without_a_place_for_its_results_is_refused(run: Path) -> None:
    code, output = invoke("card", run, "--benchmark", "us/x")
    assert (code, "--hub" in output) == (2, True)


def test_a_card_says_until_when_a_waiver_holds_whatever_its_signature(run: Path, tmp_path: Path) -> None:
    path, today = tmp_path / "waivers.yaml", str(date.today())
    row = {"who": "Dr. Ada Byron", "why": "known", "expires": today, "status": "FAIL", "cells": {"arm": "naive"}}
    path.write_text(yaml.safe_dump({"waivers": [row]}))
    code, card = invoke("card", run, "--waivers", path)
    assert code == 0
    assert f"WAIVER until {today}" in card


@pytest.mark.parametrize(
    "text", [BEGIN + "\nhalf", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n", f"{BEGIN} on a line{END}"]
)
def test_broken_marks_are_named(text: str) -> None:
    with pytest.raises(DataError, match="marks"):
        insert_section(text, "new\n", "card")


def test_a_card_with_broken_marks_stays(run: Path, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text(BEGIN + "\nhalf")
    code, output = invoke("card", run, "--into", card)
    assert code == 2
    assert "marks" in output
    assert card.read_text() == BEGIN + "\nhalf"


def test_a_card_without_a_disclosure_cannot_be_checked(run: Path, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# My model\n")
    code, output = invoke("card", run, "--check", card)
    assert code == 2
    assert "holds no disclosure" in output


def test_a_card_without_room_for_every_setting_shows_the_worst_and_counts_the_others(tmp_path: Path) -> None:
    bad = policy("snapkv", 89)
    served = ("none", *(policy("snapkv", budget) for budget in range(60, 90)))
    design = Design(
        arms=("base",), seeds=(0,), train=False, policies=served, suites=("refusal",), clusters=20, items=40,
        serving={bad: 0.5},
    )  # fmt: skip
    code, card = invoke("card", build(tmp_path / "run", design))
    assert code == 0
    assert "| serving | snapkv 89 | ✗ " in card
    assert "7 more settings were served; disclosure.json lists all." in card


def test_text_around_the_section_stays() -> None:
    card = insert_section(f"a\n{BEGIN}\nold\n{END}\nb\n", "new\n", "card")
    assert card == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    assert extract_section(card, "card") == "new\n"
    with pytest.raises(DataError, match="holds no disclosure"):
        extract_section("a", "card")


def test_marks_in_a_block_of_code_are_an_example() -> None:
    example = f"```\n{BEGIN}\nshown\n{END}\n```\n"
    card = insert_section(example, "new\n", "card")
    assert card == f"{example}\n{BEGIN}\nnew\n{END}\n"
    assert insert_section(card, "newer\n", "card") == f"{example}\n{BEGIN}\nnewer\n{END}\n"
    assert extract_section(card, "card") == "new\n"


def test_code_on_one_line_begins_no_example() -> None:
    card = "```pip install it```\n{}\n```\nof code\n```\n"
    section = f"{BEGIN}\nold\n{END}\n"
    assert extract_section(card.format(section), "card") == "old\n"
    assert insert_section(card.format(section), "new\n", "card") == card.format(f"{BEGIN}\nnew\n{END}\n")


def test_marks_in_an_indented_example_do_not_count() -> None:
    example = f"1. like this\n\n   ```\n{BEGIN}\n{END}\n   ```\n"
    assert insert_section(example, "new\n", "card") == f"{example}\n{BEGIN}\nnew\n{END}\n"


def test_the_card_of_a_changed_run_is_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    spec = yaml.safe_load((copy / "spec.yaml").read_text())
    spec["gate"]["margins"]["refusal"] = 50
    (copy / "spec.yaml").write_text(yaml.safe_dump(spec))
    code, output = invoke("card", copy)
    assert code == 2
    assert "changed after the run began" in " ".join(output.split())


def test_every_checkpoint_gets_a_card_that_is_written_once(run: Path) -> None:
    cards = sorted((run / "checkpoints").glob("*/seed-*/README.md"))
    assert len(cards) == len(DESIGN.arms) * len(DESIGN.seeds)
    before = cards[0].read_text()
    write_report(run)
    assert cards[0].read_text() == before
    front = yaml.safe_load(before.split("---\n")[1])
    assert front["base_model"] == "embedded"
    assert extract_section(before, "card") == invoke("card", run, "--arm", cards[0].parts[-3])[1]


def test_the_card_of_a_checkpoint_tells_of_its_own_arm(run: Path) -> None:
    """A reader of one checkpoint must not take the verdict about another one for its own."""
    code, section = invoke("card", run, "--arm", "naive")
    assert code == 0
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| ")]
    assert {row[1].split(" @ ")[0] for row in rows if row[0] in ("training", "deployed")} == {"naive"}
    assert "**FAIL**" in section
    assert "Of this arm's gated cells: " in section
    assert "smd" not in section.partition("is about")[2].partition("\n")[2]
    reference = invoke("card", run, "--arm", "dense")[1]
    assert "**REFERENCE**" in reference
    assert "Other arms are compared with this one" in reference
    assert "--arm is 'x', but the run has no such arm; known: dense, " in invoke("card", run, "--arm", "x")[1]


def test_the_card_of_an_arm_is_headed_by_what_fails_and_not_by_what_lost_most(run: Path) -> None:
    page = disclosure_page(load_run(run))
    verdict = page.findings.verdict
    own = sorted((d for d in verdict.decisions if d.gated and d.arm == "naive"), key=lambda d: d.effect.estimate)
    told = {id(own[0]): Status.PASS, id(own[-1]): Status.FAIL}
    changed = tuple(replace(d, status=told.get(id(d), Status.PASS), waiver=None) for d in verdict.decisions)
    found = replace(page.findings, verdict=replace(verdict, decisions=changed))
    worst = disclosure_of(replace(page, findings=found), "naive").worst
    assert (worst.verdict, worst.estimate) == ("FAIL", own[-1].effect.estimate)


def test_a_checkpoint_without_gated_cells_is_not_gated(run: Path) -> None:
    page = disclosure_page(load_run(run))
    empty = replace(page.findings.verdict, status=Status.PASS, decisions=(), arms=(), headline=None)
    found = replace(page.findings, verdict=empty)
    whole = disclosure_of(replace(page, findings=found), "naive")
    assert whole.limits[0] == "Blind spot: unknown, no gated cell has a number."
    told = whole.verdict
    assert told["status"].value == "NOT GATED"
    assert told["says"].value == "No cell of this arm is gated; the verdict of the whole run, PASS, is about no arm."
    assert told["number"].state == "not applicable"


def test_an_unreadable_card_stops_no_report(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    card = copy / "checkpoints" / "dense" / f"seed-{DESIGN.seeds[0]}" / "README.md"
    card.write_bytes(b"\xff")
    shutil.rmtree(copy / "report")
    code, output = invoke("report", copy)
    assert code == 0, output
    assert "FAIL (exit 3): " in output
    assert card.read_bytes() == b"\xff"
    assert "not UTF-8 text" in run_text(copy)


def test_a_vendor_without_a_name_is_unknown(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "answers.json").write_text(json.dumps({**blank_answers(), "vendor": None}))
    write_report(copy)
    told = json.loads((copy / "report" / "disclosure.json").read_text())
    assert told["stack"]["vendor"] == {"state": "unknown"}


def test_a_card_with_the_line_ends_of_windows_keeps_them(run: Path, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_bytes(b"# My model\r\n\r\nText.\r\n")
    assert invoke("card", run, "--into", card)[0] == 0
    once = card.read_bytes()
    assert b"\n" not in once.replace(b"\r\n", b"")
    assert invoke("card", run, "--check", card)[0] == 0
    assert invoke("card", run, "--into", card)[0] == 0
    assert card.read_bytes() == once


def test_answers_of_every_size_that_is_accepted_are_cited(run: Path, tmp_path: Path) -> None:
    copy, card = tmp_path / "run", tmp_path / "README.md"
    shutil.copytree(run, copy)
    (copy / "answers.json").write_text(json.dumps({**blank_answers(), "vendor": "Ada"}) + " " * 300_000)
    card.write_text("word " * 60_000)
    assert invoke("card", copy, "--into", card, "--check", card)[0] == 0
