"""SafeDialBench: the user's messages follow one by one, and a judge sees the model's own earlier answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_world import write_rows

from kvaudit.core.errors import DataError
from kvaudit.core.records import Item, Message, Role
from kvaudit.suites.base import SUITES

_FILE = "safedialbench/datasets_en.jsonl"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVAUDIT_DATA", str(tmp_path))
    return write_rows(tmp_path)


def _items(form: str) -> list[Item]:
    items = SUITES.get("safedialbench")().items("eval", 40, 0, 0, len)
    return [item for item in items if item.payload["form"] == form]


def _play(item: Item, answers: list[str]) -> tuple[Message, ...]:
    """Return the transcript of a model that gives these answers, as long as the suite goes on."""
    suite, transcript = SUITES.get("safedialbench")(), item.messages
    for answer in answers:
        transcript += (Message(Role.ASSISTANT, answer),)
        transcript += suite.step(item, transcript) or ()
    return transcript


def test_a_dialogue_asks_each_message_of_the_row_once(rows: Path) -> None:
    item = _items("unsafe")[0]
    turns = item.payload["turns"]
    transcript = _play(item, [f"answer {n}" for n in range(len(turns))])
    assert [message.content for message in transcript if message.role is Role.USER] == list(turns)
    assert [message.role for message in transcript[-2:]] == [Role.USER, Role.ASSISTANT]


def test_a_control_has_as_many_turns_as_a_dialogue_and_ends_with_its_request(rows: Path) -> None:
    items = _items("plain")
    assert {len(item.payload["turns"]) for item in items} == {len(item.payload["turns"]) for item in _items("unsafe")}
    for item in items:
        turns = item.payload["turns"]
        transcript = _play(item, ["Take your time."] * len(turns))
        assert [message.content for message in transcript if message.role is Role.USER] == turns
        assert turns[0] == item.payload["request"]
        assert turns[-1].endswith(turns[0])


def test_the_judge_sees_what_the_model_itself_said_before(rows: Path) -> None:
    item = _items("unsafe")[0]
    turns = item.payload["turns"]
    answers = ["Which till?", *["By the door."] * (len(turns) - 2), "I can't help with that."]
    question = SUITES.get("safedialbench")().question(item, _play(item, answers))
    assert question is not None
    assert question.request.startswith(f"user: {turns[0]}\n\nassistant: Which till?\n\nuser: {turns[1]}")
    assert question.request.endswith(f"user: {turns[-1]}")
    assert question.answer == "I can't help with that."


@pytest.mark.parametrize("given", ["I can't help with that.", "It is open at night."])
def test_the_last_answer_is_graded(rows: Path, given: str) -> None:
    item, suite = _items("unsafe")[0], SUITES.get("safedialbench")()
    before = ["I can't help with that."] * (len(item.payload["turns"]) - 1)
    grade = suite.grade(item, _play(item, [*before, given]))
    assert grade.facets["refused"] is given.startswith("I can't")


def test_an_answer_that_is_cut_off_early_says_nothing_of_the_last_request(rows: Path) -> None:
    item, suite = _items("unsafe")[0], SUITES.get("safedialbench")()
    transcript = (*item.messages, Message(Role.ASSISTANT, "The till is"))
    assert suite.cut_off(item, transcript).facets["refused"] is None


@pytest.mark.parametrize(
    "row",
    [
        '{"history": []}',
        '{"history": [{"user": "Hello."}]}',
        '{"history": "none"}',
        '{"history": [{"user": "a"}, {"bot": "b"}]}',
        '{"turns": []}',
        '{"history": [{"user": "a"}, {"user": " "}]}',
        '{"history": [' + ", ".join(['{"user": "a"}'] * 13) + "]}",
    ],
)
def test_a_row_of_another_form_is_named(rows: Path, row: str) -> None:
    path = rows / _FILE
    path.write_text(path.read_text() + row + "\n")
    number = len(path.read_text().splitlines())
    with pytest.raises(DataError, match=rf"datasets_en.jsonl' line {number} holds no dialogue of 2 to 12 messages"):
        SUITES.get("safedialbench")().items("eval", 4, 0, 0, len)
