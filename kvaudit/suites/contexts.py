"""Contexts: named conditions that a published row may be put into, each a suite of its own, SUITE@CONTEXT.

None is ever on by itself. What a context does to the uncompressed model is measured beside the bare row, since small
talk or three words on brevity can take from a model the very behaviour that is asked for (docs/results/contexts.md
has how much of it each one took).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from kvaudit.core.errors import DataError, SpecError, UnknownName
from kvaudit.core.records import Item, Message, Role
from kvaudit.suites.base import SUITES, CountTokens, Split, Suite
from kvaudit.suites.haystack import filler_lines
from kvaudit.suites.sources import data_file, fit_prose, json_array, book_sentences, rows_of
from kvaudit.suites.haystack import ANIMALS, CLERKS, NOUNS

TALKS = "tau_bench/gpt-4o-airline.json"  # conversations of customers with an agent
VERSION = "1"  # of what stands around a row
PROCEDURAL = ("talk", "pages")  # those that take no public prose, for suites that build a context of their own
_SHORT = "Answer in at most three sentences."
_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_PAPER = "Here is a part of a book that I am reading:\n\n{prose}\n\nThat was the part of the book."
_AT_HAND = "For reference, a part of a book that the user is reading:\n\n{prose}\n\nEnd of the book."
_NOTED = "I have read it."
_FETCH, _FETCH_CALL, _FETCHED = "Open the page of the book, please.", '{"call":"open book"}', "The page is open."
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

Messages = tuple[Message, ...]


class Fit(NamedTuple):
    """What a row is fitted into: its suite's name, the draws, and the tokens that all messages may take together."""

    suite: str
    draw: random.Random
    tokens: int
    count: CountTokens


Wrap = Callable[[Messages, Fit], Messages]


@dataclass(frozen=True)
class Context:
    """One condition. ``wrap`` gives the messages with the context around them, never longer than ``Fit.tokens``.

    ``fills`` says whether it is made to a length; one that is not adds the same words to every row.
    """

    says: str
    wrap: Wrap
    fills: bool = True


def _ending(text: str) -> Wrap:
    """The row with ``text`` below its last message."""
    return lambda row, _: (*row[:-1], replace(row[-1], content=f"{row[-1].content}\n\n{text}"))


def _with_prose(place: Callable[[Messages, str], Messages]) -> Wrap:
    """A passage of a book where ``place`` puts it."""

    def wrap(row: Messages, fit: Fit) -> Messages:
        roles = [message.role for message in place(row, "")]
        texts = fit_prose(
            fit.suite, lambda prose: [message.content for message in place(row, prose)], fit.draw, fit.tokens, fit.count
        )
        return tuple(map(Message, roles, texts))

    return wrap


def _system_and_rest(row: Messages) -> tuple[Messages, Messages]:
    """The system message, if there is one, and the rest, which begins with the user."""
    first = int(row[0].role is Role.SYSTEM)
    return row[:first], row[first:]


def _above(row: Messages, prose: str) -> Messages:
    system, (first, *rest) = _system_and_rest(row)
    return (*system, replace(first, content=f"{_PAPER.format(prose=prose)}\n\n{first.content}"), *rest)


def _in_system(row: Messages, prose: str) -> Messages:
    system, rest = _system_and_rest(row)
    above = [message.content for message in system]
    return (Message(Role.SYSTEM, "\n\n".join([*above, _AT_HAND.format(prose=prose)])), *rest)


def _own_turn(row: Messages, prose: str) -> Messages:
    system, rest = _system_and_rest(row)
    return (*system, Message(Role.USER, _PAPER.format(prose=prose)), Message(Role.ASSISTANT, _NOTED), *rest)


def _fetched(row: Messages, prose: str) -> Messages:
    system, rest = _system_and_rest(row)
    said = ((Role.USER, _FETCH), (Role.ASSISTANT, _FETCH_CALL), (Role.TOOL, prose), (Role.ASSISTANT, _FETCHED))
    return (*system, *(Message(role, text) for role, text in said), *rest)


