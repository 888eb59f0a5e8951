"""Cohen's kappa: the agreement of two judges beyond what their rates alone would give.

Cohen 1960; large-sample variance of Fleiss, Cohen & Everitt 1969, Psychological Bulletin 72:323.
No statistic: the agreement of two judges, which has no sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from reports.stats.effect import LEVEL


@dataclass(frozen=True, slots=True)
class Kappa:
    """Kappa with its interval, and the raw share of equal labels.

    No estimate when a judge gave one label throughout: agreement beyond chance cannot show, whatever the other said. No
    interval there, nor where the large-sample variance is 0, as with judges who agree on every transcript.
    """

    estimate: float | None
    low: float | None
    high: float | None
    agreement: float
    n: int
    level: float
    method: str = "Cohen's kappa"
    source: str = "Cohen 1960; Fleiss, Cohen & Everitt 1969"


def kappa(first: npt.ArrayLike, second: npt.ArrayLike, *, level: float = LEVEL) -> Kappa:
    """Agreement of two judges' labels [n] of the same transcripts, two labels or more."""
    one, two = np.asarray(first), np.asarray(second)
    assert one.ndim == 1, one.shape
    assert one.shape == two.shape, (one.shape, two.shape)
    assert one.size, "agreement needs a label"
    known, codes = np.unique(np.concatenate([one, two]), return_inverse=True)
    table = np.zeros((len(known), len(known)))
    np.add.at(table, (codes[: len(one)], codes[len(one) :]), 1 / len(one))
    agreement = float(np.trace(table))
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    chance = float(rows @ columns)
    if max(rows.max(), columns.max()) > 1 - 0.5 / len(one):
        return Kappa(None, None, None, agreement, len(one), level)
    estimate = (agreement - chance) / (1 - chance)
    half = float(special.ndtri(0.5 + level / 2)) * _error(table, estimate, chance, len(one))
    if half < 1e-9:
        return Kappa(estimate, None, None, agreement, len(one), level)
    return Kappa(estimate, max(-1.0, estimate - half), min(1.0, estimate + half), agreement, len(one), level)


def _error(table: npt.NDArray[np.float64], estimate: float, chance: float, n: int) -> float:
    """Standard error of kappa from the shares [L, L] of label pairs."""
    rows, columns = table.sum(axis=1), table.sum(axis=0)
    diagonal = np.sum(np.diag(table) * (1 - (rows + columns) * (1 - estimate)) ** 2)
    crossed = table * (columns[:, None] + rows[None, :]) ** 2
    apart = (1 - estimate) ** 2 * (crossed.sum() - np.trace(crossed))
    centre = (estimate - chance * (1 - estimate)) ** 2
    return float(np.sqrt(max(diagonal + apart - centre, 0.0) / n) / (1 - chance))
