"""How much of the gap between an engine's log-probs and the learner's does a learner explain that reads coded K and V?

    KVAUDIT_REAL_MODEL=FOLDER KVAUDIT_DATA=FOLDER python -m bench.replay_gap [--items 48] [--new 32] [--threads 1]
    python -m bench.replay_gap --python vllm=.venv-vllm/bin/python --settings vllm:kv_cache_dtype=fp8_e5m2
    python -m bench.replay_gap --run RUN          what a run with train.rollouts noted of the same while it trained, and
                                                  its facets by arm, seed and way of serving

Rows of XSTest as published (of the embedded model its own suite), one completion each, drawn by the engine. Root mean
square over tokens of the engine's log-prob less that of a view of the learner, in nats: ``dense``; ``own codes``, the
learner's own keys and values coded as the engine codes them; ``replay``, codes of the keys and values that the engine
wrote. ``explained`` is 1 - (view / dense)^2. ``uncompressed`` is the engine's reference against the dense view: what no
replay can explain. ``last bit`` is the view of own codes against itself with all weights changed by 1e-7 of their size:
by so much the codes of two float32 arithmetics move the log-probs. llama.cpp shows what its queries read, and there a
learner has no codes of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.engines import ENGINES, Condition, GenerationRequest, parse_condition
from kvaudit.audit.engines.base import EngineContext
from kvaudit.audit.sampling.conversations import item_prompt
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.training.engine_rollouts import engine_rollout
from kvaudit.audit.training.learner import read_tokens
from kvaudit.core.errors import AuditError
from kvaudit.core.spec_evaluate import EngineSpec
from kvaudit.suites.base import SUITES

SETTINGS = (
    "openvino:KV_CACHE_PRECISION=u8",
    "openvino:KEY_CACHE_PRECISION=u8,VALUE_CACHE_PRECISION=u4",
    "openvino:KV_CACHE_PRECISION=u4",
    "vllm:kv_cache_dtype=fp8_e4m3",
    "vllm:kv_cache_dtype=fp8_e5m2",
    "llama.cpp:type_k=q8_0,type_v=q8_0",
    "llama.cpp:type_k=q8_0,type_v=q4_0",
    "llama.cpp:type_k=q4_0,type_v=q4_0",
)
AT_ONCE = 4  # rows of a pass
JOLT = 1e-7  # relative


class Gaps(NamedTuple):
    """Root mean squares in nats a token."""

    tokens: int
    uncompressed: float
    dense: float
    own: float | None
    replay: float
    last_bit: float | None


def gaps(model: LoadedModel, prompts: Sequence[Sequence[int]], text: str, asked: argparse.Namespace) -> Gaps:
    """The numbers of one setting."""
    condition = parse_condition(text)
    store = ENGINES.get(condition.engine).store(dict(condition.settings))
    rollouts = [replace(one, stored=store) for one in drawn(model, prompts, condition, asked)]
    plain = drawn(model, prompts, condition.reference, asked)
    said, heat = sampled(rollouts), asked.temperature or 1.0
    own, last_bit = (None, None) if store is None or store.shown else of_its_own(model, rollouts, heat)
    return Gaps(
        tokens=len(said),
        uncompressed=rms(sampled(plain) - view(model.model, plain, "dense", heat)),
        dense=rms(said - view(model.model, rollouts, "dense", heat)),
        own=None if own is None else rms(said - own),
        replay=rms(said - view(model.model, rollouts, "shadow", heat)),
        last_bit=last_bit,
    )


def of_its_own(model: LoadedModel, rollouts: Sequence[Rollout], heat: float) -> tuple[Tensor, float]:
    """The log-probs of a learner that codes its own keys and values, and how far the last bit moves them."""
    alone = [replace(one, written=None) for one in rollouts]
    jolted, draws = copy.deepcopy(model.model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in jolted.parameters():
            weight.mul_(1 + JOLT * torch.randn(weight.shape, generator=draws))
    own = view(model.model, alone, "shadow", heat)
    return own, rms(own - view(jolted, alone, "shadow", heat))


def drawn(
    model: LoadedModel, prompts: Sequence[Sequence[int]], condition: Condition, asked: argparse.Namespace
) -> list[Rollout]:
    """One completion of every prompt."""
    pythons = dict(one.split("=", 1) for one in asked.python)
    engine, part = ENGINES.get(condition.engine), EngineSpec(python=pythons.get(condition.engine))
    engine.check(dict(condition.settings), part)
    stops = tuple(sorted(model.chat.stop_ids))
    rows = [GenerationRequest(tuple(ids), asked.new, stops, asked.temperature, 1.0, n) for n, ids in enumerate(prompts)]
    print(f"asking {condition.canonical}", file=sys.stderr, flush=True)
    log = Path(tempfile.gettempdir()) / f"bench-replay-gap-{condition.hash}.log"
    drawer = engine.drawer(dict(condition.settings), EngineContext(model, part, log, asked.threads))
    try:
        found = drawer.draw(rows, keep=len(rows))
    finally:
        drawer.stop()
    return [engine_rollout(model.model.config, row.ids, one) for row, one in zip(rows, found, strict=True)]


def sampled(rollouts: Sequence[Rollout]) -> Tensor:
    """The engine's log-probs of all tokens [n]."""
    return torch.cat([one.sampler_logprobs[one.sampled] for one in rollouts]).double()


