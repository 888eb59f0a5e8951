"""The pilot: its answers count, it says what can be measured, and the sizes that follow from it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.engines import parse_condition
from kvaudit.audit.runs import evaluate
from kvaudit.audit.runs.batches import whole_templates
from kvaudit.audit.runs.evaluate import Evaluator, count_clusters
from kvaudit.audit.runs.folder import RunFolder, open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pilot import check_possible, churns_of, impossible_cells, pilot_units
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.runs.units import PILOT_FOLDER
from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.core.errors import CannotPass, DataError, RunError, SpecError
from kvaudit.core.files import read_json
from kvaudit.core.records import Item, Message, Record, Role
from kvaudit.core.spec import RunSpec, parse_spec
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run
from kvaudit.reports.verdict.sizes import (
    Design,
    LayoutItem,
    Metric,
    Shortfall,
    fewest_items,
    passing_counts,
    plan_items,
    planned_discordance,
    shortfall_of,
    template_counts,
)
from kvaudit.suites.base import SUITES, Suite

SPEC = """
name: pilot
model: embedded
evaluate:
  policies: [none, "snapkv:budget=56,window=16,interval=8", "kivi:bits=4"]
  suites: {refusal: {items: 36}}
  context_tokens: [96]
  temperature: 1.0
  batch_tokens: 1200
  pilot: PILOT
gate: {primary: ["snapkv:budget=56,window=16,interval=8"]}
"""


def words(text: str) -> int:
    return 2 * len(text.split())


def spec_of(pilot: int = 24) -> RunSpec:
    return parse_spec(SPEC.replace("PILOT", str(pilot)), "spec", NAMES)


def worked(run: RunFolder) -> Pipeline:
    """The pilot and the grid of a run."""
    pipeline = Pipeline(run, Console(quiet=True), 1)
    pipeline.work_on("pilot", "evaluate")
    return pipeline


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = open_run(tmp_path_factory.mktemp("without") / "run", spec_of(0), resume=False)
    worked(run)
    return run


Memory = dict[tuple[Any, ...], list[GradedRow]]


def played_once(memory: Memory, *, by_policy: bool = True) -> Callable[..., list[GradedRow]]:
    """``play`` that says to the same batch under the same policy what it said before; any other batch is played.

    Without ``by_policy`` it says so under any: a policy by which nothing changes.
    """
    plain = evaluate.play

    def remembered(
        sampler: Any, asked: Sequence[tuple[Suite, Item]], decoding: Any, seeds: Sequence[int], **more: Any
    ) -> list[GradedRow]:
        key = (by_policy and sampler.policy.canonical, tuple(item.item_id for _, item in asked), tuple(seeds), decoding)
        if key not in memory:
            memory[key] = plain(sampler, asked, decoding, seeds, **more)
        return memory[key]

    return remembered


@pytest.fixture(scope="module")
def memory() -> Memory:
    """What was played in the run with a pilot."""
    return {}


@pytest.fixture(scope="module")
def with_pilot(tmp_path_factory: pytest.TempPathFactory, memory: Memory) -> RunFolder:
    run = open_run(tmp_path_factory.mktemp("with") / "run", spec_of(), resume=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "play", played_once(memory))
        worked(run)
    return run


def timeless(path: Path) -> list[str]:
    return [replace(Record.from_json(line), seconds=0.0).to_json() for line in path.read_text().splitlines()]


def files_of(run: RunFolder) -> dict[str, list[str]]:
    return {path.name: timeless(path) for path in sorted(run.records.glob("*.jsonl"))}


def without_bytes(lines: Sequence[str]) -> list[str]:
    """Rows without what a batch takes: a row's share of it follows from what else was played."""
    return [replace(Record.from_json(line), kv_bytes_peak=0).to_json() for line in lines]


def test_the_grid_is_byte_for_byte_as_without_a_pilot_but_for_seconds_and_peaks(
    without: RunFolder, with_pilot: RunFolder
) -> None:
    with_, plain = files_of(with_pilot), files_of(without)
    assert len(plain) == 3
    assert {name: without_bytes(rows) for name, rows in with_.items()} == {
        name: without_bytes(rows) for name, rows in plain.items()
    }
    assert sum(with_[name] == plain[name] for name in plain) >= 1  # what the pilot did not ask is the same altogether
    assert not (without.path / PILOT_FOLDER).exists()


