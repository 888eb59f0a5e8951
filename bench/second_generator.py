"""Does the gate keep its error rates on data from a generator that shares no code with the calibration?

    python -m bench.second_generator [--seed 5] [--every 4] [--audits 1000]

Takes a minute with these options; results: docs/results/gate.md.

Every item is an event of one arm or of both, with chances that depend on its template: the template's rate is a beta
variable, its losses and gains are another one. Template sizes are one plus a Poisson number, two sizes in random order,
or all alike. A template can break as a whole, in half of its items, or with a chance that grows with its size. The mean
loss that was drawn is compared with the true one. Decisions are those of ``kvaudit.reports.verdict``.
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
_AGREEMENT = 40.0  # of the beta variable of a template's losses; the larger, the more similar are templates


@dataclass(frozen=True)
class World:
    """One candidate in one design; its limit is a ``margin`` in score units or a ``ratio`` to the reference's ``rate``.

    ``how`` the loss comes about: items, templates, halves (of their items), large (templates only), by size, or none.
    """

    how: str  # do not rename fields: their names seed the draws
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
        """The true loss in score units."""
        if self.how == "none":
            return 0.0
        return (self.margin or 0.0) if self.ratio is None else (self.ratio - 1) * self.rate


@dataclass(frozen=True)
class Result:
    """The share of audits that passed, and the mean loss that was drawn, each with its standard error."""

    world: World
    audits: int
    passed: float
    error: float
    lost: float
    lost_error: float


def sizes_of(rng: np.random.Generator, world: World) -> npt.NDArray[np.int64]:
    """Return the number of items [C] of each template."""
    if world.sizes == "alike":
        return np.full(world.templates, world.items, dtype=np.int64)
    if world.sizes == "poisson":
        return 1 + rng.poisson(world.items - 1, world.templates)
    small = rng.permutation(world.templates) < world.templates // 2
    return np.where(small, world.items // 2, 3 * world.items // 2)


def break_chances(world: World, sizes: npt.NDArray[np.int64]) -> Array:
    """Return each template's chance [C] to break, so that the expected loss is the true one."""
    share = np.ones(len(sizes))
    if world.how == "large":
        share = (sizes > sizes.mean()).astype(np.float64)
    elif world.how == "by size":
        share = sizes / sizes.mean()
    depth = 0.5 if world.how == "halves" else 1.0
    safe = 1.0 if world.ratio is None else 1 - world.rate  # share of events that can still be added
    chance: Array = world.loss * share * sizes.sum() / (share * sizes).sum() / depth / safe
    return chance


def draw_answers(
    rng: np.random.Generator, world: World, sizes: npt.NDArray[np.int64], audits: int
) -> tuple[Array, Array]:
    """Return shares [audits, N] of draws with the event, for the reference and the candidate."""
    template = np.repeat(np.arange(len(sizes)), sizes)
    level = rng.beta(2 * world.rate, 2 * (1 - world.rate), (audits, len(sizes)))[:, template]
    event = rng.uniform(size=level.shape) < level
    spread = world.loss if world.how == "items" else 0.0
    gained = world.churn / 2 / world.rate  # share of the reference's events that the candidate lacks
    new = (world.churn / 2 + spread) / (1 - world.rate)
    wobble = rng.beta(_AGREEMENT * new, _AGREEMENT * (1 - new), (audits, len(sizes)))[:, template]
    reference, candidate = np.zeros(level.shape), np.zeros(level.shape)
    for _ in range(world.draws):
        dice = rng.uniform(size=level.shape)
        reference += event
        candidate += np.where(event, dice >= gained, dice < wobble)
    reference, candidate = reference / world.draws, candidate / world.draws
    if world.how not in ("items", "none"):
        broken = (rng.uniform(size=(audits, len(sizes))) < break_chances(world, sizes))[:, template]
        if world.how == "halves":
            broken &= rng.uniform(size=level.shape) < 0.5
        if world.ratio is None:  # a lost margin needs an answer that was right before
            reference = np.where(broken, 0.0, reference)
        candidate = np.where(broken, 1.0, candidate)
    return reference, candidate


