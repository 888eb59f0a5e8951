"""Telemetry: one JSON line per step, appended and synced; a resumed run cuts it back to its checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from audit.core.errors import DataError
from audit.training.files import guarded

TIMED = "seconds_"  # keys that two identical runs may differ in


def clean(value: Any) -> Any:
    """The value as JSON can hold it: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class TelemetryLog:
    """Append-only ``telemetry.jsonl``. Every line is on disk before ``append`` returns; RunError if it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Bytes on disk, 0 before the first line."""
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line and sync it."""
        line = json.dumps(clean(row), allow_nan=False) + "\n"
        with guarded(self.path), self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def truncate(self, size: int) -> None:
        """Forget what was written after ``size`` bytes; raises DataError where less than that is left."""
        if self.size < size:
            raise DataError(
                f"telemetry {str(self.path)!r} has {self.size} bytes, its checkpoint says {size}; "
                "it was cut: delete the checkpoint folder to train again"
            )
        if self.size > size:
            with guarded(self.path), self.path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())

    def check_steps(self, steps: int) -> None:
        """Raise DataError unless the rows are of steps 1 to ``steps``, in order and each once."""
        if steps == 0 and not self.path.exists():
            return
        found = [row.get("step") for row in read_telemetry(self.path)]
        for wanted, got in zip_longest(range(1, steps + 1), found):
            if got != wanted:
                raise DataError(
                    f"telemetry {str(self.path)!r} has {_named(got)} where {_named(wanted)} belongs: another process "
                    "wrote there too; delete the checkpoint folder to train again"
                )


def _named(step: Any) -> str:
    return "its end" if step is None else f"step {step}"


def read_telemetry(path: Path) -> list[dict[str, Any]]:
    """All complete rows; raises DataError for a missing file or a line that is no JSON object."""
    if not path.is_file():
        raise DataError(f"telemetry {str(path)!r} does not exist; was this folder trained?")
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"telemetry {str(path)!r} holds a line that is not JSON ({error})") from None
    if not all(isinstance(row, dict) for row in found):
        raise DataError(
            f"telemetry {str(path)!r} holds a line that is no row; delete the checkpoint folder to train again"
        )
    return found
