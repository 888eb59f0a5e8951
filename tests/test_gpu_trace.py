"""Every forward on a device that is no CPU: where the host waits for it, and that nothing is mixed.

The device is pretended (``pretend_gpu.py``), the arithmetic a CPU's, so results are compared to the last bit.
"""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conform.policies import asked_by, one_of_each, policy_id, small_policies
from pretend_gpu import GPU, HOST, READS, UPLOADS, PretendGpu, pretend_gpu
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.attention import disable_cudnn_attention
from kvaudit.audit.cache.engine_store import ByChannel, ByToken, Cast, EngineStore
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import RunError

Waits = Counter[tuple[str, str]]
STEPS = 3
MASK = (READS, "audit/cache/stock.py:_copy_to_host")  # which new columns are tokens, read before anything is asked
WIDTH = (READS, "audit/cache/cached_layer.py:_keep")  # of the fullest head, where heads share a budget
PROMPT = {(READS, "audit/cache/stock.py:_on_host"), WIDTH}
PROBED = {"expected", "triattention", "streaming"}  # a model is asked once whether its positions are rotations
TOLD = {(READS, "audit/sampling/decoding.py:draw")}  # the tokens that were drawn


@pytest.fixture(autouse=True)
def _steps_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute decode steps operator by operator; test_fixed_step.py has those of fixed shapes."""
    monkeypatch.setenv("KVAUDIT_STEP", "eager")


class Played(NamedTuple):
    """What came of a prompt and some steps, and the waits of both."""

    logits: Tensor
    ledger: Any
    prompt: Waits
    steps: Waits


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    # a second layer asks for nothing that the first does not
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "initializer_range": 0.3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=61, max_position_embeddings=256, eos_token_id=None, pad_token_id=0, **sizes, **heads)
    ).eval()


def there(model: Any) -> Any:
    """A copy of the model on the pretended device."""
    return copy.deepcopy(model).to(GPU)


@torch.no_grad()
def played(model: Any, policy: Policy, device: torch.device, gpu: PretendGpu | None = None) -> Played:
    """Two rows, one of them padded on the left: a prompt, then the likeliest tokens one by one."""
    ids = torch.randint(1, 61, (2, 22), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ids, mask = ids.to(device), mask.to(device)
    past, waits = CompressedCache.for_model(model, policy), [Counter(), Counter()]
    out = model(ids, attention_mask=mask, past_key_values=past, logits_to_keep=1)
    if gpu:
        waits[0], gpu.waits = gpu.waits, Counter()
    for _ in range(STEPS):
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        out = model(out.logits[:, -1].argmax(-1, keepdim=True), attention_mask=mask, past_key_values=past)
    if gpu:
        waits[1], gpu.waits = gpu.waits, Counter()
    ledger = past.ledger if policy.replayable else None
    return Played(out.logits, ledger, *waits)


ASKING = one_of_each(small_policies(), asked_by)  # the others rank by the same of a model


@pytest.mark.parametrize(
    "policy",
    [pytest.param(one, id=policy_id(one), marks=[pytest.mark.slow] * (one not in ASKING)) for one in small_policies()],
)
def test_a_step_of_decoding_waits_for_nothing_but_what_it_is_told(model: Any, policy: Policy) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        on_host = played(model, policy, torch.device("cpu"))
        with pretend_gpu() as gpu:
            device_model = there(model)
            gpu.waits.clear()
            found = played(device_model, policy, GPU, gpu)
    assert torch.equal(found.logits.twin, on_host.logits)  # type: ignore[attr-defined]
    if on_host.ledger is not None:
        assert torch.equal(found.ledger.evicted_at, on_host.ledger.evicted_at)
    width = {WIDTH: found.steps[WIDTH]} if policy.name == "adakv" else {}
    assert found.steps == {MASK: STEPS} | width
    prompt = {place for place in found.prompt if place[0] == READS}
    probed = {place for place in prompt if "rotary.py" in place[1]}
    assert prompt - probed <= PROMPT
    assert not probed or policy.name in PROBED


def test_a_step_without_mask_and_positions_waits_for_nothing(model: Any) -> None:
    with pretend_gpu() as gpu, torch.no_grad():
        device_model = there(model)
        past = CompressedCache.for_model(device_model, "snapkv:budget=12,window=4,interval=1")
        token = torch.full((2, 1), 5, device=GPU)
        device_model(token.expand(2, 20), past_key_values=past)
        gpu.waits.clear()
        device_model(token, past_key_values=past)
        assert gpu.waits == {}


def test_a_tensor_of_the_host_beside_those_of_the_device_is_an_error(model: Any) -> None:
    with pretend_gpu(), torch.no_grad():
        device_model = there(model)
        with pytest.raises(AssertionError, match="mix devices"):
            device_model(torch.ones(1, 4, dtype=torch.int64))


def test_waits_of_every_kind_are_noted() -> None:
    """The certificate above is worth what this finds."""
    with pretend_gpu() as gpu:
        x = torch.arange(6, device=GPU)
        for asks in (
            lambda: x.sum().item(),
            lambda: bool((x > 2).any()),
            lambda: int(x[3]),
            x.tolist,
            x.cpu,
            x.nonzero,
            lambda: x[x > 2],
            lambda: torch.equal(x, x),
            lambda: x.to("cpu", non_blocking=True),
            x.unique,
        ):
            gpu.waits.clear()
            asks()
            assert gpu.waits[READS, "stock"] >= 1
        gpu.waits.clear()
        torch.tensor([1, 2], device=GPU)
        torch.ones(3).to(GPU)
        assert gpu.waits == {(UPLOADS, "stock"): 2}
        torch.ones(3).to(GPU, non_blocking=True)
        x[1] = 7
        x[x > 2] = 1
        assert gpu.waits == {(UPLOADS, "stock"): 2}


@pytest.mark.parametrize("text", ["snapkv:budget=12,window=4,interval=2", "int8:residual=2"])
def test_the_sampler_reads_the_tokens_it_draws_and_nothing_else(model: Any, text: str) -> None:
    def answered(model: Any, device: torch.device) -> Any:
        served = SimpleNamespace(model=model, device=device, max_positions=256, chat=SimpleNamespace(stop_ids=set()))
        episode = Sampler(served, parse_policy(text)).open([[*range(5, 25)], [*range(30, 44)]], [1, 2])
        if device == GPU:
            gpu.waits.clear()
        done = episode.decode(Decoding(STEPS))
        return [one.ids for one in done if one is not None]

    prepared = copy.deepcopy(model)
    prepared.set_attn_implementation("kvaudit")
    with sdpa_kernel(SDPBackend.MATH):
        on_host = answered(prepared, torch.device("cpu"))
        with pretend_gpu() as gpu:
            assert answered(there(prepared), GPU) == on_host
            assert {*gpu.waits} <= TOLD


@pytest.mark.parametrize("text", ["snapkv:budget=12,window=4", "kivi:group=4,residual=8"])
def test_bfloat16_is_computed_there_as_on_a_processor(model: Any, text: str) -> None:
    narrow, policy = copy.deepcopy(model).bfloat16(), parse_policy(text)
    with sdpa_kernel(SDPBackend.MATH):
        on_host = played(narrow, policy, torch.device("cpu"))
        with pretend_gpu() as gpu:
            found = played(there(narrow), policy, GPU, gpu)
    assert found.logits.dtype == torch.bfloat16
    assert torch.equal(found.logits.twin, on_host.logits)  # type: ignore[attr-defined]
    assert {*found.steps} == {MASK}


def test_no_plan_is_made_for_every_length_on_a_gpu() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        disable_cudnn_attention(HOST)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        disable_cudnn_attention(GPU)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_model_that_has_moved_is_asked_for_its_rotation_again(model: Any) -> None:
    """The frequencies that a policy turns by lie where the model lay when it was asked."""
    moving, policy = copy.deepcopy(model), parse_policy("expected:budget=12,interval=1")
    played(moving, policy, torch.device("cpu"))
    with pretend_gpu():
        assert played(moving.to(GPU), policy, GPU).logits.device == GPU


@pytest.mark.parametrize(("placed", "fits"), [({"": 0}, True), ({"a": 0, "b": "cpu"}, True), ({"a": 0, "b": 1}, False)])
def test_a_model_spread_over_several_devices_is_refused_by_name(
    model: Any, placed: dict[str, Any], *, fits: bool
) -> None:
    spread = copy.deepcopy(model)
    spread.hf_device_map = placed
    if fits:
        CompressedCache.for_model(spread, "h2o")
        return
    with pytest.raises(RunError, match="is spread over the devices 0, 1, and a compressed cache lies on one"):
        CompressedCache.for_model(spread, "h2o")


RECORDS = ("snapkv:budget=12,window=4", "adakv:budget=12,window=4", "kivi:group=4,residual=8", "quest:budget=8,page=4")


@pytest.mark.parametrize("text", RECORDS)
def test_the_shadow_pass_runs_where_the_model_is(model: Any, text: str) -> None:
    ids = torch.randint(1, 61, (2, 25), generator=torch.Generator().manual_seed(1))
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        past = CompressedCache.for_model(model, text)
        model(ids[:, :22], past_key_values=past)
        for column in (22, 23, 24):
            model(ids[:, column : column + 1], past_key_values=past)
        with shadow(model, past.ledger):
            on_host = model(ids).logits
        with pretend_gpu() as gpu:
            device_model, given = there(model), ids.to(GPU)
            gpu.waits.clear()
            with shadow(device_model, past.ledger):
                found = device_model(given).logits
    assert torch.equal(found.twin, on_host)
    assert all(place.startswith("audit/") for kind, place in gpu.waits if kind == READS)


STORES = {
    "blocks of channels": EngineStore(ByChannel(4), ByToken(4)),
    "groups of a token": EngineStore(ByToken(8, group=4), ByToken(4, group=4)),
    "fp8": EngineStore(Cast("float8_e4m3fn"), Cast("float8_e5m2", toward_zero=True)),
    "values alone": EngineStore(None, ByToken(8)),
    "shown": EngineStore(None, None, shown=True),
}


def drawn_by_an_engine(model: Any, store: EngineStore, prompt: int, new: int) -> Rollout:
    """A row of random tokens; those of one length of prompt share it, and what was written of it."""
    config, total = model.config, prompt + new
    shared, own = (torch.Generator().manual_seed(seed) for seed in (prompt, 1000 * prompt + new))
    of = [(prompt, shared), (new, own)]
    ids = torch.cat([torch.randint(1, 61, (n,), generator=draw) for n, draw in of])
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    size = config.hidden_size // config.num_attention_heads
    parts = [torch.cat([torch.randn(layers, heads, n, size, generator=draw) for n, draw in of], 2) for _ in range(2)]
    return Rollout(
        ids=ids,
        prompt_length=prompt,
        sampled=torch.arange(total) >= prompt,
        sampler_logprobs=torch.zeros(total),
        evicted_at=torch.full((layers, heads, total), NEVER, dtype=torch.int32),
        kv_bytes_peak=0,
        kv_bytes_dense=0,
        retention=1.0,
        answer_start=prompt,
        stored=store,
        written=(parts[0][:, :, :-1], parts[1][:, :, :-1]),
    )


@pytest.mark.parametrize("name", STORES)
def test_the_replay_of_an_engines_cache_waits_for_nothing(model: Any, name: str) -> None:
    """Forward and backward; prompts of under one block and of over two."""
    sizes = [(20, 3), (20, 30), (70, 5), (70, 33)]
    rollouts = [drawn_by_an_engine(model, STORES[name], *size) for size in sizes]

    def learnt(model: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        model.set_attn_implementation("kvaudit")
        logits, valid = suffix_logits(model, rollouts, group=2, view="shadow")
        loss = (logits.float().logsumexp(-1) * valid).sum()
        return logits, loss, list(torch.autograd.grad(loss, [*model.parameters()]))

    with sdpa_kernel(SDPBackend.MATH):
        wanted, loss, slopes = learnt(copy.deepcopy(model))
        with pretend_gpu() as gpu:
            device_model = there(model)
            gpu.waits.clear()
            found, its_loss, its_slopes = learnt(device_model)
    assert torch.equal(found.twin, wanted)  # type: ignore[attr-defined]
    assert torch.equal(its_loss.twin, loss)  # type: ignore[attr-defined]
    for own, slope in zip(its_slopes, slopes, strict=True):
        torch.testing.assert_close(own.twin, slope, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]
    assert gpu.waits == {}
