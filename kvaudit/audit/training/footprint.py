"""A lower bound of the memory that training needs, so that a run that cannot fit is refused before it starts.

It counts the weights with all that training them needs, a step's rollouts in a dense cache, and the activations of a
learner's pass; conversations have their full length. It does not count what libraries allocate themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import Linear

from kvaudit.audit.cache.attention import find_decoder
from kvaudit.audit.cache.layers import head_size, kv_heads, layer_plans
from kvaudit.audit.policies import Dense
from kvaudit.audit.sampling.memory import free_bytes
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.adapters import linear_layers
from kvaudit.audit.training.config import get_arm
from kvaudit.audit.training.learner import LOGITS_PER_PIECE
from kvaudit.audit.training.losses.base import LOSSES
from kvaudit.core.errors import RunError
from kvaudit.core.spec_train import TrainSpec
from kvaudit.suites.base import SUITES

GB = 1e9


class MemoryUse(NamedTuple):
    """One use of memory: what it is for, its bytes, and how to reduce it."""

    what: str
    size: int
    remedy: str


def check_memory(section: TrainSpec, model: LoadedModel) -> None:
    """Raise RunError, naming the largest use and its remedy, if training needs more memory than is free."""
    uses = estimate_memory(section, model)
    learning, rollouts, activations = uses
    needed, free = learning.size + max(rollouts.size, activations.size), free_bytes(model.device)
    if needed > free:
        largest = max(uses, key=lambda use: use.size)
        raise RunError(
            f"training needs {needed / GB:.1f} GB at full length, {free / GB:.1f} GB are free; most of it "
            f"({largest.size / GB:.1f} GB) is {largest.what}: {largest.remedy}"
        )


def estimate_memory(section: TrainSpec, model: LoadedModel) -> tuple[MemoryUse, MemoryUse, MemoryUse]:
    """Return three uses of memory: what learning always holds, the caches of rollouts, and one pass with gradient."""
    answer = max(SUITES.get(name)().answer_tokens for name in section.suites)
    row = section.context_tokens + answer  # tokens of one rollout at full length
    # prompts whose rollouts are in the cache at once
    prompts = min(section.rollout_rows // section.group or section.prompts_per_step, section.prompts_per_step)
    # an engine that samples has a cache of its own
    fills_cache = section.rollouts is None and any(get_arm(arm).rollout == "dense" for arm in section.arms)
    cache = prompts * section.group * _cache_bytes(model, row) if fills_cache else 0
    group_tokens = section.context_tokens + section.group * answer  # the prompt is passed once
    groups = section.prompts_per_step // section.minibatches
    smallest = group_tokens if LOSSES.get(section.loss).whole_groups else row
    # gradients are taken by halves, so a microbatch has at most the larger half
    tokens = min((groups - groups // 2) * group_tokens, max(section.microbatch_tokens, smallest))
    suffix_tokens = tokens * section.group * answer // group_tokens
    # only suffix queries keep attention weights: prompts are plain causal; evictions while prefilling are ignored
    numbers = _activations(model.model, tokens, suffix_tokens * row, checkpointing=section.gradient_checkpointing)
    vocabulary = int(model.model.config.get_text_config(decoder=True).vocab_size)
    # logits, their log-softmax and its gradient: 12 bytes
    activations = numbers * model.dtype.itemsize + min(suffix_tokens * vocabulary, LOGITS_PER_PIECE) * 12
    if section.adapter is None:
        remedy = "set train.adapter, or shard the model with kvaudit.trl"
    else:
        remedy = "lower train.adapter.rank"
    checkpointing = "" if section.gradient_checkpointing else "set train.gradient_checkpointing, or "
    return (
        MemoryUse("weights, gradients and moments", _learning_bytes(section, model), remedy),
        MemoryUse("the rollouts' caches", cache, "lower train.rollout_rows or train.context_tokens"),
        MemoryUse("activations of a learner's pass", activations, f"{checkpointing}lower train.microbatch_tokens"),
    )


def _learning_bytes(section: TrainSpec, model: LoadedModel) -> int:
    """Return the bytes that the trained weights need: a copy, gradients, float32 master weights and AdamW moments."""
    if section.adapter is None:
        weights: int = sum(weight.numel() for weight in model.model.parameters())
        # a copy and its gradients, both moments in float32, and masters unless the copy is float32
        return weights * (2 * model.dtype.itemsize + 8 + (0 if model.dtype == torch.float32 else 4))
    modules = find_decoder(model.model).named_modules()
    targets = section.adapter.targets or linear_layers(model.model)
    # A is [rank, in] and B [out, rank]
    widths = (
        module.in_features + module.out_features
        for name, module in modules
        if isinstance(module, Linear) and name.rpartition(".")[2] in targets
    )
    return section.adapter.rank * sum(widths, 0) * 16  # float32 weight, gradient and two moments


def _cache_bytes(model: LoadedModel, row: int) -> int:
    """Return the bytes of the keys and values of ``row`` tokens; a layer with a window holds at most its window."""
    config = model.model.config
    plans = layer_plans(config, Dense())
    entries = sum(min(row, plan.sliding_window or row) for plan in plans if plan.has_entries)
    return 2 * entries * kv_heads(config) * head_size(config) * model.dtype.itemsize


def _activations(model: Any, tokens: int, pairs: int, *, checkpointing: bool) -> int:
    """Return how many numbers a pass over ``tokens`` tokens keeps for the backward pass.

    These are twice the outputs of the linear layers (norms are ignored) and, in layers with full attention, the
    attention weights of ``pairs`` query-key pairs. Gradient checkpointing keeps only the input of each layer, and the
    other activations of one layer at a time.
    """
    config, plans = model.config.get_text_config(decoder=True), layer_plans(model.config, Dense())
    outputs = sum(module.out_features for module in find_decoder(model).modules() if isinstance(module, Linear))
    linear, weights = tokens * 2 * outputs // len(plans), pairs * config.num_attention_heads
    if checkpointing:
        return int(len(plans) * tokens * config.hidden_size + linear + weights)
    return int(len(plans) * linear + sum(plan.is_governed for plan in plans) * weights)
