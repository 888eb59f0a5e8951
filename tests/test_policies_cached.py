"""Rules that need the cache's own bookkeeping, against naive numpy on the same tensors: `expected` and the quantisers.

Random queries, keys and values go through ``EvictingCache.attend``, no model around them; the oracle recomputes from
the whole history what must have stayed and what every query must have read. Nothing is shared with the product.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from draws import draws
from transformers import LlamaConfig

from kvaudit.audit.cache.attention import AttentionCall
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cache.rotary import Rotary
from kvaudit.audit.policies import parse_policy
from kvaudit.core.errors import SpecError

Array = np.ndarray[Any, Any]
CONFIG = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
SIZE, HEADS, GROUP = 8, 2, 2
FREQUENCIES = 10000.0 ** -(np.arange(SIZE // 2) / (SIZE // 2))
DRAWS = draws(30)


class Draw(NamedTuple):
    """Queries [G*H, T, D], keys and values [H, T, D], as the model would hand them to the cache."""

    query: Array
    key: Array
    value: Array


def draw(seed: int, tokens: int) -> Draw:
    """Random tensors; every other draw holds few distinct numbers, so that extremes, halves and scores tie."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        query, key, value = (rng.integers(-3, 4, (h, tokens, SIZE)) / 2 for h in (HEADS * GROUP, HEADS, HEADS))
    else:
        query, key, value = (rng.normal(size=(h, tokens, SIZE)) for h in (HEADS * GROUP, HEADS, HEADS))
    return Draw(query, key, value)


def attend(cache: EvictingCache, tensors: Draw, start: int, stop: int) -> Array:
    """One forward of tokens start .. stop - 1 of one row: [G*H, stop - start, D]."""
    cache.begin(torch.arange(start, stop)[None], decoding=stop - start == 1)
    query, key, value = (torch.from_numpy(t[None, :, start:stop]) for t in tensors)
    return cache.attend(AttentionCall(0, query, key, value, SIZE**-0.5))[0].numpy()


# --- expected -------------------------------------------------------------------------------------------------------


def rotation(position: float) -> Array:
    """The matrix [D, D] that turns channel i with channel i + D/2 by position * frequency."""
    matrix = np.zeros((SIZE, SIZE))
    for i, frequency in enumerate(FREQUENCIES):
        j, angle = i + SIZE // 2, position * frequency
        matrix[i, i], matrix[i, j], matrix[j, i], matrix[j, j] = (
            np.cos(angle),
            -np.sin(angle),
            np.sin(angle),
            np.cos(angle),
        )
    return matrix


def expected_scores(tensors: Draw, head: int, entries: list[int], seen: int, sink: int, future: int) -> list[float]:
    """softmax(mu k / sqrt(d) + k' Sigma k / 2d) |v| over the entries behind the sinks, mean over the group."""
    turn = np.mean([rotation(p) for p in range(seen, seen + future)], axis=0)
    behind = [p for p in entries if p >= sink]
    shares = []
    for member in range(GROUP):
        plain = [rotation(-p) @ tensors.query[head * GROUP + member, p] for p in range(sink, seen)]
        mean = turn @ np.mean(plain, axis=0)
        covariance = turn @ np.cov(plain, rowvar=False, bias=True) @ turn.T
        keys = tensors.key[head, behind]
        weights = np.exp([k @ mean / np.sqrt(SIZE) + k @ covariance @ k / (2 * SIZE) for k in keys])
        shares.append(weights / weights.sum())
    norms = np.sqrt((tensors.value[head, behind] ** 2).sum(1))
    scores = dict(zip(behind, np.mean(shares, axis=0) * norms, strict=True))
    return [np.round(scores.get(p, np.inf), 9) for p in entries]


def naive_expected(tensors: Draw, head: int, held: set[int], seen: int, policy: Any) -> set[int]:
    """What stays of the entries held, ties to the earlier position."""
    entries = sorted(held)
    scores = expected_scores(tensors, head, entries, seen, policy.sink, policy.future)
    sure = {p for p in entries if p < policy.sink or p >= seen - policy.window}
    ranked = sorted((-s, p) for s, p in zip(scores, entries, strict=True) if p not in sure)
    return sure | {p for _, p in ranked[: policy.budget - len(sure)]}


