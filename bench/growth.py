"""What would a GRPO step and an audit cost on GPUs as models and clusters grow? An estimate; nothing was run on a GPU.

    python -m bench.growth

Takes a second; results: docs/results/growth.md.

A roofline with measured shares: MEASURED has what other benchmarks measured, MACHINE what a data sheet says, ASSUMED
the rest. A step is the sum of its rollouts (decoding reads weights and cache once per token), the learner's pass
(matrix products at a share of the peak) and the traffic of sharding, since the trainer overlaps none of them. Each
sampler takes as few GPUs as hold a replica; all samplers work in parallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

GB = 1e9


class Sourced(NamedTuple):
    """A number and its source."""

    value: float
    source: str


@dataclass(frozen=True)
class Model:
    """A dense decoder with grouped-query attention and bfloat16 weights."""

    name: str
    parameters: float
    layers: int
    width: int
    kv_heads: int
    head: int

    @property
    def cache_bytes(self) -> float:
        """The bytes of keys and values per token, uncompressed."""
        return 2.0 * self.layers * self.kv_heads * self.head * 2


MODELS = (
    Model("7B", 7.6e9, 28, 3584, 4, 128),
    Model("70B", 70.6e9, 80, 8192, 8, 128),
    Model("405B", 405.9e9, 126, 16384, 8, 128),
)
GPUS = (8, 64, 256, 1024)
MEASURED = {
    "decode": Sourced(0.49, "share of the bandwidth's roofline, snapkv, batch 8: python -m bench.decode"),
    "shadow": Sourced(1.05, "the learner through the shadow over the dense one: python -m bench.learner"),
    "bytes": Sourced(16.0, "a parameter over all ranks, weights + gradients + moments: python -m bench.ranks"),
    "halves": Sourced(4.0, "a parameter over all ranks, gradient of the first half: audit/training/optimiser.py"),
    "cells": Sourced(1.74, "six policies on one suite over six runs: python -m bench.grid"),
    "evict": Sourced(0.50, "retention of the default rollout policy: examples/quickstart.yaml"),
}
MACHINE = {
    "flops": Sourced(989e12, "H100 SXM, dense bfloat16, data sheet"),
    "memory": Sourced(80 * GB, "data sheet"),
    "bandwidth": Sourced(3.35e12, "bytes/s, data sheet"),
    "inside": Sourced(450 * GB, "bytes/s and direction, NVLink, 8 GPUs, data sheet"),
    "between": Sourced(50 * GB, "bytes/s and GPU, 400 Gb/s network"),
}
ASSUMED = {
    "learner": Sourced(0.40, "share of the peak that the learner's products reach"),
    "network": Sourced(0.70, "share of the network's rate that a gather reaches"),
    "activations": Sourced(34.0, "bytes a token and channel of the layer that is being computed, checkpointed"),
}
PROMPT, NEW, PROMPTS, GROUP = 2048, 512, 256, 8  # per step
MICRO = (16384, 8192, 4096, PROMPT + NEW)  # tokens per pass of a GPU, the most that fits; a rollout is never cut
ITEMS, POLICIES, ANSWER = 3000, 6, 256  # per audit


def main() -> None:
    print(f"A step: {PROMPTS} prompts of {PROMPT} tokens x {GROUP} answers of {NEW}; an audit: {ITEMS} items x")
    print(f"{POLICIES} policies, answers of {ANSWER} tokens.\n")
    print("| model | GPUs | GB a GPU, training | rollouts s | learner s | sharding s | step s | audit s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for model in MODELS:
        for gpus in GPUS:
            print("| " + " | ".join(table_row(model, gpus)) + " |")
    for title, table in (("measured", MEASURED), ("machine", MACHINE), ("assumed", ASSUMED)):
        print(f"\n{title}:")
        for name, number in table.items():
            print(f"  {name} {number.value:g}: {number.source}")


def table_row(model: Model, gpus: int) -> list[str]:
    fitting = [micro for micro in MICRO if training_bytes(model, gpus, micro) <= MACHINE["memory"].value]
    micro = max(fitting, default=MICRO[-1])
    memory, audit = f"{training_bytes(model, gpus, micro) / GB:.0f}", f"{audit_seconds(model, gpus):.0f}"
    if not fitting:
        return [model.name, str(gpus), f"{memory}, does not fit", *["-"] * 4, audit]
    parts = rollout_seconds(model, gpus), learner_seconds(model, gpus), sharding_seconds(model, gpus, micro)
    return [model.name, str(gpus), memory, *[f"{seconds:.1f}" for seconds in (*parts, sum(parts))], audit]


def training_bytes(model: Model, gpus: int, micro: int) -> float:
    """Return a GPU's bytes in training: its share of all states, one gathered layer, and checkpointed activations."""
    layer = 2 * model.parameters / model.layers
    activations = micro * model.width * (2.0 * model.layers + ASSUMED["activations"].value)
    per_parameter = MEASURED["bytes"].value + MEASURED["halves"].value
    return per_parameter * model.parameters / gpus + layer + activations


