"""The question shares no word with its needle, and only the one name is right."""

from __future__ import annotations

import re

import pytest
from suite_world import grade, text_of, words

from kvaudit.suites.needle import FACTS, Needle

FUNCTION_WORDS = frozenset(
    re.findall(r"\w+", "a an and at of in on the to by for is has was are as it its one each with from who after off")
)
ITEMS = Needle().items("eval", 66, 3, 400, words)


def stems(text: str) -> set[str]:
    """The words that carry meaning, by their first four letters: work is worked."""
    return {word[:4] for word in re.findall(r"[a-z]+", text.lower()) if word not in FUNCTION_WORDS}


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.statement)
def test_a_question_shares_no_word_with_its_needle(fact):
    assert not stems(fact.statement) & stems(fact.question)


def test_there_are_facts_enough_and_each_once():
    assert len(FACTS) == len({fact.statement for fact in FACTS}) == 96
    assert len({(fact.kind, fact.question) for fact in FACTS}) == 96


def test_the_needle_stands_once_at_its_placement_among_distractors_of_its_kind():
    places = {"start": (0.0, 0.15), "middle": (0.3, 0.7), "end": (0.75, 1.0)}
    for item in ITEMS:
        text = text_of(item)
        assert text.count(item.payload["needle"]) == 1
        low, high = places[item.placement]
        assert low <= text.index(item.payload["needle"]) / len(text) <= high
        assert all(f"\n{name.capitalize()} " in text for name in item.payload["others"])
    assert {item.placement for item in ITEMS} == set(places)


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ("{who}", ""),
        ("It is {who}.", ""),
        ("{other}", "named a distractor"),
        ("{who} or {other}", "named several"),
        ("nobody", "named nobody"),
        ("...", "no words"),
    ],
)
def test_only_the_one_name_is_right(answer, note):
    payload = ITEMS[0].payload
    said = answer.format(who=payload["who"].capitalize(), other=payload["others"][0].capitalize())
    found = grade(Needle(), ITEMS[0], [said])
    assert (found.score, found.note) == (0.0 if note else 1.0, note)


def test_a_context_of_32k_holds_it():
    item = Needle().items("eval", 1, 3, 32768, words)[0]
    assert 32700 < words(text_of(item)) <= 32768
