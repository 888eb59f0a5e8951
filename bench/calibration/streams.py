"""Random streams by case and block, so that order and number of workers do not matter. Used by bench.calibration."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

EVEN, UNEVEN, THREE_TO_ONE = "even", "uneven", "3:1"
_BLOCK = 500  # simulations that share one draw of cluster sizes, and an array


class Block(NamedTuple):
    """``size`` simulations with their own generator and cluster sizes [C]."""

    rng: np.random.Generator
    size: int
    counts: npt.NDArray[np.int64]


def blocks(
    name: str, *, seed: int, simulations: int, clusters: int, items: int, sizes: str = UNEVEN
) -> Iterator[Block]:
    """Yield the blocks of a case, with clusters of ``items`` on average and new ``sizes`` in each block."""
    for number, first in enumerate(range(0, simulations, _BLOCK)):
        rng = generator(seed, name, number)
        yield Block(rng, min(_BLOCK, simulations - first), SIZES[sizes](rng, clusters, items))


def fixed_blocks(name: str, *, seed: int, simulations: int, counts: npt.NDArray[np.int64]) -> Iterator[Block]:
    """Yield the blocks of a case whose clusters have these sizes [C]."""
    for number, first in enumerate(range(0, simulations, _BLOCK)):
        yield Block(generator(seed, name, number), min(_BLOCK, simulations - first), counts)


def generator(seed: int, name: str, number: int) -> np.random.Generator:
    """Return the generator of a block, seeded by ``seed``, the case's ``name`` and the block's ``number`` alone."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(name.encode()), number])))


def cluster_sizes(rng: np.random.Generator, clusters: int, items: int) -> npt.NDArray[np.int64]:
    """Return whole numbers uniform on [items/2, 3 items/2], one per cluster, of mean ``items``."""
    half = items // 2
    return rng.integers(items - half, items + half, size=clusters, endpoint=True)


def _zipf(power: float) -> Callable[[np.random.Generator, int, int], npt.NDArray[np.int64]]:
    """Return a function of sizes that fall with the rank to this power, at least 1, of mean ``items`` or more."""

    def sizes(_: np.random.Generator, clusters: int, items: int) -> npt.NDArray[np.int64]:
        shares = np.arange(1, clusters + 1) ** -power
        wanted: npt.NDArray[np.int64] = np.round(clusters * items * shares / shares.sum()).astype(np.int64)
        return np.maximum(1, wanted)

    return sizes


SIZES = {
    EVEN: lambda _, clusters, items: np.full(clusters, items),
    UNEVEN: cluster_sizes,  # up to 3:1
    # half and three halves of the mean in turn: as uneven as sizes up to 3:1 can be
    THREE_TO_ONE: lambda _, clusters, items: np.where(np.arange(clusters) % 2, 3 * items // 2, items // 2),
    "zipf .5": _zipf(0.5),
    "zipf 1": _zipf(1.0),
}
