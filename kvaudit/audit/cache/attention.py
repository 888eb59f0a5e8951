"""The attention function that kvaudit registers with transformers, under the name ``kvaudit``.

A forward call that passes ``kv=`` (a ``KVHandler``) leaves attention to that object: the evicting cache while sampling,
a replay of its ledger while learning. Without ``kv=`` attention is the stock one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from inspect import signature
from os import PathLike
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvaudit.audit.policies import softmax
from kvaudit.core.errors import RunError, SpecError

ATTENTION_NAME = "kvaudit"
MASK_ELEMENTS = 1 << 26  # elements of the largest mask; queries are split into blocks to stay below
LONG_QUERIES = 256  # queries from which on a mask takes more memory than keys and values
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def skip_compile(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Exclude a function from ``torch.compile``: it runs Python code on tensors whose sizes change at every step."""
    plain: Callable[Arguments, Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return plain


def disable_cudnn_attention(device: torch.device) -> None:
    """Disable cuDNN's attention in this process, if ``device`` is a GPU.

    torch prefers it on Hopper and later. It takes tens of milliseconds to plan for each new length, and a growing cache
    has a new length at every step. Other kernels need no plan.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


class ExpertRoutes(Protocol):
    """The object ``kv.routes``, which records or overrides the experts of a mixture-of-experts model."""

    def route(self, block: int, experts: Tensor) -> Tensor:
        """Return the experts [tokens, k] that block number ``block`` must use; ``experts`` are its router's choice."""


class AttentionCall(NamedTuple):
    """The arguments of one layer's attention: queries [B, G*H, Q, D], new keys and values [B, H, K, D].

    B rows, H KV heads with G query heads each, D channels. ``scaling`` multiplies the products of queries and keys.
    Some models (gpt-oss) have ``sink_logits`` [G*H]: one more logit per query head, which takes part in the softmax of
    every query but adds no value.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    sink_logits: Tensor | None = None


class KVHandler(Protocol):
    """The object passed to a model's forward as ``kv=``, which computes the attention of every layer.

    If ``routes`` is not None, it gets the experts that each mixture-of-experts block selects. A layer of linear
    attention calls the object's method ``carry`` instead of ``attend`` (see ``kvaudit.audit.cache.layers``).
    """

    @property
    def routes(self) -> ExpertRoutes | None: ...

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [B, G*H, Q, D]."""

    def settle(self) -> None:
        """Check a finished forward: raise RunError if some layer did not call this object."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv: KVHandler | None = None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return ([B, Q, G*H, D], None): the attention output, in the form in which transformers expects it.

    ``kv``, if passed, computes the attention; otherwise it is the stock one. Raises RunError for options that the cache
    does not support, such as dropout or attention that is not causal.
    """
    for option in ("softcap", "position_bias"):  # transformers' own function would ignore them silently
        if kwargs.get(option) is not None:
            raise RunError(f"this model's attention uses {option}, which the evicting cache does not support")
    if kv is None and s_aux is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return out, None
    if kwargs.get("dropout"):
        raise RunError(
            f"attention dropout of {kwargs['dropout']} would make this pass differ from the sampler's policy; "
            "set it to 0 in the model's config, or call model.eval()"
        )
    if "is_causal" in vars(module) and not module.is_causal:
        raise RunError("this model's attention is not causal: an encoder, or a decoder loaded without is_decoder=True")
    if kv is not None and kwargs.get("is_causal") is False:
        raise RunError("is_causal=False lets a token see later ones, which no compressed cache supports; leave it out")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling  # 1 / sqrt(D)
    if kv is None:
        if attention_mask is None and query.shape[2] > 1:
            # a static cache is longer than the prompt it holds
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            attention_mask = causal_mask(query.shape[2], query.device)
        out = grouped_attention(query, key, value, attention_mask, scale, s_aux)
    else:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        out = kv.attend(AttentionCall(layer, query, key, value, scale, s_aux))
    return out.transpose(1, 2).contiguous(), None


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float, sink_logits: Tensor | None = None
) -> Tensor:
    """Return the softmax attention [B, G*H, Q, D] of grouped queries, where each KV head serves G query heads.

    ``query`` is [B, G*H, Q, D], ``key`` and ``value`` [B, H, K, D]. ``visible`` bool [B or 1, H or G*H or 1, Q, K] says
    which keys each query sees, None = all; every query must see at least one. With ``sink_logits`` [G*H] it may instead
    hold numbers, which are added to the logits. Keys are repeated for the query heads only if many queries have a mask.
    """
    if sink_logits is not None:
        return _attention_with_sinks(query, key, value, visible, scaling, sink_logits)
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]  # query heads of a KV head
    if visible is not None and groups > 1 and length >= LONG_QUERIES:
        return _attention_repeating_keys(query, key, value, visible, scaling)
    packed = query.reshape(batch, key.shape[1], groups * length, size)  # [B, H, G*Q, D]: as queries of one head
    # rows of the mask are ordered as ``packed``: all queries of a group's first head, then all of its second
    if visible is not None and groups > 1:
        per_query_head = visible.shape[1] == heads
        visible = (
            visible.reshape(batch, key.shape[1], -1, key.shape[2])
            if per_query_head
            else visible.repeat(1, 1, groups, 1)
        )
    out = scaled_dot_product_attention(packed, key, value, attn_mask=visible, scale=scaling)
    return out.reshape(batch, heads, length, -1)  # -1: values may have another size than keys


