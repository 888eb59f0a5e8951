"""The drift ledger: one line per gated cell and look, appended for as long as a reference stays pinned.

Every drift is measured against the pin, so it is cumulative as it stands: the lines of one cell in order are how far
the releases have moved away, each perhaps within its margin. A run and look is written once, whatever is repeated.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from audit.core.errors import DataError, RunError
from audit.core.text import inline
from reports.pin import Pin, weights_identity
from reports.plain import drift_of
from reports.plan import Plan
from reports.report import Report
from reports.verdict import Decision, Verdict

LEDGER_FORMAT = 1
LARGEST = 2**62


@dataclass(frozen=True)
class Entry:
    """One gated cell of one run and look; drifts in score units, None without a number. ``status`` is unwaived."""

    pin: str  # identity of the pinned reference
    run: str
    run_sha256: str  # of the spec, the start and the candidates' weights
    look: int
    gate: str  # sha256 of the gate file, "spec" without one
    date: str
    estimand: str
    arm: str
    policy: str
    suite: str
    context_tokens: int
    estimate: float | None
    low: float | None
    high: float | None
    lower: float | None
    margin: float | None
    status: str
    waived: bool
    format: int = LEDGER_FORMAT

    @property
    def cell(self) -> tuple[str, str, str, str, int]:
        """What the drift is of; E3 and parity included, each by its own name."""
        return self.estimand, self.arm, "" if self.estimand == "E3" else self.policy, self.suite, self.context_tokens

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two lines the same."""
        return self.pin, self.run_sha256, self.look, self.gate, self.cell


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float | None": (int, float, type(None)),
}


def read_ledger(path: Path) -> list[Entry]:
    """Every line of a ledger, none for a file that is not there yet; raises DataError naming a line that is broken."""
    if path.exists() and not path.is_file():
        raise DataError(f"ledger {str(path)!r} is no regular file; give another --ledger")
    try:
        text = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise DataError(f"ledger {str(path)!r} cannot be read ({error.strerror}); give a file") from None
    return _entries(text, path)


def entries_of(report: Report, verdict: Verdict, pin: Pin | None, date: str) -> list[Entry]:
    """One entry per gated cell; without a pin file the reference weights of the run are the pin."""
    run, source = _run_identity(report), report.plan.rules.sha256 or "spec"
    identity = pin.sha256 if pin else _reference_identity(report)
    return [
        _from(d, pin=identity, run=report.run, run_sha256=run, look=report.plan.rules.look, gate=source, date=date)
        for d in verdict.decisions
        if d.gated
    ]


def append(path: Path, new: Sequence[Entry]) -> int:
    """Append what the ledger does not hold yet in one write; returns how many lines that were."""
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another gate may be at its end in this moment
            file.seek(0)
            before = file.read()
            held = {entry.key for entry in _entries(before, path)}
            fresh = [entry for entry in new if entry.key not in held]
            text = "".join(json.dumps(asdict(entry), ensure_ascii=True, allow_nan=False) + "\n" for entry in fresh)
            file.write(b"" if not before or before.endswith(b"\n") else b"\n")
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"cannot write ledger {str(path)!r} ({error.strerror}); give another --ledger") from None
    return len(fresh)


def history(known: Sequence[Entry], new: Sequence[Entry], plan: Plan) -> Iterator[str]:
    """For every cell the drift of earlier runs against the same pin, oldest first, and this one's; one line each."""
    for entry in new:
        own = (entry.run_sha256, entry.look)
        earlier = {
            (e.run_sha256, e.look): e
            for e in known
            if e.pin == entry.pin and e.cell == entry.cell and (e.run_sha256, e.look) != own
        }
        policy = plan.labels.get(entry.policy, entry.policy)
        steps = [*(_step(e) for e in earlier.values()), f"now {drift_of(entry.estimate, entry.low, entry.high)}"]
        text = f"{entry.estimand}, {entry.arm} @ {policy}, {entry.suite} {entry.context_tokens}: " + " -> ".join(steps)
        yield inline(text if earlier else f"{text}, the first against this pin")


def _step(entry: Entry) -> str:
    return f"{drift_of(entry.estimate, entry.low, entry.high)} ({entry.date}, {entry.run[:40]}, {entry.status})"


def _from(d: Decision, **shared: Any) -> Entry:
    e = d.effect
    return Entry(
        **shared,
        estimand=d.estimand,
        arm=d.arm,
        policy=d.policy,
        suite=d.suite,
        context_tokens=d.context_tokens,
        estimate=e.estimate if e else None,
        low=e.low if e else None,
        high=e.high if e else None,
        lower=e.lower if e else None,
        margin=d.margin,
        status=d.status.value,
        waived=d.waiver is not None,
    )


def _run_identity(report: Report) -> str:
    story = report.provenance
    known = {key: story.get(key) for key in ("spec_sha256", "started", "checkpoints", "base_sha256")}
    return hashlib.sha256(json.dumps([report.run, known], sort_keys=True, default=str).encode()).hexdigest()


def _reference_identity(report: Report) -> str:
    table = report.provenance.get("reference_sha256")
    weights = table if isinstance(table, Mapping) else {}
    return weights_identity(
        (report.plan.reference, int(seed), str(sha)) for seed, sha in weights.items() if str(seed).lstrip("-").isdigit()
    )


def _entries(text: bytes, path: Path) -> list[Entry]:
    return [_entry(line, f"ledger {str(path)!r} line {i}") for i, line in enumerate(text.splitlines(), 1)]


def _entry(line: bytes, where: str) -> Entry:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON; take the line out, or give another --ledger") from None
    names = {f.name: str(f.type) for f in fields(Entry)}
    if not isinstance(row, dict) or set(row) != set(names) or row["format"] != LEDGER_FORMAT:
        raise DataError(f"{where} is no line of format {LEDGER_FORMAT}; give the ledger that kvaudit gate wrote")
    for name, kind in names.items():
        value: Any = row[name]
        if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise DataError(f"{where} holds {name}={str(value)[:40]!r}, wanted {kind}")
        if isinstance(value, int | float) and not -LARGEST < value < LARGEST:
            raise DataError(f"{where} holds {name}={str(value)[:40]}, wanted a finite number")
    return Entry(**row)
