"""The public data files of ``catalogue.yaml``: URL, licence and digest of each.

A URL is pinned to a commit. The digest is that of the rows that suites read, after the cut to the first rows, if any.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import yaml

from kvaudit.core.errors import DataError, UnknownName

ADDRESS = "https://raw.githubusercontent.com"


class PublicFile(NamedTuple):
    """A file in the data folder; ``first`` is the number of its leading lines that are kept, None for all.

    ``git_blob`` is the id that git gives a whole file, for files of which no sha256 was ever published or computed.
    """

    path: str
    upstream: str  # its path in the repository
    sha256: str = ""
    first: int | None = None
    git_blob: str = ""

    def mismatch(self, rows: bytes) -> str:
        """Return "sha256 1a2b..., expected 3c4d..." if these are not the catalogue's rows, else an empty text."""
        kind, wanted, digest = "sha256", self.sha256, hashlib.sha256(rows)
        if self.git_blob:
            kind, wanted = "git blob id", self.git_blob
            digest = hashlib.sha1(b"blob %d\0%s" % (len(rows), rows), usedforsecurity=False)
        found = digest.hexdigest()
        return "" if found == wanted else f"{kind} {found[:12]}, expected {wanted[:12]}"


@dataclass(frozen=True)
class PublicRows:
    """Files that are fetched together, and the ``suites`` that read them; ``rows`` is their number, in words."""

    name: str
    suites: tuple[str, ...]
    rows: str
    licence: str
    repo: str
    commit: str
    files: tuple[PublicFile, ...]

    @property
    def source_url(self) -> str:
        """The repository and its abbreviated commit."""
        return f"github.com/{self.repo}@{self.commit[:7]}"

    def address(self, file: PublicFile, base: str = ADDRESS) -> str:
        """Return the URL of a file; ``base`` may be a mirror with the same paths."""
        return f"{base.rstrip('/')}/{self.repo}/{self.commit}/{quote(file.upstream)}"

    def missing_files(self, folder: Path) -> list[PublicFile]:
        """Return the files that are missing in ``folder``."""
        return [file for file in self.files if not (folder / file.path).is_file()]

    def changed_files(self, folder: Path) -> list[PublicFile]:
        """Return the files in ``folder`` whose digest differs from the catalogue's."""
        present = [file for file in self.files if (folder / file.path).is_file()]
        return [file for file in present if file.mismatch((folder / file.path).read_bytes())]


@cache
def catalogue() -> tuple[PublicRows, ...]:
    """Read all entries, in the order of the file."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for row in table.values():
        row["suites"] = tuple(row["suites"])
        row["files"] = tuple(PublicFile(path, **fields) for path, fields in row["files"].items())
    return tuple(PublicRows(name, **row) for name, row in table.items())


def check_rows(file: PublicFile, raw: bytes) -> bytes:
    """Return the rows of a downloaded file; raises DataError if their digest is not the catalogue's."""
    rows = raw if file.first is None else b"".join(raw.splitlines(keepends=True)[: file.first])
    if mismatch := file.mismatch(rows):
        raise DataError(
            f"the download of {file.path} has {mismatch}: it is a different file, was cut off or changed on the way; "
            "nothing of it is kept"
        )
    return rows


def find_rows(name: str) -> PublicRows:
    """Return the entry called ``name``; raises UnknownName."""
    entries = {entry.name: entry for entry in catalogue()}
    if name not in entries:
        raise UnknownName("public rows", name, entries)
    return entries[name]


def find_rows_by_file(path: str) -> PublicRows | None:
    """Return the entry that holds the file at ``path`` in the data folder; None if it cannot be fetched."""
    return next((entry for entry in catalogue() if any(file.path == path for file in entry.files)), None)
