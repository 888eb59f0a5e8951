"""The evicting cache on stock transformers: ``model.generate(..., past_key_values=CompressedCache.for_model(...))``.

A forward pre-hook on the model passes the evicting cache to the ``kvaudit`` attention; without a CompressedCache the
hook changes nothing. Padding, on either side, is read from the attention mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvaudit.audit.cache.attention import ATTENTION_NAME, find_decoder, inner_model, require_interface, skip_compile
from kvaudit.audit.cache.cache import EvictingCache
from kvaudit.audit.cache.layers import kv_heads, layer_plans, patch_state_layers
from kvaudit.audit.cache.ledger import Ledger
from kvaudit.audit.cache.rotary import find_rotary
from kvaudit.audit.cache.routing import hook_expert_blocks
from kvaudit.audit.policies import Dense, Policy, parse_policy, quantiser_of
from kvaudit.core.errors import RunError, SpecError

_NOT_BEGUN = (
    "this CompressedCache was not made for this model, or a part of the model is called on its own; call the model "
    "that for_model was given"
)


def _refuse(message: str) -> Callable[..., None]:
    """Return a method that raises RunError with ``message``, in place of one that transformers may call."""

    def refuse(*_: Any) -> None:
        raise RunError(message)

    return refuse


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """The cache layer that transformers sees: it counts columns (padding too); the evicting cache holds the entries."""

    is_compileable = False
    is_sliding = False
    seen = 0
    in_forward = False  # whether a forward through the evicting cache has begun and has not reached this layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        self.is_initialized = True

    @skip_compile
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.in_forward:
            raise RunError(_NOT_BEGUN)
        self.is_initialized, self.in_forward = True, False
        self.seen += key_states.shape[-2]  # columns, padding too
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # this mask is not used: the evicting cache makes its own

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape
    reorder_cache = _refuse("a CompressedCache does not support beam search; use num_beams=1")
    crop = _refuse("a CompressedCache cannot take tokens back: no assisted or prompt-lookup decoding")
    reset = _refuse("a CompressedCache serves one conversation; make a new one")
    batch_repeat_interleave = _refuse(
        "a CompressedCache cannot repeat or select rows (num_return_sequences); give every row its own prompt"
    )
    batch_select_indices = batch_repeat_interleave


class CompressedCache(Cache):  # type: ignore[misc]
    """A transformers cache whose entries are evicted or quantised by ``policy``; for one batch and one conversation."""

    def __init__(self, model: Any, policy: Policy, *, seed: int = 0, pinned: Tensor | None = None) -> None:
        plans = layer_plans(model.config, policy)
        super().__init__(layers=[_Layer() for _ in plans])
        self._config, self._policy, self._seed = model.config, policy, seed
        self._last_config = model.config  # of the model served last, so that each is checked once
        self._real: Tensor | None = None  # bool [B, columns] so far, False at padding
        self._mask: Tensor | None = None  # the last mask, if it was on a device
        self._ids: list[Tensor] = []  # ids of the columns, per call
        self._rotary, self._pinned = find_rotary(model, policy), pinned
        self._blocks = hook_expert_blocks(model)
        self._evicting: EvictingCache | None = None

    @classmethod
    def for_model(
        cls, model: Any, policy: str | Policy, *, seed: int = 0, pinned: Tensor | None = None
    ) -> CompressedCache:
        """Make a cache for one batch and one conversation; switches ``model``'s attention to ``kvaudit``.

        Calls without a compressed cache give the same results as before, but refuse ``output_attentions``. ``pinned``
        bool [B, P] marks tokens of the prompt that are never evicted; a policy with ``pin`` needs it, because token ids
        do not tell roles. Raises SpecError for arguments that do not fit together, RunError for a model that cannot be
        compressed.
        """
        parsed = parse_policy(policy) if isinstance(policy, str) else policy
        if bool(parsed.pinned_roles) != (pinned is not None):
            raise SpecError("pin=... and pinned=<bool tensor, True at the tokens to keep> go together; give both")
        model = inner_model(model)
        prepare_model(model)
        return cls(model, parsed, seed=seed, pinned=pinned)

    @property
    def ledger(self) -> Ledger:
        """The record so far of when each entry was evicted or quantised, in positions that do not count padding.

        Raises SpecError before any token was seen, and for a policy that cannot be replayed.
        """
        cache = self._require_used()
        if not cache.policy.replayable:
            raise SpecError(f"policy {cache.policy.canonical!r} cannot be replayed, so there is no ledger")
        tokens = int(cache.seen.max())
        evicted_at, experts = cache.ledger(tokens), cache.experts(tokens)
        assert self._real is not None
        # ids of the real tokens first, in their order: [B, tokens], -1 after a row's end
        order = torch.sort((~self._real).int(), dim=1, stable=True).indices[:, :tokens]
        ids = torch.cat(self._ids, 1).cpu().masked_fill(~self._real, -1).gather(1, order)
        codec, times = quantiser_of(cache.policy), cache.quantised_at(tokens)
        if codec is None or times is None:
            return Ledger(evicted_at, ids=ids, experts=experts, selections=cache.selections())
        return Ledger(evicted_at, codec, *times, experts, ids, tuple(cache.hints()))

    @property
    def bytes(self) -> int:
        """The bytes allocated now for entries and recurrent states, without the ledger."""
        return self._require_used().bytes

    @property
    def retention(self) -> Tensor:
        """The share of each row's entries still in the cache, mean over the compressed layers: float64 [B]."""
        return self._require_used().retention()

    def _require_used(self) -> EvictingCache:
        if self._evicting is None:
            raise SpecError("this CompressedCache has seen no token yet; pass it to model.generate first")
        return self._evicting

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return the number of columns so far (tokens and padding), which transformers calls the sequence length."""
        return max(int(layer.seen) for layer in self.layers)

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        if self._evicting is None or self._evicting.is_settled:
            raise RunError(_NOT_BEGUN)
        raise RunError("a layer of linear attention was not passed kv=, so its state is lost; use another model")

    def require_made_for(self, model: Any) -> None:
        """Raise RunError if ``model`` has other layers, heads or positions than the cache was made for."""
        if model.config is self._last_config:
            return
        if _cache_shape(model.config) != _cache_shape(self._config):
            raise RunError(
                "this CompressedCache was not made for this model; make one with CompressedCache.for_model(model, ...)"
            )
        self._last_config = model.config

    @skip_compile
    def start(self, attention_mask: Tensor | None, ids: Tensor, position_ids: Tensor | None = None) -> EvictingCache:
        """Begin the forward of ``ids`` [B, Q]; the 2-D mask covers all columns, the new ones included, 1 = real token.

        The ids of one call are compressed as one chunk. A call with a single token is a decode step, unless it is the
        first call. Raises RunError if ``position_ids`` are not the number of real tokens before each token.
        """
        (batch, new), cache, mask = ids.shape, self._evicting, attention_mask
        decoding = new == 1 and cache is not None
        if cache is not None and not cache.is_settled:
            raise RunError("an earlier forward through this CompressedCache was interrupted; make a new cache")
        if cache is not None and len(cache.seen) != batch:
            raise SpecError(f"this CompressedCache serves {len(cache.seen)} rows, got {batch}; make a new one")
        attention_mask, position_ids = self._on_host(attention_mask, position_ids, new)
        seen = torch.zeros(batch, dtype=torch.int64) if cache is None else cache.seen
        positions = row_positions(attention_mask, seen, new)
        try:
            require_positions(position_ids, positions)
        except RunError:
            self._require_continued(position_ids, positions)  # has a better message, but reads too much for every step
            raise
        pinned = self._pinned if cache is None else None  # only tokens of the prompt are pinned
        if pinned is not None and pinned.shape != ids.shape:
            raise SpecError(f"pinned has shape {tuple(pinned.shape)}, the prompt {tuple(ids.shape)}; they must agree")
        # nothing is changed before all checks have passed, so that a caller can correct a call and repeat it
        real = self._add_columns(attention_mask, positions >= 0)
        if cache is None:
            keys = torch.arange(batch, device=ids.device) + self._seed
            cache = EvictingCache(self._config, self._policy, keys, rotary=self._rotary, blocks=self._blocks)
        self._evicting, self._real = cache, real
        self._mask = None if mask is None or mask.device.type == "cpu" else mask
        self._ids.append(ids)
        cache.begin(positions, decoding=decoding, pinned=pinned)
        for layer in self.layers:
            layer.in_forward = True
        return cache

    def _require_continued(self, position_ids: Tensor | None, expected: Tensor) -> None:
        """Raise RunError if ``position_ids`` [B, Q] belong to another conversation than the one in the cache.

        That is, if they begin before the position that follows the cached tokens.
        """
        real = expected >= 0
        if position_ids is None or self._real is None or position_ids.dim() != 2 or not bool(real.any()):
            return
        fits = len(position_ids) in (1, len(expected)) and position_ids.shape[1] == expected.shape[1]
        first = int((position_ids.expand(len(expected), -1)[real] if fits else position_ids).min())
        # generate skips as many tokens of a new prompt as the cache has columns
        if first >= int(expected[real].min()):
            return
        columns = self._real.shape[1]
        if expected.shape[1] > columns and first == 0:
            raise RunError(
                f"this CompressedCache holds {columns} tokens and is given all of them again with the next one, as "
                "use_cache=False does; leave use_cache out"
            )
        raise RunError(
            f"this CompressedCache holds {columns} tokens and is given positions from {first} on, as of another "
            "conversation; make a new cache for each: CompressedCache.for_model(model, ...)"
        )

    def _on_host(
        self, mask: Tensor | None, position_ids: Tensor | None, new: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Copy mask and position ids to the CPU, with a single device read, since each read waits for the device.

        If the mask has grown by ``new`` columns, the old columns are compared on the device and only the new are read.
        """
        last, real = self._mask, self._real
        shapes = None if real is None else (real.shape, (len(real), real.shape[1] + new))
        is_host = mask is None or mask.device.type == "cpu"
        if last is None or mask is None or is_host or real is None or (last.shape, mask.shape) != shapes:
            return None if mask is None else mask.cpu(), None if position_ids is None else position_ids.cpu()
        reads = [mask[:, -new:].bool(), (mask[:, :-new].bool() == last.bool()).all()]
        if position_ids is not None:
            reads.append(position_ids.to(last.device))
        new_columns, is_same, *positions = _copy_to_host(reads)
        on_host = torch.cat([real, new_columns.bool()], 1) if bool(is_same) else mask.cpu()
        return on_host, positions[0] if positions else None

    def _add_columns(self, attention_mask: Tensor | None, real: Tensor) -> Tensor:
        """Return which columns are real tokens, the new ones (``real``) included: bool [B, columns].

        Raises SpecError if the mask contradicts earlier columns.
        """
        before = real[:, :0] if self._real is None else self._real  # [B, columns so far]
        columns = torch.cat([before, real], 1)
        if attention_mask is None:
            return columns
        if attention_mask.shape[1] != columns.shape[1]:
            raise SpecError(
                f"the attention mask has {attention_mask.shape[1]} columns, this CompressedCache has been given "
                f"{columns.shape[1]}: for another batch or conversation, make a new one"
            )
        if not torch.equal(attention_mask[:, : before.shape[1]].bool().cpu(), before):
            raise SpecError(
                "the attention mask hides tokens that this CompressedCache was given as real ones; "
                "make a new cache for another text"
            )
        return columns


