"""Conversations with an engine: each turn of a batch is sent at once, as token ids that we rendered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvaudit.audit.engines.base import GenerationRequest, Reply, Session, turn_seed
from kvaudit.core.completions import without_thoughts
from kvaudit.core.records import SENT_WHOLE, Grade, Item, Message, Role, UngradedAnswer
from kvaudit.suites.base import Suite

if TYPE_CHECKING:
    from kvaudit.audit.sampling.chat import ChatTokens
    from kvaudit.audit.sampling.conversations import Conversation
    from kvaudit.audit.sampling.decoding import Decoding
    from kvaudit.audit.sampling.model import LoadedModel


class EngineAnswer(NamedTuple):
    """An answer with its grade. Its log-prob covers all turns; its seconds are an equal share of the batch's."""

    item: Item
    grade: Grade
    answer: UngradedAnswer


class _Row:
    """A conversation with the tokens of its next prompt."""

    def __init__(self, talk: Conversation, prompt: ChatTokens, model: LoadedModel) -> None:
        self.talk, self._model = talk, model
        self._ids, self._turn = prompt.ids, 0
        self.logprob: float | None = 0.0  # of all turns; None once a turn has none
        self.said_in = ""

    def request(self, decoding: Decoding, seed: int) -> GenerationRequest:
        exchange = self.talk.exchange
        messages, tools = self._model.chat.request_of(without_thoughts(exchange.transcript), exchange.item.tools)
        return GenerationRequest(
            ids=tuple(self._ids),
            max_tokens=self.talk.suite.max_new_tokens,
            stops=tuple(sorted(self._model.chat.stop_ids)),
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            seed=turn_seed(seed, self._turn),
            messages=messages,
            tools=tools,
        )

    def take(self, reply: Reply) -> None:
        """Add a reply and the environment's next message; the conversation is over if there is none."""
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
        if self.talk.suite.until:  # texts that end an answer: cut after the first
            ids = ids[: next((end for end in range(1, len(ids) + 1) if self.talk.has_ended(ids[:end])), len(ids))]
        is_cut = len(ids) < len(reply.ids)
        # the engine's sum includes the tokens that were cut
        if is_cut or reply.logprob is None or self.logprob is None:
            self.logprob = None
        else:
            self.logprob += reply.logprob
        self.talk.answer(Completion(ids, (), "stop" if is_cut else reply.finish))
        self._ids = (*self._ids, *ids, *self.talk.take_pending().ids)

    def _take_text(self, text: str, finish: str, thought: str | None) -> None:
        self.logprob = None
        end = self.talk.answer_end(text)
        if end is not None:
            text, finish = text[:end], "stop"
        self.talk.new_tokens += self._model.chat.count_tokens((thought or "") + text)
        messages = self.talk.exchange.step(text, finish, thought)
        self.talk.exchange.add(messages)
        # without the answer's token ids the next prompt is rendered from the whole transcript
        self._ids = self._whole_prompt() if self.talk.open else ()

    def _whole_prompt(self) -> tuple[int, ...]:
        """Return the tokens of the whole transcript; ends the conversation if the template refuses its calls."""
        chat, exchange = self._model.chat, self.talk.exchange
        tools = exchange.item.tools
        if chat.tool_form_of(exchange.transcript, tools) != self.talk.tool_form:
            exchange.abort("the chat template does not take the calls of the last answer")
            return ()
        return chat.prompt(exchange.transcript, (), tools).ids


def converse(
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
) -> list[EngineAnswer]:
    """Have the engine answer every item ``group`` times and grade it; rows are item-major, one seed per row.

    ``model`` is the checkpoint that the engine serves; only its chat template and positions are used. Raises
    EngineFailed.
    """
    from kvaudit.audit.sampling.conversations import AskedItem, Conversation

    started = time.perf_counter()
    rows = [
        _Row(Conversation(AskedItem(suite, item, prompt, thinks), member, model), prompt, model)
        for item, prompt in zip(items, prompts, strict=True)
        for member in range(group)
    ]
    while open_rows := [n for n, row in enumerate(rows) if row.talk.open]:
        replies = session.answer([rows[n].request(decoding, seeds[n]) for n in open_rows])
        for n, reply in zip(open_rows, replies, strict=True):
            rows[n].take(reply)
    seconds = (time.perf_counter() - started) / max(1, len(rows))
    return [_graded(row, seconds) for row in rows]


def _graded(row: _Row, seconds: float) -> EngineAnswer:
    exchange = row.talk.exchange
    if not any(message.role is Role.ASSISTANT for message in exchange.transcript[len(exchange.item.messages) :]):
        exchange.add((Message(Role.ASSISTANT, ""),))  # a transcript always holds an answer, even an empty one
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
        tool_form=row.talk.tool_form,
        turns_read=SENT_WHOLE if row.talk.suite.max_turns > 1 else "",
    )
    return EngineAnswer(exchange.item, exchange.grade(), answer)
