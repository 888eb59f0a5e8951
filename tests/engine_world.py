"""What the tests of single engines share: requests to the embedded model, and what our own cache says to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from kvaudit.audit.engines import GenerationRequest, Reply, Session, parse_condition
from kvaudit.audit.engines.base import ENGINES, EngineContext
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.decoding import Completion, Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.spec_evaluate import EngineSpec

NEW = 32
PROMPTS = ("hello there", "what is 3 + 4", "the code is 7 " * 12, "tell me a story")


class World(NamedTuple):
    """A model, four requests, and the answers of our own cache without compression."""

    model: LoadedModel
    asked: list[GenerationRequest]
    own: list[Completion]

    def start(self, condition: str, folder: Path, part: EngineSpec | None = None) -> Session:
        """An engine at work on the model."""
        found = parse_condition(condition)
        part = part or EngineSpec()
        ENGINES.get(found.engine).check(dict(found.settings), part)
        return ENGINES.get(found.engine).start(dict(found.settings), EngineContext(self.model, part, folder / "log", 1))

    def gaps(self, replies: Sequence[Reply]) -> list[float]:
        """By how much the log-probs of the answers differ from those of our own cache, in nats a token."""
        pairs = zip(replies, self.own, strict=True)
        return [abs(float(reply.logprob or 0) - sum(own.logprobs)) / len(own.ids) for reply, own in pairs]

    def mean_gap(self, replies: Sequence[Reply]) -> float:
        return fmean(self.gaps(replies))

    def says_the_same(self, replies: Sequence[Reply]) -> bool:
        return [reply.ids for reply in replies] == [own.ids for own in self.own]


def world() -> World:
    """Of the model that ships with the package."""
    model = load_model()
    prompts = [tuple(model.chat.tokenizer(text).input_ids) for text in PROMPTS]
    episode = Sampler(model, parse_policy("none"), recorded=False).open(prompts, range(len(prompts)))
    own = [one for one in episode.decode(Decoding(max_new_tokens=NEW, temperature=0.0)) if one is not None]
    stops = tuple(sorted(model.chat.stop_ids))
    return World(model, [GenerationRequest(ids, NEW, stops, 0.0, 1.0, n) for n, ids in enumerate(prompts)], own)
