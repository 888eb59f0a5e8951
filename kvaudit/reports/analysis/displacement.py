"""displacement.json -> how far the next-token distributions moved; shown beside the drift, never gated.

Teacher-forced on the reference's trajectories, KL(reference || candidate) per token. KL is never negative, so there is
no test of zero: every row is held against the A/A floor, the reference run again. Columns as in llama.cpp's
``--kl-divergence``, so the numbers can be compared with published ones. The format is in docs/replaying.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvaudit.core.errors import DataError
from kvaudit.core.text import one_line
from kvaudit.reports.stats.effect import LEVEL, Array
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS

DISPLACEMENT_FILE = "displacement.json"
DISPLACEMENT_FORMAT = 1
_DRAWS = 2000
LARGEST_MEAN = 1e6  # nats; far beyond any float's log-probability
_WORDS = ("arm", "policy", "suite")
NUMBERS = ("median_kl", "p99_kl", "p99_9_kl", "max_kl", "same_top1", "rms_dp")
SHARES = ("same_top1", "rms_dp")
ROW_KEYS = {*_WORDS, "seed", "context_tokens", "floor", *NUMBERS, "refusal_margin", "sequences"}


@dataclass(frozen=True)
class Displacement:
    """One arm under one policy on one suite and length against the reference's tokens; KL in nats.

    ``low, high`` is the 95 % interval of the mean by a bootstrap of clusters of sequences, for display; None where
    these are too few. ``ratio`` is the mean over the mean of the floor of the same suite and length, None where that
    has no row or is 0.
    ``refusal_margin`` is candidate minus reference in log-odds of a refusal's first token, None where not measured.
    """

    arm: str
    seed: int
    policy: str
    suite: str
    context_tokens: int
    floor: bool  # the reference against itself run again
    tokens: int
    sequences: int
    clusters: int
    mean_kl: float
    low: float | None
    high: float | None
    median_kl: float
    p99_kl: float
    p99_9_kl: float
    max_kl: float
    same_top1: float
    rms_dp: float
    ratio: float | None
    refusal_margin: float | None


def load_displacement(run: Path) -> tuple[Displacement, ...]:
    """The rows of ``run/displacement.json``, floors first; empty where there is no such file.

    Raises DataError for a file that cannot be used, with the row.
    """
    path = Path(run) / DISPLACEMENT_FILE
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{DISPLACEMENT_FILE} cannot be read ({one_line(error)}); measure it again") from None
    right = isinstance(body, dict) and body.get("format") == DISPLACEMENT_FORMAT
    if not right or not isinstance(body.get("rows"), list):
        wanted = f"format {DISPLACEMENT_FORMAT} with a list of rows"
        raise DataError(f"{DISPLACEMENT_FILE} is not of {wanted}; measure it again")
    rows = [_row(number, row) for number, row in enumerate(body["rows"], 1)]
    return tuple(sorted((_with_ratio(row, rows) for row in rows), key=lambda d: not d.floor))


def _row(number: int, row: Any) -> Displacement:
    if not isinstance(row, dict) or set(row) != ROW_KEYS:
        found = set(row) if isinstance(row, dict) else set()
        raise _bad(number, f"keys missing {sorted(ROW_KEYS - found)}, extra {sorted(map(str, found - ROW_KEYS))}")
    for name, wanted in (*((w, str) for w in _WORDS), ("seed", int), ("context_tokens", int), ("floor", bool)):
        # True is an int too, so not isinstance
        if type(row[name]) is not wanted:
            raise _bad(number, f"{name} is {str(row[name])[:40]!r}, wanted {wanted.__name__}")
    known: dict[str, Any] = {name: row[name] for name in (*_WORDS, "seed", "context_tokens", "floor")}
    known |= {name: _number(number, row, name, most=1.0 if name in SHARES else math.inf) for name in NUMBERS}
    margin = row["refusal_margin"]
    if margin is not None:
        margin = _number(number, row, "refusal_margin", least=-math.inf)
    clusters, tokens, sums = _sequences(number, row["sequences"])
    mean, low, high = bootstrap_mean(clusters, tokens, sums)
    return Displacement(
        **known,
        tokens=int(tokens.sum()),
        sequences=len(tokens),
        clusters=len(set(clusters)),
        mean_kl=mean,
        low=low,
        high=high,
        ratio=None,
        refusal_margin=margin,
    )


def _number(number: int, row: Mapping[str, Any], name: str, *, least: float = 0.0, most: float = math.inf) -> float:
    value = row[name]
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
        raise _bad(number, f"{name} is {str(value)[:40]!r}, wanted a finite number from {least:g} to {most:g}")
    return float(value)


def _sequences(number: int, value: Any) -> tuple[list[str], Array, Array]:
    """Cluster, tokens and summed KL of every sequence."""
    if not isinstance(value, list) or not value:
        raise _bad(number, "sequences are missing, wanted a list of [cluster_id, tokens, mean_kl]")
    for entry in value:
        if not isinstance(entry, list) or [type(part) for part in entry[:2]] != [str, int] or len(entry) != 3:
            raise _bad(number, f"sequence is {str(entry)[:60]!r}, wanted [cluster_id, tokens, mean_kl]")
        if not 0 < entry[1] < 2**40 or type(entry[2]) not in (int, float) or not 0 <= entry[2] < LARGEST_MEAN:
            raise _bad(
                number, f"sequence is {str(entry)[:60]!r}, wanted tokens above 0, mean_kl below {LARGEST_MEAN:g}"
            )
    clusters, tokens, means = zip(*value, strict=True)
    lengths = np.array(tokens, dtype=np.float64)
    return list(clusters), lengths, lengths * np.array(means, dtype=np.float64)  # [S] tokens, [S] nats in all


def _bad(number: int, what: str) -> DataError:
    return DataError(f"{DISPLACEMENT_FILE}, row {number}: {what}; measure it again")


def bootstrap_mean(
    clusters: Sequence[str], tokens: Array, sums: Array, *, seed: int = 0
) -> tuple[float, float | None, float | None]:
    """Mean KL over tokens with a percentile bootstrap of clusters; without ends where these are too few for one."""
    names, codes = np.unique(np.array(clusters, dtype=object).astype(str), return_inverse=True)
    length = np.bincount(codes, weights=tokens)  # [C] tokens
    total = np.bincount(codes, weights=sums)  # [C] nats
    mean = float(total.sum() / length.sum())
    if len(names) < FEWEST_CLUSTERS:
        return mean, None, None
    # how often each cluster is drawn: [draws, C]
    drawn = np.random.default_rng(seed).multinomial(len(names), [1 / len(names)] * len(names), size=_DRAWS)
    means = (drawn @ total) / (drawn @ length)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return mean, float(low), float(high)


def _with_ratio(row: Displacement, rows: Sequence[Displacement]) -> Displacement:
    own = [f for f in rows if f.floor and (f.suite, f.context_tokens) == (row.suite, row.context_tokens)]
    tokens = sum(f.tokens for f in own)
    mean = sum(f.mean_kl * f.tokens for f in own) / tokens if tokens else 0.0  # nats a token
    return replace(row, ratio=row.mean_kl / mean) if mean > 0 and not row.floor else row
