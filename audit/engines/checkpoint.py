"""A checkpoint as a folder in Hugging Face format, which servers read: where it lies, or saved once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvaudit.audit.engines.base import Work
from kvaudit.audit.engines.weights import EngineWeights, converted, given_weights
from kvaudit.core.errors import AuditError

if TYPE_CHECKING:
    from kvaudit.audit.sampling.model import LoadedModel

SAVED = "safetensors, saved 1"  # by which conversions are told apart


def served_folder(work: Work, engine: str) -> EngineWeights:
    """Where the weights lie as safetensors with config and tokenizer.

    Raises SpecError for a folder of ``engines.ENGINE.weights`` that is none.
    """
    if given := given_weights(work, engine, "config.json", "a folder that holds config.json"):
        return given
    if (own := _own_folder(work.model)) is not None:
        return EngineWeights(own, f"of {work.model.sha256[:12]}, as they lie")
    method = f"{SAVED}, {str(work.model.dtype).removeprefix('torch.')}"
    return converted("safetensors", work.model.sha256, method, lambda folder: _save(work.model, folder))


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
