"""What lies beside a run's records: a scan of its stack and a vendor's answers, as declared, and the run's own recipe.

RUN/scan.json      as ``kvaudit scan --json`` writes it
RUN/answers.json   as ``kvaudit questionnaire --check`` accepts it
RUN/recipe.json    as the run wrote it when its training began (``audit.core.recipe``)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audit.core.errors import DataError
from audit.core.recipe import RECIPE, read_recipe
from audit.core.yaml_file import read_text

SCAN, ANSWERS = "scan.json", "answers.json"
_EVIDENCE: dict[str, tuple[str, str, type]] = {
    SCAN: ("kvaudit.scan", "found", list),
    ANSWERS: ("kvaudit.answers", "answers", dict),
}
_VERSION = 1
LARGEST_EVIDENCE = 10_000_000  # bytes: scans of large repositories, and all that a questionnaire takes


@dataclass(frozen=True)
class Evidence:
    """The files as they stand, None where there is none."""

    scan: Mapping[str, Any] | None = None
    answers: Mapping[str, Any] | None = None
    recipe: Mapping[str, Any] | None = None  # what the run itself wrote, held to its own hashes


def evidence_of(run: Path) -> Evidence:
    """What lies in a run's folder; raises DataError for a file of another kind, which must not pass for none."""
    recipe = read_recipe(run / RECIPE) if (run / RECIPE).exists() else None
    return Evidence(_read(run / SCAN), _read(run / ANSWERS), recipe)


def _read(path: Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    wanted, table, kind = _EVIDENCE[path.name]
    try:
        found = json.loads(read_text(path, "evidence file", LARGEST_EVIDENCE))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON ({error}); write it again or take it away") from None
    right = isinstance(found, dict) and found.get("format") == wanted and found.get("version") == _VERSION
    if not right or not isinstance(found.get(table), kind):  # what holds no findings would pass for finding nothing
        raise DataError(f"{str(path)!r} is not of format {wanted} version {_VERSION}; write it again or take it away")
    return dict(found)
