"""Every policy's published rule, written naively: what the simulator ranks and codes by.

A new policy needs one function here, held to nothing but its paper and its docstring; import nothing of audit. One that
evicts is a ranking of what each head of a layer holds, higher stays::

    @evicts("knorm")
    def key_norm(layer: Layer, policy: Fields) -> Scores:
        return [[-norm(key) for key in layer.held_keys(head)] for head in layer.heads]

Fields of its own are named with the values that random plays take: ``@evicts("snapkv", kernel=(1, 3, 7))``;
``window=...`` and the like narrow what every policy has. Layers of unlike budgets: ``layer_budget``; heads of unlike
budgets: ``shares``; layers that go by one ranking: ``agree``. One that quantises rewrites the keys and values that have
become codes: ``@codes`` in ``codings.py``. One whose drawn tokens' queries choose what they attend to names the
positions: ``@selects``. A registered policy without a rule, or with a field that no rule draws, fails
``test_simulator.py``.

Scores are float64 here and float32 in the product. Where two scores at the border of the budget differ by less than
ROUNDING of their size, the rule does not decide and neither side can be wrong: ``Undetermined``, and the play is
counted as left out. Scores that are equal to the last bit are ties, and the earlier entry stays.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import gcd
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Fields = Mapping[str, Any]
Scores = list[list[float]]  # per head, along what it holds
ROUNDING = 1e-5


class Undetermined(Exception):
    """Two numbers that float32 cannot tell apart decide what happens."""


class Layer:
    """One layer of one row: every query, key and value so far, and what each head still holds."""

    def __init__(self, number: int, window: int | None, frequencies: Array, seed_of: Callable[[int], int]) -> None:
        self.number, self.window, self.frequencies, self.seed_of = number, window, frequencies, seed_of
        self.scaling, self.since, self.seen = 0.0, 0, 0
        self.queries: list[Array] = []  # [T] of [G*H, D]
        self.keys: list[list[Array]] = []  # [H][T] of [D], as a query reads them now
        self.values: list[list[Array]] = []
        self.held: list[list[int]] = []  # [H] positions, rising
        self.mass: list[defaultdict[int, float]] = []  # [H] attention drawn so far
        self.gone: list[dict[int, int]] = []  # [H] position: the first query that could not see it
        self.keys_coded = self.values_coded = 0  # positions below are codes
        self.chosen: dict[tuple[int, int], frozenset[int]] = {}  # query head and query that chose: what it read

    def append(self, queries: Array, keys: Array, values: Array, scaling: float) -> None:
        """New queries [G*H, Q, D], keys and values [H, Q, D]."""
        if not self.held:
            self.keys, self.values, self.held = ([[] for _ in keys] for _ in range(3))
            self.mass, self.gone = [defaultdict(float) for _ in keys], [{} for _ in keys]
        self.scaling, first = scaling, len(self.queries)
        self.queries += list(queries.transpose(1, 0, 2))
        for head in self.heads:
            self.keys[head] += list(keys[head])
            self.values[head] += list(values[head])
            self.held[head] += range(first, len(self.queries))

    @property
    def heads(self) -> range:
        """The KV heads."""
        return range(len(self.held))

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return len(self.queries[0]) // len(self.held)

    def kv_head(self, head: int) -> int:
        """The KV head of a query head."""
        return head // self.group

    def query_heads(self, head: int) -> range:
        """The query heads of a KV head."""
        return range(head * self.group, (head + 1) * self.group)

    def held_keys(self, head: int) -> list[Array]:
        """Keys in order of position."""
        return [self.keys[head][j] for j in self.held[head]]

    def last_queries(self, window: int) -> range:
        """Positions of the last ``window`` tokens."""
        return range(max(0, self.seen - window), self.seen)

    def logits(self, query_head: int, query: int) -> Array:
        """Attention logits of a query over everything its head holds."""
        keys = np.array(self.held_keys(self.kv_head(query_head)))
        return np.asarray(keys @ self.queries[query][query_head] * self.scaling)

    def shares(self, query_head: int, query: int) -> Array:
        """Attention of a query over what its head holds now, 0 for what comes after it."""
        later = np.array(self.held[self.kv_head(query_head)]) > query
        return softmax(np.where(later, -np.inf, self.logits(query_head, query)))


class Rule(NamedTuple):
    """What the simulator knows of a policy."""

    draws: Mapping[str, tuple[Any, ...]]  # the values of its own fields that plays are made of
    rank: Callable[[Layer, Fields], Scores] | None = None
    layer_budget: Callable[[Fields, int, int, int], int] = lambda policy, *_: int(policy["budget"])
    shares: Callable[[Scores, list[int], Fields], list[int]] = lambda free, mean, _: mean  # entries of each head
    agree: Callable[[list[Scores], Fields], list[Scores]] | None = None  # what all layers go by, after the last
    code: Callable[[Layer, Fields], None] | None = None
    fitting: Callable[[dict[str, Any]], dict[str, Any]] = lambda fields: fields  # makes fields drawn one by one agree
    rotary: bool = False  # asks for a model whose positions are rotations
    select: Callable[[Layer, Fields, int, int, int], set[int]] | None = None


RULES: dict[str, Rule] = {"none": Rule({})}


KINDS = ("layer_budget", "shares", "agree", "rotary")


def evicts(name: str, **fields: Any) -> Callable[[Any], Any]:
    """Register the ranking of a policy that evicts, with the parts of a ``Rule`` that it has and its own fields."""

    def register(rank: Any) -> Any:
        draws = {field: values for field, values in fields.items() if field not in KINDS}
        RULES[name] = Rule(draws, rank=rank, **{kind: fields[kind] for kind in KINDS if kind in fields})
        return rank

    return register


def codes(name: str, fitting: Any = Rule({}).fitting, **draws: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Register how a policy that quantises rewrites what is due; a field ``write`` says that it is at once."""

    def register(code: Any) -> Any:
        RULES[name] = Rule(draws, code=code, fitting=fitting)
        return code

    return register


