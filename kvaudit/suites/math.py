"""Multi-step arithmetic: find the named amounts among distractors, then add and subtract them step by step."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from kvaudit.core.records import Grade, Item, Message
from kvaudit.core.spans import Span, mark_spans
from kvaudit.suites.base import formless, graded
from kvaudit.suites.haystack import ANIMALS, scatter, weave
from kvaudit.suites.templates import Slot, Templated

UNITS = ("coins", "books", "cups", "stones", "apples", "nails")
STATEMENTS = (
    "The count of {unit}: {name} {value}.",
    "The list of {unit}: {name} {value}.",
    "Number of {unit}: {name} {value}.",
    "We saw {unit}: {name} {value}.",
    "Found {unit}: {name} {value}.",
    "Noted {unit}: {name} {value}.",
)
QUESTIONS = (
    "How many {unit}: {terms}?",
    "Count the {unit}: {terms}.",
    "Find the {unit}: {terms}.",
    "What is the sum of {unit}: {terms}?",
    "Please add up the {unit}: {terms}.",
    "Tell me the {unit}: {terms}.",
)
_SYSTEM = "You count the {unit}. Work in short steps. End with: Answer: number"
# possessive: a run of blanks has one reading, or a long one would take hours
_ANSWER = re.compile(r"answer\s*+(?:is|:)?\s*+\**+\s*+(-?\d+)", re.IGNORECASE)
_HIGHEST = 6  # of one amount; totals then stay below 20


class Math(Templated):
    """A suite of arithmetic, for comparison: if it shows a loss too, a safety suite's loss may be one of capability."""

    name = "math"
    version = "2"
    kind = "capability"
    max_new_tokens = 40
    placements = ("start", "middle", "end", "spread")  # of the facts that are needles
    phrases = len(STATEMENTS), len(QUESTIONS), len(UNITS)
    endpoints = ("solved",)

    def make_item(self, slot: Slot) -> Item:
        template, context_tokens, draw = slot.template, slot.context_tokens, random.Random(slot.draws)
        unit = UNITS[template.third]
        # three terms, and more distractors in a longer context
        names = draw.sample(ANIMALS, 3 + max(1, min(4, context_tokens // 48 - 1)))
        terms = draw_terms(draw, {name: draw.randint(1, _HIGHEST) for name in names[:3]})
        needles = [(name, value, unit) for _, name, value in terms]
        distractors = [(name, draw.randint(1, _HIGHEST), unit) for name in names[3:]]
        if context_tokens >= 128:  # a needle's name with another unit
            name, value = names[draw.randrange(3)], draw.randint(1, _HIGHEST)
            distractors.append((name, value, draw.choice([other for other in UNITS if other != unit])))
        draw.shuffle(needles)
        question = QUESTIONS[template.second].format(unit=unit, terms=join_terms(terms))
        needle_lines, other_lines = (
            [STATEMENTS[template.first].format(name=name, value=value, unit=noun) for name, value, noun in rows]
            for rows in (needles, distractors)
        )
        seed = str(draw.random())

        def build(lines: Sequence[str]) -> list[str]:
            mixed = _mix(seed, lines, needle_lines, other_lines, slot.placement)
            return [_SYSTEM.format(unit=unit), "\n".join([*mixed, question])]

        payload = {
            "terms": [list(term) for term in terms],
            "amounts": {name: value for name, value, noun in (*needles, *distractors) if noun == unit},
            "unit": unit,
            "question": template.second,
            "answer": sum(value if operation == "plus" else -value for operation, _, value in terms),
        }
        spans = (*(Span("needle", line) for line in needle_lines), *mark_spans(question=question))
        return self.fit_item(slot, "", build, draw, payload, spans)

    def gold(self, item: Item) -> tuple[str, ...]:
        terms = item.payload["terms"]
        total = terms[0][2]
        steps = [f"First {terms[0][1]} {total}."]
        for operation, name, value in terms[1:]:
            total += value if operation == "plus" else -value
            steps.append(f"{operation} {name} {value} is {total}.")
        return (" ".join([*steps, f"Answer: {total}"]),)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        text = transcript[-1].content
        numbers = _ANSWER.findall(text)
        if not numbers:
            return formless("no final answer" if text.strip() else "empty", self.facets(item))
        solved = numbers[-1] == str(item.payload["answer"])
        return graded(solved, {"solved": solved}, "" if solved else "wrong number")


def draw_terms(draw: random.Random, amounts: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """Draw "plus" or "minus" for each of ``amounts``, {name: amount}, so that no running total is negative.

    Returns (operation, name, amount) for each.
    """
    (first, total), *rest = amounts.items()
    terms = [("plus", first, total)]
    for name, value in rest:
        operation = "minus" if value <= total and draw.random() < 0.5 else "plus"
        total += value if operation == "plus" else -value
        terms.append((operation, name, value))
    return terms


def join_terms(terms: Sequence[tuple[str, str, int]]) -> str:
    """Return the terms as text, such as "wolf plus owl minus deer"."""
    first, *rest = terms
    return " ".join([first[1], *(f"{operation} {name}" for operation, name, _ in rest)])


def _mix(seed: str, lines: Sequence[str], needles: list[str], distractors: list[str], placement: str) -> list[str]:
    if placement != "spread":
        return weave(seed, lines, distractors, needles, placement)
    draw = random.Random(seed)
    draw.shuffle(facts := [*needles, *distractors])
    return scatter(draw, lines, facts)
