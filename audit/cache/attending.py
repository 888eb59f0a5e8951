"""What one layer of the compressing cache is made of, and attention over what it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from audit.cache.attention import causal_attention, grouped_attention, query_blocks
from audit.cache.evict import visibility
from audit.cache.layers import LayerPlan
from audit.cache.moments import QueryCentres, QueryMoments
from audit.cache.quantised.store import QuantisedStore
from audit.cache.reposition import MovingSinks
from audit.cache.rotary import Rotary
from audit.cache.selection import units_seen
from audit.cache.store import Part, Store


def new_store(layer: int, plan: LayerPlan) -> Store:
    """An empty store for a layer's policy."""
    evictor, codec = plan.policy.evictor, plan.policy.quantiser
    if codec is None:
        return Store(accumulates=evictor.accumulates, observed_queries=evictor.observed_queries)
    return QuantisedStore(codec, layer, accumulates=evictor.accumulates, observed_queries=evictor.observed_queries)


def new_moments(plan: LayerPlan, rotary: Rotary | None) -> QueryMoments | None:
    """Query statistics, where the layer's policy asks for them."""
    evictor = plan.policy.evictor
    return QueryMoments(rotary, evictor.sink) if rotary and evictor.moments else None


def new_centres(plan: LayerPlan, rotary: Rotary | None) -> QueryCentres | None:
    """Centres of queries, where the layer's policy asks for them."""
    return QueryCentres(rotary) if rotary and plan.policy.evictor.centres else None


def new_sinks(plan: LayerPlan, rotary: Rotary | None) -> MovingSinks | None:
    """Sinks that move, where the layer's policy counts positions inside the cache."""
    evictor = plan.policy.evictor
    return MovingSinks(rotary, evictor.sink) if rotary and evictor.repositions else None


def store_attention(
    store: Store,
    query: Tensor,
    at: Tensor,
    scaling: float,
    sink_logits: Tensor | None = None,
    *,
    window: int | None,
    whole: bool,
    padded: bool,
) -> Tensor:
    """Attention output [B, G*H, Q, D] of the newest queries, at row positions ``at`` [B, Q] (-1 = padding).

    ``window`` is the model's own; ``whole`` says that the store holds just these queries' rows from their start,
    ``padded`` that some row holds fewer entries than there are slots. Masks are bounded, whatever the length.
    """
    if isinstance(store, QuantisedStore) and query.shape[2] == 1 and store.attends_codes:
        visible = visibility(at, store.positions, window) if padded else None
        return store.attend_one(query, visible, scaling, sink_logits)
    out = []
    for part in store.read():
        rows = part.rows
        if whole:
            out.append(causal_attention(query[rows], part.keys, part.values, scaling, sink_logits))
        elif query.shape[2] == 1 and window is None and not padded:
            out.append(grouped_attention(query[rows], part.keys, part.values, None, scaling, sink_logits))
        else:
            out.append(_masked(part, store, query[rows], at[rows], scaling, sink_logits, window))
    return out[0] if len(out) == 1 else torch.cat(out)


def _masked(
    part: Part,
    store: Store,
    query: Tensor,
    at: Tensor,
    scaling: float,
    sink_logits: Tensor | None,
    window: int | None,
) -> Tensor:
    positions = store.positions[part.rows, :1] if store.uniform else store.positions[part.rows]
    groups = query.shape[1] // part.keys.shape[1]
    elements = len(query) * positions.shape[1] * groups * store.length
    parts = []
    for some in query_blocks(query.shape[2], elements):
        visible = visibility(at[:, some], positions, window)
        parts.append(grouped_attention(query[:, :, some], part.keys, part.values, visible, scaling, sink_logits))
    return torch.cat(parts, 2)


def chosen_attention(
    store: Store,
    query: Tensor,
    at: Tensor,
    scaling: float,
    sink_logits: Tensor | None = None,
    *,
    units: Tensor,
    unit: int,
    most: int,
) -> Tensor:
    """Attention output [B, G*H, 1, D] of one query per row over the units [B, A, k] it chose, all below ``most``.

    For a store that nothing leaves, so that every head holds the same positions.
    """
    assert query.shape[2] == 1, query.shape
    chosen = units_seen(units[:, :, None], store.positions[:, 0], unit, most)
    # a row that is fed nothing sees everything: its output is never used, but must stay finite
    visible = (visibility(at, store.positions[:, :1], None) & chosen) | (at < 0)[:, None, None]
    return grouped_attention(query, store.keys, store.values, visible, scaling, sink_logits)


def columns(tensor: Tensor, order: Tensor) -> Tensor:
    """Columns of [B, H, Q, D] in another order [B, Q] per row."""
    return tensor.gather(2, order[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))
