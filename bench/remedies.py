"""How often a run names a remedy that is none, by simulation: ``python -m bench.remedies [AUDITS]``, three minutes.

An audit has 72 templates of three items and several remedies, each of which is given its own losses. Two ways of being
no remedy: it loses just the margin (over all items, or by whole templates, each remedy in templates of its own), or it
does nothing: its answers are redrawn from the odds of the policy that failed. Compared are the cheapest of all that
pass, Holm over their number, and the declared order until the first that is none, which is what the report does.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvaudit.reports.stats.rule import Call, calls, cleared, shows_margin
from kvaudit.reports.stats.tango import many_ess_tango

CLUSTERS, ITEMS, MARGIN, ALPHA = 72, 3, 0.05, 0.05
AGAIN = 0.2  # of what the reference gets wrong, another serving gets right so often
RIGHT = 0.95  # of the reference's answers, where losses are spread over all items
ICC = 0.1  # of losses inside a template
Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Losses(NamedTuple):
    """How an arm under a policy loses: the chance of each template [..., C], and of the reference's right answers."""

    chance: Array
    right: float

    def differences(self, reference: Flags, rng: np.random.Generator) -> Array:
        """Policy minus reference [..., N] in order of templates."""
        drawn = rng.random((*self.chance.shape[:-1], reference.shape[-1]))
        gains = AGAIN if self.right < 1 else 0.0
        lost = drawn < np.repeat(self.chance, ITEMS, axis=-1)
        found: Array = np.where(reference, -lost.astype(float), (drawn < gains).astype(float))
        return found

    def reference(self, audits: int, rng: np.random.Generator) -> Flags:
        """Which items [audits, N] the reference gets right."""
        return rng.random((audits, CLUSTERS * ITEMS)) < self.right


def spread(drift: float, shape: tuple[int, ...], rng: np.random.Generator) -> Losses:
    """Losses over all items, more in some templates than in others; ``drift`` below 0 in the mean."""
    mean = ((1 - RIGHT) * AGAIN - drift) / RIGHT
    size = 1 / ICC - 1
    return Losses(rng.beta(mean * size, (1 - mean) * size, (*shape, CLUSTERS)), RIGHT)


def broken(drift: float, shape: tuple[int, ...], rng: np.random.Generator) -> Losses:
    """A share of the templates loses everything, the others nothing."""
    return Losses((rng.random((*shape, CLUSTERS)) < -drift).astype(float), 1.0)


KINDS = {"spread": spread, "broken": broken}


def passes(z: Array, alpha: float) -> Flags:
    """Whether differences [..., N] pass the gate at a level."""
    return _called(z, alpha) <= Call.PASS_NOTED


def fails(z: Array) -> Flags:
    """Whether they FAIL, alone in their family."""
    return _called(z, ALPHA) == Call.FAIL


def _called(z: Array, alpha: float) -> npt.NDArray[np.int8]:
    counts = np.full(CLUSTERS, float(ITEMS))
    bounds = many_ess_tango(z, counts, samples=1, alpha=alpha)
    sums = z.reshape(*z.shape[:-1], CLUSTERS, ITEMS).sum(axis=-1)
    shown = shows_margin(sums, counts, margin=MARGIN, alpha=alpha)
    return calls(
        bounds.lower,
        bounds.upper,
        bounds.pvalue_drop,
        clusters=CLUSTERS,
        uneven=False,
        shown=shown,
        margin=MARGIN,
        alpha=alpha,
    )


def wins(z: Array, failed: Array) -> Flags:
    """Whether [..., K] answers are shown to be better than those under the policy that failed [..., N]."""
    counts = np.full(CLUSTERS, float(ITEMS))
    found: Flags = many_ess_tango(z - failed[..., None, :], counts, samples=1, alpha=ALPHA).lower > 0
    return found


def holm(z: Array) -> Flags:
    """What Holm lets pass of K remedies [..., K]: at alpha over those that are left, until none is added."""
    count = z.shape[-2]
    at = np.stack([passes(z, ALPHA / left) for left in range(count, 0, -1)])  # [K, ..., K], levels rise
    kept = at[0]
    for level in range(1, count):
        kept = np.where((kept.sum(axis=-1) >= level)[..., None], at[level], kept)
    return kept