def simulate(world: World, *, audits: int, seed: int) -> Result:
    """Simulate audits of a world, and count how often the gate passes it."""
    key = zlib.crc32(json.dumps(asdict(world), sort_keys=True).encode())
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, key])))
    passed, lost = 0.0, []
    for _ in range(audits // _BLOCK):
        sizes = sizes_of(rng, world)
        reference, candidate = draw_answers(rng, world, sizes, _BLOCK)
        z = reference - candidate
        ends = np.cumsum(sizes)[:-1]
        sums, reference_sums = (
            np.stack([template.sum(axis=1) for template in np.split(side, ends, axis=1)], 1) for side in (z, reference)
        )
        whole = np.all(np.isin(z, (-1.0, 0.0, 1.0)), axis=1)
        differing = np.maximum((z != 0).sum(axis=1), 1)
        floor = np.where(whole, 1.0, 1 / np.minimum(differing, world.draws))
        block = Audits(sums, sizes.astype(np.float64), np.abs(z).sum(axis=1), floor, reference_sums)
        passed += _BLOCK * pass_rate(block, margin=world.margin or 0.0, alpha=_ALPHA, ratio=world.ratio)
        lost += list(-z.mean(axis=1))
    share, values = passed / audits, np.array(lost)
    error = float(np.sqrt(max(share, 1 / audits) * (1 - share) / audits))
    return Result(world, audits, share, error, float(values.mean()), float(values.std() / np.sqrt(audits)))


def all_worlds() -> Iterator[World]:
    """Yield candidates at exactly the limit, and without a loss, under both rules."""
    yield from _margin_worlds()
    for templates in (60, 72, 90, 120):
        for draws, sizes in ((1, "alike"), (4, "alike"), (1, "poisson"), (1, "two kinds")):
            yield World("none", templates, sizes, draws, 0.15, 0.08, margin=0.05)
    yield from _ratio_worlds()


def _margin_worlds() -> Iterator[World]:
    for draws, sizes in ((1, "alike"), (1, "poisson"), (1, "two kinds"), (4, "alike"), (8, "alike"), (4, "two kinds")):
        ways = ("templates", "items", "halves", *(() if sizes == "alike" else ("large", "by size")))
        for margin, times, how in product((0.05, 0.1), (1.0, 1.2, 1.45, 1.52, 2.0), ways):
            templates = round(times * clusters_required(margin, _ALPHA))
            yield World(how, templates, sizes, draws, 0.15, 0.06 if how == "items" else 0.02, margin=margin)


def _ratio_worlds() -> Iterator[World]:
    for draws, sizes in ((1, "alike"), (1, "poisson"), (4, "alike"), (1, "two kinds")):
        ways = ("templates", "items", "none", *(() if sizes == "alike" else ("by size",)))
        for (rate, ratio), times, how in product(_LIMITS, (1.0, 1.3, 1.6, 2.0), ways):
            templates = round(times * clusters_required((ratio - 1) * rate, _ALPHA))
            yield World(how, templates, sizes, draws, rate, 0.04, ratio=ratio)


def _print_table(results: list[Result]) -> None:
    """Print the largest share of PASS of each kind of loss, and the smallest without a loss."""
    kinds: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        w = result.world
        kinds.setdefault(("ratio" if w.ratio else "points", w.how, "1" if w.draws == 1 else "4, 8"), []).append(result)
    print(f"{'rule':<8}{'loss':<12}{'draws':<7}{'designs':>8}{'mean':>8}{'most':>8}{'error':>8}  where")
    for (rule, how, draws), group in kinds.items():
        extreme = (
            max(group, key=lambda result: result.passed)
            if how != "none"
            else min(group, key=lambda result: result.passed)
        )
        w, mean = extreme.world, float(np.mean([result.passed for result in group]))
        limit = f"{w.ratio:g} x of {w.rate:g}" if w.ratio else f"{100 * (w.margin or 0):g} pp"
        where = f"{w.templates} templates, {w.sizes}, {w.draws} draws, {limit}"
        rates = f"{mean:>8.4f}{extreme.passed:>8.4f}{extreme.error:>8.4f}"
        print(f"{rule:<8}{how:<12}{draws:<7}{len(group):>8}{rates}  {where}")
    off = max(abs(result.lost - result.world.loss) / max(result.lost_error, 1e-9) for result in results)
    print(f"the simulated and the true loss differ by at most {off:.1f} standard errors, in {len(results)} worlds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--audits", type=int, default=2000, help="simulated audits per world")
    parser.add_argument("--every", type=int, default=1, help="simulate every n-th world")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.process_time()
    worlds = list(all_worlds())[:: options.every]
    results = [simulate(world, audits=options.audits, seed=options.seed) for world in worlds]
    _print_table(results)
    print(f"{time.process_time() - started:.0f} core seconds")
    if options.out:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
