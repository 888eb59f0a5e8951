"""A real instruct model, where KVAUDIT_REAL_MODEL names its folder: its template, its turns, its sense."""

from __future__ import annotations

import os

import pytest

from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.conversations import play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.suites.base import Suite

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif("KVAUDIT_REAL_MODEL" not in os.environ, reason="needs a model folder in KVAUDIT_REAL_MODEL"),
]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(os.environ["KVAUDIT_REAL_MODEL"])


def test_the_opening_is_what_the_tokenizer_itself_renders(model: LoadedModel) -> None:
    rows = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé 你好?"}]
    wanted = model.chat.tokenizer.apply_chat_template(rows, add_generation_prompt=True, return_dict=True)["input_ids"]
    opening = model.chat.prompt([Message(Role(row["role"]), row["content"]) for row in rows])
    assert list(opening.ids) == list(wanted)


def test_replies_join_to_the_whole_conversation(model: LoadedModel) -> None:
    start = [Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "One?")]
    more = [Message(Role.USER, "Two?")]
    opening, whole = (
        model.chat.prompt(start),
        model.chat.prompt([*start, Message(Role.ASSISTANT, "Yes."), *more]),
    )
    stop = whole.ids[len(opening.ids) + model.chat.count_tokens("Yes.")]
    completion = whole.ids[len(opening.ids) : len(opening.ids) + model.chat.count_tokens("Yes.") + 1]
    assert stop in model.chat.stop_ids
    assert opening.ids + completion + model.chat.continuation(completion, more).ids == whole.ids


class Capital(Suite):
    name = "capital"
    max_new_tokens = 48

    def step(self, item: Item, transcript: tuple[Message, ...]) -> None:
        return None

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        good = "paris" in transcript[-1].content.casefold()
        return Grade(Outcome.DESIRED if good else Outcome.UNDESIRED, float(good))


def test_it_answers_and_ends_its_turn(model: LoadedModel) -> None:
    item = Item("capital", "1", "1", (Message(Role.USER, "What is the capital of France?"),), 64, "none")
    (played,) = play(Sampler(model, parse_policy("none")), [(Capital(), item)], Decoding(1, temperature=0.0), [0])
    assert (played.grade.score, played.finish_reason) == (1.0, "stop")