def _after(talk: Callable[[random.Random, int, Fit], Iterator[Message]]) -> Wrap:
    """Turns of a conversation between the system message and the row."""

    def wrap(row: Messages, fit: Fit) -> Messages:
        system, rest = _system_and_rest(row)
        room = fit.tokens - sum(fit.count(message.content) for message in row)
        if room < 0:
            raise SpecError(
                f"suite {fit.suite}: context_tokens {fit.tokens} is too short, an item alone takes {fit.tokens - room}"
            )
        return (*system, *talk(fit.draw, room, fit), *rest)

    return wrap


def _chatting(draw: random.Random, room: int, fit: Fit) -> Iterator[Message]:
    """What customers and an agent said, conversation after conversation, as far as whole exchanges fit."""
    talks, before = _talks(data_file(fit.suite, TALKS)), -1
    while room != before:  # they come again where a context is longer than all of them
        before = room
        for talk in draw.sample(talks, len(talks)):
            for asked, said in talk:
                cost = fit.count(asked) + fit.count(said)
                if cost > room:
                    break
                yield Message(Role.USER, asked)
                yield Message(Role.ASSISTANT, said)
                room -= cost


@cache
def _talks(path: Path) -> tuple[tuple[tuple[str, str], ...], ...]:
    """The exchanges in words of every conversation; raises DataError where there is none."""
    found = []
    for number, row in enumerate(json_array(path), start=1):
        said = [(turn.get("role"), turn.get("content") or "") for turn in rows_of(path, number, row, "traj")]
        talk = tuple((a[1], b[1]) for a, b in pairwise(said) if (a[0], b[0]) == ("user", "assistant") and a[1] and b[1])
        found += [talk] if talk else []
    if not found:
        raise DataError(f"{str(path)!r} holds no exchange of a user with an assistant")
    return tuple(found)


def _paging(draw: random.Random, room: int, fit: Fit) -> Iterator[Message]:
    """Rounds of a tool loop: the user asks for a page, the model calls the tool, the page comes, the model says so."""
    number = draw.randint(2, 9)
    while True:
        asked, call = draw.choice(_OPEN).format(number=number), f'{{"call":"open page {number}"}}'
        framed = sum(map(fit.count, (asked, call, _OPENED.format(number=number, lines=99))))
        lines = filler_lines(draw, min(draw.randint(*_PAGE_TOKENS), room - framed), fit.count)
        said = (asked, call, "\n".join(lines), _OPENED.format(number=number, lines=len(lines)))
        cost = sum(map(fit.count, said))
        if not lines or cost > room:
            return
        yield from map(Message, (Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT), said)
        number, room = number + 1, room - cost


class InContext(Suite):
    """The family: a member for every suite of published rows and every context of CONTEXTS.

    A member asks the same rows in the same order as the bare suite and grades them alike; ``cluster_id`` is the bare
    row's. Twins stand in the same context.
    """

    name = "@"

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        bare, _, context = rest.rpartition("@")
        suite = SUITES.get(bare)
        if not suite.published:
            raise SpecError(
                f"suite {rest!r}: {bare} makes contexts of its own; only suites of public rows stand in one"
            )
        if context not in CONTEXTS:
            raise UnknownName(f"context of suite {bare}", context, CONTEXTS)
        return _member(suite, context)  # type: ignore[arg-type]  # a class has its hash


