"""Reading a run folder: what is kept, what is named, what is refused."""

import hashlib
import json
import os

import pytest
from reports_synthetic import Design, build, policy, write_unit

from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.spec import parse_spec
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run


@pytest.fixture
def run(tmp_path):
    return build(tmp_path / "run", Design(seeds=(11,), arms=("dense", "naive"), suites=("math",), items=12, clusters=6))


def units(run):
    return sorted((run / "records").glob("*.jsonl"))


def test_reads_every_record_once(run):
    data = load_run(run)
    assert len(data.records) == 2 * 3 * 12
    assert set(data.records["arm"]) == {"dense", "naive"}
    assert data.problems == ()
    assert data.incomplete == ()


def test_a_changed_byte_in_a_sealed_unit_names_the_file(run):
    unit = units(run)[0]
    unit.write_text(unit.read_text().replace('"score": 1.0', '"score": 0.0', 1))
    with pytest.raises(DataError, match=unit.name) as error:
        load_run(run)
    assert "\n" not in str(error.value)


def test_a_seal_without_its_records_is_refused(run):
    units(run)[0].unlink()
    with pytest.raises(DataError, match=r"is missing; evaluate that unit again"):
        load_run(run)


def test_a_half_written_last_line_is_counted_and_kept_out(run):
    unit = units(run)[0]
    text = unit.read_text()
    unit.with_name(unit.name.removesuffix(".jsonl") + ".done.json").unlink()
    unit.write_text(text[:-40])
    data = load_run(run)
    assert len(data.records) == 71
    assert data.incomplete == (unit.name,)
    [problem] = data.problems
    assert (problem.file, problem.line) == (unit.name, 12)
    assert problem.reason.startswith("half-written last line: record is not JSON")


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row | {"score": 2.0},
        lambda row: row | {"score": None},
        lambda row: row | {"retention": float("nan")},
        lambda row: row | {"context_tokens": "192"},
        lambda row: row | {"item_id": ["a"]},
        lambda row: row | {"kv_bytes_peak": 10**30},
        lambda row: row | {"survival": {"user": "all"}},
        lambda row: row | {"format": 3},
        lambda row: row | {"facets": {"unsafe": 1}},
        lambda row: row | {"facets": {"kindness": True}},
        lambda row: row | {"facets": None},
        lambda row: {k: v for k, v in row.items() if k != "facets"},
        lambda row: {"format": 1},
        lambda row: row | {"transcript": [{"role": "user", "content": 7}]},
        lambda row: [row],
    ],
)
def test_a_malformed_line_is_named_with_file_and_line(run, change):
    unit = units(run)[0]
    lines = unit.read_text().splitlines()
    lines[3] = json.dumps(change(json.loads(lines[3])))
    write_unit(unit, "\n".join(lines) + "\n")
    data = load_run(run)
    assert len(data.records) == 71
    [problem] = data.problems
    assert (problem.file, problem.line) == (unit.name, 4)
    assert "half-written" not in problem.reason


def test_a_record_that_stands_twice_is_counted_once(run):
    unit = units(run)[0]
    text = unit.read_text()
    write_unit(unit, text + text.splitlines()[0] + "\n")
    data = load_run(run)
    assert len(data.records) == 72
    assert [(p.line, p.reason[:12]) for p in data.problems] == [(13, "duplicate of")]


def test_transcripts_are_read_again_from_their_line(run):
    data = load_run(run)
    row = data.records.iloc[5]
    place = (row["file"], int(row["line"]))
    transcript = data.transcripts([place])[place]
    assert [m.role.value for m in transcript] == ["system", "user", "assistant"]


def test_telemetry_keeps_the_last_line_of_a_step(tmp_path):
    run = build(
        tmp_path / "run", Design(arms=("dense",), seeds=(3,), suites=("math",), items=6, clusters=6, telemetry=4)
    )
    path = run / "checkpoints" / "dense" / "seed-3" / "telemetry.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "reward_mean": 0.25}\nnot json\n')
    data = load_run(run)
    assert [row["step"] for row in data.telemetry["dense", 3]] == [1, 2, 3, 4]
    assert data.telemetry["dense", 3][1] == {"step": 2, "reward_mean": 0.25}
    assert [(p.file, p.line) for p in data.problems] == [("checkpoints/dense/seed-3/telemetry.jsonl", 6)]


@pytest.mark.parametrize("name", ["seed-²", "seed---3", "seed-", "seed-3 "])
def test_a_folder_whose_name_is_no_seed_is_left_alone(run, name):
    folder = run / "checkpoints" / "dense" / name
    folder.mkdir(parents=True)
    (folder / "telemetry.jsonl").write_text('{"step": 1}\n')
    (folder / "provenance.json").write_text("{}")
    data = load_run(run)
    assert data.problems == ()


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1e400}',
        '{"step": 1e308}',
        '{"step": true}',
        '{"step": 1, "reward_mean": NaN}',
        '{"step": 1, "reward_mean": 1e308}',
        '{"step": 1, "reward_mean": 1' + "0" * 400 + "}",
    ],
)
def test_telemetry_of_no_use_is_a_problem_and_left_out(tmp_path, line):
    design = Design(arms=("dense",), seeds=(3,), suites=("math",), items=6, clusters=6, telemetry=4)
    run = build(tmp_path / "run", design)
    (run / "checkpoints" / "dense" / "seed-3" / "telemetry.jsonl").write_text(line + "\n")
    data = load_run(run)
    assert data.telemetry["dense", 3] == []
    assert [problem.line for problem in data.problems] == [1]


