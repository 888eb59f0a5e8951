"""Serving policies that no learner replays: a draw per request, and positions counted inside the cache."""

from __future__ import annotations

import itertools
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import conform.world
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvaudit.audit.cache.attention
import kvaudit.audit.cache.cached_layer
import kvaudit.audit.cache.codes
import kvaudit.audit.cache.quantised_store
from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache.ledger import Rollout, save_ledgers
from kvaudit.audit.cache.selection import RecordedChoices
from kvaudit.audit.policies import Mixture, parse_policy
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.sampling.conversations import play
from kvaudit.audit.sampling.decoding import Completion, Decoding
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import AnyEpisode, ContinuousBatch, Episode, MixedEpisode, Sampler, join_episodes
from kvaudit.audit.training.config import TrainConfig
from kvaudit.core.errors import DataError, RunError, SpecError
from kvaudit.suites.base import SUITES

MIXTURE = "streaming:budget=12,sink=2|none|knorm:budget=10"


def tiny(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    config._attn_implementation = kvaudit.audit.cache.attention.ATTENTION_NAME
    return LlamaForCausalLM(config).double().eval()


def served() -> SimpleNamespace:
    chat = SimpleNamespace(stop_ids=frozenset({7}))
    return SimpleNamespace(model=tiny(), chat=chat, device=torch.device("cpu"), max_positions=512)


def prompts(*lengths: int) -> list[list[int]]:
    torch.manual_seed(5)
    return [torch.randint(8, 61, (n,)).tolist() for n in lengths]


CODED = [
    "int8",
    "kivi:bits=2,group=4,residual=4",
    "fp8:scale=tensor",
    "snapkv:budget=18,window=4,interval=2+kivi:group=4",
]


@pytest.mark.parametrize("policy", CODED)
@pytest.mark.parametrize("family", ["llama-gqa", pytest.param("gpt-oss", marks=pytest.mark.slow)])  # has sinks
def test_codes_are_attended_to_in_blocks_as_all_at_once(
    family: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most in (1, 1 << 24):  # blocks as small as can be, and all at once
        monkeypatch.setattr(kvaudit.audit.cache.quantised_store, "HOST_EXACT", most)
        monkeypatch.setattr(kvaudit.audit.cache.codes, "HOST_BLOCK", most)
        episode = Sampler(conform.world.shared(family), parse_policy(policy)).open(prompts(30, 17, 41), [1, 2, 3])
        answers = [answer for answer in episode.decode(Decoding(12)) if answer]
        found.append(list(zip(answers, episode.rollouts(), strict=True)))
    for (one, record), (other, others_record) in zip(*found, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-10)
        for name in ("evicted_at", "keys_quantised_at", "values_quantised_at", "hints"):
            assert torch.equal(getattr(record, name), getattr(others_record, name)), name


def test_every_row_of_a_mixture_is_served_as_by_the_policy_it_drew() -> None:
    loaded, mixture, asked = served(), parse_policy(MIXTURE), prompts(30, 22, 41, 17, 28, 33)
    seeds = [11, 12, 13, 14, 15, 16]
    episode = Sampler(loaded, mixture).open(asked, seeds)
    first = episode.decode(Decoding(9))
    episode.extend(prompts(5, 6, 7, 8, 9, 4))
    second = episode.decode(Decoding(9), [9, 0, 9, 9, 0, 9])
    assert len({mixture.drawn(seed).name for seed in seeds}) > 1
    for row, seed in enumerate(seeds):
        alone = Sampler(loaded, mixture.drawn(seed)).open([asked[row]], [seed])
        assert [c.ids for c in alone.decode(Decoding(9)) if c] == [first[row].ids]  # type: ignore[union-attr]
        alone.extend([prompts(5, 6, 7, 8, 9, 4)[row]])
        (more,) = alone.decode(Decoding(9), [[9, 0, 9, 9, 0, 9][row]])
        assert (more and more.ids) == (second[row] and second[row].ids)  # type: ignore[union-attr]
        assert torch.equal(alone.rollouts()[0].evicted_at, episode.rollouts()[row].evicted_at)


@pytest.mark.parametrize(
    "policy",
    [
        "none",
        "random:budget=12",
        "h2o:budget=14,window=7",
        "streaming:budget=12,sink=2,reposition=true",
        "int8",
        MIXTURE,
    ],
)
def test_rows_that_leave_the_batch_change_no_answer(policy: str) -> None:
    loaded, asked = served(), prompts(30, 22)
    limits, told = ([3, 20, 4, 9, 20, 2], [0, 9, 0, 0, 2, 0]), prompts(0, 8, 0, 0, 5, 0)
    episodes, drawn = [], []
    for going_on in (range(6), (1, 4)):
        episode = Sampler(loaded, parse_policy(policy)).open(asked, [3, 1, 4, 1, 5, 9], group=3)
        first = episode.decode(Decoding(20), limits[0], None, lambda n, _, going_on=going_on: n in going_on)
        episode.extend(told)
        drawn.append((*first, *episode.decode(Decoding(20), limits[1], None, lambda *_: False)))
        episodes.append(episode)
    staying, leaving = episodes
    for one, other in zip(*drawn, strict=True):
        assert (one and (one.ids, one.finish_reason)) == (other and (other.ids, other.finish_reason))
        assert one is None or one.logprobs == pytest.approx(other.logprobs, abs=1e-12)
    for one, other in zip(staying.rollouts(), leaving.rollouts(), strict=True):
        for name in ("ids", "evicted_at", "keys_quantised_at", "sampled"):
            mine, its = getattr(one, name), getattr(other, name)
            assert mine is its or torch.equal(mine, its)
        assert (one.row_keys, one.answer_start, one.retention) == (other.row_keys, other.answer_start, other.retention)
    if policy != MIXTURE:  # of which every part has a cache of its own
        assert leaving.bytes * 5 < staying.bytes * 2  # one row of six, or two with room to spare


JOINED = [  # every kind of state that a cache keeps of a row
    "none",
    "random:budget=12",
    "h2o:budget=14,window=7",
    "rkv:budget=14,window=4",
    "streaming:budget=12,sink=2,reposition=true",
    "snapkv:budget=14,window=4,pin=system",
    "expected:budget=14,window=4",
    "int8",
    "kivi:bits=2,group=4,residual=4",
    "snapkv:budget=18,window=4,interval=2+kivi:group=4",
    "quest:page=4,budget=12",
    MIXTURE,
]


# tokens of the others' turn: two of them for one that evicts and one that codes, one in turn for the others
AFTER = [
    (policy, after) for n, policy in enumerate(JOINED) for after in ((1, 99) if n in (2, 8) else ((1, 4, 99)[n % 3],))
]


@pytest.mark.parametrize(("policy", "after"), AFTER)
def test_rows_that_join_a_batch_answer_as_by_themselves(policy: str, after: int) -> None:
    sampler, asked, seeds = Sampler(served(), parse_policy(policy)), prompts(30, 22, 7), [3, 1, 4, 1, 5, 9]
    limits, told = [3, 9, 6, 9, 5, 11], prompts(5, 0, 0, 3, 0, 2)  # row 2 leaves early

    def opened(some: slice) -> AnyEpisode:
        rows = slice(some.start * 2, some.stop * 2)
        roles = [["system" if n < 3 else "user" for n in range(len(prompt))] for prompt in asked[some]]
        return sampler.open(asked[some], seeds[rows], group=2, roles=roles)

    def finish(episode: AnyEpisode, rows: slice, first: list[Completion | None]) -> tuple[Any, Any, Any]:
        own = told[rows]
        episode.extend(own, [["tool"] * len(given) for given in own])
        return first, episode.decode(Decoding(9), [0 if n == 2 else 5 for n in range(episode.rows)]), episode.rollouts()

    alone = []
    for some in (slice(0, 2), slice(2, 3)):
        episode, rows = opened(some), slice(some.start * 2, some.stop * 2)
        alone += zip(*finish(episode, rows, episode.decode(Decoding(20), limits[rows])), strict=True)
    steps = itertools.count(1)
    episode = opened(slice(0, 2))
    begun = episode.decode(Decoding(20), limits[:4], None, lambda n, _: n != 2, lambda: next(steps) >= after)
    if policy != MIXTURE:  # whose parts take their steps one after the other
        assert [one is None for one in begun] == [len(first.ids) > after for first, _, _ in alone[:4]]
    join_episodes(episode, opened(slice(2, 3)))
    begun += [None, None]
    rest = episode.decode(Decoding(20), [0 if one else limit for one, limit in zip(begun, limits, strict=True)])
    whole = finish(episode, slice(0, 6), [one or other for one, other in zip(begun, rest, strict=True)])
    for one, other in zip(alone, zip(*whole, strict=True), strict=True):
        same_row(one, other)


def test_a_batch_that_rows_enter_and_leave_holds_no_more_than_its_own() -> None:
    sampler, asked = Sampler(served(), parse_policy("none")), prompts(*[40] * 12)
    limits = [3, 8, 5, 2, 8, 8, 1, 6, 8, 3, 8, 2]
    found: dict[int, Completion] = {}
    widest = sampler.open(asked[:3], [0, 1, 2])
    widest.decode(Decoding(8))

    def heard(n: int, completion: Completion) -> bool:
        found[n] = completion
        return False

    arrivals, rows, sizes = ContinuousBatch(lambda some: sampler.open([asked[n] for n in some], some), 12, 3), [], []
    for episode in arrivals:
        due = [0 if n in found else limits[n] for n in range(episode.rows)]
        episode.decode(Decoding(8), due, None, heard, arrivals.should_pause)
        assert isinstance(episode, Episode)
        rows.append(episode.open_rows)
        sizes.append(episode.bytes)
    assert len(rows) > 3, "the others waited for the first to be through"
    assert max(rows) < 3, "nothing enters before a row is free"
    assert max(sizes) <= 1.25 * widest.bytes  # whatever came and went
    for n, rollout in enumerate(arrivals.rollouts()):
        (alone,) = sampler.open([asked[n]], [n]).decode(Decoding(limits[n]))
        assert alone is not None
        assert found[n].ids == alone.ids
        assert rollout.ids.tolist() == [*asked[n], *alone.ids]


def test_the_peak_of_a_row_is_that_of_the_batches_it_was_in() -> None:
    sampler = Sampler(served(), parse_policy("none"))
    alone = sampler.open(prompts(10), [1])
    alone.decode(Decoding(4))
    (small,) = alone.rollouts()
    episode = sampler.open(prompts(200, 10), [0, 1])
    episode.decode(Decoding(4), [1, 4], None, lambda n, _: n != 0)
    for n in range(2, 5):  # each stands beside the one before it
        join_episodes(episode, sampler.open(prompts(10), [n]))
        due = [0] * (n - 1) + [4, 4]
        episode.decode(Decoding(4), due, None, lambda row, _, last=n: row == last)
    first, second, *_, last = episode.rollouts()
    assert second.kv_bytes_peak > 5 * small.kv_bytes_peak, "it stood beside a long one"
    assert first.kv_bytes_peak == pytest.approx(second.kv_bytes_peak, rel=0.1)
    assert last.kv_bytes_peak < 2 * small.kv_bytes_peak, "it never met the long one"


def test_a_row_in_the_middle_of_its_turn_is_given_nothing() -> None:
    episode = Sampler(served(), parse_policy("none")).open(prompts(30, 22), [0, 1])
    episode.decode(Decoding(9), None, None, None, lambda: True)
    with pytest.raises(AssertionError, match="paused turn"):
        episode.extend(prompts(4, 0))
    with pytest.raises(AssertionError, match="must be finished first"):
        episode.score([[9], [9]])
    with pytest.raises(AssertionError, match="must be finished first"):
        episode.rollouts()


def test_a_part_of_a_mixture_that_is_over_is_freed() -> None:
    sampler = Sampler(served(), parse_policy(MIXTURE), recorded=False)
    seeds = {part: next(n for n in range(99) if sampler.policy.drawn(n) == part) for part in sampler.policy.draws}
    first, second, _ = seeds.values()
    episode = sampler.open(prompts(40, 20), [first, second])
    assert isinstance(episode, MixedEpisode)
    episode.decode(Decoding(4), [2, 4], None, lambda n, _: n != 0)
    join_episodes(episode, sampler.open(prompts(20), [second]))
    assert len(episode._episodes) == 1
    assert [done is None for done in episode.decode(Decoding(3), [0, 3, 3])] == [True, False, False]


def test_recorded_choices_stay_with_their_rows() -> None:
    record = RecordedChoices(4, 2)
    for step in range(6):  # row 0 has three, row 1 all
        record.begin(torch.tensor([step if step < 3 else -1, step]))
        record.add(0, torch.full((2, 1, 2), step))
    record.reindex(torch.tensor([1, 0]))
    assert [len(own.queries) for own in record.rows() if own] == [6, 3]
    record.reindex(torch.tensor([1]))
    (own,) = record.rows()
    assert own is not None
    assert own.queries.tolist() == [0, 1, 2]
    assert own.chosen[0, 0].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert len(record._steps) == 3, "steps of rows that are gone are held for ever"


def same_row(one: tuple[Any, Any, Rollout], other: tuple[Any, Any, Rollout]) -> None:
    """The answers of two turns and what was recorded of them."""
    for mine, its in zip(one[:2], other[:2], strict=True):
        assert (mine and (mine.ids, mine.finish_reason)) == (its and (its.ids, its.finish_reason))
        assert mine is None or mine.logprobs == pytest.approx(its.logprobs, abs=1e-12)
    for name in ("ids", "evicted_at", "keys_quantised_at", "values_quantised_at", "sampled", "hints"):
        mine, its = getattr(one[2], name), getattr(other[2], name)
        assert mine is its or torch.equal(mine, its), name
    for name in ("row_keys", "answer_start", "retention", "kv_bytes_dense"):
        assert getattr(one[2], name) == getattr(other[2], name)
    assert (one[2].selection is None) == (other[2].selection is None)
    if one[2].selection is not None:
        assert torch.equal(one[2].selection.queries, other[2].selection.queries)
        assert torch.equal(one[2].selection.chosen, other[2].selection.chosen)


def test_a_row_that_has_left_takes_no_input_and_no_turn() -> None:
    episode = Sampler(served(), parse_policy("none")).open(prompts(30, 22), [0, 1])
    episode.decode(Decoding(3), None, None, lambda n, _: n == 1)
    with pytest.raises(AssertionError, match="takes no input"):
        episode.extend(prompts(4, 4))
    with pytest.raises(AssertionError, match="cannot continue"):
        episode.decode(Decoding(3))


def test_group_members_of_a_mixture_draw_for_themselves() -> None:
    episode = Sampler(served(), parse_policy(MIXTURE)).open(prompts(30), list(range(24)), group=24)
    episode.decode(Decoding(2))
    kept = [int((r.evicted_at[0, 0] > len(r.ids)).sum()) for r in episode.rollouts()]
    assert set(kept) == {10 + 1, 12 + 1, 31 + 1}  # budgets and everything, and the last token, which waits outside


def test_the_parts_of_a_mixture_are_drawn_equally_often() -> None:
    mixture = parse_policy("none|int8|kivi|fp8")
    counts = [sum(mixture.drawn(key) == part for key in range(4000)) for part in mixture.parts]  # type: ignore[attr-defined]
    assert all(abs(count - 1000) < 5 * 27.4 for count in counts), counts


def test_a_mixture_is_refused_where_one_policy_is_meant() -> None:
    with pytest.raises(SpecError, match="draw one per request"):
        CompressedCache.for_model(tiny(), MIXTURE).start(None, torch.tensor(prompts(20)))
    with pytest.raises(SpecError, match="mixture inside a mixture"):
        parse_policy({"mixture": ["none", {"mixture": ["int8", "fp8"]}]})
    assert isinstance(parse_policy(MIXTURE), Mixture)


def test_a_policy_without_replay_leaves_no_ledger(tmp_path: Any) -> None:
    policy = parse_policy("streaming:budget=12,sink=2,reposition=true")
    episode = Sampler(served(), policy).open(prompts(30), [1])
    episode.decode(Decoding(3))
    with pytest.raises(SpecError, match="cannot be replayed"):
        save_ledgers(tmp_path / "ledger.safetensors", episode.rollouts(), policy)
    with pytest.raises(SpecError, match="replayed"):
        TrainConfig(arm="smd", seed=1, policy=policy.canonical, suites=("refusal",), context_tokens=192)


def rotated(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """The rotary rule written out: channel i turns with channel i + half."""
    angle = positions[:, None].double() * frequencies
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def streaming_by_cache_slot(model: Any, ids: list[int], budget: int, sink: int) -> Tensor:
    """One layer, token by token: keys are kept unrotated and take their slot in the cache as position."""
    (layer,) = model.model.layers
    attention, frequencies = layer.self_attn, model.model.rotary_emb.inv_freq.double()
    keys, values, out = [], [], []
    for token in ids:
        hidden = model.model.embed_tokens(torch.tensor([token]))
        normed = layer.input_layernorm(hidden)
        query, key, value = (
            part(normed).view(1, -1, 8).transpose(0, 1)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        keys.append(key)
        values.append(value)
        slots = torch.arange(len(keys))
        turned = rotated(torch.cat(keys, 1), slots, frequencies).repeat_interleave(2, 0)
        asked = rotated(query, slots[-1:], frequencies)
        shares = (asked @ turned.transpose(1, 2) * 8**-0.5).softmax(-1)
        mixed = (shares @ torch.cat(values, 1).repeat_interleave(2, 0)).transpose(0, 1).reshape(1, -1)
        hidden = hidden + attention.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        out.append(model.lm_head(model.model.norm(hidden)))
        if len(keys) > budget:
            del keys[sink], values[sink]
    return torch.cat(out)


@torch.no_grad()
def test_repositioned_streaming_is_the_original_written_out() -> None:
    model, (ids,) = tiny(layers=1), prompts(60)
    cache = CompressedCache.for_model(model, "streaming:budget=16,sink=3,reposition=true")
    logits = [model(torch.tensor([[token]]), past_key_values=cache).logits[:, 0] for token in ids]
    # the model's own rotation takes cosines in float32
    torch.testing.assert_close(torch.cat(logits), streaming_by_cache_slot(model, ids, 16, 3), rtol=0, atol=1e-5)
    kept = CompressedCache.for_model(model, "streaming:budget=16,sink=3")
    plain = [model(torch.tensor([[token]]), past_key_values=kept).logits[:, 0] for token in ids]
    assert float((torch.cat(plain) - torch.cat(logits)).abs().max()) > 0.1


def test_repositioned_sinks_do_not_drift_with_the_number_of_turns() -> None:
    model, (ids,) = tiny(layers=1).float(), prompts(200)
    cache = CompressedCache.for_model(model, "streaming:budget=16,sink=3,reposition=true")
    with torch.no_grad():
        last = [model(torch.tensor([[token]]), past_key_values=cache).logits[:, 0] for token in ids][-1]
        exact = streaming_by_cache_slot(model.double(), ids, 16, 3)[-1:]
    torch.testing.assert_close(last.double(), exact, rtol=0, atol=1e-4)


def test_a_model_whose_positions_are_not_rotary_is_refused_in_one_line() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=61, n_positions=64))
    for policy in ("expected:budget=16", "streaming:budget=16,reposition=true"):
        with pytest.raises(RunError, match="in every full-attention layer, which 'gpt2'"):
            CompressedCache.for_model(model, policy)


def test_pinned_roles_survive_a_whole_conversation() -> None:
    suite = SUITES.get("agent")()
    loaded = load_model()
    items = suite.items("eval", 3, 2, 192, loaded.chat.count_tokens)
    for policy, whole in (("streaming:budget=96,sink=0,pin=system", True), ("streaming:budget=96,sink=0", False)):
        rows = play(Sampler(loaded, parse_policy(policy)), [(suite, i) for i in items], Decoding(8), [1, 2, 3])
        assert all((row.survival["system"] == 1.0) is whole for row in rows)
        assert all(row.survival["user"] < 1.0 for row in rows)


def test_a_layer_without_positions_is_no_layer_to_expect_rotation_of() -> None:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    for every, fits in ((2, False), (100, True)):
        config = SmolLM3Config(
            vocab_size=61, num_hidden_layers=4, no_rope_layer_interval=every, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, **sizes,
        )  # fmt: skip
        model = SmolLM3ForCausalLM(config).eval()
        if fits:
            CompressedCache.for_model(model, "expected:budget=16")
        else:
            with pytest.raises(RunError, match="in every full-attention layer, which 'smollm3'"):
                CompressedCache.for_model(model, "expected:budget=16")


def test_a_cache_serves_only_the_model_it_was_made_for() -> None:
    own, other = tiny(), tiny()
    ids = torch.tensor(prompts(20))
    cache = CompressedCache.for_model(own, "none")
    with pytest.raises(RunError, match="not made for this model"):
        other(ids, past_key_values=cache)
    with pytest.raises(RunError, match="not made for this model, or a part of the model is called on its own"):
        own.model(ids, past_key_values=CompressedCache.for_model(own, "none"))


@torch.no_grad()
def test_a_copy_of_a_prepared_model_counts_tokens_once() -> None:
    model, ids = tiny(), torch.tensor(prompts(20))
    CompressedCache.for_model(model, "none")
    copy = deepcopy(model)
    cache = CompressedCache.for_model(copy, "none")
    logits = copy(ids, past_key_values=cache).logits
    torch.testing.assert_close(logits, tiny()(ids).logits, rtol=0, atol=1e-12)
    assert cache.ledger.evicted_at.shape[-1] == 20


@torch.no_grad()
def test_a_mask_that_hides_what_is_in_the_cache_is_refused() -> None:
    model, ids = tiny(), torch.tensor(prompts(20, 20))
    cache = CompressedCache.for_model(model, "none")
    mask = torch.ones(2, 20, dtype=torch.int64)
    model(ids, attention_mask=mask, past_key_values=cache)
    later = torch.ones(2, 25, dtype=torch.int64)
    later[1, 18:20] = 0
    with pytest.raises(SpecError, match="hides tokens that this CompressedCache was given as real"):
        model(ids[:, :5], attention_mask=later, past_key_values=cache)


@torch.no_grad()
def test_a_policy_that_cannot_be_replayed_has_no_ledger() -> None:
    model = tiny()
    cache = CompressedCache.for_model(model, "streaming:budget=12,sink=2,reposition=true")
    model(torch.tensor(prompts(30)), past_key_values=cache)
    with pytest.raises(SpecError, match="cannot be replayed, so there is no ledger"):
        _ = cache.ledger


def test_members_of_a_group_share_the_random_draws_of_their_prompt() -> None:
    """Prompt entries stay a uniform sample in every member: 50 of 350 entries, so 28.6 of the 200 in the prompt."""
    (prompt,) = prompts(200)
    episode = Sampler(served(), parse_policy("random:budget=50,chunk=1000")).open([prompt], list(range(4)), group=4)
    for _ in range(15):
        episode.decode(Decoding(1))
        episode.extend([prompts(9)[0]] * 4)
    kept = [float((r.evicted_at[:, :, :200] > len(r.ids)).sum(-1).float().mean()) for r in episode.rollouts()]
    assert all(20 < count < 37 for count in kept), kept
    own = [tuple((r.evicted_at[0, 0, 200:] > len(r.ids)).tolist()) for r in episode.rollouts()]
    assert len(set(own)) == 4, "what follows the prompt is drawn by each member"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"compose": ["snapkv:budget=64|streaming:budget=20", "kivi"]}, "one evicting policy and one quantising"),
        ({"compose": ["snapkv:budget=64+kivi", "none"]}, "one evicting policy and one quantising"),
        ("streaming:budget=12,sink=2,reposition=true+int8", "cannot be combined with a quantiser"),
        ("snapkv|snapkv", "name two policies that differ"),
        ("snapkv:budget=" + "9" * 30, "at most 1073741824"),
        ("random:seed=" + "9" * 30, "at most 1073741824"),
        ("expected:future=99999999", "at most 65536"),
    ],
)
def test_impossible_policies_are_refused_in_one_line(source: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        parse_policy(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("snapkv:pin=system/tool", "snapkv:pin=tool/system"),
        ("snapkv:pin=system/system", "snapkv:pin=system"),
        ("rkv:weight=-0", "rkv:weight=0.0"),
        ("snapkv+kivi:chunk=8", "snapkv+kivi"),
        ("kivi+snapkv:budget=96", "snapkv:budget=96+kivi"),
        ("snapkv:budget=0096", {"name": "snapkv", "budget": 96}),
        ("streaming:reposition=True", {"name": "streaming", "reposition": True}),
    ],
)
def test_equal_policies_have_equal_hashes_however_they_are_written(one: Any, other: Any) -> None:
    assert parse_policy(one) == parse_policy(other)
    assert parse_policy(one).hash == parse_policy(other).hash
    assert parse_policy(one).canonical == parse_policy(other).canonical
    assert parse_policy(parse_policy(one).canonical) == parse_policy(one)


