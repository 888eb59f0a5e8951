"""Tasks of Inspect, the real package, as suites: generated and graded as Inspect itself does."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_evaluate_grid import evaluated, timeless

from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.sampling.model import load_model
from kvaudit.core.errors import AuditError, DataError, RunError, SpecError
from kvaudit.core.records import Grade, Item, Message, Outcome, Record, Role
from kvaudit.core.spec import parse_spec
from kvaudit.core.text import install_command
from kvaudit.suites.base import SUITES, Suite
from kvaudit.suites.inspect_task import Inspect

FIXTURES = Path(__file__).parent / "fixtures" / "inspect"
FILE = FIXTURES / "doors.py"
ROWS = [json.loads(line) for line in (FIXTURES / "doors.jsonl").read_text().splitlines()]
SNAPKV = "snapkv:budget=24,window=8,interval=1,chunk=8"
needs_inspect = pytest.mark.usefixtures("installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*MemoryObject:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*MemoryObject:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def installed() -> None:
    pytest.importorskip("inspect_ai", reason="needs the extra inspect")


def named(rest: str) -> str:
    return f"inspect:{FILE}@{rest}"


def suite(rest: str) -> Suite:
    return SUITES.get(named(rest))()


def words(text: str) -> int:
    return len(text.split())


def items(rest: str, n: int = 12, **options: Any) -> list[Item]:
    asked = {"split": "eval", "seed": 1, "context_tokens": 200, "count_tokens": words, **options}
    return suite(rest).items(n=n, **asked)


def row(item: Item) -> dict[str, Any]:
    return dict(ROWS[item.payload["sample"]])


def grade(rest: str, item: Item, answer: str) -> Grade:
    return suite(rest).grade(item, (*item.messages, Message(Role.ASSISTANT, answer)))


def refusal(rest: str) -> str:
    with pytest.raises(AuditError) as caught:
        suite(rest)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, DataError | SpecError | RunError)  # each of exit code 2
    return str(caught.value)


@needs_inspect
def test_the_grid_and_inspect_itself_give_the_same_answers_and_scores(tmp_path: Path) -> None:
    from inspect_ai import eval as evaluate

    import kvaudit.audit.serving.harness.inspect_model  # noqa: F401 - an installed kvaudit is found by its entry point

    text = f"""
name: inspect
evaluate:
  policies: [none, "{SNAPKV}"]
  suites: {{"{named("door")}": {{items: 4}}}}
  context_tokens: [200]
  temperature: 0
"""
    run = evaluated(tmp_path / "run", parse_spec(text, "spec", NAMES), load_model())
    files = sorted(run.records.glob("*.jsonl"))
    ours = [{r.item_id: r for r in map(Record.from_json, file.read_bytes().splitlines())} for file in files]
    assert [len(records) for records in ours] == [4, 4]
    asked = [name.rpartition("door-")[2] for name in ours[0]]
    compared: list[bool] = []
    for records, policy in zip(ours, ("none", SNAPKV), strict=True):
        (log,) = evaluate(
            f"{FILE}@door",
            model=f"kvaudit/embedded@{policy.replace(',', ';')}",
            sample_id=asked,
            epochs=1,
            log_dir=str(tmp_path / "logs"),
            display="none",
            log_samples=True,
        )
        assert log.status == "success", log.error
        assert log.samples
        for sample in log.samples:
            record = next(r for name, r in records.items() if name.endswith(f"door-{sample.id}"))
            assert [m.text for m in sample.messages] == [m.content for m in record.transcript]
            cut = str(sample.output.stop_reason) == "max_tokens"  # which Inspect scores as it stands
            assert cut is (record.outcome is Outcome.TRUNCATED)
            theirs = {"C": 1.0, "I": 0.0}[str(sample.scores["match"].value)]
            assert record.score == (0.0 if cut else theirs)
            compared.append(cut)
    assert len({tuple(record.outcome for record in records.values()) for records in ours}) == 2  # compression shows
    assert compared.count(False) >= 6
    gc.collect()  # of what Inspect leaves unclosed, here and not in another test


@needs_inspect
def test_the_grid_resumes_a_task(tmp_path: Path) -> None:
    text = f"""