@pytest.mark.parametrize("missing", ["spec.yaml", "records"])
def test_a_folder_that_is_no_run_is_one_line(run, missing):
    target = run / missing
    target.rename(run / "gone")
    with pytest.raises(DataError) as error:
        load_run(run)
    assert "\n" not in str(error.value)
    assert "kvaudit" in str(error.value)


def test_spec_that_is_not_a_mapping_is_refused(run):
    replace_spec(run, "- a\n- b\n")
    with pytest.raises(SpecError, match="wanted a spec, a mapping, got list"):
        load_run(run)


def replace_spec(run, text):
    """Another spec, with the hash of its file in its place."""
    (run / "spec.yaml").write_text(text)
    story = json.loads((run / "provenance.json").read_text())
    story["spec_file_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (run / "provenance.json").write_text(json.dumps(story))


def test_a_spec_that_was_changed_after_the_run_began_is_refused(run):
    spec = run / "spec.yaml"
    spec.write_text(spec.read_text().replace("alpha: 0.05", "alpha: 0.2"))
    with pytest.raises(DataError, match=r"spec.yaml was changed after the run began") as error:
        load_run(run)
    assert "\n" not in str(error.value)


def test_a_changed_spec_is_refused_though_the_hash_of_its_file_was_changed_too(run):
    spec, provenance = run / "spec.yaml", run / "provenance.json"
    spec.write_text(spec.read_text().replace("alpha: 0.05", "alpha: 0.2"))
    story = json.loads(provenance.read_text())
    story["spec_file_sha256"] = hashlib.sha256(spec.read_bytes()).hexdigest()
    provenance.write_text(json.dumps(story))
    with pytest.raises(DataError, match=r"spec_sha256 in provenance\.json is"):
        load_run(run)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{n}: &{n} [{', '.join([f'*{m}'] * 9)}]\n" for m, n in zip("abcdefgh", "bcdefghi", strict=True)),
        "a: &a [*a]",
        "when: 2026-05-01",
        "1: x\nb: y",
    ],
)
def test_a_spec_that_no_run_wrote_is_refused_at_once(run, text):
    replace_spec(run, text)
    with pytest.raises(SpecError) as error:
        load_run(run)
    assert "\n" not in str(error.value)


def test_a_run_without_provenance_is_refused(run):
    (run / "provenance.json").unlink()
    with pytest.raises(DataError, match=r"provenance.json") as error:
        load_run(run)
    assert "\n" not in str(error.value)


def test_a_run_folder_that_the_program_opens_carries_the_hash_of_its_spec(tmp_path):
    spec = parse_spec(
        "format: 1\nname: q\nevaluate: {policies: [none], suites: [math], context_tokens: [192]}\n", "q", NAMES
    )
    folder = open_run(tmp_path / "run", spec, resume=False)
    with pytest.raises(DataError, match="no records in"):
        load_run(folder.path)
    (folder.path / "spec.yaml").write_text((folder.path / "spec.yaml").read_text() + "# later\n")
    with pytest.raises(DataError, match="was changed after"):
        load_run(folder.path)


def test_synthetic_policy_strings_are_canonical():
    assert policy("snapkv", 48) == "snapkv:budget=48,sink=4,window=8,interval=1,phase=both,chunk=64"


def test_a_report_names_a_thousand_problems_and_counts_the_rest(run):
    unit = units(run)[0]
    write_unit(unit, unit.read_text() + "broken\n" * 1500)
    data = load_run(run)
    assert len(data.problems) == 1500
    problems = decide_run(data).problems
    assert len(problems) == 1001
    assert problems[-1] == "and 500 more problems in the files"


def test_what_a_system_leaves_beside_the_files_of_a_run_is_passed_over(run):
    before = load_run(run).records
    for file in (*units(run), *sorted((run / "records").glob("*.done.json"))):
        file.with_name(f"._{file.name}").write_bytes(b"\0\5\x16\7 of macOS \xff")
    assert load_run(run).records.equals(before)


@pytest.mark.parametrize("name", ["scan.json", "answers.json", "recipe.json", "report/adjudication.json"])
def test_a_pipe_in_place_of_what_a_run_keeps_is_refused_and_not_waited_for(run, name):
    path = run / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"is a (pipe|folder, a pipe or a device), where a file belongs"):
        decide_run(load_run(run))


def test_a_pipe_among_the_records_is_refused_and_not_waited_for(run):
    os.mkfifo(run / "records" / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl' is a folder, a pipe or a device, where a file belongs"):
        load_run(run)