def sampler_gpus(model: Model) -> int:
    """Return the GPUs of one sampler: as few as leave a third of their memory to the cache."""
    gpus = 1
    while 2 * model.parameters > 2 / 3 * MACHINE["memory"].value * gpus:
        gpus *= 2
    return gpus


def decode_seconds(model: Model, gpus: int, rows: int, prompt: int, new: int, retention: float) -> float:
    """Return the seconds to sample ``new`` tokens for ``rows`` rows: prefill, then one read per token and wave."""
    samplers = max(gpus // sampler_gpus(model), 1)
    share = -(-rows // samplers)
    room = MACHINE["memory"].value * sampler_gpus(model) - 2 * model.parameters
    context = retention * prompt + new
    at_once = max(1, min(share, int(0.9 * room / (model.cache_bytes * context))))
    waves = -(-share // at_once)
    rate = MACHINE["bandwidth"].value * sampler_gpus(model) * MEASURED["decode"].value
    token = (2 * model.parameters + at_once * model.cache_bytes * context) / rate
    prefill = 2 * model.parameters * share * prompt / GROUP
    return waves * new * token + prefill / (MACHINE["flops"].value * ASSUMED["learner"].value * sampler_gpus(model))


def rollout_seconds(model: Model, gpus: int) -> float:
    """Return the seconds of a step's rollouts; a group's prompt is prefilled once."""
    return decode_seconds(model, gpus, PROMPTS * GROUP, PROMPT, NEW, MEASURED["evict"].value)


def learner_tokens() -> float:
    """Return the tokens of a step: every answer with its own prompt, unpacked."""
    return float(PROMPTS * GROUP * (PROMPT + NEW))


def learner_seconds(model: Model, gpus: int) -> float:
    """Return the seconds of matrix products; FLOPs per weight and token are 2 forward, 4 backward, 2 recomputed."""
    tokens, length = learner_tokens(), PROMPT + NEW
    work = 8 * model.parameters * tokens + 4 * 2 * model.layers * model.width * tokens * length / 2 * 2
    return work * MEASURED["shadow"].value / (gpus * MACHINE["flops"].value * ASSUMED["learner"].value)


def sharding_seconds(model: Model, gpus: int, micro: int) -> float:
    """Return the seconds of gathers and scatters: weights three times per pass, gradients once."""
    passes = max(1.0, learner_tokens() / (gpus * micro))
    rate = MACHINE["inside" if gpus <= 8 else "between"].value * ASSUMED["network"].value
    return (3 * passes + 2) * 2 * model.parameters * (gpus - 1) / gpus / rate


def audit_seconds(model: Model, gpus: int) -> float:
    """Return the seconds of an audit in which policies share the work that is the same."""
    rows = ITEMS * POLICIES
    return decode_seconds(model, gpus, rows, PROMPT, ANSWER, 1.0) / MEASURED["cells"].value


if __name__ == "__main__":
    main()
