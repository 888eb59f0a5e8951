"""Human labels as they are stored in a run folder: what was said of which text, and nothing that follows from it.

A label belongs to the text that was shown, known by its hash, so no file says whose answer it was: that, the drift and
every status are worked out from the run's own records whenever a report or a verdict is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from audit.core.errors import DataError
from audit.core.yaml_file import one_line

LABELS_FORMAT = 3
_SIMPLE_LABELS = 2  # labels of before the pairs were spread over templates
LABELS_FILE = "adjudication.json"
REMEDY = "delete it and read the sheet again (kvaudit adjudicate)"
LabelKey = tuple[str, str, str, str, int]  # estimand, arm, policy, suite, context_tokens


@dataclass(frozen=True)
class CellLabels:
    """The labels of one gated cell: hash of the text -> 0 or 1, for the pairs that ``seed`` and ``concordant`` draw.

    ``spread`` says whether these were drawn in turn over the templates, or all at once as before.
    """

    estimand: str
    arm: str
    policy: str
    suite: str
    context_tokens: int
    seed: int
    concordant: int
    labels: Mapping[str, int]
    spread: bool = True

    @property
    def name(self) -> LabelKey:
        """What makes two cells the same."""
        return self.estimand, self.arm, self.policy, self.suite, self.context_tokens


@dataclass(frozen=True)
class Labels:
    """All labels of a run. ``records`` is the digest of what was scored, ``reference`` the arm compared with."""

    records: str
    reference: str
    cells: tuple[CellLabels, ...]
    format: int = LABELS_FORMAT


def render_labels(labels: Labels) -> str:
    """As JSON with its own sha256, for the run folder."""
    body = asdict(labels)
    return json.dumps({**body, "sha256": _digest(body)}, ensure_ascii=True, allow_nan=False, indent=1) + "\n"


def load_labels(run: Path) -> Labels | None:
    """The labels stored in a run folder, None where there are none; raises DataError for a broken or edited file."""
    path = run / "report" / LABELS_FILE
    if not path.exists():
        return None
    try:
        return _parsed(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        text = one_line(error)
        raise DataError(f"{str(path)!r} cannot be used ({text}); {REMEDY}") from None


def _parsed(value: Any) -> Labels:
    if value["format"] not in (_SIMPLE_LABELS, LABELS_FORMAT):
        raise ValueError(f"format {str(value['format'])[:20]!r}, wanted {LABELS_FORMAT}")
    body = {name: inner for name, inner in value.items() if name != "sha256"}
    if _digest(body) != value["sha256"]:
        raise ValueError("it was changed after it was written")
    simple = {"spread": False} if value["format"] == _SIMPLE_LABELS else {}
    cells = tuple(_cell({**cell, **simple}) for cell in value["cells"])
    if not cells or len({cell.name for cell in cells}) < len(cells):
        raise ValueError("it names no cell, or one twice")
    _check(Labels, {**body, "cells": cells})
    return Labels(**{**body, "cells": cells, "format": LABELS_FORMAT})


def _cell(value: Any) -> CellLabels:
    _check(CellLabels, value)
    if value["seed"] < 0 or value["concordant"] < 1:
        raise ValueError("seed or concordant is no count")
    if not all(isinstance(label, int) and label in (0, 1) for label in value["labels"].values()):
        raise ValueError("a label is not 0 or 1")
    return CellLabels(**value)


def _check(kind: Any, value: Mapping[str, Any]) -> None:
    """Raise TypeError for a text, a count or a truth value of another type than the dataclass says."""
    for name, wanted in kind.__annotations__.items():  # texts, since annotations are postponed
        found = value[name]
        if wanted in ("str", "int", "bool") and type(found).__name__ != wanted:
            raise TypeError(f"{name} is {str(found)[:40]!r}")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
