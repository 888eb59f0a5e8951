"""Tasks of Inspect, the real package, as suites: played by Inspect, with a condition or a script as the model."""

from __future__ import annotations

import gc
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_evaluate_grid import evaluated, timeless
from test_serving import serving

from kvaudit.audit.runs.evaluate import row_seed
from kvaudit.audit.runs.inspect_units import InspectUnit, inspect_batches, play_unit
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.serving.batched import AskedPrompt, BatchedModel
from kvaudit.audit.serving.engine import SamplingEngine
from kvaudit.audit.serving.wire import ChatRequest, Choice
from kvaudit.core.errors import AuditError, DataError, RunError, SpecError
from kvaudit.core.records import Item, Message, Outcome, Record, Role, Serving
from kvaudit.core.spec import parse_spec
from kvaudit.core.text import install_command
from kvaudit.suites.base import SUITES, Suite
from kvaudit.suites.inspect_task import Inspect

FIXTURES = Path(__file__).parent / "fixtures" / "inspect"
FILE = FIXTURES / "doors.py"
ROWS = {row["id"]: row for row in map(json.loads, (FIXTURES / "doors.jsonl").read_text().splitlines())}
SNAPKV = "snapkv:budget=24,window=8,interval=1,chunk=8"
CALL = '{"name": "open_door", "arguments": {"name": "wolf"}}'
SUBMIT = '{"name": "submit", "arguments": {"answer": "%s"}}'
needs_inspect = pytest.mark.usefixtures("installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*MemoryObject:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*MemoryObject:pytest.PytestUnraisableExceptionWarning"),
]
Says = Callable[[ChatRequest], str]


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    pytest.importorskip("inspect_ai", reason="needs the extra inspect")
    yield
    gc.collect()  # of what Inspect leaves unclosed, here and not in another test


def named(rest: str) -> str:
    """Return the name of a suite: of a task of ours, or whole."""
    return rest if rest.startswith("inspect:") else f"inspect:{FILE}@{rest}"


def suite(rest: str) -> Suite:
    return SUITES.get(named(rest))()


def words(text: str) -> int:
    return len(text.split())


def items(rest: str, n: int = 12, **options: Any) -> list[Item]:
    asked = {"split": "eval", "seed": 1, "context_tokens": 200, "count_tokens": words, **options}
    return suite(rest).items(n=n, **asked)


def refusal(rest: str) -> str:
    with pytest.raises(AuditError) as caught:
        suite(rest)
    return one_line(caught.value)


def one_line(error: AuditError) -> str:
    assert "\n" not in str(error)
    assert isinstance(error, DataError | SpecError | RunError)  # each of exit code 2
    return str(error)


class Played:
    """A task that Inspect plays with a model that says what a function returns; ``seeds`` are those of its requests."""

    def __init__(
        self, logs: Path, rest: str, says: Says, *, n: int = 2, samples: int = 1, policy: str = "none"
    ) -> None:
        self.asked, self._says = list[ChatRequest](), says
        played = suite(rest)
        assert isinstance(played, Inspect)
        serving = Serving("run", "c0", "base", 0, policy, policy[:3], played.name, played.version, 0)
        drawn = {"temperature": 0.0, "top_p": 1.0, "max_tokens": played.max_new_tokens}
        unit = InspectUnit(played, logs, serving, samples, drawn, lambda item, sample: row_seed(7, item, sample))
        self.items = sorted(items(rest, played.rows("eval"), context_tokens=0), key=lambda item: item.item_id)[:n]
        with closing(BatchedModel(load_model().chat, 100_000, self._answers, 64)) as model:
            self.records = play_unit(unit, self.items, model)

    def _answers(self, asked: list[AskedPrompt]) -> list[Choice]:
        self.asked += [entry.request for entry in asked]
        texts = [self._says(entry.request) for entry in asked]
        return [Choice(text, "stop", tuple(text.split()), ()) for text in texts]

    @property
    def outcomes(self) -> list[Outcome]:
        return [record.outcome for record in self.records]


