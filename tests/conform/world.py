"""What the conformance suite plays with: small variants of every policy, tiny random models, prompts and two turns.

Everything here follows from a policy's class, its fields and the contract of ``audit/policies/base.py``; no policy is
known by name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

import audit.kv.attention
from audit.errors import SpecError
from audit.kv.cache import EvictingCache
from audit.kv.ledger import NEVER, Ledger, Rollout
from audit.kv.rotary import rotary_for
from audit.kv.shadow import suffix_logits
from audit.policies import POLICIES, Composed, Policy, parse_policy
from audit.sampler import Decoding, Sampler

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, max_position_embeddings=512)
GQA = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **SIZES)
CONFIGS = {
    "llama-gqa": LlamaConfig(**GQA),
    "llama-mha": LlamaConfig(**{**GQA, "num_attention_heads": 2}),
    "qwen3": Qwen3Config(head_dim=8, **GQA),
    "gemma3": Gemma3TextConfig(
        head_dim=8,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        **GQA,
    ),
    "mistral": MistralConfig(sliding_window=None, **GQA),
    "qwen2": Qwen2Config(**GQA),
    "phi": PhiConfig(partial_rotary_factor=0.5, **GQA),
}
CORE = ["llama-gqa", "llama-mha", "qwen3", "gemma3"]


# --- policies -------------------------------------------------------------------------------------------------------

SMALL = {"budget": 16, "chunk": 16, "kernel": 3, "group": 4, "residual": 8}
AT_MOST = {"window": 4, "interval": 3}
# every evicting policy also plays under these; a field that a policy refuses with others is its own business
SCHEDULES = {
    "each-step": {"interval": 1},
    "one-chunk": {"interval": 5, "chunk": 1000},
    "prefill": {"phase": "prefill"},
    "decode": {"phase": "decode", "interval": 2, "chunk": 1000},
}


def small(cls: type[Policy], **fields: Any) -> Policy:
    """The policy with a budget that bites on forty tokens; fields that this rule does not know keep their defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(cls) if f.name in cls.field_names()}
    values = {name: value for name, value in SMALL.items() if name in defaults}
    values |= {name: min(most, defaults[name]) for name, most in AT_MOST.items() if name in defaults}
    return cls(**{**values, **fields})


def roomy(policy: Policy, **fields: Any) -> Policy:
    """The same rule with a budget in which sink and window fit beside a choice, whatever the rule asks of them."""
    return dataclasses.replace(policy, **{"budget": 48, "sink": 2, "window": 5, **fields})


def small_policies() -> list[Policy]:
    """A small variant of every registered policy."""
    return [small(cls) for cls in POLICIES.all().values()]


def variants(policy: Policy) -> list[Policy]:
    """The policy, with each of its switches turned, and under other schedules if it evicts; no two alike."""
    switches = [name for name in policy.field_names() if isinstance(getattr(policy, name), bool)]
    others = [{name: not getattr(policy, name)} for name in switches]
    others += SCHEDULES.values() if policy.evicts else []
    return list(dict.fromkeys([policy, *(dataclasses.replace(policy, **fields) for fields in others)]))


def compositions(under_test: Sequence[Policy]) -> list[Policy]:
    """Every evicting policy with a quantising one and the other way round, partners taken in turn."""
    registered = small_policies()
    evictors, quantisers = ([p for p in registered if getattr(p, kind)] for kind in ("evicts", "quantises"))
    pairs = [*zip((p for p in under_test if p.evicts), itertools.cycle(quantisers), strict=False)]
    pairs += zip(itertools.cycle(evictors), (p for p in under_test if p.quantises), strict=False)
    return list(dict.fromkeys(Composed(parts=pair) for pair in pairs))


def policies_for(argument: str, under_test: Sequence[Policy]) -> list[Policy]:
    """The policies a test asks for by the name of its argument."""
    varied, pairs = [v for p in under_test for v in variants(p)], compositions(under_test)
    chosen = {
        "policy": under_test,
        "evictor": [p for p in under_test if p.evicts],
        "scheduled": [v for v in varied if v.evicts],
        "compressed": [*(v for v in varied if v.evicts), *pairs],
        "variant": [*varied, *pairs],
        "replayed": [p for p in under_test if p.replayable],
        "replayed_variant": [p for p in (*varied, *pairs) if p.replayable],
        "lossy": [p for p in (*under_test, *pairs) if p.replayable and (p.evictor.evicts or p.quantiser)],
    }
    return list(chosen[argument])


