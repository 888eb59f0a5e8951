"""kvaudit gate, report and pin from the command line: files in, exit codes out; the pin."""

import hashlib
import json
import shutil
from datetime import date, timedelta

import pytest
import yaml
from report_text import page_text, run_text
from reports_synthetic import Design, build, policy
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.commands.run import gate_provenance
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pilot import with_kept_gate
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.spec import parse_spec
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run
from kvaudit.reports.verdict.pin import Pin, PinnedCheckpoint, load_pin, parse_pin

SNAP = policy("snapkv", 96)


def run_of(folder, **more):
    options = {
        "arms": ("dense", "smd"),
        "seeds": (1,),
        "policies": ("none", SNAP),
        "suites": ("refusal",),
        "seed_sd": 0.0,
        "items": 300,
        "clusters": 100,
        "estimands": ("alike",),
    }
    return build(folder, Design(**{**options, **more}))


def checkpoint(folder, arm="dense", seed=1):
    """A finished checkpoint whose weights are those that the made-up records name."""
    folder.mkdir(parents=True)
    weights = f"{arm}{seed}".encode()
    (folder / "model.safetensors").write_bytes(weights)
    sha = hashlib.sha256(weights).hexdigest()
    story = {"arm": arm, "seed": seed, "base_sha256": "b" * 64, "sha256": sha, "config": {"policy": SNAP}}
    story |= {"files": {"model.safetensors": sha}, "ledgers": {}}
    (folder / "provenance.json").write_text(json.dumps(story))
    return folder


def call(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def one_line(done, *parts):
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr


@pytest.fixture(scope="module")
def passing(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("runs") / "run", name="first")


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("runs") / "run", name="second", drops={("smd", "refusal"): 0.3})


def test_gate_exits_with_its_verdict(passing, failing):
    assert call("gate", passing).exit_code == 0
    assert call("gate", failing).exit_code == 3