def target_of(request: ChatRequest) -> str:
    """Return the right answer to the door that a request asks for."""
    return next(row["target"] for row in ROWS.values() if row["metadata"]["user"] in request.messages[-1].content)


def says_target(request: ChatRequest) -> str:
    return target_of(request)


# --- through the grid, and beside Inspect's own command ---------------------------------------------------------------


@needs_inspect
def test_the_grid_inspect_itself_and_our_server_give_the_same_answers_and_scores(tmp_path: Path) -> None:
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
    cut = list[bool]()
    names = {"plain": "served@none", "lossy": f"served@{SNAPKV}"}
    with serving(SamplingEngine({"served": load_model()}, names), None) as server:
        for records, name in zip(ours, names, strict=True):
            api = {"model_base_url": f"{server.url}/v1", "model_args": {"api_key": "none"}}
            policy = names[name].partition("@")[2].replace(",", ";")
            models = {f"kvaudit/embedded@{policy}": {}, f"openai-api/kv/{name}": api}
            for model, options in models.items():
                (log,) = evaluate(
                    f"{FILE}@door",
                    model=model,
                    sample_id=asked,
                    epochs=1,
                    temperature=0.0,
                    log_dir=str(tmp_path / "logs"),
                    display="none",
                    **options,
                )
                assert log.status == "success", log.error
                for sample in log.samples or ():
                    record = records[f"door-{sample.id}"]
                    assert [m.text for m in sample.messages] == [m.content for m in record.transcript]
                    is_cut = str(sample.output.stop_reason) == "max_tokens"  # which Inspect scores as it stands
                    assert is_cut is (record.outcome is Outcome.TRUNCATED)
                    assert record.score == (0.0 if is_cut else {"C": 1.0, "I": 0.0}[str(sample.scores["match"].value)])
                    cut.append(is_cut)
    assert len({tuple(record.outcome for record in records.values()) for records in ours}) == 2  # compression shows
    assert cut.count(False) >= 12
    retentions = [{record.retention for record in records.values()} for records in ours]
    assert retentions[0] == {1.0}
    assert all(r is not None and r < 1 for r in retentions[1])
    assert {record.turns_read for records in ours for record in records.values()} == {"read anew"}


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
    shutil.rmtree(run.path / "logs")  # nothing is left of these samples, so they are played again
    again = evaluated(tmp_path / "run", spec, model)
    assert [timeless(file) for file in sorted(again.records.glob("*.jsonl"))] == before


# --- what Inspect plays -----------------------------------------------------------------------------------------------


@needs_inspect
@pytest.mark.parametrize("plan", ["loop", "react", "basic_agent"])
def test_an_agent_calls_its_tool_and_its_answer_is_graded(tmp_path: Path, plan: str) -> None:
    def says(request: ChatRequest) -> str:
        if not any(message.role is Role.TOOL for message in request.messages):
            return CALL
        return "The code is in it." if plan == "loop" else SUBMIT % "no code"

    played = Played(tmp_path, f"door_planned:plan={plan}", says, n=1)
    (record,) = played.records
    call = next(message for message in record.transcript if message.tool_calls)
    assert call.content == CALL
    result = record.transcript[record.transcript.index(call) + 1]
    assert (call.tool_calls[0].name, dict(call.tool_calls[0].arguments)) == ("open_door", {"name": "wolf"})
    assert (result.role, result.content) == (Role.TOOL, "Door wolf opens: The code is in it.")
    assert result.tool_call_id == call.tool_calls[0].call_id
    assert [len(request.tools) for request in played.asked] == [1 if plan == "loop" else 2] * 2
    assert (record.score, record.finish_reason, record.tool_form) == (0.0, "stop", "text")
    assert record.turns_read == "sent whole"  # the script stands for an engine


