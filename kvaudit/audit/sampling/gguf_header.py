"""Hold the header of a GGUF file to the bytes that are there, before a library believes its counts.

Layout: magic, version, number of tensors, number of key-value pairs; the pairs; name, shape, type and offset of each
tensor (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Nothing is built from it here.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from kvaudit.core.errors import DataError

MOST_PAIRS = MOST_TENSORS = 1 << 16
MOST_DIMENSIONS = 8
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type of value
_STRING, _ARRAY = 8, 9


class _Cursor:
    """A place in a file; every step is checked against its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def skip(self, size: int) -> int:
        """Step over ``size`` bytes and return where they begin; raises ValueError beyond the end."""
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, its header asks for {self._at}")
        return start

    def number(self, form: str) -> int:
        """The next whole number, in a form of ``struct``."""
        value: int = struct.unpack_from(form, self._data, self.skip(struct.calcsize(form)))[0]
        return value

    def text(self) -> None:
        self.skip(self.number("<Q"))

    def values(self, kind: int, count: int) -> None:
        """Step over ``count`` values of a type."""
        if kind == _STRING:
            # a text takes bytes for its length alone, so more texts than bytes are a lie that would loop for long
            if count > len(self._data):
                raise ValueError(f"it names {count} texts in {len(self._data)} bytes")
            for _ in range(count):
                self.text()
        elif kind in _WIDTHS:
            self.skip(_WIDTHS[kind] * count)
        else:
            raise ValueError(f"it holds values of type {kind}")


def check_gguf(path: Path) -> None:
    """Raise DataError where a GGUF file's header does not fit the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _walk(_Cursor(data), data[:4])
    except (OSError, ValueError) as error:
        raise DataError(f"model file {str(path)!r} is no usable GGUF file: {error}; copy it again") from None


def _walk(cursor: _Cursor, magic: bytes) -> None:
    cursor.skip(4)
    if magic != b"GGUF":
        raise ValueError(f"it begins with {magic!r}")
    if (version := cursor.number("<I")) not in (2, 3):
        raise ValueError(f"it has version {version}, wanted 2 or 3")
    # counts from a stranger's file: bounded before anything loops over them
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    if tensors > MOST_TENSORS or pairs > MOST_PAIRS:
        raise ValueError(f"it names {tensors} tensors and {pairs} keys, at most {MOST_TENSORS} each are read")
    for _ in range(pairs):
        cursor.text()
        kind, count = cursor.number("<I"), 1
        if kind == _ARRAY:
            kind, count = cursor.number("<I"), cursor.number("<Q")  # of the elements
        cursor.values(kind, count)
    for _ in range(tensors):
        cursor.text()
        if (dimensions := cursor.number("<I")) > MOST_DIMENSIONS:
            raise ValueError(f"it holds a tensor of {dimensions} dimensions")
        cursor.skip(8 * dimensions + 4 + 8)  # sizes, the type, and where the tensor begins
