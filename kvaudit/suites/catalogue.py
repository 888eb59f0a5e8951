"""The public rows of ``catalogue.yaml``: where each file lies, under which licence, and the sha256 that holds it.

An address is pinned to a commit, so it cannot change; the hash is of the rows as suites read them, after the cut where
only the first rows of a file are asked.
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
    """A file below the folder of public rows. ``first``: only so many of its lines, None for all of them."""

    path: str
    upstream: str  # its path in the repository
    sha256: str
    first: int | None = None


@dataclass(frozen=True)
class PublicRows:
    """Rows that are fetched together; ``suites`` read them. ``rows`` says how many there are, in words."""

    name: str
    suites: tuple[str, ...]
    rows: str
    licence: str
    repo: str
    commit: str
    files: tuple[PublicFile, ...]

    @property
    def source_url(self) -> str:
        """The repository and the beginning of its commit."""
        return f"github.com/{self.repo}@{self.commit[:7]}"

    def address(self, file: PublicFile, base: str = ADDRESS) -> str:
        """Where a file lies; ``base`` is another place with the same paths."""
        return f"{base.rstrip('/')}/{self.repo}/{self.commit}/{quote(file.upstream)}"

    def missing_files(self, folder: Path) -> list[PublicFile]:
        """The files that a folder does not hold."""
        return [file for file in self.files if not (folder / file.path).is_file()]

    def other(self, folder: Path) -> list[PublicFile]:
        """The files that a folder holds with other rows than these."""
        there = [file for file in self.files if (folder / file.path).is_file()]
        return [f for f in there if hashlib.sha256((folder / f.path).read_bytes()).hexdigest() != f.sha256]


@cache
def catalogue() -> tuple[PublicRows, ...]:
    """All of them, in the order of the file."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for row in table.values():
        row["suites"] = tuple(row["suites"])
        row["files"] = tuple(PublicFile(path, **about) for path, about in row["files"].items())
    return tuple(PublicRows(name, **row) for name, row in table.items())


def check_rows(file: PublicFile, raw: bytes) -> bytes:
    """The rows of a file as it was fetched; raises DataError where they are not those that were named."""
    rows = raw if file.first is None else b"".join(raw.splitlines(keepends=True)[: file.first])
    found = hashlib.sha256(rows).hexdigest()
    if found != file.sha256:
        raise DataError(
            f"what was fetched for {file.path} has sha256 {found[:12]}, wanted {file.sha256[:12]}: it is another file, "
            "or was changed on the way; nothing of it is kept"
        )
    return rows


def find_rows(name: str) -> PublicRows:
    """The rows of this name; raises UnknownName."""
    found = {one.name: one for one in catalogue()}
    if name not in found:
        raise UnknownName("public rows", name, found)
    return found[name]


def find_rows_by_file(path: str) -> PublicRows | None:
    """The rows to which a file below the folder belongs, None where nobody may fetch it for you."""
    return next((one for one in catalogue() if any(file.path == path for file in one.files)), None)
