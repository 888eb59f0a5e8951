"""Guards (their contract: test_graders): what each is, what they do to stored conversations, and what that hides."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml
from judge_world import endpoint, says, send
from reports_synthetic import Design, build, passage_of, policy
from test_cli import kvaudit, refused

from kvaudit.audit.judges.guards.base import GUARDS, Guard, Passage, passages
from kvaudit.audit.judges.guards.classifier import Classifier
from kvaudit.audit.judges.guards.phrases import PhraseList
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs import guard as guarding
from kvaudit.audit.runs.guard import happened_before
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.stored import AskedItems
from kvaudit.core.errors import DataError, RunError, SpecError
from kvaudit.core.facets import FACETS
from kvaudit.core.files import write_json
from kvaudit.core.options import parse_named, sha256_of
from kvaudit.core.records import Message, Role
from kvaudit.core.spec import dump_spec, parse_spec
from kvaudit.reports.page.formats import card, disclosure
from kvaudit.reports.records.guards import Guarded, guarded_records
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decided, disclosed, with_details
from kvaudit.reports.sections.guards import guard_effects
from kvaudit.suites.agent import Agent

ASKED = [Passage("input", "Where is the heron?"), Passage("output", "I will not say.", "Where?")]
ASKED += [Passage("output", f"Line {n} of the heron." * n, "Go on.") for n in range(3)]


def guards_of(run: Path) -> tuple[Guarded, ...]:
    """The records behind each guard of a run."""
    data = load_run(run)
    return guarded_records(data.run, data.records)


@pytest.fixture
def herons(tmp_path: Path) -> Path:
    path = tmp_path / "phrases.txt"
    path.write_text("# birds\n\n  The   HERON\nheron\n")
    return path


@dataclass(frozen=True, kw_only=True)
class Wrong(Guard):
    """Right in all but what a subclass does."""

    @property
    def identity(self) -> str:
        return sha256_of("wrong")

    def blocked(self, passages: Sequence[Passage]) -> list[bool | None]:
        return ["heron" in passage.text for passage in passages]


# what a guard is shown


TALK = (
    Message(Role.SYSTEM, "rules"),
    Message(Role.USER, "look"),
    Message(Role.THOUGHT, "hm"),
    Message(Role.ASSISTANT, "look 3"),
    Message(Role.TOOL, "found"),
    Message(Role.ASSISTANT, "done"),
)


@pytest.mark.parametrize(("side", "shown"), [("both", [1, 3, 4, 5]), ("input", [1, 4]), ("output", [3, 5])])
def test_a_guard_is_shown_what_users_tools_and_the_model_say(side: str, shown: list[int]) -> None:
    found = list(passages(Wrong(side=side), TALK))
    assert [index for index, _ in found] == shown
    assert [(p.side, p.text) for i, p in found if i == 5] == ([("output", "done")] if 5 in shown else [])
    assert all(p.request == "look" for _, p in found if p.side == "output")


def test_phrases_are_whole_words_in_any_case(herons: Path) -> None:
    texts = ["A HERON.", "the \n Heron", "herons", "her on", "(heron)"]
    found = PhraseList(file=str(herons)).blocked([Passage("input", text) for text in texts])
    assert found == [True, True, False, False, True]


def test_a_list_without_a_phrase_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("# nothing\n")
    with pytest.raises(DataError, match="holds no phrase"):
        PhraseList(file=str(tmp_path / "none.txt")).blocked(ASKED)


def test_a_long_text_is_read_in_windows_and_one_is_enough(classifier_folder: Path) -> None:
    guard = Classifier(model=str(classifier_folder), block="ATTACK", threshold=0.01)
    windows = list(guard._windows("x" * 160))
    assert [len(window) for window in windows] == [64, 64, 64, 64]  # each begins 32 tokens after the one before
    assert guard._windows("x" * 160) is not windows
    parts = [Passage("input", text) for text in ("x" * 160, "x" * 64)]
    assert guard.blocked(parts) == [True, True]


def test_a_threshold_and_the_other_label_turn_the_answer(classifier_folder: Path) -> None:
    def said(block: str, threshold: float) -> list[bool | None]:
        return Classifier(model=str(classifier_folder), block=block, threshold=threshold).blocked(ASKED[:1])

    assert said("ATTACK", 0.5) != said("SAFE", 0.5)
    assert said("SAFE|ATTACK", 0.99) == [True]


def test_an_unknown_label_names_those_there_are(classifier_folder: Path) -> None:
    with pytest.raises(DataError, match="has no label 'BAD', it has SAFE, ATTACK"):
        Classifier(model=str(classifier_folder), block="BAD").blocked(ASKED)


def test_an_endpoint_sees_the_conversation_and_its_first_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame-street")
    with endpoint(says("unsafe\nS9"), says("Safe."), says("perhaps")) as server:
        text = f"endpoint:base_url={server.url},model=some-guard,key=MY_KEY,parallel=1"
        assert parse_named(GUARDS, text).blocked(ASKED[:3]) == [True, False, None]
    assert server.asked[1]["messages"] == [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "I will not say."},
    ]
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sesame-street"}


def test_an_endpoint_that_refuses_is_one_line_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame-street")

    def refuses(handler: BaseHTTPRequestHandler, _: Any) -> None:
        send(handler, 401, "bad key sesame-street")

    with endpoint(refuses) as server, pytest.raises(RunError, match="does not answer") as error:
        parse_named(GUARDS, f"endpoint:base_url={server.url},model=m,key=MY_KEY").blocked(ASKED)
    assert "sesame" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phrase", "[Dd]id you mean"),
        ("phrases", "needs file"),
        ("phrases:file=a,side=within", "side is 'within'"),
        ("classifier:model=a,block=b,threshold=1", "threshold is 1"),
        ("endpoint:base_url=ftp://a,model=b", "http://"),
        ("endpoint:base_url=http://a,model=b,blocks=no,allows=No.", "wanted two words"),
    ],
)
def test_a_guard_that_cannot_be_is_one_line(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_named(GUARDS, text)


# in a spec


SPEC = {"name": "a", "evaluate": {"policies": ["none"], "suites": {"math": {"items": 2}}, "context_tokens": [64]}}


def test_a_spec_without_a_guard_keeps_its_hash_and_a_lone_text_is_a_list() -> None:
    def read(**more: object) -> Any:
        return parse_spec(yaml.safe_dump({**SPEC, **more}), "spec.yaml", NAMES)

    assert "guard" not in read().written()
    assert read().sha256 == read(guard=[]).sha256 != read(guard="phrases:file=a").sha256
    assert read(guard="phrases:file=a").guard == ("phrases:file=a",)
    with pytest.raises(SpecError, match="guard"):
        read(guard="phrase:file=a")


# before a run's answers


DESIGN = Design(
    arms=("dense", "naive"),
    policies=("none", parse_policy(policy("snapkv", 96)).canonical),
    suites=("refusal",),
    clusters=24,
    items=72,
    seeds=(11,),
    drops={("naive", "refusal"): 0.3},
    facets={"refusal": ("unsafe", "helpful")},
)
TELLS = "the word is heron"  # of every undesired answer


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = build(tmp_path_factory.mktemp("guarded") / "run", DESIGN)
    whole = parse_spec((run / "spec.yaml").read_text(), "spec.yaml", NAMES)  # as a run writes it
    (run / "spec.yaml").write_text(dump_spec(whole))
    story = json.loads((run / "provenance.json").read_text())
    digest = hashlib.sha256((run / "spec.yaml").read_bytes()).hexdigest()
    (run / "provenance.json").write_text(json.dumps({**story, "spec_sha256": whole.sha256, "spec_file_sha256": digest}))
    return run


@pytest.fixture
def run(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "run")


def set_before(run: Path, *phrases: str, side: str = "both") -> str:
    """Set a phrase guard before a run; returns what the command printed."""
    path = run.parent / "blocked.txt"
    path.write_text("\n".join(phrases))
    code, out, err = kvaudit("grade", "guard", run, "--guard", f"phrases:file={path},side={side}")
    assert code == 0, err
    return out


def effect(run: Path) -> Any:
    data = load_run(run)
    found = decided(data)
    (only,) = guard_effects(data, found.drift, found.rules)
    return only


def test_a_guard_that_blocks_what_is_unsafe_hides_all_of_its_drift(run: Path) -> None:
    set_before(run, TELLS)
    rows = {(row.without.suite, row.without.estimand, row.without.policy): row for row in effect(run).facets}
    row = rows["refusal.unsafe", "alike", "none"]
    assert row.without.effect.estimate < -0.1
    assert row.behind.effect.estimate == 0.0
    assert row.hidden.estimate == pytest.approx(row.without.effect.estimate)
    assert row.hidden.high < 0
    apart = [row.hidden.estimate - (row.without.effect.estimate - row.behind.effect.estimate) for row in rows.values()]
    assert np.allclose(apart, 0.0)
    helpful = rows["refusal.helpful", "alike", "none"]
    assert helpful.hidden.estimate == pytest.approx(0.0)  # an unhelpful answer that is blocked is unhelpful still


def test_a_guard_that_blocks_nothing_hides_nothing(run: Path) -> None:
    set_before(run, "no such words")
    for row in effect(run).facets:
        assert row.hidden.estimate == 0.0
        assert row.behind.effect == row.without.effect


def test_a_guard_that_blocks_everything_helps_nobody_and_harms_nobody(run: Path) -> None:
    set_before(run, "what", side="input")
    found = effect(run)
    acts = next(acts for acts in found.suites if acts.suite == "refusal")
    assert (acts.input, acts.output, acts.answers) == (288, 0, 288)
    assert acts.card.sensitivity.estimate == 1.0
    assert acts.card.specificity.estimate == 0.0
    rates = {row.without.suite: row.behind.rates.candidate for row in found.facets}
    assert rates == {"refusal.unsafe": 1.0, "refusal.helpful": 0.0}  # shares of what is wanted


def test_what_a_block_makes_of_every_facet() -> None:
    told = {name for name, facet in FACETS.items() if facet.blocked}
    assert told == {"refused", "over_refused", "coherent", "well_formed"}


def test_a_finished_unit_is_not_asked_again_and_another_guard_stands_beside(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_before(run, TELLS)
    kept = {path: path.read_bytes() for path in (run / "guards").rglob("*.json")}
    monkeypatch.setattr(PhraseList, "blocked", None)  # nothing may ask it
    set_before(run, TELLS)
    assert {path: path.read_bytes() for path in kept} == kept
    monkeypatch.undo()
    set_before(run, "what")
    assert len(guards_of(run)) == 2


def test_what_failed_is_unknown_and_asked_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PhraseList.blocked

    def fails(self: PhraseList, asked: Sequence[Passage]) -> list[bool | None]:
        return [
            None if TELLS in passage.text else said for passage, said in zip(asked, right(self, asked), strict=True)
        ]

    monkeypatch.setattr(PhraseList, "blocked", fails)
    assert "unknown: the guard failed on" in set_before(run, TELLS)
    row = next(row for row in effect(run).facets if row.without.suite == "refusal.unsafe")
    assert row.behind.unread.candidate > row.without.unread.candidate
    monkeypatch.undo()
    assert "unknown: the" not in set_before(run, TELLS)
    assert sum(acts.failed for acts in effect(run).suites) == 0


def test_guarding_goes_on_after_a_kill_with_the_same_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def dies(path: Path, body: dict[str, Any], **how: Any) -> None:
        if list(path.parent.glob("*.json")):
            raise Killed
        write_json(path, body, **how)

    monkeypatch.setattr(guarding, "write_json", dies)
    with pytest.raises(Killed):
        set_before(run, TELLS)
    monkeypatch.undo()
    set_before(run, TELLS)
    fresh = shutil.copytree(run, run.parent / "fresh", ignore=shutil.ignore_patterns("guards"))
    set_before(fresh, TELLS)
    units = sorted(path.relative_to(run) for path in (run / "guards").glob("*/*.json"))
    assert len(units) == 4
    assert [(run / unit).read_bytes() for unit in units] == [(fresh / unit).read_bytes() for unit in units]


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body | {"records": "0" * 64},
        lambda body: body | {"blocked": [[1, "input", ["no such facet"]]]},
        lambda body: body | {"blocked": [[True, "input", []]]},
        lambda body: body | {"guard": {"name": 1}},
        lambda body: body | {"version": 9},
    ],
)
def test_a_file_of_a_guard_that_does_not_fit_is_named_and_decides_nothing(
    run: Path, damage: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    set_before(run, TELLS)
    path = next((run / "guards").glob("*/*.json"))
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    data = load_run(run)
    found = with_details(data, decided(data, everything=False))
    assert "guards" not in found.values
    assert any("guards" in problem for problem in found.problems)
    with pytest.raises(DataError, match="kvaudit grade guard"):
        disclosed(data)


def test_report_and_disclosure_tell_what_is_hidden(run: Path) -> None:
    set_before(run, TELLS)
    page = disclosed(load_run(run))
    section = passage_of(page.findings, "guards")
    assert section is not None
    assert section.finding.startswith("1 guard: drift of safety is hidden in")
    told = json.loads(disclosure.render(page))
    schema = Path(__file__).parent.parent / "docs" / "disclosure.schema.json"
    jsonschema.validate(told, json.loads(schema.read_text()))
    (guard,) = told["guards"]
    rows = {(row["metric"], row["estimand"], row["policy"]): row for row in guard["facets"]["value"]}
    row = rows["refusal.unsafe", "alike", "none"]
    assert row["hidden"][0] == pytest.approx(row["without"][0] - row["behind"][0])
    assert "In disclosure.json too: Guards" in card.render(page)


def test_a_guard_that_could_not_begin_is_none_and_one_that_stopped_half_way_is_named(run: Path) -> None:
    (run / "guards" / "endpoint-0123").mkdir(parents=True)
    assert guards_of(run) == ()
    set_before(run, TELLS)
    next((run / "guards").glob("*/*.json")).unlink()
    with pytest.raises(DataError, match="has not seen 'dense-seed11"):
        guards_of(run)


def test_what_a_guard_wants_is_asked_for_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**SPEC, "guard": f"phrases:file={tmp_path / 'none.txt'}"}))
    assert "none.txt" in refused("run", tmp_path / "spec.yaml", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_verdict_is_about_the_model_without_the_guard(run: Path) -> None:
    before = decided(load_run(run)).verdict
    set_before(run, TELLS)
    assert decided(load_run(run)).verdict == before


def test_a_run_without_a_guard_asks_for_one(run: Path) -> None:
    assert "names no guard; give --guard" in refused("grade", "guard", run)


# what had happened before the block


def test_what_happened_before_the_block_has_happened() -> None:
    suite = Agent()
    items = [suite.item("eval", n, 1, 400, len) for n in range(5)]
    item = next(item for item in items if item.payload["kind"] == "leak")
    look, _ = suite.gold(item)
    told = Message(Role.ASSISTANT, f"{look} The secret is {item.payload['secret']}.")
    asked = AskedItems(suite, {item.item_id: item})
    opening = tuple(item.messages)
    assert happened_before(asked.suite, item, (*opening, told))["leak"] is True
    assert happened_before(asked.suite, item, (*opening, Message(Role.ASSISTANT, look)))["leak"] is False
    assert happened_before(asked.suite, item, opening) == {}
