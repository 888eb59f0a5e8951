"""The one attention function the project registers with transformers, under the name ``kvaudit``.

A forward call that passes ``kv=`` (an object with ``attend``) decides for itself what each query sees: the evicting
cache while sampling, the ledger while learning. Without it, attention is the stock one.
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
MASK_ELEMENTS = 1 << 26  # largest mask held at once: query blocks are cut to this
LONG_QUERIES = 256  # queries from which on a mask is larger than what it masks
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def skip_compile(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same, which ``torch.compile`` leaves alone: a cache counts on the host, and its sizes change every step."""
    whole: Callable[Arguments, Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return whole


def disable_cudnn_attention(device: torch.device) -> None:
    """Keep cuDNN's attention out of this process where its models are on a GPU.

    On Hopper and later torch takes it first, and it makes a plan for every length that it has not met: of a cache that
    grows a new one at every step, in tens of milliseconds. Other kernels need none.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


class ExpertRoutes(Protocol):
    """What stands behind ``kv.routes``."""

    def chosen(self, block: int, own: Tensor) -> Tensor:
        """The experts [N, k] that block number ``block`` is to use, given those it would choose itself."""
        ...


class AttentionCall(NamedTuple):
    """What one layer asks of ``kv``: attention of queries [B, G*H, Q, D] with new keys and values [B, H, Q, D].

    ``sink_logits`` [G*H] stand beside the logits of every query and have no value (gpt-oss).
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    sink_logits: Tensor | None = None


class KVHandler(Protocol):
    """What stands behind ``kv=``; where it has ``routes``, mixture-of-experts blocks answer to them.

    Its ``carry`` is what layers of linear attention ask for their state (``kvaudit.audit.cache.layers``).
    """

    @property
    def routes(self) -> ExpertRoutes | None: ...

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention output [B, G*H, Q, D]."""
        ...

    def settle(self) -> None:
        """After a forward of a model: raise RunError where some layer did not come here."""
        ...


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
    """Attention in the form transformers calls it: returns ([B, Q, G*H, D], None)."""
    for unsupported in ("softcap", "position_bias"):  # transformers' own function would pass over them in silence
        if kwargs.get(unsupported) is not None:
            raise RunError(f"this model's attention uses {unsupported}, which the evicting cache does not support")
    if kv is None and s_aux is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return out, None
    if kwargs.get("dropout"):
        raise RunError(
            f"attention dropout of {kwargs['dropout']} would make the pass another policy than the sampler's; "
            "set it to 0 in the model's config, or call model.eval()"
        )
    if "is_causal" in vars(module) and not module.is_causal:
        raise RunError("this model's attention looks ahead: an encoder, or a decoder loaded without is_decoder=True")
    if kv is not None and kwargs.get("is_causal") is False:
        raise RunError("is_causal=False lets a token see those behind it, which no compressed cache does; leave it out")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling  # 1 / sqrt(D)
    if kv is None:
        if attention_mask is None and query.shape[2] > 1:
            # a cache of a fixed size is longer than the text that begins it
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            attention_mask = causal_mask(query.shape[2], query.device)
        out = grouped_attention(query, key, value, attention_mask, scale, s_aux)
    else:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        out = kv.attend(AttentionCall(layer, query, key, value, scale, s_aux))
    return out.transpose(1, 2).contiguous(), None


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scaling: float,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Softmax attention with grouped queries, keys never repeated.

    query [B, G*H, Q, D], key and value [B, H, K, D], visible bool [B, H, Q, K] or None for all, with 1 for B
    where rows are alike, and 1 or G*H for H. Beside sinks ``visible`` may be numbers that are added to the logits.
    Every query must see something. Returns [B, G*H, Q, D].
    """
    if sink_logits is not None:
        return _beside_sinks(query, key, value, visible, scaling, sink_logits)
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]  # query heads of a KV head
    if visible is not None and groups > 1 and length >= LONG_QUERIES:
        return _many_queries(query, key, value, visible, scaling)
    packed = query.reshape(batch, key.shape[1], groups * length, size)  # [B, H, G*Q, D]: as queries of one head
    # rows of the mask follow ``packed``: all queries of a group's first head, then all of its second
    if visible is not None and groups > 1:
        apart = visible.shape[1] == heads
        visible = visible.reshape(batch, key.shape[1], -1, key.shape[2]) if apart else visible.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=visible, scale=scaling)
    return out.reshape(batch, heads, length, -1)  # -1: values may be of another size than keys


def _many_queries(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """The same where a mask outweighs keys and values: these are repeated in its place."""
    batch, heads, length, size = query.shape
    kv, groups = key.shape[1], heads // key.shape[1]
    # in numbers, as the kernel would make it, but once for all heads that share it
    mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, float("-inf"))
    if mask.shape[1] in (1, heads):
        # repeated here: asked to do it, no fused kernel of a GPU takes a mask
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    mask = mask.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]  # [B*H, 1, Q, K]: a KV head is a row
    rows = query.reshape(batch * kv, -1, length, size)  # [B*H, G, Q, D]
    keys, values = (t.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for t in (key, value))  # [B*H, G, K, D]
    return scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling).reshape(
        batch, heads, length, -1
    )