def test_a_model_with_attention_of_its_own_is_refused_not_served_wrongly() -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    with pytest.raises(RunError, match="'falcon' computes attention by code of its own"):
        CompressedCache.for_model(FalconForCausalLM(config), "streaming:budget=16")


def test_a_layer_that_bypasses_the_cache_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    cache = CompressedCache.for_model(model, "streaming:budget=16,sink=2")
    inner = model.model.layers[1].self_attn
    plain = inner.forward
    monkeypatch.setattr(inner, "forward", lambda *args, kv, **rest: plain(*args, **rest))  # noqa: PLW0108 - drops kv
    with pytest.raises(RunError, match="1 of the model's 2 layers attended"):
        model(torch.tensor(prompts(20)), past_key_values=cache)


@torch.no_grad()
def test_a_padded_row_keeps_what_it_keeps_alone_whatever_the_chunk() -> None:
    model, (long, short) = tiny(), prompts(60, 40)
    ids = torch.tensor([long, [0] * 20 + short])
    mask = (torch.arange(60) >= torch.tensor([[0], [20]])).long()
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    policy = "snapkv:budget=20,window=4,interval=3,chunk=16"
    cache = CompressedCache.for_model(model, policy)
    both = model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)
    for row, text in enumerate((long, short)):
        own = CompressedCache.for_model(model, policy)
        alone = model.generate(torch.tensor([text]), past_key_values=own, **settings)
        assert both[row, 60:].tolist() == alone[0, len(text) :].tolist()
        length = len(text) + 7
        assert torch.equal(cache.ledger.evicted_at[row, :, :, :length], own.ledger.evicted_at[0])


