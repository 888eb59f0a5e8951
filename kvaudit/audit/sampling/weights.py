"""The weight files of a checkpoint: which files transformers loads, their hashes, and whether they fit the config.

transformers initialises missing tensors at random and builds any size that a config asks for. A config is therefore
checked against the tensors before a model is built, and the model afterwards. GGUF headers are checked before a library
reads them.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError
from kvaudit.core.files import plain_files
from kvaudit.core.text import join_names, note_once

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED = "transformers_weights"  # the config key that names other weights
ADAPTER_CONFIG = "adapter_config.json"
_ELSEWHERE = {  # files that would make transformers load other weights
    ADAPTER_CONFIG: "an adapter of another model; merge it into that model and save the whole",
    "shard-*-model-*.safetensors": "weights of a distributed checkpoint; save the model with save_pretrained",
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_SIZES = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "vocab_size", "head_dim", "num_attention_heads"),
    *("num_key_value_heads", "n_head", "num_experts", "num_local_experts", "n_routed_experts"),
)
_MASK = re.compile(r"(^|\.)(attn|attention)\.(bias|masked_bias|causal_mask)$")  # stored by old GPT-like models
_FLOATS = {"F64", "F32", "F16", "BF16"}
# other files that transformers reads
_READ = ["*config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"]
_READ += ["*.model", "*.jinja", "additional_chat_templates/*.jinja", INDEX]


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers loads from a folder, sorted by name; other files are left out.

    Raises DataError if the folder has no weights, or if another file in it would make transformers load other weights.
    """
    for pattern, reason in _ELSEWHERE.items():
        for path in plain_files(folder, pattern):
            raise DataError(f"checkpoint {str(folder)!r}: {path.name} is {reason}")
    if (folder / "config.json").is_file() and _read_table(folder / "config.json").get(_NAMED) is not None:
        raise DataError(f"checkpoint {str(folder)!r}: config.json names other weights; remove its key {_NAMED}")
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder / INDEX)
    if plain_files(folder, "*.safetensors"):
        raise DataError(f"checkpoint {str(folder)!r} holds neither {SINGLE} nor {INDEX}; give its weights that name")
    raise DataError(f"checkpoint {str(folder)!r} holds no .safetensors weights; pickled weights are not loaded")


