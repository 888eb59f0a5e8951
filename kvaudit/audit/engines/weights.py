"""Checkpoints that were converted, once, into an engine's own format; their folder is named by their hashes.

    $KVAUDIT_CACHE/KIND/SHA256-METHOD/    complete or absent; the default of the variable is ~/.cache/kvaudit
                                          SHA256 of the weights; METHOD covers config and tokenizer too
        conversion.json                   {"of": sha256 of the weights, "method", "by", "files": {name: size}}

An interrupted conversion has another name and is started again. Conversions are never deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvaudit.audit.engines.base import EngineContext
from kvaudit.core.errors import AuditError, RunError, SpecError
from kvaudit.core.files import cache_home, read_json, write_json
from kvaudit.core.provenance import NOT_SHOWN
from kvaudit.core.spec import expand
from kvaudit.core.text import inline, one_line

if TYPE_CHECKING:
    import torch

    from kvaudit.audit.sampling.model import LoadedModel

CONVERSION = "conversion.json"
_METHOD = "safetensors, saved 1"  # part of a folder's name: a changed conversion needs another number
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors -> torch
_NOT_COMPUTED = ("transformers_version", "_name_or_path")  # keys of a config that say nothing about the model
_GIB = 1 << 30
_SHORT = 16  # digits of a hash in a folder's name


class EngineCheckpoint(NamedTuple):
    """A file or folder of weights in an engine's format, with a description of its origin.

    ``is_verified`` is False for weights that the user provides: kvaudit cannot tell whether they are the model's.
    """

    path: Path
    origin: str
    is_verified: bool = True

    @property
    def described(self) -> dict[str, str]:
        """The facts about the weights for provenance.json: their origin, and a mark if they were not verified."""
        return {"weights": self.origin, **({} if self.is_verified else {NOT_SHOWN: "weights"})}


def configured_weights(context: EngineContext, engine: str, file: str, expected: str) -> EngineCheckpoint | None:
    """Return the weights that the spec names as ``engines.ENGINE.weights``, None if it names none.

    They must be a folder that holds ``file`` or, if ``file`` is empty, a file. Otherwise SpecError is raised; its
    message quotes ``expected``, which says what they should be.
    """
    if context.spec.weights is None:
        return None
    path = Path(expand(f"engines.{engine}.weights", context.spec.weights)).expanduser()
    if not (path / file if file else path).is_file():
        raise SpecError(f"engines.{engine}.weights is {str(path)!r}, expected {expected}")
    return EngineCheckpoint(path, f"{path}, not converted here", is_verified=False)


def convert_once(kind: str, sha256: str, method: str, convert: Callable[[Path], Mapping[str, str]]) -> EngineCheckpoint:
    """Return the weights with hash ``sha256`` in the format ``kind``, such as "gguf"; convert them at the first call.

    ``method`` describes the conversion in words; each method has its own folder. ``convert`` writes into the empty
    folder that it gets, and returns {name: version} of the libraries that it used. Raises RunError if nothing can be
    written, or if the folder was changed after its conversion.
    """
    home = cache_home() / kind
    folder = home / f"{sha256[:_SHORT]}-{hashlib.sha256(method.encode()).hexdigest()[:6]}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # against other processes of this machine; released when the file closes
            if not (folder / CONVERSION).exists():
                _convert(folder, sha256, method, convert)
    except (OSError, RuntimeError) as error:  # RuntimeError comes from libraries that write files themselves
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or inline(one_line(str(error)))[:200]
        raise RunError(
            f"weights cannot be converted into {str(folder)!r} ({reason}); check the free space, or set KVAUDIT_CACHE "
            "to another folder"
        ) from None
    conversion = read_json(folder / CONVERSION)
    files = conversion.get("files")
    names = files if isinstance(files, dict) else {}
    # sizes only: hashing a large model would take long
    sizes = {name: (folder / name).stat().st_size if (folder / name).exists() else None for name in names}
    if conversion.get("of") != sha256 or sizes != files:
        raise RunError(f"{str(folder)!r} was changed after its conversion; delete it to convert again")
    return EngineCheckpoint(folder, f"of {sha256[:12]}, {method}, by {conversion.get('by')}")


def convert_checkpoint(
    kind: str, model: LoadedModel, method: str, convert: Callable[[Path], Mapping[str, str]]
) -> EngineCheckpoint:
    """Return a loaded model's weights in the format ``kind``, converted once (see ``convert_once``).

    The same weights are converted again if they were loaded in another dtype, which may have rounded them, or with
    another config or tokenizer.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    return convert_once(kind, model.sha256, f"{method} of {dtype}, config {_config_digest(model)}", convert)


