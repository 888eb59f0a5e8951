"""Guards: what may stand between a model and its users, and which messages it would stop.

A guard sees what users and tools say (input) and what the model answers (output), each message by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from kvaudit.audit.judges.grader import Grader, StoredAnswer
from kvaudit.core.errors import SpecError
from kvaudit.core.options import sha256_of
from kvaudit.core.records import Message, Role
from kvaudit.core.registry import Registry

SIDES = ("both", "input", "output")
_OUTSIDE = (Role.USER, Role.TOOL)


class Passage(NamedTuple):
    """One message as a guard meets it; ``request`` is what the user said last before an answer. Hostile text."""

    side: Literal["input", "output"]
    text: str
    request: str = ""


@dataclass(frozen=True, kw_only=True)
class Guard(Grader[Passage, bool]):
    """Decides in bulk which passages it blocks; a subclass says ``blocked``. Records stay as they are.

    ``side`` is where it stands: both, input or output.
    """

    kind = "guard"
    field = "blocked"

    side: str = "both"

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise SpecError(f"guard {self.name}: side is {self.side!r}, wanted one of {', '.join(SIDES)}")

    @cached_property
    def sha256(self) -> str:
        """Of the identity and of where the guard stands."""
        return sha256_of(self.identity, self.side)

    @property
    def answers_file(self) -> str:
        return f"answers-{self.name}.jsonl"  # in a folder of its own, which tells the rest

    def blocked(self, passages: Sequence[Passage]) -> list[bool | None]:
        """Whether each passage is blocked; as ``grades``."""
        raise NotImplementedError

    def grades(self, questions: Sequence[Passage]) -> list[bool | None]:
        return self.blocked(questions)

    @staticmethod
    def key_of(question: Passage) -> str:
        return sha256_of(*question)

    def questions_of(self, answer: StoredAnswer) -> list[Passage]:
        return [passage for _, passage in passages(self, answer.record.transcript)]


GUARDS: Registry[Guard] = Registry("guard", "kvaudit.audit.judges.guards", Guard)


def passages(guard: Guard, transcript: Sequence[Message]) -> Iterator[tuple[int, Passage]]:
    """What a guard is shown of a conversation, in its order, each with the index of its message."""
    request = ""
    for index, message in enumerate(transcript):
        if message.role is Role.USER:
            request = message.content
        if message.role in _OUTSIDE and guard.side != "output":
            yield index, Passage("input", message.content)
        if message.role is Role.ASSISTANT and guard.side != "input":
            yield index, Passage("output", message.content, request)
