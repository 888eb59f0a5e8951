"""The evicting cache on stock transformers: ``model.generate(..., past_key_values=CompressedCache.for_model(...))``.

A forward pre-hook on the model hands the evicting cache to the ``kvaudit`` attention; without a CompressedCache the
hook changes nothing. Padding, wherever it stands, is read from the attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvaudit.audit.cache.attention import ATTENTION_NAME, find_decoder, require_interface, skip_compile, inner_model
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.layers import kv_heads, layer_plans
from kvaudit.audit.cache.ledger import Ledger
from kvaudit.audit.cache.layers import patch_state_layers
from kvaudit.audit.cache.rotary import find_rotary
from kvaudit.audit.cache.routing import hook_expert_blocks
from kvaudit.audit.policies import Dense, Policy, parse_policy, quantiser_of
from kvaudit.core.errors import RunError, SpecError

NOT_ANNOUNCED = (
    "this CompressedCache was not made for this model, or a part of the model is called on its own; call the model "
    "that for_model was given"
)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Answers the model's questions about length; the entries themselves live in the evicting cache."""

    is_compileable = False
    is_sliding = False
    seen = 0
    announced = False  # a forward through the evicting cache is under way

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        self.is_initialized = True

    @skip_compile
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.announced:
            raise RunError(NOT_ANNOUNCED)
        self.is_initialized, self.announced = True, False
        self.seen += key_states.shape[-2]  # columns, padding too
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # for a mask that nobody reads: the evicting cache makes its own

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reorder_cache(self, *_: Any) -> None:
        raise RunError("a CompressedCache cannot follow beam search; use num_beams=1")

    def crop(self, *_: Any) -> None:
        raise RunError("a CompressedCache cannot take tokens back: no assisted or prompt-lookup decoding")

    def reset(self) -> None:
        raise RunError("a CompressedCache serves one conversation; make a new one")

    def batch_repeat_interleave(self, *_: Any) -> None:
        raise RunError("a CompressedCache keeps its rows; give every row its own prompt")

    def batch_select_indices(self, *_: Any) -> None:
        raise RunError("a CompressedCache keeps its rows; give every row its own prompt")


