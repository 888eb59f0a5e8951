"""The learner's forward over rollouts of a serving engine: every query reads keys and values as the engine stored them.

The prompt of a group is passed once, whole, as the engine prefills it; the suffixes attend to its keys. Its last token
is passed again with every suffix, as the query that predicts the first of them, since a block of keys that the engine
codes together may reach to it. Rows ``apart`` are passed whole, in one forward, to the same numbers.

Coding is an error that is added to a number: what was stored less what the engine ``wrote``, where it hands that out.
The learner's own keys and values are read with the errors of those of the engine, so they have their own gradient, and
move as the weights do in later updates of a batch. Codes of the learner's own would not do: codes are steps, and two
float32 arithmetics that differ in the last bit come to other codes here and there, then to others in every later layer.
They stand in where nothing is handed out.

An engine that hands out what its queries read, and not what it coded (``EngineStore.shown``), is read so: its numbers,
with the gradient of the learner's. They stand still where weights move, so such a rollout is good for one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvaudit.audit.cache.attention import AttentionCall, query_blocks, require_single_call
from kvaudit.audit.cache.engine_store import BLOCK, ByChannel, ByToken, EngineStore, Cast
from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies import Dense, softmax
from kvaudit.core.errors import DataError, RunError


def stored_logits(
    model: Any, rollouts: Sequence[Rollout], *, group: int, store: EngineStore, keep: int = 0, apart: bool = False
) -> tuple[Tensor, Tensor]:
    """Logits [B, R, V] that predict each suffix token, and the valid mask bool [B, R]; see ``suffix_logits``."""
    device = next(model.parameters()).device
    layers = _layers(model)
    if store.shown and any(rollout.written is None for rollout in rollouts):
        raise DataError("a rollout is without what its engine's queries read, which nothing else can stand in for")
    prefix, starts = None, [0] * len(rollouts)
    lengths = torch.tensor([r.prompt_length for r in rollouts])  # [B]; what is where is worked out on the host
    if not apart:
        group = group if _share(rollouts, group) else 1
        prefix = _prompts(model, rollouts[::group], store, layers, lengths[::group], device)
        # from the prompt's last token, which predicts the first of the suffix
        starts = [r.prompt_length - 1 for r in rollouts]
    # to the last token but one
    columns = pad_sequence([r.ids[start:-1] for r, start in zip(rollouts, starts, strict=True)], batch_first=True)
    counts = torch.tensor([len(r.ids) - 1 - start for r, start in zip(rollouts, starts, strict=True)])
    queries = _columns(counts, torch.tensor(starts))
    wrote = _wrote(rollouts, [(start, len(r.ids) - 1) for r, start in zip(rollouts, starts, strict=True)], device)
    context = StoredReplay(store, layers, queries, lengths, device, prefix=prefix, group=group, wrote=wrote)
    asked = {"logits_to_keep": keep} if keep else {}
    ids, at = upload(columns, device), context.queries
    output = model(input_ids=ids, position_ids=at.clamp(min=0), use_cache=False, kv=context, **asked)
    context.settle()
    return output.logits, at >= 0


def _prompts(
    model: Any, leaders: Sequence[Rollout], store: EngineStore, layers: int, lengths: Tensor, device: torch.device
) -> StoredReplay:
    """The prompt of each group, passed whole; ``lengths`` [groups] are its tokens."""
    ids = upload(pad_sequence([r.ids[: r.prompt_length] for r in leaders], batch_first=True), device)
    queries = _columns(lengths, torch.zeros_like(lengths))
    wrote = _wrote(leaders, [(0, r.prompt_length) for r in leaders], device)
    replay = StoredReplay(store, layers, queries, lengths, device, wrote=wrote)
    model(input_ids=ids, position_ids=replay.queries.clamp(min=0), use_cache=False, kv=replay, logits_to_keep=1)
    replay.settle()
    return replay


class StoredReplay:
    """Attention of one such pass; pass it to a model's forward as ``kv=``.

    ``queries`` are row positions [B, Q], -1 = padding; ``lengths`` [B] those of the prompts: both on the host, where
    it is worked out once which entry lies where, so that no layer waits for the ``device``. Without a ``prefix`` they
    begin at the first token; with one at the prompt's last, and each row of it stands before ``group``.
    ``wrote`` are the keys and values of the queries' tokens as the engine had them, [B, L, H, Q, D].
    """

    routes = None

    def __init__(
        self,
        store: EngineStore,
        layers: int,
        queries: Tensor,
        lengths: Tensor,
        device: torch.device,
        *,
        prefix: StoredReplay | None = None,
        group: int = 1,
        wrote: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._wrote = wrote
        self._store, self._layers = store, layers
        self._prefix, self._group, self._settled = prefix, group, False
        self._draws = bool((queries >= lengths[:, None]).any())  # or the queries are those of prompts alone
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self._host_queries = keys = queries
        if prefix is not None:  # the prompt's last token is a query again, and its key is the prompt's
            behind = torch.where(queries >= lengths[:, None], queries, -1)  # [B, Q]
            keys = torch.cat([prefix._host_queries.repeat_interleave(group, 0), behind], 1)
        self._shared = int(lengths.min()) // BLOCK  # blocks before are the prompt's alone
        self.queries, self._lengths = upload(queries, device), upload(lengths, device)
        self._keys = upload(keys, device)
        if isinstance(store.keys, ByChannel):
            self._place, self._there = (upload(part, device) for part in _places(keys))

    def settle(self) -> None:
        """After a forward: raise RunError where some layer did not attend through this replay."""
        if len(self.held) != self._layers:
            raise RunError(
                f"{len(self.held)} of the model's {self._layers} layers attended as the engine stored, the others saw "
                "what it did not; set the model's attention to kvaudit"
            )
        self._settled = True

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention output [B, G*H, Q, D] over the prompt and the new keys."""
        if not self._settled:  # a checkpointed layer runs again, but only once the forward is over
            require_single_call(call.layer, self.held, self._layers)
        self.held[call.layer] = (call.key, call.value)
        (key, value), (its_key, its_value) = self._with_prefix(call.layer), self._written(call.layer)
        values = self._as_read(self._store.values, value, its_value)
        kind = self._store.keys
        if isinstance(kind, ByChannel):
            return self._by_blocks(call, kind, (key, its_key), values)
        keys = self._as_read(kind, key, its_key)
        visible = (self._keys[:, None] >= 0) & (self._keys[:, None] <= self.queries[..., None])  # [B, Q, K]
        return _attention(call, keys, values, visible)

    def _as_read(self, kind: Cast | ByToken | None, own: Tensor, its: Tensor) -> Tensor:
        """Entries [B, H, K, D] that are coded one by one, of the learner's ``own`` and the engine's."""
        if self._store.shown:  # the learner's own as they are now, in the value of the engine's
            return _off_by(own, its, own.detach())
        return _off_by(own, its if kind is None else kind.read_back(its), its)

    def _with_prefix(self, layer: int) -> tuple[Tensor, Tensor]:
        """Own keys and values [B, H, K, D] of a layer, the prefix's before the new ones."""
        new = self.held[layer]
        if self._prefix is None:
            return new
        old = [part.repeat_interleave(self._group, 0) for part in self._prefix.held[layer]]
        return torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)

    def _written(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, K, D] as the engine wrote them, without gradient."""
        if self._wrote is None:
            key, value = self._with_prefix(layer)
            return key.detach(), value.detach()
        new = [part[:, layer] for part in self._wrote]
        if self._prefix is None:
            return new[0], new[1]
        assert self._prefix._wrote is not None
        old = [part[:, layer].repeat_interleave(self._group, 0) for part in self._prefix._wrote]
        return torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)

    def _by_blocks(self, call: AttentionCall, kind: ByChannel, keys: tuple[Tensor, Tensor], value: Tensor) -> Tensor:
        """Over keys laid out by position in blocks: [B, H, n, BLOCK, D], the first block at position 0.

        ``keys`` are the learner's own and the engine's.
        """
        place, there = self._place, self._there
        exact, its, values = (_gathered(part, place) for part in (*keys, value))  # [B, H, n * BLOCK, D]
        positions = torch.arange(place.shape[1], device=place.device)
        visible = there[:, None] & (positions <= self.queries[..., None])  # [B, Q, n * BLOCK]
        blocks, written = _in_blocks(its, 2), _in_blocks(there, 1)  # [B, H, n, BLOCK, D] and [B, n, BLOCK]
        prompt = written & _in_blocks(positions < self._lengths[:, None], 1)
        # as the prefill coded them, all entries of a block at once
        first = kind.read_back(blocks, prompt[:, None])
        if not self._draws and self._prefix is None:
            return _attention(call, _off_by(exact, first.flatten(2, 3), its), values, visible)
        start = self._shared
        tail = kind.read_in_order(blocks[:, :, start:], prompt[:, start:], written[:, start:])
        # queries of later blocks read a block as it was when its last entry joined
        later = torch.cat([first[:, :, :start], tail.later], 2).flatten(2, 3)
        near = self._own((_in_blocks(exact, 2), blocks), first, tail.own, start)
        return _attention(call, _off_by(exact, later, its), values, visible, near)

    def _own(self, blocks: tuple[Tensor, Tensor], first: Tensor, own: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Keys [B, H, Q, BLOCK, D] of each query's own block as it read them, and their first columns [B, Q].

        ``blocks`` are the learner's keys and the engine's, [B, H, n, BLOCK, D].
        """
        at = self.queries.clamp(min=0)
        block, place = at // BLOCK, at % BLOCK  # each [B, Q]
        rows = torch.arange(len(at), device=at.device)[:, None]
        tail = own[rows, :, (block - start).clamp(min=0), place]  # [B, Q, H, BLOCK, D]
        # the prompt's last token read what the prefill had written
        early = (at < self._lengths[:, None])[..., None, None, None]
        read = torch.where(early, first[rows, :, block], tail)
        exact, its = (part[rows, :, block] for part in blocks)
        return _off_by(exact, read, its).transpose(1, 2), block * BLOCK


