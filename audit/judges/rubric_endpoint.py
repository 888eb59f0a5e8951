"""A rubric read by a model behind an OpenAI-compatible endpoint (``core.endpoint``).

A reply that is late, long, no JSON or no word is a failed answer. An endpoint that refuses altogether, or is not there,
stops the work in one line, and what was answered is kept by whoever remembers it (``audit.judges.remembered``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from audit.core.endpoint import Completion, Endpoint, Unanswered, ask_all, rows
from audit.core.errors import RunError, SpecError
from audit.core.options import sha256_of
from audit.core.questions import Question
from audit.judges.rubric import WORD_TOKENS, Rubric, RubricJudge

_WHO = "judge rubric-endpoint"


@dataclass(frozen=True)
class RubricEndpoint(RubricJudge):
    """``key`` names the environment variable that holds the key; empty where the endpoint wants none.

    ``timeout`` is in seconds for a whole reply, ``tries`` of one question, ``parallel`` questions at a time.
    """

    name = "rubric-endpoint"
    says = "a rubric, read by a model at an OpenAI-compatible endpoint"

    base_url: str
    model: str
    key: str = ""
    timeout: float = 60.0
    tries: int = 4
    parallel: int = 4

    def __post_init__(self) -> None:
        self._endpoint.check(_WHO)
        for name, most in (("timeout", 3600), ("tries", 20), ("parallel", 64)):
            if not 1 <= getattr(self, name) <= most:
                raise SpecError(f"{_WHO}: {name} is {getattr(self, name):g}, wanted from 1 to {most}")

    def check(self) -> None:
        self._endpoint.line(_WHO)

    def identity_under(self, rubric: Rubric) -> str:
        return sha256_of(rubric.text, self.base_url.rstrip("/"), self.model)

    def replies(self, rubric: Rubric, questions: Sequence[Question]) -> list[str | None]:
        line = self._endpoint.line(_WHO)  # before a thread starts: a missing key is the user's to mend
        options = {"model": self.model, "temperature": 0, "max_tokens": WORD_TOKENS}
        bodies = [{**options, "messages": rows(rubric.messages(question))} for question in questions]
        try:
            replies = ask_all(line, bodies, self.parallel)
        except Unanswered as why:
            raise self._stopped(why) from None
        return [reply.text if isinstance(reply, Completion) else None for reply in replies]

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(self.base_url, self.key, self.timeout, self.tries)

    def _stopped(self, why: Unanswered) -> RunError:
        key = f"key from {self.key}" if self.key else "no key"
        return RunError(
            f"{_WHO}: {self.base_url} does not answer ({why}; model {self.model}, {key}); "
            "what was answered before is kept: go on when it answers, or give another base_url, model or key"
        )
