"""The learner's forward over rollouts of a serving engine, with keys and values as the engine stored (rounded) them.

The whole prompt of a group of rollouts is passed once, as the engine prefills it, and the suffixes (all later tokens)
attend to its keys. The prompt's last token is passed again with every suffix, as the query that predicts the first
suffix token, because an engine may quantise it in one block with the suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvaudit.audit.cache.attention import AttentionCall, query_blocks, require_single_call
from kvaudit.audit.cache.engine_store import BLOCK, ByChannel, ByToken, Cast, EngineStore
from kvaudit.audit.cache.layers import layer_plans
from kvaudit.audit.cache.ledger import Rollout
from kvaudit.audit.cache.tensors import gather_columns, upload
from kvaudit.audit.policies import Dense, softmax
from kvaudit.audit.replay.attention import position_columns, run_forward
from kvaudit.core.errors import DataError, RunError


def stored_logits(
    model: Any, rollouts: Sequence[Rollout], *, group: int, store: EngineStore, logits_to_keep: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the logits [B, R, V] that predict each suffix token, and the mask bool [B, R] of valid ones.

    Queries read keys and values in the form in which the engine stored them, which ``store`` describes. The other
    arguments are those of ``suffix_logits``.
    """
    device = next(model.parameters()).device
    layers = _count_layers(model)
    if store.shown and any(rollout.written is None for rollout in rollouts):
        raise DataError("a rollout lacks the keys that its engine's queries read, so it cannot be replayed")
    lengths = torch.tensor([r.prompt_length for r in rollouts])  # [B]; positions are computed on the host
    group = group if _wrote_same_prompts(rollouts, group) else 1
    prefix = _prompts(model, rollouts[::group], store, layers, lengths[::group], device)
    starts = [r.prompt_length - 1 for r in rollouts]  # the prompt's last token predicts the first suffix token
    # up to the last token, which predicts nothing
    columns = pad_sequence([r.ids[start:-1] for r, start in zip(rollouts, starts, strict=True)], batch_first=True)
    counts = torch.tensor([len(r.ids) - 1 - start for r, start in zip(rollouts, starts, strict=True)])
    queries = position_columns(counts, torch.tensor(starts))
    written = _engine_spans(
        rollouts, [(start, len(r.ids) - 1) for r, start in zip(rollouts, starts, strict=True)], device
    )
    replay = StoredReplay(store, layers, queries, lengths, device, prefix=prefix, group=group, written=written)
    return run_forward(model, columns, replay, logits_to_keep), replay.queries >= 0


def _prompts(
    model: Any, leaders: Sequence[Rollout], store: EngineStore, layers: int, lengths: Tensor, device: torch.device
) -> StoredReplay:
    """Run the model on the prompts of all groups; return the ``StoredReplay`` that computed the attention.

    It holds the prompts' keys and values, to which the suffixes attend. ``leaders`` are the first rollouts of the
    groups, ``lengths`` [groups] the tokens of their prompts.
    """
    ids = pad_sequence([r.ids[: r.prompt_length] for r in leaders], batch_first=True)
    queries = position_columns(lengths, torch.zeros_like(lengths))
    written = _engine_spans(leaders, [(0, r.prompt_length) for r in leaders], device)
    replay = StoredReplay(store, layers, queries, lengths, device, written=written)
    run_forward(model, ids, replay, 1)
    return replay