def _attention_repeating_keys(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Compute ``grouped_attention`` with keys and values repeated for each query head.

    For many queries that takes less memory than to repeat the mask for each query head.
    """
    batch, heads, length, size = query.shape
    kv_heads, groups = key.shape[1], heads // key.shape[1]
    # the additive mask that the kernel would make, but made once for all heads that share it
    mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, float("-inf"))
    if mask.shape[1] in (1, heads):
        # repeated here, not by ``enable_gqa``: with that no fused GPU kernel accepts a mask
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    mask = mask.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]  # [B*H, 1, Q, K]: a KV head is a row
    rows = query.reshape(batch * kv_heads, -1, length, size)  # [B*H, G, Q, D]
    keys, values = (t.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for t in (key, value))  # [B*H, G, K, D]
    out = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, length, -1)


def _attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float, sink_logits: Tensor
) -> Tensor:
    """Compute ``grouped_attention`` with sink logits, which no torch kernel supports.

    Sink logits take part in every query's softmax but have no value. Blocks of queries are computed one after the
    other, in float32 or wider.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    packed = query.reshape(len(query), key.shape[1], -1, *query.shape[2:]).to(dtype)  # [B, H, G, Q, D]
    if visible is not None:  # [1 or B, 1 or H, 1 or G, Q, K]
        if visible.shape[1] > key.shape[1]:  # a mask per query head
            visible = visible.reshape(len(visible), key.shape[1], -1, *visible.shape[2:])
        else:
            visible = visible[:, :, None]
    key, value = key.to(dtype), value.to(dtype)
    outputs = []
    for block in query_blocks(query.shape[2], query.shape[0] * query.shape[1] * key.shape[2]):
        logits = torch.einsum("bhgqd,bhkd->bhgqk", packed[:, :, :, block], key) * scaling  # [B, H, G, q, K]
        if visible is not None:
            mask = visible[:, :, :, block]
            logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
        outputs.append(torch.einsum("bhgqk,bhkd->bhgqd", softmax(logits, sink_logits), value))  # [B, H, G, q, D]
    return torch.cat(outputs, 3).flatten(1, 2).to(query.dtype)  # [B, G*H, Q, D]


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Return the causal mask of a whole sequence: bool [1, 1, length, length]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def query_blocks(queries: int, elements: int, *, start: int = 0, most: int | None = None) -> list[slice]:
    """Return slices of the queries from ``start`` on, each of at most ``most`` queries and MASK_ELEMENTS mask elements.

    ``elements`` is the number of mask elements per query. A slice has at least one query, even if its mask is larger.
    """
    step = max(1, min(MASK_ELEMENTS // elements, most or queries))
    return [slice(first, min(first + step, queries)) for first in range(start, queries, step)]


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sink_logits: Tensor | None = None
) -> Tensor:
    """Return the causal attention output [B, G*H, T, D] of a whole sequence of T tokens.

    ``query`` is [B, G*H, T, D], ``key`` and ``value`` [B, H, T, D], ``sink_logits`` [G*H] (see ``grouped_attention``).
    """
    if sink_logits is not None:
        return _attention_with_sinks(query, key, value, causal_mask(query.shape[2], query.device), scaling, sink_logits)
    return scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def inner_model(model: Any) -> Any:
    """Return the transformers model inside a compiled or peft model, or the model itself.

    Raises RunError for adapters that add virtual tokens before the prompt, SpecError for anything but a model.
    """
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if not hasattr(model, "get_base_model"):
        require_model(model)
        return model
    if model.active_peft_config.is_prompt_learning:
        raise RunError(
            "adapters with virtual tokens move every position and are not supported; use LoRA or similar, or merge them"
        )
    return model.get_base_model()


def require_model(model: Any) -> None:
    """Raise SpecError unless ``model`` is a loaded transformers model; the message says how to load or unwrap it."""
    if hasattr(type(model), "_supports_attention_backend"):
        return
    kind = type(model).__name__
    if isinstance(model, str | PathLike):
        got = f"{str(model)!r}, the name of a model; load it: AutoModelForCausalLM.from_pretrained(...)"
    elif isinstance(model, type):
        got = f"the class {model.__name__}; load a model of it: {model.__name__}.from_pretrained(...)"
    elif hasattr(model, "module"):  # DataParallel, DistributedDataParallel, an engine of DeepSpeed
        got = f"a {kind}, which wraps a model; pass its model.module"
    elif hasattr(model, "model") and hasattr(model, "tokenizer"):
        got = f"a {kind}, which contains a model; pass its pipe.model"
    else:
        got = f"a {kind}"
    raise SpecError(f"wanted a loaded transformers model, got {got}")


def find_decoder(model: Any) -> Any:
    """Return the part of a causal model that computes its last hidden states.

    Usually that is ``model.get_decoder()``. In ModernBERT's decoder the layer that makes the logits is named
    ``decoder``, so ``get_decoder`` returns that layer; then the base model is returned instead.
    """
    decoder = model.get_decoder()
    return inner_model(model).base_model if decoder is model.get_output_embeddings() else decoder


def require_interface(model: Any) -> None:
    """Raise RunError for a model whose attention does not go through transformers' attention interface."""
    kind = type(model)
    if not (kind._supports_attention_backend or "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[kind.__module__])):
        raise RunError(
            f"model {model.config.model_type!r} computes attention by code of its own, not through transformers' "
            "attention interface, so its cache cannot be compressed; use another model"
        )
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise RunError("this model's attention uses softcap, which the evicting cache does not support")
    if getattr(text, "is_causal", True) is False:
        raise RunError("this model's attention is not causal: its config says is_causal=False")
    if "position_ids" not in signature(kind.forward).parameters:
        raise RunError(
            f"model {model.config.model_type!r} takes no position_ids, so tokens would get their position in the cache "
            "instead of the one in the text; use another model"
        )


def require_single_call(layer: int, attended: Collection[int], layers: int) -> None:
    """Raise RunError if ``layer`` has called attention already in this forward, or is not below ``layers``.

    ``attended`` are the numbers of the layers that have called; ``layers`` is how many layers the model has.
    """
    if layer in attended or layer >= layers:
        raise RunError(
            f"layer {layer} of the model's {layers} attends {'again' if layer in attended else 'too'} in one forward: "
            "layers that run repeatedly would share one cache, which is not supported; use another model"
        )


AttentionInterface.register(ATTENTION_NAME, attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
