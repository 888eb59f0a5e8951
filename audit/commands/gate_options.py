"""What the command line adds to the gate of a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path

from audit.core.errors import SpecError
from reports.gate.gate_file import Asked, load_gate_file
from reports.gate.pin import load_pin
from reports.gate.rules import BLOCK, WARN
from reports.gate.waivers import read_waivers


@dataclass(frozen=True)
class GateOptions:
    """The options of ``kvaudit gate`` and ``report`` as they were given."""

    gate: Path | None = None
    waivers: Path | None = None
    on_inconclusive: str | None = None

    def asked(self) -> Asked:
        """The files read and checked; raises SpecError and DataError in one line."""
        if self.on_inconclusive not in (None, BLOCK, WARN):
            raise SpecError(f"--on-inconclusive is {self.on_inconclusive!r}, wanted {BLOCK} or {WARN}")
        file = None if self.gate is None else load_gate_file(self.gate)
        named = None if file is None else file.table.get("pin")
        return Asked(
            gate=file,
            pin=load_pin(self.gate.parent / named) if self.gate and isinstance(named, str) else None,
            waivers=None if self.waivers is None else read_waivers(self.waivers),
            on_inconclusive=self.on_inconclusive,
            today=date.today(),
        )