def _copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy integer tensors of one device to the CPU in one copy; they become int64."""
    sizes = [tensor.numel() for tensor in tensors]
    joined = torch.cat([tensor.flatten().long() for tensor in tensors]).cpu()
    return [part.view(tensor.shape) for part, tensor in zip(torch.split(joined, sizes), tensors, strict=True)]


def row_positions(attention_mask: Tensor | None, seen: Tensor, new: int) -> Tensor:
    """Return the row positions [B, new] of the new tokens on the CPU (real tokens before each one), -1 at padding.

    ``seen`` [B] are the real tokens of each row before. Raises SpecError for a mask of another shape, RunError for one
    that is not 2-D.
    """
    if attention_mask is None:
        return seen[:, None] + torch.arange(new) if new > 1 else seen[:, None]
    if attention_mask.dim() != 2:
        raise RunError(f"a {attention_mask.dim()}-D attention mask cannot be compressed; pass the 2-D one")
    real = attention_mask[:, -new:].bool().cpu()
    if real.shape != (len(seen), new):
        raise SpecError(f"the attention mask has shape {tuple(real.shape)}, the new tokens {(len(seen), new)}")
    return torch.where(real, seen[:, None] + real.cumsum(1) - 1, -1)  # the number of real tokens before it in its row


def require_positions(position_ids: Tensor | None, expected: Tensor) -> None:
    """Raise RunError if a caller's ``position_ids`` [..., B, Q] differ from ``expected`` [B, Q] at a real token.

    Packed rows, offsets and image positions are not supported. Padding may have any position.
    """
    if position_ids is None or _is_expected_step(position_ids, expected):
        return
    rows, columns = (1, *position_ids.shape)[-2:]
    if rows not in (1, len(expected)) or columns != expected.shape[1]:
        raise RunError(
            f"position_ids have shape {tuple(position_ids.shape)}, the new tokens {tuple(expected.shape)}: leave "
            "position_ids out"
        )
    wrong = ((position_ids.cpu() != expected) & (expected >= 0)).nonzero()
    if len(wrong):
        row, column = wrong[0, -2:].tolist()  # there may be dimensions before the rows
        raise RunError(
            f"position_ids do not put the token at row {row}, column {column} at {int(expected[row, column])}, "
            "the number of real tokens before it; packed rows, offsets and image positions are not supported: leave "
            "them out"
        )


def _is_expected_step(position_ids: Tensor, expected: Tensor) -> bool:
    """Return whether a decode step has the expected positions, compared as Python numbers, which is faster."""
    if expected.shape[1] != 1 or position_ids.numel() != len(expected):
        return False
    return bool(position_ids.flatten().tolist() == [position for (position,) in expected.tolist()])


def prepare_model(model: Any) -> None:
    """Switch a model to the ``kvaudit`` attention and hook it, so that it accepts a CompressedCache."""
    require_interface(model)
    require_one_device(model)
    patch_state_layers(model)
    use_attention(model)
    # checked on the model itself, since a copy of a prepared model is prepared too
    if _pass_cache not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_pass_cache, with_kwargs=True)
        model.register_forward_hook(_settle, with_kwargs=True)
        find_decoder(model).register_forward_pre_hook(_refuse_weights, with_kwargs=True)


def require_one_device(model: Any) -> None:
    """Raise RunError for a model whose layers compute on several devices, because a cache lies on one."""
    device_map = vars(model).get("hf_device_map", {}).values()  # set if transformers spread it over devices
    devices = sorted({str(device) for device in device_map if device not in ("cpu", "disk")})  # these only store layers
    if len(devices) > 1:
        raise RunError(
            f"model {model.config.model_type!r} is spread over the devices {', '.join(devices)}, and a compressed "
            "cache lies on one; load it with device_map={'': 0}, or with fewer bytes per weight"
        )


def use_attention(model: Any) -> None:
    """Set the ``kvaudit`` attention in the model's config, even if another one was set since."""
    if model.config.get_text_config(decoder=True)._attn_implementation != ATTENTION_NAME:
        model.set_attn_implementation(ATTENTION_NAME)


