"""Thoughts of reasoning models: kept in a transcript under a role of their own, and heard by no suite.

Only what an answer begins with is a thought. What stands in ``<think>`` further on was said, and is graded as said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvaudit.core.records import Message, Role

THOUGHT_OPENING, THOUGHT_CLOSING = "<think>", "</think>"


def parted(text: str, *, opened: bool) -> tuple[Message, ...]:
    """What a model said: its thought, where it began with one, and its answer, empty where the thought never ended.

    ``opened``: the chat template begins the thought, so that the model only ends it.
    """
    if not opened and not text.lstrip().startswith(THOUGHT_OPENING):
        return (Message(Role.ASSISTANT, text),)
    thought, end, answer = text.partition(THOUGHT_CLOSING)
    return Message(Role.THOUGHT, thought + end), Message(Role.ASSISTANT, answer)


def heard(transcript: Sequence[Message]) -> tuple[Message, ...]:
    """A transcript as suites, environments and judges have it: without thoughts."""
    return tuple(message for message in transcript if message.role is not Role.THOUGHT)


def with_thoughts(said: Sequence[Message]) -> Iterator[tuple[str | None, str]]:
    """Every answer, with the thought that it began with, None where it began with none."""
    thought = None
    for message in said:
        if message.role is Role.ASSISTANT:
            yield thought, message.content
        thought = message.content if message.role is Role.THOUGHT else None
