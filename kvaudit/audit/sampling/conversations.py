"""Play items: prompt, answer, environment, answer, ..., grade. One loop for training rollouts and for evaluation."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.sampling.chat import Chat, ChatTokens
from kvaudit.audit.sampling.decoding import AnswerScore, draw
from kvaudit.audit.sampling.exchange import Exchange, grade_transcript
from kvaudit.audit.sampling.sampler import AnyEpisode, ContinuousBatch, Completion, Decoding, Sampler, ServedModel
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Grade, Item, Message, Role
from kvaudit.core.spans import KeptSpan, places_of
from kvaudit.suites.base import Suite

_NOTHING = ChatTokens((), ())


@dataclass(frozen=True)
class GradedRow:
    """One graded row. ``survival`` maps a role to the share of its tokens still cached when the last answer starts.

    ``spans`` maps a marked span to the same share, and to where it stands in the transcript; ``marks`` maps it to its
    tokens in the rollout, by number. ``roles`` are those of the rollout's tokens.
    """

    item: Item
    transcript: tuple[Message, ...]
    grade: Grade
    rollout: Rollout
    finish_reason: str  # stop | length | turns | error
    prompt_tokens: int
    new_tokens: int
    survival: dict[str, float] = field(default_factory=dict)
    sample_index: int = 0
    seconds: float = 0.0  # this row's share of the batch's wall time
    spans: dict[str, KeptSpan] = field(default_factory=dict)
    marks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    unanswered: str = ""  # why it ended without an answer


def play(
    sampler: Sampler,
    suite_items: Sequence[tuple[Suite, Item]],
    decoding: Decoding,
    seeds: Sequence[int],
    group: int = 1,
    *,
    thinks: bool = False,
    prompts: Sequence[ChatTokens] | None = None,
    at_once: int = 0,
) -> list[GradedRow]:
    """Play every item ``group`` times as one batch and grade it; rows are item-major, group members consecutive.

    ``seeds`` holds one number per row. The length of an answer is the suite's, not ``decoding.max_new_tokens``. The
    answer of a row does not depend on what shares its batch. Raises SpecError before anything is sampled when a
    context does not fit the model's positions. An item with options is one turn, and its answer one of them.
    ``thinks``: an answer may begin with a thought, which stays in the transcript and is heard by neither environment
    nor grader. ``prompts``: what ``item_prompt`` gives for each item, where that is known. ``at_once``: so many rows at
    the most share the batch, or one item's where those are more; further items enter it as rows leave. 0: all do.
    """
    assert len(seeds) == len(suite_items) * group
    started = time.perf_counter()
    if prompts is None:
        prompts = [item_prompt(sampler.model.chat, item) for _, item in suite_items]
    asked = [AskedItem(*pair, prompt, thinks) for pair, prompt in zip(suite_items, prompts, strict=True)]
    for one in asked:
        check_fits(sampler.model, one.suite, one.item, len(one.prompt.ids))
    # whether an item is answered by choosing among options
    given = [bool(one.suite.options(one.item)) for one in asked]
    most = max(1, at_once // group) if at_once else len(asked)  # items at once
    found: dict[int, list[GradedRow]] = {}  # by the number of the item, group members in order
    for way, chosen in ((_converse, False), (_choose, True)):
        part = [n for n, own in enumerate(given) if own is chosen]
        own_seeds = [seed for n in part for seed in seeds[n * group : (n + 1) * group]]
        # the two ways need batches of their own: scored rows draw nothing
        rows = way(sampler, [asked[n] for n in part], decoding, own_seeds, group, most) if part else []
        found |= {n: rows[k * group : (k + 1) * group] for k, n in enumerate(part)}
    # wall time by rows; what one cost in a batch cannot be told
    seconds = (time.perf_counter() - started) / len(seeds)
    return [replace(row, seconds=seconds) for n in range(len(asked)) for row in found[n]]


def item_prompt(chat: Chat, item: Item) -> ChatTokens:
    """An item's prompt as tokens, with its marked spans."""
    return chat.prompt(item.messages, item.spans)


class AskedItem(NamedTuple):
    """A suite's item and its prompt as tokens."""

    suite: Suite
    item: Item
    prompt: ChatTokens
    thinks: bool


def _converse(
    sampler: Sampler, asked: Sequence[AskedItem], decoding: Decoding, seeds: Sequence[int], group: int, most: int
) -> list[GradedRow]:
    """Let the model speak, and the environment answer; ``most`` items at once."""

    def opened(items: range) -> AnyEpisode:
        own = [asked[n].prompt for n in items]
        part = list(seeds[items.start * group : items.stop * group])
        return sampler.open([one.ids for one in own], part, group=group, roles=[one.roles for one in own])

    # of items that wait too: row n is of item n // group
    rows = [Conversation(one, member, sampler.model) for one in asked for member in range(group)]
    arrivals = ContinuousBatch(opened, len(asked), most, group)
    for episode in arrivals:
        # items enter in order, so those that are in the batch have the first rows
        playing = rows[: episode.rows]
        # 0: a row that is over is neither drawn for nor fed
        limits = [row.suite.max_new_tokens if row.open else 0 for row in playing]
        episode.decode(
            decoding,
            limits,
            lambda n, ids: rows[n].ended(ids),
            lambda n, completion: rows[n].answer(completion),
            arrivals.should_pause,
        )
        chunks = [row.take_pending() for row in playing]  # what environments said, in the template's form
        if any(chunk.ids for chunk in chunks):
            episode.extend([chunk.ids for chunk in chunks], [chunk.roles for chunk in chunks])
    return [row.played(rollout) for row, rollout in zip(rows, arrivals.rollouts(), strict=True)]


