"""How much longer does the learner's forward and backward pass take with the shadow view than with the dense view?

    python -m bench.learner

Takes 1 minute; results: docs/results/bench.md. Both views read the same rollouts, in turns.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Literal

import torch

from bench.models import Served, embedded, random_llama
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import Sampler

PROMPTS, GROUP, PROMPT, NEW, REPEATS = 4, 8, 256, 32, 5
POLICIES = ("streaming:budget=96,sink=4,window=8", "snapkv:budget=96,window=8,interval=8")


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for served in (random_llama(256, 4), *embedded()):
        print(
            f"{served.name}: {PROMPTS} prompts of {PROMPT} tokens, groups of {GROUP}, {NEW} new tokens, "
            f"{torch.get_num_threads()} thread(s)"
        )
        for policy in POLICIES:
            compare(served, policy)


def compare(served: Served, policy: str) -> None:
    rows = sample_rollouts(served, policy)
    seconds(served, rows, "shadow")  # warm-up
    turns = [(seconds(served, rows, "dense"), seconds(served, rows, "shadow")) for _ in range(REPEATS)]
    dense, shadow = (median(turn[side] for turn in turns) for side in (0, 1))
    ratio = median(turn[1] / turn[0] for turn in turns)
    print(f"  {policy:40}  shadow {shadow:.3f} s   dense {dense:.3f} s   shadow / dense {ratio:.2f}")


def sample_rollouts(served: Served, policy: str) -> list[Rollout]:
    """Return rollouts of PROMPTS groups, sampled under the policy."""
    torch.manual_seed(1)
    prompts = torch.randint(0, served.model.config.vocab_size, (PROMPTS, PROMPT)).tolist()
    episode = Sampler(served, parse_policy(policy)).open(prompts, list(range(PROMPTS * GROUP)), group=GROUP)
    episode.decode(Decoding(NEW))
    return episode.rollouts()


def seconds(served: Served, rows: list[Rollout], view: Literal["dense", "shadow"]) -> float:
    """Return the seconds of one forward and backward pass over all rows."""
    served.model.zero_grad()
    started = time.perf_counter()
    logits, valid = suffix_logits(served.model, rows, group=GROUP, view=view)
    logits.float().log_softmax(-1)[..., 0][valid].sum().backward()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
