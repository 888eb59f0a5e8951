"""What the command line adds to the gate of a run, and what a run keeps of its gate when it begins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from audit.core.errors import SpecError
from audit.core.spec import Names, RunSpec, expand
from audit.core.spec_file import parse_spec
from reports.gate.gate_file import Asked, load_gate_file, overlay
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


def kept_gate(spec: RunSpec, names: Names) -> dict[str, Any]:
    """What provenance keeps of the gate before a run begins: the gate file's text and hash, and the pin.

    Raises SpecError and DataError where either cannot be used, before anything is computed. A pin is looked for beside
    the gate file that names it, or from here where the spec does.
    """
    kept: dict[str, Any] = {}
    pin, folder = spec.gate.pin, Path()
    if spec.gate.gate_file is not None:
        path = Path(expand("gate.gate_file", spec.gate.gate_file))
        file = load_gate_file(path)
        row = spec.written()
        row["gate"] = overlay(row["gate"], file.table)
        pin = parse_spec(yaml.safe_dump(row), file.name, names).gate.pin
        folder = path.parent if "pin" in file.table else folder
        kept["gate_file"] = {"name": file.name, "sha256": file.sha256, "text": file.text}
    if pin is not None:
        kept["gate_pin"] = json.loads(load_pin(folder / pin).to_json())
    return kept