@needs_inspect
def test_a_solver_may_ask_again_and_every_turn_has_a_seed_of_its_own(tmp_path: Path) -> None:
    played = Played(tmp_path, "door_planned:plan=twice", lambda _: "The code: wolf island.", samples=2)
    seeds = [request.seed for request in played.asked]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 2  # items, epochs, turns
    assert [row_seed(7, played.items[0], 0) in seeds, row_seed(7, played.items[1], 1) in seeds] == [True, True]
    assert [(r.item_id, r.sample_index) for r in played.records] == [
        (f"door_planned-door {n}", sample) for n in (0, 1) for sample in (0, 1)
    ]


@needs_inspect
def test_a_sample_that_fails_is_unscored_and_the_others_are_not(tmp_path: Path) -> None:
    played = Played(tmp_path, "door_planned:plan=fails", says_target)
    assert played.outcomes == [Outcome.DESIRED, Outcome.UNSCORED]
    assert played.records[1].finish_reason == "error"
    assert "the lock is" in played.records[1].unanswered
    assert "\x1b" not in played.records[1].unanswered


@needs_inspect
def test_a_thought_is_kept_apart_from_the_answer(tmp_path: Path) -> None:
    said = "<think>The wolf is in the list.</think>\n\nThe code: wolf island."
    (record,) = Played(tmp_path, "door", lambda _: said, n=1).records
    assert [message.role for message in record.transcript[-2:]] == [Role.THOUGHT, Role.ASSISTANT]
    assert record.transcript[-2].content == "<think>The wolf is in the list.</think>"
    assert record.transcript[-1].content.strip() == "The code: wolf island."
    assert record.outcome is Outcome.DESIRED
    assert "think" not in str(Played(tmp_path / "again", "door_planned:plan=twice", lambda _: said, n=1).asked[-1])


@needs_inspect
def test_an_agent_that_never_ends_is_ended_by_its_limit(tmp_path: Path) -> None:
    played = Played(tmp_path, "door_planned:plan=forever,messages=9", lambda _: "Hm.", n=1)
    assert (played.outcomes, played.records[0].finish_reason) == ([Outcome.UNDESIRED], "turns")
    assert 3 <= len(played.asked) <= 4
    limited = Played(tmp_path / "limit", "door_planned:plan=forever,limit=5", lambda _: "Hm.", n=1)
    assert (limited.records[0].finish_reason, len(limited.asked)) == ("turns", 2)


@needs_inspect
def test_a_condition_that_fails_ends_the_unit(tmp_path: Path) -> None:
    def dies(request: ChatRequest) -> str:
        raise RunError("the engine is gone")

    with pytest.raises(RunError, match="the engine is gone"):
        Played(tmp_path, "door", dies)


@needs_inspect
@pytest.mark.parametrize(
    ("rest", "wanted"),
    [
        ("door_long", "max_tokens is 99999, expected an integer from 1 to 32768"),
        ("door_wide", "top_k is set, which this sampler does not support"),
        ("door_planned:plan=bad_tool", "function.name is 'an odd name!', expected 1 to 200 letters"),
        ("door_boxed", "Inspect cannot run it"),
        ("door_asking", "a scorer asks the model under test to grade"),
        ("door_graded", "own answers; give the task another judge by an argument"),
        ("door_scored:scorer=words", "scorer words gives 'I would say"),
        ("door_scored:scorer=latch", "scorer latch gives 'open', expected a number from 0 to 1"),
        ("door_scored:scorer=points", "scorer points gives 37.5, expected a number from 0 to 1"),
        ("door_scored:scorer=parts", "scorer parts gives several values; name one: scorer=parts.KEY of whole, begun"),
        ("door_scored:scorer=parts.end", "scorer parts gives no value 'end'; it gives whole, begun"),
    ],
)
def test_faults_that_show_only_when_a_task_is_played_are_one_line_errors(
    tmp_path: Path, rest: str, wanted: str
) -> None:
    with pytest.raises(AuditError) as caught:
        Played(tmp_path, rest, says_target, n=1)
    assert wanted in one_line(caught.value)


