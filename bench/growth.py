"""On paper: what a GRPO step and an audit cost as models and clusters grow. Nothing here was run on a GPU.

Run: python -m bench.growth

A roofline with measured shares. What was measured stands in MEASURED, each with the bench line it comes from; what a
data sheet says in MACHINE; what is assumed in ASSUMED. A step is its rollouts (decoding reads weights and cache once a
token), the learner's pass (products, at a share of the peak) and what sharding sends; they are added, since the trainer
overlaps none of them. The smallest group of GPUs that holds a replica of the sampler draws; all the others draw beside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

GB = 1e9


class Known(NamedTuple):
    """A number and where it is from."""

    value: float
    source: str


@dataclass(frozen=True)
class Model:
    """A dense decoder with grouped queries; bfloat16 weights."""

    name: str
    parameters: float
    layers: int
    width: int
    kv_heads: int
    head: int

    @property
    def cache(self) -> float:
        """Bytes of keys and values of a token, uncompressed."""
        return 2.0 * self.layers * self.kv_heads * self.head * 2


MODELS = (
    Model("7B", 7.6e9, 28, 3584, 4, 128),
    Model("70B", 70.6e9, 80, 8192, 8, 128),
    Model("405B", 405.9e9, 126, 16384, 8, 128),
)
GPUS = (8, 64, 256, 1024)
MEASURED = {
    "decode": Known(0.49, "share of the bandwidth's roofline, snapkv, batch 8: python -m bench.decode"),
    "shadow": Known(1.05, "the learner through the shadow over the dense one: python -m bench.learner"),
    "bytes": Known(16.0, "a parameter over all ranks, weights + gradients + moments: python -m bench.ranks"),
    "halves": Known(4.0, "a parameter over all ranks, gradient of the first half: audit/training/optimiser.py"),
    "cells": Known(1.74, "six policies on one suite over six runs: python -m bench.grid"),
    "evict": Known(0.50, "retention of the default rollout policy: examples/quickstart.yaml"),
}
MACHINE = {
    "flops": Known(989e12, "H100 SXM, dense bfloat16, data sheet"),
    "memory": Known(80 * GB, "data sheet"),
    "bandwidth": Known(3.35e12, "bytes/s, data sheet"),
    "inside": Known(450 * GB, "bytes/s and direction, NVLink, 8 GPUs, data sheet"),
    "between": Known(50 * GB, "bytes/s and GPU, 400 Gb/s network"),
}
ASSUMED = {
    "learner": Known(0.40, "share of the peak that the learner's products reach"),
    "network": Known(0.70, "share of the network's rate that a gather reaches"),
    "activations": Known(34.0, "bytes a token and channel of the layer that is being computed, checkpointed"),
}
PROMPT, NEW, PROMPTS, GROUP = 2048, 512, 256, 8  # of a step
MICRO = (16384, 8192, 4096, PROMPT + NEW)  # tokens of one GPU's pass, the most that fits; a rollout is never cut
ITEMS, POLICIES, ANSWER = 3000, 6, 256  # of an audit


def main() -> None:
    """Print both tables and every number they are made of."""
    print(f"A step: {PROMPTS} prompts of {PROMPT} tokens x {GROUP} answers of {NEW}; an audit: {ITEMS} items x")
    print(f"{POLICIES} policies, answers of {ANSWER} tokens.\n")
    print("| model | GPUs | GB a GPU, training | rollouts s | learner s | sharding s | step s | audit s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for model in MODELS:
        for gpus in GPUS:
            print("| " + " | ".join(row(model, gpus)) + " |")
    for title, table in (("measured", MEASURED), ("machine", MACHINE), ("assumed", ASSUMED)):
        print(f"\n{title}:")
        for name, known in table.items():
            print(f"  {name} {known.value:g}: {known.source}")


def row(model: Model, gpus: int) -> list[str]:
    """One line of the table; what does not fit is said in place of times."""
    fitting = [micro for micro in MICRO if training_bytes(model, gpus, micro) <= MACHINE["memory"].value]
    micro = max(fitting, default=MICRO[-1])
    held, asked = f"{training_bytes(model, gpus, micro) / GB:.0f}", f"{audit(model, gpus):.0f}"
    if not fitting:
        return [model.name, str(gpus), f"{held}, does not fit", *["-"] * 4, asked]
    parts = rollouts(model, gpus), learner(model, gpus), sharding(model, gpus, micro)
    return [model.name, str(gpus), held, *[f"{part:.1f}" for part in (*parts, sum(parts))], asked]


def training_bytes(model: Model, gpus: int, micro: int) -> float:
    """Of one GPU: its share of what every weight takes, one layer whole, and what checkpointing keeps of its tokens."""
    layer = 2 * model.parameters / model.layers
    kept = micro * model.width * (2.0 * model.layers + ASSUMED["activations"].value)
    each = MEASURED["bytes"].value + MEASURED["halves"].value
    return each * model.parameters / gpus + layer + kept


def replica(model: Model) -> int:
    """GPUs of one sampler: as few as leave a third of their memory to the cache."""
    gpus = 1
    while 2 * model.parameters > 2 / 3 * MACHINE["memory"].value * gpus:
        gpus *= 2
    return gpus


def decoding(model: Model, gpus: int, rows: int, prompt: int, new: int, retention: float) -> float:
    """Seconds to draw ``new`` tokens for ``rows`` rows: prefill by products, then a read of all a token and wave."""
    samplers = max(gpus // replica(model), 1)
    own = -(-rows // samplers)
    room = MACHINE["memory"].value * replica(model) - 2 * model.parameters
    context = retention * prompt + new
    at_once = max(1, min(own, int(0.9 * room / (model.cache * context))))
    waves = -(-own // at_once)
    rate = MACHINE["bandwidth"].value * replica(model) * MEASURED["decode"].value
    token = (2 * model.parameters + at_once * model.cache * context) / rate
    prefill = 2 * model.parameters * own * prompt / GROUP
    return waves * new * token + prefill / (MACHINE["flops"].value * ASSUMED["learner"].value * replica(model))


def rollouts(model: Model, gpus: int) -> float:
    """Seconds of a step's rollouts, the prompt of a group prefilled once."""
    return decoding(model, gpus, PROMPTS * GROUP, PROMPT, NEW, MEASURED["evict"].value)


def learner_tokens() -> float:
    """Of a step, unpacked: every answer with its own prompt."""
    return float(PROMPTS * GROUP * (PROMPT + NEW))


def learner(model: Model, gpus: int) -> float:
    """Seconds of products: two a weight forward, four backward, two again for checkpoints; causal pairs alike."""
    tokens, length = learner_tokens(), PROMPT + NEW
    work = 8 * model.parameters * tokens + 4 * 2 * model.layers * model.width * tokens * length / 2 * 2
    return work * MEASURED["shadow"].value / (gpus * MACHINE["flops"].value * ASSUMED["learner"].value)


def sharding(model: Model, gpus: int, micro: int) -> float:
    """Seconds of gathers and scatters: all weights three times a pass (forward, again, backward), gradients once."""
    passes = max(1.0, learner_tokens() / (gpus * micro))
    rate = MACHINE["inside" if gpus <= 8 else "between"].value * ASSUMED["network"].value
    return (3 * passes + 2) * 2 * model.parameters * (gpus - 1) / gpus / rate


def audit(model: Model, gpus: int) -> float:
    """Seconds of an audit: every policy answers every item, of which what they share is done once."""
    rows = ITEMS * POLICIES
    return decoding(model, gpus, rows, PROMPT, ANSWER, 1.0) / MEASURED["cells"].value


if __name__ == "__main__":
    main()