@cache
def _member(suite: type[Suite], context: str) -> type[Suite]:
    found = CONTEXTS[context]

    def items(self: Suite, split: Split, n: int, seed: int, context_tokens: int, count: CountTokens) -> list[Item]:
        bare = suite()
        bare.in_context = True
        rows = bare.items(split, n, seed, 0, count)  # as published: the length is the context's
        return [_wrapped(self.name, found, item, context_tokens, count) for item in rows]

    return type(
        f"{suite.__name__}InContext",
        (suite,),
        {
            "__doc__": f"{(suite.__doc__ or '').strip()}\n\nIn a context: {found.says}.",
            "name": f"{suite.name}@{context}",
            "version": f"{suite.version}.{VERSION}",
            "source": f"{suite.source}{'; prose in the public domain' if found.fills else ''}",
            "published": False,
            "in_context": True,
            "context": context,
            "lengths": "given" if found.fills else "none",
            "placements": (context,),
            "items": items,
        },
    )


def _wrapped(name: str, context: Context, item: Item, context_tokens: int, count: CountTokens) -> Item:
    shared = item.item_id.rpartition("-")[0]  # twins differ in the last word of their id
    draw = random.Random(f"{name}-{shared}-{context_tokens}")
    return replace(
        item,
        suite=name,
        item_id=f"{item.item_id}-t{context_tokens}" if context.fills else item.item_id,
        messages=context.wrap(item.messages, Fit(name, draw, context_tokens, count)),
        context_tokens=context_tokens if context.fills else 0,
        placement=name.rpartition("@")[2],
    )


def bare_name(suite: str) -> str:
    """The suite whose rows a suite in a context asks; itself where it stands in none."""
    bare, at, context = suite.rpartition("@")
    # a task of another harness may have an @ in its own name
    return bare if at and context in CONTEXTS and ":" not in bare else suite


def in_conversation(
    suite: str, context: str, before: Sequence[Message], last: str, draw: random.Random, *, fit: tuple[int, CountTokens]
) -> tuple[Message, ...]:
    """``before``, one of PROCEDURAL, and the user's message ``last``, together as many tokens as ``fit``.

    Never longer than asked, shorter by less than about two sentences. Raises SpecError when the context has no room.
    """
    talk = _paging if context == "pages" else partial(_dialogue, aloud=False)
    return _after(talk)((*before, Message(Role.USER, last)), Fit(suite, draw, *fit))


def _dialogue(draw: random.Random, room: int, fit: Fit, *, aloud: bool = True) -> Iterator[Message]:
    """Exchanges of a user who asks small things and, where a book is read ``aloud``, listens to it in between."""
    book, count = book_sentences(fit.suite, draw) if aloud else None, fit.count
    while True:
        choices = [_small(draw)]
        if book is not None:
            reading = draw.choice(_READ_ON), list(islice(book, draw.randint(*_SENTENCES)))
            # a sentence too long for what is left gives way to something small
            choices = [reading, *choices] if draw.random() < _READING_SHARE else choices
        else:  # several at a time, or the template's own tokens would be half of the context
            several = [*choices, *(_small(draw) for _ in range(draw.randint(*_MORE)))]
            choices = [_at_once(several[:number]) for number in range(len(several), 0, -1)]
        fitting = ((asked, _fitting(said, room - count(asked), count)) for asked, said in choices)
        asked, said = next((exchange for exchange in fitting if exchange[1]), ("", ""))
        if not said:
            return
        yield Message(Role.USER, asked)
        yield Message(Role.ASSISTANT, said)
        room -= count(asked) + count(said)


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


CONTEXTS: dict[str, Context] = {
    "brief": Context("asked to answer in at most three sentences", _ending(_SHORT), fills=False),
    "boxed": Context("asked to reason step by step and to put the answer into a box", _ending(_BOXED), fills=False),
    "talk": Context("behind small talk in which a book is read aloud", _after(_dialogue)),
    "chat": Context("behind what customers of an airline and its agent said", _after(_chatting)),
    "pages": Context("behind the pages that a tool gave", _after(_paging)),
    "book": Context("below a part of a book", _with_prose(_above)),
    "book-system": Context("with a part of a book in the system message", _with_prose(_in_system)),
    "book-turn": Context("after a turn in which a part of a book was given", _with_prose(_own_turn)),
    "book-tool": Context("after a tool's result that holds a part of a book", _with_prose(_fetched)),
}
