"""The shadow pass on stock transformers: ``with shadow(model, cache.ledger): model(ids, attention_mask=...)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout

from kvaudit.audit.cache.attention import find_decoder, inner_model
from kvaudit.audit.cache.layers import kv_heads, layer_plans
from kvaudit.audit.cache.ledger import NEVER, Ledger
from kvaudit.audit.cache.hints import HintTable
from kvaudit.audit.cache.rotary import require_rotary_length
from kvaudit.audit.cache.routing import NO_EXPERT, check_experts
from kvaudit.audit.cache.selection import batch_choices
from kvaudit.audit.cache.stock import (
    named_arguments,
    call_ids,
    call_mask,
    prepare_model,
    require_causal,
    require_no_padding_counted,
    require_positions,
    row_positions,
    use_attention,
)
from kvaudit.audit.policies import Dense
from kvaudit.audit.replay.attention import Replay
from kvaudit.audit.replay.attention import CodedSince
from kvaudit.core.errors import DataError, RunError, SpecError


@contextmanager
def shadow(model: Any, ledger: Ledger, *, reroute: bool = False) -> Iterator[None]:
    """Inside, ``model(ids, attention_mask=...)`` sees what the sampler saw, as the ``ledger`` of its cache says.

    The ledger counts row positions; ``ids`` may be padded on either side, as the 2-D mask says. With ``reroute`` a
    mixture-of-experts model chooses its experts anew.
    """
    model = inner_model(model)
    prepare_model(model)
    plans = layer_plans(model.config, Dense())
    got, wanted = tuple(ledger.evicted_at.shape[1:3]), (len(plans), kv_heads(model.config))
    if got != wanted:
        raise DataError(f"the ledger has {got} layers and KV heads, the model {wanted}: it is of another model")
    check_experts([ledger.experts], model, reroute=reroute)

    def replay(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = named_arguments(model, args, kwargs)
        ids = call_ids(call)
        if call.get("past_key_values") is not None:
            raise RunError("inside shadow(...) a text is passed whole, with no cache; leave past_key_values out")
        require_causal(model, call)
        require_no_padding_counted(model, call)
        if len(ids) != len(ledger.evicted_at):
            raise DataError(f"the ledger is of {len(ledger.evicted_at)} rows, got {len(ids)}")
        mask, zeros = call_mask(call), torch.zeros(len(ids), dtype=torch.int64)
        positions = row_positions(mask, zeros, ids.shape[1])
        if mask is not None and mask.shape != ids.shape:
            raise SpecError(
                f"the attention mask has shape {tuple(mask.shape)}, the text {tuple(ids.shape)}; inside shadow(...) "
                "both are passed whole"
            )
        require_positions(call.get("position_ids"), positions)
        require_rotary_length(model.config, int(positions.max()) + 1)
        _refuse_noise(model)
        _check_text(ledger, ids.cpu(), positions)
        use_attention(model)
        at = positions.to(ids.device)  # [B, columns]
        codes = _codes(ledger, positions, ids.device)
        experts = None if ledger.experts is None or reroute else _sent(ledger.experts, positions).to(ids.device)
        evicted_at = _along(ledger.evicted_at, positions, ids.device)
        # one more than the ledger holds: the last drawn token is in the text and never entered a cache
        chosen = batch_choices(ledger.selections or [], ledger.evicted_at.shape[-1] + 1, ids.device)
        context = Replay(plans, at, at, evicted_at, codes=codes, experts=experts, choices=chosen)
        more = {"kv": context, "attention_mask": None, "use_cache": False}
        # what was given by place is now under its name, or it would be given twice
        return (), call | more | {"position_ids": at.clamp(min=0)}

    def refuse(_: Any, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(kwargs.get("kv"), Replay):
            raise RunError("inside shadow(...) call the model itself: a part of it would see what the sampler did not")

    handles = [
        model.register_forward_pre_hook(replay, with_kwargs=True),
        find_decoder(model).register_forward_pre_hook(refuse, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_noise(model: Any) -> None:
    """Raise RunError where some layer would drop activations that the sampler had, or add noise to them.

    Of modules of torch, and of numbers that a module keeps for a function of its own: ``dropout``, ``layerdrop``,
    ``jitter_noise`` of a router, ``neftune_noise_alpha`` of embeddings.
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        named = {"dropout": module.p} if isinstance(module, Dropout) else _noises(vars(module))
        for what, value in named.items():
            if value > 0:
                raise RunError(
                    f"{what} of {value} in {name} would make the pass another policy than the sampler's; call "
                    "model.eval(), or set it to 0"
                )


def _noises(kept: Mapping[str, Any]) -> dict[str, float]:
    return {
        what: value
        for what, value in kept.items()
        if ("drop" in what or "noise" in what or "jitter" in what)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def _check_text(ledger: Ledger, ids: Tensor, positions: Tensor) -> None:
    """Raise DataError where the ledger was recorded for other tokens than ``ids`` at ``positions``, both [B, T]."""
    length = ledger.evicted_at.shape[-1]
    # the last drawn token never enters a cache, so one more than the ledger holds is honest
    if int(positions.max()) > length:
        raise DataError(
            f"the ledger records {length} tokens, the longest row has {int(positions.max()) + 1}: it is cut short "
            "or of another text"
        )
    if ledger.ids is None:
        return
    # [B, columns], with one more for a token that never entered the cache
    recorded = torch.nn.functional.pad(ledger.ids, (0, 1), value=-1).gather(1, positions.clamp(min=0))
    wrong = ((recorded != ids) & (positions >= 0) & (recorded >= 0)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise DataError(
            f"the ledger was recorded for another text: token {int(positions[row, column])} of row {row} was "
            f"{int(recorded[row, column])}, got {int(ids[row, column])}"
        )


def _codes(ledger: Ledger, positions: Tensor, device: torch.device) -> CodedSince | None:
    if ledger.codec is None or ledger.keys_quantised_at is None or ledger.values_quantised_at is None:
        return None
    keys, values = (
        _along(times[:, None, None], positions, device)[:, 0, 0]
        for times in (ledger.keys_quantised_at, ledger.values_quantised_at)
    )
    hints = HintTable(ledger.hints, positions.to(device), ledger.evicted_at.shape[1]) if ledger.hints else None
    return CodedSince(ledger.codec, keys, values, hints)


def _sent(experts: Tensor, positions: Tensor) -> Tensor:
    """Lay experts over padded columns: [B, T, M, k] by position -> [B, columns, M, k]."""
    length = experts.shape[1]
    padded = torch.nn.functional.pad(experts.cpu(), (0, 0, 0, 0, 0, 1), value=NO_EXPERT)
    index = torch.where((positions >= 0) & (positions < length), positions, length)[..., None, None]
    return padded.gather(1, index.expand(-1, -1, *experts.shape[2:]))


def _along(times: Tensor, positions: Tensor, device: torch.device) -> Tensor:
    """Lay times over padded columns: [B, L, H, T] by position -> [B, L, H, columns]."""
    batch, layers, heads, length = times.shape
    padded = torch.nn.functional.pad(times.cpu(), (0, 1), value=NEVER)
    # padding, and a token that never entered the cache, read the column behind the end
    index = torch.where((positions >= 0) & (positions < length), positions, length)
    index = index[:, None, None].expand(batch, layers, heads, -1)
    return padded.gather(3, index).to(device)
