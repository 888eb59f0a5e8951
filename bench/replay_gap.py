"""How much of the gap between an engine's log-probs and the learner's do quantised keys and values explain?

    KVAUDIT_REAL_MODEL=FOLDER KVAUDIT_DATA=FOLDER python -m bench.replay_gap [--items 48] [--new 32] [--threads 1]
    python -m bench.replay_gap --python vllm=.venv-vllm/bin/python --settings vllm:kv_cache_dtype=fp8_e5m2
    python -m bench.replay_gap --run RUN    # the same figures from the telemetry of a run with train.rollouts, and
                                            # its facets by arm, seed and serving policy

Takes about 10 minutes for 135M parameters; results: docs/results/replay-gap.md. Missing engines are left out.

Rows of XSTest as published (for the embedded model its own suite), one completion each, sampled by the engine. Figures
are root mean squares over tokens of the engine's log-prob minus the learner's, in nats: ``dense``; ``own codes``, the
learner's own keys and values quantised as the engine does it; ``replay``, the codes that the engine stored.
``explained`` is 1 - (gap / dense gap)^2. ``uncompressed`` is the engine's reference against the dense learner, which no
replay can explain. ``last bit`` is how much "own codes" changes if all weights change by 1e-7 of their size: as much as
two float32 implementations may differ. llama.cpp shows only what its queries read, so it has no "own codes".
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
BATCH = 4  # rows per pass
PERTURBATION = 1e-7  # relative change of the weights


class Gaps(NamedTuple):
    """Root mean squares in nats per token."""

    tokens: int
    uncompressed: float
    dense: float
    own_codes: float | None
    replay: float
    last_bit: float | None


def measure_gaps(model: LoadedModel, prompts: Sequence[Sequence[int]], text: str, options: argparse.Namespace) -> Gaps:
    """Measure the gaps of one setting."""
    condition = parse_condition(text)
    store = ENGINES.get(condition.engine).store(dict(condition.settings))
    rollouts = [replace(rollout, stored=store) for rollout in sample_from_engine(model, prompts, condition, options)]
    plain = sample_from_engine(model, prompts, condition.reference, options)
    sampled, temperature = engine_logprobs(rollouts), options.temperature or 1.0
    own_codes, last_bit = (
        (None, None) if store is None or store.shown else own_code_logprobs(model, rollouts, temperature)
    )
    return Gaps(
        tokens=len(sampled),
        uncompressed=rms(engine_logprobs(plain) - learner_logprobs(model.model, plain, "dense", temperature)),
        dense=rms(sampled - learner_logprobs(model.model, rollouts, "dense", temperature)),
        own_codes=None if own_codes is None else rms(sampled - own_codes),
        replay=rms(sampled - learner_logprobs(model.model, rollouts, "shadow", temperature)),
        last_bit=last_bit,
    )


def own_code_logprobs(model: LoadedModel, rollouts: Sequence[Rollout], temperature: float) -> tuple[Tensor, float]:
    """Return a learner's log-probs [n] from its own keys and values, quantised, and their change by the last bit."""
    unwritten = [replace(rollout, written=None) for rollout in rollouts]
    perturbed, draws = copy.deepcopy(model.model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in perturbed.parameters():
            weight.mul_(1 + PERTURBATION * torch.randn(weight.shape, generator=draws))
    logprobs = learner_logprobs(model.model, unwritten, "shadow", temperature)
    return logprobs, rms(logprobs - learner_logprobs(perturbed, unwritten, "shadow", temperature))


def sample_from_engine(
    model: LoadedModel, prompts: Sequence[Sequence[int]], condition: Condition, options: argparse.Namespace
) -> list[Rollout]:
    """Sample one completion of every prompt."""
    pythons = dict(pair.split("=", 1) for pair in options.python)
    engine, spec = ENGINES.get(condition.engine), EngineSpec(python=pythons.get(condition.engine))
    engine.check(dict(condition.settings), spec)
    stops = tuple(sorted(model.chat.stop_ids))
    rows = [
        GenerationRequest(tuple(ids), options.new, stops, options.temperature, 1.0, n) for n, ids in enumerate(prompts)
    ]
    print(f"asking {condition.canonical}", file=sys.stderr, flush=True)
    log = Path(tempfile.gettempdir()) / f"bench-replay-gap-{condition.hash}.log"
    drawer = engine.drawer(dict(condition.settings), EngineContext(model, spec, log, options.threads))
    try:
        completions = drawer.draw(rows, keep=len(rows))
    finally:
        drawer.stop()
    return [engine_rollout(model.model.config, row.ids, c) for row, c in zip(rows, completions, strict=True)]


def engine_logprobs(rollouts: Sequence[Rollout]) -> Tensor:
    """Return the engine's log-probs of all sampled tokens [n]."""
    return torch.cat([rollout.sampler_logprobs[rollout.sampled] for rollout in rollouts]).double()


def learner_logprobs(model: object, rollouts: Sequence[Rollout], kind: str, temperature: float) -> Tensor:
    """Return the learner's log-probs of the sampled tokens [n]."""
    batches = [rollouts[start : start + BATCH] for start in range(0, len(rollouts), BATCH)]
    with torch.no_grad():
        logprobs = [read_tokens(model, rows, 1, kind, temperature).logprobs for rows in batches]  # type: ignore[arg-type]
    return torch.cat(logprobs).double()


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def table_row(text: str, gaps: Gaps) -> str:
    own_codes, replay = (_explained(gaps, value) for value in (gaps.own_codes, gaps.replay))
    bit = "-" if gaps.last_bit is None else f"{gaps.last_bit:.1e}"
    return f"| {text} | {gaps.tokens} | {gaps.uncompressed:.1e} | {gaps.dense:.1e} | {bit} | {own_codes} | {replay} |"


def _explained(gaps: Gaps, value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}, {1 - (value / gaps.dense) ** 2:.6f}"


def print_telemetry(path: Path) -> None:
    """Print the telemetry of each arm, lowest to highest over steps and seeds."""
    print("| arm | seeds, steps | dense | replay | overlap, p5 | sequences vetoed | reward, first and last 5 |")
    print("|---|---|---|---|---|---|---|")
    for arm in sorted(path.glob("checkpoints/*")):
        files = sorted(arm.glob("seed-*/telemetry.jsonl"))
        seeds = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
        steps = [step for seed in seeds for step in seed if step.get("engine/dense_rms") is not None]
        if not steps:
            continue  # a warm start samples nothing
        all_steps = [step for seed in seeds for step in seed]
        ends = [[step["reward_mean"] for seed in seeds for step in seed[span]] for span in (slice(5), slice(-5, None))]
        cells = [
            *(_range(step[f"engine/{name}_rms"] for step in steps) for name in ("dense", "replay")),
            *(
                _range(step[f"mismatch/{name}"] for step in all_steps)
                for name in ("overlap_p5", "frac_sequences_vetoed")
            ),
            ", ".join(f"{fmean(rewards):.2f}" for rewards in ends),
        ]
        print(f"| {arm.name} | {len(seeds)}, {'/'.join(str(len(seed)) for seed in seeds)} | {' | '.join(cells)} |")


def print_facets(path: Path) -> None:
    """Print how often each facet was true among readable answers, by seed."""
    counts = Counter[tuple[str, str, str, str, int, bool]]()
    for file in sorted((path / "records").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            for facet, value in record["facets"].items():
                if value is not None:
                    key = (record["suite"], record["policy"], record["arm"], facet, record["train_seed"])
                    counts[*key, value] += 1
    cells = sorted({key[:4] for key in counts})
    seeds = sorted({key[4] for key in counts})
    print(f"\n| suite | served under | arm | facet | yes, of readable answers, seeds {', '.join(map(str, seeds))} |")
    print("|---|---|---|---|---|")
    for cell in cells:
        yes, no = ([counts[*cell, seed, value] for seed in seeds] for value in (True, False))
        shares = ", ".join(f"{true}/{true + false}" for true, false in zip(yes, no, strict=True))
        print(f"| {' | '.join(cell)} | {shares} |")


def _range(values: Iterable[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{min(numbers):.2g} to {max(numbers):.2g}" if numbers else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=48)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--settings", action="append", default=[], metavar="ENGINE:NAME=VALUE")
    parser.add_argument("--run", type=Path)
    options = parser.parse_args()
    if options.run:
        print_telemetry(options.run)
        print_facets(options.run)
        return
    torch.set_num_threads(options.threads)
    model = load_model(os.environ.get("KVAUDIT_REAL_MODEL", "embedded"))
    name = "xstest" if "KVAUDIT_DATA" in os.environ else "refusal"
    items = SUITES.get(name)().items(
        "eval", options.items, 1000, 0 if name == "xstest" else 256, model.chat.count_tokens
    )
    prompts = [item_prompt(model.chat, item).ids for item in items]
    print(
        f"{model.name} {model.sha256[:12]}, {len(items)} rows of {name}, {options.new} tokens at {options.temperature}"
    )
    print("| setting | tokens | uncompressed | dense | last bit | own codes, explained | replay, explained |")
    print("|---|---:|---:|---:|---:|---|---|")
    for text in options.settings or SETTINGS:
        try:
            print(table_row(text, measure_gaps(model, prompts, text, options)), flush=True)
        except AuditError as error:
            print(f"{text} left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
