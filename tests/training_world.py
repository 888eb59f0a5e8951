"""A world small enough to train in a second: a random model, a real suite's items, and a grade that varies."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvaudit.audit.sampling.conversations import GradedRow
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.training import grpo, rollouts
from kvaudit.audit.training.batch import Batch, collect, row_seeds, training_items
from kvaudit.audit.training.config import TrainConfig
from kvaudit.audit.training.learner import Learner
from kvaudit.audit.training.optimiser import Optimiser, StepResult
from kvaudit.core.records import Grade, Outcome

POLICY = "streaming:budget=96,sink=4,window=8"
_play = rollouts.play


def config(**options: Any) -> TrainConfig:
    """Four steps of two prompts by four rollouts; about 500 bytes of context against a budget of 96."""
    plain: dict[str, Any] = {
        "arm": "smd",
        "seed": 1,
        "policy": POLICY,
        "suites": ["math"],
        "context_tokens": 500,
        "steps": 4,
        "prompts_per_step": 2,
        "group": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "save_every": 2,
        "ledger_every": 2,
    }
    return TrainConfig(**(plain | options))


def short(**options: Any) -> TrainConfig:
    """The same with answers of 12 tokens instead of 40, for what does not depend on their length."""
    return config(**({"suites": ["refusal"]} | options))


def sharp(folder: Path) -> LoadedModel:
    """A random model with weights large enough that evicting entries changes what it says by nats."""
    model = load_model(str(folder))
    with torch.no_grad():
        for weight in model.model.parameters():
            if weight.ndim == 2:
                weight.mul_(15.0)
    return model


def play_for_parity(*args: Any, **options: Any) -> list[GradedRow]:
    """``play``, but an odd first token is what the grader wants: a random model never answers a suite."""
    return [replace(row, grade=parity(row)) for row in _play(*args, **options)]


def parity(row: GradedRow) -> Grade:
    odd = int(row.rollout.ids[row.rollout.prompt_length]) % 2 == 1
    return Grade(Outcome.DESIRED, 1.0) if odd else Grade(Outcome.UNDESIRED, 0.0)


def sampled(base: LoadedModel, **options: Any) -> Batch:
    """Groups of four rollouts with unlike lengths under the arm's policy, three unless told, graded by parity."""
    settings = config(**({"prompts_per_step": 3, "steps": 1} | options))
    questions = training_items(settings, base.chat.count_tokens)[0]
    sampler = Sampler(base, settings.rollout_policy)
    played = _play(sampler, questions, Decoding(settings.context_tokens), row_seeds(settings, 0), group=4)
    return collect([row.rollout for row in played], [parity(row).score for row in played], 4, base.device)


class Tape(Optimiser):
    """An optimiser that remembers gradients and changes nothing."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, learning_rate=1.0, warmup_steps=0, max_grad_norm=1.0)
        self.gradients: list[torch.Tensor] = []

    def step(self) -> StepResult:
        self.gradients = [weight.grad.clone() for weight in self._weights.values()]
        self._adam.zero_grad(set_to_none=True)
        return StepResult(1.0, {})


def gradients(base: LoadedModel, batch: Batch, **options: Any) -> list[torch.Tensor]:
    """What one update of a batch would follow, by weight."""
    settings, model = (
        config(**({"prompts_per_step": len(batch.rollouts) // batch.group} | options)),
        copy.deepcopy(base.model),
    )
    learner = Learner(model, settings, base.model if settings.beta else None)
    learner.optimiser = tape = Tape(model)
    grpo.learn(learner, batch, step=0, max_tokens=40)
    return tape.gradients


class Killed(BaseException):
    """Stands for the process ending here."""


def by_parity(settings: TrainConfig, base: LoadedModel, out: Path) -> Path:
    """A whole training run whose rollouts are graded by parity."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "play", play_for_parity)
        return grpo.train(settings, base, out, silent)


def killed_and_resumed(settings: TrainConfig, base: LoadedModel, out: Path) -> Path:
    """The same run, killed after its first step and gone on with."""

    def die(_: int, __: int, ___: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "play", play_for_parity)
        with pytest.raises(Killed):
            grpo.train(settings, base, out, die)
    return by_parity(settings, base, out)


def same_bits(one: Path, other: Path) -> bool:
    """Whether two finished runs have the same telemetry and the same weights."""
    weights = "model.safetensors"
    return rows(one) == rows(other) and sha256(one / weights) == sha256(other / weights)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Telemetry without what the clock decides."""
    lines = (folder / "telemetry.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds_")} for line in lines]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def silent(_: int, __: int, ___: Any) -> None:
    """Progress that nobody watches."""


def main(arguments: Sequence[str]) -> None:
    """Train ``model`` into ``out`` and kill this very process with signal 9 after ``step``."""
    torch.set_num_threads(1)
    rollouts.play = play_for_parity
    model, out, step = arguments

    def stop(done: int, _: int, __: Any) -> None:
        if done == int(step):
            os.kill(os.getpid(), signal.SIGKILL)

    grpo.train(short(), sharp(Path(model)), Path(out), stop)


if __name__ == "__main__":
    main(sys.argv[1:])
