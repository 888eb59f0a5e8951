"""The weights of a checkpoint folder: which files transformers loads, what identifies them, and whether they fit.

transformers loads ``model.safetensors`` where there is one, and otherwise the shards that
``model.safetensors.index.json`` names. Other .safetensors files of the folder are neither loaded nor hashed. It draws
at random what a checkpoint lacks, and builds whatever sizes a config asks for: so a config is held to the tensors
before anything is built, and what was built to them afterwards.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from kvaudit.core.errors import DataError
from kvaudit.core.files import plain_files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED = "transformers_weights"  # the key under which a config names weights
ADAPTER_CONFIG = "adapter_config.json"
_ELSEWHERE = {  # files that would make transformers load others than those
    ADAPTER_CONFIG: "an adapter of another model; merge it into that model and save the whole",
    "shard-*-model-*.safetensors": "weights of a distributed checkpoint; save the model with save_pretrained",
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_SIZES = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "vocab_size", "head_dim", "num_attention_heads"),
    *("num_key_value_heads", "n_head", "num_experts", "num_local_experts", "n_routed_experts"),
)
_FLOATS = {"F64", "F32", "F16", "BF16"}


def weight_files(folder: Path) -> list[Path]:
    """The files whose tensors become the model, by name; DataError where the folder has none or points elsewhere."""
    for pattern, what in _ELSEWHERE.items():
        for path in plain_files(folder, pattern):
            raise DataError(f"checkpoint {str(folder)!r}: {path.name} is {what}")
    if (folder / "config.json").is_file() and _table(folder / "config.json").get(_NAMED) is not None:
        raise DataError(f"checkpoint {str(folder)!r}: config.json names other weights ({_NAMED}); take that out")
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder / INDEX)
    if plain_files(folder, "*.safetensors"):
        raise DataError(f"checkpoint {str(folder)!r} holds neither {SINGLE} nor {INDEX}; give its weights that name")
    raise DataError(f"checkpoint {str(folder)!r} holds no .safetensors weights; pickled weights are not loaded")


def weights_sha256(folder: Path) -> str:
    """The identity of a folder's weights: the file's own hash, or that of the sorted list of shard hashes."""
    digests = {path.name: file_sha256(path) for path in weight_files(folder)}
    if len(digests) == 1:  # the plain sha256 of the file, which anybody can compare by hand
        return next(iter(digests.values()))
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shards(index: Path) -> list[Path]:
    shards = _table(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise DataError(f"{str(index)!r} has no weight_map of tensors and files; copy the checkpoint again")
    for name in shards.values():
        if not _own_file(index.parent, name):
            raise DataError(
                f"{str(index)!r} names {str(name)[:80]!r}, no .safetensors file of that folder; copy it again"
            )
    return [index.parent / name for name in sorted(set(shards.values()))]


def _own_file(folder: Path, name: Any) -> bool:
    if not (isinstance(name, str) and name.endswith(".safetensors") and name.isprintable() and len(name) < 256):
        return False
    return Path(name).name == name and (folder / name).is_file()  # a name with a folder in it could lead out


def _table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON ({type(error).__name__}); copy the checkpoint again") from None
    if not isinstance(table, dict):
        raise DataError(f"{str(path)!r} holds a {type(table).__name__}, wanted names and values; copy it again")
    return table


# --- whether config, tensors and model fit --------------------------------------------------------------------------


class TensorHeader(NamedTuple):
    """What a safetensors file says of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def headers(files: Iterable[Path]) -> Iterator[TensorHeader]:
    """The headers of all tensors; raises SafetensorError for a file that is none."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                part = file.get_slice(name)
                yield TensorHeader(name, part.get_dtype(), tuple(part.get_shape()))


def check_sizes(folder: Path, found: list[TensorHeader]) -> None:
    """Raise DataError where a config asks for more layers than there are tensors, or for a size that none of them has.

    Only what would take for ever is caught here; what is merely wrong is a missing or mismatched tensor later.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # nested ones too, such as text_config
    parts = [part for part in (config, *config.values()) if isinstance(part, dict)]
    # largest size of any dimension of any tensor
    widest = max((size for header in found for size in header.shape), default=0)
    for keys, bound, what in ((_LAYERS, len(found), "tensors"), (_SIZES, widest, "as the largest size of a tensor")):
        for key, value in ((key, part.get(key)) for part in parts for key in keys):
            if isinstance(value, int) and value > bound:
                raise DataError(
                    f"checkpoint {str(folder)!r}: config.json asks for {key} {value}, its weights have {bound} {what}; "
                    "copy both from one model"
                )


def check_complete(name: str, model: Any, info: Mapping[str, Any]) -> None:
    """Raise DataError where tensors were missing, of another shape, or of layers that the config leaves out.

    ``info`` is transformers' own loading report; there, tied weights and buffers that it knows to ignore are left out.
    """
    if missing := sorted(info["missing_keys"]):
        raise DataError(f"model {name!r}: its weights lack {missing[0]}{_more(missing)}; copy the checkpoint again")
    if mismatched := sorted(info["mismatched_keys"]):
        tensor, got, wanted = mismatched[0]
        raise DataError(
            f"model {name!r}: {tensor} has shape {tuple(got)}, its config wants {tuple(wanted)}{_more(mismatched)}; "
            "copy both from one model"
        )
    # layers the config leaves out are of kinds it has; a head of another task is not
    kinds = {_kind(key) for key in model.state_dict()}
    if left_out := sorted(key for key in info["unexpected_keys"] if _kind(key) in kinds):
        raise DataError(
            f"model {name!r}: its config leaves out {left_out[0]}{_more(left_out)}, which its weights have; "
            "copy both from one model"
        )


def check_numbers(name: str, model: Any, found: Iterable[TensorHeader] = ()) -> None:
    """Raise DataError for weights that are not finite, or not floats although nothing would dequantise them."""
    if "hf_quantizer" not in vars(model):
        for header in found:
            if header.name.endswith(".weight") and header.dtype not in _FLOATS:
                raise DataError(f"model {name!r}: {header.name} is of type {header.dtype}, weights are floats")
    for key, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or tensor.element_size() == 1 or not tensor.numel():  # fp8 has no minimum
            continue
        # the extremes are NaN or infinite if any number is, and no mask of all is made
        if not all(torch.isfinite(bound) for bound in torch.aminmax(tensor)):
            raise DataError(f"model {name!r}: {key} holds NaN or infinity; copy the checkpoint again")


def _kind(key: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", key)


def _more(names: list[Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