def _places(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The column of each position [B, n * BLOCK] of ``keys`` [B, K], and whether it has one."""
    width = (int(keys.max()) // BLOCK + 1) * BLOCK
    place = torch.full((len(keys), width + 1), -1)
    columns = torch.arange(keys.shape[1]).expand_as(keys)
    place.scatter_(1, torch.where(keys >= 0, keys, width), columns)  # padding into the last, cut off
    place = place[:, :width]
    return place.clamp(min=0), place >= 0


def _attention(
    call: AttentionCall, keys: Tensor, values: Tensor, visible: Tensor, own: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Softmax attention [B, G*H, Q, D]; ``own`` keys take the place of those from their columns on.

    Logits and softmax are float32 at least.
    """
    batch, heads, length, size = call.query.shape
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    packed = call.query.reshape(batch, keys.shape[1], -1, length, size).to(dtype)
    parts = []
    for some in query_blocks(length, batch * heads * keys.shape[2]):
        logits = torch.einsum("bhgqd,bhkd->bhgqk", packed[:, :, :, some], keys.to(dtype)) * call.scaling
        if own is not None:
            near = (
                torch.einsum("bhgqd,bhqkd->bhgqk", packed[:, :, :, some], own[0][:, :, some].to(dtype)) * call.scaling
            )
            columns = own[1][:, some, None] + torch.arange(near.shape[-1], device=near.device)  # [B, q, BLOCK]
            logits = logits.scatter(-1, columns[:, None, None].expand_as(near), near)
        # padding, which sees nothing, is left to see all: otherwise it would be NaN
        hidden = ~visible[:, None, None, some] & (visible[:, some].any(-1))[:, None, None, :, None]
        shares = softmax(logits.masked_fill(hidden, float("-inf")), call.sink_logits)
        parts.append(torch.einsum("bhgqk,bhkd->bhgqd", shares, values.to(dtype)))
    return torch.cat(parts, 3).reshape(batch, heads, length, -1).to(call.query.dtype)


def _share(rollouts: Sequence[Rollout], group: int) -> bool:
    """Whether the engine wrote the same for the prompt in all rows of a group: some read it once for every row."""
    for n, rollout in enumerate(rollouts):
        leader, length = rollouts[n - n % group], rollout.prompt_length
        for own, first in zip(rollout.written or (), leader.written or (), strict=True):
            if own is not first and not torch.equal(own[:, :, :length], first[:, :, :length]):
                return False
    return True


def _wrote(
    rollouts: Sequence[Rollout], parts: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """What the engine wrote of some tokens of each row, right-padded: keys and values [B, L, H, columns, D]."""
    known = [r.written for r in rollouts if r.written is not None]
    if not known:
        return None
    assert len(known) == len(rollouts), "some rollouts of a batch have what the engine wrote, others have not"
    width = max(end - start for start, end in parts)
    both = []
    for which in (0, 1):
        rows = [own[which][:, :, start:end] for own, (start, end) in zip(known, parts, strict=True)]
        both.append(upload(torch.stack([pad(row, (0, 0, 0, width - row.shape[2])) for row in rows]), device))
    return both[0], both[1]


def _in_blocks(x: Tensor, dim: int) -> Tensor:
    """A dimension of n * BLOCK entries as two."""
    return x.reshape(*x.shape[:dim], -1, BLOCK, *x.shape[dim + 1 :])


def _gathered(part: Tensor, place: Tensor) -> Tensor:
    """Columns [B, H, n, D] of [B, H, K, D] at ``place`` [B, n]."""
    index = place[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3])
    return part.gather(2, index)


def _columns(counts: Tensor, start: Tensor) -> Tensor:
    """Row positions [B, longest] from ``start`` [B] on, ``counts`` [B] of them, then -1."""
    columns = torch.arange(int(counts.max()))
    return torch.where(columns < counts[:, None], columns + start[:, None], -1)


def _layers(model: Any) -> int:
    plans = layer_plans(model.config, Dense())
    if not all(plan.has_entries and plan.sliding_window is None for plan in plans):
        raise DataError(
            "some layers of the model attend to a window or carry a state, and how an engine stores those is not "
            "known; take an arm whose learner sees the dense view"
        )
    return len(plans)


def _off_by(own: Tensor, stored: Tensor, wrote: Tensor) -> Tensor:
    """The learner's ``own`` numbers, as far off as what was ``stored`` is from what the engine ``wrote``."""
    return own + (stored - wrote)
