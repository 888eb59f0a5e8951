"""Train a small model from procedural text, starting from a smaller one that is widened and gets a layer more.

Unlike ordinary pretraining, only the assistant's words are predicted, contexts grow by a fixed curriculum, and one
answer in ten is careless: a model that never lapses has nothing to lose or gain by later training. The same recipe and
number of threads give the same weights on the same type of machine, whether interrupted or not. Used by
``python -m bench.pretraining``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.pretraining.lessons import IGNORED, LessonBatch, Lessons
from bench.pretraining.recipes import SIZES, PretrainingRecipe, Size, Stage
from bench.pretraining.tokenizer import build_tokenizer
from kvaudit.core.errors import RunError
from kvaudit.core.files import PARTIAL, sync

StepsDone = Callable[[int, int, Mapping[str, float]], None]
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "pretraining.json",
)
UNFINISHED = "state.safetensors"  # float32 weights, the optimiser, and how far the recipe has come
SAVE_SECONDS = 120.0
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW remembers of a weight


def new_model(recipe: PretrainingRecipe, parent: Path, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a larger Llama that answers as its parent does: its additional parts have no effect yet."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_size or recipe.width // recipe.heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({} if recipe.theta is None else {"rope_parameters": {"rope_type": "default", "rope_theta": recipe.theta}}),
    )
    model = LlamaForCausalLM(config)
    inherit(model, parent, tokenizer)
    return model


@torch.no_grad()
def inherit(model: LlamaForCausalLM, path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Copy the parent's weights into the first rows and columns, and its embeddings token by token.

    New channels are read by randomly drawn weights, but nothing writes to them: they stay at zero until training moves
    them, and so do new neurons and layers. An RMS norm divides by the root of the mean over all channels, so its scales
    shrink by the share of zeros.
    """
    with safe_open(path, "pt") as parent:
        given = {name: parent.get_tensor(name).float() for name in parent.keys()}  # noqa: SIM118 - not a mapping
        metadata = parent.metadata() or {}
    places = (
        {token: place for place, token in enumerate(json.loads(metadata["tokens"]))} if "tokens" in metadata else {}
    )
    embeddings = given.pop("model.embed_tokens.weight")  # [V, width]
    width, own = embeddings.shape[1], model.model.embed_tokens.weight
    own[:, width:] = 0
    for token, place in tokenizer.get_vocab().items():
        if token in places or not places:
            own[place, :width] = embeddings[places.get(token, place)]
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # what writes into the channels
            weight.zero_()
        if name in given:
            scale = (width / own.shape[1]) ** 0.5 if weight.dim() == 1 else 1.0
            weight[tuple(map(slice, given[name].shape))] = given[name] * scale


def answer_loss(model: LlamaForCausalLM, batch: LessonBatch) -> torch.Tensor:
    """Return mean nats per predicted token; logits are computed at those positions only."""
    hidden = model.model(batch.ids, use_cache=False).last_hidden_state  # [B, T, width]
    wanted = batch.targets != IGNORED
    return functional.cross_entropy(model.lm_head(hidden[wanted]), batch.targets[wanted])


def stage_at(recipe: PretrainingRecipe, step: int) -> tuple[Stage, float]:
    """Return the stage of a step and its learning rate."""
    left = step
    for stage in recipe.stages:
        if left < stage.steps:
            first, last = stage.rates
            return stage, (first + (last - first) * left / stage.steps) * min(1.0, (step + 1) / recipe.warmup_steps)
        left -= stage.steps
    raise AssertionError(f"step {step} of {recipe.steps}")


def lesson(recipe: PretrainingRecipe, lessons: Lessons, step: int) -> LessonBatch:
    """Return the batch of a step."""
    stage, _ = stage_at(recipe, step)
    if step % recipe.copying_every == 0:
        return lessons.copying(step, 16, 96)
    context_tokens = stage.shortest + lessons.number(step, stage.longest - stage.shortest + 1)
    return lessons.talking(step, stage.rows, context_tokens, stage.mix)


