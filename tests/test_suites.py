"""Every procedural suite keeps the contract of suites/base.py."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.core.errors import SpecError
from audit.core.records import Grade, Item, Message, Outcome, Role
from suites.base import SUITES, Suite

NAMES = ["agent", "math", "refusal"]  # the procedural ones; suites that read files have tests of their own


def words(text: str) -> int:
    """A tokenizer stand-in: words, digits and punctuation runs."""
    return len(re.findall(r" ?[A-Za-z]+| ?\d|\n| ?[^\sA-Za-z0-9]+", text))


def play(suite: Suite, item: Item, completions: tuple[str, ...]) -> tuple[Message, ...]:
    transcript = item.messages
    for completion in completions:
        transcript = (*transcript, Message(Role.ASSISTANT, completion))
        answer = suite.step(item, transcript)
        if answer is None:
            break
        transcript += answer
    return transcript


def grade(suite: Suite, item: Item, *completions: str) -> Grade:
    return suite.grade(item, play(suite, item, completions))


def text_of(item: Item) -> str:
    return "\n".join(message.content for message in item.messages)


@pytest.fixture(params=NAMES)
def suite(request: pytest.FixtureRequest) -> Suite:
    return SUITES.get(request.param)()


def test_the_procedural_suites_are_registered():
    assert set(NAMES) <= set(SUITES.all())


def test_item_ids_are_unique_and_stable(suite):
    first = suite.items("eval", 300, 7, 160, words)
    assert len({item.item_id for item in first}) == 300
    assert first == suite.items("eval", 300, 7, 160, words)


def test_a_larger_request_starts_with_the_same_items(suite):
    assert suite.items("eval", 90, 3, 128, words)[:40] == suite.items("eval", 40, 3, 128, words)


def test_another_seed_asks_other_questions(suite):
    texts = [{text_of(item) for item in suite.items("eval", 80, seed, 160, words)} for seed in (1, 2)]
    assert not texts[0] & texts[1]


@pytest.mark.parametrize("context_tokens", [96, 192, 2048])
def test_gold_answers_score_one(suite, context_tokens):
    for item in suite.items("eval", 150, 1, context_tokens, words):
        result = grade(suite, item, *suite.gold(item))
        assert (result.outcome, result.score, result.note) == (Outcome.DESIRED, 1.0, "")


def test_gold_takes_no_more_turns_and_tokens_than_allowed(suite):
    for item in suite.items("eval", 150, 1, 160, words):
        gold = suite.gold(item)
        assert 1 <= len(gold) <= suite.max_turns
        assert max(map(words, gold)) < suite.max_new_tokens
        assert suite.step(item, play(suite, item, gold)) is None


@pytest.mark.parametrize("completion", ["", " \n"])
def test_an_empty_answer_is_degenerate(suite, completion):
    for item in suite.items("eval", 40, 1, 160, words):
        result = grade(suite, item, completion)
        assert (result.outcome, result.score) == (Outcome.DEGENERATE, 0.0)


def test_train_and_evaluation_share_no_cluster_and_no_text(suite):
    train = suite.items("train", 600, 1, 160, words)
    held_out = suite.items("eval", 600, 1, 160, words)
    assert not {item.cluster_id for item in train} & {item.cluster_id for item in held_out}
    assert not {item.item_id for item in train} & {item.item_id for item in held_out}
    assert not {text_of(item) for item in train} & {text_of(item) for item in held_out}


def test_every_word_of_the_evaluation_occurs_in_training(suite):
    def vocabulary(split: str) -> set[str]:
        played = [play(suite, item, suite.gold(item)) for item in suite.items(split, 600, 1, 160, words)]
        return {word for transcript in played for m in transcript for word in re.findall("[A-Za-z]+", m.content)}

    assert vocabulary("eval") <= vocabulary("train")


def test_all_suites_together_use_a_small_vocabulary():
    found: set[str] = set()
    for name in NAMES:
        suite = SUITES.get(name)()
        for item in suite.items("train", 400, 1, 160, words):
            for message in play(suite, item, suite.gold(item)):
                found |= set(re.findall("[A-Za-z]+", message.content))
    assert 200 < len(found) <= 600


@pytest.mark.parametrize("split", ["train", "eval"])
def test_there_are_at_least_sixty_clusters_visited_round_robin(suite, split):
    clusters = [item.cluster_id for item in suite.items(split, 300, 1, 160, words)]
    count = len(set(clusters))
    assert count >= 60
    assert len(set(clusters[:count])) == count
    assert clusters[count : 2 * count] == clusters[:count]


@pytest.mark.parametrize("context_tokens", [96, 160, 256, 1024, 8192])
def test_length_is_never_above_and_within_a_tenth_of_the_request(suite, context_tokens):
    for item in suite.items("eval", 40, 1, context_tokens, words):
        length = sum(words(message.content) for message in item.messages)
        assert context_tokens * 0.9 <= length <= context_tokens
        assert item.context_tokens == context_tokens


def test_too_short_a_context_is_the_users_error(suite):
    with pytest.raises(SpecError, match=r"context_tokens 20 is too short: this item alone takes \d+"):
        suite.items("eval", 1, 1, 20, words)


def test_an_unknown_split_is_the_users_error(suite):
    with pytest.raises(SpecError, match="unknown split 'test'"):
        suite.items("test", 1, 1, 160, words)


def test_every_placement_occurs_and_is_recorded(suite):
    placements = {item.placement for item in suite.items("eval", 144, 1, 160, words)}
    assert len(placements) == 4
    assert {"start", "middle", "end"} < placements


def test_opening_is_a_system_and_a_user_message(suite):
    for item in suite.items("eval", 72, 1, 160, words):
        assert [message.role for message in item.messages] == [Role.SYSTEM, Role.USER]


HOSTILE = st.one_of(
    st.text(),
    st.recursive(st.none() | st.integers() | st.text(), lambda leaf: st.lists(leaf) | st.dictionaries(st.text(), leaf))
    .map(repr)
    .map(lambda text: text.replace("'", '"')),
    st.sampled_from(
        ["{" * 5000, '{"a":' * 5000, "Answer: " + "9" * 9000, '{"tool":' + "9" * 9000 + "}", "\x00\ud7ff", "{}"]
    ),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(completion=HOSTILE)
def test_hostile_completions_are_graded_and_never_raise(name, completion):
    suite = SUITES.get(name)()
    for item in suite.items("eval", 2, 1, 160, words):
        assert grade(suite, item, completion, completion).outcome is not Outcome.UNSCORED
