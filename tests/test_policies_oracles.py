"""Each rule against a naive re-derivation in numpy, 50 draws each: the same entries stay, ties included.

Nothing here is shared with the product: scores are sums in float64 loops, and what stays is picked by sorting.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from draws import draws
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from scipy.linalg import hadamard

from kvaudit.audit.cache import evict
from kvaudit.audit.cache.codes import decode_tokens, encode_tokens
from kvaudit.audit.cache.evict import MANY_QUERIES, attention_mass, keep_mask, victim_slots
from kvaudit.audit.policies import Policy, Quantiser, View, parse_policy

Array = np.ndarray[Any, Any]
SEEN = 41
DRAWS = draws(50)


def view(seed: int, *, window: int = 4, slots: int = 20, batch: int = 2, groups: int = 2) -> View:
    """Random tensors; in every other draw some entries are copies of others, so that they tie."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(40, generator=g)[:slots].sort().values for _ in range(batch * 2)])
    positions = positions.reshape(batch, 2, slots).int()
    positions[0, :, -3:] = -1  # a row with empty slots
    copied = torch.randint(slots, (slots,), generator=g) if seed % 2 else torch.arange(slots)
    return View(
        layer=1,
        keys=torch.randn(batch, 2, slots, 8, generator=g)[:, :, copied],
        values=torch.randn(batch, 2, slots, 8, generator=g)[:, :, copied],
        positions=positions,
        seen=torch.tensor([SEEN] * batch),
        queries=torch.randn(batch, 2 * groups, window, 8, generator=g),
        query_positions=torch.tensor([[SEEN - window + n for n in range(window)]] * batch),
        mass=torch.rand(batch, 2, slots, generator=g)[:, :, copied],
        scaling=8**-0.5,
        entry_keys=torch.tensor([11, 12][:batch])[:, None, None],
    )


def naive_keep(scores: Array, at: Array, policy: Policy, seen: int = SEEN) -> set[int]:
    """Positions that stay in one head: sink and window, then the best scores, ties to the earlier position."""
    entries = [(p, s) for p, s in zip(at.tolist(), scores.tolist(), strict=True) if p >= 0]
    stay = {p for p, _ in entries if p < policy.sink or p >= seen - policy.window}
    others = sorted((-s, p) for p, s in entries if p not in stay)
    return stay | {p for _, p in others[: policy.budget - len(stay)]}


def check_kept(text: str, v: View, scores: Array) -> None:
    """The product keeps what the naive ranking keeps; scores are rounded to float32, as the product ranks."""
    policy = parse_policy(text)
    kept = keep_mask(policy.importance(v), v.positions, v.seen, policy)
    for b, h in np.ndindex(*v.positions.shape[:2]):
        at = v.positions[b, h].numpy()
        got = set(at[kept[b, h].numpy()].tolist())
        assert got == naive_keep(tied(scores[b, h]), at, policy), (b, h)


def tied(scores: Array) -> Array:
    """Scores that differ by rounding alone made equal."""
    return np.round(scores, 12)


def entries(v: View, b: int, h: int) -> tuple[Array, Array]:
    """Keys [K, D] of one head in float64 and which slots are filled."""
    return v.keys[b, h].double().numpy(), v.positions[b, h].numpy() >= 0


@DRAWS
def test_streaming(seed: int) -> None:
    v = view(seed)
    check_kept("streaming:budget=9,sink=3", v, v.positions.double().numpy())


@DRAWS
def test_h2o(seed: int) -> None:
    v = view(seed)
    check_kept("h2o:budget=9,window=4,sink=1", v, v.mass.double().numpy())


@DRAWS
def test_random(seed: int) -> None:
    v = view(seed)
    scores = np.zeros(v.positions.shape)
    for b, h in np.ndindex(2, 2):
        draw = scramble(int(v.entry_keys[b]) + scramble(seed))
        draw = scramble(scramble(draw + 1_000_003 * v.layer) + h)
        scores[b, h] = [scramble(draw + p) & 0xFFFFFF for p in v.positions[b, h].tolist()]
    check_kept(f"random:budget=9,seed={seed}", v, scores)


def scramble(x: int) -> int:
    """Multiply and xor-shift, three times over, on unsigned 64-bit integers."""
    for factor, shift in ((0x9E3779B97F4A7C15, 32), (0xC2B2AE3D27D4EB4F, 29), (0x94D049BB133111EB, 32)):
        x = x * factor % 2**64
        x ^= x >> shift
    return x


