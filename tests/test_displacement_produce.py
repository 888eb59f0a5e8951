"""``kvaudit replay displace`` on a small run: what it writes, resumes to the same bytes, and refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_text import run_text
from test_cli import kvaudit, refused

from kvaudit.audit.again.displace import Displace
from kvaudit.audit.again.trajectories import units
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.sampling.model import load_model
from kvaudit.core.errors import SpecError
from kvaudit.core.spec import load_spec, parse_spec
from kvaudit.reports.analysis.displacement import load_displacement
from kvaudit.reports.run import write_report

POLICY = "streaming:budget=64,sink=4,window=8"
SPEC = """\
name: tiny
model: {model}
train:
  arms: [dense, smd]
  seeds: [1, 2]
  policy: "{policy}"
  suites: [refusal]
  context_tokens: 900
  steps: 1
  prompts_per_step: 1
  group: 2
  save_every: 1
evaluate:
  policies: [none, "{policy}"]
  suites: {{refusal: {{items: 6}}}}
  context_tokens: [900]
"""
WHOSE = "dense-seed1--"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run that was measured; tests that damage it work on a copy."""
    folder = tmp_path_factory.mktemp("displaced")
    (folder / "spec.yaml").write_text(SPEC.format(model=tiny_folder, policy=POLICY))
    code, out, err = kvaudit("run", folder / "spec.yaml", "--out", folder / "run", "--threads", 1)
    assert code == 0, out + err
    code, out, err = kvaudit("replay", "displace", folder / "run")
    assert code == 0, out + err
    (folder / "out.txt").write_text(out)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


def rows(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "displacement.json").read_text())["rows"]
    return found


def test_every_arm_and_policy_is_led_along_its_own_references_answers() -> None:
    spec = parse_spec(SPEC.format(model="embedded", policy=POLICY), "spec", NAMES)
    found = [(unit.arm, unit.seed, unit.policy.name, unit.reference_seed) for unit in units(spec)]
    assert found == [
        *[("dense", 1, "none", 1), ("dense", 2, "none", 2)],  # the floors
        *[("dense", 1, "streaming", 1), ("smd", 1, "none", 1), ("smd", 1, "streaming", 1)],
        *[("dense", 2, "streaming", 2), ("dense", 2, "none", 1), ("smd", 2, "none", 2), ("smd", 2, "streaming", 2)],
    ]
    assert [unit.floor for unit in units(spec)] == [True] * 2 + [False] * 7
    assert len({unit.name for unit in units(spec)}) == 9


def test_without_training_the_base_model_is_measured_under_every_policy() -> None:
    text = "{name: a, evaluate: {policies: [none, 'streaming:budget=64'], suites: [math, agent], context_tokens: [64]}}"
    found = units(parse_spec(text, "spec", NAMES))
    assert [(unit.arm, unit.suite, unit.floor) for unit in found] == [
        *[("base", "math", True), ("base", "agent", True), ("base", "math", False), ("base", "agent", False)],
    ]


def test_what_engines_alone_served_is_refused_as_that() -> None:
    text = "{name: a, evaluate: {policies: ['openvino:KV_CACHE_PRECISION=u4'], suites: [math], context_tokens: [64]}}"
    with pytest.raises(SpecError, match="engines alone served this run, and they show nobody their distributions"):
        units(parse_spec(text, "spec", NAMES))
    beside = units(parse_spec(text.replace("['", "[none, 'streaming:budget=64', '"), "spec", NAMES))
    assert [(unit.policy.name, unit.floor) for unit in beside] == [("none", True), ("streaming", False)]


def test_the_file_is_what_reports_read_and_the_floor_is_rounding(finished: Path) -> None:
    found = load_displacement(finished / "run")
    floors = [row for row in found if row.floor]
    assert [(row.arm, row.seed) for row in floors] == [("dense", 1), ("dense", 2)]
    assert all(row.max_kl < 1e-9 for row in floors)
    served = [row for row in found if row.policy != "none"]
    assert len(served) == 4
    assert all(row.mean_kl > 1e-6 for row in served)
    assert all(row.ratio is not None and row.ratio > 100 for row in served)
    assert "written: " in (finished / "out.txt").read_text()


