"""A model's rotary embedding as rotations that can be added, undone and averaged."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvaudit.audit.cache.attention import AttentionCall, find_decoder
from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.policies import Dense, Policy, evictor_of
from kvaudit.core.errors import RunError

# largest difference between a query and its rotated twin, relative to the largest query: rounding of the model's dtype
TURN_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_ORIGINAL = "original_max_position_embeddings"
_FIXED = ("default", "linear", "llama3", "yarn", "proportional")  # types whose frequencies do not change with length


class Rotary:
    """Rotation of the first 2F channels of a head by ``position * frequency``; channel i is paired with channel i + F.

    Rotations add up, so this can also move vectors that the model has rotated already.
    """

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies  # [F] radians per position

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """Rotate ``x`` [B, H, N, D] by ``by`` positions [B, N]; negative ones undo a rotation."""
        angle = by[:, None, :, None].to(torch.float64) * self._frequencies  # [B, 1, N, F] radians
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        half = len(self._frequencies)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]  # F, F and D - 2F channels
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def pair_lengths(self, x: Tensor) -> Tensor:
        """Return the lengths [..., F] of the channel pairs of ``x`` [..., D]."""
        half = len(self._frequencies)
        return torch.hypot(x[..., :half], x[..., half : 2 * half])

    def mean_turn(self, start: Tensor, steps: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Return the mean rotation matrix of each row over n positions: [B, size, size].

        The positions of a row are its ``start`` [B] plus each of ``steps`` [n].
        """
        angle = (start[:, None] + steps).double()[..., None] * self._frequencies  # [B, n, F] radians
        cos, sin = (torch.diag_embed(part.mean(1)) for part in (angle.cos(), angle.sin()))  # [B, F, F]
        half = len(self._frequencies)
        matrix = torch.eye(size, dtype=torch.float64, device=start.device).repeat(len(start), 1, 1)
        # as in ``turn``: the pair (a, b) becomes (a cos - b sin, b cos + a sin)
        matrix[:, :half, :half] = cos
        matrix[:, half : 2 * half, half : 2 * half] = cos
        matrix[:, :half, half : 2 * half] = -sin
        matrix[:, half : 2 * half, :half] = sin
        return matrix.to(dtype)


def rotary_length_limit(config: Any) -> int | None:
    """Return the largest row length at which rotations do not depend on other rows; None if there is no limit.

    ``dynamic`` and ``longrope`` frequencies change for a whole forward once any position exceeds the original length;
    then the rotation of a row depends on the batch, and changes from step to step.
    """
    text = config.get_text_config(decoder=True).to_dict()
    table = text.get("rope_parameters") or {}
    # one table for all layers, or one per kind of layer
    tables = [part for part in (table, *table.values()) if isinstance(part, dict) and "rope_type" in part]
    limits = [
        part.get(_ORIGINAL) or text.get(_ORIGINAL) or text["max_position_embeddings"]
        for part in tables
        if part["rope_type"] not in _FIXED
    ]
    return min(limits, default=None)


def require_rotary_length(config: Any, tokens: int) -> None:
    """Raise RunError if a row of ``tokens`` tokens exceeds ``rotary_length_limit``."""
    limit = rotary_length_limit(config)
    if limit is not None and tokens > limit:
        raise RunError(
            f"model {config.model_type!r} has rotary positions that beyond {limit} tokens depend on the longest row of "
            f"a forward, so a row of {tokens} tokens cannot be replayed; stay within {limit}"
        )


class _Probe:
    """A ``KVHandler`` that records queries and returns zeros, so that equal tokens stay equal through all layers."""

    def __init__(self) -> None:
        self.queries: dict[int, Tensor] = {}
        self.routes = None

    def attend(self, call: AttentionCall) -> Tensor:
        self.queries[call.layer] = call.query
        return call.value.new_zeros(*call.query.shape[:3], call.value.shape[3])

    def carry(self, layer: int, hidden: Tensor, run: Any) -> Tensor:  # noqa: ARG002
        return torch.zeros_like(hidden)

    def settle(self) -> None:
        """Do nothing, because a probe need not be called by every layer."""


_ROTARIES: WeakKeyDictionary[Any, dict[torch.device, Rotary | None]] = WeakKeyDictionary()  # by model and device


def find_rotary(model: Any, policy: Policy) -> Rotary | None:
    """Return a model's rotary embedding if the policy needs it, else None.

    Raises RunError unless it rotates a head's first channels by fixed frequencies, in every layer that a policy
    governs.
    """
    evictor = evictor_of(policy)
    if not evictor.needs_rotary:
        return None
    device = next(model.parameters()).device
    rotaries = _ROTARIES.setdefault(model, {})
    if device not in rotaries:  # the model may have moved to another device
        rotaries[device] = _probe_rotary(model)
    rotary = rotaries[device]
    if rotary is None:
        raise RunError(
            f"policy {evictor.name} needs rotary positions of fixed frequencies, on a head's first channels, "
            f"in every full-attention layer, which {model.config.model_type!r} does not have; use another policy"
        )
    return rotary


def _probe_rotary(model: Any) -> Rotary | None:
    module = next((m for name, m in find_decoder(model).named_modules() if name.endswith("rotary_emb")), None)
    buffers = {} if module is None else dict(module.named_buffers())
    frequencies = buffers.get("full_attention_inv_freq", buffers.get("inv_freq"))
    table = model.config.get_text_config(decoder=True).to_dict().get("rope_parameters") or {}
    table = table.get("full_attention", table)  # some models have a table per kind of layer
    if not isinstance(frequencies, Tensor) or table.get("rope_type", "default") not in _FIXED:
        return None
    rotary = Rotary(frequencies.double())
    return rotary if _matches_model(model, rotary) else None


@torch.no_grad()
def _matches_model(model: Any, rotary: Rotary) -> bool:
    """Return whether ``rotary`` rotates queries as the model does, in every layer that a policy governs.

    A query that ``rotary`` turns by five positions is compared with the model's query five positions later.
    """
    probe, device = _Probe(), next(model.parameters()).device
    # one token twice, at positions 3 and 8
    ids, positions = torch.ones(1, 2, dtype=torch.int64, device=device), torch.tensor([[3, 8]], device=device)
    find_decoder(model)(input_ids=ids, position_ids=positions, use_cache=False, kv=probe)
    for layer, plan in enumerate(layer_plans(model.config, Dense())):
        if plan.is_governed:
            query = probe.queries[layer].double()  # [1, G*H, 2, D]
            expected = rotary.turn(query[:, :, :1], torch.tensor([[5]], device=device))
            error = (query[:, :, 1:] - expected).abs().amax()
            if float(error) > TURN_ROUNDING[model.dtype] * float(query.abs().amax()):
                return False
    return True
