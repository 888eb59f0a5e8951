"""The bivariate normal distribution function, which makes the probit simulations exact."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)


def both_below(h: float, k: float, correlation: float) -> float:
    """P(X < h, Y < k) of standard normals: an integral over the correlation (Drezner & Wesolowsky 1990)."""
    top = float(np.arcsin(np.clip(correlation, -1.0, 1.0)))
    angle: npt.NDArray[np.float64] = top * (_NODES + 1) / 2
    exponent = -(h * h + k * k - 2 * h * k * np.sin(angle)) / (2 * np.cos(angle) ** 2)
    area = top / 2 * float(np.sum(_WEIGHTS * np.exp(exponent))) / (2 * np.pi)
    return float(special.ndtr(h) * special.ndtr(k)) + area


def correlation_for(h: float, k: float, both: float) -> float:
    """The correlation in [0, 1) at which P(X < h, Y < k) is ``both``; a value out of reach is an error."""
    assert both_below(h, k, 0.0) <= both <= both_below(h, k, 0.999999), (h, k, both)
    return float(optimize.brentq(lambda r: both_below(h, k, r) - both, 0.0, 0.999999, xtol=1e-12))