def test_tokens_are_those_of_the_reference_answers(finished: Path) -> None:
    seen = {}
    for row in rows(finished / "run"):
        if row["policy"] != "none" or row["floor"]:
            place = [(cluster, tokens) for cluster, tokens, _ in row["sequences"]]
            assert seen.setdefault(row["seed"], place) == place
    assert all(0 < len(place) <= 6 for place in seen.values())


def test_a_refusal_margin_is_that_of_the_suite_that_spells_refusals_out(finished: Path) -> None:
    assert all(row["refusal_margin"] is not None for row in rows(finished / "run"))
    assert [abs(row["refusal_margin"]) < 1e-4 for row in rows(finished / "run") if row["floor"]] == [True, True]


def test_the_margin_is_over_the_items_that_should_be_refused(run: Path) -> None:
    spec = load_spec(run / "spec.yaml", NAMES)
    measure, model = Displace(RunFolder(run, spec), tokens=16384), load_model(spec.model_path)
    refusal = measure.refusal(measure.pieces()[0], model.chat)
    assert refusal is not None
    assert model.chat.tokenizer.decode([refusal.token]) == "I"  # of "I must refuse."
    assert len(refusal.items) == 2  # of 6: every third asks for what is forbidden
    assert all(name.endswith("-forbidden") for name in refusal.items)


def test_a_report_shows_it_and_the_verdict_is_the_same_without(run: Path) -> None:
    shown = write_report(run)
    assert len(shown.values["displacement"]) == 9
    assert "dense again (A/A floor)" in run_text(run)
    (run / "displacement.json").unlink()
    before, after = json.loads((run / "report" / "drift.json").read_text()), write_report(run)
    assert "displacement" not in after.values
    assert json.loads((run / "report" / "drift.json").read_text())["verdict"] == before["verdict"]


def test_an_interrupted_measurement_resumes_to_the_same_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (run / "displacement.json").read_bytes()
    shutil.rmtree(run / "displacement")
    (run / "displacement.json").unlink()
    served, calls = Displace.served, []

    def killed(self: Displace, unit: Any, model: Any) -> Any:
        calls.append(unit)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return served(self, unit, model)

    monkeypatch.setattr(Displace, "served", killed)
    code, _, err = kvaudit("replay", "displace", run)
    assert (code, err.strip().splitlines()[-1]) == (130, f"interrupted; continue with: kvaudit replay displace {run}")
    assert not (run / "displacement.json").exists()
    assert len(list((run / "displacement").glob("*.json"))) == 3
    monkeypatch.setattr(Displace, "served", served)
    assert kvaudit("replay", "displace", run)[0] == 0
    assert (run / "displacement.json").read_bytes() == whole
    assert not list((run / "displacement").glob("[!.]*.lock"))


def test_a_finished_unit_is_not_measured_again_and_a_spoilt_one_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, files = (run / "displacement.json").read_bytes(), sorted((run / "displacement").glob("*.json"))
    files[0].write_text("[" * 100_000)
    files[1].write_text('{"key": 1, "row": [], "sha256": null}')
    files[2].write_bytes(files[2].read_bytes()[:-20])
    held = json.loads(files[3].read_text())
    held["row"]["max_kl"] = 0.0
    files[3].write_text(json.dumps(held))
    served, measured = Displace.served, []
    monkeypatch.setattr(
        Displace, "served", lambda self, unit, model: (measured.append(unit.name), served(self, unit, model))[1]
    )
    assert kvaudit("replay", "displace", run)[0] == 0
    assert sorted(measured) == sorted(path.stem for path in files[:4])
    assert (run / "displacement.json").read_bytes() == whole


def test_fewer_tokens_are_another_measurement(run: Path) -> None:
    before = {row["seed"]: sum(entry[1] for entry in row["sequences"]) for row in rows(run) if row["floor"]}
    assert kvaudit("replay", "displace", run, "--tokens", 20)[0] == 0
    after = {row["seed"]: [entry[1] for entry in row["sequences"]] for row in rows(run) if row["floor"]}
    assert all(sum(tokens) <= 20 or len(tokens) == 1 for tokens in after.values())
    assert all(sum(after[seed]) < before[seed] for seed in after)


