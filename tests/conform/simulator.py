"""Compressed decoding simulated from the outside: one row, one token, one head at a time, and no ledger anywhere.

What leaves when, and what becomes codes, follows here from tokens, pins, chunks and seeds alone: by each policy's
published rule (``rules.py``, ``codings.py``) and the schedule that docs/choose-policies.md states. Nothing of audit is
imported, so that a mistake which the cache and the shadow pass share shows as a difference from this file.

The language model is the stock transformers one; only its attention is replaced. Everything a row has computed stays
here in plain lists, so that what it may look at is a question of indices and never of storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface

from conform import codings
from conform.rules import RULES, Array, Layer, Scores, decided, turned

__all__ = ["codings"]  # whose rules are registered on import
NAME = "conform-simulator"
Fields = Mapping[str, Any]


class Request(NamedTuple):
    """One row's policy as plain fields, and what its random draws are made from.

    ``evictor`` and ``codec`` hold a name and every field; the codec may be absent. ``prompt_seed`` is that of the row
    whose prefill is shared, the row's own where nothing is.
    """

    evictor: Fields
    codec: Fields | None
    seed: int
    prompt_seed: int


class Row:
    """A row that is given tokens and draws tokens; ``log_probs`` [T - 1] are those of every token but the first."""

    def __init__(self, model: Any, request: Request) -> None:
        self.model, self.request = model, request
        self.ids: list[int] = []
        self.pinned: set[int] = set()
        self.seen = self.prompt_length = 0
        self.decoding = False
        self.logits: list[Array] = []  # [T] after every token seen
        self.pending: list[int] = []  # drawn, not seen yet
        self.waiting: list[tuple[int, bool]] = []  # given, not seen yet, and whether pinned
        self.drawn: list[int] = []  # positions of drawn tokens
        windows, frequencies = own_windows(model.config), own_frequencies(model)
        self.layers = [Layer(number, window, frequencies, self.seed_of) for number, window in enumerate(windows)]
        self.governed_layers = [layer for layer in self.layers if layer.window is None]

    def seed_of(self, position: int) -> int:
        """The seed that an entry's random draws are made from."""
        return self.request.prompt_seed if position < self.prompt_length else self.request.seed

    # --- a conversation: what enters the cache when ------------------------------------------------------------------

    def give(self, ids: Sequence[int], pinned: Sequence[bool] | None = None) -> None:
        """Tokens of a prompt or message; they enter when the row goes on."""
        self.waiting += zip(ids, pinned or [False] * len(ids), strict=True)

    def draw(self, ids: Sequence[int]) -> None:
        """Tokens that were drawn: the last one is not seen before the row goes on."""
        self.go_on()
        for token in ids:
            if self.pending:
                self.feed(self.pending, decoding=True)
            self.drawn.append(self.seen)
            self.pending = [token]

    def go_on(self) -> None:
        """Let what is waiting enter: given tokens in chunks, a last drawn token ahead of them."""
        entering = [(token, False) for token in self.pending] + self.waiting
        self.prompt_length = self.prompt_length or len(entering)
        if self.waiting:
            size = self.request.evictor["chunk"]
            for start in range(0, len(entering), size):
                ids, pins = zip(*entering[start : start + size], strict=True)
                self.feed(ids, decoding=False, pinned=pins)
        elif self.pending:
            self.feed(self.pending, decoding=True)
        self.pending, self.waiting = [], []

    @torch.no_grad()
    def feed(self, ids: Sequence[int], *, decoding: bool, pinned: Sequence[bool] | None = None) -> None:
        """One forward: every new token attends, then the layers evict and quantise."""
        self.pinned |= {self.seen + n for n, pin in enumerate(pinned or ()) if pin}
        self.decoding, first = decoding, self.seen
        self.ids += ids
        self.seen += len(ids)
        at = torch.arange(first, self.seen)[None]
        out = self.model(input_ids=torch.tensor([list(ids)]), position_ids=at, use_cache=False, row=self)
        self.logits += list(out.logits[0].numpy())

    def log_probs(self, temperature: float = 1.0) -> Array:
        """Log-prob, in nats, of every token that came after the first; [T - 1]."""
        ids = [*self.ids, *self.pending]
        scaled = np.array(self.logits)[: len(ids) - 1] / temperature
        return np.array([row[token] - log_sum_exp(row) for row, token in zip(scaled, ids[1:], strict=True)])

    # --- one layer ---------------------------------------------------------------------------------------------------

    def attend(self, number: int, queries: Array, keys: Array, values: Array, scaling: float) -> Array:
        """Outputs [Q, G*H, D] of new queries [G*H, Q, D] with new keys and values [H, Q, D]."""
        layer, first = self.layers[number], self.seen - queries.shape[1]
        layer.append(queries, keys, values, scaling)
        layer.seen = self.seen
        if layer.window is None and self.request.codec and self.request.codec.get("write"):
            self.code(layer)
        heads = range(len(queries))
        out = np.array([[self.look(layer, head, i) for head in heads] for i in range(first, self.seen)])
        if layer.window is None:
            self.compress(layer, queries.shape[1])
        return out

    def look(self, layer: Layer, head: int, query: int) -> Array:
        """What one query of one head reads."""
        own = layer.kv_head(head)
        visible = [j for j in layer.held[own] if j <= query]
        if layer.window is not None:
            visible = [j for j in visible if query - j < layer.window]
        select = RULES[self.request.evictor["name"]].select
        if select is not None and self.decoding and layer.window is None:
            chosen = select(layer, self.request.evictor, self.governed_layers.index(layer), head, query)
            visible = [j for j in visible if j in chosen]
            layer.chosen[head, query] = frozenset(visible)
        keys = self.positioned(layer, own, visible, query)
        logits = np.array(keys) @ layer.queries[query][head] * layer.scaling
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        for j, weight in zip(visible, weights.tolist(), strict=True):
            layer.mass[own][j] += weight
        return weights @ np.array([layer.values[own][j] for j in visible])

    def positioned(self, layer: Layer, head: int, visible: list[int], query: int) -> list[Array]:
        """The keys at the distances that the query sees them: tokens apart, or entries apart under ``reposition``."""
        keys = [layer.keys[head][j] for j in visible]
        if layer.window is not None or not self.request.evictor.get("reposition"):
            return keys
        last = len(visible) - 1  # the query's own entry
        by = [(query - j) - (last - n) for n, j in enumerate(visible)]
        return [turned(key, steps, layer.frequencies) for key, steps in zip(keys, by, strict=True)]

    def compress(self, layer: Layer, new: int) -> None:
        """After a forward of ``new`` tokens: evict where it is due, then quantise what has left the residual."""
        layer.since += new if self.decoding else 0
        agree = RULES[self.request.evictor["name"]].agree
        if agree is None:
            self.evict_and_code([layer])
        elif layer is self.governed_layers[-1]:  # nothing of this forward looks at the layers before it any more
            self.evict_and_code(self.governed_layers)

    def evict_and_code(self, layers: Sequence[Layer]) -> None:
        """What these layers do after they have attended."""
        if self.is_due(layers[-1]):
            policy, rule = self.request.evictor, RULES[self.request.evictor["name"]]
            assert rule.rank is not None
            ranks = [rule.rank(layer, policy) for layer in layers]
            for layer, scores in zip(layers, rule.agree(ranks, policy) if rule.agree else ranks, strict=True):
                self.evict(layer, scores)
                layer.since = 0
        for layer in layers:
            self.code(layer)

    def code(self, layer: Layer) -> None:
        """Quantise what is due now."""
        codec = self.request.codec
        if codec is not None and str(layer.number) not in codec.get("skip_layers", "").split("/"):
            code = RULES[codec["name"]].code
            assert code is not None
            code(layer, codec)

    def is_due(self, layer: Layer) -> bool:
        """Over budget, and the phase and interval say so."""
        policy = self.request.evictor
        if RULES[policy["name"]].rank is None or sum(map(len, layer.held)) <= len(layer.held) * self.budget(layer):
            return False
        if self.decoding:
            return policy["phase"] != "prefill" and layer.since >= policy["interval"]
        return policy["phase"] != "decode"

    def budget(self, layer: Layer) -> int:
        """Entries that an eviction leaves now in each head."""
        policy, depth = self.request.evictor, self.governed_layers.index(layer)
        return RULES[policy["name"]].layer_budget(policy, depth, len(self.governed_layers), self.seen)

    def evict(self, layer: Layer, scores: Scores) -> None:
        """Sink, window and pins stay, then the highest ranked entries, ties to the earlier one."""
        policy, free, safe = self.request.evictor, [], []
        for held, own in zip(layer.held, scores, strict=True):
            safe.append({j for j in held if self.is_safe(j)})
            free.append([(score, j) for score, j in zip(own, held, strict=True) if j not in safe[-1]])
        mean = [self.budget(layer) - len(stay) for stay in safe]
        counts = RULES[policy["name"]].shares([[score for score, _ in head] for head in free], mean, policy)
        for head, held in enumerate(layer.held):
            kept = safe[head] | best(free[head], counts[head])
            layer.gone[head] |= {j: self.seen for j in held if j not in kept}
            layer.held[head] = [j for j in held if j in kept]

    def is_safe(self, position: int) -> bool:
        """Whether an entry is a sink, in the window or pinned."""
        policy = self.request.evictor
        return position < policy["sink"] or position >= self.seen - policy["window"] or position in self.pinned


