"""llama.cpp's formats: a checkpoint as one float32 GGUF file, and the state of its KV cache as keys and values.

The GGUF file has no vocabulary, because only token ids go in and out. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the ``gguf`` package maps the names of tensors.

The state is that of ``llama_state_seq_get_data`` as of 2026-11 (llama-cpp-python 0.3.36), little-endian:

    u32 magic, i32 sequence, u32 streams, then for each stream:
      u32 cells (0: nothing follows), for each cell: i32 position, u32 sequences, i32 each of them
      u32 whether values are transposed, u32 layers
      keys of each layer: i32 type, u64 bytes of a row, rows; then values of each layer alike

Transposed values have u32 bytes of a number and u32 channels instead of the bytes of a row.

Before quantising, llama.cpp multiplies consecutive parts of each head by a Hadamard matrix. A part of a key has as many
channels as the largest power of two that divides the head size, a part of a value 64. If the head size is no multiple
of 64, nothing is rotated. (Found by solving for the matrix, for head sizes 64 to 256.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.cache.layers import head_size
from kvaudit.audit.policies.q4_0 import hadamard
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.text import install_command

GGUF_METHOD = "float32, gguf 1"  # see ``convert_once``; another number for another conversion
GGUF_FILE = "model.gguf"
_MAGIC = 0xAF143CD8
_ROTATED = 64  # numbers that are rotated together, for keys at least


class _Family(NamedTuple):
    """An architecture in llama.cpp: its name in ``gguf.MODEL_ARCH`` and its layout of rotary embeddings."""

    arch: str
    is_interleaved: bool  # neighbours rotate together (transformers: two halves); such families take rope_freqs too


_FAMILIES = {
    "llama": _Family("LLAMA", True),
    "mistral": _Family("LLAMA", True),
    "qwen2": _Family("QWEN2", False),
    "qwen3": _Family("QWEN3", False),
}


def export_gguf(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> dict[str, str]:
    """Write ``model.gguf`` into ``folder`` and return the versions of the libraries used, {name: version}.

    ``weights``, keyed by the model's own names, replace the model's weights. Raises SpecError for an unsupported model.
    """
    try:
        import gguf
    except ImportError:
        raise SpecError(f"writing a GGUF file needs another package: {install_command('llama-cpp')}") from None
    config = model.config
    family = _family(config)
    arch = gguf.MODEL_ARCH[family.arch]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(folder / GGUF_FILE, gguf.MODEL_ARCH_NAMES[arch])
    _write_metadata(writer, config)
    for name, tensor in _tensors(model, family, model.state_dict() if weights is None else weights):
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise _unsupported(f"{family.arch.lower()} has no tensor {name} there")
        writer.add_tensor(gguf_name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"gguf": version("gguf"), "torch": torch.__version__}


def _family(config: Any) -> _Family:
    """Return the family of a model (the way in which its architecture is written to GGUF).

    Raises SpecError if it is unknown or some layers do not use full attention.
    """
    if config.model_type not in _FAMILIES:
        raise _unsupported(f"its architecture is {config.model_type}, supported: {', '.join(sorted(_FAMILIES))}")
    fields = config.to_dict()
    layers = set(fields.get("layer_types") or ["full_attention"])
    if layers != {"full_attention"} or (fields.get("sliding_window") and config.model_type == "mistral"):
        raise _unsupported(f"some of its layers do not use full attention ({', '.join(sorted(layers))})")
    if config.hidden_act != "silu":
        raise _unsupported(f"its hidden_act is {config.hidden_act}, expected silu")
    return _FAMILIES[config.model_type]


def _write_metadata(writer: Any, config: Any) -> None:
    size = head_size(config)
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
    """Yield (transformers' name, float32 tensor) of every weight; rows of queries and keys are in llama.cpp's order."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in weights.items():
        # llama.cpp uses the embeddings if the file has no head
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.detach().to("cpu", torch.float32)
        module = name.split(".")[-2]
        if family.is_interleaved and module in heads:
            yield name, _interleave(weight, heads[module])
        else:
            yield name, weight.contiguous()
    factors = _rope_factors(model, family)
    if factors is not None:
        yield "rope_freqs.weight", factors


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """Return the weight with each head's rows reordered, so that two channels that rotate together are neighbours."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])  # [heads, 2, D / 2, ...]
    return halves.transpose(1, 2).reshape(weight.shape)


def _rope_factors(model: Any, family: _Family) -> Tensor | None:
    """Return the factors [D / 2] by which the model divides its rotary frequencies; None if all factors are 1."""
    rotary, size = model.get_decoder().rotary_emb, head_size(model.config)
    if rotary.attention_scaling != 1 or rotary.inv_freq.shape != (size // 2,):
        raise _unsupported(f"its {rotary.rope_type} positions rotate only a part of a head, or scale attention")
    theta = model.config.rope_parameters["rope_theta"]
    unscaled = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)  # [D / 2]
    factors: Tensor = unscaled / rotary.inv_freq.detach().double().cpu()
    if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5):
        return None
    if rotary.rope_type not in ("llama3", "linear") or not family.is_interleaved:
        raise _unsupported(f"{family.arch.lower()} has no positions of the kind {rotary.rope_type} there")
    return factors.float()


def _unsupported(reason: str) -> SpecError:
    return SpecError(
        f"the model cannot be written for llama.cpp: {reason}; give a GGUF file of it as engines.llama.cpp.weights"
    )


class HeadLayout(NamedTuple):
    """The layout of a head in the cache: its size, and how llama.cpp has permuted and rotated its channels.

    If ``is_interleaved``, channels that rotate together are neighbours. ``keys_rotated`` and ``values_rotated`` say
    whether llama.cpp multiplies keys or values by a Hadamard matrix.
    """

    size: int
    is_interleaved: bool
    keys_rotated: bool
    values_rotated: bool


def cache_layout(config: Any, *, keys_rotated: bool, values_rotated: bool) -> HeadLayout:
    """Return the layout of a head in llama.cpp's cache of this model; raise SpecError for an unsupported model."""
    return HeadLayout(head_size(config), _family(config).is_interleaved, keys_rotated, values_rotated)


def read_state(raw: Any, layout: HeadLayout) -> tuple[Tensor, Tensor]:
    """Return the keys and values in a saved cache state, each [tokens, L, H * D], in transformers' channel order.

    They are float32. ``raw`` is a uint8 array with the bytes of the state. Raises RunError for another form of state.
    """
    try:
        return _State(raw).read(layout)
    except (struct.error, ValueError) as error:
        raise RunError(
            f"the state of llama.cpp's cache has an unknown form: {error}; use the correction naive, tis or mis"
        ) from None


class _State:
    """A reader of the bytes of a saved KV cache state of llama.cpp, from front to back."""

    def __init__(self, raw: Any) -> None:
        self._raw, self._at = raw, 0

    def read(self, layout: HeadLayout) -> tuple[Tensor, Tensor]:
        magic, _, streams = self._take("IiI")
        if magic != _MAGIC:
            raise ValueError(f"it begins with {magic:#x}, expected {_MAGIC:#x}")
        cells = 0
        while streams and not cells:
            (cells,), streams = self._take("I"), streams - 1
        positions = [self._position() for _ in range(cells)]
        if sorted(positions) != list(range(cells)):
            raise ValueError("its cells do not hold each position once")
        # freed cells are used first, so positions are in no order
        order = torch.tensor(positions).argsort()
        is_transposed, layers = self._take("II")
        size = layout.size
        key_part = size & -size if layout.keys_rotated and size % _ROTATED == 0 else 1
        value_part = _ROTATED if layout.values_rotated and size % _ROTATED == 0 else 1
        keys = [_undo_rotation(self._rows(cells), key_part) for _ in range(layers)]
        keys = [_deinterleave(rows, size) for rows in keys] if layout.is_interleaved else keys
        read_rows = self._columns if is_transposed else self._rows
        values = [_undo_rotation(read_rows(cells), value_part) for _ in range(layers)]
        if self._raw[self._at :].any():
            raise ValueError(f"{len(self._raw) - self._at} bytes are left")
        return torch.stack(keys, 1)[order], torch.stack(values, 1)[order]

    def _take(self, form: str) -> tuple[Any, ...]:
        fields = struct.unpack_from(f"<{form}", self._raw, self._at)
        self._at += struct.calcsize(f"<{form}")
        return fields

    def _position(self) -> int:
        position, sequences = self._take("iI")
        self._at += 4 * sequences
        return int(position)

    def _rows(self, cells: int) -> Tensor:
        kind, width = self._take("iQ")
        return self._numbers(kind, cells, width)

    def _columns(self, cells: int) -> Tensor:
        """Read the numbers of a layer that is stored transposed, [H * D, cells]; return them as [cells, H * D]."""
        kind, width, channels = self._take("iII")
        return self._numbers(kind, channels, cells * width).T

    def _numbers(self, kind: int, rows: int, width: int) -> Tensor:
        import gguf

        raw = self._raw[self._at : self._at + rows * width].reshape(rows, width)
        self._at += rows * width
        return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))).float()


def _undo_rotation(x: Tensor, part: int) -> Tensor:
    """Undo the Hadamard rotation of the rows ``x`` [tokens, H * D], of which each ``part`` channels were rotated."""
    return (x.reshape(len(x), -1, part) @ hadamard(part, x.dtype, x.device)).flatten(1)


def _deinterleave(x: Tensor, size: int) -> Tensor:
    """Return the rows ``x`` [tokens, H * D] with each head's ``size`` channels in the order 0 2 4 ... 1 3 5 ..."""
    return x.reshape(len(x), -1, size // 2, 2).transpose(2, 3).flatten(1)
