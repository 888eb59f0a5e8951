"""What human labels say about a run, as it is stored beside the report: frozen values, their file and its loader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from audit.errors import DataError
from reports.gate import Status
from reports.report import Reason

FORMAT = 1
FILE = "adjudication.json"


@dataclass(frozen=True)
class Rate:
    """A share with its Clopper-Pearson interval; ``estimate`` is None without trials."""

    estimate: float | None
    low: float
    high: float
    successes: int
    trials: int


@dataclass(frozen=True)
class Arm:
    """The judge's sensitivity and specificity in one arm of a cell."""

    sensitivity: Rate
    specificity: Rate


@dataclass(frozen=True)
class Bounds:
    """A drift with its 95 % interval and the one-sided bounds that the gate reads, in score units."""

    estimate: float
    low: float
    high: float
    lower: float
    upper: float


@dataclass(frozen=True)
class JudgedCell:
    """One gated cell on judge labels and on adjudicated ones.

    ``bias`` is the largest drift that the judge's gap between the arms makes by itself (None without labels of a kind),
    ``bias_upper`` its upper limit; ``guard`` says whether that is at most half the margin, so that judge labels alone
    may pass the cell. ``status`` is the verdict of the corrected interval, ``judged`` that of the judge's labels.
    """

    estimand: str
    arm: str
    policy: str
    suite: str
    context_tokens: int
    margin: float
    pairs: int
    discordant: int  # all of them labelled
    concordant: int  # labelled, drawn at random
    reference: Arm
    candidate: Arm
    bias: float | None
    bias_upper: float
    guard: bool
    raw: Bounds
    corrected: Bounds
    judged: Status
    status: Status
    reasons: tuple[Reason, ...]

    @property
    def alone(self) -> Status:
        """The verdict on judge labels alone: no PASS where the judge could have made half the margin itself."""
        held = not self.guard and self.judged in (Status.PASS, Status.PASS_NOTED)
        return Status.INCONCLUSIVE if held else self.judged


@dataclass(frozen=True)
class Adjudication:
    """What human labels say about a run. ``status`` is its verdict with the corrected cells in place of the judged.

    ``records`` is the digest of what was scored: labels of other records say nothing (``adjudication.digest``).
    """

    records: str
    labels: int
    seed: int
    cells: tuple[JudgedCell, ...]
    judged: Status
    status: Status
    format: int = FORMAT


def render(adjudication: Adjudication) -> str:
    """As JSON, for the run folder."""
    return json.dumps(asdict(adjudication), ensure_ascii=True, allow_nan=False, indent=1) + "\n"


def load_adjudication(run: Path) -> Adjudication | None:
    """The adjudication stored in a run folder, None where there is none; raises DataError for a broken file."""
    path = run / "report" / FILE
    if not path.exists():
        return None
    try:
        return _parsed(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())[:100]
        raise DataError(f"{str(path)!r} cannot be read ({text}); read the sheet again or delete the file") from None


def _parsed(value: Any) -> Adjudication:
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}, wanted {FORMAT}")
    body = {**value, "cells": tuple(_parsed_cell(cell) for cell in value["cells"])}
    for name in ("judged", "status"):
        body[name] = Status(value[name])
    _check_types(Adjudication, body)
    return Adjudication(**body)


def _parsed_cell(value: Any) -> JudgedCell:
    body = dict(value)
    for side in ("reference", "candidate"):
        body[side] = Arm(**{name: _made(Rate, rate) for name, rate in value[side].items()})
    for name in ("raw", "corrected"):
        body[name] = _made(Bounds, value[name])
    for name in ("judged", "status"):
        body[name] = Status(value[name])
    body["reasons"] = tuple(_made(Reason, reason) for reason in value["reasons"])
    _check_types(JudgedCell, body)
    return JudgedCell(**body)


def _made(kind: Any, value: Any) -> Any:
    _check_types(kind, value)
    return kind(**value)


def _check_types(kind: Any, value: Mapping[str, Any]) -> None:
    """Raise TypeError for a scalar of another type than the dataclass says."""
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "bool": (bool,),
        "float": (int, float),
        "float | None": (int, float, type(None)),
    }
    for name, wanted in kind.__annotations__.items():
        found = value[name]
        if wanted in kinds and (not isinstance(found, kinds[wanted]) or isinstance(found, bool) != (wanted == "bool")):
            raise TypeError(f"{name} is {str(found)[:40]!r}")
