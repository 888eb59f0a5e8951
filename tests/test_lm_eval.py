"""Tasks of the real lm-evaluation-harness as suites: asked, answered and graded as any other, over local rows."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lm_eval_world import row, settle, write_tasks
from test_evaluate_grid import evaluated, timeless

from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.sampling.conversations import play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import DataError, RunError, SpecError
from kvaudit.core.records import Item, Message, Outcome, Role
from kvaudit.core.spec import parse_spec
from kvaudit.core.text import install_command
from kvaudit.suites import harness_task
from kvaudit.suites.base import SUITES, Suite
from kvaudit.suites.lm_eval import LmEval
from kvaudit.suites.task_family import TaskTimeout, time_limit

SNAPKV = "snapkv:budget=48,window=8,interval=1,chunk=8"


@pytest.fixture(scope="module", autouse=True)
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tasks(tmp_path_factory.mktemp("tasks"))
    with pytest.MonkeyPatch.context() as patch:
        settle(tmp_path_factory.mktemp("data"))
        patch.setenv("KVAUDIT_LM_EVAL_TASKS", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model()


def suite(name: str) -> Suite:
    return SUITES.get(f"lm-eval:{name}")()


def words(text: str) -> int:
    return len(text.split())


def items(name: str, n: int = 12, **options: Any) -> list[Item]:
    asked = {"split": "eval", "seed": 1, "context_tokens": 200, "count_tokens": words, **options}
    return suite(name).items(n=n, **asked)


def number_of(item: Item) -> int:
    return int(item.payload["document"])


def grade(name: str, item: Item, answer: str) -> Any:
    return suite(name).grade(item, (*item.messages, Message(Role.ASSISTANT, answer)))


def refusal(name: str) -> str:
    with pytest.raises((SpecError, DataError)) as caught:
        SUITES.get(f"lm-eval:{name}")
    return str(caught.value)


@pytest.mark.parametrize("policy", ["none", SNAPKV])
def test_a_task_is_answered_under_a_policy_as_by_the_sampler_itself_token_for_token(
    model: LoadedModel, policy: str
) -> None:
    asked = items("door", 4)
    sampler, decoding = Sampler(model, parse_policy(policy)), Decoding(12, temperature=0.8)
    rows = play(sampler, [(suite("door"), item) for item in asked], decoding, list(range(4)))
    for seed, (item, played) in enumerate(zip(asked, rows, strict=True)):
        written = row(number_of(item))
        prompt = model.chat.prompt([Message(Role.SYSTEM, written["system"]), Message(Role.USER, written["user"])])
        (direct,) = sampler.open([prompt.ids], [seed], roles=[prompt.roles]).decode(decoding)
        assert direct is not None
        assert played.rollout.ids.tolist() == [*prompt.ids, *direct.ids]
        drawn = played.rollout.sampler_logprobs[played.rollout.sampled].tolist()
        assert drawn == pytest.approx(direct.logprobs, abs=1e-4)  # a batch is added up in another order, by processor


def test_compression_shows_in_the_scores_of_a_task(model: LoadedModel) -> None:
    pairs = [(suite("door"), item) for item in items("door")]
    scores = [
        sum(
            row.grade.score or 0
            for row in play(Sampler(model, parse_policy(policy)), pairs, Decoding(1, 0.0), [0] * 12)
        )
        for policy in ("none", SNAPKV)
    ]
    assert scores[0] >= 10 > scores[1]


def test_the_grid_asks_a_task_and_goes_on_where_it_stopped(tmp_path: Path, model: LoadedModel) -> None:
    text = f"""
name: harness
evaluate:
  policies: [none, "{SNAPKV}"]
  suites: {{"lm-eval:door@place": {{items: 6}}, lm-eval:door_choice: {{items: 4}}}}
  context_tokens: [200]
  samples: 2
  temperature: 0.7