@torch.no_grad()
def test_a_cache_is_refused_after_an_interrupted_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), torch.tensor(prompts(20))
    cache = CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].self_attn, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids, past_key_values=cache)
    with pytest.raises(RunError, match="was interrupted; make a new cache"):
        model(ids, past_key_values=cache)


@torch.no_grad()
def test_a_prompt_of_one_token_is_not_a_decode_step() -> None:
    model = tiny()
    cache = CompressedCache.for_model(model, "streaming:budget=12,sink=2,phase=decode,interval=3")
    for token in prompts(40)[0]:
        model(torch.tensor([[token]]), past_key_values=cache)
    times = sorted(set(cache.ledger.evicted_at[0, 0, 0].tolist()))[:-1]
    assert times == list(range(13, 41, 3))  # the first token does not count as a step


@torch.no_grad()
def test_left_padding_needs_no_mask_as_large_as_the_square_of_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[int] = []
    cached_layer = kvaudit.audit.cache.cached_layer
    plain = cached_layer.visibility_mask
    monkeypatch.setattr(cached_layer, "visibility_mask", lambda *args: masks.append(args[0].shape[1]) or plain(*args))
    monkeypatch.setattr(kvaudit.audit.cache.attention, "MASK_ELEMENTS", 4000)
    model, (long, short) = tiny(), prompts(200, 120)
    ids = torch.tensor([long, [0] * 80 + short])
    mask = (torch.arange(200) >= torch.tensor([[0], [80]])).long()
    cache = CompressedCache.for_model(model, "snapkv:budget=20,window=4,chunk=300")
    logits = model(ids, attention_mask=mask, past_key_values=cache).logits
    assert masks == [], "the first forward of a batch needs no mask at all"
    more = model(ids[:, :50], attention_mask=torch.cat([mask, mask[:, :50] | 1], 1), past_key_values=cache).logits
    assert max(masks) * 2 * 2 * 2 * 70 <= 4000 + 560, "masks of later chunks are cut to a bounded size"
    for row, text in enumerate((long, short)):
        own = CompressedCache.for_model(model, "snapkv:budget=20,window=4,chunk=300")
        first = model(torch.tensor([text]), past_key_values=own).logits
        torch.testing.assert_close(logits[row, -len(text) :], first[0], rtol=0, atol=1e-12)
        second = model(ids[row : row + 1, :50], past_key_values=own).logits
        torch.testing.assert_close(more[row], second[0], rtol=0, atol=1e-12)


