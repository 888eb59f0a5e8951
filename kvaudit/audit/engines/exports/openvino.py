"""A checkpoint in OpenVINO's format: traced by its PyTorch frontend, with the cache as a state of the model.

The traced model uses transformers' scaled dot product attention. OpenVINO replaces it by paged attention, with the
configured cache, when a pipeline loads the folder.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging

from kvaudit.audit.cache.layers import head_size, kv_heads
from kvaudit.core.errors import SpecError

OPENVINO_METHOD = "float32, traced 1"  # see ``convert_once``; another number for another conversion
_INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
_ROWS, _SEEN, _NEW = 2, 3, 4  # sizes of the example input: distinct and above 1, so that none becomes a constant


class _TensorCacheModel(nn.Module):
    """A model whose cache goes in and out as tensors [B, H, T, D]: keys, then values, of each layer in order."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, beam_idx: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        cache = transformers.DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = transformers.cache_utils.DynamicLayer()
            layer.keys, layer.values = keys.index_select(0, beam_idx), values.index_select(0, beam_idx)
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
            cache.layers.append(layer)
        total, new = attention_mask.shape[1], input_ids.shape[1]
        query = torch.arange(new)[:, None] + (total - new)  # [new, 1] positions
        # [B, 1, new, total]
        seen = (torch.arange(total)[None] <= query)[None, None] & attention_mask.bool()[:, None, None]
        out = self.model(
            input_ids, attention_mask=seen, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        return (out.logits, *(t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)))


def export_openvino(model: Any, folder: Path) -> dict[str, str]:
    """Write ``openvino_model.xml``, its weights and the configuration; return the versions of the libraries by name.

    Raises SpecError for a model that cannot be traced, for example because some layers do not use full attention.
    """
    # OpenVINO reports its import over the network; without this module it does not
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino as ov

    network = _stock_model(model)
    heads, size = kv_heads(network.config), head_size(network.config)
    layers = network.config.get_text_config(decoder=True).num_hidden_layers
    past = [torch.zeros(_ROWS, heads, _SEEN, size) for _ in range(2 * layers)]  # each [B, H, T, D]
    example = (
        torch.ones(_ROWS, _NEW, dtype=torch.int64),
        torch.ones(_ROWS, _SEEN + _NEW, dtype=torch.int64),
        torch.arange(_SEEN, _SEEN + _NEW).repeat(_ROWS, 1),
        torch.arange(_ROWS),
        *past,
    )
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # tracing warns about a missing loss
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            traced = ov.convert_model(_TensorCacheModel(network), example_input=example)
    except Exception as error:  # the tracer and the frontend raise many types
        reason = str(error).strip().splitlines()[-1][:200]
        raise SpecError(f"the model cannot be converted for OpenVINO ({type(error).__name__}: {reason})") from None
    finally:
        logging.set_verbosity(verbosity)
    _make_stateful(traced, heads, size, layers)
    ov.save_model(traced, folder / "openvino_model.xml", compress_to_fp16=False)
    network.config.save_pretrained(folder)
    return {"openvino": ov.get_version(), "transformers": transformers.__version__, "torch": torch.__version__}


def _stock_model(model: Any) -> Any:
    """Return a float32 model with transformers' own attention and the weights of ``model``."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    # no memory for weights that are replaced at once
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.load_state_dict({name: t.detach().float().cpu() for name, t in model.state_dict().items()}, assign=True)
    network.tie_weights()
    for name, buffer in model.named_buffers():  # rotary frequencies, which no checkpoint holds
        module, _, buffer_name = name.rpartition(".")
        network.get_submodule(module).register_buffer(buffer_name, buffer.detach().float().cpu(), persistent=False)
    return network.eval()


def _make_stateful(traced: Any, heads: int, size: int, layers: int) -> None:
    """Change the traced model in place: name its inputs and outputs, and turn its cache into an internal state.

    The state is empty at first. ``heads`` is the number of KV heads, ``size`` that of the channels of a head.
    """
    import numpy as np
    import openvino as ov
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation

    tensors = [f"{layer}.{which}" for layer in range(layers) for which in ("key", "value")]
    names = [*_INPUTS, *(f"past_key_values.{tensor}" for tensor in tensors)]
    if len(traced.inputs) != len(names):
        raise SpecError(f"the model has {len(traced.inputs)} inputs once traced, expected {len(names)}")
    for port, name in zip(traced.inputs, names, strict=True):
        node = port.get_node()
        port.get_tensor().set_names({name})
        if name in _INPUTS:
            node.set_partial_shape(ov.PartialShape([-1] if name == "beam_idx" else [-1, -1]))
            node.set_element_type(ov.Type.i32 if name == "beam_idx" else ov.Type.i64)
        else:
            node.set_partial_shape(ov.PartialShape([-1, heads, -1, size]))
    outputs = ["logits", *(f"present.{tensor}" for tensor in tensors)]
    for port, name in zip(traced.outputs, outputs, strict=True):
        port.get_tensor().set_names({name})
    traced.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(traced, {f"past_key_values.{name}": f"present.{name}" for name in tensors})

    def number(value: int) -> Any:
        return opset13.constant(np.array([value]), ov.Type.i64)

    rows = opset13.gather(opset13.shape_of(traced.input("input_ids"), output_type="i64"), number(0), number(0))
    # the shape [B, H, 0, D], with B from input_ids
    empty = opset13.concat([rows, number(heads), number(0), number(size)], 0)
    for node in traced.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([opset13.broadcast(opset13.constant(0.0, ov.Type.f32), empty)])
    traced.validate_nodes_and_infer_types()