def view(model: object, rollouts: Sequence[Rollout], kind: str, temperature: float) -> Tensor:
    """The learner's log-probs of them [n]."""
    parts = [rollouts[start : start + AT_ONCE] for start in range(0, len(rollouts), AT_ONCE)]
    with torch.no_grad():
        found = [read_tokens(model, part, 1, kind, temperature).logprobs for part in parts]  # type: ignore[arg-type]
    return torch.cat(found).double()


def rms(values: Tensor) -> float:
    """Root mean square."""
    return float(values.square().mean().sqrt())


def row(text: str, found: Gaps) -> str:
    """A line of the table."""
    own, replay = (_explained(found, value) for value in (found.own, found.replay))
    bit = "-" if found.last_bit is None else f"{found.last_bit:.1e}"
    return f"| {text} | {found.tokens} | {found.uncompressed:.1e} | {found.dense:.1e} | {bit} | {own} | {replay} |"


def _explained(found: Gaps, value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}, {1 - (value / found.dense) ** 2:.6f}"


def of_a_run(path: Path) -> None:
    """Print what the telemetry of each arm says: lowest to highest over steps and seeds."""
    print("| arm | seeds, steps | dense | replay | overlap, p5 | sequences vetoed | reward, first and last 5 |")
    print("|---|---|---|---|---|---|---|")
    for arm in sorted(path.glob("checkpoints/*")):
        files = sorted(arm.glob("seed-*/telemetry.jsonl"))
        seeds = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
        steps = [step for seed in seeds for step in seed if step.get("engine/dense_rms") is not None]
        if not steps:
            continue  # a warm start, which draws nothing
        every = [step for seed in seeds for step in seed]
        ends = [[step["reward_mean"] for seed in seeds for step in seed[part]] for part in (slice(5), slice(-5, None))]
        cells = [
            *(_range(step[f"engine/{name}_rms"] for step in steps) for name in ("dense", "replay")),
            *(_range(step[f"mismatch/{name}"] for step in every) for name in ("overlap_p5", "frac_sequences_vetoed")),
            ", ".join(f"{fmean(own):.2f}" for own in ends),
        ]
        print(f"| {arm.name} | {len(seeds)}, {'/'.join(str(len(seed)) for seed in seeds)} | {' | '.join(cells)} |")


def facets_of_a_run(path: Path) -> None:
    """Print how often each facet of each suite is yes, of the answers in which it could be read, seed by seed."""
    counts = Counter[tuple[str, str, str, str, int, bool]]()
    for file in sorted((path / "records").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            for facet, value in record["facets"].items():
                if value is not None:
                    where = (record["suite"], record["policy"], record["arm"], facet, record["train_seed"])
                    counts[*where, value] += 1
    places = sorted({place[:4] for place in counts})
    seeds = sorted({place[4] for place in counts})
    print(f"\n| suite | served under | arm | facet | yes, of readable answers, seeds {', '.join(map(str, seeds))} |")
    print("|---|---|---|---|---|")
    for place in places:
        yes, no = ([counts[*place, seed, value] for seed in seeds] for value in (True, False))
        told = ", ".join(f"{one}/{one + other}" for one, other in zip(yes, no, strict=True))
        print(f"| {' | '.join(place)} | {told} |")


def _range(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{min(known):.2g} to {max(known):.2g}" if known else "-"


def main() -> None:
    """Print the table; an engine that is not there is named and left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=48)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--settings", action="append", default=[], metavar="ENGINE:NAME=VALUE")
    parser.add_argument("--run", type=Path)
    asked = parser.parse_args()
    if asked.run:
        of_a_run(asked.run)
        facets_of_a_run(asked.run)
        return
    torch.set_num_threads(asked.threads)
    model = load_model(os.environ.get("KVAUDIT_REAL_MODEL", "embedded"))
    name = "xstest" if "KVAUDIT_DATA" in os.environ else "refusal"
    items = SUITES.get(name)().items("eval", asked.items, 1000, 0 if name == "xstest" else 256, model.chat.count_tokens)
    prompts = [item_prompt(model.chat, item).ids for item in items]
    print(f"{model.name} {model.sha256[:12]}, {len(items)} rows of {name}, {asked.new} tokens at {asked.temperature}")
    print("| setting | tokens | uncompressed | dense | last bit | own codes, explained | replay, explained |")
    print("|---|---:|---:|---:|---:|---|---|")
    for text in asked.settings or SETTINGS:
        try:
            print(row(text, gaps(model, prompts, text, asked)), flush=True)
        except AuditError as error:
            print(f"left out: {text}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