class CompressedCache(Cache):  # type: ignore[misc]
    """A transformers cache that keeps what ``policy`` keeps; one batch, one conversation."""

    def __init__(self, model: Any, policy: Policy, *, seed: int = 0, pinned: Tensor | None = None) -> None:
        plans = layer_plans(model.config, policy)
        super().__init__(layers=[_Layer() for _ in plans])
        self._config, self._policy, self._seed = model.config, policy, seed
        self._served = model.config  # of the model that was served last, so that it is looked at once
        self._real: Tensor | None = None  # bool [B, columns] given so far, False at padding
        self._mask: Tensor | None = None  # the last mask, where it was on a device
        self._columns: list[Tensor] = []  # the same columns' ids, call after call
        self._rotary, self._pinned = find_rotary(model, policy), pinned
        self._blocks = hook_expert_blocks(model)
        self._evicting: EvictingCache | None = None

    @classmethod
    def for_model(
        cls, model: Any, policy: str | Policy, *, seed: int = 0, pinned: Tensor | None = None
    ) -> CompressedCache:
        """A fresh cache for one batch and one conversation; ``model``'s attention is switched to ``kvaudit``.

        Dense calls are unchanged by that, but ``output_attentions`` is refused. ``pinned`` bool [B, P] says which
        tokens of the prompt never leave; a policy with ``pin`` needs it, because token ids alone do not tell roles.
        Raises SpecError for what does not fit, RunError for a model that cannot.
        """
        parsed = parse_policy(policy) if isinstance(policy, str) else policy
        if bool(parsed.pinned_roles) != (pinned is not None):
            raise SpecError("pin=... and pinned=<bool tensor, True at the tokens to keep> go together; give both")
        model = inner_model(model)
        prepare_model(model)
        return cls(model, parsed, seed=seed, pinned=pinned)

    @property
    def ledger(self) -> Ledger:
        """The record so far, in row positions: padding is not counted. Raises SpecError before use."""
        cache = self._used()
        if not cache.policy.replayable:
            raise SpecError(f"policy {cache.policy.canonical!r} cannot be replayed, so there is no ledger")
        tokens = int(cache.seen.max())
        codec, times, experts = quantiser_of(cache.policy), cache.quantised_at(tokens), cache.experts(tokens)
        if codec is None or times is None:
            chosen = cache.selections()
            return Ledger(cache.ledger(tokens), ids=self._ids(tokens), experts=experts, selections=chosen)
        hints = tuple(cache.hints())
        return Ledger(cache.ledger(tokens), codec, *times, experts, self._ids(tokens), hints)

    def _ids(self, tokens: int) -> Tensor:
        """What every row was given: int64 [B, tokens] by row position, -1 where it is shorter."""
        assert self._real is not None
        # real tokens first, in their order
        order = torch.sort((~self._real).int(), dim=1, stable=True).indices[:, :tokens]
        return torch.cat(self._columns, 1).cpu().masked_fill(~self._real, -1).gather(1, order)

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""
        return self._used().bytes

    @property
    def retention(self) -> Tensor:
        """Kept / seen entries per row, float64 [B]."""
        return self._used().retention()

    def _used(self) -> EvictingCache:
        if self._evicting is None:
            raise SpecError("this CompressedCache has seen no token yet; pass it to model.generate first")
        return self._evicting

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Columns given so far, in whichever layer counts them: one of linear attention does not."""
        return max(int(layer.seen) for layer in self.layers)

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        if self._evicting is None or self._evicting.is_settled:
            raise RunError(NOT_ANNOUNCED)
        raise RunError("a layer of linear attention was not handed kv=, so its state cannot go on; use another model")

    def require_made_for(self, model: Any) -> None:
        """Raise RunError for another model than the cache was made for, as far as it has other layers."""
        if model.config is self._served:
            return
        if _form(model.config) != _form(self._config):
            raise RunError(
                "this CompressedCache was not made for this model; make one with CompressedCache.for_model(model, ...)"
            )
        self._served = model.config

    @skip_compile
    def start(self, attention_mask: Tensor | None, ids: Tensor, position_ids: Tensor | None = None) -> EvictingCache:
        """Announce the forward of ``ids`` [B, Q]; the mask is 2-D over everything so far, 1 = real token.

        What is given in one call is one chunk. One token is a drawn one, unless it is the first of all. Raises RunError
        where ``position_ids`` are not those of the tokens seen.
        """
        batch, new = ids.shape
        drawn = new == 1 and self._evicting is not None
        if self._evicting is not None and not self._evicting.is_settled:
            raise RunError("an earlier forward through this CompressedCache was broken off; make a new one")
        if self._evicting is None:
            rows = torch.arange(batch, device=ids.device) + self._seed  # what policies that draw draw by
            self._evicting = EvictingCache(self._config, self._policy, rows, rotary=self._rotary, blocks=self._blocks)
        if len(self._evicting.seen) != batch:
            raise SpecError(f"this CompressedCache serves {len(self._evicting.seen)} rows, got {batch}; make a new one")
        attention_mask, position_ids = self._on_host(attention_mask, position_ids, new)
        positions = row_positions(attention_mask, self._evicting.seen, new)
        try:
            require_positions(position_ids, positions)
        except RunError:
            self._require_going_on(position_ids, positions)  # says better why, and reads what a step need not
            raise
        pinned, self._pinned = self._pinned, None  # the prompt's; later tokens are not pinned
        if pinned is not None and pinned.shape != ids.shape:
            raise SpecError(f"pinned has shape {tuple(pinned.shape)}, the prompt {tuple(ids.shape)}; they must agree")
        self._remember(attention_mask, positions >= 0)
        self._columns.append(ids)
        self._evicting.begin(positions, decoding=drawn, pinned=pinned)
        for layer in self.layers:
            layer.announced = True
        return self._evicting

    def _require_going_on(self, asked: Tensor | None, own: Tensor) -> None:
        """Raise RunError where a cache that holds a conversation is given one that begins anew; positions [B, Q]."""
        real = own >= 0
        if asked is None or self._real is None or asked.dim() != 2 or not bool(real.any()):
            return
        alike = len(asked) in (1, len(own)) and asked.shape[1] == own.shape[1]
        first = int((asked.expand(len(own), -1)[real] if alike else asked).min())
        # generate cuts a new prompt off by what it takes to be held already
        if first >= int(own[real].min()):
            return
        held = self._real.shape[1]
        if own.shape[1] > held and first == 0:
            raise RunError(
                f"this CompressedCache holds {held} tokens and is given all of them again with the next one, as "
                "use_cache=False does; leave use_cache out"
            )
        raise RunError(
            f"this CompressedCache holds {held} tokens and is given positions from {first} on, as of another "
            "conversation; make a new cache for each: CompressedCache.for_model(model, ...)"
        )

    def _on_host(
        self, mask: Tensor | None, position_ids: Tensor | None, new: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both on the CPU; of a device by one read, since each waits for it.

        A mask that grew by ``new`` columns is compared there with the one before, and only those columns are read.
        """
        known, self._mask = self._mask, None if mask is None or mask.device.type == "cpu" else mask
        if self._mask is None or known is None or self._mask.dim() != 2 or self._real is None:
            return None if mask is None else mask.cpu(), None if position_ids is None else position_ids.cpu()
        # not the same rows and a step more: read it whole
        if known.shape != self._real.shape or self._mask.shape != (len(known), known.shape[1] + new):
            return self._mask.cpu(), None if position_ids is None else position_ids.cpu()
        asked = [self._mask[:, -new:].bool(), (self._mask[:, :-new].bool() == known.bool()).all()]
        real, same, *places = _at_once(asked if position_ids is None else [*asked, position_ids.to(known.device)])
        told = torch.cat([self._real, real.bool()], 1) if bool(same) else self._mask.cpu()
        return told, places[0] if places else None

    def _remember(self, attention_mask: Tensor | None, real: Tensor) -> None:
        """Note which of the new columns are real; the mask must agree with what is in the cache already."""
        before = real[:, :0] if self._real is None else self._real  # [B, columns so far]
        self._real = torch.cat([before, real], 1)
        if attention_mask is None:
            return
        if attention_mask.shape[1] != self._real.shape[1]:
            raise SpecError(
                f"the attention mask has {attention_mask.shape[1]} columns, this CompressedCache has been given "
                f"{self._real.shape[1]}: for another batch or conversation, make a new one"
            )
        if not torch.equal(attention_mask[:, : before.shape[1]].bool().cpu(), before):
            raise SpecError(
                "the attention mask hides tokens that this CompressedCache was given as real ones; "
                "make a new cache for what they should have been"
            )


