"""How much faster are several policies evaluated together than one after the other, and where does the time go?

    python -m bench.grid    # the embedded model at 192 tokens
    python -m bench.grid --model DIR --context 2048 --items 4 --turns 5

Takes 2 minutes for the embedded model; results: docs/results/bench.md.

The same items are asked under the same six policies, by an evaluator that has all units at once and by one that has one
at a time, in turns. Budgets are a quarter of the context, and all policies but ``none`` take a prompt in one chunk.
Figures: the median ratio, and the shares of the joint time in forwards of given tokens and in caches that take over
their keys and values; the rest is decoding. One thread unless OMP_NUM_THREADS is set.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import yaml

from kvaudit.audit.cache.shared import SharedPrefill
from kvaudit.audit.runs.evaluate import Batches, Evaluator, grid
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.units import UnitFiles
from kvaudit.audit.sampling.episode import Episode
from kvaudit.audit.sampling.model import load_model
from kvaudit.core.spec import RunSpec, parse_spec

FORWARDS, REUSE = "forwards of given tokens", "caches taking over shared keys and values"


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model, spec = load_model(options.model), spec_of(options)
    evaluator = Evaluator(model, spec, Batches())
    evaluator.prepare()
    ratios, spent = [], Counter[str]()
    for turn in range(options.turns):
        seconds = {}
        for together in (turn % 2 == 0, turn % 2 == 1):
            with time_parts() as parts:
                seconds[together] = evaluate_units(spec, evaluator, together=together)
            spent.update(parts if together else {})
        ratios.append(seconds[False] / seconds[True])
        spent["all"] += seconds[True]
        separate, joint = seconds[False], seconds[True]
        print(
            f"turn {turn + 1}: {separate:.1f} s separately, {joint:.1f} s together, ratio {ratios[-1]:.2f}", flush=True
        )
    shares = ", ".join(f"{100 * spent[part] / spent['all']:.0f} % {part}" for part in (FORWARDS, REUSE))
    title = f"{model.name}, {options.suite} at {options.context} tokens, {len(grid(spec))} policies"
    print(f"{title}: ratio {median(ratios):.2f} (median of {options.turns}); of the grid's time {shares}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="a folder in Hugging Face format")
    parser.add_argument("--suite", default="refusal")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--new", type=int, default=0, help="most tokens per answer; 0: the suite's own limit")
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


def spec_of(options: Any) -> RunSpec:
    """Return the spec of the grid."""
    budget, chunk = options.context // 4, options.context + 256
    evicting = [f"{name}:budget={budget},chunk={chunk}" for name in ("snapkv", "streaming", "h2o")]
    suite = {"items": options.items} | ({"max_new_tokens": options.new} if options.new else {})
    table = {
        "name": "grid",
        "model": options.model,
        "evaluate": {
            "policies": ["none", f"int8:chunk={chunk}", f"kivi:bits=4,chunk={chunk}", *evicting],
            "suites": {options.suite: suite},
            "context_tokens": [options.context],
            "temperature": 1.0,
        },
    }
    return parse_spec(yaml.safe_dump(table), "grid", NAMES)


def evaluate_units(spec: RunSpec, evaluator: Evaluator, *, together: bool) -> float:
    """Return the seconds of evaluating every unit, in one group or one by one."""
    units = grid(spec)
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(Path(folder) / "run", spec, resume=False)
        started = time.perf_counter()
        for group in [units] if together else [[unit] for unit in units]:
            evaluator.answer_units(group, run, lambda *_: None)
        seconds = time.perf_counter() - started
        assert all(UnitFiles.of(run.records, unit).seal.exists() for unit in units)
    return seconds


@contextmanager
def time_parts() -> Iterator[Counter[str]]:
    """Yield a counter of seconds spent in FORWARDS and in REUSE during the block."""
    spent: Counter[str] = Counter()

    def timed(part: str, work: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = work(*args, **options)
            spent[part] += (time.perf_counter() - started) if counts(*args) else 0.0
            return result

        return wrapper

    forward = timed(FORWARDS, Episode._forward, lambda _, ids, *__: ids.shape[1] > 1)
    reuse = timed(REUSE, SharedPrefill._reuse, lambda *_: True)
    with mock.patch.object(Episode, "_forward", forward), mock.patch.object(SharedPrefill, "_reuse", reuse):
        yield spent


if __name__ == "__main__":
    main()