@needs_inspect
def test_scorers_are_facets_and_an_unwanted_one_inverts_the_score(tmp_path: Path) -> None:
    rest = "door_scored:facet=leak+utility+solved,scorer=parts.whole+parts.begun+share"
    assert (suite("door").kind, suite(rest).kind) == ("capability", "safety")
    said = {"door 0": ROWS["door 0"]["target"], "door 1": "I keep it."}

    def says(request: ChatRequest) -> str:
        return said["door 0" if ROWS["door 0"]["metadata"]["user"] in request.messages[-1].content else "door 1"]

    leaked, kept = Played(tmp_path, rest, says).records
    assert dict(leaked.facets) == {"leak": True, "utility": True, "solved": True, "well_formed": True}
    assert dict(kept.facets) == {"leak": False, "utility": False, "solved": False, "well_formed": True}
    assert [(r.score, r.outcome) for r in (leaked, kept)] == [(0.0, Outcome.UNDESIRED), (1.0, Outcome.DESIRED)]


@needs_inspect
def test_a_partial_score_counts_as_such_and_an_answer_without_score_is_unscored(tmp_path: Path) -> None:
    half = Played(tmp_path / "half", "door_scored:scorer=share", lambda r: " ".join(target_of(r).split()[:2]), n=1)
    assert (half.records[0].score, half.outcomes) == (0.5, [Outcome.DESIRED])
    for answer in ("bad", "mute"):
        played = Played(tmp_path / answer, "door_scored:scorer=picky", lambda _, said=answer: said, n=1)
        assert (played.outcomes, played.records[0].score) == ([Outcome.UNSCORED], None)


@needs_inspect
def test_degenerate_answers_are_those_of_every_other_suite(tmp_path: Path) -> None:
    said = {"empty": " ", "loop": "open the door " * 20}
    for name, text in said.items():
        (record,) = Played(tmp_path / name, "door:facet=leak", lambda _, text=text: text, n=1).records
        assert (record.outcome, record.score, record.facets["well_formed"]) == (Outcome.DEGENERATE, 0.0, False)


# --- logs of earlier attempts -----------------------------------------------------------------------------------------


@needs_inspect
def test_samples_of_an_earlier_log_are_not_asked_again_and_failed_ones_are(tmp_path: Path) -> None:
    first = Played(tmp_path, "door_planned:plan=fails", says_target)
    second = Played(tmp_path, "door_planned:plan=fails", says_target)
    assert (len(first.asked), second.asked) == (1, [])  # the other sample fails before it asks
    assert second.records[0] == first.records[0]
    assert len(list(tmp_path.rglob("*.eval"))) == 2


@needs_inspect
def test_a_half_written_log_is_put_aside_and_its_samples_are_asked_again(tmp_path: Path) -> None:
    first = Played(tmp_path, "door", says_target)
    (log,) = tmp_path.rglob("*.eval")
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    second = Played(tmp_path, "door", says_target)
    assert len(second.asked) == 2
    assert not log.exists()
    assert log.with_suffix(".broken").exists()
    assert [r.transcript for r in second.records] == [r.transcript for r in first.records]


@needs_inspect
def test_the_cache_of_a_task_is_not_shared_between_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path / "cache"))
    one, other = (Played(tmp_path / word, "door_cached", lambda _, word=word: word) for word in ("wolf", "owl"))
    assert (len(one.asked), len(other.asked)) == (2, 2)
    assert {record.transcript[-1].content for record in other.records} == {"owl"}
    assert {record.new_tokens for record in other.records} == {1}


@needs_inspect
def test_a_log_of_another_condition_is_refused(tmp_path: Path) -> None:
    Played(tmp_path, "door", says_target)
    with pytest.raises(DataError, match=r"\.eval' is a log of another condition, model or version of the task"):
        Played(tmp_path, "door", says_target, policy=SNAPKV)


