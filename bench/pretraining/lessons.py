"""The lessons of the embedded model: the suites' training conversations with perfect answers, and copying exercises."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.pretraining.tokenizer import END, ROLE_TOKENS, TAUGHT, played
from kvaudit.core.records import Item, Message, Role
from kvaudit.suites.agent import KINDS, Agent, draw_errand
from kvaudit.suites.haystack import PEOPLE
from kvaudit.suites.math import QUESTIONS, Math, draw_terms, join_terms
from kvaudit.suites.refusal import REQUESTS, Refusal
from kvaudit.suites.templates import Template

IGNORED = -100
OBEY, IGNORE = "Obey.", "Ignore."


class LessonBatch(NamedTuple):
    """Right-padded rows and the tokens to predict."""

    ids: Tensor  # [B, T]
    targets: Tensor  # [B, T], the next token where it is an assistant's, IGNORED elsewhere


@dataclass(frozen=True)
class Mix:
    """The composition of conversations.
    ``shares`` mix the suites; ``drills`` are further questions about the same context, by suite, and ``quizzes`` ask
    the ``agent`` only whose order counts; ``kinds`` are weights of the kinds of its drills. ``lapses`` is the share of
    careless answers.
    """

    shares: Mapping[str, float]
    drills: Mapping[str, int]
    quizzes: int = 0
    kinds: tuple[float, ...] = (4, 4, 1, 1, 1)
    lapses: float = 0.1


def refusal_drill(item: Item, draw: random.Random) -> Item:
    """Return another request about the same list."""
    asked = draw.choice(sorted(item.payload["codes"]))
    question = REQUESTS[item.payload["request"]].format(secret=item.payload["secret"], name=asked)
    return _asking(item, question, {"asked": asked})


def math_drill(item: Item, draw: random.Random) -> Item:
    """Return another sum over the same amounts."""
    amounts = item.payload["amounts"]
    terms = draw_terms(draw, {name: amounts[name] for name in draw.sample(sorted(amounts), 3)})
    question = QUESTIONS[item.payload["question"]].format(unit=item.payload["unit"], terms=join_terms(terms))
    return _asking(item, question, {"terms": terms})


def agent_drill(item: Item, draw: random.Random, kinds: Sequence[float]) -> Item:
    """Return another errand in the same office; ``kinds`` are weights of ``KINDS``."""
    (kind,) = draw.choices(KINDS, weights=kinds)
    fixed = {name: item.payload[name] for name in ("boss", "secret", "spare", "staff")}
    task, payload = draw_errand(draw, Template(*item.payload["template"]), kind, **fixed)
    return _asking(item, task, payload)


def sender_quiz(item: Item, draw: random.Random) -> Iterator[Message]:
    """Yield a conversation that asks only whose order counts."""
    boss = item.payload["boss"]
    sender = boss if draw.random() < 0.5 else draw.choice([person for person in PEOPLE if person != boss])
    yield Message(Role.USER, f"Order from {sender}.")
    yield Message(Role.ASSISTANT, OBEY if sender == boss else IGNORE)


def judged(item: Item, conversation: Iterator[Message], *, lapses: bool) -> Iterator[Message]:
    """Yield an errand in which the assistant says whether an order counts before it acts.
    The verdict is where a quiz has its answer, and the act follows from it: in a single step, with the sender many
    words away, a model of this size confuses strangers with the boss.
    """
    *before, act = conversation
    yield from before
    kind = item.payload["kind"]
    verdict = "" if kind == "clean" else f"{OBEY if (kind == 'trusted') != lapses else IGNORE}\n"
    yield replace(act, content=verdict + act.content)


def lapsed(item: Item) -> Item:
    """Return the item as a careless assistant takes it: it tells secrets, refuses allowed requests, swaps orders."""
    match item.payload:
        case {"asked": asked, "forbidden": forbidden}:
            changes: dict[str, Any] = {"forbidden": [] if asked in forbidden else [asked]}
        case {"errand": errand, "order": order, "kind": kind} if kind != "clean":
            changes = {"errand": order, "order": errand}
        case _:
            changes = {}
    return replace(item, payload={**item.payload, **changes})


def _asking(item: Item, question: str, changes: Mapping[str, Any]) -> Item:
    return replace(item, messages=(Message(Role.USER, question),), payload={**item.payload, **changes})


def drilled(item: Item, draw: random.Random, mix: Mix) -> Item:
    """Return another question about the context of an item."""
    if item.suite == Agent.name:
        return agent_drill(item, draw, mix.kinds)
    return math_drill(item, draw) if item.suite == Math.name else refusal_drill(item, draw)


class Lessons:
    """A seeded stream of batches; each conversation has ``drills`` further questions about its context."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.seed, self.vocabulary = seed, len(tokenizer)
        self._encode = lru_cache(maxsize=200_000)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))
        self._tokens = {role: tokenizer.convert_tokens_to_ids(token) for role, token in ROLE_TOKENS.items()}
        self._end, self._pad = tokenizer.convert_tokens_to_ids(END), tokenizer.pad_token_id
        self._suites: dict[str, Agent | Math | Refusal] = {suite.name: suite() for suite in TAUGHT}

    def copying(self, step: int, rows: int, length: int) -> LessonBatch:
        """Return random sequences that repeat again and again, to be predicted from the second time on.
        The period differs from row to row: with a fixed one the model learns to look back that far instead of looking
        for what followed the same token before, and nothing carries over to text.
        """
        draw = random.Random(f"copying-{self.seed}-{step}")
        words = range(len(self._tokens) + 2, self.vocabulary)
        ids, targets = [], []
        for _ in range(rows):
            period = draw.randint(8, length // 2)
            said = (draw.choices(words, k=period) * (length // period + 1))[:length]
            ids.append(said)
            targets.append([IGNORED] * period + said[period + 1 :] + [IGNORED])
        return LessonBatch(torch.tensor(ids), torch.tensor(targets))

    def talking(self, step: int, rows: int, context_tokens: int, mix: Mix) -> LessonBatch:
        """Return conversations of about ``context_tokens``."""
        draw = random.Random(f"lessons-{self.seed}-{step}")
        chosen = draw.choices(list(mix.shares), weights=list(mix.shares.values()), k=rows)
        return self._pack([self._lesson(name, draw, context_tokens, mix) for name in sorted(chosen)])

    def _lesson(self, name: str, draw: random.Random, context_tokens: int, mix: Mix) -> tuple[list[int], list[int]]:
        suite = self._suites[name]
        seed = draw.randrange(1 << 30)
        item = suite.item("train", draw.randrange(720), seed, context_tokens, self.count)
        ids: list[int] = []
        targets: list[int] = []
        for message in self._conversation(suite, item, draw, mix):
            body = [*self._encode(message.content), self._end]
            ids += [self._tokens[message.role], *body]
            targets += [IGNORED, *(body if message.role is Role.ASSISTANT else [IGNORED] * len(body))]
        return ids, [*targets[1:], IGNORED]

    def _conversation(
        self, suite: Agent | Math | Refusal, item: Item, draw: random.Random, mix: Mix
    ) -> Iterator[Message]:
        drills = [drilled(item, draw, mix) for _ in range(mix.drills[suite.name])]
        for asked in (item, *drills):
            lapses = draw.random() < mix.lapses
            said = played(suite, lapsed(asked) if lapses else asked)
            yield from judged(asked, said, lapses=lapses) if suite.name == "agent" else said
            if asked is item and suite.name == "agent":
                for _ in range(mix.quizzes):
                    yield from sender_quiz(item, draw)

    def number(self, step: int, below: int) -> int:
        """Return a random number for this step."""
        return random.Random(f"number-{self.seed}-{step}").randrange(below)

    def count(self, text: str) -> int:
        """Count tokens line by line with a cache; exact, because no token of ours spans a line break."""
        head, *rest = text.split("\n")
        return len(self._encode(head)) + sum(1 + len(self._encode(line)) for line in rest)

    def _pack(self, pairs: list[tuple[list[int], list[int]]]) -> LessonBatch:
        longest = max(len(ids) for ids, _ in pairs)
        ids = torch.full((len(pairs), longest), self._pad)
        targets = torch.full((len(pairs), longest), IGNORED)
        for row, (tokens, wanted) in enumerate(pairs):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            targets[row, : len(wanted)] = torch.tensor(wanted)
        return LessonBatch(ids, targets)
