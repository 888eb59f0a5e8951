"""The learner's forward: one parallel pass in which every query sees exactly what it saw while sampling.

The rollouts of a group share their prompt, so the prompt is passed once (queries of the prompt see only prompt keys,
alike for the whole group) and the suffixes attend to its keys: P + G·R tokens instead of G·(P + R). Gradients flow
through the shared keys. With ``view="dense"`` the same pass runs without the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from audit.cache.attention import causal_attention, grouped_attention, query_blocks, require_once
from audit.cache.layers import LayerPlan, kv_heads, layer_plans
from audit.cache.ledger import NEVER, Rollout
from audit.cache.linear import Run, States, advance
from audit.cache.quantised.hints import KEYS, VALUES, HintTable, Place, Strays
from audit.cache.rotary import require_steady
from audit.cache.routing import NOBODY, ReplayedRoutes, check_experts
from audit.cache.selection import Choices, Selection, choices_of
from audit.core.errors import DataError, RunError
from audit.policies import parse_policy
from audit.replay.fake import Codes, Late, codec_named, fake_keys, fake_values, two_precisions

LearnerView = Literal["dense", "shadow"]


class Replay:
    """Attention of one learner pass; pass it to a model's forward as ``kv=``.

    ``queries`` and ``keys`` are row positions [B, Q] and [B, K] (-1 = padding), the last Q keys being the queries' own;
    ``evicted_at`` is int32 [B, L, H, K] or None for the dense view. With ``prefix`` the keys and values of an earlier
    pass stand before the new ones, each of its rows repeated ``group`` times. ``codes`` says since when keys and values
    were seen quantised, ``experts`` [B, Q, M, k] where the model's M mixture-of-experts blocks sent each query's token,
    ``choices`` which keys a query attended to where it chose.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        queries: Tensor,
        keys: Tensor,
        evicted_at: Tensor | None,
        *,
        codes: Codes | None = None,
        experts: Tensor | None = None,
        choices: Choices | None = None,
        prefix: Replay | None = None,
        group: int = 1,
        last: bool = True,
    ) -> None:
        self._codes, self._choices = codes, choices
        self.routes = None if experts is None else ReplayedRoutes(experts)
        self._plans, self._queries, self._keys, self._evicted_at = plans, queries, keys, evicted_at
        self._prefix, self._group, self._learns = prefix, group, torch.is_grad_enabled()
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, States] = {}
        self._real, self._last = (queries >= 0).cpu(), last
        self._settled = False

    def settle(self) -> None:
        """After a forward: raise RunError where some layer did not attend through this replay."""
        attending, carrying = sum(p.attends for p in self._plans), sum(p.carries for p in self._plans)
        if len(self.held) != attending or len(self.states) != carrying:
            done = len(self.held.keys() | self.states.keys())
            raise RunError(
                f"{done} of the model's {len(self._plans)} layers attended under the ledger, the others saw "
                "what the sampler did not; set the model's attention to kvaudit"
            )
        self._settled = True
        if self.routes:
            self.routes.settle()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Shapes as in ``audit.cache.attention.Attends``."""
        if not self._settled:  # a checkpointed layer runs again, but only once the forward is over
            require_once(layer, self.held, len(self._plans))
        self.held[layer] = (key, value)
        if self._prefix is not None:
            if self._learns and not torch.is_grad_enabled():
                raise RunError(
                    "gradient checkpointing with use_reentrant=True loses the gradient of the prompt that a group "
                    "shares; use gradient_checkpointing_kwargs={'use_reentrant': False}"
                )
            before = [t.repeat_interleave(self._group, 0) for t in self._prefix.held[layer]]
            key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
        window = self._plans[layer].sliding_window
        chosen = self._choices is not None and layer in self._choices.slots
        if self._codes and window is None:
            return self._quantised(layer, query, key, value, scaling, sink_logits)
        plain = self._evicted_at is None and self._prefix is None and not chosen
        if plain and (window is None or query.shape[2] <= window):
            return causal_attention(query, key, value, scaling, sink_logits)
        heads = query.shape[1] if chosen else 1 if self._evicted_at is None else key.shape[1]
        parts = [
            grouped_attention(query[:, :, part], key, value, self._visible(layer, part), scaling, sink_logits)
            for part in query_blocks(query.shape[2], len(query) * heads * key.shape[2])
        ]
        return torch.cat(parts, 2)

    def carry(self, layer: int, hidden: Tensor, run: Run) -> Tensor:
        """See ``EvictingCache.carry``; a group takes its prompt's states over, with their gradient."""
        states = States() if self._prefix is None else self._prefix.states[layer].repeated(self._group)
        out = advance(run, hidden, self._real, states, last=self._last)
        self.states[layer] = states
        return out

    def _quantised(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sink_logits: Tensor | None
    ) -> Tensor:
        codes = self._codes
        assert codes is not None
        stored, parts = self._stored(layer, key, value, codes), []
        for part in query_blocks(query.shape[2], len(query) * query.shape[1] * key.shape[2]):
            at = self._queries[:, part, None]
            late = Late(*stored, at >= codes.keys_at[:, None], at >= codes.values_at[:, None])
            visible = self._visible(layer, part)
            parts.append(two_precisions(query[:, :, part], key, value, visible, late, scaling, sink_logits))
        return torch.cat(parts, 2)

    def _stored(self, layer: int, key: Tensor, value: Tensor, codes: Codes) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, K, D] as the cache's codes give them back."""
        gone = None if self._evicted_at is None else self._evicted_at[:, layer]
        keys, values = (Place(layer, part, max(key.shape[3], value.shape[3])) for part in (KEYS, VALUES))
        return fake_keys(key, self._keys, gone, codes, keys), fake_values(value, codes, values)

    def _visible(self, layer: int, part: slice) -> Tensor:
        """Bool [B, 1, H or G*H, part, K]: j <= i < evicted_at[j] and chosen by i; padding queries see everything."""
        q, k = self._queries[:, None, part, None], self._keys[:, None, None]
        visible = (k >= 0) & (k <= q)
        window = self._plans[layer].sliding_window
        if window is not None:
            visible = visible & (q - k < window)
        if self._evicted_at is not None:
            visible = visible & (q < self._evicted_at[:, layer, :, None])
        if self._choices is not None and layer in self._choices.slots:
            chosen = self._choices.visible(layer, self._queries[:, part], self._keys)
            apart = max(1, chosen.shape[1] // visible.shape[1]) if visible.shape[1] > 1 else 1
            visible = visible.repeat_interleave(apart, 1) & chosen
        return visible | (q < 0)


def replay_logits(
    model: Any, ids: Tensor, positions: Tensor, evicted_at: Tensor | None, codes: Codes | None = None
) -> Tensor:
    """Logits [B, T, V] of one pass over padded rows: ids and positions [B, T] (-1 = padding, any side).

    ``evicted_at`` int32 [B, L, H, T] lies along the columns of ``ids``, as do ``codes``; None is the dense pass.
    """
    plans = layer_plans(model.config, parse_policy("none"))
    if evicted_at is None:
        evicted_at = torch.full((1, len(plans), 1, 1), NEVER, device=ids.device)  # padding may be on the left
    context = Replay(plans, positions, positions, evicted_at, codes=codes)
    logits: Tensor = model(input_ids=ids, position_ids=positions.clamp(min=0), use_cache=False, kv=context).logits
    context.settle()
    return logits


def suffix_logits(
    model: Any,
    rollouts: Sequence[Rollout],
    *,
    group: int,
    view: LearnerView,
    reroute: bool = False,
    strays: Strays | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits that predict each suffix token, prompts passed once per group.

    ``rollouts`` are whole groups of ``group`` rows that share a prompt (first ``prompt_length`` ids) and its ledger.
    Returns logits [B, R, V] for tokens ``prompt_length .. T-1`` (right-padded) and the valid mask bool [B, R].
    With ``reroute`` a mixture-of-experts model chooses its experts anew, as it does in the dense view. ``strays`` grows
    by row and layer of every recorded code that is at no border in the replay. Raises DataError where the ledger does
    not fit the model or the group.
    """
    device = next(model.parameters()).device
    plans = layer_plans(model.config, parse_policy("none"))
    leaders = rollouts[::group]
    _check(rollouts, group, plans, model)
    shadow = view == "shadow"
    check_experts([rollout.experts for rollout in rollouts], model, reroute=reroute or not shadow)
    routed = shadow and not reroute and rollouts[0].experts is not None
    # the last prompt token predicts the first suffix token, so it is the first query of the second pass
    prompts = pad_sequence([r.ids[: r.prompt_length - 1] for r in leaders], batch_first=True).to(device)
    before = _positions([r.prompt_length - 1 for r in leaders], 0).to(device)
    suffixes = pad_sequence([r.ids[r.prompt_length - 1 : -1] for r in rollouts], batch_first=True).to(device)
    start = torch.tensor([r.prompt_length - 1 for r in rollouts])
    after = _positions([len(r.ids) - r.prompt_length for r in rollouts], start[:, None]).to(device)
    prefix, longest = None, max(len(rollout.ids) for rollout in rollouts)
    if prompts.shape[1]:
        gone = _columns(leaders, prompts.shape[1], device, prompt=True) if shadow else None
        codes = codes_of(leaders, before) if shadow else None
        experts = _experts(leaders, prompts.shape[1], device, prompt=True) if routed else None
        chosen = choices_of([r.selection for r in leaders], longest, device) if shadow else None
        prefix = Replay(plans, before, before, gone, codes=codes, experts=experts, choices=chosen, last=False)
        model(input_ids=prompts, position_ids=before.clamp(min=0), use_cache=False, kv=prefix, logits_to_keep=1)
        prefix.settle()
    keys = torch.cat([before.repeat_interleave(group, 0), after], 1)
    gone, codes = None, None
    if shadow:
        codes = codes_of(rollouts, keys, strays)
        own = _columns(rollouts, suffixes.shape[1], device, prompt=False)
        gone = torch.cat([_columns(rollouts, prompts.shape[1], device, prompt=True), own], 3)
    experts = _experts(rollouts, suffixes.shape[1], device, prompt=False) if routed else None
    chosen = choices_of([r.selection for r in rollouts], longest, device) if shadow else None
    context = Replay(plans, after, keys, gone, codes=codes, experts=experts, choices=chosen, prefix=prefix, group=group)
    output = model(input_ids=suffixes, position_ids=after.clamp(min=0), use_cache=False, kv=context)
    context.settle()
    return output.logits, after >= 0


def _positions(lengths: Sequence[int], start: Tensor | int) -> Tensor:
    columns = torch.arange(max(lengths))
    return torch.where(columns < torch.tensor(lengths)[:, None], columns + start, -1)


def _columns(rollouts: Sequence[Rollout], width: int, device: torch.device, *, prompt: bool) -> Tensor:
    """The ledger of the prompt's or the suffix's keys, right-padded to ``width``: int32 [B, L, H, width]."""
    parts = []
    for rollout in rollouts:
        cut = rollout.prompt_length - 1
        part = rollout.evicted_at[:, :, :cut] if prompt else rollout.evicted_at[:, :, cut:-1]
        parts.append(pad(part, (0, width - part.shape[2]), value=NEVER))
    return torch.stack(parts).to(device)


def _experts(rollouts: Sequence[Rollout], width: int, device: torch.device, *, prompt: bool) -> Tensor:
    """Where the prompt's or the suffix's tokens were sent, right-padded to ``width``: [B, width, M, k]."""
    parts = []
    for rollout in rollouts:
        assert rollout.experts is not None
        cut = rollout.prompt_length - 1
        part = rollout.experts[:cut] if prompt else rollout.experts[cut:-1]
        parts.append(pad(part, (0, 0, 0, 0, 0, width - len(part)), value=NOBODY))
    return torch.stack(parts).to(device)


def codes_of(rollouts: Sequence[Rollout], positions: Tensor, strays: Strays | None = None) -> Codes | None:
    """What the cache had quantised, along columns at row positions [B, K]; None where nothing was."""
    if not rollouts[0].codec:
        return None
    keys, values = (
        _times([getattr(rollout, name) for rollout in rollouts], positions)
        for name in ("keys_quantised_at", "values_quantised_at")
    )
    nothing = torch.zeros(0, dtype=torch.uint16)
    words = [nothing if rollout.hints is None else rollout.hints for rollout in rollouts]
    hints = HintTable(words, positions, rollouts[0].evicted_at.shape[0], strays)
    return Codes(codec_named(rollouts[0].codec), keys, values, hints)


def _times(rows: Sequence[Tensor], positions: Tensor) -> Tensor:
    """Times [T] of each row along columns at row positions [B, K]."""
    times = pad_sequence(list(rows), batch_first=True, padding_value=NEVER).to(positions.device)
    return torch.where(positions >= 0, times.gather(1, positions.clamp(min=0).long()), NEVER)


def _check(rollouts: Sequence[Rollout], group: int, plans: Sequence[LayerPlan], model: Any) -> None:
    assert len(rollouts) % group == 0, (len(rollouts), group)
    require_steady(model.config, max(len(rollout.ids) for rollout in rollouts) - 1)
    wanted = (len(plans), kv_heads(model.config))
    for n, rollout in enumerate(rollouts):
        got = tuple(rollout.evicted_at.shape[:2])
        if got != wanted:
            raise DataError(f"the ledger has {got} layers and KV heads, the model {wanted}: it is of another model")
        _check_leader(n, rollout, rollouts[n - n % group])
        if rollout.codec != rollouts[0].codec:
            raise DataError(
                f"rollout {n} was quantised by {rollout.codec or 'nothing'}, the first of its batch was not"
            )


def _check_leader(number: int, rollout: Rollout, leader: Rollout) -> None:
    """A group's prompt is passed once, so its members must agree on it and on what its queries saw."""
    length = leader.prompt_length
    if rollout.prompt_length != length or not torch.equal(rollout.ids[:length], leader.ids[:length]):
        raise DataError(f"rollout {number} does not share its group's prompt")
    # times after the prompt's last query may differ: they are the suffix's own
    if not _same(leader.experts, rollout.experts, length - 1):
        raise DataError(f"rollout {number} sent its prompt to other experts than its group")
    if not _chose_alike(leader.selection, rollout.selection, length - 1):
        raise DataError(f"rollout {number} attended to other keys of its prompt than its group")
    theirs, own = (r.evicted_at[:, :, : length - 1].clamp(max=length - 1) for r in (leader, rollout))
    if not torch.equal(theirs, own):
        raise DataError(
            f"rollout {number} has another prompt ledger than its group: its prompt was compressed otherwise"
        )


def _same(one: Tensor | None, other: Tensor | None, length: int) -> bool:
    """Whether two optional records agree on their first ``length`` tokens."""
    if one is None or other is None:
        return one is other
    return torch.equal(one[:length], other[:length])


def _chose_alike(one: Selection | None, other: Selection | None, length: int) -> bool:
    """The same for what their first ``length`` queries attended to; no record is one of no choice."""
    early = [None if s is None else s.until(length) for s in (one, other)]
    some = [s for s in early if s is not None and len(s.queries)]
    if len(some) < 2:
        return not some
    return (some[0].unit, some[0].layers) == (some[1].unit, some[1].layers) and all(
        torch.equal(getattr(some[0], name), getattr(some[1], name)) for name in ("queries", "chosen")
    )