def held_by(cache: EvictingCache) -> list[set[int]]:
    """Positions that the one layer still holds, per head."""
    return [set((head == NEVER).nonzero()[:, 0].tolist()) for head in cache.ledger(int(cache.seen[0]))[0, 0]]


@DRAWS
def test_expected_keeps_what_the_formula_says(seed: int) -> None:
    tensors = draw(seed, 26)
    if seed % 2:  # copies of whole entries, keys as rotated, tie
        copied = np.random.default_rng(seed).integers(0, 26, 26)
        tensors = tensors._replace(key=tensors.key[:, copied], value=tensors.value[:, copied])
    policy = parse_policy("expected:budget=11" if seed % 5 == 0 else "expected:budget=11,sink=2,window=3,future=16")
    cache = EvictingCache(CONFIG, policy, torch.tensor([seed]), rotary=Rotary(torch.from_numpy(FREQUENCIES)))
    attend(cache, tensors, 0, 26)
    assert held_by(cache) == [naive_expected(tensors, head, set(range(26)), 26, policy) for head in range(HEADS)]


def test_expected_statistics_run_on_over_decoding_and_evictions() -> None:
    tensors = draw(4, 44)
    policy = parse_policy("expected:budget=12,interval=5,future=16,window=2")
    cache = EvictingCache(CONFIG, policy, torch.tensor([0]), rotary=Rotary(torch.from_numpy(FREQUENCIES)))
    held, seen = [set()] * HEADS, 0
    for new in (20, *[1] * 13, 4, *[1] * 7):
        attend(cache, tensors, seen, seen + new)
        seen += new
        held = [h | set(range(seen - new, seen)) for h in held]
        if seen in (20, 25, 30, 37, 42):  # after the prompt, the message, and every five steps
            held = [naive_expected(tensors, head, held[head], seen, policy) for head in range(HEADS)]
        assert held_by(cache) == held


# --- triattention ---------------------------------------------------------------------------------------------------


