"""Weights in an engine's own format: made once from a checkpoint, kept by what they were made of.

    $KVAUDIT_CACHE/KIND/SHA256-METHOD/    whole, or not there; ~/.cache/kvaudit where the variable is not set
        conversion.json                   {"of": sha256 of the weights, "method", "by", "files": {name: size}}

What a kill leaves half made lies under another name and is made again. Nothing is ever removed here.
"""

from __future__ import annotations

import fcntl
import hashlib
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
SAVED = "safetensors, saved 1"  # by which conversions are told apart
_WIDE = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # dtypes of safetensors
_GIB = 1 << 30
_SHORT = 16  # digits of a hash in a folder's name


class EngineCheckpoint(NamedTuple):
    """A file or folder of weights in an engine's format, and where they came from in words.

    ``ours`` are made of the checkpoint by us; of others nothing shows that they are the checkpoint's.
    """

    path: Path
    origin: str
    ours: bool = True

    @property
    def described(self) -> dict[str, str]:
        """What an engine that serves them says of them."""
        return {"weights": self.origin, **({} if self.ours else {NOT_SHOWN: "weights"})}


def configured_weights(work: EngineContext, engine: str, inside: str, wanted: str) -> EngineCheckpoint | None:
    """Those that ``engines.ENGINE.weights`` names, which hold the file ``inside`` (they are it themselves for "").

    None where none are named; raises SpecError where they are not there.
    """
    if work.part.weights is None:
        return None
    path = Path(expand(f"engines.{engine}.weights", work.part.weights)).expanduser()
    if not (path / inside if inside else path).is_file():
        raise SpecError(f"engines.{engine}.weights is {str(path)!r}, wanted {wanted}")
    return EngineCheckpoint(path, f"{path}, not converted here", ours=False)


def convert_once(kind: str, sha256: str, method: str, convert: Callable[[Path], Mapping[str, str]]) -> EngineCheckpoint:
    """A folder of the weights ``sha256`` in the format ``kind``: those that are kept, or made now.

    ``method`` is how, so that another way is another folder; ``convert`` writes into an empty folder and returns the
    versions of what it used. Raises RunError where nothing can be written, or what is kept is not what was written.
    """
    home = cache_home() / kind
    # the beginnings of both hashes; the whole one of the weights stands inside
    folder = home / f"{sha256[:_SHORT]}-{hashlib.sha256(method.encode()).hexdigest()[:6]}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of other processes of this machine; it goes with the one that holds it
            if not (folder / CONVERSION).exists():
                _make(folder, sha256, method, convert)
    except (OSError, RuntimeError) as error:  # the second of libraries that write files by themselves
        why = error.strerror if isinstance(error, OSError) and error.strerror else inline(one_line(str(error)))[:200]
        raise RunError(
            f"weights cannot be converted into {str(folder)!r} ({why}); see whether there is room, or give another "
            "place by KVAUDIT_CACHE"
        ) from None
    conversion = read_json(folder / CONVERSION)
    kept = conversion.get("files")
    names = kept if isinstance(kept, dict) else {}
    # sizes and no hashes, which would take long for a large model
    sizes = {name: (folder / name).stat().st_size if (folder / name).exists() else None for name in names}
    if conversion.get("of") != sha256 or sizes != kept:
        raise RunError(f"{str(folder)!r} is not the conversion that was written there; delete it, and it is made again")
    return EngineCheckpoint(folder, f"of {sha256[:12]}, {method}, by {conversion.get('by')}")


def convert_checkpoint(
    kind: str, model: LoadedModel, method: str, convert: Callable[[Path], Mapping[str, str]]
) -> EngineCheckpoint:
    """``convert_once`` of a model's weights as it holds them: in bfloat16 they may be others than its file's."""
    held = str(model.dtype).removeprefix("torch.")
    return convert_once(kind, model.sha256, f"{method} of {held}", convert)


def check_weights_fit(weights: Path, who: str) -> None:
    """Raise SpecError where a file or folder of weights is larger than the free memory, of a container its own.

    An engine would be killed by the kernel in the middle, without a word.
    """
    import torch

    from kvaudit.audit.sampling.memory import free_bytes

    files = [weights] if weights.is_file() else [path for path in weights.rglob("*") if path.is_file()]
    needed, free = sum(path.stat().st_size for path in files), free_bytes(torch.device("cpu"))
    if needed > free:
        raise SpecError(
            f"engine {who} needs {needed / _GIB:.1f} GiB for the weights in {str(weights)!r}, {free / _GIB:.1f} GiB of "
            "memory are free; take a smaller model, or a machine with more"
        )


def _make(folder: Path, sha256: str, method: str, convert: Callable[[Path], Mapping[str, str]]) -> None:
    half = folder.with_suffix(".half")
    # what a kill left
    shutil.rmtree(half, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    half.mkdir()
    try:
        used = convert(half)
        files = {path.name: path.stat().st_size for path in sorted(half.iterdir())}
        by = ", ".join(f"{name} {version}" for name, version in used.items())
        write_json(half / CONVERSION, {"of": sha256, "method": method, "by": by, "files": files})
        os.rename(half, folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def safetensors_folder(work: EngineContext, engine: str) -> EngineCheckpoint:
    """Where the weights lie as safetensors with config and tokenizer; raises SpecError for a folder without."""
    if named := configured_weights(work, engine, "config.json", "a folder that holds config.json"):
        return named
    if (own := _own_folder(work.model)) is not None:
        return EngineCheckpoint(own, f"of {work.model.sha256[:12]}, as they lie")
    return convert_checkpoint("safetensors", work.model, SAVED, lambda folder: _save(work.model, folder))


def _own_folder(model: LoadedModel) -> Path | None:
    """The folder that the model was read from, where a server reads the same weights there and no others."""
    from kvaudit.audit.sampling.model import locate
    from kvaudit.audit.sampling.weights import weight_files, weights_sha256

    try:
        folder = locate(model.name)
        files = weight_files(folder)
        if set(folder.glob("*.safetensors")) != set(files) or list(folder.glob("*.bin")):
            return None
        same = weights_sha256(folder) == model.sha256 and _holds_whole(model.dtype, files)
        return folder.resolve() if same else None
    except (AuditError, OSError):  # a .gguf file, an adapter
        return None


def _holds_whole(dtype: torch.dtype, files: Sequence[Path]) -> bool:
    """Whether a model of this dtype holds what stands in its files, and has rounded none of it."""
    import torch
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt") as file:
            # by its words for dtypes, without reading a tensor; what has another word is narrower, or no float
            kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
        if any(torch.promote_types(getattr(torch, _WIDE[kind]), dtype) != dtype for kind in kinds & _WIDE.keys()):
            return False
    return True


def _save(model: LoadedModel, folder: Path) -> Mapping[str, str]:
    import safetensors
    import transformers

    plain: Any = model.model
    plain.save_pretrained(folder, state_dict={name: t.detach().cpu() for name, t in plain.state_dict().items()})
    model.chat.tokenizer.save_pretrained(folder)
    return {"transformers": transformers.__version__, "safetensors": safetensors.__version__}