def _refuse_weights(decoder: Any, _: Any, kwargs: dict[str, Any]) -> None:
    """Raise RunError if the call or the config asks for attention weights, which this attention does not compute."""
    asks_weights = kwargs.get("output_attentions", decoder.config.output_attentions)
    if asks_weights and decoder.config._attn_implementation == ATTENTION_NAME:
        raise RunError(
            "output_attentions asks for weights that the kvaudit attention does not make; leave it out, or, for a pass "
            "without a compressed cache, call model.set_attn_implementation('eager') before"
        )


def _cache_shape(config: Any) -> tuple[Any, ...]:
    """Return the properties of a model on which a cache depends, as a tuple to compare: layers, heads and positions."""
    text = config.get_text_config(decoder=True)
    return layer_plans(config, Dense()), kv_heads(config), getattr(text, "rope_parameters", None)


def _pass_cache(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the arguments of a forward that was passed a CompressedCache; this is a pre-hook of the model.

    The forward gets the evicting cache as ``kv``, positions that do not count padding, and no attention mask.
    """
    call = named_arguments(model, args, kwargs)
    cache = call.get("past_key_values")
    if not isinstance(cache, CompressedCache):
        return args, kwargs
    require_causal(model, call)
    require_no_padding_counted(model, call)
    cache.require_made_for(model)
    use_attention(model)
    evicting = cache.start(call_mask(call), call_ids(call), call.get("position_ids"))
    # the cache makes the masks; padding gets position 0, and its output is not used
    return (), call | {"kv": evicting, "attention_mask": None, "position_ids": evicting.positions.clamp(min=0)}


def _settle(_: Any, __: tuple[Any, ...], kwargs: dict[str, Any], ___: Any) -> None:
    kv = kwargs.get("kv")
    if kv is not None:
        kv.settle()


def named_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a forward call, positional ones too, as {parameter name: value}."""
    return {**dict(zip(signature(model.forward).parameters, args, strict=False)), **kwargs} if args else kwargs


def call_ids(call: Mapping[str, Any]) -> Tensor:
    """Return the token ids of a forward call; raise RunError if it has none."""
    ids = call.get("input_ids")
    if not isinstance(ids, Tensor):
        raise RunError("a compressed forward needs input_ids; inputs_embeds are not supported")
    return ids


def call_mask(call: Mapping[str, Any]) -> Tensor | None:
    """Return the attention mask of a forward call, if it has one; raise RunError if it is not a tensor."""
    mask = call.get("attention_mask")
    if mask is None or isinstance(mask, Tensor):
        return mask
    raise RunError(f"attention_mask is a {type(mask).__name__}, wanted the 2-D tensor with 1 at every real token")


def require_causal(model: Any, call: Mapping[str, Any]) -> None:
    """Raise RunError if the call has image tokens, which may attend to later tokens."""
    if getattr(model.config, "vision_config", None) is None:
        return
    for name in ("token_type_ids", "mm_token_type_ids"):
        kinds = call.get(name)
        if isinstance(kinds, Tensor) and bool(kinds.any()):
            raise RunError(
                f"{name} mark tokens of an image, which may attend to later ones; a compressed cache takes only text"
            )


def require_no_padding_counted(model: Any, call: Mapping[str, Any]) -> None:
    """Raise RunError if the call asks for a router loss (of experts) and has padding, which the loss would count.

    The compressed cache keeps the mask to itself, so the model cannot leave padding out.
    """
    mask, adds_loss = call_mask(call), call.get("output_router_logits")
    if adds_loss is None:  # then the config decides, for a call with labels
        adds_loss = call.get("labels") is not None and vars(model.config.get_text_config()).get("output_router_logits")
    if adds_loss and mask is not None and not bool(mask[:, -call_ids(call).shape[1] :].all()):
        raise RunError(
            "output_router_logits makes a loss that would count padding here; set it to False, or give rows of one "
            "length"
        )
