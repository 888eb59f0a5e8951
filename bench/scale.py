"""What do more workers, more policies and longer contexts cost?

    python -m bench.scale
    python -m bench.scale --only workers    # needs two idle cores

Takes about 10 minutes on two idle cores; results: docs/results/bench.md.

Workers: the wall time of `kvaudit run` of one spec on the embedded model, start and report included, with one worker
and with two of one thread each, in turns. Cells: the CPU time per policy of the same items under three and under twelve
policies. Memory: a prefill of so many tokens and a few sampled ones, each in its own process; the peak of the process
above its memory before, and the peak of the cache by its own count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from bench.grid import evaluate_units
from bench.models import random_llama
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs.evaluate import Batches, Evaluator
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.spec import parse_spec

LENGTHS, NEW = (4096, 8192, 16384, 32768), 8
SERVED = {"none": "none", "snapkv 512": "snapkv:budget=512,chunk=1024", "int8": "int8:chunk=1024"}
FEW = ["none", "int8", "streaming:budget=96"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"workers": workers, "cells": cells, "memory": memory}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--items", type=int, default=720, help="items per suite of the spec that workers share")
    parser.add_argument("--measure-prefill", nargs=2, help=argparse.SUPPRESS)  # what the child process does
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.measure_prefill:
        print(json.dumps(measure_prefill(options.measure_prefill[0], int(options.measure_prefill[1]))))
        return
    for name in options.only:
        parts[name](options)


# --- workers --------------------------------------------------------------------------------------------------------


def workers(options: argparse.Namespace) -> None:
    """Print how many times as fast two workers finish a run as one."""
    spec, ratios = spec_of([*FEW, "kivi:bits=4", "snapkv:budget=112,window=16", "h2o:budget=112"], options.items), []
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "spec.yaml"
        path.write_text(yaml.safe_dump(spec), encoding="utf-8")
        for turn in range(options.turns):
            seconds, spent = {}, {}
            for count in (1, 2) if turn % 2 == 0 else (2, 1):
                out = Path(place) / f"{turn}-{count}"
                command = [sys.executable, "-m", "kvaudit.audit.cli", "run", path, "--out", out, "--anyway"]
                command += ["--workers", count, "--threads", 1]
                started, before = time.perf_counter(), children_seconds()
                subprocess.run([str(word) for word in command], check=True, capture_output=True)
                seconds[count], spent[count] = time.perf_counter() - started, children_seconds() - before
            ratios.append(seconds[1] / seconds[2])
            times = [f"{seconds[n]:.1f} s ({spent[n]:.1f} of CPU) by {n} worker(s)" for n in (1, 2)]
            print(f"turn {turn + 1}: {', '.join(times)}", flush=True)
    print(f"two workers: {median(ratios):.2f} times as fast as one (median of {options.turns})", flush=True)


def children_seconds() -> float:
    """Return the CPU seconds of all ended child processes and their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- cells ----------------------------------------------------------------------------------------------------------


def cells(options: argparse.Namespace) -> None:
    """Print the CPU seconds per policy, with few policies and with four times as many."""
    more = [*FEW, *(f"streaming:budget={budget}" for budget in range(97, 97 + 3 * len(FEW)))]
    model, cell_seconds = load_model(), []
    for policies in (FEW, more):
        spec = parse_spec(yaml.safe_dump(spec_of(policies, options.items // 10)), "scale", NAMES)
        evaluator, spent = Evaluator(model, spec, Batches()), []
        evaluator.prepare()
        for _ in range(options.turns):
            started = time.process_time()
            evaluate_units(spec, evaluator, together=True)
            spent.append((time.process_time() - started) / len(policies))
        cell_seconds.append(median(spent))
    few, many = cell_seconds
    times = f"{few:.2f} s under {len(FEW)} policies, {many:.2f} s under {len(more)}"
    print(f"the same items, per policy: {times}, ratio {many / few:.2f}", flush=True)


def spec_of(policies: Sequence[str], items: int) -> dict[str, Any]:
    """Return a spec that asks the embedded model under some policies."""
    evaluate = {"policies": list(policies), "context_tokens": [192], "temperature": 1.0}
    suites = {suite: {"items": items} for suite in ("refusal", "agent", "math")}
    return {"format": 1, "name": "scale", "model": "embedded", "evaluate": evaluate | {"suites": suites}}


# --- memory ---------------------------------------------------------------------------------------------------------


def memory(_: argparse.Namespace) -> None:
    """Print the peaks by policy and length, each measured in its own process."""
    print("| policy | tokens | process above its start | cache |\n|---|---:|---:|---:|")
    for name, policy in SERVED.items():
        for tokens in LENGTHS:
            command = [sys.executable, "-m", "bench.scale", "--measure-prefill", policy, str(tokens)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            process, cache = (json.loads(output)[key] / 1e6 for key in ("process", "cache"))
            print(f"| {name} | {tokens:,} | {process:,.0f} MB | {cache:,.1f} MB |", flush=True)


def measure_prefill(policy: str, tokens: int) -> dict[str, int]:
    """Return the peak bytes of the process and the cache while one row is prefilled and a few tokens are sampled."""
    served = random_llama(256, 4, positions=tokens + NEW)
    prompt = torch.randint(0, 4096, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    before = peak_bytes()
    episode = Sampler(served, parse_policy(policy)).open([prompt], [0])
    episode.decode(Decoding(NEW, temperature=0.0))
    (rollout,) = episode.rollouts()
    return {"process": peak_bytes() - before, "cache": rollout.kv_bytes_peak}


def peak_bytes() -> int:
    """Return the peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