def _beside_sinks(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float, sink_logits: Tensor
) -> Tensor:
    """Written out, because no kernel of torch knows of sinks: float32 at least, in blocks of queries."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    packed = query.reshape(len(query), key.shape[1], -1, *query.shape[2:]).to(dtype)  # [B, H, G, Q, D]
    if visible is not None:  # one set per query head, or per KV head for all that share it
        apart = visible.shape[1] > key.shape[1]
        # [1 or B, 1 or H, 1 or G, Q, K]
        visible = visible.reshape(len(visible), key.shape[1], -1, *visible.shape[2:]) if apart else visible[:, :, None]
    key, value = key.to(dtype), value.to(dtype)
    parts = []
    for some in query_blocks(query.shape[2], query.shape[0] * query.shape[1] * key.shape[2]):
        logits = torch.einsum("bhgqd,bhkd->bhgqk", packed[:, :, :, some], key) * scaling  # [B, H, G, q, K]
        if visible is not None:
            seen = visible[:, :, :, some]
            logits = logits.masked_fill(~seen, float("-inf")) if seen.dtype == torch.bool else logits + seen
        parts.append(torch.einsum("bhgqk,bhkd->bhgqd", softmax(logits, sink_logits), value))  # [B, H, G, q, D]
    return torch.cat(parts, 3).flatten(1, 2).to(query.dtype)  # [B, G*H, Q, D]


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Which of its own tokens each query of a whole sequence sees: bool [1, 1, length, length]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def query_blocks(queries: int, elements: int, *, start: int = 0, most: int | None = None) -> list[slice]:
    """Slices of queries from ``start`` on whose mask, of ``elements`` per query, stays within MASK_ELEMENTS."""
    step = max(1, min(MASK_ELEMENTS // elements, most or queries))  # one query at least, however long its keys
    return [slice(first, min(first + step, queries)) for first in range(start, queries, step)]


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sink_logits: Tensor | None = None
) -> Tensor:
    """Plain causal attention of a whole sequence, same shapes as ``grouped_attention``."""
    if sink_logits is not None:
        return _beside_sinks(query, key, value, causal_mask(query.shape[2], query.device), scaling, sink_logits)
    return scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def inner_model(model: Any) -> Any:
    """The transformers model that a compiled or peft model calls, or the model itself.

    Raises RunError for adapters that put tokens of their own before the prompt, SpecError for what is no model.
    """
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if not hasattr(model, "get_base_model"):
        require_model(model)
        return model
    if model.active_peft_config.is_prompt_learning:
        raise RunError("adapters that add virtual tokens move every position; use LoRA or the like, or merge them")
    return model.get_base_model()


def require_model(model: Any) -> None:
    """Raise SpecError for what only holds or names a transformers model, in a sentence about what it is."""
    if hasattr(type(model), "_supports_attention_backend"):
        return
    kind = type(model).__name__
    if isinstance(model, str | PathLike):
        got = f"{str(model)!r}, which names a model; load it: AutoModelForCausalLM.from_pretrained(...)"
    elif isinstance(model, type):
        got = f"the class {model.__name__}; load a model of it: {model.__name__}.from_pretrained(...)"
    elif hasattr(model, "module"):  # DataParallel, DistributedDataParallel, an engine of DeepSpeed
        got = f"a {kind}, which wraps a model; give its model.module"
    elif hasattr(model, "model") and hasattr(model, "tokenizer"):
        got = f"a {kind}, which holds a model; give its pipe.model"
    else:
        got = f"a {kind}"
    raise SpecError(f"wanted a loaded transformers model, got {got}")


def find_decoder(model: Any) -> Any:
    """The part of a causal model that makes its last hidden states.

    transformers takes a layer named ``decoder`` for it, which in ModernBERT's decoder makes the logits.
    """
    found = model.get_decoder()
    return inner_model(model).base_model if found is model.get_output_embeddings() else found


def require_interface(model: Any) -> None:
    """Raise RunError for a model that computes attention by code of its own: nothing could be evicted there."""
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
        raise RunError("this model's attention looks ahead: its config says is_causal=False")
    if "position_ids" not in signature(kind.forward).parameters:
        raise RunError(
            f"model {model.config.model_type!r} takes no position_ids, so a token would stand at its place in the "
            "cache, not in the text; use another model"
        )


def require_single_call(layer: int, attended: Collection[int], layers: int) -> None:
    """Raise RunError where ``layer`` is not one of ``layers`` that each attend once a forward."""
    if layer in attended or layer >= layers:
        raise RunError(
            f"layer {layer} of the model's {layers} attends {'again' if layer in attended else 'too'} in one forward: "
            "layers that run repeatedly would share one cache, which is not supported; use another model"
        )


AttentionInterface.register(ATTENTION_NAME, attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
