"""A store whose entries become codes once they leave the residual window.

Codes cover every slot; exact keys and values exist only for the last slots, the tail, from the first entry on that is
not yet quantised in some row or head. Whether an entry is read from its codes is decided by its position alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from audit.cache.quantised.codes import (
    code_groups,
    code_runs,
    decode_keys,
    decode_tokens,
    encode_tokens,
    group_logits,
    pack,
    parameters_of,
    split,
    spread_scales,
    token_logits,
    token_mix,
    unpack,
    without_empty,
)
from audit.cache.quantised.hints import KEYS, VALUES, HintRecorder
from audit.cache.store import Entries, Store
from audit.policies import Quantiser, softmax

PARTS = ("key", "value")
WIDEST = 2**15 - 1  # groups that an int16 can name
HOST_BLOCK, DEVICE_BLOCK = 1 << 22, 1 << 28  # bytes of one layer's keys that are exact at once while attending


class QuantisedStore(Store):
    """See ``Store``; ``flush`` turns entries into codes."""

    def __init__(self, codec: Quantiser, layer: int, *, accumulates: bool = False, observed_queries: int = 0) -> None:
        super().__init__(accumulates=accumulates, observed_queries=observed_queries)
        self._codec, self._layer = codec, layer
        self._given: tuple[Tensor | None, ...] = (None, None)  # fixed scales [H] of keys and values
        self._start = 0  # first slot of the tail
        self._tail = (torch.empty(0), torch.empty(0))  # keys, values [B, H, length - start, D]
        self._table: Tensor | None = None  # parameters of key groups [B, H, G, P * D], D innermost
        self._keys_done = self._values_done = torch.empty(0)  # [B, 1, 1] positions below are quantised
        self._aligned = True  # slot n holds position n, so groups of keys are runs of slots
        self._hints: HintRecorder | None = None  # part of the record, not of what serves

    def _allocate(self, key: Tensor, value: Tensor) -> None:
        batch, heads, _, size = key.shape
        codec, bits = self._codec, self._codec.bits
        self._hints = HintRecorder(codec, batch)
        self._tail = (key[:, :, :0].clone(), value[:, :, :0].clone())
        self._keys_done = torch.zeros(batch, 1, 1, dtype=torch.int64, device=key.device)
        self._values_done = torch.zeros_like(self._keys_done)
        found = (codec.given(self._layer, part, heads) for part in range(len(PARTS)))
        self._given = tuple(None if scales is None else scales.to(key) for scales in found)
        for name, tensor in zip(PARTS, (key, value), strict=True):
            width = tensor.shape[3]
            self._slots[f"{name}_codes"] = tensor.new_zeros(batch, heads, 0, width * bits // 8, dtype=torch.uint8)
            if self._given[0] is None and (name == "value" or not codec.key_group):
                count = width // codec.channels(width) * self._numbers(tensor)
                self._slots[f"{name}_parameters"] = tensor.new_zeros(batch, heads, 0, count)
        if codec.key_group:
            self._blank["key_group"] = -1
            self._slots["key_group"] = key.new_zeros(batch, heads, 0, dtype=torch.int16)
            self._table = key.new_zeros(batch, heads, 0, size * self._numbers(key))

    def _numbers(self, like: Tensor) -> int:
        """Parameters of one group."""
        nothing = like.new_zeros(1)
        return self._codec.fit(nothing, nothing).shape[-1]

    def _fill(self, start: int, end: int, key: Tensor, value: Tensor) -> None:
        self._tail = (torch.cat([self._tail[0], key], 2), torch.cat([self._tail[1], value], 2))
        columns = torch.arange(start, end, device=key.device)
        self._aligned &= bool((self._slots["positions"][:, :, start:end] == columns).all())

    def read(self) -> Iterator[Entries]:
        """Row blocks of bounded size, decoded one after the other."""
        for rows in self._blocks():
            yield Entries(rows, *self.entries(rows))

    def _blocks(self) -> list[slice]:
        keys = self._tail[0]
        row = keys.shape[1] * self.length * keys.shape[3] * keys.element_size()
        most = HOST_BLOCK if keys.device.type == "cpu" else DEVICE_BLOCK
        step = max(1, most // max(row, 1))
        return [slice(first, first + step) for first in range(0, len(keys), step)]

    def entries(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        codec = self._codec
        tokens = {name: tensor[rows, :, : self.length] for name, tensor in self._slots.items()}
        codes = unpack(tokens["value_codes"], codec.bits)
        values = decode_tokens(codes, self._parameters(VALUES, tokens), codec)
        return self._keys(rows, tokens), self._with_tail(values, 1, self._values_done[rows], rows)

    def _keys(self, rows: Tensor | slice, tokens: dict[str, Tensor]) -> Tensor:
        codec = self._codec
        codes = unpack(tokens["key_codes"], codec.bits)
        if self._table is None:
            keys = decode_tokens(codes, self._parameters(KEYS, tokens), codec)
            return self._with_tail(keys, 0, self._keys_done[rows], rows)
        table = self._table[rows]
        if self._aligned and table.shape[2]:
            whole = min(table.shape[2] * codec.key_group, self.length)
            runs = codes[:, :, :whole].reshape(*codes.shape[:2], -1, codec.key_group, codes.shape[-1])
            parameters = self._of_channels(table)[:, :, :, None]
            known = decode_keys(runs, parameters.expand(*runs.shape, -1), codec).flatten(2, 3)
            keys = torch.cat([known, known.new_zeros(*known.shape[:2], self.length - whole, known.shape[3])], 2)
        elif table.shape[2]:
            parameters = self._of_channels(parameters_of(tokens["key_group"], table))
            keys = decode_keys(codes, parameters, codec)
        else:
            keys = self._tail[0].new_zeros(codes.shape)
        return self._with_tail(keys, 0, self._keys_done[rows], rows)

    @property
    def on_write(self) -> bool:
        """Whether ``flush`` comes before the new entries' own queries."""
        return self._codec.on_write

    @property
    def attends_codes(self) -> bool:
        """Whether ``attend_one`` may be used: below float32, decoding rounds, and the shadow pass must round alike."""
        return self._tail[0].dtype in (torch.float32, torch.float64)

    def attend_one(
        self, query: Tensor, visible: Tensor | None, scaling: float, sink_logits: Tensor | None = None
    ) -> Tensor:
        """Attention output [B, G*H, 1, D] of one query per row; ``visible`` bool [B, H, 1, length] or None for all."""
        packed = query.reshape(len(query), self._tail[0].shape[1], -1, query.shape[3])
        out = [
            self._attend(rows, packed[rows], None if visible is None else visible[rows], scaling, sink_logits)
            for rows in self._blocks()
        ]
        return torch.cat(out).reshape(*query.shape[:3], -1)

    def _attend(
        self, rows: slice, query: Tensor, visible: Tensor | None, scaling: float, sink_logits: Tensor | None
    ) -> Tensor:
        start, at = self._start, self.positions[rows, :, self._start :]
        tail_keys, tail_values = self._tail[0][rows], self._tail[1][rows]
        logits = self._logits(rows, query)
        # [b, H, 1, tail]; a key and its value need not become codes at the same time
        exact = (at >= self._keys_done[rows])[:, :, None]
        logits[..., start:] = torch.where(exact, query @ tail_keys.transpose(2, 3), logits[..., start:])
        logits *= scaling
        if visible is not None:
            logits = logits.masked_fill(~visible, float("-inf"))
        shares = softmax(logits[:, :, :, None], sink_logits)[:, :, :, 0]
        exact = (at >= self._values_done[rows])[:, :, None]
        direct = shares[..., start:] * exact
        shares[..., start:] -= direct  # 0 where the value is exact
        tokens = {name: tensor[rows, :, : self.length] for name, tensor in self._slots.items()}
        codes, parameters = unpack(tokens["value_codes"], self._codec.bits), self._parameters(VALUES, tokens)
        return token_mix(shares, self._codec.numbers(codes, query.dtype), parameters) + direct @ tail_values

    def _logits(self, rows: slice, query: Tensor) -> Tensor:
        """q k [b, H, X, length] of the entries that are codes; anything for the others."""
        tokens = {name: tensor[rows, :, : self.length] for name, tensor in self._slots.items()}
        codec = self._codec
        if self._table is not None and not (self._aligned and self._table.shape[2]):
            return query @ self._keys(rows, tokens).transpose(2, 3)
        codes = unpack(tokens["key_codes"], codec.bits)
        if self._table is None:
            return token_logits(query, codec.numbers(codes, query.dtype), self._parameters(KEYS, tokens))
        table = self._of_channels(self._table[rows])
        whole = min(table.shape[2] * codec.key_group, self.length)
        runs = codes[:, :, :whole].reshape(*codes.shape[:2], -1, codec.key_group, codes.shape[-1])
        logits = group_logits(query, codec.numbers(runs, query.dtype), table)
        return torch.nn.functional.pad(logits, (0, self.length - whole))

    def _of_channels(self, table: Tensor) -> Tensor:
        """Rows of the table [..., P * D] as parameters [..., D, P]."""
        return split(table, self._tail[0].shape[3]).transpose(-1, -2)

    def _parameters(self, part: int, tokens: dict[str, Tensor]) -> Tensor:
        """Parameters [b, H, length, n, P] of entries coded one by one."""
        given, like = self._given[part], self._tail[part]
        if given is not None:
            return spread_scales(given, tokens[f"{PARTS[part]}_codes"])
        return split(tokens[f"{PARTS[part]}_parameters"], self._numbers(like))

    def _with_tail(self, decoded: Tensor, part: int, done: Tensor, rows: Tensor | slice) -> Tensor:
        """Put the exact entries where they are still exact."""
        if self._start < self.length:
            exact = self.positions[rows, :, self._start :] >= done
            tail = self._tail[part][rows]
            decoded[:, :, self._start :] = torch.where(exact[..., None], tail, decoded[:, :, self._start :])
        return decoded

    def flush(self, keys_until: Tensor, values_until: Tensor) -> None:
        """Quantise keys at positions below ``keys_until`` [B] and values below ``values_until`` [B]."""
        keys_until, values_until = keys_until[:, None, None], values_until[:, None, None]
        at = self.positions[:, :, self._start :]
        self._flush_values((at >= self._values_done) & (at < values_until))
        self._flush_keys((at >= self._keys_done) & (at < keys_until))
        self._keys_done, self._values_done = keys_until, values_until
        exact = (at >= torch.minimum(keys_until, values_until)).any(0).any(0)
        self._cut(int(exact.int().argmax()) if bool(exact.any()) else at.shape[2])

    def _cut(self, slots: int) -> None:
        """Free the first slots of the tail."""
        if slots:
            self._start += slots
            self._tail = (self._tail[0][:, :, slots:].clone(), self._tail[1][:, :, slots:].clone())

    def _flush_values(self, leaving: Tensor) -> None:
        self._store_tokens("value", self._tail[1], leaving)

    def _flush_keys(self, leaving: Tensor) -> None:
        if self._table is None:
            self._store_tokens("key", self._tail[0], leaving)
        elif bool(leaving.any()):
            if self._aligned:
                # every slot at its position: all rows and heads have come equally far, the first speaks for them
                self._store_runs(self._table, int(leaving[0, 0].sum()))
            else:
                self._store_groups(self._table, leaving)

    def _store_tokens(self, name: str, exact: Tensor, leaving: Tensor) -> None:
        part = PARTS.index(name)
        codes, parameters = encode_tokens(exact, self._codec, self._given[part])
        self._note(part, exact, codes, parameters, leaving)
        self._write(f"{name}_codes", pack(codes, self._codec.bits), leaving)
        if self._given[part] is None:
            self._write(f"{name}_parameters", parameters.flatten(-2), leaving)

    def _store_runs(self, table: Tensor, count: int) -> None:
        """The next ``count`` keys of every row, where slots and positions are the same."""
        first = int(self._keys_done[0])
        exact = self._tail[0][:, :, first - self._start : first - self._start + count]
        codes, group, parameters = code_runs(exact, self._codec)
        slots = slice(first, first + count)
        every = torch.ones_like(self.positions[:, :, slots], dtype=torch.bool)
        each = parameters.repeat_interleave(self._codec.key_group, 2)
        self._note(KEYS, exact, codes, each, every, slots)
        self._add_groups(table, parameters)
        for name, new in (("key_codes", pack(codes, self._codec.bits)), ("key_group", group + table.shape[2])):
            self._slots[name][:, :, slots] = new.to(self._slots[name].dtype)

    def _store_groups(self, table: Tensor, leaving: Tensor) -> None:
        """The leaving keys, by position and per head."""
        codes, group, parameters = code_groups(self._tail[0], leaving, self._codec)
        self._note(KEYS, self._tail[0], codes, parameters_of(group, parameters), leaving)
        self._add_groups(table, parameters)
        self._write("key_codes", pack(codes, self._codec.bits), leaving)
        self._write("key_group", (group + table.shape[2]).to(self._slots["key_group"].dtype), leaving)
        assert self._table is not None
        used = self._slots["key_group"][:, :, : self.length]
        group, self._table = without_empty(used.long(), self._table)
        used.copy_(group)

    def _note(
        self, part: int, exact: Tensor, codes: Tensor, parameters: Tensor, leaving: Tensor, slots: slice | None = None
    ) -> None:
        """Let the record have the codes that rounding could have decided; ``slots`` are the tail's unless given."""
        assert self._hints is not None
        at = self.positions[:, :, slice(self._start, None) if slots is None else slots]
        self._hints.add(part, exact, codes, parameters, leaving, at)

    def hints_of(self, row: int, layer: int, layers: int) -> tuple[Tensor, Tensor]:
        """Element numbers and low bits of the row's hints (see ``hints``) in this store, layer ``layer``."""
        assert self._hints is not None
        keys, values = self._tail
        return self._hints.of(row, layer, layers, keys.shape[1], max(keys.shape[3], values.shape[3]))

    def _add_groups(self, table: Tensor, parameters: Tensor) -> None:
        self._table = torch.cat([table, parameters.transpose(-1, -2).flatten(-2)], 2)
        if self._table.shape[2] > WIDEST:
            self._slots["key_group"] = self._slots["key_group"].int()

    def _write(self, name: str, new: Tensor, where: Tensor) -> None:
        slots = self._slots[name][:, :, self._start : self.length]
        mask = where if slots.dim() == 3 else where[..., None]
        slots.copy_(torch.where(mask, new, slots))

    def _pack(self, order: Tensor) -> None:
        front = (order < self._start) & (self._slots["positions"].gather(2, order) >= 0)
        # an empty tail stays empty: what rows with fewer entries hold behind them are empty slots
        start = int(front.sum(2).min()) if self._start < self.length else order.shape[2]
        index = (order[:, :, start:] - self._start).clamp(min=0)[..., None]
        self._tail = (
            self._tail[0].gather(2, index.expand(-1, -1, -1, self._tail[0].shape[3])),
            self._tail[1].gather(2, index.expand(-1, -1, -1, self._tail[1].shape[3])),
        )
        super()._pack(order)
        self._start, self._aligned = start, False

    def expand(self, group: int) -> None:
        super().expand(group)
        self._tail = (self._tail[0].repeat_interleave(group, 0), self._tail[1].repeat_interleave(group, 0))
        self._keys_done = self._keys_done.repeat_interleave(group, 0)
        self._values_done = self._values_done.repeat_interleave(group, 0)
        if self._table is not None:
            self._table = self._table.repeat_interleave(group, 0)
        if self._hints is not None:
            self._hints.expand(group)

    def _held(self) -> Iterator[Tensor]:
        yield from super()._held()
        yield from self._tail
        if self._table is not None:
            yield self._table
