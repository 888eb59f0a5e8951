"""One grid of several policies against one run for each: how often faster, and what remains of the time.

    python -m bench.grid                                             the embedded model at 192 tokens
    python -m bench.grid --model DIR --context 2048 --items 4 --turns 5

The same items are asked under the same six policies, once by an evaluator that holds all units of the group and once by
one that holds them one after the other, in turns, the order of both changing from turn to turn. Budgets are a quarter
of the context, and all policies but ``none`` take a prompt of it in one chunk. Figures: the median of the turns'
ratios, and of the grid's seconds those spent in forwards of given tokens, in caches that take over what those brought,
and elsewhere, which is decoding. One thread unless OMP_NUM_THREADS says otherwise.
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

GIVEN, TAKEN = "forwards of given tokens", "taking over"


def main() -> None:
    asked = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model, spec = load_model(asked.model), spec_of(asked)
    evaluator = Evaluator(model, spec, Batches())
    evaluator.prepare()
    ratios, spent = [], Counter[str]()
    for turn in range(asked.turns):
        seconds = {}
        for together in (turn % 2 == 0, turn % 2 == 1):
            with timed() as parts:
                seconds[together] = evaluated(spec, evaluator, together=together)
            spent.update(parts if together else {})
        ratios.append(seconds[False] / seconds[True])
        spent["all"] += seconds[True]
        apart, joined = seconds[False], seconds[True]
        print(f"turn {turn + 1}: {apart:.1f} s apart, {joined:.1f} s together, ratio {ratios[-1]:.2f}", flush=True)
    shares = ", ".join(f"{100 * spent[part] / spent['all']:.0f} % {part}" for part in (GIVEN, TAKEN))
    asked_of = f"{model.name}, {asked.suite} at {asked.context} tokens, {len(grid(spec))} policies"
    print(f"{asked_of}: ratio {median(ratios):.2f} (median of {asked.turns}); of the grid's time {shares}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="a folder in Hugging Face format")
    parser.add_argument("--suite", default="refusal")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--new", type=int, default=0, help="tokens of an answer at most; 0: the suite's")
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


def spec_of(asked: Any) -> RunSpec:
    """The grid as a spec."""
    budget, chunk = asked.context // 4, asked.context + 256
    evicting = [f"{name}:budget={budget},chunk={chunk}" for name in ("snapkv", "streaming", "h2o")]
    suite = {"items": asked.items} | ({"max_new_tokens": asked.new} if asked.new else {})
    table = {
        "name": "grid",
        "model": asked.model,
        "evaluate": {
            "policies": ["none", f"int8:chunk={chunk}", f"kivi:bits=4,chunk={chunk}", *evicting],
            "suites": {asked.suite: suite},
            "context_tokens": [asked.context],
            "temperature": 1.0,
        },
    }
    return parse_spec(yaml.safe_dump(table), "grid", NAMES)


def evaluated(spec: RunSpec, evaluator: Evaluator, *, together: bool) -> float:
    """Seconds of evaluating every unit, and of nothing else."""
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
def timed() -> Iterator[Counter[str]]:
    """Seconds spent inside, by part."""
    spent: Counter[str] = Counter()

    def watched(part: str, work: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        def inner(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            found = work(*args, **options)
            spent[part] += (time.perf_counter() - started) if counts(*args) else 0.0
            return found

        return inner

    forward = watched(GIVEN, Episode._forward, lambda _, ids, *__: ids.shape[1] > 1)
    taken = watched(TAKEN, SharedPrefill._reuse, lambda *_: True)
    with mock.patch.object(Episode, "_forward", forward), mock.patch.object(SharedPrefill, "_reuse", taken):
        yield spent


if __name__ == "__main__":
    main()
