"""A guard model behind an OpenAI-compatible endpoint (``core.endpoint``), shown the conversation that it guards.

An input goes as the user's message, an output as the assistant's after the user's request, which is what guard models
read. The first word of the reply decides; any other word is a failed answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvaudit.audit.judges.guards.base import Guard, Passage
from kvaudit.audit.judges.rubric import first_word
from kvaudit.core.endpoint import EndpointModel
from kvaudit.core.errors import SpecError
from kvaudit.core.options import sha256_of
from kvaudit.core.records import Message, Role

_WORD_TOKENS = 16  # for one word, what a model puts around it, and the name of a rule
_VERSION = 1  # of how a passage is put


@dataclass(frozen=True, kw_only=True)
class EndpointGuard(EndpointModel, Guard):
    """``blocks`` and ``allows`` are the words that it replies with."""

    name = "endpoint"
    says = "a guard model at an OpenAI-compatible endpoint"
    who = "guard endpoint"

    blocks: str = "unsafe"
    allows: str = "safe"

    def __post_init__(self) -> None:
        Guard.__post_init__(self)
        EndpointModel.__post_init__(self)
        if first_word(self.blocks) == first_word(self.allows):
            raise SpecError(f"{self.who}: blocks and allows are both {self.blocks!r}, wanted two words")

    @property
    def identity(self) -> str:
        return sha256_of(_VERSION, self.base_url.rstrip("/"), self.model, self.blocks, self.allows)

    def blocked(self, passages: Sequence[Passage]) -> list[bool | None]:
        words = {first_word(self.blocks): True, first_word(self.allows): False}
        replies = self.completions(map(_messages, passages), _WORD_TOKENS)
        return [None if reply is None else words.get(first_word(reply)) for reply in replies]


def _messages(passage: Passage) -> tuple[Message, ...]:
    if passage.side == "input":
        return (Message(Role.USER, passage.text),)
    return Message(Role.USER, passage.request), Message(Role.ASSISTANT, passage.text)
