"""The learner's forward: one parallel pass in which every query sees exactly what it saw while sampling.

The rollouts of a group share their prompt, so the prompt is passed once (queries of the prompt see only prompt keys,
alike for the whole group) and the suffixes attend to its keys: P + G·R tokens instead of G·(P + R). Gradients flow
through the shared keys. The dense pass is the same without the ledger.

A model whose weights lie in several processes gathers them layer by layer, by hooks that see what goes into a layer and
comes out of it, and no keys that are handed on aside. For it every row is passed ``apart``, whole, in one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvaudit.audit.cache.layers import LayerPlan, kv_heads, layer_plans
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.cache.hints import Strays
from kvaudit.audit.cache.rotary import require_rotary_length
from kvaudit.audit.cache.routing import NO_EXPERT, check_experts
from kvaudit.audit.cache.selection import Selection, batch_choices
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies import Dense
from kvaudit.audit.replay.attention import Replay
from kvaudit.audit.replay.attention import codes_of
from kvaudit.audit.replay.learner_pass import LogitsHead, capture_states
from kvaudit.audit.replay.stored_pass import stored_logits
from kvaudit.core.errors import DataError

LearnerPass = Literal["dense", "shadow"]


def suffix_states(
    model: Any, rollouts: Sequence[Rollout], *, group: int, kind: LearnerPass, apart: bool = False
) -> tuple[Tensor, Tensor, LogitsHead]:
    """``suffix_logits`` without the logits: last hidden states [B, R, D], the valid mask, and the head they go to."""
    with capture_states(model) as head:
        _, valid = suffix_logits(model, rollouts, group=group, kind=kind, keep=1, apart=apart)
    return head.states(), valid, head


def shared_tokens(rollout: Rollout, *, apart: bool = False) -> int:
    """How many first tokens of a row are passed once for its group; the first query behind them is theirs to predict.

    All of the prompt but its last token, which predicts the first of the suffix.
    """
    return 0 if apart else rollout.prompt_length - 1


def suffix_logits(
    model: Any,
    rollouts: Sequence[Rollout],
    *,
    group: int,
    kind: LearnerPass,
    reroute: bool = False,
    strays: Strays | None = None,
    keep: int = 0,
    apart: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logits that predict each suffix token, prompts passed once per group.

    ``rollouts`` are whole groups of ``group`` rows that share a prompt (first ``prompt_length`` ids) and its ledger.
    Returns logits [B, R, V] for tokens ``prompt_length .. T-1`` (right-padded) and the valid mask bool [B, R].
    With ``reroute`` a mixture-of-experts model chooses its experts anew, as it does in the dense pass. ``strays`` grows
    by row and layer of every recorded code that is at no border in the replay. ``keep`` asks for logits of the last
    columns only, 0 for all. Rows that are passed ``apart`` have a column for every token but the first. What an engine
    stored is replayed by ``stored_logits``. Raises DataError where the ledger does not fit the model or the group.
    """
    stored = rollouts[0].stored
    if kind == "shadow" and stored is not None:
        return stored_logits(model, rollouts, group=group, store=stored, keep=keep, apart=apart)
    device = next(model.parameters()).device
    plans = layer_plans(model.config, Dense())
    group = 1 if apart else group
    leaders, cuts = rollouts[::group], [shared_tokens(rollout, apart=apart) for rollout in rollouts]
    _check(rollouts, group, plans, model)
    shadow = kind == "shadow"
    check_experts([rollout.experts for rollout in rollouts], model, reroute=reroute or not shadow)
    routed = shadow and not reroute and rollouts[0].experts is not None
    # the last prompt token predicts the first suffix token, so it is the first query of the second pass
    # without the last token, which was drawn and predicts nothing
    early, late = [slice(cut) for cut in cuts], [slice(cut, -1) for cut in cuts]
    prompts = _tokens(leaders, early[::group])
    before = _positions(cuts[::group], 0)
    suffixes = _tokens(rollouts, late)
    # tokens behind the shared ones, without the last
    lengths = [len(r.ids) - 1 - cut for r, cut in zip(rollouts, cuts, strict=True)]
    after = _positions(lengths, torch.tensor(cuts)[:, None])
    prefix, longest = None, max(len(rollout.ids) for rollout in rollouts)
    if prompts.shape[1]:  # a prompt of one token is all in the second pass
        evicted_at = _columns(leaders, early[::group], prompts.shape[1]) if shadow else None
        at = upload(before, device)
        codes = codes_of(leaders, at) if shadow else None  # strays are counted below, where these keys come again
        if codes is not None and not codes.seen_by(at):  # made after the prefill, as most are
            codes = None
        experts = _experts(leaders, early[::group], prompts.shape[1], device) if routed else None
        chosen = batch_choices([r.selection for r in leaders], longest, device) if shadow else None
        prefix = Replay(
            plans, before, before, evicted_at, codes=codes, experts=experts, choices=chosen, last=False, device=device
        )
        # run for its keys and states; logits of at least one token cannot be declined
        ids, places = upload(prompts, device), at.clamp(min=0)
        model(input_ids=ids, position_ids=places, use_cache=False, kv=prefix, logits_to_keep=1)
        prefix.settle()
    keys = torch.cat([before.repeat_interleave(group, 0), after], 1)  # [B, columns of prompts and of suffixes]
    evicted_at, codes = None, None
    if shadow:
        codes = codes_of(rollouts, upload(keys, device), strays)
        own = _columns(rollouts, late, suffixes.shape[1])
        evicted_at = torch.cat([_columns(rollouts, early, prompts.shape[1]), own], 3)  # the same columns
    experts = _experts(rollouts, late, suffixes.shape[1], device) if routed else None
    chosen = batch_choices([r.selection for r in rollouts], longest, device) if shadow else None
    context = Replay(
        plans,
        after,
        keys,
        evicted_at,
        codes=codes,
        experts=experts,
        choices=chosen,
        prefix=prefix,
        group=group,
        device=device,
    )
    asked = {"logits_to_keep": keep} if keep else {}
    ids, at = upload(suffixes, device), upload(after, device)
    output = model(input_ids=ids, position_ids=at.clamp(min=0), use_cache=False, kv=context, **asked)
    context.settle()
    return output.logits, at >= 0


