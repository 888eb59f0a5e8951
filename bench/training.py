"""How long does a whole GRPO step take beside TRL's GRPOTrainer, and how much memory?

    KVAUDIT_REAL_MODEL=FOLDER python -m bench.training [STEPS [PROMPTS [TOKENS]]] [--device cuda] [--own-defaults]
    python -m bench.training 3 4 1024 --device cuda --without smd

Takes about half an hour for 135M parameters on one core; results: docs/results/bench.md, on a GPU docs/results/gpu.md.

The default is the embedded model and 1 step of 4 prompts of 512 tokens. A step samples, rewards, computes the gradient
and updates; both sides take the gradient prompt by prompt. Every side runs in its own process, for its own peak. TRL
has its defaults but for bfloat16 weights, as the model has them, and microbatches of one group, since 32 rows at once
would not fit a small machine. Both sides checkpoint gradients, TRL's default; with --own-defaults ours does not.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

GROUP, NEW, RATE = 8, 32, 1e-6
DEFAULTS = (1, 4, 512)  # steps, prompts, tokens per prompt
DTYPE = "bfloat16"
POLICY = "snapkv:budget=256,window=16,interval=16"
WORDS = ("the", "of", "and", "to", "in", "is", "for", "on", "with", "as", "by", "from")


class Step(NamedTuple):
    """Seconds of wall and CPU time."""

    wall: float
    cpu: float


class Task(NamedTuple):
    """The task of every side."""

    folder: str
    steps: int
    prompts: int
    tokens: int
    device: str = "cpu"
    checkpointing: bool = True  # of our side; TRL's always does


class Result(NamedTuple):
    """The seconds of every step of one side, and the peak of its process in bytes."""

    steps: list[Step]
    peak: int


def main() -> None:
    from kvaudit.audit.sampling.model import (
        EMBEDDED,
        locate,
    )  # imported here, since the measured processes import this file

    folder = os.environ.get("KVAUDIT_REAL_MODEL") or str(locate(EMBEDDED))
    words, device = sys.argv[1:], "cpu"
    if "--device" in words:
        place = words.index("--device")
        device = words[place + 1]
        del words[place : place + 2]
    excluded = ""
    if "--without" in words:
        place = words.index("--without")
        excluded = words[place + 1]
        del words[place : place + 2]
    checkpointing = "--own-defaults" not in words
    words = [word for word in words if word != "--own-defaults"]
    task = Task(folder, *map(int, words), *DEFAULTS[len(words) :], device, checkpointing)
    sides: dict[str, Callable[[Task], Result]] = {"dense": dense, "smd": smd, "TRL": trl}
    sides.pop(excluded, None)
    lengths = f"{task.tokens} + {NEW} tokens"
    where = f"{DTYPE}, {task.device}, one thread, gradients checkpointed by {'both' if checkpointing else 'TRL alone'}"
    print(f"{task.prompts} prompts x {GROUP}, {lengths}, {where}, {task.steps} step(s)", flush=True)
    results = {}
    for name, side in sides.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            result = results[name] = pool.submit(side, task).result()
        times = f"CPU {median_cpu(result):.1f} s   wall {median_wall(result):.1f} s"
        print(f"  {name:5} {times}   peak {result.peak / 1e9:.2f} GB", flush=True)
    trl_result = results.pop("TRL")
    for name, result in results.items():
        cpu, wall = median_cpu(trl_result) / median_cpu(result), median_wall(trl_result) / median_wall(result)
        print(f"  TRL / {name:5}  CPU {cpu:.2f}   wall {wall:.2f}   peak {trl_result.peak / result.peak:.2f}")


def median_cpu(result: Result) -> float:
    return median(step.cpu for step in result.steps)


def median_wall(result: Result) -> float:
    return median(step.wall for step in result.steps)


def measure_steps(step: Callable[[], object], steps: int) -> Result:
    torch.set_num_threads(1)
    rows = []
    for _ in range(steps):
        started, used = time.perf_counter(), time.process_time()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rows.append(Step(time.perf_counter() - started, time.process_time() - used))
    return Result(rows, peak())


def peak() -> int:
    """Return the peak memory of this process in bytes, of the GPU if it used one."""
    if torch.cuda.is_available() and (used := torch.cuda.max_memory_allocated()):
        return used
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def texts(tokenizer: Any, task: Task) -> list[str]:
    """Return different prompts of exactly the required number of tokens."""
    words = [f" {word}" for word in WORDS if len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1]
    prompts = ["".join(words[(n * (n + row)) % len(words)] for n in range(task.tokens)) for row in range(task.prompts)]
    lengths = [len(tokenizer(text)["input_ids"]) for text in prompts]
    assert lengths == [task.tokens] * task.prompts, lengths
    assert len(set(prompts)) == task.prompts
    return prompts


def reward(ids: list[int]) -> float:
    """Return a cheap reward that differs within a group."""
    return sum(ids) % 97 / 97


def dense(task: Task) -> Result:
    return ours(task, "dense")


def smd(task: Task) -> Result:
    return ours(task, "smd")


def ours(task: Task, arm: str) -> Result:
    """Run kvaudit's step on plain prompts."""
    from kvaudit.audit.cache.ledger import Rollout
    from kvaudit.audit.sampling.decoding import Decoding
    from kvaudit.audit.sampling.model import load_model
    from kvaudit.audit.sampling.sampler import Sampler
    from kvaudit.audit.training.adapters import checkpoint_layers
    from kvaudit.audit.training.batch import collect
    from kvaudit.audit.training.config import TrainConfig
    from kvaudit.audit.training.grpo import learn
    from kvaudit.audit.training.learner import Learner

    torch.set_num_threads(1)
    loaded, rows_in_all = load_model(task.folder, dtype=DTYPE, device=task.device), task.prompts * GROUP
    prompts = [loaded.chat.tokenizer(text)["input_ids"] for text in texts(loaded.chat.tokenizer, task)]
    loaded.chat = SimpleNamespace(stop_ids=frozenset())  # neither side stops early
    if task.checkpointing:
        checkpoint_layers(loaded.model)
    config = TrainConfig(
        arm=arm, seed=1, policy=POLICY, suites=("math",), prompts_per_step=task.prompts, group=GROUP, learning_rate=RATE
    )
    learner, sampler = Learner(loaded.model, config, None), Sampler(loaded, config.rollout_policy)

    def step() -> None:
        number = learner.optimiser.updates
        episode = sampler.open(prompts, [number * 1000 + row for row in range(rows_in_all)], group=GROUP)
        episode.decode(Decoding(NEW))
        rows: list[Rollout] = episode.rollouts()
        assert {len(row.ids) for row in rows} == {task.tokens + NEW}
        rewards = [reward(row.ids[task.tokens :].tolist()) for row in rows]
        learned = learn(learner, collect(rows, rewards, GROUP, loaded.device), step=number, max_tokens=NEW)
        assert learned.grad_norm

    return measure_steps(step, task.steps)


def trl(task: Task) -> Result:
    """Run TRL's trainer, with its ``generate`` and its loss."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(task.folder, padding_side="left")
    rows: list[Step] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows.append(Step(time.perf_counter() - self.started[0], time.process_time() - self.started[1]))

    def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert {len(ids) for ids in completion_ids} == {NEW}
        return [reward(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out, max_steps=task.steps, per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=task.prompts,
            num_generations=GROUP, max_completion_length=NEW, temperature=1.0, learning_rate=RATE, bf16=False,
            report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, seed=1,
            use_cpu=task.device == "cpu",
            generation_kwargs={"min_new_tokens": NEW},
        )  # fmt: skip
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.bfloat16),
            processing_class=tokenizer, reward_funcs=rewards, args=settings, callbacks=[Watch()],
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts(tokenizer, task)]),
        ).train()  # fmt: skip
    return Result(rows, peak())


if __name__ == "__main__":
    main()
