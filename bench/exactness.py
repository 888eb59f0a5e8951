"""How far is the shadow pass from the sampled log-probs, by policy and precision?

    python -m bench.exactness                                 # a tiny random model
    python -m bench.exactness --model DIR --policies "none;int8;fp8;kivi" --prompt 300 --new 24
    python -m bench.exactness --model DIR --dtype bfloat16

Takes 10 seconds for the tiny model, minutes for 135M parameters; results: docs/how-the-cache-works.md, and on a GPU
docs/results/gpu.md.

A group of rows of one prompt is sampled over two turns and replayed in one pass: with the recorded hints (codes at the
border of two), without them, and densely. Gaps are the largest |log p sampler - log p pass| in nats; hints are counted
per token, with their bytes in the ledger file. The prompt of a model in DIR is the head of docs/how-the-cache-works.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from bench.models import Served, random_llama
from kvaudit.audit.cache.hints import unpack_hints
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.policies import Composed, Evictor, Policy, parse_policy
from kvaudit.audit.replay.learner_pass import LearnerPass, suffix_logits
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Sampler

PROMPT, NEW, GROUP, MESSAGE = 200, 48, 4, 30
TEXT = Path(__file__).parent.parent / "docs" / "how-the-cache-works.md"


class Sampled(NamedTuple):
    """A group's rollouts, and by row the log-probs of the sampled tokens in full precision."""

    rollouts: list[Rollout]
    drawn: list[list[float]]


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    served, prompt = tiny_model(getattr(torch, options.dtype)), random_ids(options.prompt)
    served.device = torch.device(options.device)
    served.model.to(served.device)
    if options.model:
        loaded = load_model(options.model, dtype=options.dtype, device=options.device)
        prompt = loaded.chat.tokenizer(TEXT.read_text())["input_ids"][: options.prompt]
        served = Served(options.model.rstrip("/").rpartition("/")[2], loaded.model, loaded.max_positions, loaded.device)
    lengths = f"{len(prompt)} + {MESSAGE} tokens given, {2 * options.new} drawn, {options.group} rows"
    print(f"{served.name}, {options.dtype}, {served.device}, {lengths}\n")
    print("| policy | gap | without hints | dense | hints a token | bytes a token |\n|" + "---|" * 6)
    for text in options.policies.split(";"):
        sampled = sample(served, parse_policy(text), prompt, options.new, options.group)
        print(table_row(text, served, sampled), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format; default: a tiny random model")
    parser.add_argument("--policies", default="none;int8;fp8;kivi", help="specs separated by ';'")
    parser.add_argument("--dtype", default="float32", choices=("float64", "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--new", type=int, default=NEW, help="tokens drawn in each of two turns")
    parser.add_argument("--group", type=int, default=GROUP)
    return parser.parse_args()


def table_row(text: str, served: Served, sampled: Sampled) -> str:
    bare = sampled._replace(rollouts=[replace(rollout, hints=None) for rollout in sampled.rollouts])
    row_gaps = [largest_gap(served, sampled), largest_gap(served, bare), largest_gap(served, sampled, "dense")]
    tokens = sum(len(rollout.ids) for rollout in sampled.rollouts)
    packed = [rollout.hints for rollout in sampled.rollouts if rollout.hints is not None]
    hints, size = sum(len(unpack_hints(words)[0]) for words in packed), sum(2 * len(words) for words in packed)
    cells = [f"`{text}`", *(f"{gap:.1e}" for gap in row_gaps), f"{hints / tokens:.1f}", f"{size / tokens:.0f}"]
    return "| " + " | ".join(cells) + " |"


def gaps(policy: Policy) -> dict[str, float]:
    """Return a policy's largest gap by dtype, on tiny random models and a small budget; {} if it cannot be replayed."""
    if not policy.replayable:
        return {}
    by_dtype = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        served = tiny_model(dtype)
        by_dtype[str(dtype).removeprefix("torch.")] = largest_gap(
            served, sample(served, _with_small_budget(policy), random_ids(PROMPT))
        )
    return by_dtype


def tiny_model(dtype: torch.dtype) -> Served:
    """Return a model with three layers of random weights."""
    return Served("tiny", random_llama(64, 3, vocabulary=97, spread=0.2).model.to(dtype), 4096)


def random_ids(tokens: int) -> list[int]:
    """Return random token ids, always the same."""
    torch.manual_seed(3)
    ids: list[int] = torch.randint(0, 97, (tokens,)).tolist()
    return ids


@torch.no_grad()
def sample(served: Served, policy: Policy, prompt: Sequence[int], new: int = NEW, group: int = GROUP) -> Sampled:
    """Sample two turns of a group, with a message between them."""
    episode = Sampler(served, policy).open([prompt], list(range(group)), group=group)
    drawn = [list(c.logprobs) for c in episode.decode(Decoding(new)) if c]
    episode.extend([prompt[:MESSAGE]] * group)
    for row, completion in enumerate(episode.decode(Decoding(new))):
        drawn[row] += completion.logprobs if completion else ()
    return Sampled(episode.rollouts(), drawn)


@torch.no_grad()
def largest_gap(served: Served, sampled: Sampled, which: LearnerPass = "shadow") -> float:
    """Return the largest |log p sampler - log p pass| in nats."""
    logits, _ = suffix_logits(served.model, sampled.rollouts, group=len(sampled.rollouts), view=which)
    worst = 0.0
    for row, rollout in enumerate(sampled.rollouts):
        suffix, chosen = rollout.ids[rollout.prompt_length :], rollout.sampled[rollout.prompt_length :]
        replayed = logits[row, : len(suffix)].cpu().double().log_softmax(-1).gather(1, suffix[:, None])[:, 0][chosen]
        worst = max(worst, float((replayed - torch.tensor(sampled.drawn[row], dtype=torch.float64)).abs().max()))
    return worst


def _with_small_budget(policy: Policy) -> Policy:
    """Return the policy with budget 64 and chunk 64, so that it evicts within the short prompt."""
    if isinstance(policy, Composed):
        return Composed(parts=tuple(_with_small_budget(part) for part in policy.parts))
    if not isinstance(policy, Evictor) or not policy.evicts:
        return replace(policy, chunk=64)  # type: ignore[call-arg]  # every class has a chunk
    window = -1 if policy.name == "h2o" else policy.window
    return replace(policy, budget=64, window=window, chunk=64, interval=min(policy.interval, 16))


if __name__ == "__main__":
    main()