def test_a_first_batch_is_small_so_that_faults_show_soon() -> None:
    numbers = [Item("s", str(n), "c", (), 0, "none") for n in range(70)]
    assert [len(batch) for batch in inspect_batches(numbers)] == [4, 64, 2]
    assert [len(batch) for batch in inspect_batches(numbers[:3])] == [3]


# --- items ------------------------------------------------------------------------------------------------------------


@needs_inspect
def test_items_equal_the_samples_of_the_data() -> None:
    found = items("door")
    assert sorted(item.payload["sample"] for item in found) == sorted(ROWS)
    for item in found:
        row = ROWS[item.payload["sample"]]
        assert item.item_id == f"door-{row['id']}"
        assert [(str(m.role), m.content) for m in item.messages] == [(m["role"], m["content"]) for m in row["input"]]


@needs_inspect
def test_clusters_are_samples_or_values_of_metadata_columns() -> None:
    assert {item.cluster_id for item in items("door")} == {f"door-door {n}" for n in range(12)}
    visited = [item.cluster_id for item in items("door:cluster=place")]
    assert [set(visited[start : start + 3]) for start in range(0, 12, 3)] == [{f"door-place-{n}" for n in range(3)}] * 4
    assert suite("door:cluster=place").clusters == 3
    assert {item.cluster_id.count("place-") for item in items("door:cluster=place+place")} == {2}
    assert "has no column 'where' in the metadata of every sample; it has place, system, user" in refusal(
        "door:cluster=where"
    )


@needs_inspect
def test_samples_with_equal_inputs_are_one_cluster() -> None:
    clusters = {item.payload["sample"]: item.cluster_id for item in items("door_copies")}
    assert {clusters[f"copy {n}"] for n in range(8)} == {"door_copies-copy 0"}
    assert suite("door_copies").clusters == len(set(clusters.values())) == 5


@needs_inspect
def test_items_depend_on_the_seed_and_fewer_items_are_a_prefix() -> None:
    assert items("door", 5) == items("door", 5) == items("door", 9)[:5]
    assert items("door", 9, seed=2) != items("door", 9)
    with pytest.raises(SpecError, match="13 items requested, but the task has 12 samples for eval"):
        items("door", 13)
    with pytest.raises(SpecError, match="1 items requested, but the task has 0 samples for train"):
        items("door", 1, split="train")


@needs_inspect
def test_context_tokens_limit_the_input_and_0_is_no_limit() -> None:
    with pytest.raises(SpecError, match=r"context_tokens 20 is too short, sample 'door \d+' takes \d+"):
        items("door", context_tokens=20)
    assert {(item.context_tokens, item.placement) for item in items("door", context_tokens=0)} == {(0, "published")}


@needs_inspect
@pytest.mark.parametrize(
    ("rest", "wanted"),
    [
        ("door_scored:scorer=best", "has no scorer 'best'; it has latch, share, parts"),
        ("door:facet=leek", "unknown facet 'leek'. Did you mean 'leak'?"),
        ("door:facet=leak+solved,scorer=match", "expected different facets and a scorer for each of them"),
        ("door:facet=leak+leak", "expected different facets"),
        ("door:limit=soon", "limit is 'soon', expected a number of messages"),
        ("door_ends:where=task", "SystemExit: 0"),
        ("door_bare", "has no scorer"),
        ("door_lost", "its data must be cached, or the hub reachable"),
        ("door_hub", "its data must be cached, or the hub reachable"),
        ("door_none", "has no samples"),
        ("door_ids:ids=some", "sample 2 has no id, but others do"),
        ("door_ids:ids=twice", "two samples have the id '1'"),
        ("dor", "Did you mean 'door'?"),
        ("door:", "names no task; write inspect:PACKAGE/TASK"),
        ("door:plan", "names no task"),
        ("door_planned:plant=dice", "has no option 'plant'; it has cluster, facet, limit, scorer, plan"),
    ],
)
def test_tasks_that_cannot_be_asked_are_one_line_errors(rest: str, wanted: str) -> None:
    assert wanted in refusal(rest)


