"""One prefill for several policies: every record is bit for bit that of a policy that prefilled by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from conform.policies import policies_for, small_policies
from conform.world import CONFIGS, prompts, served

from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.shared import SharedPrefill
from kvaudit.audit.policies import Policy, parse_policy, quantiser_on_write
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import RunError

LENGTHS = (21, 8)
ROLES = ("system", "user")
WRITTEN = "int8:write=true,chunk=64"
SOME = [
    parse_policy(text)
    for text in ("none", "kivi:residual=8,group=4", "h2o:budget=12", "snapkv:budget=12,window=4+int8", WRITTEN)
]


def rollouts(loaded: Any, policy: Policy, shared: SharedPrefill | None) -> list[Rollout]:
    """Prompts of several lengths, two rows each; two drawn tokens, a message to most, one more."""
    asked, rows = prompts(*LENGTHS), range(2 * len(LENGTHS))
    roles = [[ROLES[min(n // 4, 1)] for n in range(len(ids))] for ids in asked]
    episode = Sampler(loaded, policy, shared).open(asked, list(rows), group=2, roles=roles)
    episode.decode(Decoding(2))
    told = prompts(9, 3, 0, 5)
    episode.extend(told, [["tool"] * len(ids) for ids in told])
    episode.decode(Decoding(1))
    return episode.rollouts()


def same(one: Any, other: Any) -> bool:
    """Bit for bit, whatever stands in a record."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)


def differing(loaded: Any, policies: Sequence[Policy]) -> list[str]:
    """The policies whose records are others where they share a prefill; those that the model refuses are left out."""
    shared, wrong = SharedPrefill(policies), []
    for policy in policies:
        try:
            alone = rollouts(loaded, policy, None)
        except RunError:  # rotary positions that the model has not
            continue
        if not all(map(same, alone, rollouts(loaded, policy, shared))):
            wrong.append(policy.canonical)
    return wrong


def registered(**fields: Any) -> list[Policy]:
    """A small variant of every registered policy, with these fields."""
    return [dataclasses.replace(policy, **fields) for policy in small_policies()]


@cache
def model(name: str) -> Any:
    return load_model() if name == "embedded" else served(name, torch.float32)


def columns_prefilled(policies: Sequence[str], *, sharing: bool) -> list[int]:
    """How many columns of tokens the model computes to open an episode of every policy."""
    loaded, parsed, fed = model("llama-gqa"), [parse_policy(text) for text in policies], [0]
    shared = SharedPrefill(parsed) if sharing else None
    count = lambda _, __, given: fed.append(given["input_ids"].shape[1])  # noqa: E731
    hook = loaded.model.register_forward_pre_hook(count, with_kwargs=True)
    found = []
    for policy in parsed:
        fed.clear()
        Sampler(loaded, policy, shared).open(prompts(*LENGTHS), [1, 2])
        found.append(sum(fed))
    hook.remove()
    return found


def test_no_record_of_a_registered_policy_depends_on_sharing() -> None:
    assert differing(model("llama-gqa"), registered(chunk=64)) == []


def test_no_record_of_the_embedded_model_depends_on_sharing() -> None:
    assert differing(model("embedded"), SOME) == []


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "qwen3-moe", *[n for n in CONFIGS if n == "qwen3-next"]])
def test_windows_sinks_experts_and_states_are_shared_too(name: str) -> None:
    assert differing(model(name), SOME[:3]) == []


@pytest.mark.slow  # every switch and schedule of every policy, in every family of models
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_no_record_of_any_variant_depends_on_sharing(name: str) -> None:
    every = policies_for("variant", small_policies())
    assert differing(model(name), every) == []
    assert differing(model(name), [p for p in every if quantiser_on_write(p)]) == []


def test_pinned_roles_stay_pinned() -> None:
    pinned = [parse_policy(f"{name}:budget=24,window=2,chunk=64,pin=system") for name in ("knorm", "streaming")]
    assert differing(model("llama-gqa"), [parse_policy("none"), *pinned]) == []


def test_a_first_chunk_is_computed_once_for_all() -> None:
    policies = ["none", "int8:chunk=50", "h2o:budget=16,chunk=99", "kivi:chunk=21"]
    assert columns_prefilled(policies, sharing=True) == [21, 0, 0, 0]


def test_chunks_behind_the_first_are_every_policys_own() -> None:
    assert columns_prefilled(["int8:chunk=16", "h2o:budget=16,chunk=16"], sharing=True) == [21, 5]


def test_other_chunks_and_codes_on_write_are_computed_apart() -> None:
    policies = ["none", "int8:chunk=16", WRITTEN, "int8:chunk=1", "fp8:chunk=1", "none|fp8"]
    assert columns_prefilled(policies, sharing=True) == columns_prefilled(policies, sharing=False)


def test_nothing_is_kept_for_policies_that_have_come() -> None:
    policies = [parse_policy(p) for p in ("none", "int8", "snapkv:budget=40")]
    shared, kept = SharedPrefill(policies), []
    for policy in policies:
        rollouts(model("llama-gqa"), policy, shared)
        kept.append(len(shared.prefills))
    assert kept == [1, 1, 0]


def test_other_prompts_are_not_taken_for_the_same() -> None:
    policies = [parse_policy(p) for p in ("none", "int8")]
    shared, loaded = SharedPrefill(policies), model("llama-gqa")
    alone, other = ([row[::step] for row in prompts(*LENGTHS)] for step in (1, -1))
    Sampler(loaded, policies[0], shared).open(alone, [1, 2])
    with_kept = Sampler(loaded, policies[1], shared).open(other, [1, 2]).decode(Decoding(2))
    assert with_kept == Sampler(loaded, policies[1]).open(other, [1, 2]).decode(Decoding(2))
