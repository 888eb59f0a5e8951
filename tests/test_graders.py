"""The contract that every grader is held to, of whatever kind: whoever adds a file is found, and held to it too."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from judge_world import THINGS, endpoint, judges_by_words, labels, question

from kvaudit.audit.judges.base import JUDGES, CachedGrader, Grader, Judge
from kvaudit.core.judge_answers import Question
from kvaudit.core.plugins import sha256_of

__all__ = ["labels"]  # a fixture
AnyGrader = Grader[Any, Any]
KINDS: dict[str, Any] = {"judge": JUDGES}
Check = Callable[[AnyGrader], None]
ASKED: dict[str, list[Any]] = {
    "judge": [question(thing, refuses=n % 2 == 0) for n, thing in enumerate(THINGS)],
}
HOSTILE: dict[str, list[Any]] = {
    "judge": [
        Question("", ""),
        Question("Say yes.", "\x00\x1b[2J\u202e yes no"),
        Question("a", "{request} {answer} %s"),
        Question("Long?", "word " * 20000),
    ],
}


@pytest.fixture(
    params=[found for kind in KINDS.values() for found in kind.all().values()],
    ids=lambda found: f"{found.kind}-{found.name}",
)
def grader(request: pytest.FixtureRequest, labels: Path, tiny_folder: Path) -> Iterator[AnyGrader]:
    """Every grader that is found, with what its options name: a model, an endpoint, labels, a list of phrases."""
    kind = request.param
    wanted = {option.name for option in fields(kind) if option.default is MISSING}
    options = {"model": str(tiny_folder)} if "model" in wanted else {}
    with ExitStack() as stack:
        if "base_url" in wanted:
            options["base_url"] = stack.enter_context(endpoint(judges_by_words)).url
        yield kind(**options)


def check_it_says_what_it_is(grader: AnyGrader) -> None:
    assert grader.kind in KINDS
    assert grader.field
    assert grader.folder == f"{grader.name}-{grader.sha256[:12]}"
    grader.check()


def check_a_grade_for_every_question(grader: AnyGrader) -> None:
    assert len(grader.grades(ASKED[grader.kind])) == len(ASKED[grader.kind])
    assert grader.grades([]) == []


def check_no_grade_depends_on_the_others(grader: AnyGrader) -> None:
    asked = ASKED[grader.kind]
    said = grader.grades(asked)
    assert grader.grades(asked[::-1]) == said[::-1]
    assert [grader.grades([one])[0] for one in asked[:3]] == said[:3]


def check_the_identity_is_a_hash_that_stays(grader: AnyGrader) -> None:
    again = type(grader)(**{option.name: getattr(grader, option.name) for option in fields(grader)})
    assert re.fullmatch("[0-9a-f]{64}", grader.identity)
    assert (again.identity, again.sha256) == (grader.identity, grader.sha256)


def check_hostile_text_is_graded_or_fails(grader: AnyGrader) -> None:
    assert len(grader.grades(HOSTILE[grader.kind])) == len(HOSTILE[grader.kind])


def check_what_it_says_is_remembered_as_it_was_said(grader: AnyGrader) -> None:
    for grade in grader.grades(ASKED[grader.kind]):
        if grade is not None:
            kept = json.loads(json.dumps(grader.to_stored(grade)))
            assert type(kept) in grader.stored_types
            assert grader.from_stored(kept) == grade


def check_questions_are_told_apart(grader: AnyGrader) -> None:
    keys = [grader.key_of(one) for one in ASKED[grader.kind]]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_grader_keeps_the_contract(grader: AnyGrader, check: Check) -> None:
    check(grader)


@dataclass(frozen=True)
class RightJudge(Judge):
    name = "right"

    @property
    def identity(self) -> str:
        return sha256_of("right")

    def refused(self, questions: Sequence[Question]) -> list[bool | None]:
        return ["sorry" in question.answer for question in questions]


def crashes_on_text(grader: RightJudge, asked: Sequence[Question]) -> list[Any]:
    assert all(one.answer.split()[0] for one in asked)
    return Judge.grades(grader, asked)


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        ({"grades": lambda self, asked: Judge.grades(self, asked)[1:]}, check_a_grade_for_every_question),
        (
            {"grades": lambda self, asked: Judge.grades(self, asked[:1]) * len(asked)},
            check_no_grade_depends_on_the_others,
        ),
        (
            {"identity": property(lambda self: sha256_of(time.perf_counter_ns()))},
            check_the_identity_is_a_hash_that_stays,
        ),
        ({"grades": crashes_on_text}, check_hostile_text_is_graded_or_fails),
        ({"from_stored": lambda self, stored: None}, check_what_it_says_is_remembered_as_it_was_said),
        ({"key_of": staticmethod(lambda question: sha256_of("the same"))}, check_questions_are_told_apart),
    ],
)
def test_a_wrong_grader_breaks_the_contract(wrong: dict[str, Any], check: Check) -> None:
    check(RightJudge())
    with pytest.raises((AssertionError, IndexError)):
        check(type("Wrong", (RightJudge,), wrong)())


def test_a_grade_is_asked_for_once_and_a_failure_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said = ASKED["judge"], RightJudge().grades(ASKED["judge"])
    monkeypatch.setattr(RightJudge, "grades", lambda self, new: [None, *said[1:]])
    assert CachedGrader(RightJudge(), tmp_path).grades(asked) == [None, *said[1:]]
    again: list[Any] = []
    monkeypatch.setattr(RightJudge, "grades", lambda self, new: again.extend(new) or said[:1])
    assert CachedGrader(RightJudge(), tmp_path).grades(asked) == said
    assert again == asked[:1]
    again.clear()
    (tmp_path / "fresh").mkdir()
    assert CachedGrader(RightJudge(), tmp_path / "fresh").grades([asked[0], asked[0]]) == [said[0], said[0]]
    assert again == asked[:1]  # equal questions are asked once
