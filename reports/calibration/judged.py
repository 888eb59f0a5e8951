"""A judge that errs, and differently in the two arms, in front of human labels that do not."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reports.calibration.probit import Floats


class Judge(NamedTuple):
    """Chance of seeing a desired answer as desired, and an undesired one as undesired."""

    sensitivity: float
    specificity: float

    def labels(self, rng: np.random.Generator, desired: Floats) -> npt.NDArray[np.bool_]:
        """What the judge says of answers [...] that are 1 where desired."""
        chance = np.where(desired > 0.5, self.sensitivity, 1 - self.specificity)
        return rng.random(desired.shape, dtype=np.float32) < chance


def concordant_sample(rng: np.random.Generator, apart: npt.NDArray[np.bool_], drift: Floats, *, size: int) -> Floats:
    """Human differences [B, size] of random pairs that the judge does not part, from ``apart`` and ``drift`` [B, N]."""
    assert (~apart).sum(axis=1).min() >= size, "fewer concordant pairs than the sample asks for"
    order = np.where(apart, np.float32(2), rng.random(apart.shape, dtype=np.float32))
    chosen = np.argpartition(order, size - 1, axis=1)[:, :size]
    return np.take_along_axis(drift, chosen, axis=1)
