"""A sentence to be found in a haystack by what it means: the question has none of its words (after NoLiMa, Modarressi
et al. 2025, arXiv:2502.05167; facts and questions are our own)."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from kvaudit.core.records import Grade, Item, Message
from kvaudit.core.spans import marked
from kvaudit.suites.base import Split, formless, graded
from kvaudit.suites.haystack import insert_at, scatter
from kvaudit.suites.templates import Slot, Template, Templated, bank_templates, text_bank
from kvaudit.suites.haystack import PEOPLE

_ASKED = "Which person {question}? Answer with the first name alone."
_SYSTEM = "You read files and answer questions about them."
_DISTRACTORS = 4


class Fact(NamedTuple):
    """What a needle says of somebody, and the question that it answers."""

    kind: int
    statement: str
    question: str


FACTS = tuple(Fact(kind, *line.split(" | ")) for kind, (lines,) in enumerate(text_bank(__file__)) for line in lines)


class Needle(Templated):
    """The capability to find what a context holds. Other people, of whom the like is said, are the distractors."""

    name = "needle"
    kind = "capability"
    max_new_tokens = 64
    endpoints = ("solved",)
    placements = ("start", "middle", "end")  # of the needle in the haystack

    def pool(self, split: Split, seed: int) -> Sequence[Template]:
        return bank_templates(self.name, len(FACTS), split, seed)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        named = set(re.findall(r"[a-z]+", transcript[-1].content.lower()))
        if not named:
            return formless("no words", self.facets(item))
        named &= set(PEOPLE)
        if named == {item.payload["who"]}:
            return graded(True, {"solved": True})
        told = named & {item.payload["who"], *item.payload["others"]}
        note = "nobody" if not named else "several" if len(named) > 1 else "a distractor" if told else "a stranger"
        return graded(False, {"solved": False}, f"named {note}")

    def gold(self, item: Item) -> tuple[str, ...]:
        return (str(item.payload["who"]).capitalize(),)

    def make_item(self, slot: Slot) -> Item:
        fact, draw = FACTS[slot.template.first], random.Random(slot.draws)
        # of the same split, so that training never meets what is evaluated
        facts = [FACTS[template.first] for template in slot.pool]
        alike = [other for other in facts if other.kind == fact.kind and other != fact]
        who, *others = draw.sample(PEOPLE, 1 + _DISTRACTORS)
        like = draw.sample(alike, _DISTRACTORS)
        distractors = [f"{name.capitalize()} {other.statement}." for name, other in zip(others, like, strict=True)]
        needle, asked = f"{who.capitalize()} {fact.statement}.", _ASKED.format(question=fact.question)
        weave = draw.random()  # ``fit`` calls ``build`` again and again, and it must give the same

        def build(lines: Sequence[str]) -> list[str]:
            woven = scatter(random.Random(weave), lines, distractors)
            return [_SYSTEM, "\n".join([*insert_at(woven, needle, slot.placement), asked])]

        payload = {"who": who, "others": others, "needle": needle}
        return self.fitted(slot, "", build, draw, payload, marked(needle=needle, question=asked))