def _positions(lengths: Sequence[int], start: Tensor | int) -> Tensor:
    columns = torch.arange(max(lengths))
    return torch.where(columns < torch.tensor(lengths)[:, None], columns + start, -1)


def _tokens(rollouts: Sequence[Rollout], parts: Sequence[slice]) -> Tensor:
    """A part of every row's ids, right-padded: int64 [B, width]."""
    return pad_sequence([r.ids[part] for r, part in zip(rollouts, parts, strict=True)], batch_first=True)


def _columns(rollouts: Sequence[Rollout], parts: Sequence[slice], width: int) -> Tensor:
    """The ledger of the keys of a part of every row, right-padded to ``width``: int32 [B, L, H, width]."""
    found = [rollout.evicted_at[:, :, part] for rollout, part in zip(rollouts, parts, strict=True)]
    return torch.stack([pad(own, (0, width - own.shape[2]), value=NEVER) for own in found])


def _experts(rollouts: Sequence[Rollout], parts: Sequence[slice], width: int, device: torch.device) -> Tensor:
    """Where the tokens of a part of every row were sent, right-padded to ``width``: [B, width, M, k]."""
    found = []
    for rollout, part in zip(rollouts, parts, strict=True):
        assert rollout.experts is not None
        own = rollout.experts[part]
        found.append(pad(own, (0, 0, 0, 0, 0, width - len(own)), value=NO_EXPERT))
    return torch.stack(found).to(device)


def _check(rollouts: Sequence[Rollout], group: int, plans: Sequence[LayerPlan], model: Any) -> None:
    assert len(rollouts) % group == 0, (len(rollouts), group)
    require_rotary_length(model.config, max(len(rollout.ids) for rollout in rollouts) - 1)  # the last token is not fed
    wanted = (len(plans), kv_heads(model.config))
    for n, rollout in enumerate(rollouts):
        got = tuple(rollout.evicted_at.shape[:2])
        if got != wanted:
            raise DataError(f"the ledger has {got} layers and KV heads, the model {wanted}: it is of another model")
        _check_leader(n, rollout, rollouts[n - n % group])
        if rollout.codec != rollouts[0].codec:
            used = "nothing" if rollout.codec is None else rollout.codec.canonical
            raise DataError(f"rollout {n} was quantised by {used}, the first of its batch was not")


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
