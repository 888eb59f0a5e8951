"""A rubric judge whose model is behind an OpenAI-compatible endpoint (``core.endpoint``).

A reply that is late, too long, not JSON or not a word fails that answer. An endpoint that refuses every request, or is
unreachable, raises RunError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvaudit.audit.judges.rubric import Rubric, RubricJudge
from kvaudit.core.endpoint import EndpointModel
from kvaudit.core.judge_answers import Question
from kvaudit.core.plugins import sha256_of


@dataclass(frozen=True, kw_only=True)
class RubricEndpoint(EndpointModel, RubricJudge):
    """Sends the rubric and each question to the endpoint unchanged."""

    name = "rubric-endpoint"
    says = "a rubric, read by a model at an OpenAI-compatible endpoint"
    who = "judge rubric-endpoint"

    asks: str = "refusal"

    def __post_init__(self) -> None:
        EndpointModel.__post_init__(self)
        RubricJudge.__post_init__(self)

    def identity_under(self, rubric: Rubric) -> str:
        return sha256_of(rubric.text, self.base_url.rstrip("/"), self.model)

    def replies(self, rubric: Rubric, questions: Sequence[Question]) -> list[str | None]:
        return self.completions(map(rubric.messages, questions), rubric.reply_tokens)