def weights_sha256(folder: Path) -> str:
    """Return the sha256 of a folder's weights: that of the single file or, for shards, of the table of their hashes."""
    digests = {path.name: file_sha256(path) for path in weight_files(folder)}
    if len(digests) == 1:  # the plain sha256 of the file, which can be compared by hand
        return next(iter(digests.values()))
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def files_read(folder: Path) -> dict[str, str]:
    """Return {file name: sha256} of every file that transformers reads from a folder, except the weights."""
    paths = (path for pattern in _READ for path in folder.glob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): file_sha256(path) for path in sorted(paths)}


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shards(index: Path) -> list[Path]:
    shards = _read_table(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise DataError(f"{str(index)!r} has no weight_map of tensors and files; copy the checkpoint again")
    for name in shards.values():
        if not _is_shard(index.parent, name):
            raise DataError(
                f"{str(index)!r} names {str(name)[:80]!r}, no .safetensors file of that folder; copy it again"
            )
    return [index.parent / name for name in sorted(set(shards.values()))]


def _is_shard(folder: Path, name: Any) -> bool:
    if not (isinstance(name, str) and name.endswith(".safetensors") and name.isprintable() and len(name) < 256):
        return False
    return Path(name).name == name and (folder / name).is_file()  # a name with a path could lead out of the folder


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON ({type(error).__name__}); copy the checkpoint again") from None
    if not isinstance(table, dict):
        raise DataError(f"{str(path)!r} holds a {type(table).__name__}, expected names and values; copy it again")
    return table


# --- whether config, tensors and model fit --------------------------------------------------------------------------


class TensorHeader(NamedTuple):
    """The name, dtype and shape of a tensor in a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def headers(files: Iterable[Path]) -> Iterator[TensorHeader]:
    """Yield the header of each tensor in some safetensors files; raise SafetensorError for a file of another format."""
    from safetensors import safe_open  # commands that load no model import this module too

    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                tensor = file.get_slice(name)
                yield TensorHeader(name, tensor.get_dtype(), tuple(tensor.get_shape()))


def check_sizes(folder: Path, tensors: list[TensorHeader]) -> None:
    """Raise DataError if a config asks for more layers than there are tensors, or for a size that no tensor reaches.

    This catches only sizes that would fill the memory; other mistakes show up later as missing or mismatched
    tensors.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # nested configs too, such as text_config
    tables = [table for table in (config, *config.values()) if isinstance(table, dict)]
    widest = max((size for tensor in tensors for size in tensor.shape), default=0)
    for keys, bound, unit in ((_LAYERS, len(tensors), "tensors"), (_SIZES, widest, "as the largest size of a tensor")):
        for key, value in ((key, table.get(key)) for table in tables for key in keys):
            if isinstance(value, int) and value > bound:
                raise DataError(
                    f"checkpoint {str(folder)!r}: config.json asks for {key} {value}, its weights have {bound} {unit}; "
                    "copy both from one model"
                )


def check_complete(name: str, model: Any, info: Mapping[str, Any], tensors: Iterable[TensorHeader] = ()) -> None:
    """Raise DataError if a loaded model lacks tensors, or if tensors that it needs were not loaded from its files.

    This includes tensors of another shape than the config's. ``info`` is transformers' loading report; it does not
    count tied weights and other tensors that may be missing. ``tensors`` are the headers of all tensors in the files.
    If the model lacks a whole module of the files, such as a vision tower, only a note is printed.
    """
    if missing := sorted(info["missing_keys"]):
        raise DataError(f"model {name!r}: its weights lack {missing[0]}{_more(missing)}; copy the checkpoint again")
    if mismatched := sorted(info["mismatched_keys"]):
        tensor, actual, expected = mismatched[0]
        shapes = f"{tuple(actual)}, its config wants {tuple(expected)}"
        raise DataError(f"model {name!r}: {tensor} has shape {shapes}{_more(mismatched)}; copy both from one model")
    # an omitted layer has tensors of a known kind; the head of another task does not
    kinds = {_kind(key) for key in model.state_dict()}
    if left_out := sorted(key for key in info["unexpected_keys"] if _kind(key) in kinds):
        raise DataError(
            f"model {name!r}: its config leaves out {left_out[0]}{_more(left_out)}, which its weights have; "
            "copy both from one model"
        )
    _check_left_out(name, model, info["unexpected_keys"], {tensor.name: tensor.shape for tensor in tensors})


def _check_left_out(name: str, model: Any, keys: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DataError if tensors that were not loaded, ``keys``, belong to a module that the model has.

    Without them this module would compute something else. A note names the modules that the model lacks. ``shapes`` are
    the tensors' shapes by name. Names are compared with and without the prefix that a model with a head puts before
    them. Tensors that the model computes itself, such as masks, are ignored.
    """
    prefix = f"{model.base_model_prefix}."
    modules, buffers = dict(model.named_modules()), {buffer for buffer, _ in model.named_buffers()}
    needed, absent_modules = [], set()
    for key in sorted(keys):
        forms = (key, prefix + key, key.removeprefix(prefix))
        is_mask = _MASK.search(key) and len(shapes.get(key, (1,))) in (0, 4)
        if is_mask or buffers.intersection(forms):  # the model computes these itself
            continue
        if any(_changes(form, modules) for form in forms):
            needed.append(key)
        else:
            absent_modules.add(_absent_module(key, modules))
    if needed:
        raise DataError(
            f"model {name!r}: its config has no place for {needed[0]}{_more(needed)}, without which the model computes "
            "something else; merge adapters into the weights, or copy config and weights from one model"
        )
    if absent_modules:
        names = join_names(sorted(absent_modules), 5)
        note_once(f"model {name!r}: not loaded, because the model has no such module: {names}")


def _changes(key: str, modules: Mapping[str, Any]) -> bool:
    """Return whether a tensor that was not loaded belongs to a module or a layer that the model has.

    ``key`` is the tensor's name. Such a tensor would change what the model computes.
    """
    parts = key.split(".")[:-1]
    owner = _longest_module(parts, modules)
    if not owner:
        return False
    has_weights = any(True for _ in modules[".".join(owner)].parameters(recurse=False))
    return owner == parts or has_weights or any(map(str.isdigit, owner))


def _longest_module(parts: list[str], modules: Mapping[str, Any]) -> list[str]:
    """Return the longest beginning of ``parts``, a name split at its dots, that is the name of a module; else []."""
    lengths = range(len(parts), 0, -1)
    return next((parts[:length] for length in lengths if ".".join(parts[:length]) in modules), [])


def _absent_module(key: str, modules: Mapping[str, Any]) -> str:
    """Return the name of the outermost module around tensor ``key`` that the model lacks.

    If the model has all modules around the tensor, return the name of the tensor.
    """
    parts = key.split(".")
    return ".".join(parts[: len(_longest_module(parts[:-1], modules)) + 1])


def check_numbers(name: str, model: Any, tensors: Iterable[TensorHeader] = ()) -> None:
    """Raise DataError for weights that are not finite, or that are integers in a model without quantisation."""
    import torch

    if "hf_quantizer" not in vars(model):
        for header in tensors:
            if header.name.endswith(".weight") and header.dtype not in _FLOATS:
                raise DataError(f"model {name!r}: {header.name} is of type {header.dtype}, weights are floats")
    for key, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or tensor.element_size() == 1 or not tensor.numel():  # fp8 has no minimum
            continue
        # the extremes are NaN or infinite if any number is; this needs no mask of the tensor's size
        if not all(torch.isfinite(bound) for bound in torch.aminmax(tensor)):
            raise DataError(f"model {name!r}: {key} holds NaN or infinity; copy the checkpoint again")


def tensors_sha256(model: Any) -> str:
    """Return the sha256 of a loaded model's tensors and their names.

    It is the same for equal weights, however they were stored: in other shards, or as an adapter that changes nothing.
    """
    import torch

    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _kind(key: str) -> str:
    """Return a tensor's name with ``*`` in place of the number of its layer."""
    return re.sub(r"\.\d+\.", ".*.", key)


def _more(names: list[Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


# --- GGUF headers ---------------------------------------------------------------------------------------------------

MOST_PAIRS = MOST_TENSORS = 1 << 16
MOST_DIMENSIONS = 8
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type of value
_STRING, _ARRAY = 8, 9
_BIAS = re.compile(r"(^|\.)(attn_(q|k|v|qkv|output|norm)|ffn_(up|down|gate|norm)|output|output_norm)\.bias$")


class _Cursor:
    """A reading position in a file that is not trusted; moving it beyond the end raises ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def skip(self, size: int) -> int:
        """Step over ``size`` bytes and return where they begin; raise ValueError beyond the end."""
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, its header asks for {self._at}")
        return start

    def number(self, form: str) -> int:
        """Read the next integer, in a format of ``struct``."""
        value: int = struct.unpack_from(form, self._data, self.skip(struct.calcsize(form)))[0]
        return value

    def skip_text(self) -> None:
        self.skip(self.number("<Q"))

    def text(self) -> str:
        """Read the next text; bytes that are not UTF-8 become U+FFFD, which no tensor's name has."""
        start = self.skip(length := self.number("<Q"))
        return self._data[start : start + length].decode(errors="replace")

    def skip_values(self, kind: int, count: int) -> None:
        """Step over ``count`` values of the type that GGUF numbers ``kind``; raise ValueError for an unknown type."""
        if kind == _STRING:
            # every text takes at least its length field, so a larger count is false and would loop for long
            if count > len(self._data):
                raise ValueError(f"it names {count} texts in {len(self._data)} bytes")
            for _ in range(count):
                self.skip_text()
        elif kind in _WIDTHS:
            self.skip(_WIDTHS[kind] * count)
        else:
            raise ValueError(f"it holds values of type {kind}")


def check_gguf(path: Path) -> list[str]:
    """Return the names of a GGUF file's tensors.

    Raises DataError if the header does not fit the file. Call it before a library that would trust the header's counts.

    The header consists of magic, version, number of tensors and number of key-value pairs; then the pairs; then name,
    shape, type and offset of each tensor (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _walk_header(_Cursor(data), data[:4])
    except (OSError, ValueError) as error:
        raise DataError(f"model file {str(path)!r} is no usable GGUF file: {error}; copy it again") from None


def _walk_header(cursor: _Cursor, magic: bytes) -> list[str]:
    """Return the names of the tensors; raise ValueError for a header of another form."""
    cursor.skip(4)
    if magic != b"GGUF":
        raise ValueError(f"it begins with {magic!r}")
    if (version := cursor.number("<I")) not in (2, 3):
        raise ValueError(f"it has version {version}, expected 2 or 3")
    # untrusted counts: bounded before anything loops over them
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    if tensors > MOST_TENSORS or pairs > MOST_PAIRS:
        raise ValueError(f"it names {tensors} tensors and {pairs} keys, at most {MOST_TENSORS} each are read")
    for _ in range(pairs):
        cursor.skip_text()
        kind, count = cursor.number("<I"), 1
        if kind == _ARRAY:
            kind, count = cursor.number("<I"), cursor.number("<Q")  # of the elements
        cursor.skip_values(kind, count)
    names = list[str]()
    for _ in range(tensors):
        names.append(cursor.text())
        if (dimensions := cursor.number("<I")) > MOST_DIMENSIONS:
            raise ValueError(f"it holds a tensor of {dimensions} dimensions")
        cursor.skip(8 * dimensions + 4 + 8)  # sizes, type and offset
    return names


def check_gguf_biases(name: str, tensors: Iterable[str], model: Any) -> None:
    """Raise DataError if a GGUF file has more biases than the model that transformers loaded from it.

    transformers drops biases that its model has no place for. ``tensors`` are the names in the file. Biases of experts
    are not counted, since the model joins those of several experts into one tensor.
    """
    stored = [tensor for tensor in tensors if _BIAS.search(tensor)]
    loaded = sum(key.endswith(".bias") for key in model.state_dict())
    if len(stored) > loaded:
        raise DataError(
            f"model {name!r} has {len(stored)} biases, such as {stored[0]}, transformers loads {loaded}; give the "
            "model as a folder in Hugging Face format"
        )
