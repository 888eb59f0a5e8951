"""``python -m bench.second_generator``: both rules of the gate, drawn by code that the calibration shares none of.

Nothing of ``bench.calibration`` is imported. Every item is drawn as an event of one of the arms, or of both, with
chances that its template has: a template's own rate is a beta variable, what is lost and won back in it another one,
and sizes are one plus a Poisson number, two kinds in random order, or all alike. A template can break as a whole, in
its larger half, or by a chance that grows with its size. The rates of the model are then what was drawn on average, so
that a loss of exactly the limit is checked and not assumed. Draws of one item share its chance. Decisions are those of
``reports.verdict``: this file only counts.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvaudit.reports.stats.rule import clusters_required
from kvaudit.reports.verdict.chance import Audits, pass_rate

Array = npt.NDArray[np.float64]
_ALPHA, _BLOCK = 0.05, 250
_LIMITS = ((0.5, 1.1), (0.3, 1.25), (0.2, 1.5), (0.1, 2.0))  # reference's rate, limit
_AGREEMENT = 40.0  # of the beta variable that makes a template's losses: the larger the more alike are templates


@dataclass(frozen=True)
class World:
    """One model in one design. ``margin`` in score units, or a ``ratio`` at a reference where it happens at ``rate``.

    ``how`` the loss comes about: items, templates, halves (of their items), large (templates alone), by size, or none.
    """

    how: str
    templates: int
    sizes: str  # alike, poisson or two kinds
    draws: int
    rate: float
    churn: float
    margin: float | None = None
    ratio: float | None = None
    items: int = 4

    @property
    def loss(self) -> float:
        """The true loss, in score units."""
        if self.how == "none":
            return 0.0
        return (self.margin or 0.0) if self.ratio is None else (self.ratio - 1) * self.rate


@dataclass(frozen=True)
class Count:
    """What came of it: the share that passed, its standard error, and the mean loss that was drawn, with its own."""

    world: World
    audits: int
    passed: float
    error: float
    lost: float
    lost_error: float


def sizes_of(rng: np.random.Generator, world: World) -> npt.NDArray[np.int64]:
    """Items [C] of every template."""
    if world.sizes == "alike":
        return np.full(world.templates, world.items, dtype=np.int64)
    if world.sizes == "poisson":
        return 1 + rng.poisson(world.items - 1, world.templates)
    small = rng.permutation(world.templates) < world.templates // 2
    return np.where(small, world.items // 2, 3 * world.items // 2)


def breaking(world: World, sizes: npt.NDArray[np.int64]) -> Array:
    """The chance of every template [C] to break, so that the loss is what it is to be."""
    share = np.ones(len(sizes))
    if world.how == "large":
        share = (sizes > sizes.mean()).astype(np.float64)
    elif world.how == "by size":
        share = sizes / sizes.mean()
    depth = 0.5 if world.how == "halves" else 1.0
    safe = 1.0 if world.ratio is None else 1 - world.rate  # of what breaks, that did not happen already
    chance: Array = world.loss * share * sizes.sum() / (share * sizes).sum() / depth / safe
    return chance


def drawn(rng: np.random.Generator, world: World, sizes: npt.NDArray[np.int64], audits: int) -> tuple[Array, Array]:
    """Shares [audits, N] of draws in which it happens, with the reference and with the candidate."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    level = rng.beta(2 * world.rate, 2 * (1 - world.rate), (audits, len(sizes)))[:, owner]
    event = rng.uniform(size=level.shape) < level  # an item's answer, but for what is decided anew
    spread = world.loss if world.how == "items" else 0.0
    gained = world.churn / 2 / world.rate  # of the events of the reference, that the candidate has not
    new = (world.churn / 2 + spread) / (1 - world.rate)
    wobble = rng.beta(_AGREEMENT * new, _AGREEMENT * (1 - new), (audits, len(sizes)))[:, owner]
    reference, candidate = np.zeros(level.shape), np.zeros(level.shape)
    for _ in range(world.draws):
        dice = rng.uniform(size=level.shape)
        reference += event
        candidate += np.where(event, dice >= gained, dice < wobble)
    reference, candidate = reference / world.draws, candidate / world.draws
    if world.how not in ("items", "none"):
        broken = (rng.uniform(size=(audits, len(sizes))) < breaking(world, sizes))[:, owner]
        if world.how == "halves":
            broken &= rng.uniform(size=level.shape) < 0.5
        if world.ratio is None:  # a margin is lost from what was right, wherever it was
            reference = np.where(broken, 0.0, reference)
        candidate = np.where(broken, 1.0, candidate)
    return reference, candidate


