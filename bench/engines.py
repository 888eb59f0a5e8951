"""How fast is a serving engine beside our cache, and how well do our policies imitate its KV settings?

    KVAUDIT_REAL_MODEL=FOLDER KVAUDIT_DATA=FOLDER python -m bench.engines [--items 64] [--new 40] [--threads 1]
    python -m bench.engines --python llama.cpp=.venv-llama-cpp/bin/python --python vllm=.venv-vllm/bin/python

Takes about 10 minutes for 135M parameters; results: docs/results/engines.md. Engines that are missing are left out.

All sides answer the same rows of XSTest as published, greedily. Speed: seconds of a whole cell, each side alone and
uncompressed; the ratio is ours over the engine's. Imitation: a policy and a setting each change some answers and
log-probs against their own uncompressed side. ``texts`` is how many answers stay the same under the policy, under the
setting, and between the two; ``moved`` is the root mean square change of an answer's log-prob per token, among answers
with the same text on all four sides; ``r`` is the correlation (Pearson) of the two changes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from kvaudit.audit.engines import ENGINES, Condition, GenerationRequest, parse_condition
from kvaudit.audit.engines.base import EngineContext
from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.sampling.conversations import item_prompt, play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.sampling.packing import pack_weights
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import AuditError
from kvaudit.core.records import Item
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.suites.base import SUITES, Suite

IN_FLIGHT = 16
# a policy of ours, and the engine setting that it imitates; these prompts are too short for evictions
IMITATIONS = (
    ("int8", "openvino:KV_CACHE_PRECISION=u8"),
    ("int8:write=true", "openvino:KV_CACHE_PRECISION=u8"),
    ("kivi:bits=4", "openvino:KV_CACHE_PRECISION=u4"),
    ("int8", "llama.cpp:type_k=q8_0,type_v=q8_0"),
    ("q4_0:write=true,rotate=true", "llama.cpp:type_k=q4_0,type_v=q4_0"),
    ("fp8:format=e4m3", "vllm:kv_cache_dtype=fp8_e4m3"),
    ("fp8:format=e4m3,scale=tensor,write=true", "vllm:kv_cache_dtype=fp8_e4m3"),
    ("fp8:format=e5m2,scale=tensor,write=true", "vllm:kv_cache_dtype=fp8_e5m2"),
)


class Answers(NamedTuple):
    """The answers of one side, row by row, and the seconds that they took."""

    texts: tuple[str, ...]
    logprobs: np.ndarray  # [N] nats, of the whole answer
    tokens: np.ndarray  # [N]
    seconds: float


class Sides:
    """The answers of every side to the same prompts; each side is asked once."""

    def __init__(self, model: LoadedModel, suite: Suite, items: Sequence[Item], pythons: dict[str, str]) -> None:
        self._model, self._suite, self._items, self._new = model, suite, items, suite.max_new_tokens
        self._prompts = [item_prompt(model.chat, item) for item in items]
        self.pythons = pythons
        self._answers: dict[str, Answers] = {}

    def answers(self, way: Policy | Condition) -> Answers:
        """Return the answers under a policy of ours or an engine's condition."""
        if way.canonical not in self._answers:
            print(f"asking {way.canonical}", file=sys.stderr, flush=True)
            self._answers[way.canonical] = self._ours(way) if isinstance(way, Policy) else self._engine(way)
        return self._answers[way.canonical]

    def _ours(self, policy: Policy) -> Answers:
        started, pairs = time.perf_counter(), [(self._suite, item) for item in self._items]
        sampler, decoding = Sampler(pack_weights(self._model), policy), Decoding(self._new, temperature=0.0)
        rows = play(sampler, pairs, decoding, [0] * len(pairs), at_once=IN_FLIGHT)
        seconds = time.perf_counter() - started
        rollouts = [row.rollout for row in rows]
        answers = [(r.ids[r.prompt_length :].tolist(), float(r.sampler_logprobs.sum())) for r in rollouts]
        return self._decode(answers, seconds)

    def _engine(self, condition: Condition) -> Answers:
        spec = EngineSpec(python=self.pythons.get(condition.engine))
        engine, settings = ENGINES.get(condition.engine), dict(condition.settings)
        engine.check(settings, spec)
        log = Path(tempfile.gettempdir()) / f"bench-engines-{condition.hash}.log"
        stops = tuple(sorted(self._model.chat.stop_ids))
        requests = [GenerationRequest(prompt.ids, self._new, stops, 0.0, 1.0, 0) for prompt in self._prompts]
        with engine.start(settings, EngineContext(self._model, spec, log, torch.get_num_threads())) as session:
            session.answer(requests[:1])  # the setup of a first request does not count
            started = time.perf_counter()
            batches = [requests[start : start + 2 * IN_FLIGHT] for start in range(0, len(requests), 2 * IN_FLIGHT)]
            replies = [reply for batch in batches for reply in session.answer(batch)]
            seconds = time.perf_counter() - started
        return self._decode([(r.ids, float("nan") if r.logprob is None else r.logprob) for r in replies], seconds)

    def _decode(self, rows: Sequence[tuple[Sequence[int], float]], seconds: float) -> Answers:
        texts = tuple(self._model.chat.text(ids) for ids, _ in rows)
        return Answers(
            texts, np.array([logprob for _, logprob in rows]), np.array([len(ids) for ids, _ in rows]), seconds
        )


