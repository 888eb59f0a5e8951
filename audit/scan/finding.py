"""What a scan finds: a key that says something about the cache, or a value that only running would tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvaudit.audit.scan.rules import ConfigurationRole, ScanRule

State = Literal["open", "declared", "corrected", "lossless", "native"]


@dataclass(frozen=True)
class Finding:
    """A key that says something about the cache. ``engines``: more than one where the file leaves it open."""

    file: str
    line: int
    role: ConfigurationRole
    engines: tuple[str, ...]
    rule: ScanRule
    key: str
    value: str
    policy: str
    block: int
    state: State = "open"
    answer: str = ""  # what answers for it


class NotReadable(NamedTuple):
    """A file, or a value of it, that only running would tell."""

    file: str
    line: int
    reason: str