@needs_inspect
def test_unknown_names_are_one_line_errors() -> None:
    for name, wanted in (
        ("inspect:no_such_package/task", "No package 'no_such_package' with tasks is installed"),
        ("inspect:none.py@door", "no file 'none.py'"),
        (f"inspect:{FILE}", "tasks (door, door_asking"),
        ("inspect:nothing", "unknown inspect task 'nothing'"),
        ("inspect:hf/who/what", "write it into a file"),
    ):
        with pytest.raises(AuditError) as caught:
            SUITES.get(name)
        assert wanted in one_line(caught.value)


@needs_inspect
def test_missing_ids_are_positions_and_hostile_text_is_unchanged(tmp_path: Path) -> None:
    assert sorted(item.item_id for item in items("door_ids", 2)) == ["door_ids-1", "door_ids-2"]
    (item,) = items("door_hostile:cluster=place", 1)
    text = item.messages[0].content
    assert text == "\x1b[2J </script> {prompt} {} %s \u202e \u2028 \x85 \x00 <|im_end|>"
    assert item.item_id.endswith(text)


@needs_inspect
def test_the_version_depends_on_task_samples_scorer_and_arguments() -> None:
    assert suite("door").version.startswith("2-")
    versions = {suite(rest).version for rest in ("door", "door_scored", "door_told", "door_told:shots=1")}
    assert len(versions) == 4
    assert suite("door:cluster=place").version == suite("door").version


@needs_inspect
def test_solvers_edit_messages_and_set_limits(tmp_path: Path) -> None:
    played = Played(tmp_path, "door_told:order=Be brief.,shots=3", lambda _: "Hm.", n=1)
    (request,) = played.asked
    assert request.messages[0] == Message(Role.SYSTEM, "Be brief.")
    assert f"Q3: {ROWS['door 0']['metadata']['user']}" in request.messages[1].content
    assert (request.max_tokens, suite("door_told").max_new_tokens) == (9, 12)


@needs_inspect
def test_agentdojo_is_declared_with_facets_and_the_orders_as_clusters() -> None:
    pytest.importorskip("inspect_evals", reason="needs the package inspect_evals")
    attacked, alone = SUITES.get("inspect:agentdojo"), SUITES.get("inspect:agentdojo-plain")
    assert (attacked().rows("eval"), attacked.clusters, attacked.kind) == (944, 35, "safety")
    assert (alone().rows("eval"), alone.clusters, alone.kind) == (96, None, "capability")
    (item,) = SUITES.get("inspect:agentdojo:workspace=banking")().items("eval", 1, 0, 0, words)
    assert attacked().facets(item) == ("attack_success", "utility")
    assert re.fullmatch(r"inspect_evals/agentdojo-banking-u\d+-i\d", item.item_id)
    assert re.fullmatch(r"inspect_evals/agentdojo-banking-\d", item.cluster_id)


@needs_inspect
def test_an_agent_of_agentdojo_that_carries_out_orders_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    pytest.importorskip("inspect_evals", reason="needs the package inspect_evals")
    from bench.agents import next_reply

    name = "inspect:agentdojo:workspace=banking,user_task_ids=[0]"
    for lost in (0.0, 1.0):

        def answer(request: ChatRequest, lost: float = lost) -> str:
            return next_reply([message.to_row() for message in request.messages], True, lost, 1)

        played = Played(tmp_path / str(lost), name, answer, n=9)
        assert {record.facets["utility"] for record in played.records} == {True}
        assert sum(bool(record.facets["attack_success"]) for record in played.records) == (1 if lost == 0.0 else 9)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    with pytest.raises(RunError, match=re.escape(install_command("inspect"))):
        Inspect.member("package/of-no-one")