def test_tokens_given_in_two_calls_enter_as_in_one() -> None:
    for text in ("streaming:budget=24,sink=2,chunk=16", "kivi:group=4,residual=8,chunk=16"):
        policy, (prompt, more) = parse_policy(text), prompts(40, 30)
        whole, parts = (Sampler(served(), policy).open([prompt], [3]) for _ in range(2))
        for episode, pieces in ((whole, [more]), (parts, [more[:11], more[11:]])):
            episode.decode(Decoding(5))
            for piece in pieces:
                episode.extend([piece])
            episode.decode(Decoding(5))
        one, other = whole.rollouts()[0], parts.rollouts()[0]
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.evicted_at, other.evicted_at)
        if one.keys_quantised_at is not None and other.keys_quantised_at is not None:
            assert torch.equal(one.keys_quantised_at, other.keys_quantised_at)


@torch.no_grad()
def test_a_ledger_cut_short_is_refused_and_parts_of_a_model_see_no_shadow() -> None:
    model, ids = tiny(), torch.tensor(prompts(40))
    cache = CompressedCache.for_model(model, "streaming:budget=12,sink=2,chunk=16")
    model(ids, past_key_values=cache)
    record = cache.ledger
    for cut in (10, 38):
        with (
            pytest.raises(DataError, match=f"records {cut} tokens, the longest row has 40"),
            shadow(model, replace(record, evicted_at=record.evicted_at[..., :cut])),
        ):
            model(ids)
    with shadow(model, replace(record, evicted_at=record.evicted_at[..., :39])):
        model(ids)  # the last drawn token never enters a cache
    with pytest.raises(RunError, match="call the model itself"), shadow(model, record):
        model.model(ids)
    with pytest.raises(DataError, match="the ledger is of 1 rows, got 2"), shadow(model, record):
        model(ids.repeat(2, 1))
    assert torch.isfinite(model.model(ids).last_hidden_state).all(), "outside, parts of the model are free again"


