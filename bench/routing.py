"""How near is the learner of a mixture-of-experts model to its sampler, with recorded experts and with its own choice?

    python -m bench.routing

Takes 10 seconds; results: docs/how-the-cache-works.md. Prints the largest and the mean gap in nats, and the share of
choices that rounding flips.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.models import Served
from kvaudit.audit.cache.attention import ATTENTION_NAME
from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.routing import RecordedRoutes, hook_expert_blocks
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.replay.attention import Replay
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import Sampler

PROMPT, NEW, ROWS, POLICY = 200, 200, 8, "snapkv:budget=64,window=8,chunk=64,interval=16"


def random_moe(dtype: torch.dtype) -> Served:
    """Return a model of four layers with 32 experts, four per token."""
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        num_experts=32, num_experts_per_tok=4, moe_intermediate_size=32, max_position_embeddings=4096,
        initializer_range=0.2,
    )  # fmt: skip
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    return Served("random Qwen3-MoE", Qwen3MoeForCausalLM(config).to(dtype).eval(), 4096)


@torch.no_grad()
def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        served = random_moe(dtype)
        torch.manual_seed(3)
        prompts = torch.randint(0, 97, (ROWS, PROMPT)).tolist()
        episode = Sampler(served, parse_policy(POLICY)).open(prompts, list(range(ROWS)))
        episode.decode(Decoding(NEW))
        rollouts = episode.rollouts()
        print(f"{dtype}, {ROWS * NEW} tokens, {flipped_share(served, rollouts):.2%} of the choices flip")
        for title, reroute in (("recorded experts", False), ("experts chosen again", True)):
            sizes = gaps(served, rollouts, reroute=reroute)
            print(f"  {title:20} {float(sizes.max()):.1e} nats at most, {float(sizes.mean()):.1e} in the mean")


def gaps(served: Served, rollouts: list[Rollout], *, reroute: bool) -> Tensor:
    """Return |log p sampler - log p shadow| of every sampled token."""
    logits, _ = suffix_logits(served.model, rollouts, group=1, view="shadow", reroute=reroute)
    drawn = torch.stack([rollout.ids[PROMPT:] for rollout in rollouts])
    sampled = torch.stack([rollout.sampler_logprobs[PROMPT:] for rollout in rollouts])
    return (logits.double().log_softmax(-1).gather(2, drawn[..., None])[..., 0] - sampled).abs()


def flipped_share(served: Served, rollouts: list[Rollout]) -> float:
    """Return the share of (token, block) pairs whose experts differ between one pass and token-by-token decoding."""
    blocks, ids = hook_expert_blocks(served.model), torch.stack([rollout.ids for rollout in rollouts])[:, :-1]
    positions = torch.arange(ids.shape[1]).expand(*ids.shape)
    plans = layer_plans(served.model.config, parse_policy("none"))
    replay = Replay(plans, positions, positions, torch.stack([r.evicted_at for r in rollouts])[..., :-1])
    routes = replay.routes = RecordedRoutes(blocks, len(ids))  # type: ignore[assignment]
    routes.begin(positions, ids.shape[1])
    served.model(input_ids=ids, position_ids=positions, use_cache=False, kv=replay)
    recorded = torch.stack([rollout.experts[:-1] for rollout in rollouts if rollout.experts is not None])
    return float((recorded.sort(-1).values != routes.table(ids.shape[1]).sort(-1).values).any(-1).double().mean())


if __name__ == "__main__":
    main()