class StoredReplay:
    """The attention over entries as an engine stored them; pass it to a model's forward as ``kv=``.

    The engine's quantisation error (stored - written) is added to the learner's keys and values, which keep their
    gradient and follow later weight updates. If the engine exports nothing, the learner's own keys and values are
    quantised; this is less exact, since a difference in the last bit changes codes in every later layer. If the engine
    exports what its queries read (``EngineStore.shown``), that replaces the learner's numbers, and is valid for one
    update only.

    ``prefix`` is the earlier pass over the prompts, whose keys and values this pass reads; each of its rows serves
    ``group`` rows. Without a prefix, this is that pass over the prompts. With one, this pass covers each row from the
    last token of its prompt on. ``queries`` [B, Q] are the positions of the passed tokens in their rows, -1 = padding,
    and ``lengths`` [B] the lengths of the prompts. Both are on the CPU, so that no layer waits for the ``device``.
    ``written`` are the keys and values of the passed tokens that the engine exported, [B, L, H, Q, D] each.
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
        written: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._written = written
        self._store, self._layers = store, layers
        self._prefix, self._group, self._settled = prefix, group, False
        self.keys_values: dict[int, tuple[Tensor, Tensor]] = {}
        self._host_queries = keys = queries
        if prefix is not None:  # the prompt's last token is a query here, but its key is in the prefix
            suffix = torch.where(queries >= lengths[:, None], queries, -1)  # [B, Q]
            keys = torch.cat([prefix._host_queries.repeat_interleave(group, 0), suffix], 1)
        self._prompt_blocks = int(lengths.min()) // BLOCK  # first blocks that hold prompt entries only
        self.queries, self._lengths = upload(queries, device), upload(lengths, device)
        self._keys = upload(keys, device)
        if isinstance(store.keys, ByChannel):
            self._key_columns, self._has_key = (upload(x, device) for x in _columns_by_position(keys))

    def settle(self) -> None:
        """Check a finished forward: raise RunError if a layer did not use this object for its attention."""
        if len(self.keys_values) != self._layers:
            raise RunError(
                f"{len(self.keys_values)} of the model's {self._layers} layers attended as the engine stored; the "
                "others read other keys and values; set the model's attention to kvaudit"
            )
        self._settled = True

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [B, G*H, Q, D] over the prompt and the new keys."""
        if not self._settled:  # a checkpointed layer runs again, but only after the forward has ended
            require_single_call(call.layer, self.keys_values, self._layers)
        self.keys_values[call.layer] = (call.key, call.value)
        (key, value), (engine_key, engine_value) = self._learner_entries(call.layer), self._engine_entries(call.layer)
        values = self._as_read(self._store.values, value, engine_value)
        coding = self._store.keys
        if isinstance(coding, ByChannel):
            return self._attend_by_blocks(call, coding, (key, engine_key), values)
        keys = self._as_read(coding, key, engine_key)
        visible = (self._keys[:, None] >= 0) & (self._keys[:, None] <= self.queries[..., None])  # [B, Q, K]
        return _attention(call, keys, values, visible)

    def _as_read(self, coding: Cast | ByToken | None, learner: Tensor, engine: Tensor) -> Tensor:
        """Return the learner's keys, or values, [B, H, K, D] as the engine's queries would have read them.

        ``engine`` are those that the engine wrote, and ``coding`` how it rounded each entry (None: not at all).
        """
        if self._store.shown:  # the engine's value, the learner's gradient
            return _add_error(learner, engine, learner.detach())
        return _add_error(learner, engine if coding is None else coding.read_back(engine), engine)

    def _learner_entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the learner's keys and values [B, H, K, D] of a layer, the prefix's before the new ones."""
        new = self.keys_values[layer]
        if self._prefix is None:
            return new
        old = [x.repeat_interleave(self._group, 0) for x in self._prefix.keys_values[layer]]
        return torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)

    def _engine_entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, K, D] as the engine wrote them, without gradient; the learner's if unknown."""
        if self._written is None:
            key, value = self._learner_entries(layer)
            return key.detach(), value.detach()
        new = [x[:, layer] for x in self._written]
        if self._prefix is None:
            return new[0], new[1]
        assert self._prefix._written is not None
        old = [x[:, layer].repeat_interleave(self._group, 0) for x in self._prefix._written]
        return torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)

    def _attend_by_blocks(
        self, call: AttentionCall, coding: ByChannel, keys: tuple[Tensor, Tensor], value: Tensor
    ) -> Tensor:
        """Return attention [B, G*H, Q, D] over keys that the engine quantised in blocks of BLOCK positions, from 0 on.

        ``keys`` are the learner's and the engine's, [B, H, K, D] each.
        """
        places, has_key = self._key_columns, self._has_key
        exact, engine, values = (gather_columns(x, places) for x in (*keys, value))  # [B, H, n * BLOCK, D]
        positions = torch.arange(places.shape[1], device=places.device)
        visible = has_key[:, None] & (positions <= self.queries[..., None])  # [B, Q, n * BLOCK]
        blocks, present = _in_blocks(engine, 2), _in_blocks(has_key, 1)  # [B, H, n, BLOCK, D] and [B, n, BLOCK]
        prompt = present & _in_blocks(positions < self._lengths[:, None], 1)
        # the prefill codes all entries of a block at once
        prefilled = coding.read_back(blocks, prompt[:, None])
        if self._prefix is None:
            return _attention(call, _add_error(exact, prefilled.flatten(2, 3), engine), values, visible)
        start = self._prompt_blocks
        tail = coding.read_in_order(blocks[:, :, start:], prompt[:, start:], present[:, start:])
        # queries of later blocks read a block as it was when its last entry joined
        later = torch.cat([prefilled[:, :, :start], tail.later], 2).flatten(2, 3)
        near = self._block_of_query((_in_blocks(exact, 2), blocks), prefilled, tail.same_block, start)
        return _attention(call, _add_error(exact, later, engine), values, visible, near)

    def _block_of_query(
        self, blocks: tuple[Tensor, Tensor], prefilled: Tensor, tail: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        """Return, for each query, the keys of the block that it is in, and the position at which that block begins.

        Keys are [B, H, Q, BLOCK, D], positions [B, Q]. The engine quantises a block again whenever a key joins it, so
        each query of a block reads the same keys with other rounding errors. ``blocks`` are the exact keys of the
        learner and of the engine, [B, H, n, BLOCK, D]. A query in the prompt reads the block as the prefill left it
        (``prefilled``, [B, H, n, BLOCK, D]). A later query reads it as it was at that query: ``tail``, for the blocks
        from number ``start`` on (``BlockReads.same_block``).
        """
        at = self.queries.clamp(min=0)
        block, place = at // BLOCK, at % BLOCK  # each [B, Q]
        rows = torch.arange(len(at), device=at.device)[:, None]
        read_late = tail[rows, :, (block - start).clamp(min=0), place]  # [B, Q, H, BLOCK, D]
        # the prompt's last token read what the prefill had written
        is_prompt = (at < self._lengths[:, None])[..., None, None, None]
        read = torch.where(is_prompt, prefilled[rows, :, block], read_late)
        exact, engine = (x[rows, :, block] for x in blocks)
        return _add_error(exact, read, engine).transpose(1, 2), block * BLOCK


def _columns_by_position(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each position, the index along K of its key, and whether there is one: [B, n * BLOCK] each.

    ``keys`` [B, K] are the positions of the keys, -1 = padding.
    """
    width = (int(keys.max()) // BLOCK + 1) * BLOCK
    place = torch.full((len(keys), width + 1), -1)
    columns = torch.arange(keys.shape[1]).expand_as(keys)
    place.scatter_(1, torch.where(keys >= 0, keys, width), columns)  # padding goes to the last column, cut off
    place = place[:, :width]
    return place.clamp(min=0), place >= 0


def _attention(
    call: AttentionCall, keys: Tensor, values: Tensor, visible: Tensor, near: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return softmax attention [B, G*H, Q, D] of the call's queries over ``keys``, computed in float32 or wider.

    ``near``, if given, is a pair: keys [B, H, Q, BLOCK, D] and columns [B, Q]. Each query then reads its own BLOCK keys
    instead of those that ``keys`` has from its column (index along K) on.
    """
    batch, heads, length, size = call.query.shape
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    packed = call.query.reshape(batch, keys.shape[1], -1, length, size).to(dtype)
    outputs = []
    for block in query_blocks(length, batch * heads * keys.shape[2]):
        query = packed[:, :, :, block]
        logits = torch.einsum("bhgqd,bhkd->bhgqk", query, keys.to(dtype)) * call.scaling
        if near is not None:
            near_logits = torch.einsum("bhgqd,bhqkd->bhgqk", query, near[0][:, :, block].to(dtype)) * call.scaling
            columns = near[1][:, block, None] + torch.arange(BLOCK, device=keys.device)  # [B, q, BLOCK]
            logits = logits.scatter(-1, columns[:, None, None].expand_as(near_logits), near_logits)
        # padding sees nothing, which would be NaN: it sees all instead
        hidden = ~visible[:, None, None, block] & (visible[:, block].any(-1))[:, None, None, :, None]
        shares = softmax(logits.masked_fill(hidden, float("-inf")), call.sink_logits)
        outputs.append(torch.einsum("bhgqk,bhkd->bhgqd", shares, values.to(dtype)))
    return torch.cat(outputs, 3).reshape(batch, heads, length, -1).to(call.query.dtype)


def _wrote_same_prompts(rollouts: Sequence[Rollout], group: int) -> bool:
    """Return whether the engine wrote the same prompt entries in all rows of each group.

    An engine that prefills the prompt again for every row may write different ones.
    """
    for n, rollout in enumerate(rollouts):
        leader, length = rollouts[n - n % group], rollout.prompt_length
        for entries, expected in zip(rollout.written or (), leader.written or (), strict=True):
            if entries is not expected and not torch.equal(entries[:, :, :length], expected[:, :, :length]):
                return False
    return True


def _engine_spans(
    rollouts: Sequence[Rollout], spans: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return the keys and values that the engine wrote in a span [start, end) of each row: [B, L, H, n, D] each.

    Rows are right-padded to the longest span, n. None if the engine exports no keys and values.
    """
    written = [r.written for r in rollouts if r.written is not None]
    if not written:
        return None
    assert len(written) == len(rollouts), "some rollouts of a batch have what the engine wrote, others have not"
    width = max(end - start for start, end in spans)
    keys_values = []
    for part in (0, 1):
        rows = [pair[part][:, :, start:end] for pair, (start, end) in zip(written, spans, strict=True)]
        keys_values.append(upload(torch.stack([pad(row, (0, 0, 0, width - row.shape[2])) for row in rows]), device))
    return keys_values[0], keys_values[1]


def _in_blocks(x: Tensor, dim: int) -> Tensor:
    """Split dimension ``dim`` of n * BLOCK entries into [n, BLOCK]."""
    return x.reshape(*x.shape[:dim], -1, BLOCK, *x.shape[dim + 1 :])


def _count_layers(model: Any) -> int:
    plans = layer_plans(model.config, Dense())
    if not all(plan.has_entries and plan.sliding_window is None for plan in plans):
        raise DataError(
            "some layers of the model have a sliding window or a recurrent state, and how the engine stores those is "
            "unknown; take an arm whose learner sees the dense view"
        )
    return len(plans)


def _add_error(learner: Tensor, stored: Tensor, written: Tensor) -> Tensor:
    """Return the learner's keys or values plus the engine's rounding error, ``stored`` - ``written``."""
    return learner + (stored - written)
