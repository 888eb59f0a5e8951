"""A serving engine beside our own cache: how fast the same cell is, and how well a policy of ours imitates its setting.

    KVAUDIT_REAL_MODEL=FOLDER KVAUDIT_DATA=FOLDER python -m bench.engines [--items 64] [--new 40] [--threads 1]
    python -m bench.engines --python llama.cpp=.venv-llama-cpp/bin/python --python vllm=.venv-vllm/bin/python

The same rows of XSTest, as published and greedy, go to every side, as a run asks them. Speed: seconds of a whole cell,
each side alone, uncompressed against uncompressed; the ratio is ours over the engine's. Imitation: a policy and a
setting each change some answers and log-probs of their own uncompressed side. ``texts`` is how many answers stay the
same under the policy, under the setting, and between the two; ``moved`` the root mean square of what an answer's
log-prob moves by per token, among answers whose text stayed in all four; ``r`` how far both move the same answers the
same way (Pearson).
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
# a policy of ours, and the setting of an engine that it is taken for; evictions touch no prompt of these rows
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


class Said(NamedTuple):
    """What one side answered, row by row, and the seconds it took."""

    texts: tuple[str, ...]
    logprobs: np.ndarray  # [N] nats, of the whole answer
    tokens: np.ndarray  # [N]
    seconds: float


class Sides:
    """Every side's answers to the same prompts, asked once."""

    def __init__(self, model: LoadedModel, suite: Suite, items: Sequence[Item], pythons: dict[str, str]) -> None:
        self._model, self._suite, self._items, self._new = model, suite, items, suite.max_new_tokens
        self._prompts = [item_prompt(model.chat, item) for item in items]
        self.pythons = pythons
        self._known: dict[str, Said] = {}

    def of(self, way: Policy | Condition) -> Said:
        """The answers under a policy of ours or an engine's condition."""
        if way.canonical not in self._known:
            print(f"asking {way.canonical}", file=sys.stderr, flush=True)
            self._known[way.canonical] = self._ours(way) if isinstance(way, Policy) else self._engine(way)
        return self._known[way.canonical]

    def _ours(self, policy: Policy) -> Said:
        started, asked = time.perf_counter(), [(self._suite, item) for item in self._items]
        sampler, decoding = Sampler(pack_weights(self._model), policy), Decoding(self._new, temperature=0.0)
        rows = play(sampler, asked, decoding, [0] * len(asked), at_once=IN_FLIGHT)
        seconds = time.perf_counter() - started
        rollouts = [row.rollout for row in rows]
        answers = [(one.ids[one.prompt_length :].tolist(), float(one.sampler_logprobs.sum())) for one in rollouts]
        return self._said(answers, seconds)

    def _engine(self, condition: Condition) -> Said:
        how = EngineSpec(python=self.pythons.get(condition.engine))
        engine, settings = ENGINES.get(condition.engine), dict(condition.settings)
        engine.check(settings, how)
        log = Path(tempfile.gettempdir()) / f"bench-engines-{condition.hash}.log"
        stops = tuple(sorted(self._model.chat.stop_ids))
        asked = [GenerationRequest(one.ids, self._new, stops, 0.0, 1.0, 0) for one in self._prompts]
        with engine.start(settings, EngineContext(self._model, how, log, torch.get_num_threads())) as session:
            session.answer(asked[:1])  # what a first request sets up is no speed of a cell
            started = time.perf_counter()
            parts = [asked[start : start + 2 * IN_FLIGHT] for start in range(0, len(asked), 2 * IN_FLIGHT)]
            replies = [one for part in parts for one in session.answer(part)]
            seconds = time.perf_counter() - started
        return self._said([(one.ids, float("nan") if one.logprob is None else one.logprob) for one in replies], seconds)

    def _said(self, rows: Sequence[tuple[Sequence[int], float]], seconds: float) -> Said:
        texts = tuple(self._model.chat.text(ids) for ids, _ in rows)
        return Said(texts, np.array([logprob for _, logprob in rows]), np.array([len(ids) for ids, _ in rows]), seconds)


