"""A guard model behind an OpenAI-compatible endpoint (``core.endpoint``), shown the conversation that it guards.

An input goes as the user's message, an output as the assistant's after the user's request, which is what guard models
read. The first word of the reply decides; any other word is a failed answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from audit.core.endpoint import Completion, Endpoint, Unanswered, ask_all, rows
from audit.core.errors import RunError, SpecError
from audit.core.options import sha256_of
from audit.core.records import Message, Role
from audit.guards.base import Guard, Passage

_WHO = "guard endpoint"
_WORD_TOKENS = 16  # for one word, what a model puts around it, and the name of a rule
_VERSION = 1  # of how a passage is put


@dataclass(frozen=True, kw_only=True)
class EndpointGuard(Guard):
    """``blocks`` and ``allows`` are the words that it replies with; ``key`` names the environment variable of its key.

    ``timeout`` is in seconds for a whole reply, ``tries`` of one passage, ``parallel`` passages at a time.
    """

    name = "endpoint"
    says = "a guard model at an OpenAI-compatible endpoint"

    base_url: str
    model: str
    key: str = ""
    blocks: str = "unsafe"
    allows: str = "safe"
    timeout: float = 60.0
    tries: int = 4
    parallel: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._endpoint.check(_WHO)
        for name, most in (("timeout", 3600), ("tries", 20), ("parallel", 64)):
            if not 1 <= getattr(self, name) <= most:
                raise SpecError(f"{_WHO}: {name} is {getattr(self, name):g}, wanted from 1 to {most}")
        if _word(self.blocks) == _word(self.allows):
            raise SpecError(f"{_WHO}: blocks and allows are both {self.blocks!r}, wanted two words")

    def check(self) -> None:
        self._endpoint.line(_WHO)

    @property
    def identity(self) -> str:
        return sha256_of(_VERSION, self.base_url.rstrip("/"), self.model, self.blocks, self.allows)

    def blocked(self, passages: Sequence[Passage]) -> list[bool | None]:
        line = self._endpoint.line(_WHO)  # before a thread starts: a missing key is the user's to mend
        options = {"model": self.model, "temperature": 0, "max_tokens": _WORD_TOKENS}
        try:
            bodies = [{**options, "messages": rows(_messages(passage))} for passage in passages]
            replies = ask_all(line, bodies, self.parallel)
        except Unanswered as why:
            key = f"key from {self.key}" if self.key else "no key"
            raise RunError(
                f"{_WHO}: {self.base_url} does not answer ({why}; model {self.model}, {key}); what was answered "
                "before is kept: go on when it answers, or give another base_url, model or key"
            ) from None
        words = {_word(self.blocks): True, _word(self.allows): False}
        return [words.get(_word(reply.text)) if isinstance(reply, Completion) else None for reply in replies]

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(self.base_url, self.key, self.timeout, self.tries)


def _messages(passage: Passage) -> tuple[Message, ...]:
    if passage.side == "input":
        return (Message(Role.USER, passage.text),)
    return Message(Role.USER, passage.request), Message(Role.ASSISTANT, passage.text)


def _word(text: str) -> str:
    """The first word of a text, without what stands around it."""
    return next(iter(text.split(maxsplit=1)), "").strip(".,:;!*\"'`").casefold()
