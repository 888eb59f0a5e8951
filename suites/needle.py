"""A sentence to be found in a haystack by what it means: the question has none of its words (after NoLiMa, Modarressi
et al. 2025, arXiv:2502.05167; facts and questions are our own)."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from kvaudit.core.records import Grade, Item, Message, Role
from kvaudit.core.spans import marked
from kvaudit.suites.base import CountTokens, Split, Suite, formless, graded
from kvaudit.suites.haystack import fit, put, scatter
from kvaudit.suites.published import own_part
from kvaudit.suites.templates import place, text_bank
from kvaudit.suites.vocabulary import PEOPLE

_ASKED = "Which person {question}? Answer with the first name alone."
_SYSTEM = "You read files and answer questions about them."
_DISTRACTORS = 4


class Fact(NamedTuple):
    """What a needle says of somebody, and the question that it answers."""

    kind: int
    statement: str
    question: str


FACTS = tuple(Fact(kind, *line.split(" | ")) for kind, (lines,) in enumerate(text_bank(__file__)) for line in lines)


class Needle(Suite):
    """The capability to find what a context holds. Other people, of whom the like is said, are the distractors."""

    name = "needle"
    kind = "capability"
    source = "procedural, written for this project"
    licence = "Apache-2.0"
    max_new_tokens = 64
    endpoints = ("solved",)
    placements = ("start", "middle", "end")  # of the needle in the haystack

    def items(self, split: Split, n: int, seed: int, context_tokens: int, count_tokens: CountTokens) -> list[Item]:
        pool = own_part(range(len(FACTS)), split)
        random.Random(f"{self.name}-{split}-{seed}").shuffle(pool)
        return [self._item(split, index, seed, pool, fitting=(context_tokens, count_tokens)) for index in range(n)]

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

    def _item(self, split: Split, index: int, seed: int, pool: list[int], *, fitting: tuple[int, CountTokens]) -> Item:
        context_tokens, count_tokens = fitting
        number, _, group, turn = place(index, len(pool), 1)
        fact, cluster = FACTS[pool[number]], f"{self.name}-{pool[number]}"
        origin = f"{cluster}-s{seed}-t{context_tokens}-g{group}"
        draw = random.Random(f"{split}-{origin}")
        placement = self.placements[turn % len(self.placements)]
        alike = [FACTS[other] for other in pool if FACTS[other].kind == fact.kind and FACTS[other] != fact]
        who, *others = draw.sample(PEOPLE, 1 + _DISTRACTORS)
        like = draw.sample(alike, _DISTRACTORS)
        distractors = [f"{name.capitalize()} {other.statement}." for name, other in zip(others, like, strict=True)]
        needle = f"{who.capitalize()} {fact.statement}."
        weave = draw.random()  # ``fit`` calls ``build`` again and again, and it must give the same

        def build(lines: Sequence[str]) -> list[str]:
            woven = scatter(random.Random(weave), lines, distractors)
            return [_SYSTEM, "\n".join([*put(woven, needle, placement), _ASKED.format(question=fact.question)])]

        system, user = fit(build, draw, context_tokens, count_tokens)
        return Item(
            suite=self.name,
            item_id=origin,
            cluster_id=cluster,
            messages=(Message(Role.SYSTEM, system), Message(Role.USER, user)),
            context_tokens=context_tokens,
            placement=placement,
            payload={"who": who, "others": others, "needle": needle},
            spans=marked(needle=needle, question=_ASKED.format(question=fact.question)),
        )
