"""Layers that carry a state instead of entries (linear attention, Mamba): no policy governs them, their state goes on.

Only a row's own real tokens may move its state. Where rows differ in padding, such a layer therefore runs once for
every number of real tokens, over those rows alone and without their padding.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, __version__

from kvaudit.audit.cache.attention import inner_model
from kvaudit.audit.cache.layers import STATE_KINDS, layer_kinds
from kvaudit.core.errors import RunError

CONVOLUTION, RECURRENT = "convolution", "recurrent"


class States:
    """What one layer hands on for some rows, in the form in which transformers' modules ask a cache for it."""

    def __init__(self, parts: dict[tuple[str, int], Tensor] | None = None) -> None:
        self.parts = {} if parts is None else parts  # [B, ...] each; absent before the first token

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        """The last inputs of the layer's convolution."""
        return self.parts.get((CONVOLUTION, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        """The state proper."""
        return self.parts.get((RECURRENT, state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        """Whether earlier states are kept, for decoding that takes tokens back: never."""
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
        *,
        conv_kernel_size: int,
    ) -> Tensor:
        """Append inputs [B, C, Q]; returns them behind those held."""
        before = self.parts.get((CONVOLUTION, state_idx))
        # zeros stand before the first token; [B, C, kernel] is held on to
        every = conv_states if before is None else torch.cat([before, conv_states], -1)
        missing = max(conv_kernel_size - every.shape[-1], 0)
        self.parts[CONVOLUTION, state_idx] = torch.nn.functional.pad(every, (missing, 0))[..., -conv_kernel_size:]
        return every

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:  # noqa: ARG002
        """Replace the state."""
        self.parts[RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def of(self, rows: Tensor) -> States:
        """A copy of some rows."""
        return States({name: part[rows] for name, part in self.parts.items()})

    def put(self, rows: Tensor, some: States, batch: int) -> None:
        """Take ``some`` as the states of these rows, of ``batch`` in all; no state is one of zeros."""
        for name, part in some.parts.items():
            if name not in self.parts:
                self.parts[name] = part.new_zeros(batch, *part.shape[1:])
            self.parts[name] = self.parts[name].index_copy(0, rows, part)  # a copy: gradients flow through the old one

    def repeated(self, group: int) -> States:
        """Every row ``group`` times, as a copy."""
        return States({name: part.repeat_interleave(group, 0) for name, part in self.parts.items()})

    def with_rows(self, other: States) -> States:
        """These rows and others behind them."""
        return States({name: torch.cat([part, other.parts[name]]) for name, part in self.parts.items()})

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


LayerRun = Callable[
    [Tensor, States], Tensor
]  # a layer over hidden states [B, Q, E] without padding, from its states on


def advance(run: LayerRun, hidden: Tensor, real: Tensor, states: States, *, last: bool = False) -> Tensor:
    """The layer's output [B, Q, E] for ``hidden``, zeros at padding; moves ``states`` by the ``real`` [B, Q] tokens.

    ``real`` is on the CPU. ``last`` says that nobody asks for the states afterwards: padding on the right may follow.
    """
    right = not bool((real[:, 1:] & ~real[:, :-1]).any())  # no real token stands behind padding
    if bool(real.all()) or (last and right):
        return run(hidden, states)
    counts, device = real.sum(1), hidden.device  # [B], real tokens of each row
    out = torch.zeros_like(hidden)
    for count in sorted(set(counts[counts > 0].tolist())):
        rows = (counts == count).nonzero()[:, 0]  # [n]
        columns = real[rows].nonzero()[:, 1].reshape(len(rows), count).to(device)  # [n, count]
        rows = rows.to(device)
        some = states.of(rows)
        # [n, count, E]: real tokens alone, in their order
        out = out.index_put((rows[:, None], columns), run(hidden[rows[:, None], columns], some))
        states.put(rows, some, len(hidden))
    return out


def carry_states(model: Any) -> None:
    """Let the layers that carry a state ask ``kv`` for it, where a forward passes one; others run as before.

    Raises RunError for layers that keep their state in a way of their own.
    """
    model, found = inner_model(model), 0
    wanted = sum(kind in STATE_KINDS for kind in layer_kinds(model.config))
    if wanted and not hasattr(Cache, "get_conv_state"):
        raise RunError(
            f"model {model.config.model_type!r} has {wanted} layers of linear attention, whose state transformers "
            f"{__version__} keeps in a cache of its own; install a newer one"
        )
    for module in model.modules():
        if "layer_idx" in vars(module) and "cache_params" in signature(type(module).forward).parameters:
            module.forward = MethodType(_carried, module)  # bound to the module, so a copy's is bound to the copy
            found += 1
    if found < wanted:
        raise RunError(
            f"model {model.config.model_type!r} has {wanted} layers of linear attention, {wanted - found} of which "
            "take no cache_params: their state cannot be handed on; use another model"
        )


def _carried(
    self: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    *,
    kv: Any = None,
    **kwargs: Any,
) -> Tensor:
    plain = type(self).forward
    if kv is None:
        out: Tensor = plain(self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
        return out

    def run(hidden: Tensor, states: States) -> Tensor:
        # no mask: ``advance`` has taken the padding out, or nothing real follows it
        out: Tensor = plain(self, hidden, cache_params=states, attention_mask=None, **kwargs)
        return out

    carried: Tensor = kv.carry(int(self.layer_idx), hidden_states, run)
    return carried
