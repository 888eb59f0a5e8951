"""A whole GRPO step beside TRL's GRPOTrainer: time and peak memory, same model, lengths, precision and thread.

    KVAUDIT_REAL_MODEL=FOLDER python -m bench.training [STEPS [PROMPTS [TOKENS]]] [--device cuda] [--own-defaults]
    python -m bench.training 3 4 1024 --device cuda --without smd

Without the variable, the embedded model; 1 step of 4 prompts of 512 tokens. A step samples, rewards, takes the gradient
and updates; both sides take the gradient prompt by prompt, so fewer prompts take less time of both. Every side has a
process of its own, so that its peak is its own. TRL's settings are its defaults but for bfloat16 weights, as the model
has them, and microbatches of one group, since 32 rows at once would not fit a small machine. Both sides checkpoint
gradients, as TRL does by default; with --own-defaults ours does not, as is its own.
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
GIVEN = (1, 4, 512)  # steps, prompts, tokens of a prompt
DTYPE = "bfloat16"
POLICY = "snapkv:budget=256,window=16,interval=16"
WORDS = ("the", "of", "and", "to", "in", "is", "for", "on", "with", "as", "by", "from")


class Step(NamedTuple):
    """Seconds on the wall and of the processor."""

    wall: float
    cpu: float


class Asked(NamedTuple):
    """What every side does."""

    folder: str
    steps: int
    prompts: int
    tokens: int
    device: str = "cpu"
    checkpointing: bool = True  # of our side; TRL's always does


class Found(NamedTuple):
    """What one side took: every step, and the peak of its process in bytes."""

    steps: list[Step]
    peak: int


def main() -> None:
    from kvaudit.audit.sampling.model import EMBEDDED, locate  # here, so that the processes measured load nothing of it

    folder = os.environ.get("KVAUDIT_REAL_MODEL") or str(locate(EMBEDDED))
    words, device = sys.argv[1:], "cpu"
    if "--device" in words:
        place = words.index("--device")
        device = words[place + 1]
        del words[place : place + 2]
    left_out = ""
    if "--without" in words:
        place = words.index("--without")
        left_out = words[place + 1]
        del words[place : place + 2]
    checkpointing = "--own-defaults" not in words
    words = [word for word in words if word != "--own-defaults"]
    asked = Asked(folder, *map(int, words), *GIVEN[len(words) :], device, checkpointing)
    sides: dict[str, Callable[[Asked], Found]] = {"dense": dense, "smd": smd, "TRL": trl}
    sides.pop(left_out, None)
    lengths = f"{asked.tokens} + {NEW} tokens"
    where = f"{DTYPE}, {asked.device}, one thread, gradients checkpointed by {'both' if checkpointing else 'TRL alone'}"
    print(f"{asked.prompts} prompts x {GROUP}, {lengths}, {where}, {asked.steps} step(s)", flush=True)
    found = {}
    for name, side in sides.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            own = found[name] = alone.submit(side, asked).result()
        print(f"  {name:5} CPU {cpu(own):.1f} s   wall {wall(own):.1f} s   peak {own.peak / 1e9:.2f} GB", flush=True)
    theirs = found.pop("TRL")
    for name, own in found.items():
        print(
            f"  TRL / {name:5}  CPU {cpu(theirs) / cpu(own):.2f}   wall {wall(theirs) / wall(own):.2f}   "
            f"peak {theirs.peak / own.peak:.2f}"
        )


def cpu(found: Found) -> float:
    return median(step.cpu for step in found.steps)


def wall(found: Found) -> float:
    return median(step.wall for step in found.steps)


def measured(step: Callable[[], object], steps: int) -> Found:
    torch.set_num_threads(1)
    rows = []
    for _ in range(steps):
        started, used = time.perf_counter(), time.process_time()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rows.append(Step(time.perf_counter() - started, time.process_time() - used))
    return Found(rows, peak())


def peak() -> int:
    """Of this process so far, in bytes; of the GPU where it has used one."""
    if torch.cuda.is_available() and (used := torch.cuda.max_memory_allocated()):
        return used
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def texts(tokenizer: Any, asked: Asked) -> list[str]:
    """Prompts of exactly as many tokens as asked, no two alike."""
    words = [f" {word}" for word in WORDS if len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1]
    found = ["".join(words[(n * (n + row)) % len(words)] for n in range(asked.tokens)) for row in range(asked.prompts)]
    lengths = [len(tokenizer(text)["input_ids"]) for text in found]
    assert lengths == [asked.tokens] * asked.prompts, lengths
    assert len(set(found)) == asked.prompts
    return found


def reward(ids: list[int]) -> float:
    """Differs within a group, costs nothing."""
    return sum(ids) % 97 / 97


def dense(asked: Asked) -> Found:
    return ours(asked, "dense")


def smd(asked: Asked) -> Found:
    return ours(asked, "smd")


def ours(asked: Asked, arm: str) -> Found:
    """This project's step, without a suite's conversation around it."""
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
    loaded, rows_in_all = load_model(asked.folder, dtype=DTYPE, device=asked.device), asked.prompts * GROUP
    prompts = [loaded.chat.tokenizer(text)["input_ids"] for text in texts(loaded.chat.tokenizer, asked)]
    loaded.chat = SimpleNamespace(stop_ids=frozenset())  # neither side stops early
    if asked.checkpointing:
        checkpoint_layers(loaded.model)
    config = TrainConfig(
        arm=arm,
        seed=1,
        policy=POLICY,
        suites=("math",),
        prompts_per_step=asked.prompts,
        group=GROUP,
        learning_rate=RATE,
    )
    learner, sampler = Learner(loaded.model, config, None), Sampler(loaded, config.rollout_policy)

    def step() -> None:
        number = learner.optimiser.updates
        episode = sampler.open(prompts, [number * 1000 + row for row in range(rows_in_all)], group=GROUP)
        episode.decode(Decoding(NEW))
        rows: list[Rollout] = episode.rollouts()
        assert {len(row.ids) for row in rows} == {asked.tokens + NEW}
        rewards = [reward(row.ids[asked.tokens :].tolist()) for row in rows]
        learned = learn(learner, collect(rows, rewards, GROUP, loaded.device), step=number, max_tokens=NEW)
        assert learned.grad_norm

    return measured(step, asked.steps)


def trl(asked: Asked) -> Found:
    """TRL's step: plain ``generate``, its own loss, its own trainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(asked.folder, padding_side="left")
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
            output_dir=out, max_steps=asked.steps, per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=asked.prompts,
            num_generations=GROUP, max_completion_length=NEW, temperature=1.0, learning_rate=RATE, bf16=False,
            report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, seed=1,
            use_cpu=asked.device == "cpu",
            generation_kwargs={"min_new_tokens": NEW},
        )  # fmt: skip
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(asked.folder, dtype=torch.bfloat16),
            processing_class=tokenizer, reward_funcs=rewards, args=settings, callbacks=[Watch()],
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts(tokenizer, asked)]),
        ).train()  # fmt: skip
    return Found(rows, peak())


if __name__ == "__main__":
    main()
