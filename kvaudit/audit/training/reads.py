"""What the host asks a device for: each read waits until all that was asked of it is done, so they are few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def read_together(values: Sequence[Tensor | float]) -> list[float]:
    """Tensors of one number each as numbers, by one read; what is a number stays one. They lie on one device."""
    import torch

    there = [value for value in values if isinstance(value, torch.Tensor)]
    # in double, which holds every float and every count as it is
    read = iter(torch.stack([value.detach().double() for value in there]).tolist() if there else [])
    return [next(read) if isinstance(value, torch.Tensor) else value for value in values]
