"""Walking the grid costs as much per unit at many units as at few; what is said of the way counts every process."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench.bookkeeping import run_evaluation, spec_of
from kvaudit.audit.policies import compose
from kvaudit.audit.runs import progress
from kvaudit.audit.runs.evaluate import grid
from kvaudit.audit.runs.names import NAMES
from kvaudit.core.spec import RunSpec


def one_seed(spec: RunSpec) -> RunSpec:
    """Five checkpoints in place of thirteen: what grows faster than the units shows as well at fewer."""
    row = spec.written()
    row["train"]["seeds"] = [21]
    return RunSpec.model_validate(row, context=NAMES)


def counted(folder: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the walk asked for a file and parsed a policy."""
    found: Counter[str] = Counter()
    exists, build = Path.exists, compose._build

    def ask(path: Path) -> bool:
        found["looks"] += 1
        return exists(path)

    def parsed(*args: object) -> object:
        found["parses"] += 1
        return build(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", ask)
        patch.setattr(compose, "_build", parsed)
        run_evaluation(folder, spec)
    return found


def test_looks_at_files_and_parsed_policies_are_linear_in_the_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = one_seed(spec_of(78)), one_seed(spec_of(156))
    assert (len(grid(few)), len(grid(many))) == (30, 60)
    less, more = counted(tmp_path / "few", few, monkeypatch), counted(tmp_path / "many", many, monkeypatch)
    assert more["looks"] <= 2 * less["looks"]
    assert more["looks"] <= 8 * len(grid(many))
    assert more["parses"] <= 8 * len(many.evaluate.policies)


def test_progress_forecasts_by_what_this_process_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], io.StringIO()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress.Meter(Console(file=said, width=200), "train", 100, 15) as meter:
        now[0] += 5
        meter.at(17, "too early for a line")
        now[0] += 25
        meter.at(30, "dense")  # 13 in 25 s since the first count, 70 left
        now[0] += 25
        meter.at(110, "naive")  # no more than there are
    assert said.getvalue().splitlines() == [
        "train 30/100 (30 %), ETA 2.2 min: dense",
        "train 100/100 (100 %), ETA 0 s: naive",
        "train 100/100 (100 %), ETA 0 s: done",
    ]
