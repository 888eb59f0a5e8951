"""Where the time of a decode step, a prefill and a learner's step goes, and how fast the skinny products read weights.

    KVAUDIT_REAL_MODEL=FOLDER python -m bench.breakdown     the folder's model; without the variable, what needs none
    python -m bench.breakdown --only operations products prefills
    python -m bench.breakdown --only graphs                 where torch.compile would break a decode step

Operations of torch are counted by a dispatch mode on a narrow model, where nothing else costs. Shares are of self time,
by torch's profiler. A learner's step is the forward and backward of one group; sampling and update are not in it.
Graphs are those that torch._dynamo.explain makes of one step of stock's own forward with our cache, on two layers.
Prefills are CPU time, policies in turns, and a ratio is the median of those to ``none`` in the same turn.
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
from bench.decode import BUDGET, CODING, CONTEXT, EVICTING, models, seeded, timed
from bench.models import Served, random_llama
from bench.operators import Operators
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
    parts: dict[str, Callable[[], None]] = {
        "operations": operations,
        "shares": shares,
        "prefills": prefills,
        "products": products,
    }
    parser.add_argument("--only", nargs="+", choices=[*parts, "graphs"], default=list(parts))
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    print(f"{torch.get_num_threads()} thread(s)")
    for part in asked.only:
        (parts | {"graphs": graphs})[part]()


def operations() -> None:
    """Operations a layer and step, of a narrow model of ten layers that has shed what it holds before."""
    layers = 10
    served = random_llama(64, layers, vocabulary=64)
    print(f"\n{served.name}, batch 1, 600 tokens of context: operations of torch a layer and step\n")
    header("policy", "operations")
    for name, policy in POLICIES.items():
        episode = opened(served, policy, 600, 1)
        with Operators() as counted:
            episode.decode(Decoding(STEPS, temperature=0.0))
        row(name, f"{counted.seen.total() / STEPS / layers:.0f}")


def graphs() -> None:
    """Graphs and graph breaks of a decode step under torch.compile, and where our code breaks them."""
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
            step(token)  # what is made at the first step is there
            torch._dynamo.reset()
            found = torch._dynamo.explain(step)(token)
        places = Counter(place_of(reason) for reason in found.break_reasons)
        told = ", ".join(f"{place} {count}" for place, count in places.most_common(4))
        row(f"`{policy}`", str(found.graph_count), str(found.graph_break_count), str(found.op_count), told or "none")


def place_of(reason: Any) -> str:
    """File and function in which a graph breaks."""
    frame = reason.user_stack[-1]
    return f"`{Path(frame.filename).stem}.{frame.name}`"


def shares() -> None:
    """What each kind of operation takes of a decode step, a prefill and a learner's step."""
    for learns, _ in models():
        served = pack_weights(learns)
        context = min(CONTEXT, served.max_positions - 2 * (STEPS + ANSWER))
        print(f"\n{served.name}, {context} tokens of context, answers of {ANSWER} tokens: ms, shares of self time\n")
        header("work", "policy", "ms", *KINDS, REST)
        for batch in (1, GROUP):
            for name, policy in POLICIES.items():
                row(f"decode step, batch {batch}", name, *decoded(served, policy, context, batch))
        for name, policy in PREFILLS.items():
            row("prefill", name, *profiled(partial(sampled, served, policy, context, 1)))
        for name in ("none", "snapkv"):
            row(f"learner, 1 x {GROUP}", name, *learned(learns, POLICIES[name], context))


def prefills() -> None:
    """What taking a prompt in costs under a policy, as a ratio to what it costs under none."""
    for learns, _ in models():
        served = pack_weights(learns)
        context = min(CONTEXT, served.max_positions)
        print(f"\n{served.name}, a prompt of {context} tokens: seconds of CPU time, and to none, {TURNS} turns\n")
        header("policy", "s", "to none")
        turns = []
        for turn in range(TURNS):
            order = list(PREFILLS.items())[:: 1 if turn % 2 == 0 else -1]
            turns.append({name: timed(partial(sampled, served, policy, context, 1)).cpu for name, policy in order})
        for name in PREFILLS:
            ratio = median(one[name] / one["none"] for one in turns)
            row(name, f"{median(one[name] for one in turns):.2f}", f"{ratio:.2f}")


