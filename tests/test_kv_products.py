"""Attention on codes in blocks: the same as on what the codes stand for, wherever a block ends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvaudit.audit.cache import codes as products
from kvaudit.audit.cache.codes import (
    Block,
    CodeProducts,
    Scratch,
    decode_keys,
    decode_tokens,
    encode_runs,
    encode_tokens,
    pack,
    token_logits,
    token_mix,
)
from kvaudit.audit.policies import Quantiser, parse_policy

CODECS = ["int8", "fp8", "kivi:bits=4,group=4,residual=4", "kivi:bits=2,group=8,residual=8"]
BLOCKS = [Block(1, 8), Block(1, 16), Block(2, 40), Block(5, 40), Block(6, 40)]  # of 2 rows x 3 heads and 40 tokens
WHOLE = Block(100, 1000)


def codec_of(policy: str) -> Quantiser:
    codec = parse_policy(policy)
    assert isinstance(codec, Quantiser)
    return codec


def drawn(*shape: int) -> Tensor:
    """[B, H, ...]"""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def cut_into(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CodeProducts, "_block", lambda *_: block)


def logits_and_mix(policy: str, tokens: int) -> tuple[Tensor, Tensor]:
    """Of entries coded one by one, in slots that others stand behind, as those of a cache that grows."""
    codec = codec_of(policy)
    codes, parameters = encode_tokens(drawn(2, 3, tokens + 3, 16), codec)
    held, shown = pack(codes, codec.bits)[:, :, :tokens], parameters[:, :, :tokens]
    asked = CodeProducts(codec, Scratch())
    logits = token_logits(drawn(2, 3, 5, 16).flatten(0, 1), held, shown, asked)
    mix = token_mix(drawn(2, 3, 5, tokens).flatten(0, 1), held, shown, asked)
    return logits.unflatten(0, (2, 3)), mix.unflatten(0, (2, 3))


@pytest.mark.parametrize("tokens", [40, 39, 33])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("policy", CODECS)
def test_products_of_tokens_in_blocks_are_those_of_what_their_codes_stand_for(
    policy: str, block: Block, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(block, monkeypatch)
    logits, mix = logits_and_mix(policy, tokens)
    codec = codec_of(policy)
    known = decode_tokens(*encode_tokens(drawn(2, 3, tokens + 3, 16), codec), codec)[:, :, :tokens]
    torch.testing.assert_close(logits, drawn(2, 3, 5, 16) @ known.transpose(2, 3), rtol=0, atol=1e-11)
    torch.testing.assert_close(mix, drawn(2, 3, 5, tokens) @ known, rtol=0, atol=1e-11)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("policy", CODECS[2:])
def test_logits_of_runs_in_blocks_are_those_of_what_their_codes_stand_for(
    policy: str, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(block, monkeypatch)
    codec, query = codec_of(policy), drawn(2, 3, 5, 16)
    codes, group, table = encode_runs(drawn(2, 3, 40, 16), codec)
    held = table.transpose(-1, -2).flatten(-2)  # as a cache has it, scales of all channels first
    logits = CodeProducts(codec, Scratch()).logits(query.flatten(0, 1), pack(codes, codec.bits), held)
    keys = decode_keys(codes, table[:, :, group], codec)
    torch.testing.assert_close(logits.unflatten(0, (2, 3)), query @ keys.transpose(2, 3), rtol=0, atol=1e-11)


@pytest.mark.parametrize("policy", CODECS)
def test_a_nan_is_still_one_after_coding(policy: str) -> None:
    """A model that overflows is not mended by its codes; entries that are all alike are what they were."""
    codec, held = codec_of(policy), drawn(2, 3, 40, 16)
    held[0, 1, 5, 3] = torch.nan
    held[1, 2, 8:16] = 0.375
    found = decode_tokens(*encode_tokens(held, codec), codec)
    assert found[0, 1, 5, 3].isnan()
    assert found[0, 0].isfinite().all()
    codes, group, table = encode_runs(held, codec) if codec.key_group else (None, None, None)
    if codes is None or table is None:
        return
    keys = decode_keys(codes, table[:, :, group], codec)
    assert keys[0, 1, 5, 3].isnan()
    assert torch.equal(keys[1, 2, 8:16], held[1, 2, 8:16])


def test_a_scale_of_every_head_that_all_tokens_share_is_no_token_s_own() -> None:
    codec, held, query = codec_of("fp8:scale=head,scales=0.5"), drawn(2, 3, 40, 16), drawn(2, 3, 5, 16)
    codes, shared = encode_tokens(held, codec, torch.tensor([0.25, 0.5, 2.0]))
    asked = CodeProducts(codec, Scratch())
    known = decode_tokens(codes, shared.contiguous(), codec)
    logits = token_logits(query.flatten(0, 1), codes, shared, asked).unflatten(0, (2, 3))
    torch.testing.assert_close(logits, query @ known.transpose(2, 3), rtol=0, atol=1e-11)
    mix = token_mix(drawn(2, 3, 5, 40).flatten(0, 1), codes, shared, asked).unflatten(0, (2, 3))
    torch.testing.assert_close(mix, drawn(2, 3, 5, 40) @ known, rtol=0, atol=1e-11)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("policy", CODECS)
def test_blocks_shifted_by_a_token_give_other_products(policy: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(WHOLE, monkeypatch)
    right = logits_and_mix(policy, 39)[part]
    cut_into(Block(1, 16), monkeypatch)
    torch.testing.assert_close(logits_and_mix(policy, 39)[part], right, rtol=0, atol=1e-11)
    cut = products._cut

    def late(tensor: Tensor, size: int, dimension: int) -> tuple[Tensor, ...]:
        return cut(tensor.roll(-1, 1) if dimension == 1 else tensor, size, dimension)  # codes are cut by tokens there

    monkeypatch.setattr(products, "_cut", late)
    assert (logits_and_mix(policy, 39)[part] - right).abs().max() > 0.1


def test_a_block_fits_a_processor_and_ends_where_runs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    def block(policy: str, tokens: int, size: int) -> Block:
        codec = codec_of(policy)
        codes = torch.empty(8, 3, tokens, 64 * codec.bits // 8, dtype=torch.uint8)
        return CodeProducts(codec, Scratch())._block(codes, size)

    assert block("int8", 256, 4) == Block(32, 8192)
    assert block("int8", 4096, 4) == Block(2, 8192)
    assert block("int8", 4097, 4) == Block(1, 8192)
    assert block("int8", 9000, 8) == Block(1, 4096)
    assert block("kivi:group=96,residual=96", 9000, 4) == Block(1, 8160)
