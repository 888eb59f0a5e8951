"""What llama.cpp's cache holds of a sequence, out of the state that the library saves: what its queries read.

The state of ``llama_state_seq_get_data`` of llama.cpp of 2026-11 (llama-cpp-python 0.3.36), little-endian:

    u32 magic, i32 sequence, u32 streams, then for each stream:
      u32 cells (0: nothing follows), for each cell: i32 position, u32 sequences, i32 each of them
      u32 whether values lie transposed, u32 layers
      keys of each layer: i32 type, u64 bytes of a row, rows; then values of each layer alike

Values that lie transposed have u32 bytes of a number and u32 channels in place of the bytes of a row.

Before it codes them it turns parts of a head by a Hadamard matrix: of keys the largest power of two in its size, of
values 64 numbers, and nothing where the size is no multiple of 64 (found by solving for the matrix, sizes 64 to 256).
Heads whose neighbouring numbers turn together by position are stored so.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.policies.q4_0 import hadamard
from kvaudit.core.errors import RunError

_MAGIC = 0xAF143CD8
_PART = 64  # numbers that are turned together, of keys the fewest


class HeadLayout(NamedTuple):
    """How the engine holds a head: its size, whether neighbours turn together, what is turned before it is coded."""

    size: int
    in_pairs: bool
    keys_turned: bool
    values_turned: bool


def read_state(raw: Any, layout: HeadLayout) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, L, H * D] float32 as a model of transformers has them, of the uint8 array ``raw``.

    Raises RunError for a state of another form.
    """
    try:
        return _State(raw).read(layout)
    except (struct.error, ValueError) as error:
        raise _unknown(str(error)) from None


class _State:
    """A state that is read from its beginning on."""

    def __init__(self, raw: Any) -> None:
        self._raw, self._at = raw, 0

    def read(self, layout: HeadLayout) -> tuple[Tensor, Tensor]:
        magic, _, streams = self._take("IiI")
        if magic != _MAGIC:
            raise ValueError(f"it begins with {magic:#x}, known: {_MAGIC:#x}")
        cells = 0
        while streams and not cells:
            (cells,), streams = self._take("I"), streams - 1
        positions = [self._position() for _ in range(cells)]
        if sorted(positions) != list(range(cells)):
            raise ValueError("its cells are not those of the tokens, each once")
        # cells that others left are taken first, so they are in any order
        order = torch.tensor(positions).argsort()
        transposed, layers = self._take("II")
        size = layout.size
        turned = size % _PART == 0
        # the largest power of two in a head's size
        keys = [_turned(self._rows(cells), size & -size if turned and layout.keys_turned else 1) for _ in range(layers)]
        if layout.in_pairs:
            keys = [_halves(part, size) for part in keys]
        rows = self._columns if transposed else self._rows
        values = [_turned(rows(cells), _PART if turned and layout.values_turned else 1) for _ in range(layers)]
        if self._raw[self._at :].any():
            raise ValueError(f"{len(self._raw) - self._at} bytes are left")
        return torch.stack(keys, 1)[order], torch.stack(values, 1)[order]

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._raw, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _position(self) -> int:
        position, sequences = self._take("iI")
        self._at += 4 * sequences
        return int(position)

    def _rows(self, cells: int) -> Tensor:
        """Numbers [cells, H * D] of a layer."""
        kind, width = self._take("iQ")
        return self._numbers(kind, cells, width)

    def _columns(self, cells: int) -> Tensor:
        """The same of one that lies transposed."""
        kind, width, channels = self._take("iII")
        return self._numbers(kind, channels, cells * width).T

    def _numbers(self, kind: int, rows: int, width: int) -> Tensor:
        import gguf

        coded = self._raw[self._at : self._at + rows * width].reshape(rows, width)
        self._at += rows * width
        return torch.from_numpy(gguf.quants.dequantize(coded, gguf.GGMLQuantizationType(kind))).float()


def _turned(x: Tensor, part: int) -> Tensor:
    """Rows [tokens, H * D] of which every ``part`` numbers are turned back."""
    return (x.reshape(len(x), -1, part) @ hadamard(part, x.dtype, x.device)).flatten(1)


def _halves(x: Tensor, size: int) -> Tensor:
    """Rows [tokens, H * D] of heads whose pairs are taken apart into halves."""
    return x.reshape(len(x), -1, size // 2, 2).transpose(2, 3).flatten(1)


def _unknown(why: str) -> RunError:
    return RunError(
        f"the state of llama.cpp's cache is of a form that is not known: {why}; draw with naive, tis or mis"
    )