def series(tensors: Draw, query_head: int, entries: list[int], seen: int, horizon: int) -> Array:
    """Standard scores of entries for one query head, pair by pair in complex numbers as the authors write it."""
    half = SIZE // 2

    def plain(x: Array, position: int) -> Array:
        return np.asarray((x[:half] + 1j * x[half:]) * np.exp(-1j * position * FREQUENCIES))

    queries = np.array([plain(tensors.query[query_head, p], p) for p in range(seen)])
    centre, length = queries.mean(0), np.abs(queries).mean(0)
    offsets, scores = [2**n for n in range(40) if 2**n <= horizon], []
    for p in entries:
        key = plain(tensors.key[query_head // GROUP, p], p)
        phase, amplitude = np.angle(centre * key.conj()), np.abs(centre) * np.abs(key)
        looks = [(amplitude * np.cos((seen - p + d) * FREQUENCIES + phase)).sum() for d in offsets]
        scores.append(np.mean(looks) + ((length - np.abs(centre)) * np.abs(key)).sum())
    return np.asarray((scores - np.mean(scores)) / max(np.std(scores), 1e-6))


def best(scores: Array, count: int) -> set[int]:
    return {n for _, n in sorted((-round(s, 9), n) for n, s in enumerate(scores))[:count]}


def of_union(scores: Array, count: int) -> set[int]:
    """The authors' steps: every head's best, and of these the best by the largest score of any head."""
    largest, chosen = scores.max(0), set.union(*(best(head, count) for head in scores))
    return best(np.array([s if n in chosen else -np.inf for n, s in enumerate(largest)]), count)


def naive_triattention(layers: list[Draw], held: list[list[set[int]]], seen: int, policy: Any) -> list[list[set[int]]]:
    """What stays in every layer and KV head."""
    kept = []
    entries = [[sorted(head) for head in layer] for layer in held]
    scores = [  # [L][H] of [G, K]
        [np.array([series(t, head * GROUP + g, entries[n][head], seen, policy.horizon) for g in range(GROUP)])
         for head in range(HEADS)] for n, t in enumerate(layers)
    ]  # fmt: skip
    for n in range(len(layers)):
        if policy.mode == "union":
            chosen = [of_union(np.concatenate([s for layer in scores for s in layer]), policy.budget)] * HEADS
        elif policy.mode == "per_head":
            means = [np.mean([layer[head].max(0) for layer in scores], axis=0) for head in range(HEADS)]
            chosen = [best(mean, policy.budget) for mean in means]
        else:
            chosen = [best(scores[n][head].max(0), policy.budget) for head in range(HEADS)]
        kept.append([{entries[n][head][slot] for slot in chosen[head]} for head in range(HEADS)])
    return kept


@pytest.mark.parametrize("seed", range(12))
def test_triattention_keeps_what_the_series_says(seed: int) -> None:
    """A prompt, decoding and a message in two layers, evicted from every third step."""
    mode, horizon = ("union", "per_head", "per_layer_perhead")[seed % 3], (1, 5, 100, 65536)[seed // 3]
    layers, config = [draw(seed, 34), draw(seed + 2, 34)], LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 2})
    policy = parse_policy(f"triattention:budget=9,interval=3,mode={mode},horizon={horizon}")
    cache = EvictingCache(config, policy, torch.tensor([seed]), rotary=Rotary(torch.from_numpy(FREQUENCIES)))
    held: list[list[set[int]]] = [[set()] * HEADS] * 2
    seen = 0
    for new in (20, *[1] * 7, 4, *[1] * 3):
        cache.begin(torch.arange(seen, seen + new)[None], decoding=new == 1)
        for n, tensors in enumerate(layers):
            query, key, value = (torch.from_numpy(t[None, :, seen : seen + new]) for t in tensors)
            cache.attend(AttentionCall(n, query, key, value, SIZE**-0.5))
        seen += new
        held = [[head | set(range(seen - new, seen)) for head in layer] for layer in held]
        if seen in (20, 23, 26, 31, 34):
            held = naive_triattention(layers, held, seen, policy)
        record = cache.ledger(seen)[0]
        assert [[set((h == NEVER).nonzero()[:, 0].tolist()) for h in layer] for layer in record] == held


# --- quantisers -----------------------------------------------------------------------------------------------------


def min_max(x: Array, bits: int) -> Array:
    """``x`` [n] through its own minimum and 2^bits - 1 equal steps."""
    scale = (x.max() - x.min()) / (2**bits - 1)
    return x if scale == 0 else x.min() + scale * np.clip(np.round((x - x.min()) / scale), 0, 2**bits - 1)


def int8(x: Array) -> Array:
    scale = np.abs(x).max() / 127
    return x if scale == 0 else np.round(x / scale) * scale


def fp8(x: Array, kind: torch.dtype) -> Array:
    scale = np.abs(x).max() / torch.finfo(kind).max
    return x if scale == 0 else torch.from_numpy(x / scale).to(kind).double().numpy() * scale


class Reads:
    """What later queries read: keys and values [H, T, D], quantised as time goes on."""

    def __init__(self, tensors: Draw) -> None:
        self.key, self.value = tensors.key.copy(), tensors.value.copy()
        self.keys_done = self.values_done = 0

    def attended(self, tensors: Draw, start: int, stop: int) -> Array:
        ahead = np.arange(stop) > np.arange(start, stop)[:, None]
        out = []
        for head, query in enumerate(tensors.query[:, start:stop]):
            logits = np.where(ahead, -np.inf, query @ self.key[head // GROUP, :stop].T / np.sqrt(SIZE))
            weights = np.exp(logits - logits.max(1, keepdims=True))
            out.append(weights / weights.sum(1, keepdims=True) @ self.value[head // GROUP, :stop])
        return np.array(out)

    def kivi(self, seen: int, bits: int, group: int, residual: int) -> None:
        """Blocks of ``residual`` keys per channel in groups of tokens; values but the last ``residual`` per token."""
        while seen - self.keys_done >= residual:
            for first in range(self.keys_done, self.keys_done + residual, group):
                for head, channel in np.ndindex(HEADS, SIZE):
                    run = (head, slice(first, first + group), channel)
                    self.key[run] = min_max(self.key[run], bits)
            self.keys_done += residual
        width = min(group, SIZE)
        for token in range(self.values_done, max(seen - residual, self.values_done)):
            for head, first in np.ndindex(HEADS, SIZE // width):
                run = (head, token, slice(first * width, (first + 1) * width))
                self.value[run] = min_max(self.value[run], bits)
        self.values_done = max(seen - residual, self.values_done)

    def per_token(self, seen: int, codec: Any) -> None:
        """Every token of every head by itself, as soon as it has attended."""
        for head, token in np.ndindex(HEADS, seen):
            if token >= self.keys_done:
                self.key[head, token] = codec(self.key[head, token])
                self.value[head, token] = codec(self.value[head, token])
        self.keys_done = self.values_done = seen


SCRIPT = (19, *[1] * 6, 11, *[1] * 4)  # a prompt, an answer, a message, an answer


@DRAWS
def test_kivi_reads_what_the_paper_quantises(seed: int) -> None:
    bits, (group, residual) = (2, 4)[seed % 2], ((4, 8), (2, 6), (8, 8), (16, 16), (1, 3))[seed // 2 % 5]
    tensors = draw(seed // 3, 40)
    text = f"kivi:bits={bits},group={group},residual={residual}"
    cache, reads, seen = EvictingCache(CONFIG, parse_policy(text), torch.tensor([seed])), Reads(tensors), 0
    for new in SCRIPT:
        np.testing.assert_allclose(
            attend(cache, tensors, seen, seen + new), reads.attended(tensors, seen, seen + new), atol=1e-12
        )
        seen += new
        reads.kivi(seen, bits, group, residual)


@DRAWS
def test_eight_bit_codes_read_what_their_casts_give(seed: int) -> None:
    text, codec = (
        ("int8", int8),
        ("fp8", lambda x: fp8(x, torch.float8_e4m3fn)),
        ("fp8:format=e5m2", lambda x: fp8(x, torch.float8_e5m2)),
    )[seed % 3]
    tensors = draw(seed // 3, 40)
    cache, reads, seen = EvictingCache(CONFIG, parse_policy(text), torch.tensor([seed])), Reads(tensors), 0
    for new in SCRIPT:
        np.testing.assert_allclose(
            attend(cache, tensors, seen, seen + new), reads.attended(tensors, seen, seen + new), atol=1e-12
        )
        seen += new
        reads.per_token(seen, codec)


FIXED = {"keys": [[0.02, 0.03]], "values": [[0.05, 0.01]]}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "spec", ["int8:scale=tensor,scales=0.02/0.03", "int8:scale=head,scales=FILE", "fp8:scale=tensor"]
)
@pytest.mark.parametrize("write", [False, True])
def test_fixed_scales_and_codes_taken_on_write_read_what_their_casts_give(
    seed: int, spec: str, write: bool, tmp_path: Path
) -> None:
    (tmp_path / "scales.json").write_text(json.dumps(FIXED))
    text = spec.replace("FILE", str(tmp_path / "scales.json")) + (",write=true" if write else "")
    keys, values = {
        "int8:scale=t": ([0.02] * 2, [0.03] * 2),
        "int8:scale=h": (FIXED["keys"][0], FIXED["values"][0]),
    }.get(spec[:12], ([1.0] * 2, [1.0] * 2))
    tensors, seen = draw(seed, 40), 0
    cache, reads = EvictingCache(CONFIG, parse_policy(text), torch.tensor([seed])), Reads(tensors)

    def cast(x: Array, scale: float) -> Array:
        if spec.startswith("int8"):
            return np.clip(np.round(x / scale), -127, 127) * scale
        return torch.from_numpy(np.clip(x / scale, -448, 448)).to(torch.float8_e4m3fn).double().numpy() * scale

    def become_codes(stop: int) -> None:
        for head in range(HEADS):
            some = slice(reads.keys_done, stop)
            reads.key[head, some] = cast(reads.key[head, some], keys[head])
            reads.value[head, some] = cast(reads.value[head, some], values[head])
        reads.keys_done = stop

    for new in SCRIPT:
        if write:
            become_codes(seen + new)
        np.testing.assert_allclose(
            attend(cache, tensors, seen, seen + new), reads.attended(tensors, seen, seen + new), atol=1e-12
        )
        seen += new
        become_codes(seen)
    assert cache.quantised_at(40)[0][0, :seen].tolist() == (list(range(seen)) if write else ends(SCRIPT))


def ends(script: tuple[int, ...]) -> list[int]:
    """For every token the number of tokens seen after its forward."""
    return [sum(script[: n + 1]) for n, new in enumerate(script) for _ in range(new)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int8:scale=tensor", "policy int8: scale=tensor needs scales=, a number or a file of numbers"),
        ("int8:scales=0.1", "needs scale=head or scale=tensor"),
        ("int8:scale=row,scales=1", "scale=row, wanted one of token, head, tensor"),
        ("fp8:scale=tensor,scales=-1", "is no number above 0"),
        ("fp8:scale=tensor,scales=1/2/3", "wanted a number above 0, or two as keys/values"),
        ("fp8:scale=tensor,scales=none.json", "no file to read"),
        ("fp8:scale=tensor,scales=/dev/zero", "no file to read"),
        ("snapkv:kernel=9223372036854775809", "kernel=9223372036854775809, wanted an integer of at most"),
        ("rkv:kernel=9223372036854775809", "kernel=9223372036854775809, wanted an integer of at most"),
        ("fp8:write=true,residual=4", "write=true quantises every entry at once; leave residual at 0"),
    ],
)
def test_scales_that_make_no_sense_are_one_line(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_policy(text)


def test_a_file_of_scales_is_named_with_its_content(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text(json.dumps(FIXED))
    policy = parse_policy(f"int8:scale=head,scales={file}")
    assert re.search(r"scales=.*/scales.json#[0-9a-f]{12}", policy.canonical)
    assert parse_policy(policy.canonical) == policy
    with pytest.raises(SpecError, match="differ by KV head; that is scale=head"):
        parse_policy(f"int8:scale=tensor,scales={file}").fixed_scales(0, 0, 2)
    file.write_text(json.dumps({"keys": [1], "values": [-1]}))
    with pytest.raises(SpecError, match=r"has sha256 .* the policy names"):
        parse_policy(policy.canonical)
    with pytest.raises(SpecError, match="is not JSON of the form"):
        parse_policy(f"int8:scale=head,scales={file}")
    file.write_text("[" * 100_000)
    with pytest.raises(SpecError, match="is not JSON of the form"):
        parse_policy(f"int8:scale=head,scales={file}")
    file.write_text(json.dumps({"keys": [1, 2], "values": [1, 2]}))
    assert parse_policy(f"int8:scale=tensor,scales={file}").fixed_scales(1, 0, 3).tolist() == [2, 2, 2]
    with pytest.raises(SpecError, match="the file has 2 layers, wanted one number or 3"):
        parse_policy(f"int8:scale=tensor,scales={file}").fixed_scales(2, 0, 3)


def test_specs_without_fixed_scales_keep_their_hash() -> None:
    assert parse_policy("int8").canonical == "int8:residual=0,chunk=1024"
    assert parse_policy("fp8").canonical == "fp8:format=e4m3,residual=0,chunk=1024"
    assert parse_policy("fp8:scale=tensor,write=true").canonical == (
        "fp8:format=e4m3,residual=0,scale=tensor,write=true,chunk=1024"
    )


def test_kivi_flushes_whole_blocks_of_keys_and_holds_exactly_the_last_values() -> None:
    cache = EvictingCache(CONFIG, parse_policy("kivi:group=4,residual=8"), torch.tensor([0]))
    tensors, seen = draw(0, 20), 0
    for new in (10, *[1] * 10):
        attend(cache, tensors, seen, seen + new)
        seen += new
    keys, values = (table[0].tolist() for table in cache.quantised_at(20))
    assert keys == [10] * 8 + [16] * 8 + [NEVER] * 4
    assert values == [10, 10, *range(11, 21), *[NEVER] * 8]


@pytest.mark.parametrize(
    ("text", "most"),
    [("kivi:bits=4,chunk=32", 0.31), ("kivi:bits=2,chunk=32", 0.25), ("int8:chunk=32", 0.3), ("fp8:chunk=32", 0.3)],
)
def test_quantised_entries_are_stored_in_fewer_bytes(text: str, most: float) -> None:
    """float32 heads of 64 channels, 1,024 tokens: codes, parameters, positions and the exact tail together."""
    rng = np.random.default_rng(0)
    cache = EvictingCache(CONFIG, parse_policy(text), torch.tensor([0]))
    for start in range(0, 1024, 32):
        cache.begin(torch.arange(start, start + 32)[None], decoding=False)
        tensors = (torch.from_numpy(rng.normal(size=(1, h, 32, 64))).float() for h in (HEADS * GROUP, HEADS, HEADS))
        cache.attend(AttentionCall(0, *tensors, 1.0))
    assert cache.bytes <= most * 2 * HEADS * 1024 * 64 * 4