def speed(sides: Sides, conditions: Sequence[Condition]) -> Iterator[str]:
    """Yield the table of uncompressed speeds: our cache and every engine."""
    uncompressed = sides.answers(parse_policy("none"))
    yield "| engine | engine, s | ours, s | ours over the engine's | tokens/s, engine and ours | texts the same |"
    yield "|---|---:|---:|---:|---:|---:|"
    for condition in conditions:
        theirs = sides.answers(condition)
        rates = f"{theirs.tokens.sum() / theirs.seconds:.0f}, {uncompressed.tokens.sum() / uncompressed.seconds:.0f}"
        ratio = uncompressed.seconds / theirs.seconds
        seconds = f"{theirs.seconds:.1f} | {uncompressed.seconds:.1f} | {ratio:.2f}"
        yield f"| {condition.canonical} | {seconds} | {rates} | {same(uncompressed, theirs)} |"


def imitation(sides: Sides, pairs: Sequence[tuple[Policy, Condition]]) -> Iterator[str]:
    """Yield the table of policies and the engine settings that they imitate."""
    uncompressed = sides.answers(parse_policy("none"))
    yield "| policy | setting | texts: policy | setting | between | moved: policy | setting | r |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for policy, condition in pairs:
        plain, ours, theirs = sides.answers(condition.reference), sides.answers(policy), sides.answers(condition)
        is_same = np.array(
            [
                len({a, b, c, d}) == 1
                for a, b, c, d in zip(uncompressed.texts, plain.texts, ours.texts, theirs.texts, strict=True)
            ]
        )
        by_policy, by_setting = moves(uncompressed, ours)[is_same], moves(plain, theirs)[is_same]
        r = float(np.corrcoef(by_policy, by_setting)[0, 1]) if is_same.sum() > 2 else float("nan")
        figures = f"{rms(by_policy):.4f} | {rms(by_setting):.4f} | {r:.2f} ({is_same.sum()} answers)"
        yield (
            f"| {policy.canonical} | {condition.canonical} | {same(uncompressed, ours)} | {same(plain, theirs)} | "
            f"{same(ours, theirs)} | {figures} |"
        )


def same(first: Answers, second: Answers) -> str:
    """Return how many texts two sides share."""
    return f"{sum(a == b for a, b in zip(first.texts, second.texts, strict=True))} of {len(first.texts)}"


def moves(plain: Answers, served: Answers) -> np.ndarray:
    """Return the change of each answer's log-prob, in nats per token [N]."""
    return (served.logprobs - plain.logprobs) / plain.tokens


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2))) if len(values) else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(os.environ.get("KVAUDIT_REAL_MODEL", "embedded"))
    name = "xstest" if "KVAUDIT_DATA" in os.environ else "refusal"
    suite = SUITES.get(name)()
    suite.max_new_tokens = options.new
    items = suite.items("eval", options.items, 1000, 0 if name == "xstest" else 256, model.chat.count_tokens)
    sides = Sides(model, suite, items, dict(pair.split("=", 1) for pair in options.python))
    sizes = f"{len(items)} rows of {name}, {options.new} tokens, {options.threads} threads"
    print(f"{model.name} {model.sha256[:12]}, {sizes}")
    pairs = list(available_pairs(sides.pythons))
    for line in speed(sides, list(dict.fromkeys(condition.reference for _, condition in pairs))):
        print(line, flush=True)
    print()
    for line in imitation(sides, pairs):
        print(line, flush=True)


def available_pairs(pythons: dict[str, str]) -> Iterator[tuple[Policy, Condition]]:
    """Yield the imitations whose engine is installed; others are named on stderr."""
    for policy, text in IMITATIONS:
        try:
            condition = parse_condition(text)
            ENGINES.get(condition.engine).check(
                dict(condition.settings), EngineSpec(python=pythons.get(condition.engine))
            )
        except AuditError as error:
            print(f"{text} left out: {error}", file=sys.stderr)
        else:
            yield parse_policy(policy), condition


if __name__ == "__main__":
    main()
