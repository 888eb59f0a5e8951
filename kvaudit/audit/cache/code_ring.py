"""The exact entries of a quantised store while its steps have fixed shapes: in rings, by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.codes import encode_tokens, pack
from kvaudit.audit.cache.fusion import fusable
from kvaudit.audit.cache.hints import HINT_BATCH, HINTED_DTYPES
from kvaudit.audit.cache.tensors import gather_columns
from kvaudit.audit.policies import Quantiser


class StepCoding(NamedTuple):
    """What a step reads as codes and what it codes, for keys and for values: int64 [B] each.

    ``done``: entries at positions below are codes when the step's queries attend. ``leaving``: the position that
    becomes a code in this step (-1 = none). ``hint`` [1]: the place of this step among those whose hints are examined
    together.
    """

    done: tuple[Tensor, Tensor]
    leaving: tuple[Tensor, Tensor]
    hint: Tensor


class ExactRing:
    """Keys or values [B, H, R + 1, D]: the entry at position p is in column p % R; the last column is never read."""

    def __init__(self, like: Tensor, size: int) -> None:
        batch, heads, _, width = like.shape
        self.size = size
        self.columns = like.new_zeros(batch, heads, size + 1, width)

    @property
    def entries(self) -> Tensor:
        """The columns that are read, [B, H, R, D]."""
        return self.columns[:, :, : self.size]

    def fill(self, tail: Tensor, positions: Tensor, done: Tensor) -> None:
        """Take over the entries of ``tail`` [B, H, T, D] at ``positions`` [B, T] from ``done`` [B] on."""
        places = torch.where(positions >= done[:, None], positions % self.size, self.size)
        self.columns.scatter_(2, _spread(places, self.columns), tail)

    def write(self, entry: Tensor, positions: Tensor) -> None:
        """Write one entry per row [B, H, 1, D] at ``positions`` [B, 1], -1 for none."""
        places = torch.where(positions >= 0, positions % self.size, self.size)
        self.columns.scatter_(2, _spread(places, self.columns), entry)

    def at(self, positions: Tensor) -> Tensor:
        """Return the entries [B, H, n, D] at ``positions`` [B, n]; anything for those that it does not hold."""
        return gather_columns(self.columns, positions.clamp(min=0).long() % self.size)


def _spread(places: Tensor, columns: Tensor) -> Tensor:
    """Return places [B, n] as an index for ``scatter_`` into columns [B, H, R, D]."""
    return places.long()[:, None, :, None].expand(-1, columns.shape[1], -1, columns.shape[3])


@fusable
def code_entries(
    codec: Quantiser,
    part: int,
    ring: ExactRing,
    leaving: Tensor,
    slots: Tensor,
    codes: Tensor,
    parameters: Tensor | None,
    fixed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn the entry at position ``leaving`` [B] (-1 = none) of each row into codes, in slot ``slots`` [B].

    ``codes`` [B, H, C, W] and ``parameters`` [B, H, C, n * P] are written; with ``fixed`` scales [H] there are none of
    the latter. Returns what was coded: the entries [B, H, 1, D], their codes and their parameters [B, H, 1, n, P].
    """
    rows = torch.arange(len(slots), device=slots.device)
    exact = codec.turned(ring.columns[rows, :, leaving.clamp(min=0) % ring.size], part)[:, :, None]
    new, fitted = encode_tokens(exact, codec, fixed)
    leaves = (leaving >= 0)[:, None, None]
    codes[rows, :, slots] = torch.where(leaves, pack(new, codec.bits)[:, :, 0], codes[rows, :, slots])
    if parameters is not None:
        flat = fitted.flatten(-2)[:, :, 0]
        parameters[rows, :, slots] = torch.where(leaves, flat, parameters[rows, :, slots])
    return exact, new, fitted


class PendingHints:
    """Entries that steps have coded and whose hints are still to be examined: for keys or values of one store.

    Empty for dtypes without hints.
    """

    def __init__(self, entry: Tensor, parameters: Sequence[int]) -> None:
        batch, heads, _, width = entry.shape
        self._tensors: tuple[Tensor, ...] = ()
        if entry.dtype in HINTED_DTYPES:
            x = entry.new_zeros(batch, heads, HINT_BATCH, width)
            self._tensors = (x, x.to(torch.uint8), entry.new_zeros(batch, heads, HINT_BATCH, *parameters))

    def write(self, place: Tensor, x: Tensor, codes: Tensor, parameters: Tensor) -> None:
        """Write one entry of every row [B, H, 1, ...], its codes and parameters at ``place`` [1]."""
        for tensor, new in zip(self._tensors, (x, codes, parameters), strict=False):
            tensor.index_copy_(2, place, new)

    def first(self, count: int) -> tuple[Tensor, ...]:
        """Return copies of the first ``count`` entries, codes and parameters; () for dtypes without hints."""
        return tuple(tensor[:, :, :count].clone() for tensor in self._tensors)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors."""
        yield from self._tensors
