"""Telemetry of the training runs -> one curve per arm, thin enough to draw and to print."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvaudit.reports.stats.effect import Array

POINTS = 160  # most steps of a curve that are kept
LEFT_OUT = frozenset({"step"})


@dataclass(frozen=True)
class Curve:
    """Telemetry of one arm: mean, lowest and highest over its seeds at each step that is kept."""

    arm: str
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    series: dict[str, tuple[float | None, ...]]
    lowest: dict[str, tuple[float | None, ...]]
    highest: dict[str, tuple[float | None, ...]]
    mean: dict[str, float]  # over all seeds and steps
    first: dict[str, float]  # mean over seeds of the first tenth of the steps
    last: dict[str, float]  # mean over seeds of the last tenth of the steps
    largest: dict[str, float]  # over all seeds and steps


def curves(telemetry: Mapping[tuple[str, int], list[dict[str, Any]]], arms: Sequence[str]) -> tuple[Curve, ...]:
    """A curve for every arm that left telemetry, in the order of the arms, then by name."""
    found = sorted({arm for arm, _ in telemetry}, key=lambda a: (arms.index(a) if a in arms else len(arms), a))
    return tuple(_curve(arm, {seed: rows for (a, seed), rows in telemetry.items() if a == arm}) for arm in found)


def _curve(arm: str, runs: Mapping[int, list[dict[str, Any]]]) -> Curve:
    steps = sorted({int(row["step"]) for rows in runs.values() for row in rows})
    keys = sorted({key for rows in runs.values() for row in rows for key in row if _numeric_key(key, rows)})
    tables = {key: _table(runs, steps, key) for key in keys}  # [S, steps]
    kept = sorted(set(np.linspace(0, len(steps) - 1, min(POINTS, len(steps))).astype(int))) if steps else []
    tenth = max(1, len(steps) // 10)
    return Curve(
        arm=arm,
        seeds=tuple(sorted(runs)),
        steps=tuple(steps[i] for i in kept),
        series={key: _reduced(table[:, kept], np.nanmean) for key, table in tables.items()},
        lowest={key: _reduced(table[:, kept], np.nanmin) for key, table in tables.items()},
        highest={key: _reduced(table[:, kept], np.nanmax) for key, table in tables.items()},
        mean=_summary(tables, np.nanmean, slice(None)),
        first=_summary(tables, np.nanmean, slice(0, tenth)),
        last=_summary(tables, np.nanmean, slice(-tenth, None)),
        largest=_summary(tables, np.nanmax, slice(None)),
    )


def _numeric_key(key: str, rows: list[dict[str, Any]]) -> bool:
    return key not in LEFT_OUT and any(_is_number(row.get(key)) for row in rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _table(runs: Mapping[int, list[dict[str, Any]]], steps: list[int], key: str) -> Array:
    column = {step: i for i, step in enumerate(steps)}
    table = np.full((len(runs), len(steps)), np.nan)
    for row_number, seed in enumerate(sorted(runs)):
        for row in runs[seed]:
            if _is_number(row.get(key)):
                table[row_number, column[int(row["step"])]] = row[key]
    return table


def _reduced(table: Array, reduce: Any) -> tuple[float | None, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step at which no seed has the value stays None
        values = reduce(table, axis=0)
    return tuple(float(v) if math.isfinite(v) else None for v in values)


def _summary(tables: Mapping[str, Array], reduce: Any, window: slice) -> dict[str, float]:
    parts = {key: table[:, window] for key, table in tables.items()}
    return {key: float(reduce(part)) for key, part in parts.items() if not np.isnan(part).all()}