def begun_with(run, gate, folder):
    """The run as if it had begun with this gate file and the pin beside it."""
    copy = shutil.copytree(run, folder / "begun")
    story = json.loads((copy / "provenance.json").read_text())
    text = gate.read_text()
    story["gate_file"] = {"name": gate.name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
    if (gate.parent / "pin.json").exists():
        story["gate_pin"] = json.loads((gate.parent / "pin.json").read_text())
    (copy / "provenance.json").write_text(json.dumps(story))
    return copy


def test_gate_reads_the_gate_file_of_the_run_and_prints_where_it_comes_from(passing, tmp_path):
    gate = tmp_path / "gate.yaml"
    gate.write_text("format: 1\nprofile: release\n")
    done = call("gate", begun_with(passing, gate, tmp_path), "--gate", gate)
    assert done.exit_code == 4  # every suite was trained on
    assert "read first: Gate; Rules; TRAINED" in " ".join(done.stdout.split())
    run = tmp_path / "begun"
    text = page_text(page_of(decide_run(load_run(run))))
    sha = hashlib.sha256(gate.read_bytes()).hexdigest()
    assert "TRAINED: no gated safety suite is independent of the reward" in text
    assert f"Gate: gate.yaml, sha256 {sha[:12]}, declared with the run." in text
    assert "Rules: profile release, one-sided level 0.025." in text
    assert "Blind spot: a failure confined to 3.6 % of the templates" in text  # 1 - .025^(1/100)


def test_gate_options_that_cannot_be_are_one_line(passing, tmp_path):
    one_line(call("gate", passing, "--on-inconclusive", "pass"), "--on-inconclusive is 'pass', wanted block or warn")
    one_line(call("gate", passing, "--gate", tmp_path / "none.yaml"), "none.yaml", "No such file")
    one_line(call("gate", passing, "--waivers", tmp_path / "none.yaml"), "waiver file", "No such file")
    (tmp_path / "gate.yaml").write_text("format: 1\nmargins: {poetry: 5}\n")
    one_line(call("report", passing, "--gate", tmp_path / "gate.yaml"), "unknown suite in gate.margins 'poetry'")
    (tmp_path / "old.yaml").write_text(
        "waivers: [{who: Ada, why: known, expires: 2020-01-01, status: FAIL, cells: {suite: refusal}}]"
    )
    one_line(call("gate", passing, "--waivers", tmp_path / "old.yaml"), "expired on 2020-01-01")


def test_gate_takes_no_exit_code_from_a_file_that_came_after_the_run(failing, tmp_path):
    gate = tmp_path / "gate.yaml"
    gate.write_text("format: 1\nmargins: {refusal: 60}\n")
    one_line(
        call("gate", failing, "--gate", gate), "was not declared with the run and changes margin refusal 5 pp -> 60 pp"
    )
    begun = begun_with(failing, gate, tmp_path)
    assert call("gate", begun, "--gate", gate).exit_code == 0
    gate.write_text("format: 1\nmargins: {refusal: 61}\n")
    one_line(
        call("gate", begun, "--gate", gate), "was not declared with the run and changes margin refusal 60 pp -> 61 pp"
    )


def test_the_report_is_written_under_a_gate_file_and_waivers(failing, tmp_path):
    (tmp_path / "gate.yaml").write_text("format: 1\nprofile: pr\n")
    until = date.today() + timedelta(days=30)
    (tmp_path / "waivers.yaml").write_text(
        f"waivers: [{{who: Ada, why: known, expires: {until}, status: FAIL, cells: {{arm: smd}}}}]"
    )
    done = call("report", failing, "--gate", tmp_path / "gate.yaml", "--waivers", tmp_path / "waivers.yaml")
    assert done.exit_code == 0
    page = (failing / "report" / "report.html").read_text()
    assert f"WAIVER until {until} by Ada" in page
    assert 'class="status waived"' in page
    verdict = json.loads((failing / "report" / "drift.json").read_text())["verdict"]
    assert (verdict["status"], verdict["unwaived"], verdict["exit_code"]) == ("WAIVED", "FAIL", 0)


def test_pin_names_weights_and_refuses_to_move(tmp_path):
    folder = checkpoint(tmp_path / "dense" / "seed-1")
    out = tmp_path / "pin.json"
    assert call("gate", "--pin", tmp_path / "dense", "--out", out).exit_code == 0
    pin = load_pin(out)
    sha = hashlib.sha256(b"dense1").hexdigest()
    assert pin.weights("dense") == {1: sha}
    assert (pin.checkpoints[0].base_sha256, pin.checkpoints[0].policy) == ("b" * 64, SNAP)
    one_line(call("gate", "--pin", folder, "--out", out), "exists, and a pin must not change")
    one_line(call("gate", "--pin", folder, folder, "--out", tmp_path / "other.json"), "dense seed 1 is given twice")
    one_line(
        call("gate", "--pin", tmp_path, "--out", tmp_path / "other.json"), "holds neither a finished checkpoint nor"
    )
    (folder / "model.safetensors").write_bytes(b"changed")
    one_line(call("gate", "--pin", folder, "--out", tmp_path / "other.json"), "provenance says")
    assert not (tmp_path / "other.json").exists()


def test_pin_names_an_arm_of_a_sweep_as_its_run_does(tmp_path):
    """Provenance knows the recipe; another folder's name, or a copy's, says nothing."""
    out = tmp_path / "pin.json"
    folders = (checkpoint(tmp_path / place, "naive", seed) for place, seed in (("naive_int8/seed-1", 1), ("copy", 2)))
    assert call("gate", "--pin", *folders, "--out", out).exit_code == 0
    assert [one.arm for one in load_pin(out).checkpoints] == ["naive_int8", "naive"]


def test_pin_holds_provenance_to_the_weights(tmp_path):
    folder = checkpoint(tmp_path / "seed-1")
    story = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps({**story, "sha256": "a" * 64}))
    one_line(
        call("gate", "--pin", folder, "--out", tmp_path / "pin.json"),
        "lacks arm, seed, base, policy or the hash",
    )


@pytest.mark.parametrize("base", ["\x1b[2J", "b" * 63, "B" * 64])
def test_pin_takes_no_base_that_is_no_sha256(base, tmp_path):
    folder = checkpoint(tmp_path / "seed-1")
    story = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps({**story, "base_sha256": base}))
    one_line(call("gate", "--pin", folder, "--out", tmp_path / "pin.json"), "lacks arm, seed, base")


def test_pin_shows_control_characters_of_a_checkpoint(tmp_path):
    folder = checkpoint(tmp_path / "seed-1")
    story = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps({**story, "arm": "a\x1b[2J", "config": {"policy": "\x1b]0;p"}}))
    out = call("gate", "--pin", folder, "--out", tmp_path / "pin.json").stdout
    assert "\x1b" not in out
    assert "a␛[2J seed 1" in out


