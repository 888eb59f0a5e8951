"""Where does the time of a decode step, a prefill and a learner's step go, and how fast are weights read?

    KVAUDIT_REAL_MODEL=FOLDER python -m bench.breakdown    # default: the random and the embedded model
    python -m bench.breakdown --only products prefills
    python -m bench.breakdown --only graphs                # where torch.compile would break a decode step

Takes some minutes (``--only graphs`` one); results: docs/results/bench.md, for graphs docs/how-the-cache-works.md.

Shares are of self time, by torch's profiler. A learner's step is the forward and backward pass of one group, without
sampling and update. Graphs are those that torch._dynamo.explain makes of one step of the stock forward with our cache,
on two layers. Prefills are CPU time, policies in turns; a ratio is the median of those to ``none`` in the same turn.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from bench import learner
from bench.decode import BUDGET, CODING, CONTEXT, EVICTING, models, seeded_generator, time_call
from bench.models import Served, random_llama
from kvaudit import CompressedCache
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.packing import pack_weights
from kvaudit.audit.sampling.sampler import Episode, MixedEpisode, Sampler

POLICIES = {"none": "none", **EVICTING, **CODING}
PREFILLS = {**POLICIES, "h2o": f"h2o:budget={BUDGET}"}
GRAPHS = ("none", "snapkv:budget=40,window=8", "streaming:budget=24", "h2o:budget=24", "adakv:budget=40,window=8")
GRAPHS += (
    "expected:budget=24,interval=1",
    "quest:budget=16,page=4,dense=1",
    "int8",
    "kivi:bits=4,group=16,residual=16",
)
STEPS, GROUP, ANSWER, TURNS = 8, learner.GROUP, 24, 5
KINDS = {
    "products with weights": "(add)?mm|mkldnn::_linear_pointwise",
    "attention": "bmm|baddbmm|_?softmax(_backward_data)?|.*dot_product.*",
    "copies, gathers, masks": ".*(copy|cat|gather|scatter|index|fill|where|repeat).*",
}
REST = "all else"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"shares": shares, "prefills": prefills, "products": products, "graphs": graphs}
    parser.add_argument("--only", nargs="+", choices=tables, default=["shares", "prefills", "products"])
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    print(f"{torch.get_num_threads()} thread(s)")
    for name in options.only:
        tables[name]()


def graphs() -> None:
    """Print how many graphs torch.compile makes of a decode step, and where our code breaks them."""
    served = random_llama(64, 2, vocabulary=64)
    print(f"\n{served.name}, 60 tokens of context, one decode step: what torch.compile makes of it\n")
    header("policy", "graphs", "breaks", "operators in graphs", "breaks by place")
    for policy in ("stock", *GRAPHS):
        past = DynamicCache() if policy == "stock" else CompressedCache.for_model(served.model, policy)

        def step(ids: Tensor, past: Any = past) -> Tensor:
            logits: Tensor = served.model(ids, past_key_values=past).logits
            return logits

        with torch.no_grad():
            step(torch.randint(1, 64, (2, 60), generator=torch.Generator().manual_seed(1)))
            token = torch.ones(2, 1, dtype=torch.int64)
            step(token)  # buffers of the first step now exist
            torch._dynamo.reset()
            traced = torch._dynamo.explain(step)(token)
        places = Counter(place_of(reason) for reason in traced.break_reasons)
        breaks = ", ".join(f"{place} {count}" for place, count in places.most_common(4)) or "none"
        row(f"`{policy}`", str(traced.graph_count), str(traced.graph_break_count), str(traced.op_count), breaks)


def place_of(reason: Any) -> str:
    """Return the file and function of a graph break."""
    frame = reason.user_stack[-1]
    return f"`{Path(frame.filename).stem}.{frame.name}`"


def shares() -> None:
    """Print the share of each kind of operation in a decode step, a prefill and a learner's step."""
    for trainable, _ in models():
        served = pack_weights(trainable)
        context = min(CONTEXT, served.max_positions - 2 * (STEPS + ANSWER))
        print(f"\n{served.name}, {context} tokens of context, answers of {ANSWER} tokens: ms, shares of self time\n")
        header("work", "policy", "ms", *KINDS, REST)
        for batch in (1, GROUP):
            for name, policy in POLICIES.items():
                row(f"decode step, batch {batch}", name, *profile_decode_step(served, policy, context, batch))
        for name, policy in PREFILLS.items():
            row("prefill", name, *profile_cells(partial(prefilled_episode, served, policy, context, 1)))
        for name in ("none", "snapkv"):
            row(f"learner, 1 x {GROUP}", name, *profile_learner_step(trainable, POLICIES[name], context))


