"""Hold a config to the tensors of its checkpoint before anything is built, and what was built to them afterwards.

transformers draws at random what a checkpoint lacks, and builds whatever sizes a config asks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from audit.core.errors import DataError

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_SIZES: tuple[str, ...] = ("hidden_size", "n_embd", "d_model", "intermediate_size", "vocab_size", "head_dim")
_SIZES += (
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
_FLOATS = {"F64", "F32", "F16", "BF16"}


class Header(NamedTuple):
    """What a safetensors file says of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def headers(files: Iterable[Path]) -> list[Header]:
    """The headers of all tensors; raises SafetensorError for a file that is none."""
    return [header for path in files for header in _headers(path)]


def check_sizes(folder: Path, found: list[Header]) -> None:
    """Raise DataError where a config asks for more layers than there are tensors, or for a size that none of them has.

    Only what would take for ever is caught here; what is merely wrong is a missing or mismatched tensor later.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    widest = max((size for header in found for size in header.shape), default=0)
    for keys, bound, what in ((_LAYERS, len(found), "tensors"), (_SIZES, widest, "as the largest size of a tensor")):
        for key, value in _asked(config, keys):
            if value > bound:
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
    kinds = {_kind(key) for key in model.state_dict()}
    if left_out := sorted(key for key in info["unexpected_keys"] if _kind(key) in kinds):
        raise DataError(
            f"model {name!r}: its config leaves out {left_out[0]}{_more(left_out)}, which its weights have; "
            "copy both from one model"
        )


def check_numbers(name: str, model: Any, found: Iterable[Header] = ()) -> None:
    """Raise DataError for weights that are not finite, or not floats although nothing would dequantise them."""
    if "hf_quantizer" not in vars(model):
        for header in found:
            if header.name.endswith(".weight") and header.dtype not in _FLOATS:
                raise DataError(f"model {name!r}: {header.name} is of type {header.dtype}, weights are floats")
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.element_size() > 1 and not _finite(tensor):  # fp8 has no minimum
            raise DataError(f"model {name!r}: {key} holds NaN or infinity; copy the checkpoint again")


def _headers(path: Path) -> Iterator[Header]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dict
            part = file.get_slice(name)
            yield Header(name, part.get_dtype(), tuple(part.get_shape()))


def _asked(config: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """What a config, and those of its parts, say under these keys."""
    for part in (config, *config.values()) if isinstance(config, dict) else ():
        if isinstance(part, dict):
            yield from ((key, part[key]) for key in keys if isinstance(part.get(key), int))


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.numel() or all(torch.isfinite(bound) for bound in torch.aminmax(tensor))


def _kind(key: str) -> str:
    """A tensor's name without the number of its layer."""
    return re.sub(r"\.\d+\.", ".*.", key)


def _more(names: list[Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
