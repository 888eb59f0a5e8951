"""Looking more than once: the level of each declared look, and a wager that may be watched for ever.

Looks add new clusters; the same items sampled again are no new evidence about items. Bonferroni or Pocock 1977
(Biometrika 64:191, one-sided, equally spaced looks; boundary by the recursion of Armitage, McPherson & Rowe 1969).
The wager bets against a mean at or below -margin (Waudby-Smith & Ramdas 2024, JRSS-B 86:1). It stays valid at every
cluster, costs a third to a half of the power of a fixed sample, and therefore watches; it does not gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]

STAKES = (0.1, 0.3, 0.6, 0.95)  # shares of the wealth put at risk, in equal parts
_NODES = 200  # of the quadrature over a look's statistic
_FARTHEST = 8.5  # standard deviations


class Wagers(NamedTuple):
    """Wagers of many studies: running log wealth [..., C], whether it ever reached 1/alpha, and after which cluster."""

    log_wealth: Array
    passed: npt.NDArray[np.bool_]
    first: npt.NDArray[np.int64]  # clusters used at the first crossing; -1 without one


@dataclass(frozen=True, slots=True)
class Monitor:
    """What the wager says so far; ``pvalue`` is valid whenever one stops."""

    estimate: float
    wealth: float
    largest_wealth: float
    pvalue: float
    passed: bool
    clusters_to_pass: int | None
    n_clusters: int
    margin: float
    method: str = "betting e-process on cluster totals (monitor, not a gate)"
    source: str = "Waudby-Smith & Ramdas 2024"


def alpha_per_look(alpha: float, looks: int) -> float:
    """The level of each of ``looks`` declared looks (Bonferroni), whatever their spacing."""
    assert 0 < alpha < 1, alpha
    assert looks >= 1, looks
    return alpha / looks


def pocock_alpha(alpha: float, looks: int) -> float:
    """The one-sided level of each of ``looks`` looks after equal amounts of new data (Pocock 1977)."""
    from scipy import optimize  # slow to import, and reports that need none of it should not wait

    assert 0 < alpha < 0.5, alpha
    assert looks >= 1, looks
    lowest, highest = special.ndtri(1 - alpha), special.ndtri(1 - alpha / looks)
    if looks == 1:
        return alpha
    boundary = optimize.brentq(lambda c: _crossing(c, looks) - alpha, lowest, highest, xtol=1e-12)
    return float(special.ndtr(-boundary))


def _crossing(boundary: float, looks: int) -> float:
    """Probability that one of the standardised sums exceeds the boundary under the null."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    crossed, points, mass = 0.0, np.zeros(1), np.ones(1)
    for look in range(1, looks + 1):
        top, bottom = boundary * look**0.5, -_FARTHEST * look**0.5
        crossed += float(mass @ special.ndtr(points - top))
        inside = (top - bottom) / 2 * (nodes + 1) + bottom
        density = np.exp(-0.5 * (inside[:, None] - points) ** 2) / np.sqrt(2 * np.pi) @ mass
        points, mass = inside, density * weights * (top - bottom) / 2
    return crossed


def monitor(z: npt.ArrayLike, clusters: npt.ArrayLike, *, margin: float, largest: int, alpha: float = 0.05) -> Monitor:
    """The wager on item differences z [N] in [-1, 1], clusters [N] in the order of their first item.

    ``largest`` is the size of the biggest cluster that could come, declared beforehand.
    """
    values = np.asarray(z, dtype=np.float64)
    assert np.abs(values).max(initial=0) <= 1 + 1e-9, "differences lie in [-1, 1]"
    _, first, codes = np.unique(np.asarray(clusters), return_index=True, return_inverse=True)
    order = np.argsort(first)
    sums: Array = np.bincount(codes, weights=values).astype(np.float64)[order]
    counts: Array = np.bincount(codes)[order].astype(np.float64)
    found = wagers(sums, counts, margin=margin, largest=largest, alpha=alpha)
    best = float(found.log_wealth.max())
    return Monitor(
        estimate=float(values.mean()),
        wealth=float(np.exp(found.log_wealth[-1])),
        largest_wealth=float(np.exp(best)),
        pvalue=min(1.0, float(np.exp(-best))),
        passed=bool(found.passed),
        clusters_to_pass=int(found.first) if found.passed else None,
        n_clusters=len(counts),
        margin=margin,
    )


def wagers(sums: Array, counts: Array, *, margin: float, largest: int, alpha: float = 0.05) -> Wagers:
    """Wagers on cluster sums [..., C] of counts [..., C] items, clusters in the order collected.

    Under a mean of -margin or less the wealth is a supermartingale: it reaches 1/alpha with probability alpha at most.
    """
    assert 0 < margin < 1, margin
    assert np.all(counts <= largest), "a cluster is larger than declared"
    gain = (sums + margin * counts) / (largest * (1 - margin))  # at least -1
    logs = np.stack([np.cumsum(np.log1p(stake * gain), axis=-1) for stake in STAKES])
    log_wealth: Array = special.logsumexp(logs, axis=0) - np.log(len(STAKES))
    reached = log_wealth >= -np.log(alpha)
    passed = reached.any(axis=-1)
    return Wagers(log_wealth, passed, np.where(passed, reached.argmax(axis=-1) + 1, -1))
