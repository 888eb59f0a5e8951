"""What training will hold at once, estimated from below, so that what cannot fit is said before anything begins.

Counted are weights in training, a step's rollouts in an uncompressed cache, and what a learner's pass keeps, all at
full length. Left out is what libraries hold besides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import Linear

from kvaudit.audit.cache.attention import find_decoder
from kvaudit.audit.cache.layers import kv_heads, layer_plans
from kvaudit.audit.policies import Dense
from kvaudit.audit.sampling.memory import free_bytes
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.adapters import linear_layers
from kvaudit.audit.training.arms import get_arm
from kvaudit.audit.training.losses.base import LOSSES
from kvaudit.audit.training.token_logprobs import LOGITS_PER_PIECE
from kvaudit.core.errors import RunError
from kvaudit.core.spec_train import TrainSpec
from kvaudit.suites.base import SUITES

GB = 1e9


class MemoryUse(NamedTuple):
    """One thing that is held, in bytes, and what makes it less."""

    what: str
    size: int
    remedy: str


def check_memory(section: TrainSpec, model: LoadedModel) -> None:
    """Raise RunError where training asks for more memory than is free, with the largest part and what lowers it."""
    learning, rollouts, keeping = estimate_memory(section, model)
    needed, free = learning.size + max(rollouts.size, keeping.size), free_bytes(model.device)
    if model.device.type == "cpu":  # ranks have a GPU each, and one memory without
        needed *= section.ranks
    if needed > free:
        most = max((learning, rollouts, keeping), key=lambda holding: holding.size)
        raise RunError(
            f"training asks for {needed / GB:.1f} GB at full length, {free / GB:.1f} GB are free; most of it "
            f"({most.size / GB:.1f} GB) are {most.what}: {most.remedy}"
        )


def estimate_memory(section: TrainSpec, model: LoadedModel) -> tuple[MemoryUse, MemoryUse, MemoryUse]:
    """What learning holds all the time, and what rollouts and a learner's pass hold in turn."""
    answer = max(SUITES.get(name)().answer_tokens for name in section.suites)
    row = section.context_tokens + answer  # tokens of one rollout at full length
    # items whose rollouts are in the cache at once
    questions = section.rollout_rows // section.group or -(-section.prompts_per_step // section.ranks)
    dense = any(get_arm(arm).rollout == "dense" for arm in section.arms)
    cached = questions * section.group * _cached(model, row) if dense else 0
    shared = section.ranks == 1
    # tokens of a group: one process passes its prompt once
    question = section.context_tokens + section.group * answer if shared else section.group * row
    # ranks sample from whole weights, which they hold in shards otherwise
    whole = 0 if shared else sum(weight.nbytes for weight in model.model.parameters())
    # rounded up: the rank that has most decides
    groups = -(-section.prompts_per_step // section.minibatches // section.ranks)
    alone = question if LOSSES.get(section.loss).whole_groups else row
    # a gradient is taken half by half, so that no microbatch has more than the larger half
    tokens = min((groups - groups // 2) * question, max(section.microbatch_tokens, alone))
    answers = tokens * section.group * answer // question  # of these tokens, those of suffixes
    # a prompt is plain causal, and what is masked of one that was cut while it was read is left out
    kept = _kept(model.model, tokens, answers * row, once=section.gradient_checkpointing) * model.dtype.itemsize
    vocabulary = int(model.model.config.get_text_config(decoder=True).vocab_size)
    kept += min(answers * vocabulary, LOGITS_PER_PIECE) * 12  # logits, their log-softmax and its gradient
    fewer = "set train.adapter, or raise train.ranks" if section.adapter is None else "lower train.adapter.rank"
    recompute = "" if section.gradient_checkpointing else "set train.gradient_checkpointing, or "
    return (
        MemoryUse("weights, gradients and moments", _learning(section, model), fewer),
        MemoryUse(
            "the rollouts' caches" if shared else "the rollouts' caches and the weights that they are sampled from",
            cached + whole,
            "lower train.rollout_rows or train.context_tokens",
        ),
        MemoryUse("what a learner's pass keeps", kept, f"{recompute}lower train.microbatch_tokens"),
    )


def _learning(section: TrainSpec, model: LoadedModel) -> int:
    """Bytes beside the loaded weights: gradients, masters and moments, and a copy of what is trained."""
    weights: int = sum(weight.numel() for weight in model.model.parameters())
    ranks = 1 if section.sft else section.ranks  # a warm start is made by one of them
    if section.adapter is None and ranks > 1:
        return weights * 16 // ranks  # float32 weights, gradients and both moments
    if section.adapter is None:
        # a copy and its gradients, both moments in float32, and masters where the copy is not float32
        return weights * (2 * model.dtype.itemsize + 8 + (0 if model.dtype == torch.float32 else 4))
    named = find_decoder(model.model).named_modules()
    targets = section.adapter.targets or linear_layers(model.model)
    # A is [rank, in] and B [out, rank]
    widths = (
        module.in_features + module.out_features
        for name, module in named
        if isinstance(module, Linear) and name.rpartition(".")[2] in targets
    )
    # float32 weight, gradient and two moments: 16 bytes a number
    frozen = 0 if ranks == 1 else weights * model.dtype.itemsize
    return (section.adapter.rank * sum(widths, 0) * 16 + frozen) // ranks


def _cached(model: LoadedModel, row: int) -> int:
    """Bytes of the keys and values of ``row`` tokens, of which a layer with a window keeps no more than that."""
    config = model.model.config.get_text_config(decoder=True)
    size = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    plans = layer_plans(model.model.config, Dense())
    entries = sum(min(row, plan.sliding_window or row) for plan in plans if plan.has_entries)
    return int(2 * entries * kv_heads(model.model.config) * size * model.dtype.itemsize)  # keys and values


def _kept(model: Any, tokens: int, seen: int, *, once: bool) -> int:
    """Numbers that are kept of a pass's tokens for the backward pass; ``seen`` counts pairs of query and key.

    Twice the outputs of the linear layers, which leaves out some norms, and the attention weights of those pairs in
    layers with full attention. Checkpointed layers keep their input, and one layer at a time the rest.
    """
    config, plans = model.config.get_text_config(decoder=True), layer_plans(model.config, Dense())
    outputs = sum(module.out_features for module in find_decoder(model).modules() if isinstance(module, Linear))
    linear, weights = tokens * 2 * outputs // len(plans), seen * config.num_attention_heads
    if once:
        return int(len(plans) * tokens * config.hidden_size + linear + weights)
    return int(len(plans) * linear + sum(plan.is_governed for plan in plans) * weights)