def decoded(served: Served, policy: str, context: int, batch: int) -> list[str]:
    """Cells of a decode step."""
    episode = opened(served, policy, context, batch)
    return profiled(partial(episode.decode, Decoding(STEPS, temperature=0.0)), STEPS)


def learned(served: Served, policy: str, context: int) -> list[str]:
    """Cells of a forward and backward over one group, through the dense view under ``none``, else the shadow's."""
    episode = sampled(served, policy, context, GROUP)
    episode.decode(Decoding(ANSWER))
    step = partial(learner.seconds, served, episode.rollouts(), "dense" if policy == "none" else "shadow")
    step()  # warm-up
    return profiled(step)


def opened(served: Served, policy: str, context: int, batch: int) -> Episode | MixedEpisode:
    """Rows of one prompt that have drawn some tokens."""
    episode = sampled(served, policy, context, batch)
    episode.decode(Decoding(STEPS, temperature=0.0))
    return episode


def sampled(served: Served, policy: str, context: int, batch: int) -> Episode | MixedEpisode:
    """Rows of one random prompt after its prefill."""
    prompt: list[int] = torch.randint(0, served.model.config.vocab_size, (context,), generator=seeded()).tolist()
    return Sampler(served, parse_policy(policy)).open([prompt], list(range(batch)), group=batch)


def profiled(work: Callable[[], object], steps: int = 1) -> list[str]:
    """Milliseconds of self time of a step, and the share of every kind of operation."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        work()
    spent: Counter[str] = Counter()
    for event in found.key_averages():
        spent[kind_of(event.key.removeprefix("aten::"))] += event.self_cpu_time_total
    return [f"{spent.total() / 1e3 / steps:.1f}", *(f"{spent[k] / spent.total():.0%}" for k in (*KINDS, REST))]


def kind_of(operation: str) -> str:
    """The kind that an operation of torch belongs to."""
    return next((kind for kind, names in KINDS.items() if re.fullmatch(names, operation)), REST)


def products() -> None:
    """GB of weights a second that a product of few rows reads: as stored, and packed by oneDNN."""
    print("\nSmolLM2-135M's products, 12 layers: GB of weights a second, as they are stored | packed by oneDNN\n")
    header("rows", "float32", "", "bfloat16", "", "head, float32", "")
    shapes = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    layers = [torch.randn(shape) * 0.02 for _ in range(12) for shape in shapes]
    head = [torch.randn(49152, 576) * 0.02]
    for rows in (1, 2, GROUP):
        found = [bandwidth(weights, rows) for weights in (layers, [w.bfloat16() for w in layers], head)]
        row(str(rows), *(f"{rate:.1f}" for pair in found for rate in pair))


def bandwidth(weights: list[Tensor], rows: int) -> tuple[float, float]:
    """GB a second of ``F.linear`` and of oneDNN's packed product, the best of four passes over all weights."""
    inputs = [torch.randn(rows, w.shape[1], dtype=w.dtype) for w in weights]
    pack_weights = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights]

    def stored() -> None:
        for x, w in zip(inputs, weights, strict=True):
            linear(x, w)

    def reordered() -> None:
        for x, w in zip(inputs, pack_weights, strict=True):
            torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")

    total = sum(w.nbytes for w in weights) / 1e9
    with torch.no_grad():
        best = [min(timed(work).cpu for _ in range(4)) for work in (stored, reordered)]
    return total / best[0], total / best[1]


def header(*names: str) -> None:
    """The head of a table in Markdown."""
    row(*names)
    print("|" + "---|" * len(names))


def row(*cells: str) -> None:
    """One line of a table."""
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