def prefills() -> None:
    """Print the time of a prefill under each policy, and its ratio to that under ``none``."""
    for trainable, _ in models():
        served = pack_weights(trainable)
        context = min(CONTEXT, served.max_positions)
        print(f"\n{served.name}, a prompt of {context} tokens: seconds of CPU time, and to none, {TURNS} turns\n")
        header("policy", "s", "to none")
        turns = []
        for turn in range(TURNS):
            order = list(PREFILLS.items())[:: 1 if turn % 2 == 0 else -1]
            turns.append(
                {name: time_call(partial(prefilled_episode, served, policy, context, 1)).cpu for name, policy in order}
            )
        for name in PREFILLS:
            ratio = median(turn[name] / turn["none"] for turn in turns)
            row(name, f"{median(turn[name] for turn in turns):.2f}", f"{ratio:.2f}")


def profile_decode_step(served: Served, policy: str, context: int, batch: int) -> list[str]:
    """Return the table cells of a decode step."""
    episode = started_episode(served, policy, context, batch)
    return profile_cells(partial(episode.decode, Decoding(STEPS, temperature=0.0)), STEPS)


def profile_learner_step(served: Served, policy: str, context: int) -> list[str]:
    """Return the table cells of a forward and backward pass over one group: dense under ``none``, else shadow."""
    episode = prefilled_episode(served, policy, context, GROUP)
    episode.decode(Decoding(ANSWER))
    step = partial(learner.seconds, served, episode.rollouts(), "dense" if policy == "none" else "shadow")
    step()  # warm-up
    return profile_cells(step)


def started_episode(served: Served, policy: str, context: int, batch: int) -> Episode | MixedEpisode:
    """Return rows of one prompt that have sampled some tokens."""
    episode = prefilled_episode(served, policy, context, batch)
    episode.decode(Decoding(STEPS, temperature=0.0))
    return episode


def prefilled_episode(served: Served, policy: str, context: int, batch: int) -> Episode | MixedEpisode:
    """Return rows of one random prompt after its prefill."""
    prompt: list[int] = torch.randint(
        0, served.model.config.vocab_size, (context,), generator=seeded_generator()
    ).tolist()
    return Sampler(served, parse_policy(policy)).open([prompt], list(range(batch)), group=batch)


def profile_cells(work: Callable[[], object], steps: int = 1) -> list[str]:
    """Return milliseconds of self time per step, and the share of each kind of operation."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        spent[kind_of(event.key.removeprefix("aten::"))] += event.self_cpu_time_total
    return [f"{spent.total() / 1e3 / steps:.1f}", *(f"{spent[k] / spent.total():.0%}" for k in (*KINDS, REST))]


def kind_of(operation: str) -> str:
    """Return the kind of a torch operation, by KINDS."""
    return next((kind for kind, names in KINDS.items() if re.fullmatch(names, operation)), REST)


def products() -> None:
    """Print how many GB of weights per second a product of few rows reads: as stored, and packed by oneDNN."""
    print("\nSmolLM2-135M's products, 12 layers: GB of weights a second, as they are stored | packed by oneDNN\n")
    header("rows", "float32", "", "bfloat16", "", "head, float32", "")
    shapes = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    layers = [torch.randn(shape) * 0.02 for _ in range(12) for shape in shapes]
    head = [torch.randn(49152, 576) * 0.02]
    for rows in (1, 2, GROUP):
        rates = [bandwidth(weights, rows) for weights in (layers, [w.bfloat16() for w in layers], head)]
        row(str(rows), *(f"{rate:.1f}" for pair in rates for rate in pair))


def bandwidth(weights: list[Tensor], rows: int) -> tuple[float, float]:
    """Return GB per second of ``F.linear`` and of oneDNN's packed product, the best of four passes over all weights."""
    inputs = [torch.randn(rows, w.shape[1], dtype=w.dtype) for w in weights]
    packed = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights]

    def multiply_stored() -> None:
        for x, w in zip(inputs, weights, strict=True):
            linear(x, w)

    def multiply_packed() -> None:
        for x, w in zip(inputs, packed, strict=True):
            torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")

    total = sum(w.nbytes for w in weights) / 1e9
    with torch.no_grad():
        best = [min(time_call(work).cpu for _ in range(4)) for work in (multiply_stored, multiply_packed)]
    return total / best[0], total / best[1]


def header(*names: str) -> None:
    row(*names)
    print("|" + "---|" * len(names))


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