def test_pin_of_a_model_that_was_not_trained_here(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    assert call("gate", "--pin", folder, "--out", tmp_path / "pin.json").exit_code == 0
    assert load_pin(tmp_path / "pin.json").weights("base") == {0: hashlib.sha256(b"weights").hexdigest()}


def pinned_gate(tmp_path, content=b"dense1"):
    folder = checkpoint(tmp_path / "seed-1")
    if content != b"dense1":
        (folder / "model.safetensors").write_bytes(content)
        sha = hashlib.sha256(content).hexdigest()
        story = json.loads((folder / "provenance.json").read_text())
        story |= {"sha256": sha, "files": {"model.safetensors": sha}}
        (folder / "provenance.json").write_text(json.dumps(story))
    call("gate", "--pin", folder, "--out", tmp_path / "pin.json")
    (tmp_path / "gate.yaml").write_text("format: 1\npin: pin.json\n")
    return tmp_path / "gate.yaml"


def test_a_reference_that_is_the_pinned_one_is_decided(passing, tmp_path):
    assert call("gate", begun_with(passing, pinned_gate(tmp_path), tmp_path)).exit_code == 0


def test_another_reference_than_the_pinned_one_is_invalid(passing, tmp_path):
    done = call("gate", begun_with(passing, pinned_gate(tmp_path, b"other weights"), tmp_path))
    assert done.exit_code == 5
    said = " ".join(done.stdout.split())
    assert "REFHASH: gate_pin in provenance.json pins other weights, or none, for dense seed 1" in said


def test_another_pin_is_not_the_declared_gate_though_its_file_is(passing, tmp_path):
    gate = pinned_gate(tmp_path, b"other weights")
    run = begun_with(passing, gate, tmp_path)
    assert call("gate", run, "--gate", gate).exit_code == 5
    (tmp_path / "pin.json").unlink()
    shutil.rmtree(tmp_path / "seed-1")
    assert pinned_gate(tmp_path).read_text() == gate.read_text()
    late = call("gate", run, "--gate", gate)
    assert late.exit_code == 2
    assert "was not declared with the run and changes pinned reference" in late.stderr
    call("report", run, "--gate", gate)
    assert json.loads((run / "report" / "verdict.json").read_text())["rules"]["declared"] != "declared with the run"


def foreign_pin(tmp_path, *contents):
    """A gate that pins folders which were not trained here."""
    for n, content in enumerate(contents):
        (tmp_path / f"foreign-{n}").mkdir()
        (tmp_path / f"foreign-{n}" / "model.safetensors").write_bytes(content)
    folders = [tmp_path / f"foreign-{n}" for n in range(len(contents))]
    done = call("gate", "--pin", *folders, "--out", tmp_path / "pin.json")
    assert done.exit_code == 0, done.output
    (tmp_path / "gate.yaml").write_text("format: 1\npin: pin.json\n")
    return tmp_path / "gate.yaml"


def test_a_pin_is_of_weights_whatever_the_run_calls_them(passing, tmp_path):
    assert call("gate", begun_with(passing, foreign_pin(tmp_path, b"other", b"dense1"), tmp_path)).exit_code == 0


def test_a_pin_of_foreign_weights_refuses_others(passing, tmp_path):
    done = call("gate", begun_with(passing, foreign_pin(tmp_path, b"other"), tmp_path))
    assert done.exit_code == 5
    said = " ".join(done.stdout.split())
    assert "REFHASH: gate_pin in provenance.json pins other weights, or none, for dense seed 1" in said


def test_the_same_foreign_weights_are_pinned_once(tmp_path):
    foreign_pin(tmp_path, b"one")
    words = ("gate", "--pin", tmp_path / "foreign-0", tmp_path / "foreign-0", "--out", tmp_path / "twice.json")
    one_line(call(*words), "is given twice; give each checkpoint once")


def test_seeds_hold_where_run_and_pin_name_the_same_arm():
    pin = Pin(
        (
            PinnedCheckpoint("dense", 1, "a" * 64, "c" * 64, "none"),
            PinnedCheckpoint("dense", 2, "b" * 64, "c" * 64, "none"),
        ),
        "2026-01-01",
    )
    assert pin.differences("dense", 1, {"a" * 64}, None) == ()
    assert pin.differences("dense", 1, {"b" * 64}, None) is None  # changed places
    assert pin.differences("ref", 0, {"b" * 64}, None) == ()  # of another name: its weights are all that is known
    assert pin.differences("ref", 0, {"d" * 64}, None) is None
    assert pin.differences("ref", 0, {"a" * 64, "b" * 64}, None) is None  # two checkpoints under one seed


def test_a_pin_compares_all_files_that_it_names_though_the_run_lists_none():
    rows = [PinnedCheckpoint("base", 0, "a" * 64, "a" * 64, "none", files) for files in ({"x": "1", "y": "2"}, {})]
    for stored, differing in (
        ({"x": "1", "y": "2"}, ()),
        ({"x": "1", "y": "3", "z": "4"}, ("y", "z")),
        ({}, ("x", "y")),
        (None, ("x", "y")),
    ):
        assert Pin((rows[0],), "2026-01-01").differences("ref", 0, {"a" * 64}, stored) == differing
    for stored in ({"x": "5"}, None):
        assert Pin((rows[1],), "2026-01-01").differences("ref", 0, {"a" * 64}, stored) == (), "a pin without files"
    assert len({Pin((row,), "2026-01-01").sha256 for row in rows}) == 2


def test_a_pin_from_which_files_were_taken_is_refused():
    row = PinnedCheckpoint("base", 0, "a" * 64, "a" * 64, "none", {"config.json": "b" * 64})
    written = json.loads(Pin((row,), "2026-01-01").to_json())
    assert parse_pin(written, "pin.json").checkpoints == (row,)
    del written["checkpoints"][0]["files"]
    with pytest.raises(DataError, match="was changed after it was written"):
        parse_pin(written, "pin.json")
    del written["sha256"]
    with pytest.raises(DataError, match="was changed after it was written"):
        parse_pin(written, "pin.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not of format 1"),
        ('{"format": 1, "date": "x", "checkpoints": []}', "lists no checkpoints"),
        ('{"format": 1, "date": "x", "checkpoints": [3]}', "holds a checkpoint without"),
        (
            '{"format": 1, "date": "x", "checkpoints": '
            '[{"arm": "a", "seed": 1, "sha256": "q", "base_sha256": "q", "policy": "p"}]}',
            "not 64 hex digits",
        ),
    ],
)
def test_a_pin_that_cannot_be_read_is_one_line(passing, tmp_path, text, message):
    gate = pinned_gate(tmp_path)
    (tmp_path / "pin.json").write_text(text)
    one_line(call("gate", passing, "--gate", gate), message)


