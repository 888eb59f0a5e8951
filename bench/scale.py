"""What many processes and long contexts cost: one worker beside two, cells beside more cells, memory by length.

    python -m bench.scale                       all three
    python -m bench.scale --only workers        two idle cores, or the ratio says nothing

Workers: `kvaudit run` of one spec on the embedded model, with one worker and with two of one thread each, in turns;
whole commands on the wall, start and report included. Cells: the same items under three and under twelve policies, CPU
time of the process that answers. Memory: a prefill of so many tokens and a few drawn ones, each in a process of its
own; the peak of the process above what it held before, and the peak of the cache by its own count. ``none`` holds what
the length asks for, a budget does not.
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

from bench.grid import evaluated
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
    parser.add_argument("--items", type=int, default=720, help="of the spec that workers share")
    parser.add_argument("--held", nargs=2, metavar=("POLICY", "TOKENS"), help=argparse.SUPPRESS)  # the child's part
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if asked.held:
        print(json.dumps(held(asked.held[0], int(asked.held[1]))))
        return
    for part in asked.only:
        parts[part](asked)


# --- workers --------------------------------------------------------------------------------------------------------


def workers(asked: argparse.Namespace) -> None:
    """How many times as fast two workers finish a run as one."""
    spec, ratios = spec_of([*FEW, "kivi:bits=4", "snapkv:budget=112,window=16", "h2o:budget=112"], asked.items), []
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "spec.yaml"
        path.write_text(yaml.safe_dump(spec), encoding="utf-8")
        for turn in range(asked.turns):
            seconds, spent = {}, {}
            for count in (1, 2) if turn % 2 == 0 else (2, 1):
                out = Path(place) / f"{turn}-{count}"
                command = [sys.executable, "-m", "kvaudit.audit.cli", "run", path, "--out", out, "--anyway"]
                command += ["--workers", count, "--threads", 1]
                started, before = time.perf_counter(), children_seconds()
                subprocess.run([str(word) for word in command], check=True, capture_output=True)
                seconds[count], spent[count] = time.perf_counter() - started, children_seconds() - before
            ratios.append(seconds[1] / seconds[2])
            by = [
                f"{seconds[count]:.1f} s ({spent[count]:.1f} of CPU) by {word}"
                for count, word in ((1, "one"), (2, "two"))
            ]
            print(f"turn {turn + 1}: {', '.join(by)}", flush=True)
    print(f"two workers: {median(ratios):.2f} times as fast as one (median of {asked.turns})", flush=True)


def children_seconds() -> float:
    """CPU seconds of all processes that ended under this one, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- cells ----------------------------------------------------------------------------------------------------------


def cells(asked: argparse.Namespace) -> None:
    """CPU seconds a cell, with few policies and with four times as many."""
    more = [*FEW, *(f"streaming:budget={budget}" for budget in range(97, 97 + 3 * len(FEW)))]
    model, found = load_model(), []
    for policies in (FEW, more):
        spec = parse_spec(yaml.safe_dump(spec_of(policies, asked.items // 10)), "scale", NAMES)
        evaluator, spent = Evaluator(model, spec, Batches()), []
        evaluator.prepare()
        for _ in range(asked.turns):
            started = time.process_time()
            evaluated(spec, evaluator, together=True)
            spent.append((time.process_time() - started) / len(policies))
        found.append(median(spent))
    few, many = found
    told = f"{few:.2f} s under {len(FEW)} policies, {many:.2f} s under {len(more)}"
    print(f"the same items, a policy: {told}, ratio {many / few:.2f}", flush=True)


def spec_of(policies: Sequence[str], items: int) -> dict[str, Any]:
    """The embedded model asked under some policies."""
    evaluate = {"policies": list(policies), "context_tokens": [192], "temperature": 1.0}
    suites = {suite: {"items": items} for suite in ("refusal", "agent", "math")}
    return {"format": 1, "name": "scale", "model": "embedded", "evaluate": evaluate | {"suites": suites}}


# --- memory ---------------------------------------------------------------------------------------------------------


def memory(_: argparse.Namespace) -> None:
    """Peaks by length, a process each."""
    print("| policy | tokens | process above its start | cache |\n|---|---:|---:|---:|")
    for name, policy in SERVED.items():
        for tokens in LENGTHS:
            command = [sys.executable, "-m", "bench.scale", "--held", policy, str(tokens)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            process, cache = (json.loads(said)[what] / 1e6 for what in ("process", "cache"))
            print(f"| {name} | {tokens:,} | {process:,.0f} MB | {cache:,.1f} MB |", flush=True)


def held(policy: str, tokens: int) -> dict[str, int]:
    """Bytes of peak while one row is prefilled and a few tokens are drawn."""
    served = random_llama(256, 4, positions=tokens + NEW)
    prompt = torch.randint(0, 4096, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    before = peak()
    episode = Sampler(served, parse_policy(policy)).open([prompt], [0])
    episode.decode(Decoding(NEW, temperature=0.0))
    (rollout,) = episode.rollouts()
    return {"process": peak() - before, "cache": rollout.kv_bytes_peak}


def peak() -> int:
    """The most memory that this process has held, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