def _at_once(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Whole numbers on a device as int64 of the same shapes on the CPU, by one copy."""
    sizes = [tensor.numel() for tensor in tensors]
    joined = torch.cat([tensor.flatten().long() for tensor in tensors]).cpu()
    return [part.view(tensor.shape) for part, tensor in zip(torch.split(joined, sizes), tensors, strict=True)]


def row_positions(attention_mask: Tensor | None, seen: Tensor, new: int) -> Tensor:
    """CPU positions [B, new] of the new tokens, -1 where the mask says padding."""
    if attention_mask is None:
        return seen[:, None] + torch.arange(new) if new > 1 else seen[:, None]
    if attention_mask.dim() != 2:
        raise RunError(f"a {attention_mask.dim()}-D attention mask cannot be compressed; pass the 2-D one")
    real = attention_mask[:, -new:].bool().cpu()
    if real.shape != (len(seen), new):
        raise SpecError(f"the attention mask has shape {tuple(real.shape)}, the new tokens {(len(seen), new)}")
    return torch.where(real, seen[:, None] + real.cumsum(1) - 1, -1)  # its place among real tokens of the row


def require_positions(asked: Tensor | None, own: Tensor) -> None:
    """Raise RunError where a caller's ``position_ids`` [..., B, Q] are not ``own`` [B, Q] at a real token.

    Packed rows, offsets and positions in an image would each need an attention of their own. Padding holds anything.
    """
    if asked is None or _is_own_step(asked, own):
        return
    rows, columns = (1, *asked.shape)[-2:]
    if rows not in (1, len(own)) or columns != own.shape[1]:
        raise RunError(
            f"position_ids have shape {tuple(asked.shape)}, the new tokens {tuple(own.shape)}: leave position_ids out"
        )
    wrong = ((asked.cpu() != own) & (own >= 0)).nonzero()
    if len(wrong):
        row, column = wrong[0, -2:].tolist()  # dimensions may stand in front of rows
        raise RunError(
            f"position_ids do not put the token at row {row}, column {column} at {int(own[row, column])}, the number "
            "of real tokens before it; packed rows, offsets and image positions are not supported: leave them out"
        )


def _is_own_step(asked: Tensor, own: Tensor) -> bool:
    """Whether a step of decoding is asked for where it is: by plain numbers, as operators would be half of its own."""
    if own.shape[1] != 1 or asked.numel() != len(own):
        return False
    return bool(asked.flatten().tolist() == [at for (at,) in own.tolist()])


def prepare_model(model: Any) -> None:
    """Switch a model to the ``kvaudit`` attention and let it recognise a CompressedCache."""
    require_interface(model)
    require_one_device(model)
    patch_state_layers(model)
    use_attention(model)
    # a copy of a prepared model is prepared too, so the model itself has to say it
    if _hand_over not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_hand_over, with_kwargs=True)
        model.register_forward_hook(_settle, with_kwargs=True)
        find_decoder(model).register_forward_pre_hook(_refuse_weights, with_kwargs=True)


def require_one_device(model: Any) -> None:
    """Raise RunError for a model whose layers compute on several devices: a cache and its ledger lie on one."""
    placed = vars(model).get("hf_device_map", {}).values()  # where transformers spread it over devices
    devices = sorted({str(device) for device in placed if device not in ("cpu", "disk")})  # those are only stored there
    if len(devices) > 1:
        raise RunError(
            f"model {model.config.model_type!r} is spread over the devices {', '.join(devices)}, and a compressed "
            "cache lies on one; load it with device_map={'': 0}, or with fewer bytes a weight"
        )


def use_attention(model: Any) -> None:
    """Name the ``kvaudit`` attention in the model's config, also where somebody named another one since."""
    if model.config.get_text_config(decoder=True)._attn_implementation != ATTENTION_NAME:
        model.set_attn_implementation(ATTENTION_NAME)


def _refuse_weights(decoder: Any, _: Any, kwargs: dict[str, Any]) -> None:
    """Raise RunError where a call, or else the config, asks for attention weights: transformers would give ``()``."""
    wanted = kwargs.get("output_attentions", decoder.config.output_attentions)
    if wanted and decoder.config._attn_implementation == ATTENTION_NAME:
        raise RunError(
            "output_attentions asks for weights that the kvaudit attention does not make; leave it out, or, for a pass "
            "without a compressed cache, call model.set_attn_implementation('eager') before"
        )


def _form(config: Any) -> tuple[Any, ...]:
    """What a cache has from a model: its layers, heads and positions."""
    text = config.get_text_config(decoder=True)
    return layer_plans(config, Dense()), kv_heads(config), getattr(text, "rope_parameters", None)


def _hand_over(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = named_arguments(model, args, kwargs)
    cache = call.get("past_key_values")
    if not isinstance(cache, CompressedCache):
        return args, kwargs
    require_causal(model, call)
    require_no_padding_counted(model, call)
    cache.require_made_for(model)
    use_attention(model)
    evicting = cache.start(call_mask(call), call_ids(call), call.get("position_ids"))
    # masks are the cache's own; padding stands at position 0, and nobody reads its output
    return (), call | {"kv": evicting, "attention_mask": None, "position_ids": evicting.announced.clamp(min=0)}


def require_causal(model: Any, call: Mapping[str, Any]) -> None:
    """Raise RunError where tokens of an image attend to those behind them, as a model with pictures may have it."""
    if getattr(model.config, "vision_config", None) is None:
        return
    for name in ("token_type_ids", "mm_token_type_ids"):
        kinds = call.get(name)
        if isinstance(kinds, Tensor) and bool(kinds.any()):
            raise RunError(
                f"{name} mark tokens of an image, which may attend to what comes behind them; a compressed cache takes "
                "text alone"
            )


def require_no_padding_counted(model: Any, call: Mapping[str, Any]) -> None:
    """Raise RunError where a loss over the routers is asked for beside padding.

    The model would leave padding out by the mask, which is not handed on to it.
    """
    mask, asked = call_mask(call), call.get("output_router_logits")
    if asked is None:  # then the config decides, and its loss is for labels
        asked = call.get("labels") is not None and vars(model.config.get_text_config()).get("output_router_logits")
    if asked and mask is not None and not bool(mask[:, -call_ids(call).shape[1] :].all()):
        raise RunError(
            "output_router_logits makes a loss that would count padding here; set it to False, or give rows of one "
            "length"
        )


def _settle(_: Any, __: tuple[Any, ...], kwargs: dict[str, Any], ___: Any) -> None:
    context = kwargs.get("kv")
    if context is not None:
        context.settle()


def named_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward call by name: a mask may be given by its place."""
    return {**dict(zip(signature(model.forward).parameters, args, strict=False)), **kwargs} if args else kwargs


def call_ids(call: Mapping[str, Any]) -> Tensor:
    """The token ids of a forward call; RunError where it has none."""
    ids = call.get("input_ids")
    if not isinstance(ids, Tensor):
        raise RunError("a compressed forward needs input_ids; inputs_embeds are not supported")
    return ids


def call_mask(call: Mapping[str, Any]) -> Tensor | None:
    """The attention mask of a forward call, where it has one; RunError where that is no tensor."""
    mask = call.get("attention_mask")
    if mask is None or isinstance(mask, Tensor):
        return mask
    raise RunError(f"attention_mask is a {type(mask).__name__}, wanted the 2-D tensor with 1 at every real token")
