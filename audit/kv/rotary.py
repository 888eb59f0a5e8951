"""A model's rotary positions as rotations that can be added, taken back and averaged."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from audit.errors import RunError
from audit.policies import Policy

_FIXED = ("default", "linear", "llama3", "yarn", "proportional")  # frequencies that do not change with length


def rotary_for(model: Any, policy: Policy) -> Rotary | None:
    """The model's rotation where the policy asks for it; RunError where the model's is of another kind."""
    return Rotary.of(model, policy.evictor.name) if policy.evictor.needs_rotary else None


class Rotary:
    """Rotation of the first 2F channels of a head by ``position * frequency``, channel i paired with channel i + F.

    Rotations add up, so they apply to vectors that the model has rotated already. Work is done in ``dtype``.
    """

    def __init__(self, frequencies: Tensor) -> None:
        self._frequencies = frequencies  # [F] radians per position

    @classmethod
    def of(cls, model: Any, asked_by: str) -> Rotary:
        """The rotation of a model's full-attention layers; RunError where its positions are not of this kind."""
        decoder = model.get_decoder()
        table = next((m for name, m in decoder.named_modules() if name.endswith("rotary_emb")), None)
        buffers = {} if table is None else dict(table.named_buffers())
        frequencies = buffers.get("full_attention_inv_freq", buffers.get("inv_freq"))
        rotary = cls(frequencies.double()) if isinstance(frequencies, Tensor) else None
        if rotary is None or not (_is_fixed(model.config) and rotary._agrees(decoder)):
            raise RunError(
                f"policy {asked_by} needs rotary positions of fixed frequencies, which {model.config.model_type!r} "
                "does not have; use another policy"
            )
        return rotary

    def _agrees(self, decoder: Any) -> bool:
        """Whether the model's own function turns a vector as ``turn`` does."""
        own = getattr(sys.modules[type(decoder).__module__], "apply_rotary_pos_emb", None)
        if own is None:
            return False
        size = 2 * len(self._frequencies)
        probe = torch.linspace(-1, 1, size, dtype=torch.float64, device=self._frequencies.device)[None, None, None]
        angle = (5 * self._frequencies).repeat(2)[None, None]
        turned, _ = own(probe, probe, angle.cos(), angle.sin())
        return bool(torch.allclose(turned, self.turn(probe, torch.tensor([[5]], device=probe.device)), atol=1e-9))

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """``x`` [B, H, N, D] turned by ``by`` positions [B, N] (integers, negative takes a rotation back)."""
        angle = (by[:, None, :, None].to(torch.float64) * self._frequencies).to(torch.float64)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        half = len(self._frequencies)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def mean_turn(self, start: Tensor, count: int, size: int, dtype: torch.dtype) -> Tensor:
        """Mean rotation matrix [B, size, size] over positions start .. start + count - 1, for start [B]."""
        steps = torch.arange(count, device=start.device)
        angle = (start[:, None] + steps).double()[..., None] * self._frequencies
        cos, sin = angle.cos().mean(1), angle.sin().mean(1)  # [B, F]
        half = len(self._frequencies)
        matrix = torch.eye(size, dtype=torch.float64, device=start.device).repeat(len(start), 1, 1)
        matrix[:, :half, :half], matrix[:, half : 2 * half, half : 2 * half] = (
            torch.diag_embed(cos),
            torch.diag_embed(cos),
        )
        matrix[:, :half, half : 2 * half] = -torch.diag_embed(sin)
        matrix[:, half : 2 * half, :half] = torch.diag_embed(sin)
        return matrix.to(dtype)


def _is_fixed(config: Any) -> bool:
    table = config.get_text_config(decoder=True).to_dict().get("rope_parameters") or {}
    table = table.get("full_attention", table)
    return table.get("rope_type", "default") in _FIXED