def best(scored: list[tuple[float, int]], count: int) -> set[int]:
    """The ``count`` entries with the highest scores; Undetermined where rounding alone would decide."""
    assert count >= 0, "sink, window and pins fit the budget"
    ordered = sorted(scored, key=lambda entry: (-entry[0], entry[1]))
    decided([score for score, _ in ordered], count)
    return {j for _, j in ordered[:count]}


def log_sum_exp(logits: Array) -> float:
    """The logarithm of the sum of exponentials."""
    top = logits.max()
    return float(top + np.log(np.exp(logits - top).sum()))


# --- what the model itself says -------------------------------------------------------------------------------------


def own_windows(config: Any) -> list[int | None]:
    """Every layer's own sliding window, None where it sees everything."""
    text = config.to_dict()
    kinds = text.get("layer_types") or ["full_attention"] * config.num_hidden_layers
    return [text["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]


def own_frequencies(model: Any) -> Array:
    """Radians per position of the full-attention layers' rotary channels; none for a model with learned positions."""
    tables = dict(model.named_buffers())
    for ending in ("full_attention_inv_freq", "rotary_emb.inv_freq"):
        for name, table in tables.items():
            if name.endswith(ending):
                found: Array = table.double().numpy()
                return found
    return np.zeros(0)


def naive_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, row: Row, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention in the form transformers calls it, for one row."""
    parts = (part[0].numpy() for part in (query, key, value))
    return torch.from_numpy(row.attend(module.layer_idx, *parts, kwargs["scaling"]))[None], None


AttentionInterface.register(NAME, naive_attention)
