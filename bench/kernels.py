"""How long do the triton kernels of a decode step take on a GPU, and would other constants be faster?

    python -m bench.kernels                                      # the constants as they are
    python -m bench.kernels --set _CODED_STAGES=2,4 _WARPS=4     # each change by itself, in decode_kernels.py

Takes about a minute on a GPU. It serves to choose the constants of kvaudit/audit/cache/decode_kernels.py; no page has
its figures, docs/results/gpu.md has those of whole steps. Shapes are those of Qwen2.5-1.5B: batch 8, 2 KV heads of 6
query heads each, 128 channels, bfloat16. 28 layers of random entries, more than a GPU's cache, are read in one graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvaudit.audit.cache import decode_kernels
from kvaudit.audit.cache.decode_kernels import CodedPart, attend_codes, attend_slots

BATCH, HEADS, GROUP, SIZE, LAYERS = 8, 2, 6, 128, 28
RUN = 32  # keys that share scales under kivi


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", default=[], help="NAME=NUMBER[,NUMBER...]")
    parser.add_argument("--slots", nargs="+", type=int, default=[2304, 9216])
    options = parser.parse_args()
    tried = [("as they are", {}), *((f"{n}={v}", {n: v}) for n, v in changes(options.set))]
    print("| settings | entries | " + " | ".join(f"{slots:,} slots, us" for slots in options.slots) + " |")
    print("|---|---|" + "---:|" * len(options.slots))
    for kind in ("exact", "int8", "kivi"):
        layers = {slots: [entries(kind, slots) for _ in range(LAYERS)] for slots in options.slots}
        for name, change in tried:
            originals = {constant: getattr(decode_kernels, constant) for constant in change}
            vars(decode_kernels).update(change)
            times = [f"{microseconds(kind, slots, layers[slots]):.1f}" for slots in options.slots]
            vars(decode_kernels).update(originals)
            print(f"| {name} | {kind} | " + " | ".join(times) + " |", flush=True)


def changes(words: list[str]) -> Iterator[tuple[str, int]]:
    """Yield each constant with each of its new numbers."""
    for word in words:
        name, _, numbers = word.partition("=")
        yield from ((name, int(number)) for number in numbers.split(","))


def entries(kind: str, slots: int) -> tuple[Any, Any]:
    """Return random keys and values of one layer; all but the last are codes, unless ``kind`` is exact."""
    shape = (BATCH, HEADS, slots)
    if kind == "exact":
        keys, values = (torch.randn(*shape, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return keys, values
    ring = torch.randn(BATCH, HEADS, RUN + 8, SIZE, device="cuda", dtype=torch.bfloat16)
    if kind == "int8":
        done = torch.full((BATCH,), slots - 1, device="cuda")
        codes, scales = ([made(*shape, width) for _ in range(2)] for made, width in ((random_bytes, SIZE), (rand, 1)))
        keys, values = (CodedPart(c, s, ring, done, "int8", 8) for c, s in zip(codes, scales, strict=True))
        return keys, values
    done = torch.full((BATCH,), slots - RUN, device="cuda")
    groups = (torch.arange(slots, device="cuda") // RUN).to(torch.int16).expand(*shape).contiguous()
    table = rand(BATCH, HEADS, slots // RUN + 1, 2 * SIZE)
    return (
        CodedPart(random_bytes(*shape, SIZE // 2), table, ring, done, "unsigned", 4, groups, RUN),
        CodedPart(random_bytes(*shape, SIZE // 2), rand(*shape, 2 * SIZE // RUN), ring, done, "unsigned", 4),
    )


def random_bytes(*shape: int) -> Tensor:
    """Return random codes."""
    return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)


def rand(*shape: int) -> Tensor:
    """Return random parameters."""
    return torch.rand(*shape, device="cuda", dtype=torch.bfloat16)


def microseconds(kind: str, slots: int, layers: list[tuple[Any, Any]]) -> float:
    """Return the time of one layer in microseconds, the mean over all layers in three replays."""
    positions = torch.arange(slots, device="cuda", dtype=torch.int32).expand(BATCH, HEADS, slots).contiguous()
    newest = torch.full((BATCH,), slots - 1, device="cuda")
    query = torch.randn(BATCH, GROUP * HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    attend: Callable[..., Tensor] = attend_slots if kind == "exact" else attend_codes

    def run() -> None:
        for keys, values in layers:
            attend(query, keys, values, positions, newest, SIZE**-0.5)

    run()
    graph, began, ended = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    began.record()
    for _ in range(3):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return 1e3 * began.elapsed_time(ended) / 3 / len(layers)


if __name__ == "__main__":
    main()