def speed(sides: Sides, conditions: Sequence[Condition]) -> Iterator[str]:
    """Our own cache over every engine, uncompressed."""
    own = sides.of(parse_policy("none"))
    yield "| engine | its cell, s | ours, s | ours over its | tokens/s, its and ours | texts the same |"
    yield "|---|---:|---:|---:|---:|---:|"
    for condition in conditions:
        its = sides.of(condition)
        rates = f"{its.tokens.sum() / its.seconds:.0f}, {own.tokens.sum() / own.seconds:.0f}"
        ratio = own.seconds / its.seconds
        seconds = f"{its.seconds:.1f} | {own.seconds:.1f} | {ratio:.2f}"
        yield f"| {condition.canonical} | {seconds} | {rates} | {same(own, its)} |"


def imitation(sides: Sides, pairs: Sequence[tuple[Policy, Condition]]) -> Iterator[str]:
    """A policy of ours beside what it is taken for."""
    own = sides.of(parse_policy("none"))
    yield "| policy | setting | texts: policy | setting | between | moved: policy | setting | r |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for policy, condition in pairs:
        plain, ours, its = sides.of(condition.reference), sides.of(policy), sides.of(condition)
        kept = np.array(
            [len({a, b, c, d}) == 1 for a, b, c, d in zip(own.texts, plain.texts, ours.texts, its.texts, strict=True)]
        )
        by_policy, by_setting = moves(own, ours)[kept], moves(plain, its)[kept]
        r = float(np.corrcoef(by_policy, by_setting)[0, 1]) if kept.sum() > 2 else float("nan")
        figures = f"{rms(by_policy):.4f} | {rms(by_setting):.4f} | {r:.2f} ({kept.sum()} answers)"
        yield (
            f"| {policy.canonical} | {condition.canonical} | {same(own, ours)} | {same(plain, its)} | "
            f"{same(ours, its)} | {figures} |"
        )


def same(one: Said, other: Said) -> str:
    """How many texts two sides share."""
    return f"{sum(a == b for a, b in zip(one.texts, other.texts, strict=True))} of {len(one.texts)}"


def moves(plain: Said, served: Said) -> np.ndarray:
    """By how many nats a token the log-prob of every answer moved."""
    return (served.logprobs - plain.logprobs) / plain.tokens


def rms(values: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(values**2))) if len(values) else float("nan")


def main() -> None:
    """Print both tables; an engine that is not there is named and left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model = load_model(os.environ.get("KVAUDIT_REAL_MODEL", "embedded"))
    name = "xstest" if "KVAUDIT_DATA" in os.environ else "refusal"
    suite = SUITES.get(name)()
    suite.max_new_tokens = asked.new
    items = suite.items("eval", asked.items, 1000, 0 if name == "xstest" else 256, model.chat.count_tokens)
    sides = Sides(model, suite, items, dict(one.split("=", 1) for one in asked.python))
    print(f"{model.name} {model.sha256[:12]}, {len(items)} rows of {name}, {asked.new} tokens, {asked.threads} threads")
    pairs = list(usable(sides.pythons))
    for line in speed(sides, list(dict.fromkeys(condition.reference for _, condition in pairs))):
        print(line, flush=True)
    print()
    for line in imitation(sides, pairs):
        print(line, flush=True)


def usable(pythons: dict[str, str]) -> Iterator[tuple[Policy, Condition]]:
    """The pairs whose engine is there; one that is not is named on stderr."""
    for policy, text in IMITATIONS:
        try:
            condition = parse_condition(text)
            ENGINES.get(condition.engine).check(
                dict(condition.settings), EngineSpec(python=pythons.get(condition.engine))
            )
        except AuditError as error:
            print(f"left out: {text}: {error}", file=sys.stderr)
        else:
            yield parse_policy(policy), condition


if __name__ == "__main__":
    main()
