"""The pinned reference: the checkpoints that every later candidate is compared with.

If each release were compared with the one before, each could lose up to the margin again. A pin identifies weights, not
names: a run may give the pinned reference any arm name. But if the pin has a checkpoint with the run's own arm name and
seed, the weights must be those of that checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvaudit.core.errors import DataError

PIN_FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REMEDY = "write it with: kvaudit gate --pin CHECKPOINT"
_SHA256_KEY = "sha256"  # of the whole pin
_TEXT = ("arm", "sha256", "base_sha256", "policy")


@dataclass(frozen=True)
class PinnedCheckpoint:
    """One checkpoint of the pinned reference; ``policy`` is the compression under which its rollouts were sampled.

    Weights that were not trained by kvaudit are their own base, with the placeholder arm ``base`` and seed 0. ``files``
    maps the names of the checkpoint's other files, such as config.json, to their sha256; empty if it has none.
    """

    arm: str
    seed: int
    sha256: str
    base_sha256: str
    policy: str
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def named(self) -> bool:
        """Whether arm and seed are real names, because kvaudit trained the checkpoint, and not placeholders."""
        return self.sha256 != self.base_sha256


@dataclass(frozen=True)
class Pin:
    """The pinned checkpoints, one per seed, and the date of the pin. ``sha256`` is the identity of all of them."""

    checkpoints: tuple[PinnedCheckpoint, ...]
    date: str
    name: str = "pin.json"

    @property
    def sha256(self) -> str:
        """The hash of the arms, seeds, weights and files; the name and date of the pin do not change it."""
        weights = sorted((c.arm, c.seed, c.sha256, *map(list, sorted(c.files.items()))) for c in self.checkpoints)
        return hashlib.sha256(json.dumps(weights, separators=(",", ":")).encode()).hexdigest()

    def weights(self, arm: str) -> dict[int, str]:
        """Return the sha256 of an arm's pinned weights by training seed."""
        return {c.seed: c.sha256 for c in self.checkpoints if c.arm == arm}

    def differences(
        self, arm: str, seed: int, weights: Collection[str], files: Mapping[str, str] | None
    ) -> tuple[str, ...] | None:
        """Return the names of the files in which this seed of a run's reference differs from a pinned checkpoint.

        None if no pinned checkpoint has the same ``weights`` (their sha256). If the pin has this arm and seed, only
        that checkpoint counts. ``files`` are the sha256 of the checkpoint's other files by name; if the run lists none
        (None), all files of the pin differ.
        """
        same_name = [c for c in self.checkpoints if c.named and (c.arm, c.seed) == (arm, seed)]
        same = [c for c in same_name or self.checkpoints if set(weights) == {c.sha256}]
        if not same:
            return None
        # a pin without other files asks for equal weights only
        return min((_differing(c.files, files or {}) for c in same if c.files), key=len, default=())

    def to_json(self) -> str:
        """Return the text of the pin file."""
        rows = [{key: value for key, value in asdict(c).items() if value != {}} for c in self.checkpoints]
        body = {"format": PIN_FORMAT, "date": self.date, "checkpoints": rows, _SHA256_KEY: self.sha256}
        return json.dumps(body, indent=1, ensure_ascii=True) + "\n"


def _differing(pinned: Mapping[str, str], files: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in {*pinned, *files} if pinned.get(name) != files.get(name)))


def load_pin(path: Path) -> Pin:
    """Read a pin file, which lists the reference's files by hash.

    Raises DataError if it is missing or was not written by ``kvaudit gate --pin``.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"pin {str(path)!r} cannot be read ({error.strerror}); {_REMEDY}") from None
    except (ValueError, RecursionError):
        raise DataError(f"pin file {str(path)!r} is not JSON; {_REMEDY}") from None
    return parse_pin(table, path.name)


def parse_pin(table: Any, name: str) -> Pin:
    """Return the pin in a parsed file; ``name`` is the name of the file in errors and in the report."""
    if not isinstance(table, dict) or table.get("format") != PIN_FORMAT:
        raise DataError(f"pin {name!r} is not of format {PIN_FORMAT}; {_REMEDY}")
    rows, date = table.get("checkpoints"), table.get("date")
    if not isinstance(rows, list) or not rows or not isinstance(date, str):
        raise DataError(f"pin {name!r} lists no checkpoints or no date; {_REMEDY}")
    pin = Pin(tuple(_parse_checkpoint(row, name) for row in rows), date, name)
    if table.get(_SHA256_KEY) != pin.sha256:
        raise DataError(f"pin {name!r} was changed after it was written; put the first one back, or {_REMEDY}")
    return pin


def is_sha256(value: Any) -> bool:
    """Return whether a value is a text of 64 lower-case hex digits."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def recorded_pin(provenance: Mapping[str, Any]) -> Pin:
    """Return the pin (the reference's weights by hash) that was recorded when the run began.

    Raises DataError if none was recorded.
    """
    table = provenance.get("gate_pin")
    if table is None:
        raise DataError("the gate names a pin, but provenance.json records none; start another run with --out")
    return parse_pin(table, "gate_pin in provenance.json")


def _parse_checkpoint(row: Any, name: str) -> PinnedCheckpoint:
    fields = row if isinstance(row, Mapping) else {}
    # bool is a subclass of int
    is_integer = isinstance(fields.get("seed"), int) and not isinstance(fields.get("seed"), bool)
    if not is_integer or not all(isinstance(fields.get(key), str) for key in _TEXT):
        raise DataError(f"pin {name!r} holds a checkpoint without {', '.join(_TEXT)} or seed; {_REMEDY}")
    if not all(is_sha256(fields[key]) for key in ("sha256", "base_sha256")):
        raise DataError(f"pin {name!r} holds a sha256 that is not 64 hex digits; {_REMEDY}")
    files = fields.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(n, str) and is_sha256(value) for n, value in files.items()):
        raise DataError(f"pin {name!r} holds files without a sha256 of 64 hex digits; {_REMEDY}")
    arm, sha256, base_sha256, policy = (fields[key] for key in _TEXT)
    return PinnedCheckpoint(arm, fields["seed"], sha256, base_sha256, policy, files)
