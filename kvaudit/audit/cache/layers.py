"""The layers of a model: which of them a policy governs, and how layers of linear attention keep their state.

Padding must not change a row's state. If rows differ in padding, a linear layer therefore runs once for each number of
real tokens, over the rows with that number and without their padding.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, __version__

from kvaudit.audit.cache.attention import inner_model
from kvaudit.audit.policies import Dense, Evictor, Policy, Quantiser, Selector, evictor_of, quantiser_of, selector_of
from kvaudit.audit.policies.blind import Streaming
from kvaudit.core.errors import RunError

GOVERNED_KINDS = {"full_attention", "hybrid"}  # a hybrid layer has full and linear attention side by side
STATE_KINDS = {"linear_attention", "hybrid"}
_CONVOLUTION, _RECURRENT = "convolution", "recurrent"


class LayerPlan(NamedTuple):
    """The policy of one layer, and the model's own sliding window if the layer has one.

    ``has_entries``: it has keys and values; ``has_state``: it has a recurrent state, as linear attention does. A layer
    may have both.
    """

    policy: Policy
    sliding_window: int | None
    has_entries: bool = True
    has_state: bool = False

    @property
    def evictor(self) -> Evictor:
        """The part of the policy that decides which entries to keep."""
        return evictor_of(self.policy)

    @property
    def quantiser(self) -> Quantiser | None:
        """The part of the policy that stores entries as codes; None if entries stay exact."""
        return quantiser_of(self.policy)

    @property
    def selector(self) -> Selector | None:
        """The part of the policy that decides which entries a query attends to; None if it attends to all."""
        return selector_of(self.policy)

    @property
    def is_governed(self) -> bool:
        """Whether the user's policy, and not the model itself, decides which entries this layer keeps."""
        return self.has_entries and self.sliding_window is None


def layer_plans(config: Any, policy: Policy) -> list[LayerPlan]:
    """Return a plan for each layer: ``policy`` for full attention, the model's window for sliding-window attention.

    Layers of linear attention evict nothing. Raises RunError for a model without full-attention layers or with layers
    of an unknown kind, and if ``skip_layers`` names a layer that the policy does not govern, or all that it governs.
    """
    text = config.get_text_config(decoder=True)
    if text.is_encoder_decoder:
        raise RunError(f"model {text.model_type!r} has an encoder and a decoder; only decoders alone can be compressed")
    kinds = layer_kinds(config)
    if not GOVERNED_KINDS & set(kinds):
        names = ", ".join(dict.fromkeys(kinds)) or "none with attention"
        raise RunError(f"model {text.model_type!r} has no full-attention layer ({names}): there is nothing to compress")
    governed = [n for n, kind in enumerate(kinds) if kind in GOVERNED_KINDS]
    skipped = _skipped_layers(policy, governed)
    # numbers count governed layers only, because the mean of their budgets must be the policy's budget
    numbers = {layer: number for number, layer in enumerate(governed)}
    plans = []
    for layer, kind in enumerate(kinds):
        own_policy = policy.for_layer(numbers[layer], len(governed)) if layer in numbers else policy
        plans.append(_layer_plan(kind, text, Dense(chunk=policy.chunk) if layer in skipped else own_policy))
    return plans


def _skipped_layers(policy: Policy, governed: list[int]) -> frozenset[int]:
    codec = quantiser_of(policy)
    if codec is None or not codec.skipped:
        return frozenset()
    if not codec.skipped < set(governed):
        raise RunError(
            f"policy {codec.name}: skip_layers={codec.skip_layers}, wanted some but not all of the {len(governed)} "
            f"layers of this model that it quantises, {min(governed)} to {max(governed)}"
        )
    return codec.skipped


def _layer_plan(kind: str, text: Any, policy: Policy) -> LayerPlan:
    if kind in GOVERNED_KINDS:
        return LayerPlan(policy, None, has_state=kind in STATE_KINDS)
    if kind == "sliding_attention":
        # entries outside the window can never be seen again, so dropping them changes nothing
        window = Streaming(budget=int(text.sliding_window), sink=0, chunk=policy.chunk)
        return LayerPlan(window, int(text.sliding_window))
    if kind == "linear_attention":
        return LayerPlan(Dense(), None, has_entries=False, has_state=True)
    raise RunError(f"model {text.model_type!r} has {kind} layers, which the evicting cache does not support")


def describe_governed_layers(config: Any) -> str:
    """Return a phrase on how many layers a policy evicts from, and what the others do; empty if there are no others."""
    plans = layer_plans(config, Dense())
    notes = []
    if not all(plan.has_entries for plan in plans):
        notes.append("are linear and keep their state")
    if any(plan.sliding_window is not None for plan in plans):
        notes.append("keep their own sliding window")
    if not notes:
        return ""
    return f"evicts {sum(plan.is_governed for plan in plans)} of {len(plans)} layers; the others {' or '.join(notes)}"


def kv_heads(config: Any) -> int:
    """Return the number of heads of the keys that are passed to attention, which is the same in every layer."""
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "num_key_value_heads") or hasattr(text, "kv_lora_rank"):
        return int(text.num_attention_heads)  # keys per query head, stored or made from a latent
    return int(text.num_key_value_heads or text.num_attention_heads)  # None: as many as query heads