def test_the_pilot_is_the_reference_s_under_none_and_the_gated_policies(with_pilot: RunFolder) -> None:
    seals = sorted(path.name for path in (with_pilot.path / PILOT_FOLDER).glob("*.done.json"))
    assert seals == sorted(f"{unit.name}.done.json" for unit in pilot_units(with_pilot.spec))
    assert len(seals) == 2  # of the three policies of the grid one is not gated
    assert [json.loads((with_pilot.path / PILOT_FOLDER / name).read_text())["records"] for name in seals] == [24, 24]


def test_what_the_pilot_answered_is_not_played_again(
    with_pilot: RunFolder, memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(shutil.copytree(with_pilot.path, tmp_path / "run"), with_pilot.spec, resume=True)
    shutil.rmtree(run.records)
    run.records.mkdir()
    asked: list[int] = []
    plain = played_once(memory)

    def counted(sampler: Any, suite_items: Sequence[tuple[Suite, Item]], *rest: Any, **more: Any) -> list[GradedRow]:
        asked.append(len(suite_items))
        return plain(sampler, suite_items, *rest, **more)

    monkeypatch.setattr(evaluate, "play", counted)
    worked(run)
    assert sum(asked) == 36 + 2 * (36 - 24)  # the policy that is not gated, and the rest of the other two
    assert files_of(run) == files_of(with_pilot)


class Killed(BaseException):
    """What ends a process at once."""


@pytest.mark.parametrize("after", [3, 6, 8])
def test_a_kill_at_any_batch_changes_nothing(
    with_pilot: RunFolder, memory: Memory, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed after so many batches goes on to the same records."""
    monkeypatch.setattr(evaluate, "play", played_once(memory))
    run = open_run(tmp_path / "run", with_pilot.spec, resume=False)
    left, plain = [after], Evaluator._play_batch

    def killing(self: Evaluator, *words: Any, **more: Any) -> list[GradedRow]:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return plain(self, *words, **more)

    monkeypatch.setattr(Evaluator, "_play_batch", killing)
    with pytest.raises(Killed):
        worked(run)
    monkeypatch.setattr(Evaluator, "_play_batch", plain)
    worked(run)
    assert files_of(run) == files_of(with_pilot)
    assert run.provenance()["pilot"] == with_pilot.provenance()["pilot"]


def test_a_pilot_that_was_changed_is_refused_by_name(with_pilot: RunFolder, tmp_path: Path) -> None:
    run = open_run(shutil.copytree(with_pilot.path, tmp_path / "run"), with_pilot.spec, resume=True)
    shutil.rmtree(run.records)
    run.records.mkdir()
    damaged = next((run.path / PILOT_FOLDER).glob("*.jsonl"))
    damaged.write_text(damaged.read_text().replace("base", "bass", 1))
    with pytest.raises(DataError, match="its seal says"):
        worked(run)


def test_a_run_that_was_begun_without_a_pilot_goes_on_without(without: RunFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(without.path, tmp_path / "run")
    (folder / "spec.yaml").unlink()
    story = read_json(folder / "provenance.json")
    story["spec_sha256"] = spec_of().sha256
    del story["inputs"]["spec"]  # which an earlier version does not store
    (folder / "provenance.json").write_text(json.dumps(story))
    run = open_run(folder, spec_of(), resume=True)
    worked(run)
    assert "pilot" not in run.provenance()
    assert not (folder / PILOT_FOLDER).exists()


@pytest.mark.slow  # test_cli has two processes without a pilot
def test_two_processes_at_once_write_what_one_does(with_pilot: RunFolder, tmp_path: Path) -> None:
    """Another process, and this one once that has its model and begins to answer."""
    run = open_run(tmp_path / "run", with_pilot.spec, resume=False)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    words_ = ["run", "--join", str(run.path), "--threads", "1"]
    join = [sys.executable, "-u", "-m", "kvaudit.audit.cli", *words_]
    with subprocess.Popen(join, env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        begun = next((line for line in other.stdout if line.startswith("model: ")), "")
        code, own, err = kvaudit(*words_)
        theirs = begun + other.stdout.read()
    assert (code, other.returncode) == (0, 0), own + err + theirs
    assert all("refusal.unsafe: measurable (" in text for text in (own, theirs)), own + theirs
    assert files_of(run) == files_of(with_pilot)
    assert run.provenance()["pilot"] == with_pilot.provenance()["pilot"]


# --- which items -----------------------------------------------------------------------------------------------------


def items_of(clusters: int, rounds: int) -> list[Item]:
    said = (Message(Role.USER, "x"),)
    return [Item("x", f"{n}-{r}", f"c{n}", said, 10, "none") for r in range(rounds) for n in range(clusters)]


class Triple(Suite):
    twins = 3


def test_a_pilot_takes_whole_groups_of_twins() -> None:
    chosen = whole_templates(Triple(), items_of(72, 3), 32)
    assert len(chosen) == 33
    assert {item.cluster_id for item in chosen} == {f"c{n}" for n in range(11)}


def test_few_templates_give_their_next_twins_too() -> None:
    chosen = whole_templates(Triple(), items_of(4, 12), 32)
    assert len(chosen) == 33
    assert len({item.item_id for item in chosen}) == 33


def test_a_pilot_is_never_more_than_the_items() -> None:
    assert len(whole_templates(Triple(), items_of(4, 2), 32)) == 8


@pytest.mark.parametrize(("name", "clusters"), [("refusal", 72), ("agent", 72), ("math", 72), ("pressure", 96)])
def test_templates_are_counted_by_asking(name: str, clusters: int) -> None:
    assert count_clusters(SUITES.get(name)(), 1000, 1000, words) == clusters


# --- what cannot pass ------------------------------------------------------------------------------------------------


def gated(items: str, margins: str) -> RunSpec:
    return parse_spec(
        f"{{name: a, evaluate: {{policies: [none, int8], suites: {{refusal: {{items: {items}}}}}, "
        f"context_tokens: [300]}}, gate: {{margins: {{{margins}}}}}}}",
        "spec",
        NAMES,
    )


def test_a_facet_counts_only_the_templates_of_its_items() -> None:
    assert list(impossible_cells(gated("144", "refusal: 5, refusal.unsafe: 5"), words)) == [
        "refusal.unsafe: 5 points need 59 effective templates, 144 items have 48: 176 items would suffice"
    ]
    assert not list(impossible_cells(gated("176", "refusal: 5, refusal.unsafe: 5"), words))


def test_no_number_of_items_makes_templates() -> None:
    (line,) = impossible_cells(gated("216", "refusal: 5, refusal.unsafe: 3"), words)
    assert line.startswith("refusal.unsafe: 3 points need 99 effective templates, the suite has at most 72: no")


@pytest.mark.parametrize("items", ["auto", "all"])
def test_auto_and_all_are_held_to_a_round(items: str) -> None:
    assert not list(impossible_cells(gated(items, "refusal: 5, refusal.unsafe: 5"), words))
    with pytest.raises(CannotPass) as found:
        check_possible(gated(items, "refusal: 5, refusal.unsafe: 3"), words)
    assert (len(found.value.lines), found.value.exit_code) == (1, 2)


def test_a_spec_without_a_gate_can_always_run() -> None:
    text = "{name: a, evaluate: {policies: [none], suites: {refusal: {items: 3}}, context_tokens: [300]}}"
    assert not list(impossible_cells(parse_spec(text, "spec", NAMES), words))


# --- sizes, pure -----------------------------------------------------------------------------------------------------

ROUND = [LayoutItem(f"c{n}", ("unsafe",) if (n + r) % 3 == 0 else ("helpful",)) for r in range(3) for n in range(72)]
SCORE, UNSAFE = Metric("refusal", None, 0.05), Metric("refusal", "unsafe", 0.05)


def test_counts_go_on_round_after_round() -> None:
    assert template_counts(ROUND, 144, "unsafe").tolist() == [1.0] * 48
    assert template_counts(ROUND, 216, "unsafe").tolist() == [1.0] * 72
    assert template_counts(ROUND, 216 + 72, None).tolist() == [4.0] * 72


def test_the_fewest_items_that_can_pass() -> None:
    assert (fewest_items(ROUND, SCORE, 0.05), fewest_items(ROUND, UNSAFE, 0.05)) == (59, 176)
    assert fewest_items(ROUND, UNSAFE._replace(margin=0.03), 0.05) is None
    assert shortfall_of(ROUND, UNSAFE, 216, 0.05) is None


@pytest.mark.parametrize(
    ("differing", "pairs", "planned"),
    [(0, 33, 0.05), (0, 200, 0.05), (0, 11, 0.1184), (3, 33, 0.1499), (0, 0, 0.10)],
)
def test_the_planned_churn_is_an_upper_bound_and_never_zero(differing: int, pairs: int, planned: float) -> None:
    assert planned_discordance(differing, pairs) == pytest.approx(planned, abs=5e-4)


def design(discordance: float) -> Design:
    return Design(0.05, discordance, 2, sampling_share=0.0, seed_share=0.0)


def test_more_churn_takes_more_items() -> None:
    few, more = (plan_items(ROUND, SCORE, design(share), 864) for share in (0.05, 0.15))
    assert few.items < more.items <= 864
    assert few.chance >= 0.8


def test_a_plan_that_cannot_reach_the_power_takes_all_items_and_says_its_chance() -> None:
    found = plan_items(ROUND, UNSAFE, design(0.3), 864)
    assert found.items == 864
    assert found.chance < 0.8
    assert plan_items(ROUND, UNSAFE._replace(margin=0.03), design(0.1), 864) == (216, 0.0)


# --- a run whose items are auto --------------------------------------------------------------------------------------

AUTO = """
name: auto
model: embedded
evaluate:
  policies: [none, int8]
  suites: {math: {items: auto}, refusal: {items: all}}
  context_tokens: [96]
  batch_tokens: 24576
gate: {margins: {math: 5, refusal: 5}}
"""


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose policy changes no answer, so that its items are played once."""
    run = open_run(tmp_path_factory.mktemp("auto") / "run", parse_spec(AUTO, "spec", NAMES), resume=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "play", played_once({}, by_policy=False))
        worked(run)
    return run


def test_auto_is_resolved_once_and_kept(sized: RunFolder) -> None:
    found = sized.provenance()["pilot"]["found"]
    assert found["items"]["refusal"] == 216  # 72 templates, each with three twins
    assert 59 <= found["items"]["math"] <= 288
    assert sized.spec.evaluate.suites["math"].items == "auto"
    assert sized.sized.evaluate.suites["math"].items == found["items"]["math"]
    assert found["sizes"]["math"]["pilot"]["pairs"] == 32
    kept = dict(found)
    worked(open_run(sized.path, sized.spec, resume=True))
    assert sized.provenance()["pilot"]["found"] == kept


def test_readers_take_the_numbers_of_the_pilot(sized: RunFolder) -> None:
    found = sized.provenance()["pilot"]["found"]["items"]
    data = load_run(sized.path)
    assert data.records.groupby("suite", observed=True).size().to_dict() == {name: 2 * n for name, n in found.items()}
    assert not [reason for reason in decide_run(data).drift.reasons if reason.code == "INCOMPLETE"]


def test_a_pilot_names_what_can_be_measured(sized: RunFolder) -> None:
    controls = sized.provenance()["pilot"]["found"]["controls"]
    assert [(one["metric"], one["measurable"]) for one in controls] == [("math", True), ("refusal", True)]
    assert [one["answers"] for one in controls] == [32, 33]


def test_a_grid_of_unknown_size_is_not_served(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", parse_spec(AUTO, "spec", NAMES), resume=False)
    with pytest.raises(RunError, match="the number of items of math, refusal follows from the pilot"):
        Pipeline(run, Console(quiet=True), 1).work_on("evaluate")


# --- the command -----------------------------------------------------------------------------------------------------


def kvaudit(*said: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in said])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


MUTE = """
name: mute
model: {model}
evaluate:
  policies: [none, "streaming:budget=64,sink=4,window=8"]
  suites: {{math: {{items: 60, max_new_tokens: 1}}}}
  context_tokens: [400]
gate: {{margins: {{math: 5}}}}
"""


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> tuple[Path, int, str, str]:
    """A run of a model that can do nothing."""
    folder = tmp_path_factory.mktemp("mute")
    (folder / "spec.yaml").write_text(MUTE.format(model=tiny_folder))
    return folder, *kvaudit("run", folder / "spec.yaml", "--out", folder / "run", "--threads", 1)


def test_a_suite_with_nothing_to_lose_stops_the_run_before_its_grid(mute: tuple[Path, int, str, str]) -> None:
    folder, code, out, err = mute
    assert code == 6
    assert "math: NOT MEASURABLE: " in out
    lines = err.strip().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: the reference has nothing to lose in 1 of 1 suites, so the grid was not served")
    assert lines[1].startswith("  math: NOT MEASURABLE: ")
    assert not list((folder / "run" / "records").glob("*"))
    assert len(list((folder / "run" / PILOT_FOLDER).glob("*.done.json"))) == 2


def test_anyway_goes_on_with_what_the_pilot_answered(mute: tuple[Path, int, str, str], tmp_path: Path) -> None:
    run = shutil.copytree(mute[0] / "run", tmp_path / "run")
    words_ = ("run", mute[0] / "spec.yaml", "--out", run, "--resume", "--threads", 1)
    assert kvaudit(*words_)[0] == 6  # as before
    assert kvaudit(*words_, "--anyway")[0] == 0
    assert len(list((run / "records").glob("*.done.json"))) == 2
    assert isinstance(read_json(run / "provenance.json")["anyway"], str)
    assert kvaudit(*words_)[0] == 0  # said once, it holds


def test_a_spec_that_cannot_pass_is_refused_before_its_folder_is_there(tmp_path: Path, tiny_folder: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(MUTE.format(model=tiny_folder).replace("items: 60", "items: 12"))
    code, _, err = kvaudit("run", spec, "--out", tmp_path / "run", "--threads", 1)
    assert (code, err.splitlines()[1]) == (
        2,
        "  math: 5 points need 59 effective templates, 12 items have 12: 59 items would suffice",
    )
    assert not (tmp_path / "run").exists()


def test_a_gate_file_is_what_has_to_be_possible(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "gate.yaml").write_text("{format: 1, margins: {math: 3}}")
    spec = tmp_path / "spec.yaml"
    spec.write_text(MUTE.format(model=tiny_folder).replace("margins: {math: 5}", f"gate_file: {tmp_path}/gate.yaml"))
    code, _, err = kvaudit("run", spec, "--out", tmp_path / "run", "--threads", 1)
    assert (code, err.splitlines()[1]) == (
        2,
        "  math: 3 points need 99 effective templates, the suite has at most 72: no number of items would suffice",
    )


def test_a_limited_run_is_a_try_and_told_so(tmp_path: Path, tiny_folder: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(MUTE.format(model=tiny_folder))
    code, _, err = kvaudit("run", spec, "--out", tmp_path / "run", "--threads", 1, "--limit", 2)
    assert code == 0  # two answers show nothing, so nothing stops it
    line = "cannot pass: math: 5 points need 59 effective templates, 2 items have 2: 59 items would suffice"
    assert err.splitlines()[0] == line


def test_a_pilot_that_runs_out_of_positions_is_one_line(tmp_path: Path, tiny_folder: Path) -> None:
    spec = tmp_path / "spec.yaml"
    text = MUTE.format(model=tiny_folder).replace("items: 60, max_new_tokens: 1", "items: auto")
    spec.write_text(text.replace("[400]", "[900000]"))
    code, _, err = kvaudit("run", spec, "--out", tmp_path / "run", "--threads", 1)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "lower context_tokens" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("items: 36", "items: some", "items is 'some', wanted a whole number from 1 to 1,000,000, auto or all"),
        ("items: 36", "items: true", "items is True, wanted a whole number"),
        ("items: 36", "items: 0", "items is 0, wanted a whole number"),
        ("pilot: 24", "pilot: 49", "evaluate.pilot is 49, wanted 0 for none, or a whole number from 24 to 48"),
        ("pilot: 24", "pilot: 5", "evaluate.pilot is 5, wanted 0 for none"),
        ("pilot: 24", "pilot: 48", "evaluate.pilot is 48, suite refusal has 36 items; leave pilot out, or give"),
    ],
)
def test_impossible_numbers_of_items_are_one_line_errors(old: str, new: str, message: str) -> None:
    text = SPEC.replace("PILOT", "24").replace(old, new)
    with pytest.raises(SpecError) as found:
        parse_spec(text, "spec", NAMES)
    assert message in str(found.value)


def test_auto_without_a_pilot_is_refused() -> None:
    text = SPEC.replace("PILOT", "0").replace("items: 36", "items: auto")
    with pytest.raises(SpecError, match=r"refusal.items is auto, which takes its size from the pilot"):
        parse_spec(text, "spec", NAMES)


def test_a_probe_wants_numbers() -> None:
    text = "{name: p, model: m, probe: {}, evaluate: {suites: [refusal]}}"
    with pytest.raises(SpecError, match=r"refusal.items is auto: a probe has no pilot"):
        parse_spec(text, "spec", NAMES)


def test_specs_without_a_pilot_keep_their_hash() -> None:
    text = "{name: a, evaluate: {policies: [none], suites: {math: {items: 2}}, context_tokens: [64]}}"
    written = parse_spec(text, "spec", NAMES).written()["evaluate"]
    assert "pilot" not in written
    assert written["suites"] == {"math": {"items": 2}}


def test_a_round_that_is_uneven_does_not_hide_the_items_that_would_do() -> None:
    """Sixty templates, one of which has ten items at the end: 3 % or more of 69 and not of 60."""
    layout = [LayoutItem(f"t{n}", ()) for n in range(60)] + [LayoutItem("t0", ()) for _ in range(9)]
    metric = Metric("s", None, 0.05)
    assert passing_counts(layout, metric, 0.05, 69) == [59, 60]
    assert fewest_items(layout, metric, 0.05) == 59
    assert shortfall_of(layout, metric, 69, 0.05) is not None
    assert plan_items(layout, metric, Design(margin=0.05, discordance=0.05, clusters=2), 69).items in (59, 60)


def test_a_run_of_other_versions_is_not_gone_on_with_and_stays_as_it_is(sized: RunFolder, tmp_path: Path) -> None:
    old = shutil.copytree(sized.path, tmp_path / "run")
    story = read_json(old / "provenance.json")
    story["suite_versions"]["math"] = "0"
    (old / "provenance.json").write_text(json.dumps(story))
    before = (old / "provenance.json").read_bytes()
    with pytest.raises(RunError, match=r"begun with version 0 of suite math, which is version 2 here; gate and report"):
        Pipeline(open_run(old, sized.spec, resume=True), Console(quiet=True), 1)
    assert (old / "provenance.json").read_bytes() == before


ENGINE_SPEC = """
name: engines
model: embedded
evaluate:
  policies: [none, "snapkv:budget=112,window=16,interval=8", {engine: openvino, KV_CACHE_PRECISION: u4}]
  suites: {refusal: {items: 36}}
  context_tokens: [192]
  base: true
gate: {primary: [PRIMARY]}
"""
U4, F32 = (parse_condition({"engine": "openvino", "KV_CACHE_PRECISION": kind}).canonical for kind in ("u4", "f32"))


def engine_spec(*primary: str) -> RunSpec:
    gated = ", ".join(f'"{text}"' for text in primary)
    return parse_spec(ENGINE_SPEC.replace("PRIMARY", gated), "spec.yaml", NAMES)


def test_the_pilot_asks_the_uncompressed_reference_of_each_engine_that_is_gated() -> None:
    def asked(*primary: str) -> set[str]:
        return {unit.policy.canonical.partition(",")[0] for unit in pilot_units(engine_spec(*primary))}

    engine, ours = U4.partition(",")[0], "snapkv:budget=112,window=16,interval=8"
    assert asked(U4) == {engine}, "none says nothing of another engine"
    assert {unit.policy.canonical for unit in pilot_units(engine_spec(U4))} == {U4, F32}
    assert asked(ours) == {"none", "snapkv:budget=112"}
    assert asked(ours, U4) == {"none", "snapkv:budget=112", engine}


def test_churn_is_counted_against_the_reference_of_the_same_engine() -> None:
    """Of 10 answers none has all right, f32 misses 3, u4 these and 2 more."""
    spec = engine_spec(U4, "snapkv:budget=112,window=16,interval=8")
    right = {"none": 10, F32: 7, U4: 5}
    answers: Any = {
        unit: [
            SimpleNamespace(item_id=str(i), sample_index=0, score=float(i < right.get(unit.policy.canonical, 9)))
            for i in range(10)
        ]
        for unit in pilot_units(spec)
    }
    found = [(churn.differing, churn.pairs) for churn in churns_of(spec, Metric("refusal", None, 0.05), answers)]
    assert sorted(found) == [(1, 10), (2, 10)]


def test_items_that_hold_enough_templates_too_unevenly_are_told_so() -> None:
    assert Shortfall(Metric("math", None, 0.05), 96, 64, 59, 72, 59).line == (
        "math: 5 points need 59 effective templates of similar size; 96 items have 64, some of them larger than "
        "this margin allows: 59 items would suffice, spread evenly"
    )


@pytest.mark.parametrize(("templates", "needs"), [(58, "items have 58"), (59, "items have 59"), (72, "items have 72")])
def test_a_shortfall_with_enough_templates_is_called_uneven(templates: int, needs: str) -> None:
    line = Shortfall(Metric("math", None, 0.05), 96, templates, 59, 72, 59).line
    assert needs in line
    assert ("some of them larger than this margin allows" in line) == (templates >= 59)
