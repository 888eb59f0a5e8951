"""``python -m bench.ratio_intervals``: which interval of a paired ratio in clusters holds at its limit.

Templates differ in how often it happens (a beta variable with a correlation up to .9), and half of them change as a
whole. The candidate is exactly at the limit. What is counted: a one-sided bound at .05 that clears it, and a 95 %
interval that leaves it out.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy import special

from kvaudit.reports.stats.clustered import cr3_variance
from kvaudit.reports.stats.ratio import Events, ess_scores, events_of, tang_scores

Array = npt.NDArray[np.float64]
_LIMITS = ((0.5, 1.1), (0.3, 1.25), (0.2, 1.5), (0.1, 2.0), (0.05, 3.0))  # reference's rate, limit
_BLOCK = 500


def scores(e: Events, theta: float) -> dict[str, Array]:
    """The statistic of every method against a ratio of ``theta``; below 0 where the data lie below it."""
    n = float(e.counts.sum())
    old, new = e.both + e.before, e.both + e.after
    own = np.where(old > 0, new / np.maximum(old, 1e-9), theta)
    net = _variance(e, 1.0)
    mean = (e.after - e.before) ** 2 / n
    at_one = np.maximum(net / np.maximum(e.before + e.after - mean, 1e-9), 1.0)
    free = own**2 * e.before + e.after + (1 - own) ** 2 * e.both
    at_own = np.maximum(_variance(e, own) / np.maximum(free, 1e-9), 1.0)
    spread = np.sqrt(np.maximum(_variance(e, own), 1e-12)) / np.maximum(new, 1e-9)
    known = (old > 0) & (new > 0)
    return {
        "Fieller, CR3-t": (new - theta * old) / np.sqrt(np.maximum(_variance(e, theta), 1e-12)),
        "log ratio, CR3-t": np.where(known, np.log(np.maximum(own, 1e-9) / theta) / spread, 0.0),
        "score, design effect of the difference": _tang(e, at_one, theta),
        "score, design effect at the estimate": _tang(e, at_own, theta),
        "score, design effect at each ratio": ess_scores(e, theta),
    }


def _tang(e: Events, deff: Array, theta: float) -> Array:
    return tang_scores(e.both / deff, e.before / deff, e.after / deff, float(e.counts.sum()) / deff, theta)


def _variance(e: Events, theta: Array | float) -> Array:
    """CR3 of the sum of candidate - theta * reference."""
    totals = e.candidate - np.asarray(theta)[..., None] * e.reference
    n = float(e.counts.sum())
    residuals = totals - e.counts * (totals.sum(axis=-1) / n)[..., None]
    variance: Array = n**2 * cr3_variance(residuals, e.counts)
    return variance


def at_limit(rng: np.random.Generator, rate: float, limit: float, clusters: int, alike: float, churn: float) -> Events:
    """Audits of a candidate in which it happens ``limit`` times as often."""
    counts, spread = rng.integers(3, 8, size=clusters), (1 - alike) / alike
    owner = np.repeat(np.arange(clusters), counts)
    level = rng.beta(rate * spread, (1 - rate) * spread, size=(_BLOCK, clusters))[:, owner]
    reference = rng.random(level.shape) < level
    together = (rng.random((_BLOCK, clusters)) < 0.5)[:, owner]
    dice = np.where(together, rng.random((_BLOCK, clusters))[:, owner], rng.random(level.shape))
    candidate = np.where(reference, dice >= churn, dice < rate * (limit - 1 + churn) / (1 - rate))
    return events_of(reference.astype(np.float64), candidate.astype(np.float64), counts)


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=4000, help="of each design")
    asked, started = parser.parse_args(), time.process_time()
    rng, found = np.random.default_rng(asked.seed), dict[tuple[str, int], list[tuple[float, float]]]()
    for (rate, limit), clusters, alike, churn in product(_LIMITS, (60, 120), (0.1, 0.5, 0.9), (0.02, 0.3)):
        one, two = (float(special.stdtrit(clusters - 1, q)) for q in (0.95, 0.975))
        counts = dict[str, list[float]]()
        for _ in range(asked.draws // _BLOCK):
            for name, z in scores(at_limit(rng, rate, limit, clusters, alike, churn), limit).items():
                own = counts.setdefault(name, [0.0, 0.0])
                own[0] += float(np.count_nonzero(z < -one))
                own[1] += float(np.count_nonzero(np.abs(z) > two))
        for name, (cleared, left_out) in counts.items():
            found.setdefault((name, clusters), []).append((cleared / asked.draws, left_out / asked.draws))
    for (name, clusters), own in found.items():
        rates = np.array(own)
        most, mean = rates.max(axis=0), rates.mean(axis=0)
        print(f"{name:<40}{clusters:>4}  cleared {most[0]:.3f} ({mean[0]:.3f})  left out {most[1]:.3f} ({mean[1]:.3f})")
    print(f"{time.process_time() - started:.0f} core seconds")


if __name__ == "__main__":
    main()
