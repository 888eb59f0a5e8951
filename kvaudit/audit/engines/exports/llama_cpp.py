"""A checkpoint as one GGUF file of float32: llama.cpp computes with the weights as they are, and only its cache varies.

Token ids go in and out, so the file holds no vocabulary. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md;
tensors are named by the maps of the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.core.errors import SpecError
from kvaudit.core.text import install_line

GGUF_METHOD = "float32, gguf 1"  # by which conversions are told apart; another number for another way
GGUF_FILE = "model.gguf"


class _Family(NamedTuple):
    """How llama.cpp has an architecture: its name in ``gguf.MODEL_ARCH``, and the way it turns queries and keys."""

    arch: str
    in_pairs: bool  # neighbours turn together, where transformers turns halves; also: it takes rope_freqs


_FAMILIES = {
    "llama": _Family("LLAMA", True),
    "mistral": _Family("LLAMA", True),
    "qwen2": _Family("QWEN2", False),
    "qwen3": _Family("QWEN3", False),
}


def export_gguf(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> dict[str, str]:
    """Write ``model.gguf``; the versions of what made it. SpecError: llama.cpp has no such model.

    ``weights`` by the names of the model's own are written instead of those.
    """
    try:
        import gguf
    except ImportError:
        raise SpecError(f"writing a GGUF file needs another package: {install_line('llama-cpp')}") from None
    config = model.config
    family = _family(config)
    arch = gguf.MODEL_ARCH[family.arch]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(folder / GGUF_FILE, gguf.MODEL_ARCH_NAMES[arch])
    _describe(writer, config)
    for name, tensor in _tensors(model, family, model.state_dict() if weights is None else weights):
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if ours is None:
            raise _unknown(f"its tensor {name} is none of {family.arch.lower()} there")
        writer.add_tensor(ours, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"gguf": version("gguf"), "torch": torch.__version__}


def head_layout(config: Any) -> tuple[int, bool]:
    """The size of a head, and whether neighbours in it turn together by position as llama.cpp has the model."""
    return _head_size(config), _family(config).in_pairs


def _family(config: Any) -> _Family:
    """The family of a configuration, all of whose layers attend to everything; raises SpecError for another."""
    if config.model_type not in _FAMILIES:
        raise _unknown(f"its architecture is {config.model_type}, known: {', '.join(sorted(_FAMILIES))}")
    said = config.to_dict()
    layers = set(said.get("layer_types") or ["full_attention"])
    if layers != {"full_attention"} or (said.get("sliding_window") and config.model_type == "mistral"):
        raise _unknown(f"it has layers of another kind than full attention ({', '.join(sorted(layers))})")
    if config.hidden_act != "silu":
        raise _unknown(f"its hidden_act is {config.hidden_act}, wanted silu")
    return _FAMILIES[config.model_type]


def _describe(writer: Any, config: Any) -> None:
    size = _head_size(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _tensors(model: Any, family: _Family, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in float32 under the name that transformers has for it, turned as llama.cpp turns."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in weights.items():
        # llama.cpp takes the embeddings where there is no head
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        plain = tensor.detach().to("cpu", torch.float32)
        part = name.split(".")[-2]
        yield name, _paired(plain, heads[part]) if family.in_pairs and part in heads else plain.contiguous()
    factors = _rope_factors(model, family)
    if factors is not None:
        yield "rope_freqs.weight", factors


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head in another order: the two halves that turn against each other become neighbours."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])  # [heads, 2, D / 2, ...]
    return halves.transpose(1, 2).reshape(weight.shape)


def _rope_factors(model: Any, family: _Family) -> Tensor | None:
    """By what llama.cpp divides each frequency of the positions, None where none is scaled."""
    rotary, size = model.get_decoder().rotary_emb, _head_size(model.config)
    if rotary.attention_scaling != 1 or rotary.inv_freq.shape != (size // 2,):
        raise _unknown(f"its positions are of the kind {rotary.rope_type}, with parts left alone or attention scaled")
    theta = model.config.rope_parameters["rope_theta"]
    plain = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)  # [D / 2], as they would be unscaled
    factors: Tensor = plain / rotary.inv_freq.detach().double().cpu()
    if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5):
        return None
    if rotary.rope_type not in ("llama3", "linear") or not family.in_pairs:
        raise _unknown(f"its positions are of the kind {rotary.rope_type}, which {family.arch.lower()} there has not")
    return factors.float()


def _head_size(config: Any) -> int:
    said = config.to_dict().get("head_dim")
    return int(said or config.hidden_size // config.num_attention_heads)


def _unknown(why: str) -> SpecError:
    return SpecError(
        f"the model cannot be written for llama.cpp: {why}; give a GGUF file of it as engines.llama.cpp.weights"
    )
