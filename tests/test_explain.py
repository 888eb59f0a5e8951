"""``kvaudit explain``: a recorded answer comes out again, with what the cache held, or what changed is named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from xml.etree import ElementTree

import pytest
from test_cli import kvaudit, refused

from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.rerun.measure import RerunAnswer, load_checkpoint, run_measure
from kvaudit.audit.rerun.shade import COLUMNS, AnswerPlace, Explain, Shade, shading_svg
from kvaudit.audit.runs.folder import RunFolder, existing_run
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.records import Message, Record, Role
from kvaudit.core.spans import ALL_TOKENS, AnswerKey, read_shadings, shading_file, write_shadings
from kvaudit.suites.base import SUITES

POLICY = "streaming:budget=64,sink=4,window=8"
SPEC = f"""\
name: again
evaluate:
  policies: [none, "{POLICY}", "random:budget=64,window=8"]
  suites: {{refusal: {{items: 3}}}}
  context_tokens: [192]
  samples: 2
  temperature: 1.0
"""
HOSTILE = "</text><script>alert(1)</script>\"'&\u202e\x1b[31m\u2028"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained")
    (folder / "spec.yaml").write_text(SPEC)
    code, out, err = kvaudit("run", "--only", "evaluate", folder / "spec.yaml", "--out", folder / "run", "--threads", 1)
    assert code == 0, out + err
    return folder / "run"


def records(run: Path) -> list[Record]:
    return [
        Record.from_json(line)
        for path in sorted(run.glob("records/*.jsonl"))
        for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    ]


def where(record: Record) -> AnswerPlace:
    return AnswerPlace(record.item_id, record.arm, record.train_seed, None, record.sample_index)


def explain(run: RunFolder, place: AnswerPlace, policies: list[Policy]) -> list[RerunAnswer]:
    return [answer for _, answer in run_measure(Explain(run, place, policies))]


def rewritten(path: Path, **changes: object) -> Record:
    """The first record of a file with other fields, sealed again."""
    first, *rest = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    changed = dataclasses.replace(Record.from_json(first), **changes)  # type: ignore[arg-type]
    path.write_text("\n".join([changed.to_json(), *rest]) + "\n")
    seal = path.with_suffix(".done.json")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    seal.write_text(json.dumps(json.loads(seal.read_text()) | {"sha256": digest}))
    return changed


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_every_recorded_answer_comes_out_again(finished: Path) -> None:
    opened = existing_run(finished)
    kept = records(finished)
    assert len(kept) == 18
    for record in kept[::5]:
        (one,) = explain(opened, where(record), [parse_policy(record.policy)])
        assert one.is_same
        assert (one.row.grade.facets, one.row.survival) == (record.facets, record.survival)
        assert one.row.spans == record.spans  # which was written from a prefill shared with other policies
        assert "question" in record.spans
        assert sum(one.held_shares) / len(one.held_shares) == pytest.approx(record.retention, abs=1e-9)
        depth = one.shading.depth[ALL_TOKENS]
        assert sum(depth) / len(depth) == pytest.approx(record.retention, abs=1e-9)
        assert len(one.shading.pieces) == len(one.held_shares) >= record.prompt_tokens


def test_what_is_kept_for_the_pages_is_what_explain_finds(run: Path) -> None:
    opened = existing_run(run)
    record = next(record for record in records(run) if record.policy == parse_policy(POLICY).canonical)
    unit = next(run.glob(f"records/*{record.policy_hash}*.jsonl"))
    wanted = {unit.stem: {AnswerKey(record.item_id, record.sample_index)}}
    for served in (1, 0):  # the second time nothing is served
        assert len(run_measure(Shade(opened, wanted))) == served
    (shading,) = read_shadings(run, unit.stem).values()
    (one,) = explain(opened, where(record), [parse_policy(record.policy)])
    assert shading is not None
    assert shading == one.shading
    places = {name: [(at.message, at.start, at.end) for at in kept.places] for name, kept in one.row.spans.items()}
    for name, ((message, start, end), *_) in places.items():
        said = record.transcript[message].content[start:end]
        assert said in "".join(shading.pieces[token] for token in shading.marks[name])
    rewritten(unit, seconds=1.0)
    assert read_shadings(run, unit.stem) == {}


def test_shading_that_was_touched_is_one_line(run: Path) -> None:
    unit = next(run.glob("records/*.jsonl")).stem
    write_shadings(run, unit, {AnswerKey("a", 0): None})
    path = shading_file(run, unit)
    path.write_text(path.read_text().replace('"a"', '"b"'))
    with pytest.raises(DataError, match=r"is not as it was written; delete it"):
        read_shadings(run, unit)


def test_another_policy_stands_beside_and_is_not_on_record(finished: Path, tmp_path: Path) -> None:
    record = records(finished)[0]
    picture = tmp_path / "deep" / "prompt.svg"
    policies = ("--policy", "none", "--policy", "streaming", "--policy", "knorm:budget=40")
    code, out, err = kvaudit("explain", finished, record.item_id, *policies, "--svg", picture)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("recorded")] == [
        *["recorded    yes: the same answer, text for text"] * 2,
        "recorded    no: the run did not serve this policy",
    ]
    assert lines.count("by layer    100% 100% 100% 100%") == 1
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.count('class="head"') == 3
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_an_answer_that_differs_is_said(run: Path) -> None:
    path = next(run.glob("records/*--30471b7f240f--refusal--192.jsonl"))
    old = Record.from_json(path.read_text(encoding="utf-8").rstrip("\n").split("\n")[0])
    changed = rewritten(path, transcript=(*old.transcript[:-1], Message(Role.ASSISTANT, f"Else.{HOSTILE}")))
    _, out, _ = kvaudit("explain", run, changed.item_id, "--sample", changed.sample_index)
    assert "recorded    ANOTHER ANSWER" in out
    assert not set("\x1b\u202e\u2028") & set(out)


def test_names_that_are_not_in_the_run_are_one_line_errors(finished: Path) -> None:
    item = records(finished)[0].item_id
    assert f"similar names: {item}" in refused("explain", finished, item + "x")
    assert "is not among the finished answers of base seed 0" in refused("explain", finished, "nothing")
    assert "no arm 'smd' with seed 0; it has base 0" in refused("explain", finished, item, "--arm", "smd")
    assert "--sample is 2, the run has 2" in refused("explain", finished, item, "--sample", 2)
    assert "choose one with --length" in refused("explain", finished, item, "--length", 96)
    assert "unknown policy" in refused("explain", finished, item, "--policy", "nosuch")
    engine = refused("explain", finished, item, "--policy", "openvino:KV_CACHE_PRECISION=u4")
    assert "engine openvino, whose cache cannot be inspected" in engine


def test_what_the_answer_follows_from_must_be_as_it_was(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = records(run)[0]
    with pytest.raises(DataError, match=r"has weights .* the run was made with 000000000000"):
        load_checkpoint(existing_run(run), "base", 0, "0" * 64)
    monkeypatch.setattr(type(SUITES.get(record.suite)()), "version", "99")
    assert f"suite {record.suite} is version 99" in refused("explain", run, record.item_id)


def test_a_run_without_transcripts_or_with_spoilt_records_is_one_line(run: Path) -> None:
    path = sorted(run.glob("records/*.jsonl"))[0]
    for other in sorted(run.glob("records/*.jsonl")):
        changed = rewritten(other, transcript=())
    assert "holds no transcripts" in refused("explain", run, changed.item_id)
    path.write_text(path.read_text() + "\n")
    assert "its seal says" in refused("explain", run, changed.item_id)


def test_answers_of_an_endpoint_or_of_another_run_are_not_served(run: Path) -> None:
    opened = existing_run(run)
    opened.note(judged={"run": "elsewhere"})
    with pytest.raises(SpecError, match="answers of another run"):
        explain(opened, where(records(run)[0]), [parse_policy("none")])


def test_the_picture_holds_hostile_tokens_as_text_and_marks_what_is_gone() -> None:
    pieces, held = [HOSTILE, "\n", "x" * (COLUMNS + 5), "", "gone"], [0.25, 1.0, 0.5, 1.0, 0.0]
    policy, shading = SimpleNamespace(canonical=HOSTILE), SimpleNamespace(pieces=pieces)
    answer = SimpleNamespace(policy=policy, outcome=HOSTILE, shading=shading, held_shares=held)
    drawn = shading_svg(HOSTILE, [cast(RerunAnswer, answer)])
    root = ElementTree.fromstring(drawn)
    name = "{http://www.w3.org/2000/svg}"
    assert {element.tag.removeprefix(name) for element in root.iter()} == {
        *("svg", "title", "desc", "style", "rect", "text", "g"),
    }
    assert [text.text for text in root.iter(f"{name}text") if text.get("class") == "gone"] == ["gone"]
    shades = [float(rect.get("fill-opacity", 0)) for rect in root.iter(f"{name}rect") if rect.get("class") == "held"]
    assert shades[0] == pytest.approx(0.25 * 0.55, abs=1e-3)
    assert shades.count(pytest.approx(0.5 * 0.55, abs=1e-3)) == 2  # a token that is longer than a line
    assert not set("\x1b\u202e\u2028") & set(drawn)


def test_a_checkpoint_that_was_deleted_is_named_by_its_arm_and_seed(finished: Path) -> None:
    with pytest.raises(DataError, match="holds no checkpoint of dense seed 21 any more; put "):
        load_checkpoint(existing_run(finished), "dense", 21, "")