"""
    spec = parse_spec(text, "spec", NAMES)
    run = evaluated(tmp_path / "run", spec, model)
    files = sorted(run.records.glob("*.jsonl"))
    assert len(files) == 4
    assert not any(":" in file.name for file in files)
    before = [timeless(file) for file in files]
    assert {record.cluster_id for record in before[0]} == {f"door-place-{n}" for n in range(3)}
    assert sorted(map(len, before)) == [8, 8, 12, 12]
    for file in files:
        file.write_bytes(file.read_bytes()[:-40])
        file.with_suffix(".done.json").unlink()
    assert [
        timeless(file) for file in sorted(evaluated(tmp_path / "run", spec, model).records.glob("*.jsonl"))
    ] == before


def test_a_document_is_an_item_and_a_cluster_or_a_column_is() -> None:
    assert sorted(map(number_of, items("door"))) == list(range(12))
    assert {item.cluster_id for item in items("door")} == {f"door-eval-{n}" for n in range(12)}
    visited = [item.cluster_id for item in items("door@place")]
    assert [set(visited[start : start + 3]) for start in range(0, 12, 3)] == [{f"door-place-{n}" for n in range(3)}] * 4


@pytest.mark.parametrize("name", ["door_copies", "door_shots_copies", "door_copies@place"])
def test_documents_that_ask_the_same_are_one_cluster(name: str) -> None:
    clusters = [item.cluster_id for item in sorted(items(name, context_tokens=0), key=number_of)]
    assert len(set(clusters[:8])) == 1
    assert suite(name).clusters == len(set(clusters)) == (3 if name.endswith("place") else 5)


def test_the_same_seed_asks_the_same_and_more_begins_with_less() -> None:
    assert items("door", 5) == items("door", 5) == items("door", 9)[:5]
    assert items("door", 9, seed=2) != items("door", 9)


def test_few_shot_examples_are_earlier_turns_and_those_of_the_harness() -> None:
    shots = [message.role for message in items("door_shots", 1)[0].messages]
    assert shots == [Role.SYSTEM, *[Role.USER, Role.ASSISTANT] * 2, Role.USER]
    one, all_ = items("door_shots", 1)[0], items("door_shots", 12)
    assert one.messages == next(item.messages for item in all_ if item.item_id == one.item_id)


def test_the_training_split_of_a_task_is_its_own() -> None:
    assert {item.item_id for item in items("door_shots", 4, split="train")} == {
        f"door_shots-train-{n}" for n in range(4)
    }
    with pytest.raises(SpecError, match="4 items requested, but the task has 0 documents for train"):
        items("door", 4, split="train")


def test_answers_are_graded_by_the_tasks_metric_up_to_where_they_end() -> None:
    (item,) = items("door", 1)
    right = suite("door").gold(item)[0]
    assert right == row(number_of(item))["answer"]
    assert grade("door", item, right).facets == {"solved": True, "well_formed": True}
    assert grade("door", item, right + "\n\nAnd more.").score == 1.0
    assert (grade("door", item, "x").outcome, grade("door", item, "x").score) == (Outcome.UNDESIRED, 0.0)
    assert grade("door", item, "\n\nx").outcome is Outcome.DEGENERATE
    assert grade("door_wrong", item, right).score == 0.0


def test_a_metric_and_its_filter_can_be_named() -> None:
    (item,) = items("door_filtered", 1)
    code = row(number_of(item))["answer"].split()[-1].rstrip(".")
    assert grade("door_filtered", item, suite("door").gold(item)[0]).score == 1.0
    assert suite("door_filtered:exact_match,last").version == suite("door_filtered").version
    found = suite("door_filtered:exact_match,last")._task._filter({}, f"It is {code}.")  # type: ignore[attr-defined]
    assert found == code
    assert "has no filter 'first'; it has as-said, last" in refusal("door_filtered:exact_match,first")


def test_options_are_weighed_as_the_metric_does() -> None:
    (item,) = items("door_choice", 1)
    options = suite("door_choice").options(item)
    assert options == tuple(row(number_of(item))["options"])
    assert suite("door_choice").weigh(item, [-10.0] * 5) == [-10.0] * 5
    assert suite("door_choice:acc_norm").weigh(item, [-10.0] * 5) == [-10.0 / len(text) for text in options]
    right = row(number_of(item))["right"]
    assert [grade("door_choice", item, text).score for text in options] == [float(n == right) for n in range(5)]
    assert grade("door_choice", item, "something else").facets == {"solved": None, "well_formed": False}


def test_an_answer_ends_with_the_tasks_stop_and_may_be_as_long_as_it_says(model: LoadedModel) -> None:
    asked = suite("door_stop")
    assert (asked.until, asked.max_new_tokens) == (("code", "."), 12)
    (played,) = play(Sampler(model, parse_policy("none")), [(asked, items("door_stop", 1)[0])], Decoding(1, 0.0), [0])
    assert (played.transcript[-1].content, played.finish_reason) == ("The code", "stop")


def test_a_version_is_the_tasks_its_configuration_and_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = suite("door").version
    assert before.startswith("2-")
    assert suite("door@place").version == before != suite("door_stop").version
    for rows in (12, 13):
        (folder := tmp_path / str(rows)).mkdir()
        monkeypatch.setenv("KVAUDIT_LM_EVAL_TASKS", str(write_tasks(folder, rows)))
        assert (suite("door").version == before) is (rows == 12)  # where it lies is no part of it


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("door_rolling", "asks for the probability of whole texts, which would be computed in one prefill"),
        ("door_text", "asks for the probability of whole texts"),
        ("door_bleu", "has no metric that gives each document a number from 0 to 1; its metrics"),
        ("door:f1", "has no metric 'f1' that gives each document"),
        ("door_begun", "begins the answer for the model (gen_prefix)"),
        ("door_often", "asks each document several times (repeats)"),
        ("door_code", "runs the model's answer as a program"),
        ("door@where", "has no column 'where'; it has system, user, answer"),
        ("door@a@b", "names no task; write lm-eval:TASK"),
    ],
)
def test_tasks_that_cannot_be_suites_are_one_line_errors(name: str, wanted: str) -> None:
    assert wanted in refusal(name)
    assert "\n" not in refusal(name)


def test_an_unknown_task_and_a_group_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    index = harness_task._index
    monkeypatch.setattr(harness_task, "_index", lambda folders, defaults: index(folders, False))  # all take seconds
    assert "unknown lm-eval task 'dor'. Did you mean 'door'?" in refusal("dor")
    assert "'doors' is a group of tasks; name its tasks one by one" in refusal("doors")


def test_documents_that_are_not_here_are_one_line() -> None:
    with pytest.raises(
        DataError, match=r"'door_lost' cannot be loaded: .*its documents must be cached, or the hub reachable"
    ):
        suite("door_lost")


def test_a_folder_of_tasks_that_is_none_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVAUDIT_LM_EVAL_TASKS", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"KVAUDIT_LM_EVAL_TASKS is .* which is not a folder"):
        suite("door")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RunError, match=re.escape(install_command("lm-eval"))):
        LmEval.member("door:exact_match,none")


def test_a_prompt_longer_than_the_context_is_the_users_error() -> None:
    with pytest.raises(SpecError, match=r"suite lm-eval:door: context_tokens 20 is too short, document \d+ takes \d+"):
        items("door", context_tokens=20)


def test_an_answer_that_the_metric_cannot_grade_is_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    (item,) = items("door", 1)
    task = suite("door")._task  # type: ignore[attr-defined]
    monkeypatch.setattr(task.task, "process_results", lambda *_: {}["x"])
    assert grade("door", item, "x").outcome is Outcome.UNSCORED
    monkeypatch.setattr(task.task, "process_results", lambda *_: {"exact_match": 37.5})
    with pytest.raises(DataError, match=r"metric exact_match is 37\.5, expected a number from 0 to 1"):
        grade("door", item, "x")


MISCHIEF = """
import sys
def none(doc): return None
def several(doc): return ["a", "b"]
def half(doc): return "half of a character: \\ud800"
def ends(doc): sys.exit(0)
def broken(doc): raise KeyError("lost")
class Mute(Exception):
    def __str__(self): sys.exit(0)
