"""A checkpoint as a folder in Hugging Face format, which servers read: where it lies, or saved once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvaudit.audit.engines.base import Work
from kvaudit.audit.engines.weights import converted
from kvaudit.core.errors import AuditError, SpecError
from kvaudit.core.spec import expand

if TYPE_CHECKING:
    from kvaudit.audit.sampling.model import LoadedModel

SAVED = "safetensors, saved 1"  # by which conversions are told apart


def served_folder(work: Work, engine: str) -> tuple[Path, str]:
    """Where the weights lie as safetensors with config and tokenizer, and where they came from in words.

    Raises SpecError for a folder of ``engines.ENGINE.weights`` that is none.
    """
    if work.part.weights is not None:
        folder = Path(expand(f"engines.{engine}.weights", work.part.weights)).expanduser()
        if not (folder / "config.json").is_file():
            raise SpecError(f"engines.{engine}.weights is {str(folder)!r}, wanted a folder that holds config.json")
        return folder, f"{folder}, not converted here"
    folder_or_none = _own_folder(work.model)
    if folder_or_none is not None:
        return folder_or_none, f"of {work.model.sha256[:12]}, as they lie"
    found = converted("safetensors", work.model.sha256, _recipe(work.model), lambda folder: _save(work.model, folder))
    return found.folder, found.words


def _recipe(model: LoadedModel) -> str:
    return f"{SAVED}, {str(model.dtype).removeprefix('torch.')}"


def _own_folder(model: LoadedModel) -> Path | None:
    """The folder that the model was read from, where a server reads the same weights there and no others."""
    from kvaudit.audit.sampling.model import locate
    from kvaudit.audit.sampling.weights import weight_files, weights_sha256

    try:
        folder = locate(model.name)
        files = weight_files(folder)
        if set(folder.glob("*.safetensors")) != set(files) or list(folder.glob("*.bin")):
            return None
        return folder.resolve() if weights_sha256(folder) == model.sha256 else None
    except (AuditError, OSError):  # a .gguf file, an adapter
        return None


def _save(model: LoadedModel, folder: Path) -> Mapping[str, str]:
    import safetensors
    import transformers

    plain: Any = model.model
    plain.save_pretrained(folder, state_dict={name: t.detach().cpu() for name, t in plain.state_dict().items()})
    model.chat.tokenizer.save_pretrained(folder)
    return {"transformers": transformers.__version__, "safetensors": safetensors.__version__}
