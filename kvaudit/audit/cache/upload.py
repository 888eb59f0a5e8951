"""What the host hands to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on a device, without waiting until it has done all that was asked of it before.

    CUDA has read ordinary memory before this returns; of other devices that is not known.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")
