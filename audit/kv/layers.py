"""Which layers of a model a policy governs."""

from __future__ import annotations

from typing import Any, NamedTuple

from audit.errors import RunError
from audit.policies import Policy, parse_policy


class LayerPlan(NamedTuple):
    """One layer's rule: the policy that evicts, and the model's own sliding window if the layer has one."""

    policy: Policy
    sliding_window: int | None


def layer_plans(config: Any, policy: Policy) -> list[LayerPlan]:
    """A plan per layer: full-attention layers follow ``policy``, sliding-window layers only their own window.

    Raises RunError for a model with no full-attention layer or with layers that hold no keys (linear attention).
    """
    text = config.get_text_config(decoder=True)
    if text.is_encoder_decoder:
        raise RunError(f"model {text.model_type!r} has an encoder and a decoder; only decoders alone can be compressed")
    kinds = layer_kinds(config)
    if "full_attention" not in kinds:
        found = ", ".join(dict.fromkeys(kinds)) or "none with attention"
        raise RunError(f"model {text.model_type!r} has no full-attention layer ({found}): there is nothing to compress")
    governed = iter(range(kinds.count("full_attention")))
    layers = kinds.count("full_attention")
    return [
        _plan(kind, text, policy.for_layer(next(governed), layers) if kind == "full_attention" else policy)
        for kind in kinds
    ]


def kv_heads(config: Any) -> int:
    """KV heads of every layer, as many as its keys have when they reach attention."""
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "num_key_value_heads") or hasattr(text, "kv_lora_rank"):
        return int(text.num_attention_heads)  # every head has keys of its own, or makes them from a latent
    return int(text.num_key_value_heads or text.num_attention_heads)


def layer_kinds(config: Any) -> list[str]:
    """Every layer's kind, in transformers' words; empty for a model that states neither layers nor attention heads."""
    text = config.get_text_config(decoder=True)
    if hasattr(text, "layer_types") and text.layer_types:  # a property in some configs, so no key of the dict
        return list(text.layer_types)
    if not hasattr(text, "num_attention_heads"):
        return []
    slides = text.to_dict().get("sliding_window") is not None and text.to_dict().get("use_sliding_window", True)
    return ["sliding_attention" if slides else "full_attention"] * text.num_hidden_layers


def _plan(kind: str, text: Any, policy: Policy) -> LayerPlan:
    if kind == "full_attention":
        return LayerPlan(policy, None)
    if kind == "sliding_attention":
        # entries outside the window can never be seen again, so dropping them changes nothing
        own = parse_policy(f"streaming:budget={text.sliding_window},sink=0,chunk={policy.chunk}")
        return LayerPlan(own, int(text.sliding_window))
    raise RunError(f"model {text.model_type!r} has {kind} layers, which the evicting cache does not support")