def head_size(config: Any) -> int:
    """Return the number of channels of a head, D."""
    text = config.get_text_config(decoder=True)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of every layer, in transformers' words, such as "full_attention" or "sliding_attention".

    The list is empty for a config without layers or attention heads.
    """
    text = config.get_text_config(decoder=True)
    if hasattr(text, "layer_types") and text.layer_types:  # a property in some configs, so not a key of the dict
        return list(text.layer_types)
    if not hasattr(text, "num_attention_heads"):
        return []
    # some configs give a window and set use_sliding_window to False
    slides = text.to_dict().get("sliding_window") is not None and text.to_dict().get("use_sliding_window", True)
    return ["sliding_attention" if slides else "full_attention"] * text.num_hidden_layers


class States:
    """The recurrent states of one linear-attention layer, with the methods that transformers calls on a cache."""

    def __init__(self, tensors: dict[tuple[str, int], Tensor] | None = None) -> None:
        self.tensors = {} if tensors is None else tensors  # [B, ...] each; absent before the first token

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        return self.tensors.get((_CONVOLUTION, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        return self.tensors.get((_RECURRENT, state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        """Return False: earlier states, which assisted decoding would go back to, are not kept."""
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
        *,
        conv_kernel_size: int,
    ) -> Tensor:
        """Append convolution inputs [B, C, Q]; return the inputs kept from earlier calls followed by the new ones."""
        before = self.tensors.get((_CONVOLUTION, state_idx))
        inputs = conv_states if before is None else torch.cat([before, conv_states], -1)
        # the last [B, C, kernel] are kept, with zeros before the first token
        missing = max(conv_kernel_size - inputs.shape[-1], 0)
        self.tensors[_CONVOLUTION, state_idx] = torch.nn.functional.pad(inputs, (missing, 0))[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:  # noqa: ARG002
        self.tensors[_RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def select(self, rows: Tensor) -> States:
        """Return a copy of some rows."""
        return States({name: tensor[rows] for name, tensor in self.tensors.items()})

    def put(self, rows: Tensor, states: States, batch: int) -> None:
        """Set the states of ``rows`` in a batch of ``batch`` rows; rows that are never set have a state of zeros."""
        for name, tensor in states.tensors.items():
            if name not in self.tensors:
                self.tensors[name] = tensor.new_zeros(batch, *tensor.shape[1:])
            # a copy: gradients flow through the old tensor
            self.tensors[name] = self.tensors[name].index_copy(0, rows, tensor)

    def repeat(self, group: int) -> States:
        return States({name: tensor.repeat_interleave(group, 0) for name, tensor in self.tensors.items()})

    def concat(self, other: States) -> States:
        """Return the states of these rows followed by those of ``other``."""
        return States({name: torch.cat([tensor, other.tensors[name]]) for name, tensor in self.tensors.items()})

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


# computes a layer's output for hidden states [B, Q, E] without padding, and updates its states
LayerRun = Callable[[Tensor, States], Tensor]


def run_state_layer(run: LayerRun, hidden: Tensor, real: Tensor, states: States, *, last: bool = False) -> Tensor:
    """Return a linear-attention layer's output [B, Q, E] for ``hidden``, 0 at padding, and update its ``states``.

    ``real`` bool [B, Q], on the CPU, is False at padding, which does not change the states. ``last``: the states are
    not used afterwards, so right padding may pass through the layer.
    """
    right_padded = not bool((real[:, 1:] & ~real[:, :-1]).any())
    if bool(real.all()) or (last and right_padded):
        return run(hidden, states)
    counts, device = real.sum(1), hidden.device  # [B], real tokens of each row
    out = torch.zeros_like(hidden)
    for count in sorted(set(counts[counts > 0].tolist())):
        rows = (counts == count).nonzero()[:, 0]  # [n]
        columns = real[rows].nonzero()[:, 1].reshape(len(rows), count).to(device)  # [n, count]
        rows = rows.to(device)
        row_states = states.select(rows)
        # the real tokens alone, in their order: [n, count, E]
        out = out.index_put((rows[:, None], columns), run(hidden[rows[:, None], columns], row_states))
        states.put(rows, row_states, len(hidden))
    return out


def patch_state_layers(model: Any) -> None:
    """Patch recurrent layers to use the states of ``kv`` if it is passed; raise RunError for layers without support."""
    model, patched = inner_model(model), 0
    expected = sum(kind in STATE_KINDS for kind in layer_kinds(model.config))
    if expected and not hasattr(Cache, "get_conv_state"):
        raise RunError(
            f"model {model.config.model_type!r} has {expected} layers of linear attention, whose state transformers "
            f"{__version__} keeps in a separate cache; install a newer one"
        )
    for module in model.modules():
        if "layer_idx" in vars(module) and "cache_params" in signature(type(module).forward).parameters:
            # bound to the module, so that a copy's is bound to the copy
            module.forward = MethodType(_forward_with_kv, module)
            patched += 1
    if patched < expected:
        raise RunError(
            f"model {model.config.model_type!r} has {expected} layers of linear attention, {expected - patched} of "
            "which take no cache_params, so their state cannot be kept; use another model"
        )


def _forward_with_kv(
    self: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    *,
    kv: Any = None,
    **kwargs: Any,
) -> Tensor:
    forward = type(self).forward
    if kv is None:
        out: Tensor = forward(self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
        return out

    def run(hidden: Tensor, states: States) -> Tensor:
        # no mask: ``run_state_layer`` has removed the padding, or no real token follows it
        out: Tensor = forward(self, hidden, cache_params=states, attention_mask=None, **kwargs)
        return out

    carried: Tensor = kv.carry(int(self.layer_idx), hidden_states, run)
    return carried
