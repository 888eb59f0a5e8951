"""A store whose entries become codes once they leave the residual window.

Codes cover every slot; exact keys and values exist only for the last slots, the tail, from the first entry on that is
not yet quantised in some row or head, or from a few before it on. Whether an entry is read from its codes is decided by
its position alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.tensors import gather_entries
from kvaudit.audit.cache.store import EntryBytes
from kvaudit.audit.cache.codes import (
    Scratch,
    encode_groups,
    encode_runs,
    decode_keys,
    decode_tokens,
    encode_tokens,
    pack,
    parameters_of,
    split_last,
    spread_scales,
    unpack,
    drop_empty_groups,
)
from kvaudit.audit.cache.hints import KEYS, VALUES, HINT_BATCH, HintRecorder
from kvaudit.audit.cache.rows import Layout, span_of
from kvaudit.audit.cache.codes import CodeProducts, token_logits, token_mix
from kvaudit.audit.cache.rows import Counts
from kvaudit.audit.cache.store import SLACK, Entries, Store
from kvaudit.audit.policies import Quantiser, softmax

PARTS = ("key", "value")
WIDEST = 2**15 - 1  # groups that an int16 can name
HOST_EXACT, DEVICE_EXACT = 1 << 24, 1 << 28  # bytes of one layer's keys that are exact at once while attending


class LeavingEntries(NamedTuple):
    """Exact entries that become codes now: their slots, and which of those in each row and head, None for all.

    ``places``: the slots in which something leaves anywhere, where that is known and not all; on the CPU.
    ``groups``: how many groups of keys they make at most in one row, and how many that then has, where that is known.
    """

    slots: slice
    which: Tensor | None  # bool [B, H, slots]
    places: Tensor | None = None
    groups: tuple[int, int] | None = None


class QuantisedStore(Store):
    """See ``Store``; ``flush`` turns entries into codes."""

    def __init__(
        self, codec: Quantiser, layer: int, scratch: Scratch, layout: Layout | None, *, accumulates: bool = False
    ) -> None:
        super().__init__(accumulates=accumulates)
        self._layout = layout  # None where entries leave: what is held is then the device's to know
        self._codec, self._layer, self._products = codec, layer, CodeProducts(codec, scratch)
        self._fixed: tuple[Tensor | None, ...] = (None, None)  # fixed scales [H] of keys and values
        self._numbers = 0  # parameters of one group
        self._start = 0  # first slot of the tail
        self._tail = (torch.empty(0), torch.empty(0))  # keys, values [B, H, length - start, D]
        self._empty = self._tail  # one without entries
        self._table: Tensor | None = None  # parameters of key groups [B, H, G, P * D], D innermost
        self._done: tuple[Counts, ...] = ()  # keys and values at positions below are quantised
        self._aligned = True  # slot n holds position n, so groups of keys are runs of slots
        self._hints: HintRecorder | None = None  # part of the record, not of what serves

    def _allocate(self, key: Tensor, value: Tensor) -> None:
        batch, heads, _, size = key.shape
        codec, bits = self._codec, self._codec.bits
        self._hints = HintRecorder(codec, batch)
        self._tail = self._empty = (key[:, :, :0].clone(), value[:, :, :0].clone())
        self._done = (Counts([0] * batch),) * len(PARTS)
        nothing = key.new_zeros(1)
        self._numbers = codec.fit(nothing, nothing).shape[-1]
        found = (codec.fixed_scales(self._layer, part, heads) for part in range(len(PARTS)))
        self._fixed = tuple(None if scales is None else scales.to(key) for scales in found)
        for name, tensor in zip(PARTS, (key, value), strict=True):
            width = tensor.shape[3]
            self._slots[f"{name}_codes"] = tensor.new_zeros(batch, heads, 0, width * bits // 8, dtype=torch.uint8)
            if self._fixed[0] is None and (name == "value" or not codec.key_group):
                count = width // codec.channels(width) * self._numbers
                self._slots[f"{name}_parameters"] = tensor.new_zeros(batch, heads, 0, count)
        self.entry_bytes = EntryBytes(self.entry_bytes.exact, self._coded_bytes(key, value))
        if codec.key_group:
            self._blank["key_group"] = -1
            self._slots["key_group"] = key.new_zeros(batch, heads, 0, dtype=torch.int16)
            self._table = key.new_zeros(batch, heads, 0, size * self._numbers)

    def _coded_bytes(self, key: Tensor, value: Tensor) -> tuple[float, float]:
        """Codes of one entry, and its parameters: shared by the group of its keys, none of its own where fixed."""
        codec, found = self._codec, []
        for name, tensor in zip(PARTS, (key, value), strict=True):
            # channels; bytes of one group's parameters
            width, number = tensor.shape[3], self._numbers * tensor.element_size()
            codes, parameters = width * codec.bits / 8, 0.0
            if name == "key" and codec.key_group:
                parameters = width * number / codec.key_group
            elif self._fixed[0] is None:
                parameters = float(width // codec.channels(width) * number)
            found.append(codes + parameters)
        return found[0], found[1]

    def _fill(self, start: int, key: Tensor, value: Tensor, even: int | None) -> None:
        if start == self._start:
            self._tail = (key, value)
        else:
            self._tail = (torch.cat([self._tail[0], key], 2), torch.cat([self._tail[1], value], 2))
        self._aligned = self._aligned and even == start

    def read(self) -> Iterator[Entries]:
        """Row blocks of bounded size, decoded one after the other."""
        for rows in self._blocks():
            yield Entries(rows, *self.entries(rows))

    def _blocks(self) -> list[slice]:
        keys = self._tail[0]
        row = keys.shape[1] * self.length * keys.shape[3] * keys.element_size()
        most = HOST_EXACT if keys.device.type == "cpu" else DEVICE_EXACT
        step = max(1, most // max(row, 1))
        return [slice(first, first + step) for first in range(0, len(keys), step)]

    def entries(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        codes = unpack(self._used("value_codes", rows), self._codec.bits)
        values = decode_tokens(codes, self._parameters(VALUES, rows), self._codec)
        return self._keys(rows), self._with_tail(self._codec.turned(values, VALUES), VALUES, rows)

    def _used(self, name: str, rows: Tensor | slice, until: int | None = None) -> Tensor:
        """The slots of some rows, as far as there are entries or to ``until``."""
        return self._slots[name][rows, :, : self.length if until is None else until]

    def _keys(self, rows: Tensor | slice) -> Tensor:
        codec = self._codec
        codes = unpack(self._used("key_codes", rows), codec.bits)
        if self._table is None:
            keys = decode_tokens(codes, self._parameters(KEYS, rows), codec)
            return self._with_tail(codec.turned(keys, KEYS), KEYS, rows)
        table = self._table[rows]
        if self._aligned and table.shape[2]:
            whole = min(table.shape[2] * codec.key_group, self.length)
            runs = codes[:, :, :whole].reshape(*codes.shape[:2], -1, codec.key_group, codes.shape[-1])
            parameters = self._of_channels(table)[:, :, :, None]
            known = decode_keys(runs, parameters.expand(*runs.shape, -1), codec).flatten(2, 3)
            if self._done[KEYS].least == whole:  # the others are in the tail
                return torch.cat([known, self._tail[KEYS][rows, :, whole - self._start :]], 2)
            keys = torch.cat([known, known.new_zeros(*known.shape[:2], self.length - whole, known.shape[3])], 2)
        elif table.shape[2]:
            parameters = self._of_channels(parameters_of(self._used("key_group", rows), table))
            keys = decode_keys(codes, parameters, codec)
        else:
            keys = self._tail[0].new_zeros(codes.shape)
        return self._with_tail(keys, KEYS, rows)

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
        batch, heads, length, size = len(query), self._tail[0].shape[1], self.length, query.shape[3]
        asked = query.reshape(batch * heads, -1, size) * scaling  # [N, X, D], of N = B * H
        logits = self._joined_logits(asked)
        if visible is not None:
            logits = logits.view(batch, heads, -1, length).masked_fill(~visible, float("-inf")).flatten(0, 1)
        if sink_logits is None:
            shares = logits.softmax(-1)
        else:
            shares = softmax(logits.view(batch, heads, -1, 1, length), sink_logits).flatten(2, 3).flatten(0, 1)
        return self._joined_mix(shares).reshape(*query.shape[:3], -1)

    def _joined_logits(self, query: Tensor) -> Tensor:
        """q k [N, X, length]: of keys that are codes by these, of the others by themselves."""
        keys, done = self._tail[KEYS].flatten(0, 1), self._done[KEYS].least
        if self._aligned:  # as many in all rows
            exact = torch.bmm(query, _from(keys, done - self._start).transpose(1, 2))
            return torch.cat([self._logits(query, done), exact], 2) if done else exact
        logits, tail = self._logits(query, self.length), torch.bmm(query, keys.transpose(1, 2))
        exact = self._is_exact(KEYS, slice(None)).flatten(0, 1)[:, None]
        logits[..., self._start :] = torch.where(exact, tail, logits[..., self._start :])
        return logits

    def _joined_mix(self, shares: Tensor) -> Tensor:
        """Values weighted by ``shares`` [N, X, length], which are spent: [N, X, D]."""
        values, done = self._tail[VALUES].flatten(0, 1), self._done[VALUES].least
        if self._aligned:
            exact = _from(values, done - self._start)
            if not done:
                return torch.bmm(shares, exact)
            of_codes, own = torch.split(shares, [done, shares.shape[2] - done], 2)
            return torch.baddbmm(self._mixed(of_codes), own, exact)
        tail = shares[..., self._start :]
        exact = tail * self._is_exact(VALUES, slice(None)).flatten(0, 1)[:, None]
        tail -= exact  # codes of what is exact count for nothing
        return torch.baddbmm(self._mixed(shares), exact, values)

    def _logits(self, query: Tensor, until: int) -> Tensor:
        """q k [N, X, until] of the first entries for ``query`` [N, X, D]; anything for those that are no codes."""
        every = slice(None)
        if self._table is None:
            codes, parameters = self._used("key_codes", every, until), self._parameters(KEYS, every, until)
            return token_logits(self._codec.turned(query, KEYS), codes, parameters, self._products)
        if self._aligned:  # whole runs, since keys become codes in these
            return self._products.logits(query, self._used("key_codes", every, until), self._table)
        by_row = query.view(len(self._tail[0]), -1, *query.shape[1:])  # [B, H, X, D]
        return torch.cat([by_row[rows] @ self._keys(rows).transpose(2, 3) for rows in self._blocks()]).flatten(0, 1)

    def _mixed(self, shares: Tensor) -> Tensor:
        """The first values by their codes, weighted by shares [N, X, n]: [N, X, D]."""
        every, until = slice(None), shares.shape[2]
        codes, parameters = self._used("value_codes", every, until), self._parameters(VALUES, every, until)
        return self._codec.turned(token_mix(shares, codes, parameters, self._products), VALUES)

    def _of_channels(self, table: Tensor) -> Tensor:
        """Rows of the table [..., P * D] as parameters [..., D, P]."""
        return split_last(table, self._tail[0].shape[3]).transpose(-1, -2)

    def _parameters(self, part: int, rows: Tensor | slice, until: int | None = None) -> Tensor:
        """Parameters [b, H, length, n, P] of entries coded one by one."""
        scales = self._fixed[part]
        if scales is not None:
            return spread_scales(scales, self._used(f"{PARTS[part]}_codes", rows, until))
        return split_last(self._used(f"{PARTS[part]}_parameters", rows, until), self._numbers)

    def _is_exact(self, part: int, rows: Tensor | slice) -> Tensor:
        """Which entries of the tail are no codes yet: bool [b, H, tail]."""
        return self.positions[rows, :, self._start :] >= self._done[part].on(self.positions.device)[rows][:, None, None]

    def _with_tail(self, decoded: Tensor, part: int, rows: Tensor | slice) -> Tensor:
        """Put the exact entries where they are still exact."""
        done = max(self._done[part].least, self._start)
        if self._aligned:  # as many in all rows
            if done < self.length:
                decoded[:, :, done:].copy_(self._tail[part][rows, :, done - self._start :])
        elif self._start < self.length:
            exact, tail = self._is_exact(part, rows), self._tail[part][rows]
            decoded[:, :, self._start :] = torch.where(exact[..., None], tail, decoded[:, :, self._start :])
        return decoded

    def flush(self, keys_until: Counts, values_until: Counts) -> None:
        """Quantise keys at positions below ``keys_until`` and values below ``values_until``."""
        values = self._leaving(VALUES, values_until)
        if values and self._are_alike(keys_until, values_until, values):
            self._store_both(values)
        else:
            if values:
                self._store_tokens(VALUES, values)
            keys = self._leaving(KEYS, keys_until)
            if keys:
                self._store_keys(keys)
        self._done = (keys_until, values_until)
        self._cut()

    def _leaving(self, part: int, until: Counts) -> LeavingEntries | None:
        """The entries of the tail that become codes once those below ``until`` are; None where there are none."""
        done = self._done[part]
        if self._aligned:  # every slot at its position: all rows and heads have come equally far
            return LeavingEntries(slice(done.least, until.least), None) if done.least < until.least else None
        at = self.positions[:, :, self._start :]
        if self._layout is not None:
            self._layout.learn(at[:, 0])
            span = self._layout.between(done, until)
        else:
            columns = _among(at, done, until).any(0).any(0).nonzero()[:, 0]
            span = span_of(columns) if len(columns) else None
        if span is None:
            return None
        # of the tail; between the first and the last some rows and heads may stay
        slots = slice(self._start + span.first, self._start + span.end)
        which = _among(at[:, :, span.first : span.end], done, until)
        return LeavingEntries(slots, which, span.places, self._groups(done, until))

    def _groups(self, done: Counts, until: Counts) -> tuple[int, int] | None:
        """See ``LeavingEntries``: known where nothing leaves and groups are always full."""
        size = self._codec.key_group
        if self._layout is None or not size or any(count % size for count in until.numbers):
            return None
        more = max(end - start for start, end in zip(done.numbers, until.numbers, strict=True))
        return more // size, until.largest // size

    def _cut(self) -> None:
        """Free the first slots of the tail, up to the first that is exact in some row or head.

        Where slots are positions, fewer than ``SLACK`` stay: a step frees one, and what is behind it is copied.
        """
        if self._aligned:
            slots = min(done.least for done in self._done) - self._start
            if slots < min(SLACK, self._tail[KEYS].shape[2]):
                slots = 0
            if self._layout is not None:
                self._layout.free(slots)
        elif self._layout is not None:
            slots = self._layout.freed(*self._done)
        else:
            exact = (self._is_exact(KEYS, slice(None)) | self._is_exact(VALUES, slice(None))).any(0).any(0)
            slots = int(exact.int().argmax()) if bool(exact.any()) else len(exact)
        if slots:
            self._start += slots
            self._tail = self._behind(slots)

    def _behind(self, slots: int) -> tuple[Tensor, Tensor]:
        """What of the tail is behind its first slots, in memory of its own."""
        keys, values = self._tail
        if slots < keys.shape[2]:
            return keys[:, :, slots:].clone(), values[:, :, slots:].clone()
        if len(self._empty[0]) != len(keys):  # made once: many codes leave no tail at any step
            self._empty = (keys[:, :, :0].clone(), values[:, :, :0].clone())
        return self._empty

    def _exact(self, part: int, slots: slice) -> Tensor:
        tail, first, end = self._tail[part], slots.start - self._start, slots.stop - self._start
        return tail if (first, end) == (0, tail.shape[2]) else tail[:, :, first:end]

    def _store_keys(self, leaving: LeavingEntries) -> None:
        if self._table is None:
            self._store_tokens(KEYS, leaving)
        elif leaving.which is None:
            self._store_runs(self._table, leaving)
        else:
            self._store_groups(self._table, leaving, leaving.which)

    def _store_tokens(self, part: int, leaving: LeavingEntries) -> None:
        exact, name = self._codec.turned(self._exact(part, leaving.slots), part), PARTS[part]
        codes, parameters = encode_tokens(exact, self._codec, self._fixed[part])
        self._note(part, exact, codes, parameters, leaving)
        self._write(f"{name}_codes", pack(codes, self._codec.bits), leaving)
        if self._fixed[part] is None:
            self._write(f"{name}_parameters", parameters.flatten(-2), leaving)

    def _are_alike(self, keys_until: Counts, values_until: Counts, leaving: LeavingEntries) -> bool:
        """Whether keys and values leave of the same entries, few of them, and are coded alike: by one coding then."""
        pairs = ((keys_until, values_until), (self._done[KEYS], self._done[VALUES]))
        same = all(one.numbers == other.numbers for one, other in pairs)
        few = leaving.slots.stop - leaving.slots.start < HINT_BATCH  # of a prompt it would be a copy of all
        by_token = self._table is None and self._fixed[KEYS] is None
        return same and few and by_token and self._tail[KEYS].shape == self._tail[VALUES].shape

    def _store_both(self, leaving: LeavingEntries) -> None:
        """Keys and values of the same entries, with half the operators of a step."""
        # [2, B, H, slots, D]
        exact = torch.stack([self._codec.turned(self._exact(part, leaving.slots), part) for part in (KEYS, VALUES)])
        codes, parameters = encode_tokens(exact, self._codec)
        at = self._at(leaving)
        at = at if isinstance(at, int) else at.clone()
        assert self._hints is not None
        of_parts = (each.unbind(0) for each in (exact, codes, parameters))
        for part, x, own, fitted in zip((KEYS, VALUES), *of_parts, strict=True):
            self._hints.add(part, x, own, fitted, leaving.which, at, leaving.places, own=True)
            self._write(f"{PARTS[part]}_codes", pack(own, self._codec.bits), leaving)
            self._write(f"{PARTS[part]}_parameters", fitted.flatten(-2), leaving)

    def _store_runs(self, table: Tensor, leaving: LeavingEntries) -> None:
        """The next keys of every row, where slots and positions are the same."""
        exact = self._exact(KEYS, leaving.slots)
        codes, group, parameters = encode_runs(exact, self._codec)
        self._note(KEYS, exact, codes, parameters.repeat_interleave(self._codec.key_group, 2), leaving)
        self._add_groups(table, parameters)
        self._write("key_codes", pack(codes, self._codec.bits), leaving)
        self._write("key_group", group + table.shape[2], leaving)

    def _store_groups(self, table: Tensor, leaving: LeavingEntries, which: Tensor) -> None:
        """The leaving keys, by position and per head."""
        exact = self._exact(KEYS, leaving.slots)
        new, every = leaving.groups or (None, None)
        codes, group, parameters = encode_groups(exact, which, self._codec, new)
        self._note(KEYS, exact, codes, parameters_of(group, parameters), leaving)
        self._add_groups(table, parameters)
        self._write("key_codes", pack(codes, self._codec.bits), leaving)
        self._write("key_group", (group + table.shape[2]).to(self._slots["key_group"].dtype), leaving)
        assert self._table is not None
        used = self._slots["key_group"][:, :, : self.length]
        group, self._table = drop_empty_groups(used.long(), self._table, every)
        used.copy_(group)

    def _note(self, part: int, exact: Tensor, codes: Tensor, parameters: Tensor, leaving: LeavingEntries) -> None:
        """Let the record have the codes that rounding could have decided."""
        assert self._hints is not None
        self._hints.add(part, exact, codes, parameters, leaving.which, self._at(leaving), leaving.places)

    def _at(self, leaving: LeavingEntries) -> Tensor | int:
        """The positions [B, H, slots] of what leaves, or the first one's where slots are positions."""
        return leaving.slots.start if self._aligned else self._slots["positions"][:, :, leaving.slots]

    def hints_of(self, row: int, layer: int, layers: int) -> tuple[Tensor, Tensor]:
        """Element numbers and low bits of the row's hints (see ``hints``) in this store, layer ``layer``."""
        assert self._hints is not None
        keys, values = self._tail
        return self._hints.of(row, layer, layers, keys.shape[1], max(keys.shape[3], values.shape[3]))

    def _add_groups(self, table: Tensor, parameters: Tensor) -> None:
        # what codes stand for is written into room that is used again, which bears no gradient
        self._table = torch.cat([table, parameters.detach().transpose(-1, -2).flatten(-2)], 2)
        if self._table.shape[2] > WIDEST:
            self._slots["key_group"] = self._slots["key_group"].int()

    def _write(self, name: str, new: Tensor, leaving: LeavingEntries) -> None:
        slots = self._slots[name][:, :, leaving.slots]
        if leaving.which is None:
            slots.copy_(new)
        else:
            mask = leaving.which if slots.dim() == 3 else leaving.which[..., None]
            slots.copy_(torch.where(mask, new, slots))

    def _pack(self, order: Tensor) -> None:
        front = (order < self._start) & (self._slots["positions"].gather(2, order) >= 0)
        # an empty tail stays empty: what rows with fewer entries hold behind them are empty slots
        start = int(front.sum(2).min()) if self._start < self.length else order.shape[2]
        places = (order[:, :, start:] - self._start).clamp(min=0)
        self._tail = (gather_entries(self._tail[0], places), gather_entries(self._tail[1], places))
        super()._pack(order)
        self._start, self._aligned = start, False

    def reindex(self, rows: Tensor) -> None:
        super().reindex(rows)
        self._tail = (self._tail[0][rows], self._tail[1][rows])
        self._done = tuple(done.of(rows) for done in self._done)
        if self._table is not None:
            self._table = self._table[rows]
        if self._hints is not None:
            self._hints.reindex(rows)

    def join(self, other: Store) -> None:
        assert isinstance(other, QuantisedStore)
        start, length = min(self._start, other._start), max(self.length, other.length)
        keys, values = zip(self._tail_of(start, length), other._tail_of(start, length), strict=True)
        self._tail = (torch.cat(keys), torch.cat(values))
        self._done = tuple(map(Counts.joined, self._done, other._done))
        self._aligned = self._aligned and other._aligned and self.length == other.length
        if self._table is not None and other._table is not None:
            groups = max(self._table.shape[2], other._table.shape[2])
            both = (self._table, other._table)
            self._table = torch.cat([torch.nn.functional.pad(t, (0, 0, 0, groups - t.shape[2])) for t in both])
        if self._hints is not None and other._hints is not None:
            self._hints.join(other._hints)
        super().join(other)
        self._start = start

    def _tail_of(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """The tail as one of the slots from ``start`` to ``length``; what is not of it is nowhere exact."""
        before, behind = self._start - start, length - self.length
        keys, values = (torch.nn.functional.pad(part, (0, 0, before, behind)) for part in self._tail)
        return keys, values

    def _held(self) -> Iterator[Tensor]:
        yield from super()._held()
        yield from self._tail
        if self._table is not None:
            yield self._table


def _from(tail: Tensor, first: int) -> Tensor:
    """What of the tail [N, tail, D] stands from a slot on; all of it costs no operator."""
    return tail[:, first:] if first else tail


def _among(at: Tensor, done: Counts, until: Counts) -> Tensor:
    """Which positions [B, H, n] are from ``done`` on and below ``until``."""
    return (at >= done.on(at.device)[:, None, None]) & (at < until.on(at.device)[:, None, None])
