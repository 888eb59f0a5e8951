"""How engines store keys and values, in literal numbers, and a pass that reads them back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from kvaudit.audit.cache.engine_store import BLOCK, ByChannel, ByToken, Cast, EngineStore
from kvaudit.audit.cache.layers import kv_heads
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.engines.base import DrawnRollout
from kvaudit.audit.engines.exports.llama_cpp import HeadLayout, read_state
from kvaudit.audit.replay.learner_pass import suffix_logits
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.training.batch import microbatches
from kvaudit.audit.training.engine_rollouts import RolloutTokens
from kvaudit.audit.training.learner import read_tokens
from kvaudit.core.errors import DataError, RunError

EXACT = EngineStore(None, None)
CODED = EngineStore(ByChannel(4), ByToken(4))


def column(numbers: Sequence[float]) -> Tensor:
    """Keys of one channel in one block, the rest of it unwritten: [1, 1, 1, BLOCK, 1]."""
    return torch.tensor([*numbers, *[0.0] * (BLOCK - len(numbers))])[None, None, None, :, None]


def first(count: int) -> Tensor:
    return (torch.arange(BLOCK) < count)[None, None]


def test_a_token_is_coded_between_its_own_extremes() -> None:
    assert ByToken(8).read_back(torch.tensor([0.0, 0.6, 100.4, 255.0])).tolist() == [0, 1, 100, 255]
    assert ByToken(4).read_back(torch.tensor([0.0, 1.4, 7.5, 15.0])).tolist() == [0, 1, 8, 15]


def test_groups_of_channels_have_extremes_of_their_own() -> None:
    x = torch.tensor([0.0, 15.0, 4.4, 0.0, 30.0, 4.4])
    assert ByToken(4, group=3).read_back(x).tolist() == [0, 15, 4, 0, 30, 4]
    assert ByToken(4).read_back(x).tolist() == [0, 16, 4, 0, 30, 4]


def test_halves_go_to_the_even_code_and_what_is_all_alike_stays() -> None:
    assert ByToken(4).read_back(torch.tensor([0.0, 0.5, 1.5, 2.5, 15.0])).tolist() == [0, 0, 2, 2, 15]
    assert ByToken(8).read_back(torch.tensor([2.0, 2.0])).tolist() == pytest.approx([2.0, 2.0], abs=1e-3)


def test_numbers_are_cast_and_cut_to_the_largest() -> None:
    x = torch.tensor([1.1, -500.0, 0.3])
    assert Cast("float8_e4m3fn").read_back(x).tolist() == [1.125, -448.0, 0.3125]
    assert Cast("float8_e5m2").read_back(x).tolist() == [1.0, -512.0, 0.3125]


def test_numbers_are_cut_toward_zero_where_an_engine_does() -> None:
    x = torch.tensor([1.1, -500.0, 0.3, -0.001, 1.125])
    assert Cast("float8_e4m3fn", toward_zero=True).read_back(x).tolist() == [1.0, -448.0, 0.28125, 0.0, 1.125]
    assert Cast("float8_e5m2", toward_zero=True).read_back(x).tolist()[:3] == [1.0, -448.0, 0.25]


def test_a_block_is_coded_again_out_of_what_was_read_back_when_a_key_joins_it() -> None:
    keys = column([0.0, 15.0, 30.0, 60.0])
    written = ByChannel(4).read_in_order(keys, first(1), first(4))
    seen = [written.same_block[0, 0, 0, place, : place + 1, 0].tolist() for place in range(4)]
    # 15 is 7.5 steps of 2, and goes to 8 of them; 16 and 32 would be its steps of 4, had it been 15 or 30 again
    for own, numbers in zip(seen, [[0], [0, 15], [0, 16, 30], [0, 16, 32, 60]], strict=True):
        assert own == pytest.approx(numbers, abs=1e-4)
    assert written.later[0, 0, 0, :4, 0].tolist() == pytest.approx([0, 16, 32, 60], abs=1e-4)


def test_the_keys_of_a_prompt_are_coded_at_once() -> None:
    keys = column([0.0, 15.0, 30.0, 45.0])
    alone = ByChannel(4).read_back(keys, first(3)[:, None])
    assert alone[0, 0, 0, :4, 0].tolist() == pytest.approx([0, 16, 30, 0], abs=1e-4)
    written = ByChannel(4).read_in_order(keys, first(3), first(4))
    assert written.same_block[0, 0, 0, 3, :4, 0].tolist() == pytest.approx([0, 15, 30, 45], abs=1e-5)


def test_what_joins_no_block_changes_none() -> None:
    keys = torch.randn(2, 1, 2, BLOCK, 3, generator=torch.Generator().manual_seed(1))
    whole = torch.ones(2, 2, BLOCK, dtype=torch.bool)
    written = ByChannel(4).read_in_order(keys, whole, whole)
    assert torch.equal(written.later, ByChannel(4).read_back(keys, whole[:, None]))


# --- the pass ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LoadedModel:
    found = load_model(str(tiny_folder))
    found.model = found.model.double()
    return found


def rollout(model: LoadedModel, prompt: int, new: int, seed: int, store: EngineStore = EXACT) -> Rollout:
    """Random tokens; of one ``seed`` the prompts are the same."""
    draws = torch.Generator().manual_seed(seed)
    start = torch.randint(5, 50, (prompt,), generator=draws)
    ids = torch.cat([start, torch.randint(5, 50, (new,), generator=torch.Generator().manual_seed(seed + 100 * new))])
    config, tokens = model.model.config, prompt + new
    never = torch.full((config.num_hidden_layers, kv_heads(config), tokens), NEVER, dtype=torch.int32)
    return Rollout(
        ids=ids,
        prompt_length=prompt,
        sampled=torch.arange(tokens) >= prompt,
        sampler_logprobs=torch.zeros(tokens),
        evicted_at=never,
        kv_bytes_peak=0,
        kv_bytes_dense=0,
        retention=1.0,
        answer_start=prompt,
        stored=store,
    )


def rows(model: LoadedModel, store: EngineStore) -> list[Rollout]:
    """Two groups of two whose blocks begin and end at other places."""
    shapes = [(40, 30, 1), (40, 9, 1), (64, 3, 2), (64, 20, 2)]
    return [rollout(model, *shape, store) for shape in shapes]


def logits(model: LoadedModel, rollouts: Sequence[Rollout], group: int, kind: str = "shadow") -> list[Tensor]:
    with torch.no_grad():
        found, valid = suffix_logits(model.model, rollouts, group=group, view=kind)  # type: ignore[arg-type]
    return [row[own] for row, own in zip(found, valid, strict=True)]


def test_a_store_that_changes_nothing_is_the_dense_pass(model: LoadedModel) -> None:
    exact, dense = (logits(model, rows(model, EXACT), 2, kind) for kind in ("shadow", "dense"))
    assert max(float((a - b).abs().max()) for a, b in zip(exact, dense, strict=True)) < 1e-12


def test_shared_prompts_and_neighbours_change_nothing(model: LoadedModel) -> None:
    together = logits(model, rows(model, CODED), 2)
    alone = [logits(model, [one], 1)[0] for one in rows(model, CODED)]
    assert max(float((a - b).abs().max()) for a, b in zip(together, alone, strict=True)) < 1e-12
    dense = logits(model, rows(model, CODED), 2, "dense")
    assert min(float((a - b).abs().max()) for a, b in zip(together, dense, strict=True)) > 1e-6


def test_it_is_the_error_of_coding_that_is_the_engines_and_the_numbers_are_the_learners(model: LoadedModel) -> None:
    plain = rollout(model, 40, 20, 3, EXACT)
    config = model.model.config
    shape = (config.num_hidden_layers, kv_heads(config), 59, config.hidden_size // config.num_attention_heads)
    other = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    wrote = replace(plain, written=(other, other))  # as if by other weights, and stored as it is
    dense = logits(model, [plain], 1, "dense")[0]
    assert float((logits(model, [wrote], 1)[0] - dense).abs().max()) < 1e-12


def test_codes_follow_from_what_the_engine_wrote_and_gradients_from_the_learner(model: LoadedModel) -> None:
    plain = rollout(model, 40, 20, 3, CODED)
    config = model.model.config
    shape = (config.num_hidden_layers, kv_heads(config), 59, config.hidden_size // config.num_attention_heads)
    draws = torch.Generator().manual_seed(4)
    keys, values = (torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2))
    wrote = replace(plain, written=(keys, values))
    assert float((logits(model, [wrote], 1)[0] - logits(model, [plain], 1)[0]).abs().max()) > 1e-3
    found, _ = suffix_logits(model.model, [wrote], group=1, view="shadow")
    model.model.zero_grad()
    found.square().sum().backward()
    name = "model.layers.0.self_attn.k_proj.weight"
    assert float(dict(model.model.named_parameters())[name].grad.abs().sum()) > 0
    model.model.zero_grad()


def test_what_queries_read_is_read_and_gradients_are_the_learners(model: LoadedModel) -> None:
    """The engine that shows codes: as if it had stored other numbers without a loss."""
    shown = replace(CODED, keys=None, values=None, shown=True)
    plain = rollout(model, 40, 20, 3, shown)
    with pytest.raises(DataError, match="lacks the keys that its engine's queries read"):
        logits(model, [plain], 1)
    past = model.model(plain.ids[None, :-1], use_cache=True).past_key_values.layers
    own = [torch.cat([getattr(layer, part) for layer in past]).detach() for part in ("keys", "values")]  # [L, H, T, D]
    same, other = (replace(plain, written=(own[0] * times, own[1] * times)) for times in (1.0, 1.5))
    dense = logits(model, [plain], 1, "dense")[0]
    assert float((logits(model, [same], 1)[0] - dense).abs().max()) < 1e-9
    assert float((logits(model, [other], 1)[0] - dense).abs().max()) > 1e-3
    found, _ = suffix_logits(model.model, [same], group=1, view="shadow")
    plainly, _ = suffix_logits(model.model, [same], group=1, view="dense")
    weight = dict(model.model.named_parameters())["model.layers.0.self_attn.k_proj.weight"]
    ours, wanted = (torch.autograd.grad(view.square().sum(), weight)[0] for view in (found, plainly))
    assert float(ours.abs().max()) > 1e-3
    assert torch.allclose(ours, wanted, atol=1e-9)


def test_turns_are_rows_of_their_own_and_their_tokens_stay_in_order(model: LoadedModel) -> None:
    layers, heads = model.model.config.num_hidden_layers, kv_heads(model.model.config)
    size = model.model.config.hidden_size // model.model.config.num_attention_heads
    draws = torch.Generator().manual_seed(6)

    def ids(count: int) -> list[int]:
        return torch.randint(5, 50, (count,), generator=draws).tolist()

    def drawn(said: RolloutTokens, count: int, until: int | None = None) -> None:
        shape = len(said.ids) + count - 1, layers, heads * size
        own = [torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2)]
        said.add_sampled(DrawnRollout(tuple(ids(count)), "stop", tuple([-1.0] * count), (own[0], own[1])), until)

    talk, short = RolloutTokens(ids(37)), RolloutTokens(ids(20))
    drawn(talk, 9, until=7)
    talk.add_given(ids(30))
    drawn(talk, 12)
    drawn(short, 5)
    rollouts = [said.rollout(model.model.config, CODED) for said in (talk, short)]
    assert [turn.prompt_length for turn in rollouts[0].turns] == [37, 74]
    assert [len(turn.ids) for turn in rollouts[0].turns] == [44, 86]
    assert rollouts[1].turns == ()
    one_by_one = [turn for rollout in rollouts for turn in rollout.engine_turns]
    with torch.no_grad():
        read = read_tokens(model.model, rollouts, 1, "shadow", 1.0).logprobs
        wanted = torch.cat([read_tokens(model.model, [turn], 1, "shadow", 1.0).logprobs for turn in one_by_one])
        whole = read_tokens(model.model, rollouts, 1, "dense", 1.0).logprobs
    assert len(wanted) == 7 + 12 + 5 == sum(int(rollout.sampled.sum()) for rollout in rollouts)
    assert float((read - wanted).abs().max()) < 1e-9
    assert float((whole - wanted).abs().max()) > 1e-3
    unread = RolloutTokens(ids(3))
    unread.add_sampled(DrawnRollout((5, 6), "stop", (-1.0, -1.0), None))
    unread.add_given((7, 8))
    unread.add_sampled(DrawnRollout((9,), "stop", (-1.0,), None))
    assert unread.rollout(model.model.config, CODED).turns == (), "of which nothing can be replayed"


def test_a_microbatch_of_turns_holds_no_more_than_its_limit(model: LoadedModel) -> None:
    def talk(turns: int, length: int) -> Rollout:
        own = [rollout(model, length - 5 * (turns - n), 5, 1) for n in range(turns)]
        return replace(rollout(model, length - 5 * turns, 5 * turns, 1), turns=tuple(own) if turns > 1 else ())

    rows = [talk(6, 60), talk(5, 58), talk(1, 300), talk(1, 290), talk(6, 200), talk(6, 190)]
    micros = microbatches(rows, 2, 3000)
    assert sorted(row for micro in micros for row in micro) == list(range(len(rows)))
    for micro in micros:
        passed = [turn for row in micro for turn in rows[row].engine_turns]
        assert len(passed) * max(len(turn.ids) for turn in passed) <= 3000
        assert len({len(turn.turns) > 1 for turn in (rows[row] for row in micro)}) == 1


# --- the state of llama.cpp -------------------------------------------------------------------------------------------

PAIRED = torch.tensor([0, 2, 1, 3])  # halves of four numbers as neighbours


def state(keys: Tensor, values: Tensor, kind: str = "F32", *, transposed: bool = False) -> Any:
    """Keys and values [tokens, L, H * D] as llama.cpp writes them, of the second of two streams."""
    import gguf

    tokens, layers = keys.shape[:2]
    raw = struct.pack("<IiII", 0xAF143CD8, 1, 2, 0) + struct.pack("<I", tokens)
    raw += b"".join(struct.pack("<iIi", position, 1, 1) for position in range(tokens))
    raw += struct.pack("<II", transposed, layers)
    of = gguf.GGMLQuantizationType[kind]
    for part, turned in ((keys, False), (values, transposed)):
        for layer in range(layers):
            rows = gguf.quants.quantize(part[:, layer].numpy(), of).view(np.uint8)
            if turned:
                raw += struct.pack("<iII", of, 4, part.shape[2]) + part[:, layer].T.contiguous().numpy().tobytes()
            else:
                raw += struct.pack("<iQ", of, rows.shape[1]) + rows.tobytes()
    return np.frombuffer(raw, np.uint8).copy()


def numbers(tokens: int, heads: int, size: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(tokens, 2, heads * size, generator=draws), torch.randn(tokens, 2, heads * size, generator=draws)


@pytest.mark.parametrize("transposed", [False, True])
def test_plain_numbers_come_back_in_the_order_of_a_model_of_transformers(transposed: bool) -> None:
    keys, values = numbers(5, 2, 4)
    stored = keys.reshape(5, 2, 2, 4)[..., PAIRED].reshape(keys.shape)
    found = read_state(state(stored, values, transposed=transposed), HeadLayout(4, True, True, True))
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)
    apart = read_state(state(keys, values, transposed=transposed), HeadLayout(4, False, True, True))
    assert torch.equal(apart[0], keys)


def test_cells_may_be_in_any_order() -> None:
    keys, values = numbers(3, 1, 4)
    raw = state(keys, values)
    raw[20], raw[44] = 2, 0  # the positions of the first cell and of the last
    found = read_state(raw, HeadLayout(4, False, False, False))
    assert torch.equal(found[0], keys.flip(0))
    assert torch.equal(found[1], values.flip(0))


@pytest.mark.parametrize(("size", "keys_by", "values_by"), [(64, 64, 64), (96, 1, 1), (128, 128, 64), (192, 64, 64)])
def test_what_was_turned_before_it_was_coded_is_turned_back(size: int, keys_by: int, values_by: int) -> None:
    keys, values = numbers(3, 2, size)

    def turned(x: Tensor, by: int) -> Tensor:
        return (x.reshape(3, 2, -1, by) @ torch.tensor(hadamard(by) / by**0.5).float()).reshape(x.shape)

    found = read_state(
        state(turned(keys, keys_by), turned(values, values_by), "Q8_0"), HeadLayout(size, False, True, True)
    )
    for own, wanted in zip(found, (keys, values), strict=True):
        assert 0 < float((own - wanted).abs().max()) < 0.06  # a step of eight bits
    straight = read_state(state(keys, values, "Q8_0"), HeadLayout(size, False, False, False))
    assert float((straight[0] - keys).abs().max()) < 0.06


def test_a_state_of_another_form_is_one_line() -> None:
    whole = state(*numbers(4, 1, 4))
    other, twice = whole.copy(), whole.copy()
    other[0] += 1
    twice[20] = 1  # the position of the first cell
    for raw, said in (
        (other, r"it begins with 0x\w+, expected 0xaf143cd8"),
        (twice, "its cells do not hold each position once"),
        (whole[:-3], "cannot reshape|requires a buffer"),
        (whole[:30], "requires a buffer"),
        (np.append(whole, whole[:7]), "7 bytes are left"),
    ):
        with pytest.raises(
            RunError,
            match=rf"^the state of llama.cpp's cache has an unknown form: .*{said}.*; use the correction naive",
        ):
            read_state(raw, HeadLayout(4, False, False, False))
