"""The pinned reference: which weights every later candidate is compared with.

Comparing with the previous release instead would let each one lose up to the margin again. A pin is of weights, not of
names: a run may call the pinned reference what it likes. Seeds are held to where its arm and the pin's have one name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvaudit.core.errors import DataError

PIN_FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REMEDY = "make it with: kvaudit gate --pin CHECKPOINT"
_TEXT = ("arm", "sha256", "base_sha256", "policy")


@dataclass(frozen=True)
class PinnedCheckpoint:
    """One checkpoint of the reference; ``policy`` is the compression during its rollouts.

    Weights that nobody trained here are their own base; their arm and seed (``base``, 0) stand for no name.
    """

    arm: str
    seed: int
    sha256: str
    base_sha256: str
    policy: str

    @property
    def named(self) -> bool:
        """Whether arm and seed say something: those of a checkpoint that was trained here."""
        return self.sha256 != self.base_sha256


@dataclass(frozen=True)
class Pin:
    """The pinned checkpoints, one per seed, and when they were pinned. ``sha256`` is the identity: of all weights."""

    checkpoints: tuple[PinnedCheckpoint, ...]
    date: str
    name: str = "pin.json"

    @property
    def sha256(self) -> str:
        """Hash of the arms, seeds and weights; a copy of the file under another name or date is the same pin."""
        return weights_identity((c.arm, c.seed, c.sha256) for c in self.checkpoints)

    def weights(self, arm: str) -> dict[int, str]:
        """Seed -> sha256 of an arm."""
        return {c.seed: c.sha256 for c in self.checkpoints if c.arm == arm}

    def holds(self, arm: str, seed: int, weights: Collection[str]) -> bool:
        """Whether what a run met as this seed of its reference is one checkpoint, and pinned.

        Where the pin knows an arm of that name and its seed, it must be that very checkpoint; else any of the pin's.
        """
        own = {c.sha256 for c in self.checkpoints if c.named and (c.arm, c.seed) == (arm, seed)}
        return len(weights) == 1 and set(weights) <= (own or {c.sha256 for c in self.checkpoints})

    def to_json(self) -> str:
        """The file's text."""
        body = {"format": PIN_FORMAT, "date": self.date, "checkpoints": [asdict(c) for c in self.checkpoints]}
        return json.dumps(body, indent=1, ensure_ascii=True) + "\n"


def weights_identity(weights: Iterable[tuple[str, int, str]]) -> str:
    """One hash for several (arm, seed, sha256)."""
    return hashlib.sha256(json.dumps(sorted(weights), separators=(",", ":")).encode()).hexdigest()


def load_pin(path: Path) -> Pin:
    """The pin in a file; raises DataError when it is missing or was not written by ``kvaudit gate --pin``."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"pin {str(path)!r} cannot be read ({error.strerror}); {_REMEDY}") from None
    except (ValueError, RecursionError):
        raise DataError(f"pin {str(path)!r} is not JSON; {_REMEDY}") from None
    return parse_pin(table, path.name)


def parse_pin(table: Any, name: str) -> Pin:
    """The pin in a parsed file; ``name`` names it in errors and in the report."""
    if not isinstance(table, dict) or table.get("format") != PIN_FORMAT:
        raise DataError(f"pin {name!r} is not of format {PIN_FORMAT}; {_REMEDY}")
    rows, date = table.get("checkpoints"), table.get("date")
    if not isinstance(rows, list) or not rows or not isinstance(date, str):
        raise DataError(f"pin {name!r} lists no checkpoints or no date; {_REMEDY}")
    return Pin(tuple(_pinned(row, name) for row in rows), date, name)


def is_sha256(value: Any) -> bool:
    """Whether it is the 64 hex digits of a sha256, in lower case."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def recorded_pin(provenance: Mapping[str, Any]) -> Pin:
    """The pin that was kept when the run began; raises DataError where none was."""
    kept = provenance.get("gate_pin")
    if kept is None:
        raise DataError("the gate names a pin, but provenance.json keeps none; start another run with --out")
    return parse_pin(kept, "gate_pin in provenance.json")


def _pinned(row: Any, name: str) -> PinnedCheckpoint:
    fields = row if isinstance(row, Mapping) else {}
    # a truth value is a whole number to Python
    whole = isinstance(fields.get("seed"), int) and not isinstance(fields.get("seed"), bool)
    if not whole or not all(isinstance(fields.get(key), str) for key in _TEXT):
        raise DataError(f"pin {name!r} holds a checkpoint without {', '.join(_TEXT)} or seed; {_REMEDY}")
    if not all(is_sha256(fields[key]) for key in ("sha256", "base_sha256")):
        raise DataError(f"pin {name!r} holds a sha256 that is not 64 hex digits; {_REMEDY}")
    return PinnedCheckpoint(fields["arm"], fields["seed"], fields["sha256"], fields["base_sha256"], fields["policy"])