def _choose(
    sampler: Sampler, asked: Sequence[AskedItem], decoding: Decoding, seeds: Sequence[int], group: int, most: int
) -> list[GradedRow]:
    """Score each item's options and take one: the best, or at a temperature one drawn by what they are worth."""
    # no row leaves before the longest answer is over, so that arrivals would win nothing: part after part
    if len(asked) > most:
        parts = (slice(start, start + most) for start in range(0, len(asked), most))
        own = ((asked[part], seeds[part.start * group : part.stop * group]) for part in parts)
        return [row for some, its in own for row in _choose(sampler, some, decoding, its, group, most)]
    chat = sampler.model.chat
    texts = [one.suite.options(one.item) for one in asked]
    answers = [[chat.encode(text) for text in own] for own in texts]  # [items][options][tokens]
    rows = score_answers(sampler, [one.prompt for one in asked], answers, seeds, group)
    played = []
    for n, (scored, seed) in enumerate(zip(rows, seeds, strict=True)):
        suite, item, prompt, _ = asked[n // group]
        # [1, options], nats or what the suite makes of them
        worth = torch.tensor([list(suite.weigh(item, [sum(own.logprobs) for own, _ in scored]))])
        # greedy at temperature 0; else by the seed of the row, so that policies share the draw
        (best,), _ = draw(worth, torch.tensor([seed]), torch.tensor([len(prompt.ids)]), decoding)
        transcript = (*item.messages, Message(Role.ASSISTANT, texts[n // group][best]))
        tokens, rollout = len(answers[n // group][best]), scored[best][1]
        roles = (*prompt.roles, *[str(Role.ASSISTANT)] * tokens)
        played.append(
            GradedRow(
                item=item,
                transcript=transcript,
                grade=grade_transcript(suite, item, transcript, "stop"),
                rollout=rollout,
                finish_reason="stop",
                prompt_tokens=len(prompt.ids),
                new_tokens=tokens,
                survival=survival(rollout, roles),
                sample_index=n % group,
                spans=spans_kept(rollout, prompt.spans, item, transcript),
                marks=prompt.spans,
                roles=roles,
            )
        )
    return played


def score_answers(
    sampler: Sampler,
    prompts: Sequence[ChatTokens],
    answers: Sequence[Sequence[Sequence[int]]],
    seeds: Sequence[int],
    group: int = 1,
) -> list[list[tuple[AnswerScore, Rollout]]]:
    """How probable each prompt's given answers are, token by token through the compressed cache.

    A prompt is prefilled once and every answer has a row behind it. One list per prompt and group member, whose seed
    all its answers share.
    """
    width = max(map(len, answers))  # answers of the prompt that has most
    # () where a prompt has fewer answers than the widest
    said = [[*own, *[()] * (width - len(own))] for own in answers for _ in range(group)]
    row_seeds = [seed for seed in seeds for _ in range(width)]
    roles = [prompt.roles for prompt in prompts]
    # rows by prompt, then group member, then answer: the members of one prefill are all of a prompt's
    episode = sampler.open([prompt.ids for prompt in prompts], row_seeds, group=group * width, roles=roles)
    scored = episode.score([ids for own in said for ids in own])
    pairs = list(zip(scored, episode.rollouts(), strict=True))
    return [
        [(own, rollout) for own, rollout in pairs[start : start + width] if own is not None]
        for start in range(0, len(pairs), width)
    ]


def check_fits(model: ServedModel, suite: Suite, item: Item, prompt_tokens: int) -> None:
    """Raise SpecError when a prompt and its first answer do not fit the model's positions.

    Neither do given answers behind a prompt that ends within a thought.
    """
    if model.chat.opens_thought and suite.options(item):
        raise SpecError(
            f"suite {suite.name} scores given answers, and the chat template begins every answer with a thought; "
            "turn that off by an option of the template (chat:), or leave the suite out"
        )
    lengths = [model.chat.count_tokens(text) for text in suite.options(item)]
    if 0 in lengths:
        raise SpecError(f"suite {suite.name} item {item.item_id} offers an option without a single token")
    longest = max(lengths, default=suite.max_new_tokens)
    if prompt_tokens + longest > model.max_positions:
        raise SpecError(
            f"suite {suite.name} item {item.item_id} needs {prompt_tokens + longest} positions ({prompt_tokens} prompt "
            f"+ {longest} new), the model has {model.max_positions}; lower context_tokens"
        )


class Conversation:
    """One conversation under way: answers go in as tokens, and what the environment says comes out as tokens."""

    def __init__(self, asked: AskedItem, member: int, model: ServedModel) -> None:
        self.suite, item, prompt, self._thinks = asked
        self.exchange = Exchange(self.suite, item, thinks=asked.thinks, opens_thought=model.chat.opens_thought)
        self.member, self._model = member, model
        self.prompt_tokens = len(prompt.ids)
        self._roles = list(prompt.roles)
        self._spans = {name: list(tokens) for name, tokens in prompt.spans.items()}
        self._pending = _NOTHING
        self.new_tokens = 0

    @property
    def open(self) -> bool:
        """Whether the model is to speak."""
        return self.exchange.open

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether an answer has come to a text that ends it; in a thought it ends nothing."""
        if not holds_stop(self._model.chat, ids, self.suite.until):
            return False
        return not self._thinks or self._holds_end(self._model.chat.text(ids))

    def answer_end(self, text: str) -> int | None:
        """Where an answer as text comes to the first text that ends it, which still is of it; None where none does."""
        found = [match.end() for end in self.suite.until for match in re.finditer(re.escape(end), text)]
        return next((place for place in sorted(found) if self._holds_end(text[:place])), None)

    def _holds_end(self, text: str) -> bool:
        answer = self.exchange.said(text)[-1].content
        return any(end in answer for end in self.suite.until)

    def answer(self, completion: Completion) -> bool:
        """Take the model's answer; end the row, or hold the environment's reply ready. Whether the model speaks again.

        It is asked as soon as the answer is there, while other rows still speak.
        """
        messages = self.exchange.step(self._model.chat.text(completion.ids), completion.finish_reason)
        self._roles += [str(Role.ASSISTANT)] * len(completion.ids)
        self.new_tokens += len(completion.ids)
        if self.open:
            self._continue(completion, messages)
        return self.open

    def take_pending(self) -> ChatTokens:
        """The tokens to append now, none when the row is over."""
        chunk, self._pending = self._pending, _NOTHING
        return chunk

    def played(self, rollout: Rollout) -> GradedRow:
        """Grade the finished row; how long it took is for whoever knows the whole batch."""
        assert rollout.ids.shape[0] == len(self._roles)
        return GradedRow(
            item=self.exchange.item,
            transcript=self.exchange.transcript,
            grade=self.exchange.grade(),
            rollout=rollout,
            finish_reason=self.exchange.finish,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            survival=survival(rollout, self._roles),
            sample_index=self.member,
            spans=spans_kept(rollout, self._spans, self.exchange.item, self.exchange.transcript),
            marks=self._spans,
            roles=tuple(self._roles),
            unanswered=self.exchange.unanswered,
        )

    def _continue(self, completion: Completion, messages: tuple[Message, ...]) -> None:
        reply = self._model.chat.continuation(completion.ids, messages, self.exchange.item.spans)
        # room for a whole answer, or the model would be cut short by us and not by its own length
        if len(self._roles) + len(reply.ids) + self.suite.max_new_tokens > self._model.max_positions:
            self.exchange.abort(
                f"its next turn could outgrow the {self._model.max_positions} positions of the model"
            )
            return
        self.exchange.add(messages)
        for name, tokens in reply.spans.items():
            # from the reply's own numbering to that of the whole rollout
            self._spans.setdefault(name, []).extend(len(self._roles) + token for token in tokens)
        self._roles += reply.roles
        self._pending = reply


def holds_stop(chat: Chat, ids: Sequence[int], until: Sequence[str]) -> bool:
    """Whether one of the texts stands in the last tokens of an answer, which is asked after every token."""
    if not until:
        return False
    reach = max(len(text.encode()) for text in until) + 4  # a token holds a byte at least; the first may be cut
    tail = chat.text(ids[-reach:])
    return any(text in tail for text in until)


def survival(rollout: Rollout, roles: Sequence[str]) -> dict[str, float]:
    """Share of each role's tokens still in the cache when the last answer starts, mean over layers and KV heads."""
    start = rollout.answer_start
    alive = (rollout.evicted_at[:, :, :start] > start).double().mean((0, 1)).tolist()  # [T], 0 to 1
    by_role: dict[str, list[float]] = {}
    for role, share in zip(roles[:start], alive, strict=True):
        by_role.setdefault(role, []).append(share)
    # every token counts once, wherever it stands
    return {role: sum(shares) / len(shares) for role, shares in sorted(by_role.items())}


def spans_kept(
    rollout: Rollout, tokens: Mapping[str, Sequence[int]], item: Item, transcript: Sequence[Message]
) -> dict[str, KeptSpan]:
    """What is left of every marked span that the model was given, mean over its tokens, layers and KV heads.

    What the model said itself is no span, even where it repeats one.
    """
    own = (Role.ASSISTANT, Role.THOUGHT)
    given = [m.content if n < len(item.messages) or m.role not in own else "" for n, m in enumerate(transcript)]
    places, start = places_of(item.spans, given), rollout.answer_start

    def share(numbers: Sequence[int]) -> float:
        return float((rollout.evicted_at[:, :, list(numbers)] > start).double().mean())  # [L, H, tokens]

    return {name: KeptSpan(share(numbers), tuple(places[name])) for name, numbers in tokens.items()}