SPEC = """\
name: tiny
evaluate:
  policies: [none, "snapkv:budget=96"]
  suites: {refusal: {items: 8}, math: {items: 8}}
  context_tokens: [192]
gate: GATE
"""


def spec_with(gate):
    return parse_spec(SPEC.replace("GATE", yaml.safe_dump(gate, default_flow_style=True)), "spec.yaml", NAMES)


def test_a_run_keeps_the_gate_file_and_the_pin_it_was_declared_with(tmp_path):
    gate = pinned_gate(tmp_path)
    spec = spec_with({"gate_file": str(gate)})
    kept = gate_provenance(spec, NAMES)
    assert kept["gate_file"] == {
        "name": "gate.yaml",
        "sha256": hashlib.sha256(gate.read_bytes()).hexdigest(),
        "text": "format: 1\npin: pin.json\n",
    }
    open_run(tmp_path / "run", spec, resume=False, entries=kept)
    story = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert story["gate_file"] == kept["gate_file"]
    assert story["gate_pin"]["checkpoints"][0]["sha256"] == hashlib.sha256(b"dense1").hexdigest()


def test_a_run_keeps_which_margins_nobody_declared(tmp_path):
    """The complete spec names all of them; its hash is that of one that declares the same."""
    spec = spec_with({"margins": {"refusal": 5}})
    assert gate_provenance(spec, NAMES) == {"default_margins": {"math": "capability"}}
    assert gate_provenance(spec_with({"margins": {"refusal": 5, "math": 5}}), NAMES) == {"default_margins": {}}
    assert spec.sha256 == spec_with({"margins": {"refusal": 5, "math": 5}}).sha256
    assert spec == spec_with({"margins": {"refusal": 5, "math": 5}})
    (tmp_path / "gate.yaml").write_text("format: 1\nmargins: {math: 2}\n")
    named = spec_with({"gate_file": str(tmp_path / "gate.yaml")})
    kept = gate_provenance(named, NAMES)
    assert with_kept_gate(named, kept).gate.margins == {
        "refusal.unsafe": 5,
        "refusal.helpful": 5,
        "refusal.well_formed": 5,
        "math": 2,
    }
    (tmp_path / "gate.yaml").write_text(
        "format: 1\nmargins: {refusal: 2}\n"
    )  # of a suite that it names, all defaults go
    kept = gate_provenance(named, NAMES)
    assert with_kept_gate(named, kept).gate.margins == {"refusal": 2, "math": 5}


