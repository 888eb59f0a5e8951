"""What the conformance suite plays with: tiny random models, prompts, two turns, and what a row's cache held when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen3_next import modeling_qwen3_next

import kvaudit.audit.cache.attention
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.layers import patch_state_layers
from kvaudit.audit.cache.ledger import NEVER, Ledger, Rollout
from kvaudit.audit.cache.rotary import find_rotary
from kvaudit.audit.cache.routing import hook_expert_blocks
from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import Sampler

LAYERS = 2  # which is enough to tell layers apart; models of unlike layers have one more
SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, max_position_embeddings=512, num_hidden_layers=LAYERS)
GQA = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **SIZES)
MIXED = {**GQA, "num_hidden_layers": LAYERS + 1}
CONFIGS = {
    "llama-gqa": LlamaConfig(**GQA),
    "llama-mha": LlamaConfig(**{**GQA, "num_attention_heads": 2}),
    "qwen3": Qwen3Config(head_dim=8, **GQA),
    "gemma3": Gemma3TextConfig(
        head_dim=8,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        **MIXED,
    ),
    "mistral": MistralConfig(sliding_window=None, **GQA),
    "qwen2": Qwen2Config(**GQA),
    "phi": PhiConfig(partial_rotary_factor=0.5, **GQA),
    "gpt2": GPT2Config(
        n_embd=32, n_layer=LAYERS, n_head=4, n_positions=512, vocab_size=61, bos_token_id=1, eos_token_id=2
    ),
    # a dense layer between two of four experts
    "qwen3-moe": Qwen3MoeConfig(
        head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[1], **MIXED
    ),
    "gpt-oss": GptOssConfig(
        head_dim=8,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        **MIXED,
    ),
}
if hasattr(Cache, "get_conv_state"):  # older transformers keep states of linear attention in caches of their own
    CONFIGS["qwen3-next"] = Qwen3NextConfig(
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        **MIXED,
    )
DEEP = "llama-deep"  # for what tells its first layer from two others
OWN_ATTENTION = {"gpt-oss": "eager"}  # what transformers has for a model without SDPA
CORE = ["llama-gqa", "llama-mha", "qwen3", "gemma3"]


# --- models ---------------------------------------------------------------------------------------------------------


def exact_norms(model: torch.nn.Module) -> None:
    """Let norms and routers compute in the weights' own precision: transformers rounds to float32, float64 included."""
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter") and not hasattr(module, "bias"):  # gpt-oss' own is exact
            module.forward = MethodType(_router, module)
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_gemma_norm if hasattr(module, "eps") else _llama_norm, module)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token, in its inputs' own precision: [B, T, H, D] each, g and beta [B, T, H]."""
    shared = value.shape[2] // key.shape[2]
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(shared, 2) for x in (query * query.shape[-1] ** -0.5, key))
    state = value.new_zeros(len(value), value.shape[2], key.shape[3], value.shape[3])
    state = state if initial_state is None else initial_state
    out = []
    for t in range(value.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        held = (state * key[:, t, ..., None]).sum(-2)
        state = state + key[:, t, ..., None] * ((value[:, t] - held) * beta[:, t, :, None])[..., None, :]
        out.append((state * query[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1), state


# transformers' own rules compute in float32, whatever the model's precision
for rule in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
    setattr(modeling_qwen3_next, rule, _delta_rule)


def _router(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
    scores, experts = logits.softmax(-1).topk(self.top_k, dim=-1)
    return logits, scores, experts


def _llama_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def random_model(
    name: str = "llama-gqa", dtype: torch.dtype = torch.float64, spread: float = 0.3, attention: str | None = None
) -> Any:
    """A stock transformers model with random weights, the same for the same arguments."""
    torch.manual_seed(0)
    config = deepcopy(LlamaConfig(**MIXED) if name == DEEP else CONFIGS[name])
    config.initializer_range = spread
    own = attention or OWN_ATTENTION.get(name, "sdpa")
    how = {"attn_implementation": own, "experts_implementation": "eager"}  # grouped products have no float64
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **how).eval()


def served(name: str = "llama-gqa", dtype: torch.dtype = torch.float64, spread: float = 0.3) -> SimpleNamespace:
    """A model as the sampler wants it; float64 models are float64 throughout."""
    model = random_model(name, dtype, spread, kvaudit.audit.cache.attention.ATTENTION_NAME)
    patch_state_layers(model)
    if dtype == torch.float64:
        exact_norms(model)
    chat = SimpleNamespace(stop_ids=frozenset({7}))
    return SimpleNamespace(model=model, chat=chat, device=torch.device("cpu"), max_positions=512)


def shared(name: str = "llama-gqa", dtype: torch.dtype = torch.float64, spread: float = 0.3) -> SimpleNamespace:
    """``served`` once for the same arguments, for tests that leave no gradient behind."""
    return _shared(name, dtype, spread)


_shared = cache(served)


def governed(loaded: SimpleNamespace) -> list[int]:
    """The layers a policy governs: full attention only."""
    kinds = loaded.model.config.to_dict().get("layer_types")
    return [n for n, kind in enumerate(kinds or ["full_attention"] * LAYERS) if kind == "full_attention"]


# --- rows and turns -------------------------------------------------------------------------------------------------


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(8, 61, (n,), generator=generator).tolist() for n in lengths]


def left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and row positions [B, T], -1 for padding."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
    positions = torch.tensor([[-1] * (width - len(r)) + list(range(len(r))) for r in rows])
    return ids, positions


def new_cache(loaded: SimpleNamespace, policy: Policy, rows: Sequence[int] = (0,)) -> EvictingCache:
    """A fresh cache whose rows have these keys."""
    rotary = find_rotary(loaded.model, policy)
    blocks = hook_expert_blocks(loaded.model)
    return EvictingCache(loaded.model.config, policy, torch.tensor(rows), rotary=rotary, blocks=blocks)


@torch.no_grad()
def feed(
    loaded: SimpleNamespace,
    cache: EvictingCache,
    rows: Sequence[Sequence[int]],
    *,
    decoding: bool = False,
    pinned: Tensor | None = None,
) -> Tensor:
    """One forward of right-padded rows, () for nothing, ``pinned`` [B, Q] of them; logits [B, Q, V]."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    columns, lengths = torch.arange(width), torch.tensor([len(row) for row in rows])
    positions = torch.where(columns < lengths[:, None], columns + cache.seen[:, None], -1)
    cache.begin(positions, decoding=decoding, pinned=pinned)
    logits: Tensor = loaded.model(input_ids=ids, position_ids=positions.clamp(min=0), use_cache=False, kv=cache).logits
    return logits


class Moment(NamedTuple):
    """One forward of one row: what kind it was, and what its cache held before and after."""

    decoding: bool
    new: int  # tokens fed
    seen: int  # tokens seen, these included
    held: list[list[set[int]]]  # [L][H] positions still held afterwards


def moments(
    loaded: SimpleNamespace, policy: Policy, script: Sequence[int], *, row: int = 0, seed: int = 3
) -> Iterator[Moment]:
    """Feed one row: a positive number is that many given tokens, in chunks; a negative one as many decoding steps."""
    evicting = new_cache(loaded, policy, [row])
    generator = torch.Generator().manual_seed(seed)
    for part in script:
        size = policy.chunk if part > 0 else 1
        for start in range(0, abs(part), size):
            new = min(size, abs(part) - start)
            ids = torch.randint(8, 61, (new,), generator=generator).tolist()
            feed(loaded, evicting, [ids], decoding=part < 0)
            yield Moment(part < 0, new, int(evicting.seen), held(evicting.ledger(int(evicting.seen))[0]))


def held(ledger: Tensor) -> list[list[set[int]]]:
    """Positions that have not left, per layer and head, from one row's ledger [L, H, T]."""
    return [[set((head == NEVER).nonzero()[:, 0].tolist()) for head in layer] for layer in ledger]


class Played(NamedTuple):
    """Rollouts of a batch and the log-probs of what was drawn, in full precision."""

    rollouts: list[Rollout]
    logprobs: list[list[float]]


def two_turns(
    loaded: SimpleNamespace,
    policy: str | Policy,
    *,
    group: int = 1,
    lengths: tuple[int, ...] = (40, 23, 9),
    only: int | None = None,
    short: bool = False,
) -> Played:
    """Prompts of these lengths, seven drawn tokens, a message to each row, six more; ``only`` one of the rows.

    ``short``: five drawn tokens, a message of six, four more. Two rows of three draw two in their last turn, and leave.
    """
    rows = list(range(len(lengths) * group)) if only is None else [only]
    told = prompts(*[6 if short else 21, 3, 0, 17, 5, 1, 30, 2, 8][: len(lengths) * group])
    asked = prompts(*lengths) if only is None else [prompts(*lengths)[only // group]]
    parsed = parse_policy(policy) if isinstance(policy, str) else policy
    episode = Sampler(loaded, parsed).open(asked, rows, group=group if only is None else 1)
    first = episode.decode(Decoding(5 if short else 7))
    most = 4 if short else 6
    episode.extend([told[n] for n in rows])
    second = episode.decode(Decoding(most), [2 if n % 3 else most for n in rows], None, lambda *_: False)
    drawn = [[*a.logprobs, *b.logprobs] for a, b in zip(first, second, strict=True)]
    return Played(episode.rollouts(), drawn)


def played_once(policy: Policy, model: str = "llama-gqa") -> Played:
    """Short ``two_turns`` of a shared model, for all tests that only read it."""
    return _played_once(policy, model)


@cache
def _played_once(policy: Policy, model: str) -> Played:
    return two_turns(shared(model), policy, short=True)


def ledger_of(rollout: Rollout) -> Ledger:
    """One row's record in the form the public shadow pass takes."""
    tables = (rollout.keys_quantised_at, rollout.values_quantised_at)
    codes = [None if t is None else t[None] for t in tables]
    experts = None if rollout.experts is None else rollout.experts[None]
    hints = () if rollout.hints is None else (rollout.hints,)
    record = {"experts": experts, "hints": hints, "selections": [rollout.selection]}
    return Ledger(rollout.evicted_at[None], rollout.codec, *codes, **record)


def gap(loaded: SimpleNamespace, played: Played, view: str, group: int = 1) -> float:
    """Largest |log p_sampler - log p_learner| over all drawn tokens, nats."""
    with torch.no_grad():
        logits, valid = suffix_logits(loaded.model, played.rollouts, group=group, view=view)
    worst = 0.0
    for row, rollout in enumerate(played.rollouts):
        tokens = rollout.ids[rollout.prompt_length :]
        assert valid[row].sum() == len(tokens)
        logprobs = logits[row, : len(tokens)].double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        drawn = logprobs[rollout.sampled[rollout.prompt_length :]]
        worst = max(worst, (drawn - torch.tensor(played.logprobs[row], dtype=torch.float64)).abs().max().item())
    return worst


@cache
def moments_once(policy: Policy, script: tuple[int, ...]) -> list[Moment]:
    """``moments`` of a shared model, for all tests that only read them."""
    return list(moments(shared(), policy, script))


def steps(history: Sequence[Moment]) -> Iterator[tuple[Moment, Moment]]:
    """Moments with the one before each."""
    return itertools.pairwise([Moment(False, 0, 0, [[set() for _ in layer] for layer in history[0].held]), *history])