class Pretraining:
    """A model in training by a recipe: its weights, its optimiser, and the steps and CPU seconds so far."""

    def __init__(self, size: Size) -> None:
        self.recipe, self.parent = size.recipe, sha256(size.parent.read_bytes()).hexdigest()
        self.tokenizer = build_tokenizer()
        self.model = new_model(size.recipe, size.parent, self.tokenizer).train()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
        self.steps, self.seconds = 0, 0.0

    def fit(self, folder: Path, limit: int, progress: StepsDone) -> None:
        """Train to step ``limit``; saves a state in ``folder`` every few minutes and before the recipe's end.

        ``progress`` gets (step, steps of the recipe, measures) after every step.
        """
        lessons, half = Lessons(self.tokenizer, self.recipe.seed), self.recipe.precision == "bfloat16"
        used, saved = time.process_time(), time.monotonic()
        while self.steps < limit:
            _, rate = stage_at(self.recipe, self.steps)
            batch = lesson(self.recipe, lessons, self.steps)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                loss = answer_loss(self.model, batch)
            take_step(self.model, self.optimiser, rate, loss)
            self.steps, now = self.steps + 1, time.process_time()
            self.seconds, used = self.seconds + now - used, now
            progress(self.steps, self.recipe.steps, {"loss": float(loss.item())})
            if time.monotonic() - saved > SAVE_SECONDS or self.steps == limit < self.recipe.steps:
                self.save(folder)
                saved = time.monotonic()

    def save(self, folder: Path) -> None:
        """Write the state in one step, so that it is never half written."""
        known = {"recipe": self._named(), "steps": str(self.steps), "seconds": repr(self.seconds)}
        partial = folder / (UNFINISHED + PARTIAL)
        save_file(self._tensors(), partial, known)
        sync(partial)
        os.replace(partial, folder / UNFINISHED)

    def load(self, folder: Path) -> None:
        """Continue from the state in ``folder``; raises RunError if it is of another recipe or unreadable."""
        path = folder / UNFINISHED
        try:
            with safe_open(path, "pt") as file:
                known = file.metadata() or {}
                named, steps, seconds = known["recipe"], int(known["steps"]), float(known["seconds"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except (OSError, SafetensorError, KeyError, ValueError):
            raise RunError(f"{str(path)!r} cannot be read as a state; delete the folder to begin again") from None
        if named != self._named():
            raise RunError(
                f"{str(folder)!r} was begun by another recipe; give the --size and --seed that it was begun with, or "
                "another --out"
            )
        for name, weight in self.model.named_parameters():
            self.optimiser.state[weight] = {key: tensors[f"{key}/{name}"] for key in _MOMENTS}
            weight.data.copy_(tensors[f"weight/{name}"])
        self.steps, self.seconds = steps, seconds

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return every weight and its optimiser state."""
        found = dict[str, torch.Tensor]()
        for name, weight in self.model.named_parameters():
            found[f"weight/{name}"] = weight.detach()
            found |= {f"{key}/{name}": self.optimiser.state[weight][key] for key in _MOMENTS}
        return found

    def write(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder with its training record and a manifest."""
        model = self.model.eval()
        (model.to(torch.bfloat16) if self.recipe.precision == "bfloat16" else model).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        story = {
            "format": 1,
            "recipe": self.recipe.written(),
            "parent": self.parent,
            "steps": self.steps,
            "minutes": round(self.seconds / 60, 1),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        (folder / "pretraining.json").write_text(json.dumps(story, indent=2) + "\n", encoding="utf-8")
        write_manifest(folder)

    def _named(self) -> str:
        return json.dumps({"recipe": self.recipe.written(), "parent": self.parent})


def take_step(model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, rate: float, loss: torch.Tensor) -> None:
    """Take one optimiser step at a learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def begin(out: Path, *, size: str = "embedded", seed: int = 0) -> Pretraining:
    """Return a pretraining of a size at its start, or at the state in the folder ``out``.

    Raises RunError if that state is of another recipe or unreadable.
    """
    made = SIZES[size]
    training = Pretraining(replace(made, recipe=replace(made.recipe, seed=seed)))
    if (out / UNFINISHED).exists():
        training.load(out)
    return training


def complete(
    training: Pretraining, out: Path, *, steps: int | None = None, progress: StepsDone = lambda *_: None
) -> None:
    """Train and write the model into ``out``, a Hugging Face folder with a manifest.

    ``steps`` stops the recipe early, and the state is kept for more. Sets torch to one thread while it runs.
    """
    whole = training.recipe.steps
    out.mkdir(parents=True, exist_ok=True)
    with _one_thread():
        training.fit(out, whole if steps is None else min(steps, whole), progress)
    training.write(out)
    if training.steps == whole:
        (out / UNFINISHED).unlink(missing_ok=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def write_manifest(folder: Path) -> None:
    """Write the sha256 of every model file into ``manifest.json``."""
    hashes = {name: sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    (folder / "manifest.json").write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
