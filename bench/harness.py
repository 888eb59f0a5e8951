"""How fast is our model in lm-evaluation-harness beside its own ``hf``? gsm8k, greedy, the same rows and batch.

    KVAUDIT_REAL_MODEL=FOLDER KVAUDIT_DATA=ROWS python -m bench.harness [--rows 16] [--batch 8] [--turns 5]

Takes about an hour for 135M parameters on one core; results: docs/results/bench.md. Both sides take turns in one
process, in float32 and through the harness's own loop: prompts, decoding, grading. A ratio is the peer's time over
ours.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import yaml
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from bench.decode import Seconds, time_call
from kvaudit.audit.sampling.model import locate
from kvaudit.audit.serving.harness.model import KvauditLM
from kvaudit.core.records import Item
from kvaudit.suites.base import SUITES

TASK, CONTEXT, NEW, SEED = "questions", 512, 128, 1000


class Turn(NamedTuple):
    """The seconds of asking the task once, and the answers."""

    seconds: Seconds
    answers: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    name = os.environ.get("KVAUDIT_REAL_MODEL", "embedded")
    ours = KvauditLM(name, batch_size=options.batch)
    sides: dict[str, Any] = {
        "ours": ours,
        "hf": HFLM(pretrained=str(locate(name)), device="cpu", dtype="float32", batch_size=options.batch),
    }
    with tempfile.TemporaryDirectory() as folder:
        suite = SUITES.get("gsm8k")()
        items = suite.items("eval", options.rows, SEED, CONTEXT, lambda text: len(ours.tok_encode(text, False)))
        write_task(Path(folder), items, list(suite.until))
        turns = []
        for turn in range(options.turns):
            order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
            turns.append({side: run_task(sides[side], Path(folder)) for side in order})
    same = sum(a == b for turn in turns for a, b in zip(turn["ours"].answers, turn["hf"].answers, strict=True))
    words = sum(len(answer.split()) for answer in turns[0]["ours"].answers)
    print(
        f"{Path(name).name}: {options.rows} rows of gsm8k at {CONTEXT} tokens, batch {options.batch}, at most {NEW} "
        f"new tokens ({words} words), {torch.get_num_threads()} thread(s), medians of {options.turns} turns"
    )
    for field, clock in enumerate(Seconds._fields):
        pairs = [(turn["ours"].seconds[field], turn["hf"].seconds[field]) for turn in turns]
        ours_s, theirs_s = (median(pair[side] for pair in pairs) for side in (0, 1))
        print(f"  {clock:4} ratio {median(t / o for o, t in pairs):.2f}   ours {ours_s:.1f} s   hf {theirs_s:.1f} s")
    print(f"  answers alike: {same} of {options.rows * options.turns}")


def write_task(folder: Path, items: Sequence[Item], until: Sequence[str]) -> None:
    """Write the questions as a task of the harness."""
    rows = [{"system": "", "gold": "", **{str(m.role): m.content for m in item.messages}} for item in items]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "description": "system",
        "doc_to_text": "user",
        "doc_to_target": "gold",
        "generation_kwargs": {"until": list(until), "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    }
    (folder / f"{TASK}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def run_task(lm: Any, folder: Path) -> Turn:
    tasks = TaskManager(include_path=[str(folder)], include_defaults=False).load(TASK)
    for task in tasks["tasks"].values():
        task.config.generation_kwargs.update(max_gen_toks=NEW)
    results: dict[str, Any] = {}
    seconds = time_call(lambda: results.update(evaluate(lm, tasks, bootstrap_iters=0, apply_chat_template=True)))
    samples = sorted(results["samples"][TASK], key=lambda sample: sample["doc_id"])
    return Turn(seconds, [sample["resps"][0][0] for sample in samples])


if __name__ == "__main__":
    main()
