"""The contract of a guard: passages in, which of them it would block out, and a name that says exactly who decided.

A guard sees what users and tools say (input) and what the model answers (output), each message by itself. Neither arm
nor policy nor suite reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from kvaudit.core.errors import SpecError
from kvaudit.core.options import IDENTITY_DIGITS, parse_named, sha256_of
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
class Guard:
    """Decides in bulk which passages it blocks. Subclass as a frozen dataclass in a file of its own, with a ``name``.

    Fields are the guard's options: ``NAME:field=value,field=value`` in a spec or a command. ``side`` is where it
    stands: both, input or output.
    """

    name: ClassVar[str] = ""
    says: ClassVar[str] = ""  # what it goes by, for ``kvaudit list guards``

    side: str = "both"

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise SpecError(f"guard {self.name}: side is {self.side!r}, wanted one of {', '.join(SIDES)}")

    @property
    def identity(self) -> str:
        """sha256 of all that its answers follow from: phrases, or model and threshold. 64 hex digits."""
        raise NotImplementedError

    def blocked(self, passages: Sequence[Passage]) -> list[bool | None]:
        """Whether each passage is blocked; None where the guard failed, which is asked again another time.

        The answer to a passage does not depend on the others. Raises RunError where asking on is of no use.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise SpecError or DataError for what would only be found out once all answers are there."""
        _ = self.identity

    @cached_property
    def sha256(self) -> str:
        """Of the identity and of where the guard stands: of all that its effect follows from."""
        return sha256_of(self.identity, self.side)

    @cached_property
    def label(self) -> str:
        """What a run's folder calls it: name and the first digits of its sha256."""
        return f"{self.name}-{self.sha256[:IDENTITY_DIGITS]}"


GUARDS: Registry[Guard] = Registry("guard", "kvaudit.audit.judges.guards", Guard)


def parse_guard(text: str) -> Guard:
    """The guard of ``NAME`` or ``NAME:field=value,field=value``; raises SpecError for what it does not know."""
    return parse_named(GUARDS, text)


def passage_key(passage: Passage) -> str:
    """sha256 of a passage: what its answer is remembered under."""
    return sha256_of(*passage)


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
