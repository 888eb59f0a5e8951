"""Which layers of a model a policy governs."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvaudit.audit.policies import Dense, Evictor, Policy, Quantiser, Selector, evictor_of, quantiser_of, selector_of
from kvaudit.audit.policies.streaming import Streaming
from kvaudit.core.errors import RunError

GOVERNED_KINDS = {"full_attention", "hybrid"}  # a hybrid layer has full attention and linear beside it
STATE_KINDS = {"linear_attention", "hybrid"}


class LayerPlan(NamedTuple):
    """One layer's rule: the policy that evicts, and the model's own sliding window if the layer has one.

    ``has_entries``: it holds entries; ``has_state``: it hands a state on, as linear attention does. A layer may do both.
    """

    policy: Policy
    sliding_window: int | None
    has_entries: bool = True
    has_state: bool = False

    @property
    def evictor(self) -> Evictor:
        """The part of the policy that decides what stays."""
        return evictor_of(self.policy)

    @property
    def quantiser(self) -> Quantiser | None:
        """The part that decides how precisely it is stored."""
        return quantiser_of(self.policy)

    @property
    def selector(self) -> Selector | None:
        """The part that decides what a query attends to."""
        return selector_of(self.policy)

    @property
    def is_governed(self) -> bool:
        """Whether the policy asked for decides what this layer keeps."""
        return self.has_entries and self.sliding_window is None


def layer_plans(config: Any, policy: Policy) -> list[LayerPlan]:
    """A plan per layer: full-attention layers follow ``policy``, sliding-window layers only their own window.

    Layers of linear attention evict nothing. Raises RunError for a model with no full-attention layer or with layers
    of another kind, and where ``skip_layers`` names layers that the policy would not govern, or all that it does.
    """
    text = config.get_text_config(decoder=True)
    if text.is_encoder_decoder:
        raise RunError(f"model {text.model_type!r} has an encoder and a decoder; only decoders alone can be compressed")
    kinds = layer_kinds(config)
    if not GOVERNED_KINDS & set(kinds):
        found = ", ".join(dict.fromkeys(kinds)) or "none with attention"
        raise RunError(f"model {text.model_type!r} has no full-attention layer ({found}): there is nothing to compress")
    layers = sum(kind in GOVERNED_KINDS for kind in kinds)
    skipped = _skipped(policy, kinds)
    # counted among the governed ones alone, over which the budgets of layers have the policy's mean
    governed = iter(range(layers))
    own = [policy.for_layer(next(governed), layers) if kind in GOVERNED_KINDS else policy for kind in kinds]
    return [
        _layer_plan(kind, text, Dense(chunk=policy.chunk) if n in skipped else each)
        for n, (kind, each) in enumerate(zip(kinds, own, strict=True))
    ]


def _skipped(policy: Policy, kinds: list[str]) -> frozenset[int]:
    codec = quantiser_of(policy)
    if codec is None or not codec.skipped:
        return frozenset()
    coded = {n for n, kind in enumerate(kinds) if kind in GOVERNED_KINDS}
    if not codec.skipped < coded:
        raise RunError(
            f"policy {codec.name}: skip_layers={codec.skip_layers}, wanted some of the {len(coded)} layers of this "
            f"model that it quantises, {min(coded)} to {max(coded)}, and not all"
        )
    return codec.skipped


def describe_governed_layers(config: Any) -> str:
    """How many layers a policy governs and what the others do; empty where it governs all."""
    plans = layer_plans(config, Dense())
    # a list times a truth value is itself or empty
    others = ["are linear and keep their state"] * any(not plan.has_entries for plan in plans)
    others += ["keep their own sliding window"] * any(plan.sliding_window is not None for plan in plans)
    if not others:
        return ""
    return f"evicts {sum(plan.is_governed for plan in plans)} of {len(plans)} layers; the others {' or '.join(others)}"


def kv_heads(config: Any) -> int:
    """KV heads of every layer, as many as its keys have when they reach attention."""
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "num_key_value_heads") or hasattr(text, "kv_lora_rank"):
        return int(text.num_attention_heads)  # every head has keys of its own, or makes them from a latent
    return int(text.num_key_value_heads or text.num_attention_heads)  # None: as many as query heads


def layer_kinds(config: Any) -> list[str]:
    """Every layer's kind, in transformers' words; empty for a model that states neither layers nor attention heads."""
    text = config.get_text_config(decoder=True)
    if hasattr(text, "layer_types") and text.layer_types:  # a property in some configs, so no key of the dict
        return list(text.layer_types)
    if not hasattr(text, "num_attention_heads"):
        return []
    # some configs name a window and say beside it that it is not used
    slides = text.to_dict().get("sliding_window") is not None and text.to_dict().get("use_sliding_window", True)
    return ["sliding_attention" if slides else "full_attention"] * text.num_hidden_layers


def _layer_plan(kind: str, text: Any, policy: Policy) -> LayerPlan:
    if kind in GOVERNED_KINDS:
        return LayerPlan(policy, None, has_state=kind in STATE_KINDS)
    if kind == "sliding_attention":
        # entries outside the window can never be seen again, so dropping them changes nothing
        own = Streaming(budget=int(text.sliding_window), sink=0, chunk=policy.chunk)
        return LayerPlan(own, int(text.sliding_window))
    if kind == "linear_attention":
        return LayerPlan(Dense(), None, has_entries=False, has_state=True)
    raise RunError(f"model {text.model_type!r} has {kind} layers, which the evicting cache does not support")
