"""Gather entries by index, copy tensors to a device without waiting, and mark functions for torch.compile to fuse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor


def gather_columns(table: Tensor, order: Tensor) -> Tensor:
    """Return the entries of ``table`` [B, H, C, ...] at indices ``order`` [B, K], the same in every head."""
    return gather_entries(table, order[:, None].expand(-1, table.shape[1], -1))


def gather_entries(table: Tensor, indices: Tensor) -> Tensor:
    """Return the entries of ``table`` [B, H, C, ...] at ``indices`` [B, H, K] of its third dimension: [B, H, K, ...].

    Each entry is copied in one piece; ``torch.gather`` goes element by element. Raises IndexError for an index out of
    range on a CPU; on other devices the check would have to wait for the device.
    """
    batch, heads, size = table.shape[:3]
    if table.device.type == "cpu" and indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        # such an index would read an entry of another head
        raise IndexError(f"indices {int(indices.min())} to {int(indices.max())} are out of range of {size} entries")
    # offset of each head [B, H, 1], once batch, heads and entries are one dimension
    offsets = torch.arange(batch * heads, device=table.device).view(batch, heads, 1) * size
    return table.flatten(0, 2).index_select(0, (indices + offsets).flatten()).view(*indices.shape, *table.shape[3:])


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to ``device`` without waiting for the work queued there.

    Only CUDA copies asynchronously. Even then, ordinary (not pinned) memory has been read when the call returns, so the
    caller may change it.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Switch(threading.local):
    """Whether this thread is inside ``fusing``, so that ``fusable`` functions run compiled."""

    on = False


_switch = _Switch()


def is_fusing() -> bool:
    """Return whether this thread is inside ``fusing``."""
    return _switch.on


def fusable(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Mark a function of tensors that ``fusing`` may replace by its compiled form, equal up to rounding."""
    compiled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not _switch.on:
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        result: Result = compiled[0](*args, **kwargs)
        return result

    return call


@contextmanager
def fusing() -> Iterator[None]:
    """Use the compiled form of ``fusable`` functions inside the context, in this thread only."""
    before, _switch.on = _switch.on, True
    try:
        yield
    finally:
        _switch.on = before