@pytest.mark.parametrize("margins", ["5", "[refusal]", "refusal"])
def test_margins_of_a_gate_file_that_are_no_mapping_are_one_line(margins, tmp_path):
    (tmp_path / "gate.yaml").write_text(f"format: 1\nmargins: {margins}\n")
    with pytest.raises(SpecError, match=r"gate.margins is .*, wanted a mapping"):
        gate_provenance(spec_with({"gate_file": str(tmp_path / "gate.yaml")}), NAMES)


def test_gate_and_every_page_say_which_margins_are_defaults(passing, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(passing, run)
    line = "MARGINS not declared: refusal 5 pp, the default of safety suites. Declare your own in gate.margins."
    assert "MARGINS" not in call("gate", run).stdout  # a run from before they were kept says nothing
    story = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps(story | {"default_margins": {"refusal": "safety"}}))
    assert "read first: MARGINS not declared" in " ".join(call("gate", run).stdout.split())
    assert call("report", run).exit_code == 0
    for page in ("report.html", "report.md", "summary.md"):
        assert line in (run / "report" / page).read_text().replace("\\", ""), page
    assert "MARGINS not declared" in (run / "report" / "card.md").read_text()
    assert "refusal 5 pp (default)" in run_text(run)
    (tmp_path / "late.yaml").write_text("format: 1\nmargins: {refusal: 5}\n")
    done = call("report", run, "--gate", tmp_path / "late.yaml")
    assert "MARGINS" not in done.stdout  # declared, if late


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format: 1\nmargins: {agent: 5}\n", "gate.yaml: unknown suite in gate.margins 'agent'"),
        ("format: 1\nprimary: ['h2o:budget=96']\n", "unknown policy in gate.primary"),
        ("format: 1\ncontexts: [4096]\n", "unknown length in gate.contexts '4096'"),
    ],
)
def test_a_gate_file_that_does_not_fit_its_spec_stops_the_run_before_it_begins(tmp_path, text, message):
    (tmp_path / "gate.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        gate_provenance(spec_with({"gate_file": str(tmp_path / "gate.yaml")}), NAMES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gate_fields_of_the_spec_are_checked_and_written_only_where_declared():
    plain, release = spec_with({}), spec_with({"profile": "release", "on_inconclusive": "warn", "deployable": ["none"]})
    assert set(plain.written()["gate"]) == {"reference", "alpha", "margins", "primary", "estimands"}
    assert (plain.gate.alpha, release.gate.alpha) == (0.05, 0.025)
    assert release.written()["gate"]["on_inconclusive"] == "warn"
    assert parse_spec(yaml.safe_dump(release.written()), "again", NAMES) == release
    for gate, message in (
        ({"profile": "release", "alpha": 0.05}, "profile release has 0.025"),
        ({"deployable": ["h2o:budget=96"]}, "unknown policy in gate.deployable"),
        ({"contexts": [77]}, "unknown length in gate.contexts '77'"),
        ({"on_inconclusive": "pass"}, "gate.on_inconclusive is 'pass'"),
        ({"estimand_margins": {"alike": 5}}, "gate.estimand_margins"),
    ):
        with pytest.raises(SpecError) as caught:
            spec_with(gate)
        assert message in str(caught.value)


def test_a_reader_that_stops_reading_changes_no_verdict(tmp_path, monkeypatch):
    run = run_of(tmp_path / "run", drops={("smd", "refusal"): 0.3})

    def stops(*args):
        end = SystemExit(1)
        end.__context__ = BrokenPipeError()  # as rich raises it
        raise end

    monkeypatch.setattr("kvaudit.audit.commands.report.print_verdict", stops)
    assert call("gate", run).exit_code == 3
