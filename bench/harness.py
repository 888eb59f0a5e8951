"""gsm8k through lm-evaluation-harness: our model under ``none`` beside its own ``hf``, greedy, the same rows and batch.

    KVAUDIT_REAL_MODEL=FOLDER KVAUDIT_DATA=ROWS python -m bench.harness [--rows 16] [--batch 8] [--turns 5]

Both sides take turns in one process, in float32 and through the harness's own loop: prompts, decoding, grading. Ratios
are the peer's time over ours.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from audit.harness.model import KvauditLM
from audit.harness.tasks import write_tasks
from audit.sampling.model import load_model, locate
from suites.base import SUITES

CONTEXT, NEW, SEED = 512, 128, 1000


class Turn(NamedTuple):
    """Seconds on the wall and of the processor, and the answers."""

    wall: float
    cpu: float
    answers: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    name = os.environ.get("KVAUDIT_REAL_MODEL", "embedded")
    sides: dict[str, Any] = {
        "ours": KvauditLM(name, batch_size=asked.batch),
        "hf": HFLM(pretrained=str(locate(name)), device="cpu", dtype="float32", batch_size=asked.batch),
    }
    with tempfile.TemporaryDirectory() as folder:
        suite = SUITES.get("gsm8k")()
        items = suite.items("eval", asked.rows, SEED, CONTEXT, load_model(name).chat.count_tokens)
        (task,) = write_tasks(Path(folder), suite, items)
        turns = [
            {side: one_turn(lm, Path(folder), task.name) for side, lm in sides.items()} for _ in range(asked.turns)
        ]
    alike = sum(a == b for turn in turns for a, b in zip(turn["ours"].answers, turn["hf"].answers, strict=True))
    words = sum(len(answer.split()) for answer in turns[0]["ours"].answers)
    print(
        f"{Path(name).name}: {asked.rows} rows of gsm8k at {CONTEXT} tokens, batch {asked.batch}, at most {NEW} new "
        f"tokens ({words} words), {torch.get_num_threads()} thread(s), medians of {asked.turns} turns"
    )
    for clock in ("wall", "cpu"):
        ours, theirs = (median(getattr(turn[side], clock) for turn in turns) for side in sides)
        ratio = median(getattr(turn["hf"], clock) / getattr(turn["ours"], clock) for turn in turns)
        print(f"  {clock:4} ratio {ratio:.2f}   ours {ours:.1f} s   hf {theirs:.1f} s")
    print(f"  answers alike: {alike} of {asked.rows * asked.turns}")


def one_turn(lm: Any, folder: Path, name: str) -> Turn:
    """The task asked once."""
    found = TaskManager(include_path=[str(folder)], include_defaults=False).load(name)
    for task in found["tasks"].values():
        task.config.generation_kwargs.update(max_gen_toks=NEW)
    wall, cpu = time.perf_counter(), time.process_time()
    done = evaluate(lm, found, bootstrap_iters=0, apply_chat_template=True)
    turn = time.perf_counter() - wall, time.process_time() - cpu
    assert done is not None
    samples = sorted(done["samples"][name], key=lambda sample: sample["doc_id"])
    return Turn(*turn, [sample["resps"][0][0] for sample in samples])


if __name__ == "__main__":
    main()
