"""Compressed decoding written out: one token at a time, keys and values in growing lists, the visible ones looked up.

This is what a shadow pass claims to equal. It shares no code with the product but a quantiser's own ``fit``, ``encode``
and ``decode``: it takes the record and for every query gathers the entries that have not left, as codes where they had
become codes. Plain operations throughout, so gradients flow through it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvaudit.audit.cache.ledger import Rollout

NAME = "conform-stepwise"


class Lists:
    """Keys and values of one row, layer by layer, and the record: what left when [L, H, T], what became codes when."""

    def __init__(self, rollout: Rollout, windows: list[int | None]) -> None:
        self.evicted_at, self.windows, self.selection = rollout.evicted_at.tolist(), windows, rollout.selection
        self.codec = rollout.codec
        tables = (rollout.keys_quantised_at, rollout.values_quantised_at)
        self.keys_at, self.values_at = ([] if t is None else t.tolist() for t in tables)
        # [L][H][T] tensors [D], replaced by what their codes say from the recorded query on
        self.keys: list[list[list[Tensor]]] = [[] for _ in windows]
        self.values: list[list[list[Tensor]]] = [[] for _ in windows]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, beside: Tensor | None
    ) -> Tensor:
        """Append one key and value [1, H, 1, D], then attend with one query [1, G*H, 1, D]; [1, 1, G*H, D].

        ``beside`` [G*H] holds one more logit per query head, which has no value.
        """
        if not self.keys[layer]:
            self.keys[layer], self.values[layer] = ([[] for _ in range(key.shape[1])] for _ in range(2))
        for head in range(key.shape[1]):
            self.keys[layer][head].append(key[0, head, 0])
            self.values[layer][head].append(value[0, head, 0])
        at, group, outputs = len(self.keys[layer][0]) - 1, query.shape[1] // key.shape[1], []
        if self.codec is not None and self.windows[layer] is None:
            for head in range(key.shape[1]):
                self.quantise(layer, head, at, heads=key.shape[1])
        for head in range(query.shape[1]):
            seen = self.chosen(layer, head, len(query[0]), self.visible(layer, head // group, at), at)
            keys = torch.stack([self.keys[layer][head // group][j] for j in seen])
            values = torch.stack([self.values[layer][head // group][j] for j in seen])
            logits = keys @ query[0, head, 0] * scaling
            if beside is not None:
                logits = torch.cat([logits, beside[head : head + 1]])
            outputs.append(logits.softmax(0)[: len(values)] @ values)
        return torch.stack(outputs)[None, None]

    def visible(self, layer: int, head: int, query: int) -> list[int]:
        """The keys that query ``query`` sees."""
        window, gone = self.windows[layer], self.evicted_at[layer][head]
        return [j for j in range(query + 1) if query < gone[j] and (window is None or query - j < window)]

    def chosen(self, layer: int, head: int, heads: int, seen: list[int], query: int) -> list[int]:
        """Those of the visible keys that query head ``head`` of ``heads`` attends to."""
        made = self.selection
        if made is None or layer not in made.layers or query not in made.queries.tolist():
            return seen
        lists = made.chosen[made.layers.index(layer)]
        units = lists[head * len(lists) // heads, made.queries.tolist().index(query)].tolist()
        return [j for j in seen if j // made.unit in units]

    def quantise(self, layer: int, head: int, query: int, *, heads: int) -> None:
        """Put codes where ``query`` is the first to see them."""
        assert self.codec is not None
        keys, values, size = self.keys[layer][head], self.values[layer][head], self.codec.key_group
        leaving = [j for j in range(query + 1) if self.keys_at[j] == query and self.evicted_at[layer][head][j] > query]
        if size:  # per channel, over runs of keys that are still held
            for first in range(0, len(leaving), size):
                run = leaving[first : first + size]
                for j, coded in zip(run, self.coded(torch.stack([keys[j] for j in run], 1)).unbind(1), strict=True):
                    keys[j] = coded
        else:
            for j in leaving:
                keys[j] = self.by_token(keys[j], self.fixed(layer, 0, head, heads))
        for j in (j for j in range(query + 1) if self.values_at[j] == query):
            values[j] = self.by_token(values[j], self.fixed(layer, 1, head, heads))

    def fixed(self, layer: int, part: int, head: int, heads: int) -> Tensor | None:
        """The scale [1] of a layer's keys (part 0) or values, where the codec has a fixed one."""
        assert self.codec is not None
        given = self.codec.fixed_scales(layer, part, heads)
        return None if given is None else given[head : head + 1]

    def by_token(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """One entry [D] in its groups of channels."""
        assert self.codec is not None
        return self.coded(x.reshape(-1, self.codec.channels(len(x))), scale).flatten()

    def coded(self, groups: Tensor, scale: Tensor | None = None) -> Tensor:
        """Groups [N, n], each through codes of its own; the gradient passes straight through."""
        assert self.codec is not None
        exact = groups.detach()
        parameters = (self.codec.fit(exact.amin(1), exact.amax(1)) if scale is None else scale[None])[:, None]
        return groups + (self.codec.decode(self.codec.encode(exact, parameters), parameters) - exact)


def stepwise_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, lists: Lists, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention in the form transformers calls it."""
    assert query.shape[2] == 1
    return lists.attend(module.layer_idx, query, key, value, kwargs["scaling"], kwargs.get("s_aux")), None


AttentionInterface.register(NAME, stepwise_attention)


def stepwise_logits(model: Any, rollout: Rollout) -> Tensor:
    """Logits [T, V] of feeding a rollout's tokens one by one under its record; token t stands at position t."""
    ids = rollout.ids
    text = model.config.to_dict()
    kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
    lists = Lists(rollout, [text["sliding_window"] if kind == "sliding_attention" else None for kind in kinds])
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        rows = [
            model(input_ids=ids[t : t + 1, None], position_ids=torch.tensor([[t]]), use_cache=False, lists=lists).logits
            for t in range(len(ids))
        ]
    finally:
        model.set_attn_implementation(before)
    return torch.cat(rows, 1)[0]