def spoil_seal(run: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the reference's answers and seal them again, as whoever holds the folder can."""
    for path in (run / "records").glob(f"{WHOSE}*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if lines[0]["policy"] == "none":
            change(lines)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            seal = path.with_name(path.name.replace(".jsonl", ".done.json"))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            seal.write_text(json.dumps({**json.loads(seal.read_text()), "sha256": digest}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[0].update(transcript=[]), "holds no conversation"),
        (lambda rows: rows[0]["transcript"][0].update(content=3), "holds no conversation"),
        (lambda rows: rows[0].update(item_id="\x1b[31m\n", transcript=[]), r"'\x1b[31m\n' holds no conversation"),
        (lambda rows: rows[0]["transcript"][-1].update(content="long " * 2000), "has 4096 positions"),
        (lambda rows: rows[0].update(arm="smd"), ".jsonl:1: the record is of another unit"),
        (lambda rows: rows[0].update(checkpoint="0" * 64), ".jsonl:1: the record is of other weights"),
        (lambda rows: rows[1].update(extra=1), ".jsonl:2: record has other keys"),
        (lambda rows: rows[1].update(item_id=[]), "holds no conversation"),
        (lambda rows: rows[1].update(cluster_id="\ud800"), "holds no conversation"),
        (lambda rows: rows[0]["transcript"][0].update(role="judge"), "bad outcome or transcript"),
        (lambda rows: rows.clear(), "holds no answer with a token to predict"),
    ],
)  # fmt: skip
def test_hostile_answers_are_one_line(run: Path, change: Callable[[Any], None], words: str) -> None:
    shutil.rmtree(run / "displacement")

    def changed(lines: list[dict[str, Any]]) -> None:
        change(lines)

    spoil_seal(run, changed)
    line = refused("replay", "displace", run)
    assert words in line
    assert "\x1b" not in line


def test_records_that_changed_or_lack_their_seal_are_named(run: Path) -> None:
    (path,) = [
        p
        for p in (run / "records").glob(f"{WHOSE}*.jsonl")
        if json.loads(p.read_text().splitlines()[0])["policy"] == "none"
    ]
    path.write_bytes(path.read_bytes() + b"\n")
    shutil.rmtree(run / "displacement")
    assert "its seal says" in refused("replay", "displace", run)
    seal = path.with_name(path.name.replace(".jsonl", ".done.json"))
    seal.write_text("[" * 100_000)
    assert "is not JSON" in refused("replay", "displace", run)
    seal.unlink()
    assert "is not finished" in refused("replay", "displace", run)


def test_a_folder_without_a_run_or_with_another_spec_is_one_line(run: Path, tmp_path: Path) -> None:
    assert "give the folder of a run" in refused("replay", "displace", tmp_path / "nowhere")
    spec = run / "spec.yaml"
    spec.write_text(spec.read_text().replace("seed: 1000", "seed: 1001"))
    assert "put the first one back" in refused("replay", "displace", run)


def test_places_that_are_taken_are_named(run: Path) -> None:
    (run / "displacement.json").unlink()
    (run / "displacement.json").mkdir()
    assert "taken by something else" in refused("replay", "displace", run)
    shutil.rmtree(run / "displacement.json")
    shutil.rmtree(run / "displacement")
    (run / "displacement").write_text("x")
    assert "taken by something else" in refused("replay", "displace", run)


def test_changed_weights_are_named(run: Path) -> None:
    weights = run / "checkpoints" / "smd" / "seed-1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00\x01")
    assert "model.safetensors" in refused("replay", "displace", run)


def test_a_checkpoint_that_was_not_finished_is_named(run: Path) -> None:
    (run / "checkpoints" / "smd" / "seed-1" / "provenance.json").unlink()
    assert "provenance.json' is missing" in refused("replay", "displace", run)
