"""The shadow pass on stock transformers: ``with shadow(model, cache.ledger): model(ids, attention_mask=...)``.

In it every query sees exactly the entries that it saw while sampling from a compressed cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, Module

from kvaudit.audit.cache.attention import find_decoder, inner_model
from kvaudit.audit.cache.hints import HintTable
from kvaudit.audit.cache.layers import kv_heads, layer_plans
from kvaudit.audit.cache.ledger import NEVER, Ledger
from kvaudit.audit.cache.rotary import require_rotary_length
from kvaudit.audit.cache.routing import NO_EXPERT, check_experts
from kvaudit.audit.cache.selection import batch_choices
from kvaudit.audit.cache.stock import (
    call_ids,
    call_mask,
    named_arguments,
    prepare_model,
    require_causal,
    require_no_padding_counted,
    require_positions,
    row_positions,
    use_attention,
)
from kvaudit.audit.policies import Dense
from kvaudit.audit.replay.attention import QuantisationTimes, Replay
from kvaudit.core.errors import DataError, RunError, SpecError


@contextmanager
def shadow(model: Any, ledger: Ledger, *, reroute: bool = False) -> Iterator[None]:
    """Inside the context, make ``model(ids, attention_mask=...)`` attend to what the sampler's queries saw.

    ``ledger`` is the record of what they saw, by row positions (numbers of tokens, without padding). ``ids`` may be
    padded on either side if a 2-D mask marks the padding. With ``reroute`` a mixture-of-experts model selects its
    experts again.
    """
    model = inner_model(model)
    prepare_model(model)
    plans = layer_plans(model.config, Dense())
    got, expected = tuple(ledger.evicted_at.shape[1:3]), (len(plans), kv_heads(model.config))
    if got != expected:
        raise DataError(f"the ledger has {got} layers and KV heads, the model {expected}: it is of another model")
    check_experts([ledger.experts], model, reroute=reroute)

    def replay(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = named_arguments(model, args, kwargs)
        ids = call_ids(call)
        if call.get("past_key_values") is not None:
            raise RunError("shadow(...) takes the whole text without a cache; leave past_key_values out")
        require_causal(model, call)
        require_no_padding_counted(model, call)
        if len(ids) != len(ledger.evicted_at):
            raise DataError(f"the ledger is of {len(ledger.evicted_at)} rows, got {len(ids)}")
        mask, zeros = call_mask(call), torch.zeros(len(ids), dtype=torch.int64)
        positions = row_positions(mask, zeros, ids.shape[1])
        if mask is not None and mask.shape != ids.shape:
            raise SpecError(
                f"the attention mask has shape {tuple(mask.shape)}, the text {tuple(ids.shape)}; inside shadow(...) "
                "pass both whole"
            )
        require_positions(call.get("position_ids"), positions)
        require_rotary_length(model.config, int(positions.max()) + 1)
        _require_no_noise(model)
        _check_text(ledger, ids.cpu(), positions)
        use_attention(model)
        on_device = positions.to(ids.device)  # [B, columns]
        codes = _quantisation_times(ledger, positions, ids.device)
        experts = None
        if ledger.experts is not None and not reroute:
            experts = _take(ledger.experts, positions, NO_EXPERT).to(ids.device)
        times = _take(ledger.evicted_at.permute(0, 3, 1, 2), positions, NEVER)  # [B, columns, L, H]
        evicted_at = times.permute(0, 2, 3, 1).contiguous().to(ids.device)
        # one more than the ledger holds: the last drawn token is in the text and never entered a cache
        choices = batch_choices(ledger.selections or [], ledger.evicted_at.shape[-1] + 1, ids.device)
        context = Replay(plans, on_device, on_device, evicted_at, codes=codes, experts=experts, choices=choices)
        options = {"kv": context, "attention_mask": None, "use_cache": False}
        # positional arguments are now passed by name
        return (), call | options | {"position_ids": on_device.clamp(min=0)}

    def require_replay(_: Any, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(kwargs.get("kv"), Replay):
            raise RunError("inside shadow(...) call the model itself, not its decoder, which would see every entry")

    handles = [
        model.register_forward_pre_hook(replay, with_kwargs=True),
        find_decoder(model).register_forward_pre_hook(require_replay, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_no_noise(model: Any) -> None:
    """Raise RunError if a layer in training mode uses dropout or adds noise."""
    for name, module in model.named_modules():
        for option, value in _noise_options(module).items() if module.training else ():
            if value > 0:
                raise RunError(
                    f"{option} of {value} in {name} would make the pass differ from the sampler's; call model.eval(), "
                    "or set it to 0"
                )


def _noise_options(module: Module) -> dict[str, float]:
    """Return the values of a module's options for noise, such as ``dropout``, ``layerdrop``, ``jitter_noise``."""
    if isinstance(module, Dropout):
        return {"dropout": module.p}
    return {
        option: value
        for option, value in vars(module).items()
        if ("drop" in option or "noise" in option or "jitter" in option)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def _check_text(ledger: Ledger, ids: Tensor, positions: Tensor) -> None:
    """Raise DataError if the ledger belongs to other tokens than ``ids`` at ``positions``, both [B, T]."""
    length = ledger.evicted_at.shape[-1]
    # the last drawn token never enters a cache, so the text may be one longer
    if int(positions.max()) > length:
        raise DataError(
            f"the ledger records {length} tokens, the longest row has {int(positions.max()) + 1}: it is truncated, or "
            "belongs to another text"
        )
    if ledger.ids is None:
        return
    # [B, columns], -1 for a token that never entered the cache
    recorded = torch.nn.functional.pad(ledger.ids, (0, 1), value=-1).gather(1, positions.clamp(min=0))
    wrong = ((recorded != ids) & (positions >= 0) & (recorded >= 0)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise DataError(
            f"the ledger was recorded for another text: token {int(positions[row, column])} of row {row} was "
            f"{int(recorded[row, column])}, got {int(ids[row, column])}"
        )


def _quantisation_times(ledger: Ledger, positions: Tensor, device: torch.device) -> QuantisationTimes | None:
    if ledger.codec is None or ledger.keys_quantised_at is None or ledger.values_quantised_at is None:
        return None
    keys, values = (
        _take(times, positions, NEVER).to(device) for times in (ledger.keys_quantised_at, ledger.values_quantised_at)
    )
    hints = HintTable(ledger.hints, positions.to(device), ledger.evicted_at.shape[1]) if ledger.hints else None
    return QuantisationTimes(ledger.codec, keys, values, hints)


def _take(x: Tensor, positions: Tensor, default: int) -> Tensor:
    """Return ``x`` [B, T, ...] at positions [B, columns], as a CPU tensor; ``default`` at padding and beyond T."""
    length = x.shape[1]
    padded = torch.cat([x.cpu(), x.new_full((len(x), 1, *x.shape[2:]), default, device="cpu")], 1)
    index = torch.where((positions >= 0) & (positions < length), positions, length)
    return padded[torch.arange(len(x))[:, None], index]
