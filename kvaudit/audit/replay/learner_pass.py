"""The learner's forward: one parallel pass in which every query sees exactly what it saw while sampling.

The prompt of a group of rollouts is passed once, and the suffixes (all later tokens) attend to its keys: P + G*R
tokens, for a prompt of P tokens and G suffixes of R, instead of G*(P + R). Gradients flow through the shared keys. That
is the shadow pass; the dense pass is the same without the ledger, so every query sees all earlier keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvaudit.audit.cache.attention import find_decoder
from kvaudit.audit.cache.hints import Strays
from kvaudit.audit.cache.layers import LayerPlan, kv_heads, layer_plans
from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.cache.rotary import require_rotary_length
from kvaudit.audit.cache.routing import NO_EXPERT, check_experts
from kvaudit.audit.cache.selection import Selection, batch_choices
from kvaudit.audit.cache.tensors import upload
from kvaudit.audit.policies import Dense
from kvaudit.audit.replay.attention import Replay, position_columns, quantisation_times, run_forward
from kvaudit.audit.replay.stored_pass import stored_logits
from kvaudit.core.errors import DataError, RunError

LearnerPass = Literal["dense", "shadow"]


class LogitsHead:
    """The part of a model that turns last hidden states into logits, applied to a few states at a time.

    Logits dominate the memory of a learner pass: those of 32,768 tokens over a vocabulary of 152K take 20 GB in
    float32.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._states = model, list[Tensor]()
        self._output_type: Any = None  # of the decoder

    def record(self, output: Any) -> None:
        """Store the hidden states of a decoder's output."""
        self._output_type, self._states = type(output), [output.last_hidden_state]

    def states(self) -> Tensor:
        """Return and clear the stored hidden states [B, Q, D]; raise RunError if the model did not call its decoder."""
        if not self._states:
            raise RunError(
                f"{type(self._model).__name__} does not call its decoder as causal models do; its logits cannot be "
                "computed a few at a time"
            )
        return self._states.pop()  # so that this object does not keep them alive

    def __call__(self, states: Tensor) -> Tensor:
        """Return logits [n, V] of hidden states [n, D], by running the model with its decoder replaced."""
        output = self._output_type(last_hidden_state=states[None])
        # the decoder that would read the ids is replaced, so any ids will do
        ids = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        decoder, calls = find_decoder(self._model), list[bool]()

        def return_states(*_: Any, **__: Any) -> Any:
            calls.append(True)
            return output

        wrapped = vars(decoder).get("forward")  # set by libraries that wrap a module; otherwise it is the class's
        decoder.forward = return_states
        try:
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            if wrapped is None:
                del decoder.forward
            else:
                decoder.forward = wrapped
        assert calls, "the model computed logits without its decoder"
        return logits


@contextmanager
def capture_states(model: Any) -> Iterator[LogitsHead]:
    """Yield a ``LogitsHead`` that stores the last hidden states of the latest forward inside the context."""
    head = LogitsHead(model)
    handle = find_decoder(model).register_forward_hook(lambda _, __, output: head.record(output))
    try:
        yield head
    finally:
        handle.remove()


def suffix_states(
    model: Any, rollouts: Sequence[Rollout], *, group: int, view: LearnerPass
) -> tuple[Tensor, Tensor, LogitsHead]:
    """Return hidden states [B, R, D] that predict the suffix tokens, their valid mask [B, R], and the head for logits.

    The states are the output of the model's decoder; the head turns them into logits. The arguments are those of
    ``suffix_logits``.
    """
    with capture_states(model) as head:
        _, valid = suffix_logits(model, rollouts, group=group, view=view, logits_to_keep=1)
    return head.states(), valid, head