def _config_digest(model: LoadedModel) -> str:
    """Return a short hash of what an exporter reads besides the weights: the config and the model's other files."""
    config = {name: value for name, value in model.model.config.to_dict().items() if name not in _NOT_COMPUTED}
    text = json.dumps([config, sorted(model.files.items())], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def check_weights_fit(weights: Path, engine: str) -> None:
    """Raise SpecError if a file or folder of weights is larger than the memory that is free here.

    In a container, its limit counts. Without this check the kernel would later kill the engine, without any message.
    """
    import torch

    from kvaudit.audit.sampling.memory import free_bytes

    files = [weights] if weights.is_file() else [path for path in weights.rglob("*") if path.is_file()]
    needed, free = sum(path.stat().st_size for path in files), free_bytes(torch.device("cpu"))
    if needed > free:
        raise SpecError(
            f"engine {engine} needs {needed / _GIB:.1f} GiB for the weights in {str(weights)!r}, {free / _GIB:.1f} GiB "
            "of memory are free; use a smaller model, or a machine with more memory"
        )


def _convert(folder: Path, sha256: str, method: str, convert: Callable[[Path], Mapping[str, str]]) -> None:
    unfinished = folder.with_suffix(".half")
    # leftovers of an interrupted conversion
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.mkdir()
    try:
        versions = convert(unfinished)
        files = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
        by = ", ".join(f"{name} {version}" for name, version in versions.items())
        write_json(unfinished / CONVERSION, {"of": sha256, "method": method, "by": by, "files": files})
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def safetensors_folder(context: EngineContext, engine: str) -> EngineCheckpoint:
    """Return a folder with the model's safetensors, config and tokenizer, for engines that read such folders.

    It is the folder that the spec names or, if it names none, the one that the model was loaded from. If an engine
    could not read the same weights there, the model is saved into a new folder. Raises SpecError if the folder in the
    spec has no config.
    """
    if weights := configured_weights(context, engine, "config.json", "a folder that holds config.json"):
        return weights
    if (folder := _source_folder(context.model)) is not None:
        return EngineCheckpoint(folder, f"of {context.model.sha256[:12]}, as they lie")
    return convert_checkpoint("safetensors", context.model, _METHOD, lambda folder: _save(context.model, folder))


def _source_folder(model: LoadedModel) -> Path | None:
    """Return the folder that the model was loaded from; None if it is of no use to an engine.

    It is of no use if the model is a GGUF file or an adapter, or if the engine would read other weights in the folder
    than the loaded model has.
    """
    from kvaudit.audit.sampling.model import locate
    from kvaudit.audit.sampling.weights import weight_files, weights_sha256

    try:
        folder = locate(model.name)
        files = weight_files(folder)
        if set(folder.glob("*.safetensors")) != set(files) or list(folder.glob("*.bin")):
            return None
        is_same = weights_sha256(folder) == model.sha256 and _is_unrounded(model.dtype, files)
        return folder.resolve() if is_same else None
    except (AuditError, OSError):  # a .gguf file or an adapter
        return None


def _is_unrounded(dtype: torch.dtype, files: Sequence[Path]) -> bool:
    """Return whether weights loaded from these files as ``dtype`` are the exact numbers in the files, not rounded."""
    import torch
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt") as file:
            # the names of the dtypes suffice; one that is not in the table is narrower or not a float
            names = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
        if any(torch.promote_types(getattr(torch, _FLOATS[n]), dtype) != dtype for n in names & _FLOATS.keys()):
            return False
    return True


def _save(model: LoadedModel, folder: Path) -> Mapping[str, str]:
    import safetensors
    import transformers

    network: Any = model.model
    network.save_pretrained(folder, state_dict={name: t.detach().cpu() for name, t in network.state_dict().items()})
    model.chat.tokenizer.save_pretrained(folder)
    return {"transformers": transformers.__version__, "safetensors": safetensors.__version__}
