"""Random streams by name and block, so that a table comes out the same whatever the order or number of workers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_BLOCK = 500  # simulations that share one draw of cluster sizes, and an array


class Block(NamedTuple):
    """``size`` simulations with their own generator and cluster sizes [C]."""

    rng: np.random.Generator
    size: int
    counts: npt.NDArray[np.int64]


def blocks(name: str, *, seed: int, simulations: int, clusters: int, items: int, even: bool = False) -> Iterator[Block]:
    """The blocks of a case: clusters of ``items`` each if ``even``, else of sizes drawn anew for each block."""
    for number, first in enumerate(range(0, simulations, _BLOCK)):
        rng = generator(seed, name, number)
        counts = np.full(clusters, items) if even else cluster_sizes(rng, clusters, items)
        yield Block(rng, min(_BLOCK, simulations - first), counts)


def generator(seed: int, name: str, number: int) -> np.random.Generator:
    """The generator of block ``number`` of the case ``name``: the seed and two counters, nothing else."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(name.encode()), number])))


def cluster_sizes(rng: np.random.Generator, clusters: int, items: int) -> npt.NDArray[np.int64]:
    """Whole numbers uniform on [items/2, 3 items/2], one per cluster, of mean ``items``."""
    half = items // 2
    return rng.integers(items - half, items + half, size=clusters, endpoint=True)
