"""Train the embedded model from procedural text: copying first, then the suites' training conversations.

Departures from ordinary language-model pretraining: only the assistant's words are predicted, contexts grow by a fixed
curriculum, and a last stretch towards smoothed targets leaves doubt, so that later training can move scores both ways.
The same seed and number of threads give the same weights on the same machine type.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch
import transformers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from audit.embedded.lessons import IGNORED, Batch, Lessons
from audit.embedded.tokenizer import build_tokenizer

Progress = Callable[[int, int, Mapping[str, float]], None]
EMBEDDED = Path(__file__).parent
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "pretraining.json",
)


@dataclass(frozen=True)
class Stage:
    """A stretch of the curriculum: conversations of ``shortest`` to ``longest`` context tokens.

    ``shares`` mix the suites; ``drills`` are further questions about the same context, by suite.
    """

    steps: int
    shortest: int
    longest: int
    shares: Mapping[str, float]
    drills: Mapping[str, int]
    rows: int = 16


# Copying from a short context first; whose orders count is learnt late, and its noise keeps the rest back until then.
STAGES = (
    Stage(1200, 96, 128, {"refusal": 1.0, "agent": 1.0, "math": 1.0}, {"refusal": 4, "agent": 0, "math": 2}),
    Stage(600, 112, 224, {"refusal": 0.5, "agent": 1.1, "math": 1.4}, {"refusal": 3, "agent": 1, "math": 2}),
    Stage(700, 160, 288, {"refusal": 0.2, "agent": 0.8, "math": 2.0}, {"refusal": 1, "agent": 1, "math": 2}),
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 0
    layers: int = 3
    width: int = 128
    mlp: int = 256
    heads: int = 4
    kv_heads: int = 2
    copying_steps: int = 400
    stages: tuple[Stage, ...] = STAGES
    learning_rate: float = 3e-3
    final_learning_rate: float = 1.5e-4
    warmup_steps: int = 100
    held: float = 0.5  # share of the steps at the peak rate
    copying_every: int = 8  # one step in so many stays a copying exercise
    softening_steps: int = 120  # at the end, at the final rate, towards smoothed targets
    smoothing: float = 0.015  # probability that a smoothed target spreads over the vocabulary

    @property
    def lessons(self) -> int:
        return self.copying_steps + sum(stage.steps for stage in self.stages)

    @property
    def steps(self) -> int:
        return self.lessons + self.softening_steps


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model of the Llama architecture; weights drawn from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.width,
            intermediate_size=recipe.mlp,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def answer_loss(model: LlamaForCausalLM, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
    """Mean nats per predicted token; the vocabulary is projected at those places only."""
    hidden = model.model(batch.ids, use_cache=False).last_hidden_state  # [B, T, width]
    wanted = batch.targets != IGNORED
    return functional.cross_entropy(model.lm_head(hidden[wanted]), batch.targets[wanted], label_smoothing=smoothing)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, the peak rate held, then a linear fall to the final rate."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    fallen = min(1.0, max(0.0, step / recipe.lessons - recipe.held) / (1 - recipe.held))
    return recipe.learning_rate + (recipe.final_learning_rate - recipe.learning_rate) * fallen


def lesson(recipe: Recipe, lessons: Lessons, step: int) -> Batch:
    """The batch of step number ``step``."""
    if step < recipe.copying_steps:
        return lessons.copying(step, 32, 64)
    if step % recipe.copying_every == 0:
        return lessons.copying(step, 16, 96)
    left, last = step - recipe.copying_steps, recipe.stages[-1]
    for stage in recipe.stages:
        if left < stage.steps:
            span = stage.longest - stage.shortest
            context_tokens = stage.shortest + lessons.number(step, span + 1)
            return lessons.talking(step, stage.rows, context_tokens, stage.shares, stage.drills)
        left -= stage.steps
    return lessons.talking(step, last.rows, last.longest, last.shares, last.drills)


def fit(
    recipe: Recipe, progress: Progress, limit: int | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train by the recipe; ``limit`` cuts it short. ``progress`` gets (step, steps, measures) after every step."""
    tokenizer = build_tokenizer()
    lessons, model = Lessons(tokenizer, recipe.seed), new_model(recipe, tokenizer)
    steps = min(recipe.steps, recipe.steps if limit is None else limit)
    model.train()
    teach(model, lessons, recipe, range(min(steps, recipe.lessons)), progress)
    teach(model, lessons, recipe, range(recipe.lessons, steps), progress)
    return model.eval(), tokenizer


def teach(model: LlamaForCausalLM, lessons: Lessons, recipe: Recipe, steps: range, progress: Progress) -> None:
    """Take the optimiser steps ``steps`` with fresh moments; those past the lessons soften the answers.

    A model trained to the end is all but certain of every token, right or wrong, and leaves later training no
    alternatives to reinforce. Smoothed targets give it back some of its doubt.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in steps:
        rate = learning_rate(recipe, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        smoothing = recipe.smoothing if step >= recipe.lessons else 0.0
        loss = answer_loss(model, lesson(recipe, lessons, step), smoothing)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, recipe.steps, {"loss": loss.item(), "learning_rate": rate})


def pretrain(out: Path, *, seed: int = 0, steps: int | None = None, progress: Progress = lambda *_: None) -> Path:
    """Train the embedded model and write it to ``out`` as a Hugging Face folder with a manifest; returns ``out``.

    About ten minutes on one core; ``steps`` stops the recipe early. Sets torch to one thread while it runs.
    """
    recipe, started, threads = Recipe(seed=seed), time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, tokenizer = fit(recipe, progress, steps)
    finally:
        torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    story = {
        "format": 1,
        "recipe": asdict(recipe),
        "steps": recipe.steps if steps is None else min(steps, recipe.steps),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (out / "pretraining.json").write_text(json.dumps(story, indent=2) + "\n", encoding="utf-8")
    write_manifest(out)
    return out


def write_manifest(folder: Path) -> None:
    """Record the sha256 of every model file in ``manifest.json``."""
    hashes = {name: sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    (folder / "manifest.json").write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """``python -m audit.embedded.pretrain --out DIR``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=EMBEDDED, help="folder to write (default: the shipped model)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="stop the recipe after so many steps")
    choice = parser.parse_args()
    pretrain(choice.out, seed=choice.seed, steps=choice.steps, progress=_print_progress)


def _print_progress(step: int, steps: int, measures: Mapping[str, float]) -> None:
    if step % 100 == 0 or step == steps:
        print(f"step {step}/{steps}  loss {measures['loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