ARGUMENTS = ("policy", "evictor", "scheduled", "compressed", "variant", "replayed", "replayed_variant", "lossy")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test every policy its argument asks for: all registered ones, or those of ``--policy-file``."""
    for argument in set(ARGUMENTS) & set(metafunc.fixturenames):
        chosen = policies_for(argument, _under_test(metafunc.config.getoption("policy_file")))
        metafunc.parametrize(argument, chosen, ids=[policy_id(p) for p in chosen])


@cache
def _under_test(file: Path | None) -> list[Policy]:
    return small_policies() if file is None else [small(POLICIES.get(name)) for name in POLICIES.load_file(file)]


def policy_id(policy: Policy) -> str:
    """The name and whatever differs from the small variant."""
    if isinstance(policy, Composed):
        return "+".join(map(policy_id, policy.parts))
    usual = small(type(policy)).parameters()
    other = [f"{k}={v}" for k, v in policy.parameters().items() if usual.get(k) != v]
    return ":".join([policy.name, ",".join(other)]) if other else policy.name


# --- models ---------------------------------------------------------------------------------------------------------


def exact_norms(model: torch.nn.Module) -> None:
    """Let RMS norms compute in the weights' own precision: transformers rounds them to float32, float64 included."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_gemma_norm if hasattr(module, "eps") else _llama_norm, module)


def _llama_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def random_model(
    name: str = "llama-gqa", dtype: torch.dtype = torch.float64, spread: float = 0.3, attention: str = "sdpa"
) -> Any:
    """A stock transformers model with random weights, the same for the same arguments."""
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[name])
    config.initializer_range = spread
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def served(name: str = "llama-gqa", dtype: torch.dtype = torch.float64, spread: float = 0.3) -> SimpleNamespace:
    """A model as the sampler wants it; float64 models are float64 throughout."""
    model = random_model(name, dtype, spread, audit.kv.attention.NAME)
    if dtype == torch.float64:
        exact_norms(model)
    chat = SimpleNamespace(stop_ids=frozenset({7}))
    return SimpleNamespace(model=model, chat=chat, device=torch.device("cpu"), max_positions=512)


shared = cache(served)  # for tests that leave no gradient behind


def governed(loaded: SimpleNamespace) -> list[int]:
    """The layers a policy governs: full attention only."""
    kinds = loaded.model.config.to_dict().get("layer_types")
    return [n for n in range(3) if kinds is None or kinds[n] == "full_attention"]


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
    rotary = rotary_for(loaded.model, policy)
    return EvictingCache(loaded.model.config, policy, torch.tensor(rows), rotary=rotary)


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
    """Prompts of these lengths, twelve drawn tokens, a message to each row, nine more; ``only`` one of the rows.

    ``short``: five drawn tokens, a message of six, four more.
    """
    rows = list(range(len(lengths) * group)) if only is None else [only]
    told = prompts(*[6 if short else 21, 3, 0, 17, 5, 1, 30, 2, 8][: len(lengths) * group])
    asked = prompts(*lengths) if only is None else [prompts(*lengths)[only // group]]
    parsed = parse_policy(policy) if isinstance(policy, str) else policy
    episode = Sampler(loaded, parsed).open(asked, rows, group=group if only is None else 1)
    first = episode.decode(Decoding(5 if short else 12))
    episode.extend([told[n] for n in rows])
    second = episode.decode(Decoding(4 if short else 9))
    drawn = [[*a.logprobs, *b.logprobs] for a, b in zip(first, second, strict=True)]
    return Played(episode.rollouts(), drawn)


def ledger_of(rollout: Rollout) -> Ledger:
    """One row's record in the form the public shadow pass takes."""
    tables = (rollout.keys_quantised_at, rollout.values_quantised_at)
    return Ledger(rollout.evicted_at[None], rollout.codec, *(None if t is None else t[None] for t in tables))


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


def refuses(policy: Policy, **fields: Any) -> bool:
    """Whether a policy cannot be built with these fields."""
    try:
        dataclasses.replace(policy, **fields)
    except SpecError:
        return True
    return False


def steps(history: Sequence[Moment]) -> Iterator[tuple[Moment, Moment]]:
    """Moments with the one before each."""
    return itertools.pairwise([Moment(False, 0, 0, [[set() for _ in layer] for layer in history[0].held]), *history])
