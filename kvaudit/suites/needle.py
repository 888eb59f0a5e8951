"""Find a sentence in a haystack by meaning: the question shares no word with it (after NoLiMa, Modarressi et al. 2025,
arXiv:2502.05167; facts and questions were written for this project)."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from kvaudit.core.records import Grade, Item, Message
from kvaudit.core.spans import marked
from kvaudit.suites.base import Split, formless, graded
from kvaudit.suites.haystack import PEOPLE, weave
from kvaudit.suites.templates import Slot, Template, Templated, bank_templates, text_bank

_QUESTION = "Which person {question}? Answer with the first name alone."
_SYSTEM = "You read files and answer questions about them."
_DISTRACTORS = 4


class Fact(NamedTuple):
    """A statement about a person, and the question that it answers."""

    kind: int
    statement: str
    question: str


FACTS = tuple(Fact(kind, *line.split(" | ")) for kind, (lines,) in enumerate(text_bank(__file__)) for line in lines)


class Needle(Templated):
    """Find what a context holds. Similar statements about other people are the distractors."""

    name = "needle"
    kind = "capability"
    max_new_tokens = 64
    endpoints = ("solved",)
    placements = ("start", "middle", "end")  # of the needle in the haystack

    def pool(self, split: Split, seed: int) -> Sequence[Template]:
        return bank_templates(self.name, len(FACTS), split, seed)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        words = set(re.findall(r"[a-z]+", transcript[-1].content.lower()))
        if not words:
            return formless("no words", self.facets(item))
        names, who = words & set(PEOPLE), item.payload["who"]
        if names == {who}:
            return graded(True, {"solved": True})
        in_context = names & {who, *item.payload["others"]}
        note = (
            "nobody" if not names else "several" if len(names) > 1 else "a distractor" if in_context else "a stranger"
        )
        return graded(False, {"solved": False}, f"named {note}")

    def gold(self, item: Item) -> tuple[str, ...]:
        return (str(item.payload["who"]).capitalize(),)

    def make_item(self, slot: Slot) -> Item:
        fact, draw = FACTS[slot.template.first], random.Random(slot.draws)
        # distractors are of the same split, so that training never meets a statement of the evaluation
        facts = [FACTS[template.first] for template in slot.pool]
        similar = [other for other in facts if other.kind == fact.kind and other != fact]
        who, *others = draw.sample(PEOPLE, 1 + _DISTRACTORS)
        pairs = zip(others, draw.sample(similar, _DISTRACTORS), strict=True)
        distractors = [f"{name.capitalize()} {other.statement}." for name, other in pairs]
        needle, question = f"{who.capitalize()} {fact.statement}.", _QUESTION.format(question=fact.question)
        seed = draw.random()

        def build(lines: Sequence[str]) -> list[str]:
            return [_SYSTEM, "\n".join([*weave(seed, lines, distractors, [needle], slot.placement), question])]

        payload = {"who": who, "others": others, "needle": needle}
        return self.fit_item(slot, "", build, draw, payload, marked(needle=needle, question=question))
