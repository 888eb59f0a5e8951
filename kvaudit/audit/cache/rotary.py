"""A model's rotary positions as rotations that can be added, taken back and averaged."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall, find_decoder
from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.policies import Dense, Policy, evictor_of
from kvaudit.core.errors import RunError

# how far a query may be from its turned twin, relative to the largest: rounding of the model's dtype
TURN_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_ORIGINAL = "original_max_position_embeddings"
_FIXED = ("default", "linear", "llama3", "yarn", "proportional")  # frequencies that do not change with length


class Rotary:
    """Rotation of the first 2F channels of a head by ``position * frequency``, channel i paired with channel i + F.

    Rotations add up, so they apply to vectors that the model has rotated already. Work is done in ``dtype``.
    """

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies  # [F] radians per position

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """``x`` [B, H, N, D] turned by ``by`` positions [B, N] (integers, negative takes a rotation back)."""
        angle = by[:, None, :, None].to(torch.float64) * self._frequencies  # [B, 1, N, F] radians
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        half = len(self._frequencies)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]  # F, F and D - 2F channels
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def moduli(self, x: Tensor) -> Tensor:
        """Lengths [..., F] of the channel pairs that turn together, of ``x`` [..., D]."""
        half = len(self._frequencies)
        return torch.hypot(x[..., :half], x[..., half : 2 * half])

    def mean_turn(self, start: Tensor, steps: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Mean rotation matrix [B, size, size] over positions start + steps, for start [B] and steps [n]."""
        angle = (start[:, None] + steps).double()[..., None] * self._frequencies  # [B, n, F] radians
        cos, sin = angle.cos().mean(1), angle.sin().mean(1)  # [B, F]
        half = len(self._frequencies)
        matrix = torch.eye(size, dtype=torch.float64, device=start.device).repeat(len(start), 1, 1)
        # as in ``turn``: the pair (a, b) becomes (a cos - b sin, b cos + a sin)
        matrix[:, :half, :half], matrix[:, half : 2 * half, half : 2 * half] = (
            torch.diag_embed(cos),
            torch.diag_embed(cos),
        )
        matrix[:, :half, half : 2 * half] = -torch.diag_embed(sin)
        matrix[:, half : 2 * half, :half] = torch.diag_embed(sin)
        return matrix.to(dtype)


def _is_fixed(config: Any) -> bool:
    table = config.get_text_config(decoder=True).to_dict().get("rope_parameters") or {}
    table = table.get("full_attention", table)  # some models have a table per kind of layer
    return table.get("rope_type", "default") in _FIXED


def rotary_length_limit(config: Any) -> int | None:
    """How long a row may be before its turns depend on the longest row of a forward; None for any length.

    ``dynamic`` and ``longrope`` frequencies change for a whole forward once a position exceeds the original length:
    then neither the rows of a batch nor the steps of one row are turned alike.
    """
    text = config.get_text_config(decoder=True).to_dict()
    table = text.get("rope_parameters") or {}
    # one table for all layers, or one for each kind of them
    parts = [part for part in (table, *table.values()) if isinstance(part, dict) and "rope_type" in part]
    limits = [
        part.get(_ORIGINAL) or text.get(_ORIGINAL) or text["max_position_embeddings"]
        for part in parts
        if part["rope_type"] not in _FIXED
    ]
    return min(limits, default=None)


def require_rotary_length(config: Any, tokens: int) -> None:
    """Raise RunError for rows of ``tokens`` tokens beyond ``rotary_length_limit``."""
    most = rotary_length_limit(config)
    if most is not None and tokens > most:
        raise RunError(
            f"model {config.model_type!r} has rotary positions that beyond {most} tokens depend on the longest row of "
            f"a forward, so a row of {tokens} tokens cannot be replayed; stay within {most}"
        )


class _Probe:
    """Notes every layer's queries and gives no attention, so that equal tokens stay equal through all layers."""

    def __init__(self) -> None:
        self.queries: dict[int, Tensor] = {}
        self.routes = None

    def attend(self, call: AttentionCall) -> Tensor:
        self.queries[call.layer] = call.query
        return call.value.new_zeros(*call.query.shape[:3], call.value.shape[3])

    def carry(self, layer: int, hidden: Tensor, run: Any) -> Tensor:  # noqa: ARG002
        return torch.zeros_like(hidden)

    def settle(self) -> None:
        """Nothing is owed: layers that did not ask have no queries."""


def find_rotary(model: Any, policy: Policy) -> Rotary | None:
    """The rotation of a model's full-attention layers, where the policy asks for it.

    RunError where the model has none, or where some governed layer is seen not to turn its queries so.
    """
    evictor = evictor_of(policy)
    if not evictor.needs_rotary:
        return None
    device = next(model.parameters()).device
    known = _KNOWN.setdefault(model, {})
    if device not in known:  # a model may have moved since it was asked
        known[device] = _of(model)
    rotary = known[device]
    if rotary is None:
        raise RunError(
            f"policy {evictor.name} needs rotary positions of fixed frequencies, on a head's first channels, "
            f"in every full-attention layer, which {model.config.model_type!r} does not have; use another policy"
        )
    return rotary


_KNOWN: WeakKeyDictionary[Any, dict[torch.device, Rotary | None]] = WeakKeyDictionary()  # one probe per model and place


def _of(model: Any) -> Rotary | None:
    table = next((m for name, m in find_decoder(model).named_modules() if name.endswith("rotary_emb")), None)
    buffers = {} if table is None else dict(table.named_buffers())
    frequencies = buffers.get("full_attention_inv_freq", buffers.get("inv_freq"))
    if not isinstance(frequencies, Tensor) or not _is_fixed(model.config):
        return None
    rotary = Rotary(frequencies.double())
    return rotary if _turns_so(model, rotary) else None


@torch.no_grad()
def _turns_so(model: Any, rotary: Rotary) -> bool:
    """Whether the same token, five positions on, has the same query in every governed layer, turned by five."""
    probe, device = _Probe(), next(model.parameters()).device
    # one token twice, at positions 3 and 8
    ids, positions = torch.ones(1, 2, dtype=torch.int64, device=device), torch.tensor([[3, 8]], device=device)
    find_decoder(model)(input_ids=ids, position_ids=positions, use_cache=False, kv=probe)
    plans = layer_plans(model.config, Dense())
    for layer, plan in enumerate(plans):
        if plan.is_governed:
            query = probe.queries[layer].double()  # [1, G*H, 2, D]
            expected = rotary.turn(query[:, :, :1], torch.tensor([[5]], device=device))
            worst = (query[:, :, 1:] - expected).abs().amax()
            if float(worst) > TURN_ROUNDING[model.dtype] * float(query.abs().amax()):
                return False
    return True
