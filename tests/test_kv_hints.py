"""Codes at a border of two: recorded where rounding could decide, taken over in a replay, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conform.world import DEEP, LAYERS, gap, ledger_of, prompts, random_model, shared, two_turns
from torch import Tensor

from kvaudit import CompressedCache, shadow
from kvaudit.audit.cache import hints
from kvaudit.audit.cache.codes import Scratch, encode_runs, encode_tokens, pack, unpack
from kvaudit.audit.cache.hints import (
    BAND,
    HINT_BATCH,
    KEYS,
    VALUES,
    HintRecorder,
    HintTable,
    LayerPart,
    pack_hints,
    ranks,
    unpack_hints,
)
from kvaudit.audit.policies import Quantiser, parse_policy, quantiser_of
from kvaudit.audit.replay.learner_pass import suffix_logits

CODECS = ["int8", "fp8", "fp8:format=e5m2", "q4_0:group=4", "kivi:bits=2,group=4,residual=4", "kivi:group=4,residual=4"]
WIDE = dict(dtype=torch.float32, spread=0.2)


def codec(text: str) -> Quantiser:
    found = quantiser_of(parse_policy(text))
    assert found is not None
    return found


def numbers_of(own: Quantiser, codes: Tensor, dtype: torch.dtype) -> Tensor:
    return own.numbers(codes, torch.empty(codes.shape, dtype=dtype))


def test_words_hold_what_was_packed() -> None:
    index = torch.tensor([7, 0, 4094, 8190, 8189, 2**20, 2**20 + 1])
    low = torch.tensor([1, 2, 15, 0, 3, 4, 5])
    words = pack_hints(index, low)
    assert words.dtype is torch.uint16
    found, lows = unpack_hints(pack_hints(index, low))
    assert found.tolist() == [0, 7, 4094, 8189, 8190, 2**20, 2**20 + 1]
    assert lows.tolist() == [2, 1, 15, 3, 0, 4, 5]


def test_words_are_distance_and_low_bits() -> None:
    assert pack_hints(torch.tensor([2, 5, 5 + 4095 + 1]), torch.tensor([9, 3, 0])).tolist() == [41, 51, 65520, 16]
    assert pack_hints(torch.zeros(0, dtype=torch.int64), torch.zeros(0)).tolist() == []


@pytest.mark.parametrize("text", CODECS)
def test_ranks_follow_the_numbers_and_lead_back(text: str) -> None:
    ranked, codes = ranks(codec(text), torch.device("cpu")), torch.arange(2 ** codec(text).bits, dtype=torch.uint8)
    numbers = numbers_of(codec(text), codes, torch.float64)
    order = numbers.argsort()
    assert (ranked.rank_of[order].diff() >= 0).all()
    back = numbers_of(codec(text), ranked.code_of[ranked.rank_of], torch.float64)
    torch.testing.assert_close(back, numbers, rtol=0, atol=0, equal_nan=True)


def recorded(x: torch.Tensor, leaving: torch.Tensor) -> list[list[int]]:
    """Token, head and channel of what is recorded of int8 keys [B, H, K, D]."""
    recorder, int8 = HintRecorder(codec("int8"), len(x)), codec("int8")
    at = torch.arange(x.shape[2]).expand(x.shape[:3])
    recorder.add(KEYS, x, *encode_tokens(x, int8), leaving, at)
    heads, width = x.shape[1], x.shape[3]
    found = [recorder.row_hints(row, 0, 1, heads, width)[0] for row in range(len(x))]
    return [[(i // (2 * heads * width), i // width % heads, i % width) for i in own.tolist()] for own in found]


def test_only_what_rounding_could_decide_is_recorded() -> None:
    """The largest magnitude is 127, so codes are the numbers themselves and the band is 0.00127."""
    x = torch.tensor([127.0, 3.4, 3.499, 3.5012, 3.502, -7.5005, 0.0, 126.4]).expand(1, 2, 3, 8).clone()
    x[0, 1, 1] = torch.tensor([127.0] * 7 + [0.5])
    every = torch.ones(1, 2, 3, dtype=torch.bool)
    three = [2, 3, 5]
    expected = [(t, h, c) for t in range(3) for h in range(2) for c in ([7] if (t, h) == (1, 1) else three)]
    assert sorted(recorded(x, every)[0]) == expected
    assert sorted(recorded(x, every & (torch.arange(3) == 2))[0]) == [e for e in expected if e[0] == 2]


@pytest.mark.parametrize("slots", [1, 3])
def test_entries_that_wait_for_examination_are_copies(slots: int) -> None:
    """A view would hold all that is exact, at every step of a layer, and change with it."""
    int8, exact = codec("int8"), torch.tensor([127.0, 3.499, 3.5012, 0.0]).repeat(1, 1, 9, 1)
    x, recorder = exact[:, :, :slots], HintRecorder(int8, 1)
    every, at = torch.ones(1, 1, slots, dtype=torch.bool), torch.arange(slots).expand(1, 1, slots)
    recorder.add(KEYS, x, *encode_tokens(x, int8), every, at)
    exact.zero_()
    assert len(recorder.row_hints(0, 0, 1, 1, 4)[0]) == 2 * slots


@pytest.mark.parametrize("most", [1, 40, 500])  # elements: of a part of a token, of slots of a row, of two rows
def test_hints_are_the_same_whatever_the_size_of_a_piece(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = torch.randn(3, 2, 11, 8, generator=torch.Generator().manual_seed(4)), []
    codes, parameters = encode_tokens(x, codec("int8"))
    at = torch.arange(11, dtype=torch.int32).expand(3, 2, 11)
    monkeypatch.setattr(hints, "BAND", 2e-3)  # so that every row has some
    for size in (most, 1 << 18):
        monkeypatch.setattr(hints, "_HOST_PIECE", size)
        recorder = HintRecorder(codec("int8"), 3)
        recorder.add(KEYS, x, codes, parameters, at % 3 > 0, at)
        found.append([pack_hints(*recorder.row_hints(row, 0, 1, 2, 8)).tolist() for row in range(3)])
    assert found[0] == found[1]
    assert all(len(words) > 5 for words in found[0])


def test_all_that_leaves_now_and_some_that_leaves_later_are_noted_as_they_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "BAND", 2e-3)  # so that every row has some
    x = torch.randn(2, 2, 9, 8, generator=torch.Generator().manual_seed(4))
    codes, parameters = encode_tokens(x, codec("int8"))
    at = torch.arange(9, dtype=torch.int32).expand(2, 2, 9)
    which = (at < 5) | (at % 2 > 0)  # all of the first five, then some
    once, by_parts = HintRecorder(codec("int8"), 2), HintRecorder(codec("int8"), 2)
    once.add(VALUES, x, codes, parameters, which, at)
    for first, end, own in ((0, 5, None), (5, 9, which[:, :, 5:])):
        part = (each[:, :, first:end] for each in (x, codes, parameters))
        by_parts.add(VALUES, *part, own, at[:, :, first:end])
    found = [
        [pack_hints(*recorder.row_hints(row, 0, 1, 2, 8)).tolist() for row in range(2)] for recorder in (once, by_parts)
    ]
    assert found[0] == found[1]
    assert all(len(words) > 5 for words in found[0])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_byte_is_codes_side_by_side(bits: int) -> None:
    every, parts = torch.arange(256, dtype=torch.uint8).reshape(1, 2, 8, 16), 8 // bits
    wanted = [[(byte >> bits * n) % 2**bits for n in range(parts)] for byte in range(256)]
    for scratch in (None, Scratch()):
        codes = unpack(every, bits, scratch)
        assert codes.reshape(256, parts).tolist() == wanted
        assert torch.equal(pack(codes, bits), every)
    assert torch.equal(unpack(every.transpose(1, 2), bits), unpack(every, bits).transpose(1, 2))


def test_steps_finer_than_the_band_are_not_recorded() -> None:
    """Around zero an FP8 number is nearer to its neighbours than rounding reaches."""
    fp8 = codec("fp8")
    x = torch.tensor([448.0, 2.0**-8, 2.0**-9, 0.0, 300.0, 5.0, 7.0, 9.0]).view(1, 1, 1, 8)
    recorder = HintRecorder(fp8, 1)
    recorder.add(VALUES, x, *encode_tokens(x, fp8), torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, 1))
    assert recorder.row_hints(0, 0, 1, 1, 8)[0].tolist() == []


@pytest.mark.parametrize("columns", [(1, 1, 1), (3, HINT_BATCH, 2), (HINT_BATCH + 5,)])
@pytest.mark.parametrize("text", ["int8", "kivi:group=4,residual=4"])
def test_positions_may_be_said_by_the_first(text: str, columns: tuple[int, ...]) -> None:
    own, generator = codec(text), torch.Generator().manual_seed(0)
    recorders, at = [HintRecorder(own, 2) for _ in range(3)], 7
    for number, count in enumerate(columns):
        x = torch.randn(2, 2, count, 64, generator=generator)
        codes, parameters = encode_tokens(x, own)
        where = torch.arange(at, at + count).int().expand(2, 2, count)
        for recorder, said in zip(recorders, (where, at, where if number % 2 else at), strict=True):
            recorder.add(VALUES, x, codes, parameters, None, said)
        at += count
    found = [[recorder.row_hints(row, 1, 3, 2, 64)[0].sort().values for row in range(2)] for recorder in recorders]
    assert sum(map(len, found[0])) > 0 or max(columns) < HINT_BATCH
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_a_group_whose_entries_are_all_alike_has_no_border() -> None:
    """Its scale is 0: any code stands for the same, and a hint that names one is forged."""
    own = codec("kivi:bits=2,group=4,residual=4")
    x = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    x[..., 0] = 1.5
    codes, _, parameters = encode_runs(x, own)
    fitted, strays = parameters.repeat_interleave(4, 2), list[tuple[int, int]]()
    table = HintTable([pack_hints(torch.tensor([2 * 2 * 4]), torch.tensor([3]))], torch.arange(4)[None], 1, strays)
    assert torch.equal(table.apply(LayerPart(0, KEYS, 4), x, codes, fitted, own), codes)
    assert strays == [(0, 0)]


@pytest.mark.parametrize("text", CODECS[:3])
def test_a_replay_takes_over_what_is_near_a_border_and_nothing_else(text: str) -> None:
    generator = torch.Generator().manual_seed(0)
    own, x = codec(text), torch.randn(2, 2, 400, 16, generator=generator)
    codes, parameters = encode_tokens(x, own)
    recorder, every = HintRecorder(own, 2), torch.ones(2, 2, 400, dtype=torch.bool)
    recorder.add(KEYS, x, codes, parameters, every, torch.arange(400).expand(2, 2, 400))
    words = [pack_hints(*recorder.row_hints(row, 1, 3, 2, 16)) for row in range(2)]
    moved = x + 0.5 * BAND * x.abs().amax(-1, keepdim=True) * torch.randn(x.shape, generator=generator).clamp(-1, 1)
    flipped, fitted = encode_tokens(moved, own)
    changed = numbers_of(own, flipped, torch.float32) != numbers_of(own, codes, torch.float32)
    strays: list[tuple[int, int]] = []
    table = HintTable(words, torch.arange(400).expand(2, 400), 3, strays)
    taken = table.apply(LayerPart(1, KEYS, 16), moved, flipped, fitted, own)
    assert changed.sum() > 5
    step = torch.nextafter(torch.zeros(()), torch.ones(())) + 2 * BAND * own.largest  # finer steps are rounding
    assert ((numbers_of(own, taken, torch.float32) - numbers_of(own, codes, torch.float32)).abs() <= step).all()
    assert strays == []
    assert torch.equal(table.apply(LayerPart(2, KEYS, 16), moved, flipped, fitted, own), flipped)
    far = x + 0.3 * x.abs().amax(-1, keepdim=True)
    other, wide = encode_tokens(far, own)
    left = table.apply(LayerPart(1, KEYS, 16), far, other, wide, own)
    assert len(strays) > 0.9 * sum(len(unpack_hints(w)[0]) for w in words)
    assert (left != other).float().mean() < 1e-3


LLAMA = "q4_0:write=true,rotate=true"
SOME = ["int8", "fp8", LLAMA, "kivi:group=4,residual=8", "streaming:budget=12,sink=2,interval=3+int8"]


@pytest.mark.parametrize("policy", SOME)
def test_float32_is_replayed_to_rounding_in_groups_and_row_by_row(policy: str) -> None:
    loaded = shared(**WIDE)
    played = two_turns(loaded, policy, group=3, lengths=(150, 190))
    assert all(rollout.hints is not None and len(rollout.hints) for rollout in played.rollouts)
    for group in (3, 1):
        assert gap(loaded, played, "shadow", group=group) < 1e-5


def test_members_of_a_group_have_the_hints_of_the_prompt_in_common() -> None:
    loaded = shared(**WIDE)
    first, second = two_turns(loaded, "int8", group=2, lengths=(150,)).rollouts
    assert first.hints is not None
    prompt = [unpack_hints(r.hints)[0] for r in (first, second)]
    prompt = [index[index // (LAYERS * 2 * 2 * 8) < 150] for index in prompt]
    assert len(prompt[0]) > 10
    assert torch.equal(*prompt)


def test_hints_are_not_used_under_other_weights() -> None:
    loaded = shared(**WIDE)
    played = two_turns(loaded, "int8", lengths=(150,))
    other = random_model(dtype=torch.float32, spread=0.2, attention="kvaudit")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
        bare = [replace(r, hints=None) for r in played.rollouts]
        strays: list[tuple[int, int]] = []
        seen, _ = suffix_logits(other, played.rollouts, group=1, view="shadow", strays=strays)
        alone, _ = suffix_logits(other, bare, group=1, view="shadow")
    assert len(strays) > 10
    assert (seen - alone).abs().max() < 0.1


@pytest.mark.parametrize("policy", ["int8", "kivi:group=4,residual=8"])
def test_the_public_cache_hands_its_hints_to_the_shadow(policy: str) -> None:
    model, (long, short) = random_model(DEEP, torch.float32, 0.2), prompts(180, 150)
    ids = torch.tensor([long, [0] * 30 + short])
    mask = (torch.arange(180) >= torch.tensor([[0], [30]])).long()
    cache, logits = CompressedCache.for_model(model, policy), []
    with torch.no_grad():
        for start, stop in [(0, 170), *((t, t + 1) for t in range(170, 180))]:
            part = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            logits.append(part.logits)
        with shadow(model, cache.ledger):
            replayed = model(ids, attention_mask=mask).logits
    assert all(len(unpack_hints(words)[0]) for words in cache.ledger.hints)
    real = mask.bool()
    gaps = (torch.cat(logits, 1)[real].log_softmax(-1) - replayed[real].log_softmax(-1)).abs()
    assert gaps.max() < 3e-5


def test_bfloat16_records_no_hints() -> None:
    (rollout,) = two_turns(shared(dtype=torch.bfloat16, spread=0.1), "int8", lengths=(40,)).rollouts
    assert rollout.hints is not None
    assert len(rollout.hints) == 0


def test_a_policy_without_codes_has_no_hints() -> None:
    (rollout,) = two_turns(shared(), "streaming:budget=12,sink=2", lengths=(40,)).rollouts
    assert rollout.hints is None
    assert ledger_of(rollout).hints == ()


def test_about_one_element_in_four_hundred_of_int8_is_at_a_border() -> None:
    """2 * BAND of the largest magnitude, in steps of a 127th of it."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(1, 4, 1000, 64))).float()
    found = recorded(x, torch.ones(1, 4, 1000, dtype=torch.bool))[0]
    assert 2 * BAND * 127 * x.numel() == pytest.approx(len(found), rel=0.1)