@DRAWS
def test_knorm_and_keydiff(seed: int) -> None:
    v = view(seed)
    norm, unlike = np.zeros(v.positions.shape), np.zeros(v.positions.shape)
    for b, h in np.ndindex(2, 2):
        keys, filled = entries(v, b, h)
        unit = [k / np.sqrt((k**2).sum()) for k in keys]
        mean = sum(u for u, present in zip(unit, filled, strict=True) if present) / filled.sum()
        for n, key in enumerate(keys):
            norm[b, h, n] = -np.sqrt((key**2).sum())
            unlike[b, h, n] = -(unit[n] @ mean) / np.sqrt((mean**2).sum())
    check_kept("knorm:budget=9", v, norm)
    check_kept("keydiff:budget=9", v, unlike)


@DRAWS
def test_tova(seed: int) -> None:
    v = view(seed, window=1)
    v = v._replace(positions=v.positions[:, :1].expand(-1, 2, -1))  # heads hold the same entries
    expected = np.zeros(v.positions.shape)
    for b, head in np.ndindex(2, 4):
        keys, filled = entries(v, b, head // 2)
        weights = np.exp(keys @ v.queries[b, head, 0].double().numpy() / np.sqrt(8)) * filled
        expected[b] += weights / weights.sum() / 4
    check_kept("tova:budget=9", v, expected)


def snapkv_scores(v: View, pool: str) -> Array:
    scores = np.zeros(v.positions.shape)
    for b, h in np.ndindex(2, 2):
        keys, filled = entries(v, b, h)
        at = v.positions[b, h].numpy()
        total = np.zeros(len(at))
        for query, group in np.ndindex(4, 2):
            logits = keys @ v.queries[b, h * 2 + group, query].double().numpy() / np.sqrt(8)
            weights = np.where(filled & (at <= SEEN - 4 + query), np.exp(logits), 0)
            total += weights / weights.sum() / 8
        total[(at < 0) | (at >= SEEN - 4)] = 0
        neighbours = [np.pad(total, 1)[n : n + 3] for n in range(len(at))]
        scores[b, h] = [n.mean() if pool == "avg" else n.max() for n in neighbours]
    return scores


@DRAWS
def test_snapkv(seed: int) -> None:
    v = view(seed)
    # a mean of the same three neighbours in another order ties but for rounding, so copies are for the maximum
    for pool in ("max",) if seed % 2 else ("max", "avg"):
        check_kept(f"snapkv:budget=9,window=4,kernel=3,pool={pool}", v, snapkv_scores(v, pool))


def shared_keep(scores: Array, at: Array, policy: Policy, alpha: Fraction) -> list[set[int]]:
    """Positions that stay in every head where heads [H, K] share their budgets, rounded by the largest remainder."""
    heads = range(len(at))
    stay = [{p for p in at[h].tolist() if p >= SEEN - policy.window or 0 <= p < policy.sink} for h in heads]
    free = [(-scores[h][n], n, h) for h in heads for n, p in enumerate(at[h]) if p >= 0 and p not in stay[h]]
    mean = [policy.budget - len(stay[h]) for h in heads]
    best = sorted(free)[: sum(mean)]
    share = [(1 - alpha) * sum(h == head for *_, head in best) + alpha * mean[h] for h in heads]
    up = sorted(heads, key=lambda h: (share[h] // 1 - share[h], h))[: sum(mean) - sum(s // 1 for s in share)]
    count = [int(share[h]) + (h in up) for h in heads]
    first = [entry for h in heads for entry in sorted(e for e in free if e[2] == h)[: count[h]]]
    others = sorted(set(free) - set(first))[: sum(mean) - len(first)]
    for _, n, h in (*first, *others):
        stay[h].add(int(at[h][n]))
    return stay


@DRAWS
def test_adakv(seed: int) -> None:
    """SnapKV's ranking; a layer's heads keep 2 * 11 entries, the fewer of them held, the more the others have."""
    v, alpha = view(seed), Fraction(seed % 6, 5)
    v.positions[1, seed % 2, 5 + seed % 9 :] = -1  # one head of a row holds little
    policy = parse_policy(f"adakv:budget=11,window=4,kernel=3,alpha={float(alpha)}")
    enough = (v.positions >= 0).sum((1, 2)) > 22
    kept = keep_mask(policy.importance(v), v.positions, v.seen, policy)
    scores = tied(snapkv_scores(v, "max"))
    for b in enough.nonzero()[:, 0].tolist():
        at = v.positions[b].numpy()
        got = [set(at[h][kept[b, h].numpy()].tolist()) for h in range(2)]
        assert got == shared_keep(scores[b], at, policy, alpha)
        assert sum(map(len, got)) == 22


@DRAWS
def test_pyramidkv(seed: int) -> None:
    """SnapKV's ranking; a layer's budget is the rise of a rounded running sum."""
    v, layers = view(seed), 2 + seed % 30
    whole, layer = parse_policy("pyramidkv:budget=9,window=4,kernel=3"), seed % (2 + seed % 30)
    policy = whole.for_layer(layer, layers)
    most, least = 2 * 5 - 5 / 20, 5 / 20
    exact = [4 + most - n * (most - least) / (layers - 1) for n in range(layers)]
    assert abs(sum(whole.for_layer(n, layers).budget for n in range(layer + 1)) - sum(exact[: layer + 1])) <= 0.5 + 1e-9
    kept = keep_mask(policy.importance(v), v.positions, v.seen, policy)
    scores = tied(snapkv_scores(v, "max"))
    for b, h in np.ndindex(2, 2):
        at = v.positions[b, h].numpy()
        assert set(at[kept[b, h].numpy()].tolist()) - {-1} == naive_keep(scores[b, h], at, policy)


@DRAWS
def test_rkv(seed: int) -> None:
    v = view(seed)
    expected = np.zeros(v.positions.shape)
    for b, h in np.ndindex(2, 2):
        keys, filled = entries(v, b, h)
        before = filled & (v.positions[b, h].numpy() < SEEN - 4)
        attended = np.zeros(len(keys))
        for query in range(4):
            logits = [keys @ v.queries[b, 2 * h + g, query].double().numpy() / np.sqrt(8) for g in range(2)]
            weights = np.where(before, np.exp(np.max(logits, axis=0)), 0)
            attended += weights / weights.sum() / 4
        pooled = [np.pad(attended, 3)[n : n + 7].max() for n in range(len(keys))]
        shares = np.where(filled, np.exp(redundancy(keys, filled)), 0)
        expected[b, h] = 0.1 * np.array(pooled) - 0.9 * shares / shares.sum()
    check_kept("rkv:budget=9,window=4", v, expected)


def redundancy(keys: Array, present: Array) -> Array:
    """Mean cosine of all keys to each; for every key, the latest one more than .5 alike is spared."""
    filled = np.flatnonzero(present)
    sums = np.zeros(len(keys))
    for i in filled:
        norm = np.sqrt((keys[i] ** 2).sum())
        cosines = {j: keys[i] @ keys[j] / norm / np.sqrt((keys[j] ** 2).sum()) for j in filled if j != i}
        alike = [j for j, cosine in cosines.items() if cosine > 0.5]
        if alike:
            cosines[max(alike)] = 0.0
        for j, cosine in cosines.items():
            sums[j] += cosine / len(filled)
    return sums


@DRAWS
def test_quest(seed: int) -> None:
    """Every query head: its own page, and the pages whose keys, channel by channel, could have the largest q k."""
    v = view(seed, window=1, slots=40)
    v = v._replace(positions=v.positions[:, :1].expand(-1, 2, -1), seen=torch.tensor([37, 40]))
    page, budget = 2 + seed % 5, 4 + seed % 30
    chosen = parse_policy(f"quest:budget={budget},page={page}").choose(v)
    for b, head in np.ndindex(2, 4):
        own, bounds = (int(v.seen[b]) - 1) // page, {}
        query, keys = v.queries[b, head, 0].numpy(), v.keys[b, head // 2].numpy()
        for slot, position in enumerate(v.positions[b, 0].tolist()):
            if position >= 0:
                bounds.setdefault(position // page, []).append(keys[slot])
        scores = {n: sum(max(q * k[c] for k in inside) for c, q in enumerate(query)) for n, inside in bounds.items()}
        others = sorted((n for n in scores if n != own), key=lambda n: (-scores[n], n))
        count = min(max(3, budget // page), own + 1)
        assert set(chosen[b, head].tolist()) - {-1} == {own, *others[: count - 1]}, (b, head)


@DRAWS
def test_one_entry_too_many_leaves_as_if_all_had_been_sorted(seed: int) -> None:
    """The step of decoding that drops a single entry, slots in any order, scores with many ties."""
    g = torch.Generator().manual_seed(seed)
    shuffled = torch.stack([torch.randperm(14, generator=g) for _ in range(4)]).reshape(2, 2, 14).int() + SEEN - 14
    scores = torch.randint(3, (2, 2, 14), generator=g).float()
    policy = parse_policy(f"h2o:budget=13,sink={seed % 3},window={seed % 5}")
    victims = victim_slots(scores, shuffled, torch.tensor([SEEN] * 2), policy)
    for b, h in np.ndindex(2, 2):
        at = shuffled[b, h].numpy()
        assert set(at.tolist()) - {int(at[victims[b, h]])} == naive_keep(scores[b, h].numpy(), at, policy)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("before", [0, 70])
def test_the_mass_of_many_queries_is_that_of_a_plain_softmax(before: int, padded: bool) -> None:
    """What a block of queries cannot see yet is left out; slots in any order, and padding, change nothing."""
    generator, queries = torch.Generator().manual_seed(before), MANY_QUERIES + 30
    slots = queries + before
    query, keys = (torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((4, queries), (2, slots)))
    at = (torch.arange(queries) + before).repeat(2, 1)
    order = torch.randperm(slots, generator=generator) if before else torch.arange(slots)
    positions = order.expand(2, 2, slots).clone()
    if padded:
        at[1, 100:] = -1
        positions[1][positions[1] >= before + 100] = -1
    seen = (positions[:, :, None] >= 0) & (positions[:, :, None] <= at[:, None, :, None])
    logits = torch.einsum("bhgqd,bhkd->bhgqk", query.unflatten(1, (2, 2)).double(), keys.double()) / 4
    shares = logits.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1).nan_to_num()  # padding sees nothing here
    expected = shares.sum((2, 3)).float()
    mass = attention_mass(query, at, keys, positions, 0.25)
    torch.testing.assert_close(mass, expected, rtol=1e-4, atol=1e-5)
    if not before:  # slots in order, padding behind: the mask is known, and what padding sees counts for nothing
        assert torch.equal(attention_mass(query, at, keys, positions, 0.25, before=0), mass)


def test_the_mass_of_a_row_is_the_same_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(5, heads, 300, 16, generator=generator) for heads in (4, 2))
    at = torch.arange(300).expand(5, -1)
    inputs = (query, at, keys, at[:, None].expand(-1, 2, -1), 0.25)
    expected = attention_mass(*inputs)
    monkeypatch.setattr(evict, "HOST_MASS", 2 * 4 * 128 * 300)  # two rows at once, so that one is left over
    assert torch.equal(attention_mass(*inputs), expected)
    assert torch.equal(attention_mass(*inputs, before=0, no_padding=True), expected)


@pytest.mark.parametrize("queries", [1, 5, 200, MANY_QUERIES + 30])
@pytest.mark.parametrize("before", [0, 1, 300])
def test_the_mass_is_the_same_where_the_host_knows_what_is_seen(before: int, queries: int) -> None:
    """To the bit: what was held comes first, in any order, then the new entries in theirs; each row at its own."""
    generator = torch.Generator().manual_seed(queries)
    slots, evicted = before + queries, torch.tensor([40, 0])[:, None]
    query, keys = (torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((4, queries), (2, slots)))
    at = torch.arange(queries) + before + evicted
    held = torch.stack([torch.randperm(before, generator=generator) for _ in range(4)]).view(2, 2, before)
    positions = torch.cat([held, at[:, None].expand(-1, 2, -1)], 2)
    expected = attention_mass(query, at, keys, positions, 0.25)
    assert torch.equal(attention_mass(query, at, keys, positions, 0.25, before=before, no_padding=True), expected)
    if queries > 1:
        assert not torch.equal(attention_mass(query, at, keys, positions, 0.25, before=before + 1), expected)


# --- gguf: llama.cpp's block formats in numpy -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_q4_0(seed: int) -> None:
    x = torch.randn(5, 2, 9, 64, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.01, 5, 64)
    x[0, 0, 0] = 0
    codec = parse_policy("q4_0")
    assert isinstance(codec, Quantiser)
    ours = decode_tokens(*encode_tokens(x, codec), codec)
    theirs = dequantize(quantize(x.view(-1, 64).numpy(), GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0)
    # scales of float16 there
    np.testing.assert_allclose(ours.view(-1, 64), theirs, rtol=2**-11)


@pytest.mark.parametrize(("size", "keys_by", "values_by"), [(64, 64, 64), (96, 32, 32), (128, 128, 64)])
def test_a_rotated_head_is_mixed_by_a_hadamard_matrix(size: int, keys_by: int, values_by: int) -> None:
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    codec = parse_policy("q4_0:rotate=true")
    assert isinstance(codec, Quantiser)
    for part, by in enumerate((keys_by, values_by)):
        mixed = codec.turned(x, part)
        assert np.allclose(mixed.view(3, -1, by), x.view(3, -1, by).numpy() @ hadamard(by) / by**0.5)
        assert torch.allclose(codec.turned(mixed, part), x)
