"""Conversations that an engine speaks in: every turn of a batch goes to it at once, as tokens that we rendered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvaudit.audit.engines.base import GenerationRequest, Reply, Session, turn_seed
from kvaudit.core.records import Grade, Item, Message, Role, UngradedAnswer
from kvaudit.core.thoughts import heard
from kvaudit.suites.base import Suite

if TYPE_CHECKING:
    from kvaudit.audit.sampling.chat import ChatTokens
    from kvaudit.audit.sampling.conversations import Conversation
    from kvaudit.audit.sampling.decoding import Decoding
    from kvaudit.audit.sampling.model import LoadedModel


class EngineRow(NamedTuple):
    """A graded row of an engine. Its log-prob is of all turns, None where one has none; seconds are its share."""

    item: Item
    grade: Grade
    answer: UngradedAnswer


class _Row:
    """A conversation with the tokens that the engine is to read next."""

    def __init__(self, talk: Conversation, prompt: ChatTokens, model: LoadedModel) -> None:
        self.talk, self._model = talk, model
        self._ids, self._turn = prompt.ids, 0
        self.logprob: float | None = 0.0
        self.said_in = ""

    def asked(self, decoding: Decoding, seed: int) -> GenerationRequest:
        said, most = tuple(heard(self.talk.exchange.transcript)), self.talk.suite.max_new_tokens
        stops = tuple(sorted(self._model.chat.stop_ids))
        own = turn_seed(seed, self._turn)
        return GenerationRequest(tuple(self._ids), most, stops, decoding.temperature, decoding.top_p, own, said)

    def take(self, reply: Reply) -> None:
        """Hear what the engine said, and what the environment says to it; end where it says nothing."""
        from kvaudit.audit.sampling.decoding import Completion

        self._turn += 1
        if reply.refused is not None:
            self.logprob = None
            self.talk.exchange.abort(reply.refused)
            return
        if reply.text is not None:
            self.said_in = reply.said_in
            self._take_text(reply.text, reply.finish, reply.thought)
            return
        ids = reply.ids
        if self.talk.suite.until:  # texts that end an answer
            # the shortest beginning that ends
            ids = ids[: next((end for end in range(1, len(ids) + 1) if self.talk.has_ended(ids[:end])), len(ids))]
        cut = len(ids) < len(reply.ids)
        # a sum over tokens that were cut off again is not the answer's
        known = None if cut or reply.logprob is None else reply.logprob
        self.logprob = None if known is None or self.logprob is None else self.logprob + known
        self.talk.answer(Completion(ids, (), "stop" if cut else reply.finish))
        self._ids = (*self._ids, *ids, *self.talk.take_pending().ids)

    def _take_text(self, text: str, finish: str, thought: str | None) -> None:
        self.logprob = None
        end = self.talk.answer_end(text)
        if end is not None:
            text, finish = text[:end], "stop"
        self.talk.new_tokens += self._model.chat.count_tokens((thought or "") + text)
        messages = self.talk.exchange.step(text, finish, thought)
        self.talk.exchange.add(messages)
        # no tokens of the answer to go on from: the whole conversation is rendered anew
        self._ids = self._model.chat.prompt(self.talk.exchange.transcript).ids if self.talk.open else ()


def talk_with(
    session: Session,
    model: LoadedModel,
    suite: Suite,
    items: Sequence[Item],
    prompts: Sequence[ChatTokens],
    decoding: Decoding,
    seeds: Sequence[int],
    group: int = 1,
    *,
    thinks: bool = False,
) -> list[EngineRow]:
    """Have the engine answer every item ``group`` times and grade it; rows are item-major, one seed per row.

    ``model`` is what the engine serves: of it the chat and the positions are used. Raises EngineFailed.
    """
    from kvaudit.audit.sampling.conversations import AskedItem, Conversation

    started = time.perf_counter()
    rows = [
        _Row(Conversation(AskedItem(suite, item, prompt, thinks), member, model), prompt, model)
        for item, prompt in zip(items, prompts, strict=True)
        for member in range(group)
    ]
    while speaking := [n for n, row in enumerate(rows) if row.talk.open]:
        replies = session.answer([rows[n].asked(decoding, seeds[n]) for n in speaking])
        for n, reply in zip(speaking, replies, strict=True):
            rows[n].take(reply)
    seconds = (time.perf_counter() - started) / max(1, len(rows))
    return [_graded(row, seconds) for row in rows]


def _graded(row: _Row, seconds: float) -> EngineRow:
    exchange = row.talk.exchange
    said = exchange.transcript
    if not any(message.role is Role.ASSISTANT for message in said[len(exchange.item.messages) :]):
        exchange.add((Message(Role.ASSISTANT, ""),))  # a transcript has an answer, if only the lack of one
    answer = UngradedAnswer(
        sample_index=row.talk.member,
        transcript=exchange.transcript,
        finish_reason=exchange.finish,
        prompt_tokens=row.talk.prompt_tokens,
        new_tokens=row.talk.new_tokens,
        seconds=seconds,
        logprob=row.logprob,
        unanswered=exchange.unanswered,
        said_in=row.said_in,
    )
    return EngineRow(exchange.item, exchange.grade(), answer)
