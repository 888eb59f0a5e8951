"""Shared by the tests of single engines: requests to the embedded model, and the answers of our own cache."""

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
    """A model, four requests, and the answers of our own uncompressed cache (``own``)."""

    model: LoadedModel
    asked: list[GenerationRequest]
    own: list[Completion]

    def start(self, condition: str, folder: Path, spec: EngineSpec | None = None) -> Session:
        """Start an engine on the model."""
        parsed = parse_condition(condition)
        engine, settings, spec = ENGINES.get(parsed.engine), dict(parsed.settings), spec or EngineSpec()
        engine.check(settings, spec)
        return engine.start(settings, EngineContext(self.model, spec, folder / "log", 1))

    def gaps(self, replies: Sequence[Reply]) -> list[float]:
        """Return the differences of log-probs from our own cache, in nats per token."""
        pairs = zip(replies, self.own, strict=True)
        return [abs(float(reply.logprob or 0) - sum(own.logprobs)) / len(own.ids) for reply, own in pairs]

    def mean_gap(self, replies: Sequence[Reply]) -> float:
        return fmean(self.gaps(replies))

    def matches(self, replies: Sequence[Reply]) -> bool:
        return [reply.ids for reply in replies] == [own.ids for own in self.own]


def world() -> World:
    """Return the world of the model that ships with the package."""
    model = load_model()
    prompts = [tuple(model.chat.tokenizer(text).input_ids) for text in PROMPTS]
    episode = Sampler(model, parse_policy("none"), recorded=False).open(prompts, range(len(prompts)))
    own = [one for one in episode.decode(Decoding(max_new_tokens=NEW, temperature=0.0)) if one is not None]
    stops = tuple(sorted(model.chat.stop_ids))
    return World(model, [GenerationRequest(ids, NEW, stops, 0.0, 1.0, n) for n, ids in enumerate(prompts)], own)