name: inspect
evaluate:
  policies: [none]
  suites: {{"{named("door:cluster=place")}": {{items: 6}}, "{named("door_choice")}": {{items: 4}}}}
  context_tokens: [300]
  samples: 2
  temperature: 0.7
"""
    text = text.replace("{items: 4}", "{items: 4, max_new_tokens: 12}")
    spec, model = parse_spec(text, "spec", NAMES), load_model()
    run = evaluated(tmp_path / "run", spec, model)
    files = sorted(run.records.glob("*.jsonl"))
    before = [timeless(file) for file in files]
    assert sorted(map(len, before)) == [8, 12]
    for file in files:
        file.write_bytes(file.read_bytes()[:-40])
        file.with_suffix(".done.json").unlink()
    again = evaluated(tmp_path / "run", spec, model)
    assert [timeless(file) for file in sorted(again.records.glob("*.jsonl"))] == before


@needs_inspect
def test_prompts_equal_the_samples_of_the_data() -> None:
    found = items("door")
    assert sorted(item.payload["sample"] for item in found) == list(range(12))
    for item in found:
        assert item.item_id == f"door-{row(item)['id']}"
        assert [(str(m.role), m.content) for m in item.messages] == [
            (m["role"], m["content"]) for m in row(item)["input"]
        ]


@needs_inspect
def test_solvers_that_edit_messages_and_set_limits_are_applied() -> None:
    asked = suite("door_told:order=Be brief.,shots=3")
    (item,) = items("door_told:order=Be brief.,shots=3", 1)
    assert item.messages[0] == Message(Role.SYSTEM, "Be brief.")
    assert f"Q3: {row(item)['metadata']['user']}" in item.messages[1].content
    assert 'in the form "ANSWER: $ANSWER"' in item.messages[1].content
    assert (len(item.messages), asked.max_new_tokens, asked.until) == (2, 9, ())
    assert (suite("door_stop").max_new_tokens, suite("door_stop").until) == (12, ("code", "."))
    assert suite("door_choice").max_new_tokens == 12


@needs_inspect
def test_options_use_the_template_of_the_task_and_letters_are_graded() -> None:
    (item,) = items("door_choice", 1)
    assert f"A) {row(item)['options'][0]}\nB) {row(item)['options'][1]}" in item.messages[-1].content
    right = "ABCDE"[row(item)["right"]]
    assert grade("door_choice", item, f"ANSWER: {right}").facets == {"solved": True, "well_formed": True}
    assert [grade("door_choice", item, f"ANSWER: {letter}").score for letter in "ABCDE"] == [
        float(letter == right) for letter in "ABCDE"
    ]
    assert grade("door_choice", item, "I like it.").outcome is Outcome.UNDESIRED


@needs_inspect
def test_clusters_are_samples_or_values_of_a_metadata_column() -> None:
    assert {item.cluster_id for item in items("door")} == {f"door-door {n}" for n in range(12)}
    visited = [item.cluster_id for item in items("door:cluster=place")]
    assert [set(visited[start : start + 3]) for start in range(0, 12, 3)] == [{f"door-place-{n}" for n in range(3)}] * 4
    assert suite("door:cluster=place").clusters == 3
    assert "has no column 'where' in the metadata of every sample; it has place, system, user" in refusal(
        "door:cluster=where"
    )


@needs_inspect
def test_samples_with_equal_prompts_are_one_cluster() -> None:
    clusters = [item.cluster_id for item in sorted(items("door_copies"), key=lambda item: item.payload["sample"])]
    assert clusters[:8] == ["door_copies-copy 0"] * 8
    assert suite("door_copies").clusters == len(set(clusters)) == 5


@needs_inspect
@pytest.mark.parametrize("where", ["scorer", "solver", "task"])
def test_a_task_that_exits_is_a_one_line_error(where: str) -> None:
    assert "SystemExit: 0" in refusal(f"door_ends:where={where}")


@needs_inspect
def test_a_scorer_that_exits_leaves_one_answer_unscored() -> None:
    (item,) = items("door_ends:where=answer", 1)
    graded = grade("door_ends:where=answer", item, "leave")
    assert (graded.outcome, graded.note) == (Outcome.UNSCORED, "the scorer raised SystemExit")


@needs_inspect
def test_items_depend_on_the_seed_and_fewer_items_are_a_prefix() -> None:
    assert items("door", 5) == items("door", 5) == items("door", 9)[:5]
    assert items("door", 9, seed=2) != items("door", 9)
    with pytest.raises(SpecError, match="13 items requested, but the task has 12 samples for eval"):
        items("door", 13)
    with pytest.raises(SpecError, match="1 items requested, but the task has 0 samples for train"):
        items("door", 1, split="train")


@needs_inspect
def test_context_tokens_limit_the_prompt_and_0_is_no_limit() -> None:
    with pytest.raises(SpecError, match=r"context_tokens 20 is too short, sample 'door \d+' takes \d+"):
        items("door", context_tokens=20)
    assert {(item.context_tokens, item.placement) for item in items("door", context_tokens=0)} == {(0, "published")}


@needs_inspect
def test_the_first_scorer_or_the_named_one_is_used() -> None:
    (item,) = items("door", 1)
    said = f"So: {row(item)['answer']} Yes." if "answer" in row(item) else f"So: {row(item)['target']} Yes."
    assert grade("door", item, said).score == 1.0
    assert grade("door", item, "x").outcome is Outcome.UNDESIRED
    assert grade("door", item, "  ").outcome is Outcome.DEGENERATE
    assert grade("door_scored", item, said).score == 1.0
    assert grade("door_scored:scorer=exact", item, said).score == 0.0
    assert grade("door_scored:scorer=exact", item, row(item)["target"]).score == 1.0
    assert "has no scorer 'best'; it has latch, share, parts" in refusal("door_scored:scorer=best")


@needs_inspect
def test_scores_become_numbers_as_in_the_metrics_of_the_task() -> None:
    (item,) = items("door_scored", 1)
    right = row(item)["target"]
    assert [grade("door_scored:scorer=latch", item, text).score for text in (right, "x")] == [1.0, 0.0]
    half = " ".join(right.split()[:2])
    part = grade("door_scored:scorer=share", item, half)
    assert (part.score, part.outcome) == (0.5, Outcome.DESIRED)
    assert grade("door_scored:scorer=parts.begun", item, "The end").score == 1.0
    assert grade("door_scored:scorer=parts.whole", item, "The end").score == 0.0


@needs_inspect
def test_an_unwanted_facet_inverts_the_score() -> None:
    (item,) = items("door", 1)
    right = row(item)["target"]
    assert (suite("door").kind, suite("door:facet=leak").kind) == ("capability", "safety")
    leaked = grade("door:facet=leak", item, right)
    assert (leaked.score, leaked.outcome, leaked.facets["leak"]) == (0.0, Outcome.UNDESIRED, True)
    kept = grade("door:facet=leak", item, "I keep it.")
    assert (kept.score, kept.outcome, kept.facets["leak"]) == (1.0, Outcome.DESIRED, False)
    assert "unknown facet 'leek'. Did you mean 'leak'?" in refusal("door:facet=leek")


@needs_inspect
def test_an_answer_that_the_task_cannot_grade_is_unscored_with_a_reason() -> None:
    (item,) = items("door_scored:scorer=picky", 1)
    for answer, why in (("bad", "the scorer raised ValueError"), ("mute", "the scorer gave no score")):
        graded = grade("door_scored:scorer=picky", item, answer)
        assert (graded.outcome, graded.note) == (Outcome.UNSCORED, why)
    (item,) = items("door_planned:plan=retry", 1)
    assert grade("door_planned:plan=retry", item, row(item)["target"]).score == 1.0
    graded = grade("door_planned:plan=retry", item, "again")
    assert (graded.outcome, graded.note) == (Outcome.UNSCORED, "the solver asks again after this answer")


@needs_inspect
@pytest.mark.parametrize(
    ("rest", "wanted"),
    [
        ("door_scored:scorer=words", "scorer words gives 'I would say"),
        ("door_scored:scorer=points", "scorer points gives 37.5, expected a number from 0 to 1"),
        ("door_scored:scorer=parts", "scorer parts gives several values; name one: scorer=parts.KEY of whole, begun"),
        ("door_scored:scorer=asker", "scorer asker cannot score here"),
        (
            "door_scored:scorer=model_graded_fact",
            "asks a model to grade, which is not supported; name another (scorer=latch)",
        ),
        ("door_graded", "`judge:` in a spec grades our suites only"),
        ("door_planned", "solver twice asks the model more than once; only solvers that edit messages and ask once"),
        ("door_planned:plan=use_tools", "solver use_tools gives the model tools"),
        ("door_planned:plan=basic_agent", "solver use_tools gives the model tools"),
        ("door_planned:plan=self_critique", "solver self_critique cannot be served"),
        ("door_planned:plan=asks_itself", "solver asks_itself cannot be served"),
        ("door_planned:plan=begins", "begins the answer for the model"),
        ("door_planned:plan=mute", "mute never asks the model"),
        ("door_planned:plan=dice", "prompts change on every run"),
        ("door_limited", "sets time_limit"),
        ("door_limited:limit=token_limit", "sets token_limit"),
        ("door_boxed", "needs a sandbox"),
        ("door_wide", "sets top_k, which this sampler cannot do"),
        ("door_bare", "has no scorer"),
        ("door_lost", "its data must be cached, or the hub reachable"),
        ("door_hub", "its data must be cached, or the hub reachable"),
        ("door_none", "has no samples"),
        ("door_ids:ids=some", "sample 2 has no id, but others do"),
        ("door_ids:ids=twice", "two samples have the id '1'"),
        ("dor", "Did you mean 'door'?"),
        ("door:", "names no task; write inspect:PACKAGE/TASK"),
        ("door:plan", "names no task"),
        ("door_planned:plant=dice", "has no option 'plant'; it has cluster, facet, scorer, plan"),
    ],
)
def test_unsupported_tasks_are_one_line_errors(rest: str, wanted: str) -> None:
    assert wanted in refusal(rest)


@needs_inspect
def test_unknown_names_are_one_line_errors(tmp_path: Path) -> None:
    for name, wanted in (
        ("inspect:no_such_package/task", "No package 'no_such_package' with tasks is installed"),
        ("inspect:none.py@door", "no file 'none.py'"),
        (f"inspect:{FILE}", "tasks (door, door_told"),
        ("inspect:nothing", "unknown inspect task 'nothing'"),
        ("inspect:hf/who/what", "write it into a file"),
    ):
        with pytest.raises(AuditError) as caught:
            SUITES.get(name)
        assert wanted in str(caught.value)


@needs_inspect
def test_missing_ids_are_positions_and_hostile_text_is_unchanged() -> None:
    assert sorted(item.item_id for item in items("door_ids", 2)) == ["door_ids-1", "door_ids-2"]
    (item,) = items("door_hostile:cluster=place", 1)
    text = item.messages[0].content
    assert text == "\x1b[2J </script> {prompt} {} %s \u202e \u2028 \x85 \x00 <|im_end|>"
    assert item.item_id.endswith(text)
    assert grade("door_hostile", item, text).score == 1.0


@needs_inspect
def test_the_version_depends_on_task_prompts_targets_and_scorer() -> None:
    assert suite("door").version.startswith("2-")
    versions = {suite(rest).version for rest in ("door", "door_stop", "door_scored", "door_told", "door_told:shots=1")}
    assert len(versions) == 5
    assert suite("door:cluster=place").version == suite("door").version


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    with pytest.raises(RunError, match=re.escape(install_command("inspect"))):
        Inspect.member("package/of-no-one")


def test_inspect_is_imported_only_when_needed() -> None:
    first = "import sys, kvaudit.audit.cli; from kvaudit.suites.base import SUITES; SUITES.all()"
    code = f"{first}; print('inspect_ai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert not [name for name in SUITES.all() if name.startswith("inspect")]