def counted(world: World, *, audits: int, seed: int) -> Count:
    """How often the gate passes a world."""
    named = zlib.crc32(json.dumps(asdict(world), sort_keys=True).encode())
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, named])))
    passed, lost = 0.0, []
    for _ in range(audits // _BLOCK):
        sizes = sizes_of(rng, world)
        reference, candidate = drawn(rng, world, sizes, _BLOCK)
        z = reference - candidate
        ends = np.cumsum(sizes)[:-1]
        sums, own = (
            np.stack([part.sum(axis=1) for part in np.split(side, ends, axis=1)], 1) for side in (z, reference)
        )
        whole = np.all(np.isin(z, (-1.0, 0.0, 1.0)), axis=1)
        differing = np.maximum((z != 0).sum(axis=1), 1)
        floor = np.where(whole, 1.0, 1 / np.minimum(differing, world.draws))
        found = Audits(sums, sizes.astype(np.float64), np.abs(z).sum(axis=1), floor, own)
        passed += _BLOCK * pass_rate(found, margin=world.margin or 0.0, alpha=_ALPHA, ratio=world.ratio)
        lost += list(-z.mean(axis=1))
    share, values = passed / audits, np.array(lost)
    error = float(np.sqrt(max(share, 1 / audits) * (1 - share) / audits))
    return Count(world, audits, share, error, float(values.mean()), float(values.std() / np.sqrt(audits)))


def worlds() -> Iterator[World]:
    """Losses of exactly the limit, and no loss, under both rules."""
    yield from _of_margins()
    for templates in (60, 72, 90, 120):
        for draws, sizes in ((1, "alike"), (4, "alike"), (1, "poisson"), (1, "two kinds")):
            yield World("none", templates, sizes, draws, 0.15, 0.08, margin=0.05)
    yield from _of_ratios()


def _of_margins() -> Iterator[World]:
    for draws, sizes in ((1, "alike"), (1, "poisson"), (1, "two kinds"), (4, "alike"), (8, "alike"), (4, "two kinds")):
        ways = ("templates", "items", "halves", *(() if sizes == "alike" else ("large", "by size")))
        for margin, times, how in product((0.05, 0.1), (1.0, 1.2, 1.45, 1.52, 2.0), ways):
            templates = round(times * clusters_required(margin, _ALPHA))
            yield World(how, templates, sizes, draws, 0.15, 0.06 if how == "items" else 0.02, margin=margin)


def _of_ratios() -> Iterator[World]:
    for draws, sizes in ((1, "alike"), (1, "poisson"), (4, "alike"), (1, "two kinds")):
        ways = ("templates", "items", "none", *(() if sizes == "alike" else ("by size",)))
        for (rate, ratio), times, how in product(_LIMITS, (1.0, 1.3, 1.6, 2.0), ways):
            templates = round(times * clusters_required((ratio - 1) * rate, _ALPHA))
            yield World(how, templates, sizes, draws, rate, 0.04, ratio=ratio)


def _table(found: list[Count]) -> None:
    """The largest share of each kind, and the smallest of what is to pass."""
    kinds: dict[tuple[str, str, str], list[Count]] = {}
    for count in found:
        w = count.world
        kinds.setdefault(("ratio" if w.ratio else "points", w.how, "1" if w.draws == 1 else "4, 8"), []).append(count)
    print(f"{'rule':<8}{'loss':<12}{'draws':<7}{'designs':>8}{'mean':>8}{'most':>8}{'error':>8}  where")
    for (rule, how, draws), own in kinds.items():
        most = max(own, key=lambda count: count.passed) if how != "none" else min(own, key=lambda count: count.passed)
        w, mean = most.world, float(np.mean([count.passed for count in own]))
        limit = f"{w.ratio:g} x of {w.rate:g}" if w.ratio else f"{100 * (w.margin or 0):g} pp"
        where = f"{w.templates} templates, {w.sizes}, {w.draws} draws, {limit}"
        print(f"{rule:<8}{how:<12}{draws:<7}{len(own):>8}{mean:>8.4f}{most.passed:>8.4f}{most.error:>8.4f}  {where}")
    off = max(abs(count.lost - count.world.loss) / max(count.lost_error, 1e-9) for count in found)
    print(f"the drawn loss is off the true one by {off:.1f} standard errors at the most, in {len(found)} worlds")


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--audits", type=int, default=2000, help="of each world")
    parser.add_argument("--every", type=int, default=1, help="world of those there are")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    started = time.process_time()
    found = [counted(world, audits=asked.audits, seed=asked.seed) for world in list(worlds())[:: asked.every]]
    _table(found)
    print(f"{time.process_time() - started:.0f} core seconds")
    if asked.out:
        asked.out.write_text(json.dumps([asdict(count) for count in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
