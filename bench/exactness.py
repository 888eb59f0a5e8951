"""How far the shadow pass is from what was sampled, per policy and precision, on tiny random models."""

from __future__ import annotations

from dataclasses import replace

import torch

from audit.kv.shadow import suffix_logits
from audit.policies import Composed, Policy
from audit.sampler import Decoding, Sampler
from bench.models import Served, random_llama

PROMPT, NEW, GROUP = 200, 48, 4


def gaps(policy: Policy) -> dict[str, float]:
    """Largest |log p sampler - log p shadow| in nats by dtype, over two turns of a group; none without replay."""
    if not policy.replayable:
        return {}
    return {str(dtype).removeprefix("torch."): gap(policy, dtype) for dtype in _DTYPES}


_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@torch.no_grad()
def gap(policy: Policy, dtype: torch.dtype) -> float:
    """The largest gap of one policy at a tenth of its budget."""
    model = random_llama(64, 3, vocabulary=97, spread=0.2).model.to(dtype)
    served = Served("tiny", model, 4096)
    torch.manual_seed(3)
    prompt = torch.randint(0, 97, (PROMPT,)).tolist()
    episode = Sampler(served, _small(policy)).open([prompt], list(range(GROUP)), group=GROUP)
    drawn = [list(c.logprobs) for c in episode.decode(Decoding(NEW)) if c]
    episode.extend([prompt[:30]] * GROUP)
    for row, completion in enumerate(episode.decode(Decoding(NEW))):
        drawn[row] += completion.logprobs if completion else ()
    rollouts = episode.rollouts()
    logits, _ = suffix_logits(model, rollouts, group=GROUP, view="shadow")
    worst = 0.0
    for row, rollout in enumerate(rollouts):
        suffix, sampled = rollout.ids[PROMPT:], rollout.sampled[PROMPT:]
        shadow = logits[row, : len(suffix)].double().log_softmax(-1).gather(1, suffix[:, None])[:, 0][sampled]
        worst = max(worst, float((shadow - torch.tensor(drawn[row], dtype=torch.float64)).abs().max()))
    return worst


def _small(policy: Policy) -> Policy:
    """The same policy at budget 64 and chunk 64, so that it bites."""
    if isinstance(policy, Composed):
        return Composed(parts=tuple(_small(part) for part in policy.parts))
    if not policy.evicts:
        return replace(policy, chunk=64)
    window = -1 if policy.name == "h2o" else policy.window
    return replace(policy, budget=64, window=window, chunk=64, interval=min(policy.interval, 16))
