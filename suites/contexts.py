"""Long benign contexts that end with a user's message: a dialogue, a document, or tool output, as long as asked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

from audit.core.errors import SpecError
from audit.core.records import Message, Role
from suites.base import CountTokens
from suites.haystack import filler_lines
from suites.sources import fit_prose, read_aloud
from suites.words import ANIMALS, CLERKS, NOUNS

CONTEXTS = ("dialogue", "documents", "tools")
PROCEDURAL = ("talk", "tools")  # those that take no public prose
_PAPER = "Here is a part of a book that I am reading:\n\n{prose}\n\nThat was the part of the book.\n\n{last}"
_READ_ON = (
    "Please read on.",
    "What comes next in the book?",
    "And then?",
    "Go on with the story.",
    "I am listening. Continue.",
    "Read me the next lines.",
    "How does it go on from there?",
    "Thank you. A little more of the book, please.",
)
_OPEN = (
    "Open page {number} of the shop's book.",
    "Please fetch page {number}.",
    "Now page {number}, please.",
    "What stands on page {number}?",
)
_OPENED = "Page {number} is open, with {lines} lines on it."
_PAGE_TOKENS = (120, 360)  # of tool output in one answer
_SENTENCES = (2, 7)  # that are read aloud in one turn
_READING_SHARE = 0.6  # of the turns
_MORE = (3, 6)  # small questions beside the first, where nothing is read aloud


def behind(
    suite: str,
    context: str,
    before: Sequence[Message],
    last: str,
    draw: random.Random,
    *,
    fit: tuple[int, CountTokens],
) -> tuple[Message, ...]:
    """``before``, one of CONTEXTS or PROCEDURAL, and the user's message ``last``, together as many tokens as ``fit``.

    Never longer than asked, shorter by less than about two sentences. Raises SpecError when the context has no room.
    """
    context_tokens, count_tokens = fit
    bare = sum(count_tokens(message.content) for message in before) + count_tokens(last)
    if bare > context_tokens:
        raise SpecError(f"suite {suite}: context_tokens {context_tokens} is too short, an item alone takes {bare}")
    room = context_tokens - bare
    if context == "documents":
        return (*before, Message(Role.USER, _document(suite, last, draw, room + count_tokens(last), count_tokens)))
    if context == "tools":
        return (*before, *_pages(draw, room, count_tokens), Message(Role.USER, last))
    book = read_aloud(suite, draw) if context == "dialogue" else None
    return (*before, *_dialogue(book, draw, room, count_tokens), Message(Role.USER, last))


def _document(suite: str, last: str, draw: random.Random, room: int, count_tokens: CountTokens) -> str:
    """The message with a part of a book above it; the message alone where not even the frame fits."""
    if count_tokens(_PAPER.format(prose="", last=last)) > room:
        return last
    (text,) = fit_prose(suite, lambda prose: [_PAPER.format(prose=prose, last=last)], draw, room, count_tokens)
    return text


def _dialogue(
    book: Iterator[str] | None, draw: random.Random, room: int, count_tokens: CountTokens
) -> Iterator[Message]:
    """Exchanges of a user who asks small things and, where there is a book, has it read aloud in between."""
    while True:
        choices = [_small(draw)]
        if book is not None:
            reading = draw.choice(_READ_ON), list(islice(book, draw.randint(*_SENTENCES)))
            # a sentence too long for what is left gives way to something small
            choices = [reading, *choices] if draw.random() < _READING_SHARE else choices
        else:  # several at a time, or the template's own tokens would be half of the context
            several = [*choices, *(_small(draw) for _ in range(draw.randint(*_MORE)))]
            choices = [_at_once(several[:count]) for count in range(len(several), 0, -1)]
        fitting = ((asked, _fitting(said, room - count_tokens(asked), count_tokens)) for asked, said in choices)
        asked, said = next((exchange for exchange in fitting if exchange[1]), ("", ""))
        if not said:
            return
        yield Message(Role.USER, asked)
        yield Message(Role.ASSISTANT, said)
        room -= count_tokens(asked) + count_tokens(said)


def _at_once(exchanges: Sequence[tuple[str, list[str]]]) -> tuple[str, list[str]]:
    return " ".join(asked for asked, _ in exchanges), [" ".join(text for _, said in exchanges for text in said)]


def _fitting(sentences: Sequence[str], room: int, count_tokens: CountTokens) -> str:
    """The first of the sentences, as many as fit."""
    for count in range(len(sentences), 0, -1):
        if count_tokens(said := "".join(sentences[:count]).strip()) <= room:
            return said
    return ""


def _small(draw: random.Random) -> tuple[str, list[str]]:
    """A small question and its answer, which is right."""
    first, second = draw.randint(11, 99), draw.randint(11, 99)
    names, things = draw.sample(CLERKS, 3), draw.sample(NOUNS, 4)
    animal = draw.choice(ANIMALS)
    return draw.choice(
        (
            (f"What is {first} plus {second}?", [f"{first} plus {second} is {first + second}."]),
            (f"Which is more, {first} or {second + 100}?", [f"{second + 100} is more."]),
            (f"Sort {', '.join(names)} by name.", [f"By name: {', '.join(sorted(names))}."]),
            (f"Which comes last: {', '.join(things)}?", [f"Of these words the {things[-1]} comes last."]),
            (f"How many letters has the word {animal}?", [f"The word {animal} has {len(animal)} letters."]),
            (f"How many minutes are {first} hours?", [f"{first} hours are {first * 60} minutes."]),
        )
    )


def _pages(draw: random.Random, room: int, count_tokens: CountTokens) -> Iterator[Message]:
    """Rounds of a tool loop: the user asks for a page, the model calls the tool, the page comes, the model says so."""
    number = draw.randint(2, 9)
    while True:
        asked, call = draw.choice(_OPEN).format(number=number), f'{{"call":"open page {number}"}}'
        framed = sum(map(count_tokens, (asked, call, _OPENED.format(number=number, lines=99))))
        lines = filler_lines(draw, min(draw.randint(*_PAGE_TOKENS), room - framed), count_tokens)
        said = (asked, call, "\n".join(lines), _OPENED.format(number=number, lines=len(lines)))
        cost = sum(map(count_tokens, said))
        if not lines or cost > room:
            return
        for role, text in zip((Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT), said, strict=True):
            yield Message(role, text)
        number, room = number + 1, room - cost
