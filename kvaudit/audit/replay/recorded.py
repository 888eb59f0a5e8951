"""Rollouts as somebody recorded them, and whether they can be replayed by a model at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvaudit.audit.cache.layers import kv_heads
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.selection import attends_to_nothing, selection_fault
from kvaudit.audit.policies import Policy
from kvaudit.core.errors import DataError

LOGPROB_ROUNDING = 1e-5  # nats: a log-prob above 0 by no more than this is one of 0


@dataclass(frozen=True)
class RecordedRollouts:
    """Rollouts of one file. ``policy`` is None where the engine's policy is not one of ours.

    ``temperature`` is what the log-probs were taken at. ``policy_hash`` stands in the file beside the policy;
    ``trained_policy`` is what a checkpoint's provenance says its rollouts were sampled with. None: nothing says.
    """

    source: str
    rollouts: tuple[Rollout, ...]
    policy: Policy | None
    temperature: float | None = None
    policy_hash: str | None = None
    trained_policy: Policy | None = None


def check_replayable(recorded: RecordedRollouts, config: Any, max_positions: int) -> None:
    """Raise DataError where lengths disagree, a log-prob is none, or the model cannot have sampled the rollouts."""
    text = config.get_text_config(decoder=True)
    wanted = (text.num_hidden_layers, kv_heads(config))
    if not recorded.rollouts:
        raise DataError(f"rollouts {recorded.source!r} hold no rollout")
    for number, rollout in enumerate(recorded.rollouts):
        where, tokens = f"rollouts {recorded.source!r}: rollout {number}", len(rollout.ids)
        if fault := rollout_fault(rollout) or _chosen(rollout, text.num_attention_heads):
            raise DataError(f"{where} {fault}")
        if (got := tuple(rollout.evicted_at.shape[:2])) != wanted:
            raise DataError(f"{where} has {_layers(got)}, the model {_layers(wanted)}: it is of another model")
        if fault := model_misfit(tokens, int(rollout.ids.min()), int(rollout.ids.max()), config, max_positions):
            raise DataError(f"{where} {fault}")


def model_misfit(tokens: int, lowest: int, highest: int, config: Any, max_positions: int) -> str | None:
    """Why a model cannot have sampled so many tokens with ids from ``lowest`` to ``highest``; None if it can."""
    vocabulary = config.get_text_config(decoder=True).vocab_size
    if tokens > max_positions:
        return f"has {tokens} tokens, the model {max_positions} positions: it is of another model"
    if not 0 <= lowest <= highest < vocabulary:
        return f"has token ids outside the model's {vocabulary}: it is of another model"
    return None


def rollout_fault(rollout: Rollout) -> str | None:
    """What is wrong with a rollout whatever the model: types, lengths, or a log-prob that is none; None if nothing."""
    return _malformed(rollout) or _logprobs(rollout)


def _malformed(rollout: Rollout) -> str | None:
    tokens = len(rollout.ids)
    types = (rollout.ids.dtype, rollout.sampled.dtype, rollout.sampler_logprobs.dtype, type(rollout.prompt_length))
    if types != (torch.int64, torch.bool, torch.float32, int):
        return f"holds {', '.join(str(kind) for kind in types)}, wanted ids, flags, log-probs and a whole number"
    tables = [times for times in (rollout.keys_quantised_at, rollout.values_quantised_at) if times is not None]
    if any(times.dtype != torch.int32 or times.dim() != 1 for times in tables):
        return "holds quantisation times of another shape or type than one int32 per token"
    lengths = {*map(len, tables), len(rollout.sampled), len(rollout.sampler_logprobs), rollout.evicted_at.shape[-1]}
    if lengths != {tokens}:
        return f"has {tokens} tokens, but masks, log-probs or ledger of {sorted(lengths)}"
    if not 1 <= rollout.prompt_length < tokens:
        return f"has prompt_length {rollout.prompt_length}, wanted 1 to {tokens - 1}"
    if bool(rollout.sampled[: rollout.prompt_length].any()) or not bool(rollout.sampled.any()):
        return "has sampled tokens in its prompt, or none at all"
    return None


def _chosen(rollout: Rollout, heads: int) -> str | None:
    """What is wrong with experts and keys that were chosen, where the model has ``heads`` query heads."""
    if rollout.experts is not None and (fault := _misrouted(rollout.experts, len(rollout.ids))):
        return fault
    made = rollout.selection
    if made is None:
        return None
    if fault := selection_fault(made, rollout.evicted_at):
        return fault
    # one list for all heads, one by KV head, or one by query head
    if (lists := made.chosen.shape[1]) not in (1, rollout.evicted_at.shape[1], heads):
        return f"has choices of {lists} heads, wanted 1, {rollout.evicted_at.shape[1]} or {heads}"
    if rollout.codec:
        return "lets queries choose among codes, which cannot be replayed"
    return "lets a query choose only what had left" if attends_to_nothing(made, rollout.evicted_at) else None


def _misrouted(experts: Tensor, tokens: int) -> str | None:
    if experts.dtype != torch.int16 or experts.dim() != 3 or len(experts) != tokens:
        return f"has experts of shape {tuple(experts.shape)}, {experts.dtype}, for {tokens} tokens"
    ordered = experts[:-1].sort(-1).values  # the last token may never have been fed
    if bool((ordered < 0).any()) or bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        return "sends a token to no expert, or to one of them twice"
    return None


def _logprobs(rollout: Rollout) -> str | None:
    drawn = rollout.sampled.nonzero()[:, 0]
    values = rollout.sampler_logprobs[drawn]
    wrong = (~torch.isfinite(values) | (values > LOGPROB_ROUNDING)).nonzero()
    if not len(wrong):
        return None
    first = int(wrong[0])
    return f"has log-prob {float(values[first])} at token {int(drawn[first])}, wanted a finite number of at most 0"


def _layers(shape: Sequence[int]) -> str:
    return f"{shape[0]} layers of {shape[1]} KV heads"
