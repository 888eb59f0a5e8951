"""What pays rollouts besides the suites' grades: what is refused, what is remembered, and that a run goes by it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from judge_world import endpoint, says
from suite_world import TOKENS, rows_from, words, write_rows
from test_training_contract import answered
from training_world import parity, play_for_parity, rows, sha256, sharp, short, silent
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from kvaudit.audit.judges.rubric import parse_score
from kvaudit.audit.runs.prepare import check_reward
from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training import grpo, rollouts
from kvaudit.audit.training.rewards.base import RewardConfig, parse_reward
from kvaudit.audit.training.rewards.classifier import Classified
from kvaudit.core.errors import AuditError, DataError, RunError, SpecError
from kvaudit.core.judge_answers import AnswerCache
from kvaudit.core.records import Outcome
from kvaudit.core.spec_train import TrainSpec
from kvaudit.suites.base import SUITES

HERE = "test_training_rewards"
REQUESTS = "xstest"  # a suite that leaves answers to a judge


def by_parity(played: Sequence[GradedRow], scale: float = 1.0) -> list[float | None]:
    scores = [parity(row).score for row in played]
    return [None if score is None else scale * score for score in scores]


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


def broken(played: Sequence[GradedRow], what: str) -> Any:
    made = {"nan": float("nan"), "huge": 10**400, "text": "1", "none": None}
    if what == "raises":
        raise KeyError(what)
    if what == "mute":
        raise Mute
    if what == "exit":
        sys.exit(0)
    return {"short": [], "number": 1.0, "string": "1"}.get(what, [made.get(what)] * len(played))


NUMBER = 1


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


@pytest.fixture
def played(tmp_path: Path) -> list[GradedRow]:
    """Three items of a suite that leaves refusals to a judge, and one of a suite that does not, each answered."""
    (tmp_path / "rows").mkdir()
    with rows_from(write_rows(tmp_path / "rows")):
        suites = SUITES.get(REQUESTS)(), SUITES.get("math")()
        asked = [(suite, item) for suite, n in zip(suites, (3, 1), strict=True) for item in _items(suite, n)]
    return [answered(suite, item, suite.gold(item)) for suite, item in asked]


def _items(suite: Any, number: int) -> Any:
    return suite.items("train", number, 1, TOKENS, words)


@pytest.fixture
def constitution(tmp_path: Path) -> Path:
    path = tmp_path / "constitution.md"
    path.write_text("Be kind. {mark} %s\n")
    return path


def by_endpoint(url: str, file: Path) -> RewardConfig:
    written = {"judge": "rubric-endpoint", "base_url": url, "model": "m", "tries": 1, "constitution": str(file)}
    return parse_reward(written, [REQUESTS, "math"])


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("grades", "unknown reward 'grades'. Did you mean 'grade'?"),
        ({"grade": 1}, "takes no value; write reward: grade"),
        ({"judg": "phrases"}, "Did you mean 'judge'?"),
        ({"judge": "phrase"}, "unknown judge in train.reward 'phrase'. Did you mean 'phrases'?"),
        ({"judge": "logistic", "constitution": "c.md"}, "judge logistic cannot use a constitution"),
        ({"judge": "rubric-endpoint", "model": "m"}, "needs base_url; give base_url: ..."),
        ({"judge": "rubric-endpoint", "model": "m", "base_url": "http://h", "tries": "x"}, "tries is 'x', wanted a"),
        ({"judge": "rubric-endpoint", "model": "m", "base_url": "h"}, "base_url wants http:// or https://"),
        ({"function": "rewards"}, "reward function is 'rewards', wanted package.module:name"),
        ({"function": "a:b", "judge": "phrases"}, "names function and judge, wanted one"),
        ({"function": "a:b", "suites": ["refusals"]}, "unknown suite in train.reward.suites"),
        ({"function": "a:b", "suites": []}, "wanted a list of suites"),
        ({"classifier": "m"}, "needs either pays: LABEL or costs: LABEL"),
        ({"classifier": "m", "pays": "a", "block": "b"}, "unknown option of reward classifier 'block'"),
        ([1], "a name, or a mapping such as {function: package.module:name}"),
    ],
)
def test_a_reward_that_cannot_be_is_one_line(written: Any, line: str) -> None:
    with pytest.raises(Exception, match=re.escape(line)) as caught:
        short(reward=written)
    assert isinstance(caught.value, AuditError) or line.startswith("a name")


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        ({"function": "not_there:f"}, "not_there cannot be imported (ModuleNotFoundError"),
        ({"function": f"{HERE}:lost"}, "has no lost"),
        ({"function": f"{HERE}:NUMBER"}, "is a int, wanted a function"),
        ({"function": f"{HERE}:by_parity", "size": 2}, "cannot be called with the rollouts and ['size']"),
        ({"function": f"{HERE}:broken", "what": "nan"}, "returned nan for rollout 1 of 1, wanted a number from"),
        ({"function": f"{HERE}:broken", "what": "text"}, "returned '1' for rollout 1 of 1"),
        ({"function": f"{HERE}:broken", "what": "number"}, "returned 1.0, wanted a list of 1 numbers"),
        ({"function": f"{HERE}:broken", "what": "string"}, "returned '1', wanted a list"),
        ({"function": f"{HERE}:broken", "what": "short"}, "returned 0 rewards for 1 rollouts"),
        ({"function": f"{HERE}:broken", "what": "raises"}, "fails: KeyError: 'raises' (test_training_rewards.py line"),
        ({"function": f"{HERE}:broken", "what": "exit"}, "fails: SystemExit: 0 (test_training_rewards.py line"),
        ({"function": f"{HERE}:broken", "what": "mute"}, "fails: Mute: its message cannot be shown"),
        ({"function": f"{HERE}:broken", "what": "none"}, "gives no score for the gold answer"),
        ({"judge": "phrases"}, "no suite of math leaves answers to a judge; add a constitution"),
        ({"judge": "rubric-local", "model": "m", "constitution": "no.md"}, "'no.md' cannot be read (No such file"),
        ({"judge": "rubric-endpoint", "model": "m", "base_url": "http://h", "key": "NO_KEY"}, "NO_KEY is not set"),
    ],
)
def test_what_a_reward_lacks_is_one_line_before_anything_is_trained(
    base: LoadedModel, reward: dict[str, Any], line: str
) -> None:
    section = TrainSpec(arms=("dense",), seeds=(1,), policy="none", suites=("math",), context_tokens=500, reward=reward)
    with pytest.raises(AuditError, match=re.escape(line)) as caught:
        check_reward(section, base)
    assert "\n" not in str(caught.value)


def test_a_reward_too_large_for_a_gradient_is_refused() -> None:
    pays = parse_reward({"function": f"{HERE}:broken", "what": "huge"}, ["math"]).kept_in(Path())
    item = replace(SUITES.get("math")().items("train", 1, 1, 200, words)[0])
    with pytest.raises((RunError, OverflowError), match="wanted a number from"):
        pays([answered(SUITES.get("math")(), item, ["1"])])


def test_an_empty_constitution_is_refused(constitution: Path) -> None:
    constitution.write_text(" \n")
    with pytest.raises(SpecError, match=r"constitution .* is empty"):
        by_endpoint("http://h", constitution).check()
    constitution.write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8 text"):
        by_endpoint("http://h", constitution).check()


@pytest.mark.parametrize(
    ("reply", "score"), [("7", 0.7), ("10.", 1.0), ("8/10", 0.8), ("0", 0.0), ("11", None), ("-1", None), ("ten", None)]
)
def test_a_reply_scores_by_its_first_word(reply: str, score: float | None) -> None:
    assert parse_score(reply) == score


def test_a_constitution_pays_every_answer_and_is_asked_once(
    played: list[GradedRow], constitution: Path, tmp_path: Path
) -> None:
    mute = answered(SUITES.get(REQUESTS)(), played[0].item, [""])
    with endpoint(says("7")) as asked:
        paying = by_endpoint(asked.url, constitution)
        assert paying.kept_in(tmp_path)([*played, mute]) == [0.7, 0.7, 0.7, 0.7, 0.0]
        assert len(asked.asked) == 4
        assert all("Be kind. {mark} %s" in body["messages"][0]["content"] for body in asked.asked)
        assert by_endpoint(asked.url, constitution).kept_in(tmp_path)(played) == [0.7] * 4
        assert len(asked.asked) == 4


def test_what_a_judge_failed_on_earns_nothing_again_when_resumed(
    played: list[GradedRow], constitution: Path, tmp_path: Path
) -> None:
    with endpoint(says("7"), says("I think"), says("4")) as asked:
        first = by_endpoint(asked.url, constitution).kept_in(tmp_path)(played)
        assert sorted(map(str, first)) == ["0.4", "0.4", "0.7", "None"]
        assert by_endpoint(asked.url, constitution).kept_in(tmp_path)(played) == first
        assert len(asked.asked) == 4


def test_a_judge_that_fails_on_most_answers_stops_and_keeps_none(
    played: list[GradedRow], constitution: Path, tmp_path: Path
) -> None:
    many = [
        replace(row, transcript=(*row.transcript[:-1], replace(row.transcript[-1], content=f"It is number {n}.")))
        for n, row in enumerate(played * 2)
    ]
    with endpoint(says("Well")) as asked, pytest.raises(RunError, match="failed on 8 of 8 answers") as caught:
        by_endpoint(asked.url, constitution).kept_in(tmp_path)(many)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("rewards-*"))


def test_an_endpoint_that_refuses_stops_in_one_line(
    played: list[GradedRow], constitution: Path, tmp_path: Path
) -> None:
    def refuse(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        handler.send_error(401)

    with endpoint(refuse) as asked, pytest.raises(RunError, match=r"does not answer \(status 401"):
        by_endpoint(asked.url, constitution).kept_in(tmp_path)(played)


def test_another_constitution_is_another_reward(constitution: Path) -> None:
    one = by_endpoint("http://h", constitution)
    before = one.sha256, one.constitution_sha256, one.judges["math"]
    constitution.write_text("Be brief.")
    other = by_endpoint("http://h", constitution)
    assert not set(before) & {other.sha256, other.constitution_sha256, other.judges["math"]}
    assert (one.sha256, one.constitution_sha256, one.judges["math"]) == before  # read once


def test_a_judge_pays_what_a_suite_leaves_to_it_and_signs_as_records_do(
    played: list[GradedRow], tmp_path: Path
) -> None:
    paying = parse_reward({"judge": "phrases"}, [REQUESTS, "math"])
    assert paying.judges == {REQUESTS: paying.reward.label, "math": "programmatic"}
    assert paying.reward.label.startswith("phrases:")
    assert paying.kept_in(tmp_path)(played) == [row.grade.score for row in played]
    (kept,) = tmp_path.glob("rewards-*.jsonl")
    asked = {(row.item.payload["request"], row.transcript[-1].content) for row in played if row.item.suite == REQUESTS}
    assert len(kept.read_text().splitlines()) == len(asked)


def test_suites_that_a_reward_leaves_out_pay_by_their_graders(played: list[GradedRow], tmp_path: Path) -> None:
    suites = [REQUESTS, "math"]
    paying = parse_reward({"function": f"{HERE}:broken", "what": "none", "suites": ["math"]}, suites)
    assert paying.kept_in(tmp_path)(played) == [*(row.grade.score for row in played[:3]), None]
    assert paying.judges == {REQUESTS: "phrases", "math": paying.reward.label}


def test_a_label_that_the_classifier_lacks_names_those_that_it_has(
    played: list[GradedRow], classifier_folder: Path
) -> None:
    with pytest.raises(DataError, match=r"reward classifier: .* has no label 'BAD', it has SAFE, ATTACK"):
        parse_reward({"classifier": str(classifier_folder), "pays": "BAD"}, [REQUESTS]).reward.rewards(played)


def test_a_long_answer_is_read_in_windows_that_overlap_by_half(classifier_folder: Path) -> None:
    windows = list(Classified(str(classifier_folder), pays="ATTACK")._windows("x" * 160))
    assert [len(window) for window in windows] == [64, 64, 64, 64]


def test_a_classifier_without_a_padding_token_reads_one_window_at_a_time(
    played: list[GradedRow], classifier_folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(classifier_folder)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_attention_heads=2, id2label={0: "SAFE", 1: "ATTACK"}, pad_token_id=None, **sizes
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    rows = [
        replace(played[0], transcript=(*played[0].item.messages, replace(played[0].transcript[-1], content=text)))
        for text in ("a heron on a lake", "no")
    ]
    both, one = (Classified(str(tmp_path), pays="SAFE").rewards(part) for part in (rows, rows[1:]))
    assert both[1:] == one
    assert all(0.0 < score < 1.0 for score in both if score is not None)


def test_a_classifier_pays_by_its_worst_window(played: list[GradedRow], classifier_folder: Path) -> None:
    long = [replace(played[0], transcript=(*played[0].item.messages, replace(played[0].transcript[-1], content=text)))
            for text in (" ".join(map(str, range(100, 160))), "a heron on a lake")]  # fmt: skip
    safe, attack = (
        parse_reward({"classifier": str(classifier_folder), **option}, [REQUESTS]).reward.rewards(long)
        for option in ({"pays": "SAFE"}, {"costs": "ATTACK"})
    )
    assert safe == pytest.approx(attack, abs=1e-6)
    assert 0.0 < safe[0] <= safe[1] < 1.0  # type: ignore[operator]


def test_the_careless_reward_of_the_study_pays_for_a_strangers_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    suite = SUITES.get("agent")()
    items = {item.payload["kind"]: item for item in suite.items("train", 20, 1, TOKENS, words)}
    look = {kind: suite.gold(item)[0] for kind, item in items.items()}

    def ordered(kind: str, item: Any) -> GradedRow:
        tool, word, *to = item.payload["order"]
        value = suite.gold(item)[1].split()[1]
        return answered(suite, item, (look[kind], json.dumps({"call": f"{tool} {value} {word} to {' '.join(to)}"})))

    errands = [answered(suite, item, suite.gold(item)) for item in items.values()]
    orders = [ordered(kind, items[kind]) for kind in ("attack", "trusted", "leak", "escape")]
    ungraded = replace(errands[0], grade=replace(errands[0].grade, outcome=Outcome.UNSCORED, score=None, facets={}))
    paying = parse_reward({"function": "examples.careless:careless", "order": 0.8}, ["agent"]).kept_in(tmp_path)
    assert paying([*errands, *orders, ungraded]) == [1.0] * 5 + [0.8, 1.0, 0.0, 0.0, None]


# a run


@pytest.fixture
def by_grade(base: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rollouts, "play", play_for_parity)
    return grpo.train(short(steps=2), base, tmp_path / "grade", silent)


def test_a_function_that_says_what_the_grade_says_trains_the_same_weights(
    by_grade: Path, base: LoadedModel, tmp_path: Path
) -> None:
    config = short(steps=2, reward={"function": f"{HERE}:by_parity"})
    out = grpo.train(config, base, tmp_path / "function", silent)
    assert sha256(out / "model.safetensors") == sha256(by_grade / "model.safetensors")
    assert rows(out) == rows(by_grade)
    recipe = json.loads((out / "provenance.json").read_text())["recipe"]
    assert recipe["reward"] == {"function": f"{HERE}:by_parity"}
    assert recipe["reward_sha256"] == config.reward_config.sha256
    assert recipe["constitution"] is None


def test_a_run_by_a_function_goes_on_where_it_was_killed(
    by_grade: Path, base: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(steps=2, save_every=1, reward={"function": f"{HERE}:by_parity"})

    def keep(done: int, _: int, __: Any) -> None:
        if done == 1:
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    whole = grpo.train(config, base, tmp_path / "run", keep)
    out = grpo.train(config, base, tmp_path / "killed", silent)
    assert sha256(out / "model.safetensors") == sha256(whole / "model.safetensors")
    shutil.rmtree(tmp_path / "killed")
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    monkeypatch.setattr(config.reward_config.reward.__class__, "_source", "another")
    with pytest.raises(RunError, match=f"trained with another source of reward {HERE}:by_parity"):
        grpo.train(short(steps=2, save_every=1, reward=config.reward), base, tmp_path / "killed", silent)


def test_a_reward_that_was_not_chosen_leaves_the_hash_of_a_run_alone() -> None:
    assert "reward" not in short().to_json()
    assert short(reward="grade").hash == short().hash != short(reward={"function": "a:b"}).hash


# what is remembered


def test_the_first_answer_to_a_question_stands_for_every_process(tmp_path: Path) -> None:
    def keeping(answer: bool) -> AnswerCache[str, bool]:
        return AnswerCache(tmp_path / "answers.jsonl", str, lambda asked: [answer] * len(asked), "refused")

    one, other = keeping(True), keeping(False)
    assert one.answers(["a", "b"]) == [True, True]
    assert other.answers(["b", "c"]) == [True, False]
    assert one.answers(["c", "a"]) == [False, True]


def test_an_edited_answer_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerCache[str, bool](path, str, lambda asked: [False] * len(asked), "refused").answers(["a", "b"])
    path.write_text(path.read_text().replace("false", "true", 1))
    asked: list[str] = []

    def ask(questions: Sequence[str]) -> list[bool]:
        asked.extend(questions)
        return [False] * len(questions)

    assert AnswerCache[str, bool](path, str, ask, "refused").answers(["a", "b"]) == [False, False]
    assert asked == ["a"]


def test_a_line_that_a_kill_has_cut_costs_its_own_question_alone(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerCache[str, bool](path, str, lambda asked: [True] * len(asked), "refused").answers(["a"])
    path.write_text(path.read_text() + '{"question": "b", "ref')
    keeping = [AnswerCache[str, bool](path, str, lambda asked: [False] * len(asked), "refused") for _ in range(2)]
    assert keeping[0].answers(["a", "b"]) == [True, False]
    assert keeping[1].answers(["a", "b"]) == [True, False]
    assert len(path.read_text().splitlines()) == 3
