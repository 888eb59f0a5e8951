"""A rubric judge with a local model, sampled greedily by kvaudit with an uncompressed cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kvaudit.audit.judges.rubric import Rubric, RubricJudge
from kvaudit.core.judge_answers import Question
from kvaudit.core.plugins import sha256_of

if TYPE_CHECKING:
    from kvaudit.audit.sampling.model import LoadedModel

_BATCH = 8  # questions of similar length


@dataclass(frozen=True)
class RubricLocal(RubricJudge):
    """``model`` is a folder, a GGUF file or a hub id; a reply in another form counts as a failure."""

    name = "rubric-local"
    says = "a rubric, read by a local model"

    model: str
    asks: str = "refusal"

    def identity_under(self, rubric: Rubric) -> str:
        return sha256_of(rubric.text, _loaded(self.model).sha256)

    def replies(self, rubric: Rubric, questions: Sequence[Question]) -> list[str | None]:
        model = _loaded(self.model)
        prompts = [model.chat.prompt(rubric.messages(question)).ids for question in questions]
        # a question that does not fit the model's positions gets no reply
        fitting = [n for n, ids in enumerate(prompts) if len(ids) + rubric.reply_tokens <= model.max_positions]
        fitting.sort(key=lambda n: len(prompts[n]))
        replies: list[str | None] = [None] * len(questions)
        for start in range(0, len(fitting), _BATCH):
            batch = fitting[start : start + _BATCH]
            texts = _sample(model, [prompts[n] for n in batch], rubric.reply_tokens)
            for n, text in zip(batch, texts, strict=True):
                replies[n] = text
        return replies


def _sample(model: LoadedModel, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
    from kvaudit.audit.policies import parse_policy
    from kvaudit.audit.sampling.sampler import Decoding, Sampler

    episode = Sampler(model, parse_policy("none")).open(prompts, [0] * len(prompts))  # greedy, so seeds are not used
    completions = episode.decode(Decoding(tokens, temperature=0.0))
    return ["" if completion is None else model.chat.text(completion.ids) for completion in completions]


@cache
def _loaded(name: str) -> LoadedModel:
    from kvaudit.audit.sampling.model import load_model
    from kvaudit.core.spec import expand

    return load_model(expand("model of judge rubric-local", name))
