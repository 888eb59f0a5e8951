"""McNemar's mid-p: a sensitivity that treats items as independent, which templates are not.

Fagerland, Lydersen & Laake 2013, BMC Medical Research Methodology 13:91.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]


def mid_p(losses: npt.ArrayLike, gains: npt.ArrayLike) -> Array:
    """Two-sided mid-p values [...] of whole numbers of discordant items; 1 where nothing is discordant."""
    b, c = np.asarray(losses, dtype=np.float64), np.asarray(gains, dtype=np.float64)
    n, fewer = b + c, np.minimum(b, c)
    point = np.exp(special.gammaln(n + 1) - special.gammaln(fewer + 1) - special.gammaln(n - fewer + 1) - n * np.log(2))
    pvalue: Array = 2 * special.bdtr(fewer, n.astype(np.int64), 0.5) - point
    return np.where(b == c, 1.0 - np.where(n > 0, point, 0.0), pvalue)
