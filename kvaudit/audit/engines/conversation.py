"""Conversations with a serving engine: in each round, every open conversation of a batch gets its next answer.

Prompts are sent as token ids that kvaudit has rendered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvaudit.audit.engines.base import GenerationRequest, Reply, Session, turn_seed
from kvaudit.core.completions import without_thoughts
from kvaudit.core.records import SENT_WHOLE, Grade, Item, UngradedAnswer
from kvaudit.suites.base import Suite

if TYPE_CHECKING:
    from kvaudit.audit.sampling.chat import ChatTokens
    from kvaudit.audit.sampling.conversations import Conversation
    from kvaudit.audit.sampling.decoding import Decoding
    from kvaudit.audit.sampling.model import LoadedModel


class EngineAnswer(NamedTuple):
    """A graded answer; its log-prob is the sum over all turns, its seconds are an equal share of the batch's time."""

    item: Item
    grade: Grade
    answer: UngradedAnswer


class _Row:
    """One conversation of the batch, with the token ids of its next prompt."""

    def __init__(self, conversation: Conversation, prompt: ChatTokens, model: LoadedModel) -> None:
        self.conversation, self._model = conversation, model
        self._ids, self._turn = prompt.ids, 0
        self.logprob: float | None = 0.0  # of all turns; None once a turn has none
        self.said_in = ""

    def request(self, decoding: Decoding, seed: int) -> GenerationRequest:
        """Return the request for the next turn."""
        exchange = self.conversation.exchange
        messages, tools = self._model.chat.request_of(without_thoughts(exchange.transcript), exchange.item.tools)
        return GenerationRequest(
            ids=tuple(self._ids),
            max_tokens=self.conversation.suite.max_new_tokens,
            stops=tuple(sorted(self._model.chat.stop_ids)),
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            seed=turn_seed(seed, self._turn),
            messages=messages,
            tools=tools,
        )

    def add_reply(self, reply: Reply) -> None:
        """Add the engine's reply and the next message of user or tool; if there is none, end the conversation."""
        from kvaudit.audit.sampling.decoding import Completion

        self._turn += 1
        if reply.refused is not None:
            self.logprob = None
            self.conversation.exchange.abort(reply.refused)
            return
        if reply.text is not None:
            self.said_in = reply.said_in
            self._add_text(reply.text, reply.finish, reply.thought)
            return
        ids = self.conversation.cut(reply.ids)
        is_cut = len(ids) < len(reply.ids)
        # the engine's sum includes the tokens that were cut
        if is_cut or reply.logprob is None or self.logprob is None:
            self.logprob = None
        else:
            self.logprob += reply.logprob
        self.conversation.answer(Completion(ids, (), "stop" if is_cut else reply.finish))
        self._ids = (*self._ids, *ids, *self.conversation.take_pending().ids)

    def _add_text(self, text: str, finish: str, thought: str | None) -> None:
        """Add a reply that came as text, without token ids."""
        self.logprob = None
        end = self.conversation.answer_end(text)
        if end is not None:
            text, finish = text[:end], "stop"
        self.conversation.new_tokens += self._model.chat.count_tokens((thought or "") + text)
        messages = self.conversation.exchange.step(text, finish, thought)
        self.conversation.exchange.add(messages)
        # without the answer's token ids the next prompt is rendered from the whole transcript
        self._ids = self._whole_prompt() if self.conversation.open else ()

    def _whole_prompt(self) -> tuple[int, ...]:
        """Return the whole transcript as token ids for the next prompt.

        If the chat template cannot render the tool calls of the last answer, end the conversation and return ().
        """
        chat, exchange = self._model.chat, self.conversation.exchange
        tools = exchange.item.tools
        if chat.tool_form_of(exchange.transcript, tools) != self.conversation.tool_form:
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
    """Let the engine answer every item ``group`` times, and grade the answers.

    Answers are in the order of the items, with the ``group`` answers of an item adjacent; ``seeds`` has one seed per
    answer. ``prompts`` has the prompt of each item as tokens. ``model`` is the checkpoint that the engine serves; only
    its chat template and its number of positions are used. ``thinks``: the model may reason before it answers. Raises
    EngineFailed.
    """
    from kvaudit.audit.sampling.conversations import AskedItem, Conversation

    started = time.perf_counter()
    rows = [
        _Row(Conversation(AskedItem(suite, item, prompt, thinks), member, model), prompt, model)
        for item, prompt in zip(items, prompts, strict=True)
        for member in range(group)
    ]
    while open_rows := [n for n, row in enumerate(rows) if row.conversation.open]:
        replies = session.answer([rows[n].request(decoding, seeds[n]) for n in open_rows])
        for n, reply in zip(open_rows, replies, strict=True):
            rows[n].add_reply(reply)
    seconds = (time.perf_counter() - started) / max(1, len(rows))
    return [_grade(row, seconds) for row in rows]


def _grade(row: _Row, seconds: float) -> EngineAnswer:
    exchange = row.conversation.exchange
    answer = UngradedAnswer(
        sample_index=row.conversation.member,
        transcript=exchange.transcript,
        finish_reason=exchange.finish,
        prompt_tokens=row.conversation.prompt_tokens,
        new_tokens=row.conversation.new_tokens,
        seconds=seconds,
        logprob=row.logprob,
        unanswered=exchange.unanswered,
        said_in=row.said_in,
        tool_form=row.conversation.tool_form,
        turns_read=SENT_WHOLE if row.conversation.suite.max_turns > 1 else "",
    )
    return EngineAnswer(exchange.item, exchange.grade(), answer)
