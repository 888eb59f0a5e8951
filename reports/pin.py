"""The pinned reference: which weights every later candidate is compared with.

Comparing with the previous release instead would let each one lose up to the margin again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from audit.errors import DataError

PIN_FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TEXT = ("arm", "sha256", "base_sha256", "policy")


@dataclass(frozen=True)
class Pinned:
    """One checkpoint of the reference; ``policy`` is the compression during its rollouts."""

    arm: str
    seed: int
    sha256: str
    base_sha256: str
    policy: str


@dataclass(frozen=True)
class Pin:
    """The pinned checkpoints, one per seed, and when they were pinned. ``sha256`` is the identity: of all weights."""

    checkpoints: tuple[Pinned, ...]
    date: str
    name: str = "pin.json"

    @property
    def sha256(self) -> str:
        """Hash of the arms, seeds and weights; a copy of the file under another name or date is the same pin."""
        return weights_identity((c.arm, c.seed, c.sha256) for c in self.checkpoints)

    def weights(self, arm: str) -> dict[int, str]:
        """Seed -> sha256 of an arm."""
        return {c.seed: c.sha256 for c in self.checkpoints if c.arm == arm}

    def to_json(self) -> str:
        """The file's text."""
        body = {"format": PIN_FORMAT, "date": self.date, "checkpoints": [asdict(c) for c in self.checkpoints]}
        return json.dumps(body, indent=1, ensure_ascii=True) + "\n"


def weights_identity(weights: Iterable[tuple[str, int, str]]) -> str:
    """One hash for several (arm, seed, sha256)."""
    return hashlib.sha256(json.dumps(sorted(weights), separators=(",", ":")).encode()).hexdigest()


def load_pin(path: Path) -> Pin:
    """The pin in a file; raises DataError when it is missing or was not written by ``kvaudit pin``."""
    remedy = "make it with: kvaudit pin CHECKPOINT"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"pin {str(path)!r} cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, RecursionError):
        raise DataError(f"pin {str(path)!r} is not JSON; {remedy}") from None
    if not isinstance(table, dict) or table.get("format") != PIN_FORMAT:
        raise DataError(f"pin {str(path)!r} is not of format {PIN_FORMAT}; {remedy}")
    rows, date = table.get("checkpoints"), table.get("date")
    if not isinstance(rows, list) or not rows or not isinstance(date, str):
        raise DataError(f"pin {str(path)!r} lists no checkpoints or no date; {remedy}")
    return Pin(tuple(_pinned(row, path, remedy) for row in rows), date, path.name)


def _pinned(row: Any, path: Path, remedy: str) -> Pinned:
    fields = row if isinstance(row, Mapping) else {}
    whole = isinstance(fields.get("seed"), int) and not isinstance(fields.get("seed"), bool)
    if not whole or not all(isinstance(fields.get(key), str) for key in _TEXT):
        raise DataError(
            f"pin {str(path)!r} holds a checkpoint without arm, seed, sha256, base_sha256, policy; {remedy}"
        )
    if not all(_SHA256.fullmatch(fields[key]) for key in ("sha256", "base_sha256")):
        raise DataError(f"pin {str(path)!r} holds a sha256 that is not 64 hex digits; {remedy}")
    return Pinned(fields["arm"], fields["seed"], fields["sha256"], fields["base_sha256"], fields["policy"])