def in_order(mends: Flags) -> Flags:
    """Which [..., K] are held, tested in order until the first that is none."""
    return np.arange(mends.shape[-1]) < cleared(mends)[..., None]


class Rates(NamedTuple):
    """Shares of audits in which something that is no remedy is called one."""

    all_that_pass: float
    holm: float
    in_order: float


def at_the_margin(kind: str, remedies: int, audits: int, rng: np.random.Generator) -> Rates:
    """Every remedy loses just the margin; that each is better than what failed is granted."""
    losses = KINDS[kind](-MARGIN, (audits, remedies), rng)
    reference = losses.reference(audits, rng)
    z = losses.differences(reference[:, None], rng)
    alone = passes(z, ALPHA)
    return Rates(_any(alone), _any(holm(z)), _any(in_order(alone)))


def doing_nothing(drift: float, remedies: int, audits: int, rng: np.random.Generator) -> Rates:
    """Audits whose policy FAILs at a true ``drift`` and in which one of its remedies is named, of all audits.

    Each serves as the policy that failed does, drawn anew (A/A): the worst that doing nothing can be, as the same seeds
    would give the same answers. ``all_that_pass`` asks the gate alone; Holm and the order also something won back.
    """
    losses = spread(drift, (audits,), rng)
    reference = losses.reference(audits, rng)
    failed = losses.differences(reference, rng)
    chosen = fails(failed)
    again = Losses(np.broadcast_to(losses.chance[:, None], (audits, remedies, CLUSTERS)), losses.right)
    z = again.differences(reference[:, None], rng)[chosen]
    helps, alone = wins(z, failed[chosen]), passes(z, ALPHA)
    named = (_any(alone), _any(holm(z) & helps), _any(in_order(alone & helps)))
    return Rates(*(rate * float(chosen.mean()) for rate in named))


def found(places: tuple[bool, ...], audits: int, rng: np.random.Generator) -> Rates:
    """Power: how often the last good remedy is held, where True changes nothing but a pair in a hundred and False loses
    three times the margin.
    """
    shape = (audits, 1)
    parts = [spread(0.0 if good else -3 * MARGIN, shape, rng).chance for good in places]
    losses = Losses(np.concatenate(parts, axis=1), RIGHT)
    z = losses.differences(losses.reference(audits, rng)[:, None], rng)
    last = max(i for i, good in enumerate(places) if good)
    alone = passes(z, ALPHA)
    return Rates(*(float(np.mean(held[:, last])) for held in (alone, holm(z), in_order(alone))))


def _any(flags: Flags) -> float:
    return float(flags.any(axis=-1).mean())


def main(audits: int) -> None:
    """Print every scenario."""
    rng = np.random.default_rng(16)
    print(f"{audits} audits, {CLUSTERS} templates of {ITEMS} items, margin {100 * MARGIN:g} pp, level {ALPHA:g}")
    print(f"{'':54}{'all that pass':>14}{'Holm':>8}{'in order':>10}")
    for kind in KINDS:
        for remedies in (1, 2, 4, 8):
            _line(
                f"at the margin, {kind}, {remedies} remedies: one is named", at_the_margin(kind, remedies, audits, rng)
            )
    for drift in (-0.05, -0.04, -0.03, -0.02, -0.01):
        for remedies in (1, 6):
            what = f"fails at {100 * drift:g} pp, {remedies} that do nothing: one is named"
            _line(what, doing_nothing(drift, remedies, audits, rng))
    for places in ((True,) * 4, (True, True, False, False), (False, True)):
        words = "/".join("good" if good else "bad" for good in places)
        _line(f"{words}: the last good one is held", found(places, audits, rng))


def _line(what: str, rates: Rates) -> None:
    print(f"{what:<54}{rates.all_that_pass:>14.3f}{rates.holm:>8.3f}{rates.in_order:>10.3f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
