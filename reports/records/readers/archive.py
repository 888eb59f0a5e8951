"""A hostile zip of JSON, read without unpacking to disk and within limits, whatever its directory declares."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from audit.core.errors import DataError
from audit.core.yaml_file import one_line

LARGEST_MEMBER = 64 * 2**20  # bytes of JSON in one member
LARGEST_TOTAL = 256 * 2**20  # bytes that any zip may unpack to; beyond it, at most ``LARGEST_RATIO`` times its size
LARGEST_RATIO = 400
MOST_MEMBERS = 2_000_000
ZSTANDARD, ENCRYPTED = 93, 0x1  # a method and a flag of the zip format
PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what Python unpacks no further than it is asked to
_LOCAL_HEADER = 30  # bytes before the name of a member
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, NotImplementedError),
    *(MemoryError, OverflowError, RuntimeError),
)


class MissingPackage(DataError):
    """The zip can only be read with a package that is not there."""


class Archive:
    """An open zip. Raises DataError for a file that is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = zipfile.ZipFile(path)
        except _DAMAGED as error:
            raise DataError(f"{str(path)!r} cannot be read as a zip ({error}); copy the file again") from None
        self._members = {info.filename: info for info in self._file.infolist()}  # one written again replaces the first
        self._left = max(LARGEST_TOTAL, LARGEST_RATIO * path.stat().st_size)
        if len(self._members) > MOST_MEMBERS:
            raise DataError(f"{str(path)!r} has {len(self._members)} members; at most {MOST_MEMBERS} are read")

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._members))

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def json(self, name: str) -> dict[str, Any]:
        """A member's JSON object; raises DataError for one that is damaged, encrypted, too long or something else."""
        info = self._members[name]
        if info.flag_bits & ENCRYPTED:
            raise DataError("the member is encrypted")
        if info.compress_type not in (*PLAIN, ZSTANDARD):
            raise DataError(f"the member is packed by method {info.compress_type}; deflate, Zstandard or none are read")
        raw = self._zstandard(info) if info.compress_type == ZSTANDARD else self._plain(info)
        if len(raw) > LARGEST_MEMBER:
            raise DataError(f"the member unpacks to more than {LARGEST_MEMBER >> 20} MB")
        self._left -= len(raw)
        if self._left < 0:
            raise TooLarge(f"{str(self.path)!r} unpacks to more than {LARGEST_RATIO} times its size; it is no log")
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON ({one_line(error)})") from None
        if not isinstance(value, dict):
            raise DataError("not a JSON object")
        return value

    def _plain(self, info: zipfile.ZipInfo) -> bytes:
        try:
            with self._file.open(info) as stream:
                return stream.read(LARGEST_MEMBER + 1)
        except _DAMAGED as error:
            raise DataError(f"the member is damaged ({error})") from None

    def _zstandard(self, info: zipfile.ZipInfo) -> bytes:
        """Python's zipfile knows the method from 3.14 on; the package serves every version."""
        try:
            import zstandard
        except ImportError:
            text = f"{str(self.path)!r} is compressed with Zstandard; install the package: pip install zstandard"
            raise MissingPackage(text) from None
        reader = zstandard.ZstdDecompressor(max_window_size=LARGEST_MEMBER).stream_reader(
            io.BytesIO(self._compressed(info)), read_across_frames=True
        )
        try:
            return bytes(reader.read(LARGEST_MEMBER + 1))
        except (zstandard.ZstdError, MemoryError) as error:
            raise DataError(f"the member is damaged ({error})") from None

    def _compressed(self, info: zipfile.ZipInfo) -> bytes:
        with self.path.open("rb") as handle:
            size = handle.seek(0, io.SEEK_END)
            if not 0 <= info.header_offset <= size - _LOCAL_HEADER:
                raise DataError("the member is damaged (no local header)")
            handle.seek(info.header_offset)
            local = handle.read(_LOCAL_HEADER)
            lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            handle.seek(lengths, io.SEEK_CUR)
            return handle.read(min(max(0, info.compress_size), size))


class TooLarge(DataError):
    """The zip unpacks to more than any log would."""
