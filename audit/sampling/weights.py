"""The weights of a checkpoint folder: which files transformers loads, what identifies them, and what is no weight.

transformers loads ``model.safetensors`` where there is one, and otherwise the shards that
``model.safetensors.index.json`` names. Other .safetensors files of the folder are neither loaded nor hashed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from audit.core.errors import DataError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED = "transformers_weights"  # the key under which a config names weights
_ELSEWHERE = {  # files that would make transformers load others than those
    "adapter_config.json": "an adapter of another model; merge it into that model and save the whole",
    "shard-*-model-*.safetensors": "weights of a distributed checkpoint; save the model with save_pretrained",
}


def weight_files(folder: Path) -> list[Path]:
    """The files whose tensors become the model, by name; DataError where the folder has none or points elsewhere."""
    for pattern, what in _ELSEWHERE.items():
        for path in sorted(folder.glob(pattern)):
            raise DataError(f"checkpoint {str(folder)!r}: {path.name} is {what}")
    if (folder / "config.json").is_file() and _table(folder / "config.json").get(_NAMED) is not None:
        raise DataError(f"checkpoint {str(folder)!r}: config.json names other weights ({_NAMED}); take that out")
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder / INDEX)
    if list(folder.glob("*.safetensors")):
        raise DataError(f"checkpoint {str(folder)!r} holds neither {SINGLE} nor {INDEX}; give its weights that name")
    raise DataError(f"checkpoint {str(folder)!r} holds no .safetensors weights; pickled weights are not loaded")


def weights_sha256(folder: Path) -> str:
    """The identity of a folder's weights: the file's own hash, or that of the sorted list of shard hashes."""
    digests = {path.name: file_sha256(path) for path in weight_files(folder)}
    if len(digests) == 1:
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
    return Path(name).name == name and (folder / name).is_file()


def _table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON ({type(error).__name__}); copy the checkpoint again") from None
    if not isinstance(table, dict):
        raise DataError(f"{str(path)!r} holds a {type(table).__name__}, wanted names and values; copy it again")
    return table