def test_unsupported_cache_methods_are_one_line_errors() -> None:
    model = tiny()
    cache = CompressedCache.for_model(model, "streaming:budget=12,sink=2")
    model(torch.tensor(prompts(20)), past_key_values=cache)
    calls = [("crop", (-1,)), ("reset", ()), ("batch_repeat_interleave", (2,)), ("reorder_cache", (torch.tensor([0]),))]
    for name, words in [*calls, ("batch_select_indices", (torch.tensor([0]),))]:
        with pytest.raises(RunError, match="a CompressedCache "):
            getattr(cache, name)(*words)


def test_a_cache_of_nothing_but_codes_is_served_and_replayed() -> None:
    loaded, (prompt,) = served(), prompts(30)
    for text in ("streaming:budget=4,sink=4+int8", "knorm:budget=3,sink=3,window=0+kivi:bits=2,group=2,residual=2"):
        episode = Sampler(loaded, parse_policy(text)).open([prompt], [1])
        (completion,) = episode.decode(Decoding(12))
        assert completion is not None
        (rollout,) = episode.rollouts()
        with torch.no_grad():
            logits, _ = suffix_logits(loaded.model, [rollout], group=1, view="shadow")
        drawn = rollout.ids[30:]
        shadowed = logits[0].log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        torch.testing.assert_close(shadowed, torch.tensor(completion.logprobs, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -0.1])
def test_a_temperature_that_is_no_number_is_refused(temperature: float) -> None:
    with pytest.raises(SpecError, match="temperature >= 0"):
        Decoding(4, temperature)
