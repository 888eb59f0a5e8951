"""Walking the grid costs as much per unit at many units as at few: looks at files and parsed policies are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from audit.core.spec import RunSpec
from audit.policies import parse
from audit.runs.evaluate import grid
from bench.bookkeeping import spec_of, walked


def counted(folder: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the walk asked for a file and parsed a policy."""
    found: Counter[str] = Counter()
    exists, build = Path.exists, parse._build

    def ask(path: Path) -> bool:
        found["looks"] += 1
        return exists(path)

    def parsed(*args: object) -> object:
        found["parses"] += 1
        return build(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", ask)
        patch.setattr(parse, "_build", parsed)
        walked(folder, spec)
    return found


def test_looks_at_files_and_parsed_policies_are_linear_in_the_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = spec_of(78), spec_of(390)
    assert (len(grid(few)), len(grid(many))) == (78, 390)
    less, more = counted(tmp_path / "few", few, monkeypatch), counted(tmp_path / "many", many, monkeypatch)
    assert more["looks"] <= 5 * less["looks"]
    assert more["looks"] <= 8 * len(grid(many))
    assert more["parses"] <= 8 * len(many.evaluate.policies)