def suffix_logits(
    model: Any,
    rollouts: Sequence[Rollout],
    *,
    group: int,
    view: LearnerPass,
    reroute: bool = False,
    strays: Strays | None = None,
    logits_to_keep: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the logits [B, R, V] that predict each suffix token (right-padded), and their valid mask bool [B, R].

    ``rollouts`` are whole groups of ``group`` rows that share a prompt (the first ``prompt_length`` ids) and its
    ledger; the suffix is tokens ``prompt_length .. T-1``. ``view``: "shadow" replays what the sampler's queries saw,
    "dense" lets every query see all earlier keys. ``reroute``: a mixture-of-experts model selects its experts again, as
    in the dense pass. ``strays`` gets row and layer of every recorded rounding hint that cannot be right, since its
    value is near no border between two codes in the replay. ``logits_to_keep``: the number of last columns to return, 0
    = all. In the shadow pass, rollouts that say how their engine stored keys and values are passed to
    ``stored_logits``. Raises DataError if the ledger does not fit the model or the group.
    """
    stored = rollouts[0].stored
    if view == "shadow" and stored is not None:
        return stored_logits(model, rollouts, group=group, store=stored, logits_to_keep=logits_to_keep)
    device = next(model.parameters()).device
    plans = layer_plans(model.config, Dense())
    # the last prompt token predicts the first suffix token, so it is the first query of the second pass
    leaders, cuts = rollouts[::group], [rollout.prompt_length - 1 for rollout in rollouts]
    _check(rollouts, group, plans, model)
    shadow = view == "shadow"
    check_experts([rollout.experts for rollout in rollouts], model, reroute=reroute or not shadow)
    routed = shadow and not reroute and rollouts[0].experts is not None
    # the last token was drawn and predicts nothing
    in_prompt, in_suffix = [slice(cut) for cut in cuts], [slice(cut, -1) for cut in cuts]
    prompts, suffixes = _tokens(leaders, in_prompt[::group]), _tokens(rollouts, in_suffix)
    starts = torch.tensor(cuts)
    prompt_positions = position_columns(starts[::group], torch.zeros_like(starts[::group]))
    suffix_positions = position_columns(torch.tensor([len(r.ids) - 1 for r in rollouts]) - starts, starts)
    prefix, longest = None, max(len(rollout.ids) for rollout in rollouts)
    if prompts.shape[1]:  # a prompt of one token has all its queries in the second pass
        evicted_at = _ledger(leaders, in_prompt[::group], prompts.shape[1]) if shadow else None
        queries = upload(prompt_positions, device)
        # the second pass counts strays of these keys too
        codes = quantisation_times(leaders, queries) if shadow else None
        if codes is not None and not codes.affects(queries):  # most codes are made after the prefill
            codes = None
        experts = _experts(leaders, in_prompt[::group], device) if routed else None
        choices = batch_choices([r.selection for r in leaders], longest, device) if shadow else None
        record: dict[str, Any] = {"codes": codes, "experts": experts, "choices": choices}
        prefix = Replay(plans, prompt_positions, prompt_positions, evicted_at, **record, last=False, device=device)
        run_forward(model, prompts, prefix, 1)  # for its keys and states; transformers makes one column of logits
    # [B, columns of prompts and of suffixes]
    keys = torch.cat([prompt_positions.repeat_interleave(group, 0), suffix_positions], 1)
    evicted_at, codes, choices = None, None, None
    if shadow:
        codes = quantisation_times(rollouts, upload(keys, device), strays)
        parts = ((in_prompt, prompts.shape[1]), (in_suffix, suffixes.shape[1]))  # the columns of ``keys``
        evicted_at = torch.cat([_ledger(rollouts, slices, width) for slices, width in parts], 3)
        choices = batch_choices([r.selection for r in rollouts], longest, device)
    experts = _experts(rollouts, in_suffix, device) if routed else None
    record = {"codes": codes, "experts": experts, "choices": choices}
    replay = Replay(plans, suffix_positions, keys, evicted_at, **record, prefix=prefix, group=group, device=device)
    return run_forward(model, suffixes, replay, logits_to_keep), replay.queries >= 0


def _tokens(rollouts: Sequence[Rollout], slices: Sequence[slice]) -> Tensor:
    """Return a slice of every row's ids, right-padded: int64 [B, width]."""
    return pad_sequence([r.ids[cut] for r, cut in zip(rollouts, slices, strict=True)], batch_first=True)


def _ledger(rollouts: Sequence[Rollout], slices: Sequence[slice], width: int) -> Tensor:
    """Return the ledger (when each entry was evicted) of a slice of every row, right-padded: int32 [B, L, H, width]."""
    tables = [rollout.evicted_at[:, :, cut] for rollout, cut in zip(rollouts, slices, strict=True)]
    return torch.stack([pad(table, (0, width - table.shape[2]), value=NEVER) for table in tables])


def _experts(rollouts: Sequence[Rollout], slices: Sequence[slice], device: torch.device) -> Tensor:
    """Return the recorded experts of a slice of every row, right-padded with NO_EXPERT: [B, width, M, k]."""
    experts = [r.experts[cut] for r, cut in zip(rollouts, slices, strict=True) if r.experts is not None]
    return pad_sequence(experts, batch_first=True, padding_value=NO_EXPERT).to(device)


def _check(rollouts: Sequence[Rollout], group: int, plans: Sequence[LayerPlan], model: Any) -> None:
    assert len(rollouts) % group == 0, (len(rollouts), group)
    require_rotary_length(model.config, max(len(rollout.ids) for rollout in rollouts) - 1)  # the last token is not fed
    expected = (len(plans), kv_heads(model.config))
    for n, rollout in enumerate(rollouts):
        got = tuple(rollout.evicted_at.shape[:2])
        if got != expected:
            raise DataError(f"the ledger has {got} layers and KV heads, the model {expected}: it is of another model")
        _check_leader(n, rollout, rollouts[n - n % group])
        if rollout.codec != rollouts[0].codec:
            used = "nothing" if rollout.codec is None else rollout.codec.canonical
            raise DataError(f"rollout {n} was quantised by {used}, the first of its batch was not")


def _check_leader(number: int, rollout: Rollout, leader: Rollout) -> None:
    """Raise DataError if the prompt, or what its queries saw, differs from that of the group's first rollout."""
    length = leader.prompt_length
    if rollout.prompt_length != length or not torch.equal(rollout.ids[:length], leader.ids[:length]):
        raise DataError(f"rollout {number} does not share its group's prompt")
    # the prompt's last query belongs to the suffix, so later times may differ
    if not _same_experts(leader.experts, rollout.experts, length - 1):
        raise DataError(f"rollout {number} sent its prompt to other experts than its group")
    if not _same_choices(leader.selection, rollout.selection, length - 1):
        raise DataError(f"rollout {number} attended to other keys of its prompt than its group")
    expected, got = (r.evicted_at[:, :, : length - 1].clamp(max=length - 1) for r in (leader, rollout))
    if not torch.equal(expected, got):
        raise DataError(
            f"rollout {number} has another prompt ledger than its group: its prompt was compressed otherwise"
        )


def _same_experts(a: Tensor | None, b: Tensor | None, length: int) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a[:length], b[:length])


def _same_choices(a: Selection | None, b: Selection | None, length: int) -> bool:
    """Return whether the queries before position ``length`` selected the same keys in two rollouts.

    A missing record counts as no selection.
    """
    in_prompt = [s.until(length) for s in (a, b) if s is not None]
    selections = [s for s in in_prompt if len(s.queries)]
    if len(selections) < 2:
        return not selections
    one, other = selections
    return (one.unit, one.layers) == (other.unit, other.layers) and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in ("queries", "chosen")
    )
