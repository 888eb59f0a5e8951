"""Ask a model the items of suites: the prompt, its answer, the environment's reply, the next answer ..., the grade.

Training and evaluation both use this.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.sampling.chat import TEXT_FORM, Chat, ChatTokens
from kvaudit.audit.sampling.decoding import AnswerScore, Completion, Decoding, draw
from kvaudit.audit.sampling.exchange import Exchange, grade_transcript
from kvaudit.audit.sampling.sampler import AnyEpisode, ContinuousBatch, Sampler, ServedModel
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Grade, Item, Message, Role
from kvaudit.core.spans import KeptSpan, find_spans
from kvaudit.core.tool_forms.text import as_text
from kvaudit.suites.base import Suite

_NOTHING = ChatTokens((), ())


@dataclass(frozen=True)
class GradedRow:
    """A graded conversation with its tokens and measurements of the cache.

    ``survival`` has, by role, the share of tokens still cached when the last answer starts. A span is a text that the
    suite marks, such as a rule in the system message. ``spans`` has, for each span, the share of its tokens still
    cached, and where its text stands in the transcript (number of the message, characters). ``marks`` has, for each
    span, the indices of its tokens in the rollout. ``roles`` has the role of every token of the rollout.
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
    tool_form: str = ""  # in which tools were offered and calls were read


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
    """Ask every item ``group`` times as one batch, and grade the conversations.

    Rows are in the order of the items, with the ``group`` rows of an item adjacent. ``seeds`` has one number per
    row; the answer of a row does not depend on the other rows. The suite sets the length of an answer, not
    ``decoding.max_new_tokens``. An item with options (given answers) is one turn, answered by one of them. With
    ``thinks``, answers may begin with a thought, which stays in the transcript but is hidden from environment and
    grader. ``prompts`` are the results of ``item_prompt`` for each item, if already rendered. At most ``at_once`` rows
    share the batch (0: no limit), but always all rows of at least one item; further items enter as rows finish. Raises
    SpecError before anything is sampled if a context does not fit the model's positions.
    """
    assert len(seeds) == len(suite_items) * group
    started = time.perf_counter()
    if prompts is None:
        prompts = [item_prompt(sampler.model.chat, item) for _, item in suite_items]
    entries = [AskedItem(*pair, prompt, thinks) for pair, prompt in zip(suite_items, prompts, strict=True)]
    for entry in entries:
        check_fits(sampler.model, entry.suite, entry.item, len(entry.prompt.ids))
    has_options = [bool(entry.suite.options(entry.item)) for entry in entries]
    max_items = max(1, at_once // group) if at_once else len(entries)  # items at once
    rows_of: dict[int, list[GradedRow]] = {}  # by the number of the item, group members in order
    # separate batches, since choosing among options scores tokens and samples none
    for run, with_options in ((_converse, False), (_choose, True)):
        numbers = [n for n, has in enumerate(has_options) if has is with_options]
        run_seeds = [seed for n in numbers for seed in seeds[n * group : (n + 1) * group]]
        rows = run(sampler, [entries[n] for n in numbers], decoding, run_seeds, group, max_items) if numbers else []
        rows_of |= {n: rows[k * group : (k + 1) * group] for k, n in enumerate(numbers)}
    # an equal share of the wall time: the cost of one row in a batch cannot be measured
    seconds = (time.perf_counter() - started) / len(seeds)
    return [replace(row, seconds=seconds) for n in range(len(entries)) for row in rows_of[n]]


def item_prompt(chat: Chat, item: Item) -> ChatTokens:
    """Return an item's prompt as tokens, with the indices of the tokens of its spans (texts that the suite marks)."""
    return chat.prompt(item.messages, item.spans, item.tools)


class AskedItem(NamedTuple):
    """An item as it is asked: its suite, its prompt as tokens, and whether answers may begin with a thought."""

    suite: Suite
    item: Item
    prompt: ChatTokens
    thinks: bool


def _converse(
    sampler: Sampler, entries: Sequence[AskedItem], decoding: Decoding, seeds: Sequence[int], group: int, max_items: int
) -> list[GradedRow]:
    """Run the conversations of model and environment for items without options, ``max_items`` items at once."""

    def open_episode(items: range) -> AnyEpisode:
        prompts = [entries[n].prompt for n in items]
        row_seeds = list(seeds[items.start * group : items.stop * group])
        return sampler.open([p.ids for p in prompts], row_seeds, group=group, roles=[p.roles for p in prompts])

    # includes items that have not entered yet: row n belongs to item n // group
    rows = [Conversation(entry, member, sampler.model) for entry in entries for member in range(group)]
    batch = ContinuousBatch(open_episode, len(entries), max_items, group)
    for episode in batch:
        # items enter in order, so the first rows are those in the batch
        playing = rows[: episode.rows]
        limits = [row.suite.max_new_tokens if row.open else 0 for row in playing]  # 0: the row is over
        episode.decode(
            decoding,
            limits,
            lambda n, ids: rows[n].has_ended(ids),
            lambda n, completion: rows[n].answer(completion),
            batch.should_pause,
        )
        replies = [row.take_pending() for row in playing]
        if any(reply.ids for reply in replies):
            episode.extend([reply.ids for reply in replies], [reply.roles for reply in replies])
    return [row.to_row(rollout) for row, rollout in zip(rows, batch.rollouts(), strict=True)]


def _choose(
    sampler: Sampler, entries: Sequence[AskedItem], decoding: Decoding, seeds: Sequence[int], group: int, max_items: int
) -> list[GradedRow]:
    """Answer each item by one of its options: the most likely one at temperature 0, else sampled by likelihood."""
    # fixed batches: rows only finish with the longest answer, so a continuous batch would gain nothing
    if len(entries) > max_items:
        batches = (slice(start, start + max_items) for start in range(0, len(entries), max_items))
        pairs = ((entries[batch], seeds[batch.start * group : batch.stop * group]) for batch in batches)
        return [
            row for items, its_seeds in pairs for row in _choose(sampler, items, decoding, its_seeds, group, max_items)
        ]
    chat = sampler.model.chat
    options = [entry.suite.options(entry.item) for entry in entries]
    answers = [[chat.encode(text) for text in texts] for texts in options]  # [items][options][tokens]
    scores = score_answers(sampler, [entry.prompt for entry in entries], answers, seeds, group)
    rows = []
    for n, (scored, seed) in enumerate(zip(scores, seeds, strict=True)):
        suite, item, prompt, _ = entries[n // group]
        # [1, options]: nats, unless the suite weighs them otherwise
        weights = torch.tensor([list(suite.weigh(item, [sum(score.logprobs) for score, _ in scored]))])
        # greedy at temperature 0; otherwise drawn with the row's seed, so that policies share the draw
        (best,), _ = draw(weights, torch.tensor([seed]), torch.tensor([len(prompt.ids)]), decoding)
        transcript = (*item.messages, Message(Role.ASSISTANT, options[n // group][best]))
        tokens, rollout = len(answers[n // group][best]), scored[best][1]
        roles = (*prompt.roles, *[str(Role.ASSISTANT)] * tokens)
        row = GradedRow(
            item=item,
            transcript=transcript,
            grade=grade_transcript(suite, item, transcript, "stop"),
            rollout=rollout,
            finish_reason="stop",
            prompt_tokens=len(prompt.ids),
            new_tokens=tokens,
            sample_index=n % group,
        )
        rows.append(_with_survival(row, roles, prompt.spans))
    return rows


def score_answers(
    sampler: Sampler,
    prompts: Sequence[ChatTokens],
    answers: Sequence[Sequence[Sequence[int]]],
    seeds: Sequence[int],
    group: int = 1,
) -> list[list[tuple[AnswerScore, Rollout]]]:
    """Return the log-probs of given answers to each prompt, fed token by token through the compressed cache.

    ``answers`` has the answers to each prompt, as token ids. A prompt is prefilled once, and each answer gets a row.
    The result has ``group`` lists per prompt, one for each of its seeds. Each list has a (score, rollout) pair for
    every answer, in order; all rows of a list use the same seed.
    """
    width = max(map(len, answers))
    # pad with () where a prompt has fewer answers than the widest
    padded = [[*texts, *[()] * (width - len(texts))] for texts in answers for _ in range(group)]
    row_seeds = [seed for seed in seeds for _ in range(width)]
    roles = [prompt.roles for prompt in prompts]
    # rows by prompt, then group member, then answer: all rows of a prompt share one prefill
    episode = sampler.open([prompt.ids for prompt in prompts], row_seeds, group=group * width, roles=roles)
    scores = episode.score([ids for texts in padded for ids in texts])
    pairs = list(zip(scores, episode.rollouts(), strict=True))
    return [
        [(score, rollout) for score, rollout in pairs[start : start + width] if score is not None]
        for start in range(0, len(pairs), width)
    ]


def check_fits(model: ServedModel, suite: Suite, item: Item, prompt_tokens: int) -> None:
    """Raise SpecError if a prompt and its first answer do not fit the model's positions.

    For an item with answer options, also raise it if the chat template begins every answer with a thought (a reasoning
    block, inside of which the options would be scored), or if an option encodes to no tokens.
    """
    if model.chat.opens_thought and suite.options(item):
        raise SpecError(
            f"suite {suite.name} scores given answers, but the chat template begins every answer with a thought; "
            "turn thoughts off by an option of the template (chat:), or leave the suite out"
        )
    lengths = [model.chat.count_tokens(text) for text in suite.options(item)]
    if 0 in lengths:
        raise SpecError(f"suite {suite.name} item {item.item_id} has an option that encodes to no tokens")
    longest = max(lengths, default=suite.max_new_tokens)
    if prompt_tokens + longest > model.max_positions:
        raise SpecError(
            f"suite {suite.name} item {item.item_id} needs {prompt_tokens + longest} positions ({prompt_tokens} prompt "
            f"+ {longest} new), the model has {model.max_positions}; lower context_tokens"
        )


class Conversation:
    """One conversation of a model with a suite's environment, as tokens.

    It takes the model's answers as tokens and renders the environment's replies. The ``exchange`` has the same
    conversation as messages.
    """

    def __init__(self, entry: AskedItem, member: int, model: ServedModel) -> None:
        self.suite, item, prompt, self._thinks = entry
        self.tool_form = model.chat.tool_form_of(item.messages, item.tools)
        self.exchange = Exchange(
            self.suite,
            item,
            thinks=entry.thinks,
            opens_thought=model.chat.opens_thought,
            tool_form=model.chat.reader_of(self.tool_form),
        )
        self.member, self._model = member, model
        self.prompt_tokens = len(prompt.ids)
        self._roles = list(prompt.roles)
        self._spans = {name: list(tokens) for name, tokens in prompt.spans.items()}
        self._pending = _NOTHING
        self.new_tokens = 0

    @property
    def open(self) -> bool:
        """Whether the model has to give another answer."""
        return self.exchange.open

    def has_ended(self, ids: Sequence[int]) -> bool:
        """Return whether the answer so far holds a text that ends it (the suite's ``until``), outside a thought."""
        if not holds_stop(self._model.chat, ids, self.suite.until):
            return False
        return not self._thinks or self._holds_until(self._model.chat.text(ids))

    def cut(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return an answer's tokens up to the first of the suite's ``until`` texts; all tokens if it has none."""
        ends = range(1, len(ids) + 1) if self.suite.until else ()
        return ids[: next((end for end in ends if self.has_ended(ids[:end])), len(ids))]

    def answer_end(self, text: str) -> int | None:
        """Return where an answer's text ends: after the first of the suite's ``until`` texts outside a thought.

        Returns None if the text has none of them.
        """
        matches = [match.end() for end in self.suite.until for match in re.finditer(re.escape(end), text)]
        return next((end for end in sorted(matches) if self._holds_until(text[:end])), None)

    def _holds_until(self, text: str) -> bool:
        answer = self.exchange.to_messages(text)[-1].content
        return any(end in answer for end in self.suite.until)

    def answer(self, completion: Completion) -> bool:
        """Add the model's answer and render the environment's reply; return whether the row continues.

        Called as soon as the answer is complete, while other rows are still sampled.
        """
        messages = self.exchange.step(self._model.chat.text(completion.ids), completion.finish_reason)
        self._roles += [str(Role.ASSISTANT)] * len(completion.ids)
        self.new_tokens += len(completion.ids)
        if self.open:
            self._continue(completion, messages)
        return self.open

    def take_pending(self) -> ChatTokens:
        """Return the environment's reply as tokens to append now, and forget it; if there is none, no tokens."""
        reply, self._pending = self._pending, _NOTHING
        return reply

    def to_row(self, rollout: Rollout) -> GradedRow:
        """Return the finished conversation as a graded row with its ``rollout``; the row's ``seconds`` stay 0."""
        assert rollout.ids.shape[0] == len(self._roles)
        row = GradedRow(
            item=self.exchange.item,
            transcript=self.exchange.transcript,
            grade=self.exchange.grade(),
            rollout=rollout,
            finish_reason=self.exchange.finish,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            sample_index=self.member,
            unanswered=self.exchange.unanswered,
            tool_form=self.tool_form,
        )
        return _with_survival(row, self._roles, self._spans)

    def _continue(self, completion: Completion, messages: tuple[Message, ...]) -> None:
        item, answer = self.exchange.item, self.exchange.transcript[-1]
        if self.tool_form == TEXT_FORM:
            reply = self._model.chat.continuation(completion.ids, as_text(messages, ()), item.spans)
        else:
            calls = answer.tool_calls
            reply = self._model.chat.continuation(completion.ids, messages, item.spans, calls=calls, tools=item.tools)
        # there must be room for a full answer, so that its length is limited by the suite alone
        if len(self._roles) + len(reply.ids) + self.suite.max_new_tokens > self._model.max_positions:
            self.exchange.abort(f"its next turn could outgrow the {self._model.max_positions} positions of the model")
            return
        self.exchange.add(messages)
        for name, tokens in reply.spans.items():
            # from token numbers of the reply to those of the whole rollout
            self._spans.setdefault(name, []).extend(len(self._roles) + token for token in tokens)
        self._roles += reply.roles
        self._pending = reply


def holds_stop(chat: Chat, ids: Sequence[int], until: Sequence[str]) -> bool:
    """Return whether one of the suite's ``until`` texts, which end an answer, is in the last tokens of an answer.

    Called after every token.
    """
    if not until:
        return False
    reach = max(len(text.encode()) for text in until) + 4  # a token holds at least a byte; the first may be cut
    tail = chat.text(ids[-reach:])
    return any(text in tail for text in until)


def _with_survival(row: GradedRow, roles: Sequence[str], marks: Mapping[str, Sequence[int]]) -> GradedRow:
    spans = spans_kept(row.rollout, marks, row.item, row.transcript)
    return replace(row, survival=survival(row.rollout, roles), spans=spans, marks=marks, roles=tuple(roles))


def survival(rollout: Rollout, roles: Sequence[str]) -> dict[str, float]:
    """Return {role: share of its tokens still cached when the last answer starts}, mean over layers and KV heads."""
    start = rollout.answer_start
    alive = (rollout.evicted_at[:, :, :start] > start).double().mean((0, 1)).tolist()  # [T], 0 to 1
    by_role: dict[str, list[float]] = {}
    for role, share in zip(roles[:start], alive, strict=True):
        by_role.setdefault(role, []).append(share)
    return {role: sum(shares) / len(shares) for role, shares in sorted(by_role.items())}


def spans_kept(
    rollout: Rollout, tokens: Mapping[str, Sequence[int]], item: Item, transcript: Sequence[Message]
) -> dict[str, KeptSpan]:
    """Return, for each span (a text that the suite marks), the share of its tokens still in the cache.

    The share is taken when the last answer starts, as a mean over tokens, layers and KV heads. Text that the model
    wrote never belongs to a span, even if it repeats the span's text. If a span marks the list of tools that the
    template writes, it has tokens but no place in the transcript.
    """
    by_model = (Role.ASSISTANT, Role.THOUGHT)
    texts = [m.content if n < len(item.messages) or m.role not in by_model else "" for n, m in enumerate(transcript)]
    places, start = find_spans(item.spans, texts), rollout.answer_start

    def share(numbers: Sequence[int]) -> float:
        return float((rollout.evicted_at[:, :, list(numbers)] > start).double().mean())  # [L, H, tokens]

    return {name: KeptSpan(share(numbers), tuple(places.get(name, ()))) for name, numbers in tokens.items()}