def mute(doc): raise Mute
def gone(doc): raise GeneratorExit
"""


@pytest.mark.parametrize(
    ("key", "function", "wanted"),
    [
        ("doc_to_text", "none", "document 0 cannot be asked"),
        ("doc_to_text", "several", "document 0 cannot be asked"),
        ("doc_to_text", "half", "document 0 asks 'half of a character:"),
        ("doc_to_text", "ends", "cannot be loaded: SystemExit: 0"),
        ("doc_to_text", "broken", "cannot be loaded: KeyError: 'lost'"),
        ("process_docs", "ends", "cannot be loaded: SystemExit: 0"),
        ("process_docs", "mute", "cannot be loaded: Mute: its message cannot be shown"),
        ("doc_to_text", "gone", "cannot be loaded: GeneratorExit"),
    ],
)
def test_a_task_whose_code_misbehaves_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, function: str, wanted: str
) -> None:
    folder = write_tasks(tmp_path)
    (folder / "mischief.py").write_text(MISCHIEF)
    text = (folder / "door.yaml").read_text().replace("task: door", "task: bad_door")
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith(f"{key}:")]
    (folder / "bad_door.yaml").write_text("".join(kept) + f"{key}: !function mischief.{function}\n")
    monkeypatch.setenv("KVAUDIT_LM_EVAL_TASKS", str(folder))
    assert wanted in refusal("bad_door")


@pytest.mark.parametrize("key", ["process_docs", "doc_to_text", "doc_to_choice"])
def test_a_task_that_never_finishes_loading_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    folder = write_tasks(tmp_path)
    (folder / "mischief.py").write_text("import time\ndef sleeps(*_):\n    time.sleep(3600)\n")
    text = (folder / "door_choice.yaml").read_text().replace("task: door_choice", "task: bad_door")
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith(f"{key}:")]
    (folder / "bad_door.yaml").write_text("".join(kept) + f"{key}: !function mischief.sleeps\n")
    monkeypatch.setenv("KVAUDIT_LM_EVAL_TASKS", str(folder))
    for module in ("task_family", "harness_task"):
        monkeypatch.setattr(f"kvaudit.suites.{module}.LOADING_SECONDS", 3.0)
    assert "TaskTimeout: it took over 3 s" in refusal("bad_door")


def test_a_metric_that_ends_the_program_leaves_one_answer_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    (item,) = items("door", 1)
    monkeypatch.setattr(suite("door")._task.task, "process_results", lambda *_: sys.exit(0))  # type: ignore[attr-defined]
    graded = grade("door", item, "x")
    assert (graded.outcome, graded.note) == (Outcome.UNSCORED, "the metric raised SystemExit")


def test_a_metric_that_never_ends_leaves_one_answer_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    (item,) = items("door", 1)
    before, _ = signal.getitimer(signal.ITIMER_REAL)  # the limit around this test, if it has one
    monkeypatch.setattr("kvaudit.suites.task_family.time_limit", lambda *_: time_limit(0.2))
    monkeypatch.setattr(suite("door")._task.task, "process_results", lambda *_: time.sleep(3600))  # type: ignore[attr-defined]
    graded = grade("door", item, "x")
    assert (graded.outcome, graded.note) == (Outcome.UNSCORED, "the metric took over 60 s")
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert (left > 0) == (before > 0)
    assert left <= before


def test_no_command_loads_a_harness_before_it_is_asked_for() -> None:
    first = "import sys, kvaudit.audit.cli; from kvaudit.suites.base import SUITES; SUITES.all()"
    code = f"{first}; print({{'lm_eval', 'inspect_ai'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
    assert not [name for name in SUITES.all() if name.startswith(("lm-eval", "inspect"))]


def test_payloads_are_plain_json() -> None:
    for item in items("door_choice"):
        assert json.loads(json.dumps(dict(item.payload))) == item.payload


def test_the_time_of_an_inner_limit_counts_for_the_one_around_it() -> None:
    def work(inner: float) -> None:
        with time_limit(0.3):
            for _ in range(40):
                with time_limit(inner):
                    time.sleep(0.1)

    for inner in (0.2, 60):
        start = time.monotonic()
        with pytest.raises(TaskTimeout, match=r"took over 0\.3 s"):
            work(inner)
        assert time.monotonic() - start < 2