def selects(name: str, **draws: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Register what a query attends to: positions, from layer, policy, depth, query head and query."""

    def register(select: Any) -> Any:
        RULES[name] = Rule(draws, select=select)
        return select

    return register


# --- policies that evict --------------------------------------------------------------------------------------------


@evicts("streaming", reposition=(False, False, True))
def most_recent(layer: Layer, policy: Fields) -> Scores:
    return [[float(j) for j in held] for held in layer.held]


@evicts("random", seed=(0, 1, 7))
def fixed_priorities(layer: Layer, policy: Fields) -> Scores:
    """24 bits of (seed, row, layer, head, position), scrambled one after the other."""
    return [[float(priority(layer, policy["seed"], head, j)) for j in layer.held[head]] for head in layer.heads]


def priority(layer: Layer, seed: int, head: int, position: int) -> int:
    """What entry ``position`` of a head draws."""
    drawn = scrambled(layer.seed_of(position) + scrambled(seed))
    drawn = scrambled(scrambled(drawn + 1_000_003 * layer.number) + head)
    return scrambled(drawn + position) % 2**24


def scrambled(x: int) -> int:
    """Multiply and xor-shift, three times over, on unsigned 64-bit integers."""
    x %= 2**64
    for factor, shift in ((0x9E3779B97F4A7C15, 32), (0xC2B2AE3D27D4EB4F, 29), (0x94D049BB133111EB, 32)):
        x = x * factor % 2**64
        x ^= x >> shift
    return x


@evicts("knorm")
def key_norm(layer: Layer, policy: Fields) -> Scores:
    return [[-norm(key) for key in layer.held_keys(head)] for head in layer.heads]


@evicts("keydiff")
def unlike_the_mean(layer: Layer, policy: Fields) -> Scores:
    scores = []
    for head in layer.heads:
        units = [key / norm(key) for key in layer.held_keys(head)]
        mean = sum(units) / len(units)
        scores.append([1 - float(unit @ mean) / norm(mean) for unit in units])
    return scores


@evicts("h2o", window=(-1, 0, 1, 4))
def heavy_hitters(layer: Layer, policy: Fields) -> Scores:
    return [[layer.mass[head][j] for j in layer.held[head]] for head in layer.heads]


@evicts("tova")
def last_look(layer: Layer, policy: Fields) -> Scores:
    heads = range(len(layer.queries[0]))
    mean = sum(layer.shares(head, layer.seen - 1) for head in heads) / len(heads)
    return [list(mean) for _ in layer.heads]


@evicts("snapkv", window=(1, 2, 4), kernel=(1, 3, 7), pool=("max", "avg"))
def observed(layer: Layer, policy: Fields) -> Scores:
    """Mean attention of the last ``window`` queries, none to the window itself, pooled over neighbours."""
    window, scores = layer.last_queries(policy["window"]), []
    for head in layer.heads:
        looks = [layer.shares(own, query) for query in window for own in layer.query_heads(head)]
        mean = sum(looks) / len(looks)
        mean[np.array(layer.held[head]) >= window.start] = 0
        scores.append(pooled(mean, policy["kernel"], policy["pool"]))
    return scores


def funnel(policy: Fields, depth: int, depths: int, seen: int) -> int:
    """Alike in every layer while a row is short, then falling linearly with depth; the running sum is rounded."""
    beyond = policy["budget"] - policy["window"]
    if depths == 1 or seen < 2 * beyond:
        return int(policy["budget"])
    most = min(2 * beyond - beyond / 20, seen - policy["window"])
    least = 2 * beyond - most
    exact = [most - n * (most - least) / (depths - 1) for n in range(depths)]
    return int(policy["window"] + round(sum(exact[: depth + 1])) - round(sum(exact[:depth])))


evicts("pyramidkv", layer_budget=funnel, sink=(0,), window=(1, 2, 4), kernel=(1, 3, 7), pool=("max", "avg"))(observed)


def by_spread(free: Scores, mean: list[int], policy: Fields) -> list[int]:
    """(1 - alpha) of a head's part in the best of all heads and alpha of the mean, larger remainders rounded up.

    ``free`` are the scores of what may leave; a head that has less than its share leaves the rest to the best ranked.
    """
    alpha, heads, total = Fraction(str(policy["alpha"])), range(len(free)), sum(mean)
    ordered = sorted((-score, n, head) for head in heads for n, score in enumerate(free[head]))
    best = first(ordered, total)
    share = [(1 - alpha) * sum(own == head for *_, own in best) + alpha * mean[head] for head in heads]
    up = sorted(heads, key=lambda head: share[head] // 1 - share[head])[: total - sum(s // 1 for s in share)]
    counts = [min(int(share[head]) + (head in up), len(free[head])) for head in heads]
    sure = {entry for head in heads for entry in [e for e in ordered if e[2] == head][: counts[head]]}
    more = first([entry for entry in ordered if entry not in sure], total - len(sure))
    return [count + sum(own == head for *_, own in more) for head, count in zip(heads, counts, strict=True)]


def first(ordered: list[tuple[float, int, int]], count: int) -> list[tuple[float, int, int]]:
    """The first ``count`` of entries that begin with their negative score."""
    decided([-score for score, *_ in ordered], count)
    return ordered[:count]


ALPHAS = (0.0, 0.2, 0.5, 1.0)
evicts("adakv", shares=by_spread, window=(1, 2, 4), kernel=(1, 3, 7), pool=("max", "avg"), alpha=ALPHAS)(observed)


@evicts("rkv", window=(1, 2, 4), kernel=(1, 3, 7), weight=(0.0, 0.1, 0.5, 1.0))
def important_and_not_redundant(layer: Layer, policy: Fields) -> Scores:
    window, weight, scores = layer.last_queries(policy["window"]), policy["weight"], []
    for head in layer.heads:
        inside = np.array(layer.held[head]) >= window.start
        looks = []
        for query in window:
            largest = np.max([layer.logits(own, query) for own in layer.query_heads(head)], axis=0)
            looks.append(softmax(np.where(inside, -np.inf, largest)))
        attended = pooled(sum(looks) / len(looks), policy["kernel"], "max")
        redundant = softmax(resemblance(layer.held_keys(head)))
        scores.append([weight * a - (1 - weight) * r for a, r in zip(attended, redundant, strict=True)])
    return scores


def resemblance(keys: list[Array]) -> Array:
    """Mean cosine of all keys to each; for every key, the latest one more than .5 alike is spared."""
    total = np.zeros(len(keys))
    for i, key in enumerate(keys):
        cosines = np.array([float(key @ other) / norm(key) / norm(other) for other in keys])
        cosines[i] = 0
        if (abs(cosines - 0.5) < ROUNDING).any():
            raise Undetermined
        alike = [j for j, cosine in enumerate(cosines) if cosine > 0.5]
        if alike:
            cosines[alike[-1]] = 0
        total += cosines / len(keys)
    return total


@evicts("expected", rotary=True, future=(1, 8, 64))
def expected_attention(layer: Layer, policy: Fields) -> Scores:
    """exp(mu k s + k' Sigma k s^2 / 2), normalised behind the sinks, mean over the group, times the value's norm."""
    sink, frequencies = policy["sink"], layer.frequencies
    size = len(layer.keys[0][0])
    ahead = range(layer.seen, layer.seen + policy["future"])
    turn = np.mean([[turned(unit, at, frequencies) for unit in np.eye(size)] for at in ahead], axis=0).T
    scores = []
    for head in layer.heads:
        keys, held = np.array(layer.held_keys(head)), np.array(layer.held[head])
        looks = []
        for own in layer.query_heads(head):
            plain = [turned(layer.queries[at][own], -at, frequencies) for at in range(sink, layer.seen)]
            mean = sum(plain) / len(plain)
            spread = sum(np.outer(query - mean, query - mean) for query in plain) / len(plain)
            mean, spread = turn @ mean, turn @ spread @ turn.T
            logits = [float(mean @ k) * layer.scaling + float(k @ spread @ k) * layer.scaling**2 / 2 for k in keys]
            looks.append(softmax(np.where(held < sink, -np.inf, logits)))
        weights = sum(looks) / len(looks)
        scores.append([float(w) * norm(layer.values[head][j]) for w, j in zip(weights, held, strict=True)])
    return scores


def agreed(scores: list[Scores], policy: Fields) -> list[Scores]:
    """One ranking for all layers and heads, one per head for all layers, or every layer's and head's own."""
    if policy["mode"] == "union":
        one = [[max(column) for column in zip(*(head for layer in scores for head in layer), strict=True)]]
        return [one * len(layer) for layer in scores]
    if policy["mode"] == "per_head":
        means = [np.mean(heads, axis=0).tolist() for heads in zip(*scores, strict=True)]
        return [means for _ in scores]
    return scores


MODES = ("union", "per_head", "per_layer_perhead")


@evicts("triattention", rotary=True, agree=agreed, mode=MODES, horizon=(1, 5, 65536))
def from_further_on(layer: Layer, policy: Fields) -> Scores:
    """The mean query's logits at distances to come and norms, in standard scores; the largest of the group."""
    offsets, half = [2**n for n in range(40) if 2**n <= policy["horizon"]], len(layer.frequencies)
    scores = []
    for head in layer.heads:
        keys, held = layer.held_keys(head), layer.held[head]
        may_leave = [policy["sink"] <= j < layer.seen - policy["window"] for j in held]
        group = []
        for own in layer.query_heads(head):
            plain = [turned(layer.queries[at][own], -at, layer.frequencies) for at in range(layer.seen)]
            centre = sum(plain) / len(plain)
            spread = sum(pairs(query, half) for query in plain) / len(plain) - pairs(centre, half)
            ahead = sum(turned(centre, layer.seen + d, layer.frequencies) for d in offsets) / len(offsets)
            own_scores = np.array([float(ahead @ key) + float(spread @ pairs(key, half)) for key in keys])
            counted = own_scores[may_leave]
            group.append((own_scores - counted.mean()) / max(counted.std(), 1e-6))
        scores.append(np.max(group, axis=0).tolist())
    return scores


def pairs(x: Array, half: int) -> Array:
    """Lengths [F] of the channel pairs that turn together."""
    return np.asarray(np.hypot(x[:half], x[half : 2 * half]))


# --- policies whose queries choose ----------------------------------------------------------------------------------


@selects("quest", budget=(4, 9, 20), page=(2, 3, 5), dense=(0, 0, 1))
def likely_pages(layer: Layer, policy: Fields, depth: int, head: int, query: int) -> set[int]:
    """The query's own page and those with the largest bound on q k, channel by channel; three pages at least."""
    page, own = policy["page"], query // policy["page"]
    if depth < policy["dense"]:
        return set(range(query + 1))
    bounds, looks = [], layer.queries[query][head]
    for number in range(own):
        keys = np.array(layer.keys[layer.kv_head(head)][number * page : (number + 1) * page])
        bounds.append((-float(np.maximum(looks * keys.min(0), looks * keys.max(0)).sum()), number))
    others = min(max(3, policy["budget"] // page), own + 1) - 1
    decided([-bound for bound, _ in sorted(bounds)], others)
    pages = {own, *(number for _, number in sorted(bounds)[:others])}
    return {j for number in pages for j in range(number * page, (number + 1) * page)}


# --- arithmetic -----------------------------------------------------------------------------------------------------


def decided(falling: Sequence[float], count: int) -> None:
    """Raise Undetermined where rounding alone decides between the last of ``count`` scores and the next."""
    if 0 < count < len(falling):
        worst_kept, best_gone = falling[count - 1], falling[count]
        if 0 < worst_kept - best_gone <= ROUNDING * max(abs(worst_kept), abs(best_gone)):
            raise Undetermined


def norm(x: Array) -> float:
    return float(np.sqrt((x * x).sum()))


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def pooled(x: Array, kernel: int, pool: str) -> list[float]:
    """Maximum or mean of ``kernel`` neighbours; beyond the ends there is 0, which also counts in the mean."""
    padded = np.pad(x, kernel // 2)
    around = [padded[n : n + kernel] for n in range(len(x))]
    return [float(part.max()) if pool == "max" else float(part.sum()) / kernel for part in around]


def turned(x: Array, by: int, frequencies: Array) -> Array:
    """A vector [D] turned by ``by`` positions: channel i with channel i + F, the rest as it is."""
    half, angle = len(frequencies), by * frequencies
    a, b = x[:half], x[half : 2 * half]
    rotated = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), x[2 * half :]]
    return np.concatenate(rotated)


def drawn_part(weights: Sequence[int], seed: int) -> int:
    """Which part of a mixture a request draws: the sha256 of ``mixture/SEED``, 63 bits of it, over all the shares."""
    shares = [part for part, weight in enumerate(weights) for _ in range(weight // gcd(*weights))]
    digest = hashlib.sha256(f"mixture/{seed}".encode()).digest()
    return shares[int.from_bytes(digest[:8], "big") // 2 % len(shares)]
