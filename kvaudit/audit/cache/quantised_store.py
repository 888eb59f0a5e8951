"""The store that quantises entries once they leave the residual window (the newest tokens, which stay exact).

Every slot has room for a code. Exact (unquantised) keys and values exist only for the last slots, the tail. It begins
at the first entry that is not yet quantised in some row or head, or a few slots before it. Whether an entry is read
from its code depends on its position alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvaudit.audit.cache.codes import (
    CodeProducts,
    Scratch,
    decode_keys,
    decode_tokens,
    drop_empty_groups,
    encode_groups,
    encode_runs,
    encode_tokens,
    pack,
    parameters_of,
    split_last,
    spread_scales,
    token_logits,
    token_mix,
    unpack,
)
from kvaudit.audit.cache.hints import HINT_BATCH, KEYS, VALUES, HintRecorder
from kvaudit.audit.cache.rows import Counts, TailLayout, span_of
from kvaudit.audit.cache.store import SLACK, Entries, EntryBytes, Store
from kvaudit.audit.cache.tensors import gather_entries
from kvaudit.audit.policies import Quantiser, softmax

PARTS = ("key", "value")
MAX_INT16_GROUPS = 2**15 - 1  # group numbers that fit an int16
HOST_EXACT, DEVICE_EXACT = 1 << 24, 1 << 28  # bytes of one layer's keys that are decoded together for attention
_ALL = slice(None)


class DueEntries(NamedTuple):
    """The exact entries to quantise now.

    ``slots`` is their range in the store. ``mask`` bool [B, H, slots] marks the due ones in each row and head, None if
    all are due. ``places`` (on the CPU) are the indices within ``slots`` at which any row has a due entry, None if all
    are or it is unknown. ``groups`` holds two numbers, if known: the most groups of keys that these entries form in a
    row, and the most groups that a row has once they are quantised.
    """

    slots: slice
    mask: Tensor | None
    places: Tensor | None = None
    groups: tuple[int, int] | None = None


class QuantisedStore(Store):
    """The keys and values of one layer by slot (as in ``Store``); ``flush`` quantises the entries that are due.

    The newest entries are exact. They are in the tail, which covers the last slots.
    """

    def __init__(
        self, codec: Quantiser, layer: int, scratch: Scratch, layout: TailLayout | None, *, accumulates: bool = False
    ) -> None:
        super().__init__(accumulates=accumulates)
        self._layout = layout  # None if entries are evicted: then only the device knows the positions
        self._codec, self._layer, self._products = codec, layer, CodeProducts(codec, scratch)
        self._fixed: tuple[Tensor | None, ...] = (None, None)  # fixed scales [H] of keys and values
        self._numbers = 0  # parameters per group
        self._start = 0  # first slot of the tail
        self._tail = (torch.empty(0), torch.empty(0))  # keys, values [B, H, length - start, D]
        self._empty_tail = self._tail
        self._table: Tensor | None = None  # parameters of key groups [B, H, G, P * D], D innermost
        self._done: tuple[Counts, ...] = ()  # the positions below which keys and values are quantised
        self._aligned = True  # slot n holds position n, so groups of keys are runs of slots
        self._hints: HintRecorder | None = None  # part of the record, not counted in ``bytes``

    def _allocate(self, key: Tensor, value: Tensor) -> None:
        batch, heads, _, size = key.shape
        codec, bits = self._codec, self._codec.bits
        self._hints = HintRecorder(codec, batch)
        self._tail = self._empty_tail = (key[:, :, :0].clone(), value[:, :, :0].clone())
        self._done = (Counts([0] * batch),) * len(PARTS)
        sample = key.new_zeros(1)
        self._numbers = codec.fit(sample, sample).shape[-1]
        scales = (codec.fixed_scales(self._layer, part, heads) for part in range(len(PARTS)))
        self._fixed = tuple(None if fixed is None else fixed.to(key) for fixed in scales)
        coded_bytes = []  # of the code of an entry, with its share of the parameters
        for name, tensor in zip(PARTS, (key, value), strict=True):
            width, entry_bytes = tensor.shape[3], tensor.shape[3] * bits / 8
            self._slots[f"{name}_codes"] = tensor.new_zeros(batch, heads, 0, width * bits // 8, dtype=torch.uint8)
            if name == "key" and codec.key_group:
                entry_bytes += width * self._numbers * tensor.element_size() / codec.key_group
            elif self._fixed[0] is None:
                count = width // codec.channels(width) * self._numbers
                self._slots[f"{name}_parameters"] = tensor.new_zeros(batch, heads, 0, count)
                entry_bytes += count * tensor.element_size()
            coded_bytes.append(entry_bytes)
        self.entry_bytes = EntryBytes(self.entry_bytes.exact, (coded_bytes[0], coded_bytes[1]))
        if codec.key_group:
            self._blank["key_group"] = -1
            self._slots["key_group"] = key.new_zeros(batch, heads, 0, dtype=torch.int16)
            self._table = key.new_zeros(batch, heads, 0, size * self._numbers)

    def _fill(self, start: int, key: Tensor, value: Tensor, first_position: int | None) -> None:
        if start == self._start:
            self._tail = (key, value)
        else:
            self._tail = (torch.cat([self._tail[0], key], 2), torch.cat([self._tail[1], value], 2))
        self._aligned = self._aligned and first_position == start

    def read(self) -> Iterator[Entries]:
        """Yield all entries, decoded, in blocks of rows of bounded size."""
        for rows in self._row_blocks():
            yield Entries(rows, *self.entries(rows))

    def _row_blocks(self) -> list[slice]:
        keys = self._tail[0]
        row_bytes = keys.shape[1] * self.length * keys.shape[3] * keys.element_size()
        max_bytes = HOST_EXACT if keys.device.type == "cpu" else DEVICE_EXACT
        step = max(1, max_bytes // max(row_bytes, 1))
        return [slice(first, first + step) for first in range(0, len(keys), step)]

    def entries(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        codes = unpack(self._slots_of("value_codes", rows), self._codec.bits)
        values = decode_tokens(codes, self._parameters(VALUES, rows), self._codec)
        return self._decoded_keys(rows), self._with_tail(self._codec.turned(values, VALUES), VALUES, rows)

    def _slots_of(self, name: str, rows: Tensor | slice, until: int | None = None) -> Tensor:
        """Return the tensor ``name`` of some rows in the slots before ``until``, by default in all slots in use."""
        return self._slots[name][rows, :, : self.length if until is None else until]

    def _decoded_keys(self, rows: Tensor | slice) -> Tensor:
        codec = self._codec
        codes = unpack(self._slots_of("key_codes", rows), codec.bits)
        if self._table is None:
            keys = decode_tokens(codes, self._parameters(KEYS, rows), codec)
            return self._with_tail(codec.turned(keys, KEYS), KEYS, rows)
        table = self._table[rows]
        if self._groups_are_runs and table.shape[2]:
            coded = min(table.shape[2] * codec.key_group, self.length)
            runs = codes[:, :, :coded].reshape(*codes.shape[:2], -1, codec.key_group, codes.shape[-1])
            parameters = self._split_channels(table)[:, :, :, None]
            decoded = decode_keys(runs, parameters.expand(*runs.shape, -1), codec).flatten(2, 3)
            if self._done[KEYS].smallest == coded:  # the others are in the tail
                return torch.cat([decoded, self._tail[KEYS][rows, :, coded - self._start :]], 2)
            missing = decoded.new_zeros(*decoded.shape[:2], self.length - coded, decoded.shape[3])
            keys = torch.cat([decoded, missing], 2)
        elif table.shape[2]:
            parameters = self._split_channels(parameters_of(self._slots_of("key_group", rows), table))
            keys = decode_keys(codes, parameters, codec)
        else:
            keys = self._tail[0].new_zeros(codes.shape)
        return self._with_tail(keys, KEYS, rows)

    @property
    def _groups_are_runs(self) -> bool:
        """Whether each group of keys quantised together fills consecutive slots, in the order of the groups.

        The table of the groups' scales then has one row for each of these groups and no other rows.
        """
        return self._aligned

    def _split_channels(self, table: Tensor) -> Tensor:
        """Reshape the scales of groups of keys, rows of the table [..., P * D], to parameters [..., D, P]."""
        return split_last(table, self._tail[0].shape[3]).transpose(-1, -2)

    def _parameters(self, part: int, rows: Tensor | slice, until: int | None = None) -> Tensor:
        """Return the P parameters (scale, zero) of each of n channel groups of entries: [b, H, length, n, P].

        The entries are keys (``part`` 0) or values (1) coded per token.
        """
        scales = self._fixed[part]
        if scales is not None:
            return spread_scales(scales, self._slots_of(f"{PARTS[part]}_codes", rows, until))
        return split_last(self._slots_of(f"{PARTS[part]}_parameters", rows, until), self._numbers)

    def _is_exact(self, part: int, rows: Tensor | slice) -> Tensor:
        done = self._done[part].to(self.positions.device)[rows]
        return self.positions[rows, :, self._start :] >= done[:, None, None]

    def _with_tail(self, decoded: Tensor, part: int, rows: Tensor | slice) -> Tensor:
        """Write the keys (``part`` 0) or values (1) that are still exact into ``decoded``, and return it."""
        done = max(self._done[part].smallest, self._start)
        if self._aligned:  # the same number in all rows
            if done < self.length:
                decoded[:, :, done:].copy_(self._tail[part][rows, :, done - self._start :])
        elif self._start < self.length:
            is_exact, tail = self._is_exact(part, rows), self._tail[part][rows]
            decoded[:, :, self._start :] = torch.where(is_exact[..., None], tail, decoded[:, :, self._start :])
        return decoded

    @property
    def attends_codes(self) -> bool:
        """Whether ``attend_one`` may be used: only in float32 and float64 does it round as a learner's replay does."""
        return self._tail[0].dtype in (torch.float32, torch.float64)

    def attend_one(
        self, query: Tensor, visible: Tensor | None, scaling: float, sink_logits: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [B, G*H, 1, D] of one query per row, computed with codes.
        ``visible`` bool [B, H, 1, length], None for all.
        """
        batch, heads, length, size = len(query), self._tail[0].shape[1], self.length, query.shape[3]
        scaled = query.reshape(batch * heads, -1, size) * scaling  # [N, X, D], N = B * H
        logits = self._all_logits(scaled)
        if visible is not None:
            logits = logits.view(batch, heads, -1, length).masked_fill(~visible, float("-inf")).flatten(0, 1)
        if sink_logits is None:
            shares = logits.softmax(-1)
        else:
            shares = softmax(logits.view(batch, heads, -1, 1, length), sink_logits).flatten(2, 3).flatten(0, 1)
        return self._mix_all(shares).reshape(*query.shape[:3], -1)

    def _all_logits(self, query: Tensor) -> Tensor:
        """Return the logits [N, X, length] of ``query`` [N, X, D] with all keys, from codes and from exact keys.

        N is rows times KV heads, X the queries of each.
        """
        keys, done = self._tail[KEYS].flatten(0, 1), self._done[KEYS].smallest
        if self._aligned:  # the same number in all rows
            exact = torch.bmm(query, _tail_from(keys, done - self._start).transpose(1, 2))
            return torch.cat([self._code_logits(query, done), exact], 2) if done else exact
        logits, tail = self._code_logits(query, self.length), torch.bmm(query, keys.transpose(1, 2))
        is_exact = self._is_exact(KEYS, _ALL).flatten(0, 1)[:, None]
        logits[..., self._start :] = torch.where(is_exact, tail, logits[..., self._start :])
        return logits

    def _mix_all(self, shares: Tensor) -> Tensor:
        """Return the sums [N, X, D] of all values, weighted by ``shares`` [N, X, length]; overwrites ``shares``.

        N is rows times KV heads, X the queries of each.
        """
        values, done = self._tail[VALUES].flatten(0, 1), self._done[VALUES].smallest
        if self._aligned:
            exact_values = _tail_from(values, done - self._start)
            if not done:
                return torch.bmm(shares, exact_values)
            code_shares, exact_shares = torch.split(shares, [done, shares.shape[2] - done], 2)
            return torch.baddbmm(self._mix_codes(code_shares), exact_shares, exact_values)
        tail = shares[..., self._start :]
        exact_shares = tail * self._is_exact(VALUES, _ALL).flatten(0, 1)[:, None]
        tail -= exact_shares  # codes of entries that are exact count nothing
        return torch.baddbmm(self._mix_codes(shares), exact_shares, values)

    def _code_logits(self, query: Tensor, until: int) -> Tensor:
        """Return the logits [N, X, until] of ``query`` with the codes of the keys in the first ``until`` slots.

        They are meaningless for keys that are not quantised yet.
        """
        if self._table is None:
            codes, parameters = self._slots_of("key_codes", _ALL, until), self._parameters(KEYS, _ALL, until)
            return token_logits(self._codec.turned(query, KEYS), codes, parameters, self._products)
        if self._aligned:  # keys become codes in whole runs
            return self._products.logits(query, self._slots_of("key_codes", _ALL, until), self._table)
        by_row = query.view(len(self._tail[0]), -1, *query.shape[1:])  # [B, H, X, D]
        logits = [by_row[rows] @ self._decoded_keys(rows).transpose(2, 3) for rows in self._row_blocks()]
        return torch.cat(logits).flatten(0, 1)

    def _mix_codes(self, shares: Tensor) -> Tensor:
        until = shares.shape[2]
        codes, parameters = self._slots_of("value_codes", _ALL, until), self._parameters(VALUES, _ALL, until)
        return self._codec.turned(token_mix(shares, codes, parameters, self._products), VALUES)

    @property
    def on_write(self) -> bool:
        """Whether new entries are quantised before their own queries attend."""
        return self._codec.on_write

    def flush(self, keys_until: Counts, values_until: Counts) -> None:
        """Quantise keys at positions below ``keys_until`` and values below ``values_until``."""
        values = self._find_due(VALUES, values_until)
        if values and self._can_code_together(keys_until, values_until, values):
            self._code_both(values)
        else:
            if values:
                self._code_tokens(VALUES, values)
            keys = self._find_due(KEYS, keys_until)
            if keys and self._table is None:
                self._code_tokens(KEYS, keys)
            elif keys and self._table is not None:
                self._code_groups(self._table, keys)
        self._done = (keys_until, values_until)
        self._shorten_tail()

    def _find_due(self, part: int, until: Counts) -> DueEntries | None:
        """Return the keys (``part`` 0) or values (1) that are exact and below position ``until``; None if none are."""
        done = self._done[part]
        if self._aligned:  # slots are positions, and all rows and heads are equally far
            first, end = done.smallest, until.smallest
            return DueEntries(slice(first, end), None) if first < end else None
        positions = self.positions[:, :, self._start :]
        if self._layout is not None:
            self._layout.set_if_unknown(positions[:, 0])
            span = self._layout.span_between(done, until)
        else:
            columns = _is_between(positions, done, until).any(0).any(0).nonzero()[:, 0]
            span = span_of(columns) if len(columns) else None
        if span is None:
            return None
        # within the span the entries of some rows and heads may stay exact
        mask = _is_between(positions[:, :, span.first : span.end], done, until)
        slots = slice(self._start + span.first, self._start + span.end)
        return DueEntries(slots, mask, span.places, self._group_counts(done, until))

    def _group_counts(self, done: Counts, until: Counts) -> tuple[int, int] | None:
        """Return how many groups the keys from ``done`` up to ``until`` form, and how many there are up to ``until``.

        A group is a number of consecutive keys that are quantised together. Both numbers are those of the row with the
        most groups. None if they are unknown: if the policy evicts, if keys are not coded in groups, or if a group is
        not full.
        """
        size = self._codec.key_group
        if self._layout is None or not size or any(count % size for count in until.numbers):
            return None
        new = max(end - start for start, end in zip(done.numbers, until.numbers, strict=True))
        return new // size, until.largest // size

    def _shorten_tail(self) -> None:
        """Free the slots of the exact copy (the tail) before the first entry that some row or head has not quantised.

        If slot s holds position s, at least ``SLACK`` slots are freed at a time, because freeing copies the rest of the
        tail.
        """
        if self._aligned:
            slots = min(done.smallest for done in self._done) - self._start
            if slots < min(SLACK, self._tail[KEYS].shape[2]):
                slots = 0
            if self._layout is not None:
                self._layout.set_freed(slots)
        elif self._layout is not None:
            slots = self._layout.freed(*self._done)
        else:
            is_exact = (self._is_exact(KEYS, _ALL) | self._is_exact(VALUES, _ALL)).any(0).any(0)
            slots = int(is_exact.int().argmax()) if bool(is_exact.any()) else len(is_exact)
        if slots:
            self._start += slots
            self._tail = self._copy_tail(slots)

    def _copy_tail(self, first: int) -> tuple[Tensor, Tensor]:
        keys, values = self._tail
        if first < keys.shape[2]:
            return keys[:, :, first:].clone(), values[:, :, first:].clone()
        if len(self._empty_tail[0]) != len(keys):  # made once: with many codecs every step leaves an empty tail
            self._empty_tail = (keys[:, :, :0].clone(), values[:, :, :0].clone())
        return self._empty_tail

    def _exact_entries(self, part: int, slots: slice) -> Tensor:
        tail, first, end = self._tail[part], slots.start - self._start, slots.stop - self._start
        return tail if (first, end) == (0, tail.shape[2]) else tail[:, :, first:end]

    def _code_tokens(self, part: int, entries: DueEntries) -> None:
        exact = self._codec.turned(self._exact_entries(part, entries.slots), part)
        codes, parameters = encode_tokens(exact, self._codec, self._fixed[part])
        self._record_hints(part, exact, codes, parameters, entries)
        self._write(f"{PARTS[part]}_codes", pack(codes, self._codec.bits), entries)
        if self._fixed[part] is None:
            self._write(f"{PARTS[part]}_parameters", parameters.flatten(-2), entries)

    def _can_code_together(self, keys_until: Counts, values_until: Counts, entries: DueEntries) -> bool:
        """Return whether ``_code_both`` applies: the same few entries are due in keys and values, with equal shapes."""
        pairs = ((keys_until, values_until), (self._done[KEYS], self._done[VALUES]))
        are_same = all(keys.numbers == values.numbers for keys, values in pairs)
        are_few = entries.slots.stop - entries.slots.start < HINT_BATCH  # a prompt's would be copied
        by_token = self._table is None and self._fixed[KEYS] is None
        return are_same and are_few and by_token and self._tail[KEYS].shape == self._tail[VALUES].shape

    def _code_both(self, entries: DueEntries) -> None:
        """Quantise keys and values of the same entries at once, with half the operators that two calls would take."""
        # [2, B, H, slots, D]
        exact = torch.stack(
            [self._codec.turned(self._exact_entries(part, entries.slots), part) for part in (KEYS, VALUES)]
        )
        codes, parameters = encode_tokens(exact, self._codec)
        positions = self._due_positions(entries)
        positions = positions if isinstance(positions, int) else positions.clone()
        assert self._hints is not None
        by_part = (tensor.unbind(0) for tensor in (exact, codes, parameters))
        for part, x, part_codes, fitted in zip((KEYS, VALUES), *by_part, strict=True):
            self._hints.add(part, x, part_codes, fitted, entries.mask, positions, entries.places, is_copy=True)
            self._write(f"{PARTS[part]}_codes", pack(part_codes, self._codec.bits), entries)
            self._write(f"{PARTS[part]}_parameters", fitted.flatten(-2), entries)

    def _code_groups(self, table: Tensor, entries: DueEntries) -> None:
        """Quantise the keys in ``entries``, with one scale per channel, in groups of consecutive slots.

        If these keys differ between rows or heads, each head makes its own groups, in the order of its slots.
        """
        exact = self._exact_entries(KEYS, entries.slots)
        new_groups, all_groups = entries.groups or (None, None)
        if entries.mask is None:
            codes, group, parameters = encode_runs(exact, self._codec)
            by_key = parameters.repeat_interleave(self._codec.key_group, 2)
        else:
            codes, group, parameters = encode_groups(exact, entries.mask, self._codec, new_groups)
            by_key = parameters_of(group, parameters)
        self._record_hints(KEYS, exact, codes, by_key, entries)
        # detached: decoded numbers are written into scratch memory, which has no gradient
        self._table = torch.cat([table, parameters.detach().transpose(-1, -2).flatten(-2)], 2)
        if self._table.shape[2] > MAX_INT16_GROUPS:
            self._slots["key_group"] = self._slots["key_group"].int()
        self._write("key_codes", pack(codes, self._codec.bits), entries)
        if entries.mask is None:
            self._write("key_group", group + table.shape[2], entries)
        else:
            self._write("key_group", (group + table.shape[2]).to(self._slots["key_group"].dtype), entries)
            used = self._slots["key_group"][:, :, : self.length]
            group, self._table = drop_empty_groups(used.long(), self._table, all_groups)
            used.copy_(group)

    def _write(self, name: str, new: Tensor, entries: DueEntries) -> None:
        slots = self._slots[name][:, :, entries.slots]
        if entries.mask is None:
            slots.copy_(new)
        else:
            mask = entries.mask if slots.dim() == 3 else entries.mask[..., None]
            slots.copy_(torch.where(mask, new, slots))

    def _record_hints(self, part: int, x: Tensor, codes: Tensor, parameters: Tensor, entries: DueEntries) -> None:
        assert self._hints is not None
        positions = self._due_positions(entries)
        self._hints.add(part, x, codes, parameters, entries.mask, positions, entries.places)

    def _due_positions(self, entries: DueEntries) -> Tensor | int:
        """Return the positions [B, H, slots] of the entries to quantise; if slot s holds position s, only the first."""
        return entries.slots.start if self._aligned else self._slots["positions"][:, :, entries.slots]

    def hints_of(self, row: int, layer: int, layers: int) -> tuple[Tensor, Tensor]:
        """Return a row's rounding hints, as element numbers and low bits of ranks (see ``hints``).

        This store is that of layer ``layer`` of ``layers``.
        """
        assert self._hints is not None
        keys, values = self._tail
        return self._hints.row_hints(row, layer, layers, keys.shape[1], max(keys.shape[3], values.shape[3]))

    def _pack(self, order: Tensor) -> None:
        in_front = (order < self._start) & (self._slots["positions"].gather(2, order) >= 0)
        # an empty tail stays empty: in shorter rows only empty slots follow the entries
        start = int(in_front.sum(2).min()) if self._start < self.length else order.shape[2]
        tail_order = (order[:, :, start:] - self._start).clamp(min=0)
        self._tail = (gather_entries(self._tail[0], tail_order), gather_entries(self._tail[1], tail_order))
        super()._pack(order)
        self._start, self._aligned = start, False

    def reindex(self, rows: Tensor) -> None:
        super().reindex(rows)
        self._tail = (self._tail[0][rows], self._tail[1][rows])
        self._done = tuple(done.select(rows) for done in self._done)
        if self._table is not None:
            self._table = self._table[rows]
        if self._hints is not None:
            self._hints.reindex(rows)

    def join(self, other: Store) -> None:
        assert isinstance(other, QuantisedStore)
        start, length = min(self._start, other._start), max(self.length, other.length)
        keys, values = zip(self._pad_tail(start, length), other._pad_tail(start, length), strict=True)
        self._tail = (torch.cat(keys), torch.cat(values))
        self._done = tuple(map(Counts.concat, self._done, other._done))
        self._aligned = self._aligned and other._aligned and self.length == other.length
        if self._table is not None and other._table is not None:
            groups = max(self._table.shape[2], other._table.shape[2])
            tables = (self._table, other._table)
            self._table = torch.cat([pad(table, (0, 0, 0, groups - table.shape[2])) for table in tables])
        if self._hints is not None and other._hints is not None:
            self._hints.join(other._hints)
        super().join(other)
        self._start = start

    def _pad_tail(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the exact keys and values of the last slots (the tail), padded with zeros.

        They then cover the slots from ``start`` to ``length`` - 1.
        """
        padding = (0, 0, self._start - start, length - self.length)
        keys, values = (pad(tensor, padding) for tensor in self._tail)
        return keys, values

    def _tensors(self) -> Iterator[Tensor]:
        yield from super()._tensors()
        yield from self._tail
        if self._table is not None:
            yield self._table


def _tail_from(tail: Tensor, first: int) -> Tensor:
    return tail[:, first:] if first else tail


def _is_between(positions: Tensor, done: Counts, until: Counts) -> Tensor:
    """Return which positions [B, H, n] are at least ``done`` and below ``until``; both bounds have a number per row."""
    device = positions.device
    return (positions >= done.to(device)[:, None, None]) & (positions < until.to(device)[:, None, None])
