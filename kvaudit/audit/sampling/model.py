"""Load a language model: a hub id, a local folder, a .gguf file, or the one that ships with the package.

Weights come from safetensors or GGUF only, never from pickles, and no code from a checkpoint is ever run.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvaudit.audit.cache.attention import ATTENTION_NAME as ATTENTION
from kvaudit.audit.cache.attention import disable_cudnn_attention, require_interface
from kvaudit.audit.cache.layers import GOVERNED_KINDS, layer_kinds, patch_state_layers
from kvaudit.audit.sampling.chat import Chat, ChatOption
from kvaudit.audit.sampling.weights import (
    ADAPTER_CONFIG,
    check_complete,
    check_gguf,
    check_gguf_biases,
    check_numbers,
    check_sizes,
    file_sha256,
    files_read,
    headers,
    weight_files,
    weights_sha256,
)
from kvaudit.core.endpoint import check_no_address
from kvaudit.core.errors import AuditError, DataError, RunError
from kvaudit.core.files import plain_files
from kvaudit.core.provenance import listed_files
from kvaudit.core.spec import EMBEDDED as EMBEDDED  # noqa: PLC0414  imported from here by other modules
from kvaudit.core.text import install_command, short_repr

DtypeName = Literal["float32", "bfloat16", "auto"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_WEIGHTS = ["*.safetensors"]
_HUB_FILES = [*_HUB_WEIGHTS, "*.json", "*.txt", "*.model", "*.jinja"]
_CODE = "auto_map"  # the config key that names Python code of the checkpoint
_LOCAL = {"local_files_only": True, "trust_remote_code": False}  # no hub and no prompt on standard input


@dataclass
class LoadedModel:
    """A causal language model in evaluation mode with the ``kvaudit`` attention, and its chat.

    ``sha256`` is the hash of the weights (``weights.weights_sha256``); ``files`` maps every other file that was
    read to its sha256.
    """

    model: Any
    chat: Chat
    name: str
    sha256: str
    max_positions: int
    device: torch.device
    dtype: torch.dtype
    files: dict[str, str] = field(default_factory=dict)


def load_model(
    name_or_path: str = EMBEDDED,
    *,
    dtype: DtypeName = "float32",
    device: str = "auto",
    chat: Mapping[str, ChatOption] | None = None,
) -> LoadedModel:
    """Load a model for sampling and learning; ``chat`` has the options of its chat template.

    Raises DataError if the checkpoint is missing, unreachable, corrupt or of another format, and RunError if the
    model has no full-attention layer whose cache could be compressed.
    """
    torch_device = _device(device)
    with _explain_loading_errors(name_or_path):
        if name_or_path.endswith(".gguf"):
            path = Path(name_or_path).expanduser()
            folder = path.parent
            check_no_code(folder)
            model, tokenizer = _load_gguf(path, dtype)
            digest = file_sha256(path)
        else:
            folder = _checked_folder(name_or_path)
            model, tokenizer = _load_folder(folder, dtype)
            digest = weights_sha256(folder)
        # before anything is encoded: a token without an embedding would raise an IndexError
        _check_tokenizer(name_or_path, model, tokenizer)
        model_chat = Chat(tokenizer, _generation_stops(name_or_path, model), chat)
    _require_full_attention(name_or_path, model.config)
    require_interface(model)
    patch_state_layers(model)  # linear-attention layers keep a state instead of cache entries
    disable_cudnn_attention(torch_device)
    return LoadedModel(
        model=model.to(torch_device).eval(),
        chat=model_chat,
        name=name_or_path,
        sha256=digest,
        max_positions=_max_positions(name_or_path, model.config),
        device=torch_device,
        dtype=model.dtype,
        files=files_read(folder),
    )


def load_chat(name_or_path: str = EMBEDDED) -> Chat:
    """Load the tokenizer and chat template of a model without its weights; raise DataError like ``load_model``."""
    with _explain_loading_errors(name_or_path):
        if name_or_path.endswith(".gguf"):
            path = Path(name_or_path).expanduser()
            check_no_code(path.parent)
            return Chat(_gguf_tokenizer(path))
        folder = locate(name_or_path, weights=False)
        check_no_code(folder)
        return Chat(AutoTokenizer.from_pretrained(folder, **_LOCAL))


def to_path(name_or_path: str) -> Path:
    """Return a model's name as a path, which need not exist; raise DataError if it cannot be one."""
    try:
        path = Path(name_or_path).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, ~ of an unknown user, or a zero byte
        reason = str(error).partition(": ")[0]
        raise DataError(
            f"model {short_repr(name_or_path)} cannot be a path ({reason[:80]}); correct the name"
        ) from None
    return path


def locate(name_or_path: str, *, weights: bool = True) -> Path:
    """Return the folder of a model, downloading a hub id into the hub's cache; raise DataError if there is none.

    Weights are not downloaded if ``weights`` is False.
    """
    if name_or_path == EMBEDDED:
        return Path(__file__).parent.parent / "training" / EMBEDDED
    path = to_path(name_or_path)
    if path.is_dir():
        return path
    check_no_address("model", name_or_path, "a folder, a hub id, a .gguf file or embedded")
    if path.exists() or not _HUB_ID.fullmatch(name_or_path):
        raise DataError(f"model {name_or_path!r} is no folder, .gguf file or hub id; give one of those, or 'embedded'")
    try:
        # subfolders hold other formats of the same weights
        ignored = ["*/*"] if weights else ["*/*", *_HUB_WEIGHTS]
        return Path(snapshot_download(name_or_path, allow_patterns=_HUB_FILES, ignore_patterns=ignored))
    except (OSError, HfHubHTTPError, HFValidationError, RuntimeError) as error:
        raise DataError(
            f"model {name_or_path!r} is neither a local folder nor reachable on the hub "
            f"({type(error).__name__}); give a folder or a .gguf file"
        ) from error


def verify_folder(folder: Path) -> None:
    """Compare a checkpoint's files with its manifest; raise DataError for a missing or changed file.

    ``manifest.json`` maps file names to sha256; ``provenance.json`` of a kvaudit checkpoint has such a map under
    "files". If a folder has neither file, as most on Hugging Face, nothing is compared. Unless the folder holds an
    adapter, its config and its weights must exist in any case.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        if not (folder / "config.json").is_file():
            raise DataError(f"checkpoint {str(folder)!r} holds no config.json; give a folder in Hugging Face format")
        weight_files(folder)
    for name, expected in _manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise DataError(
                f"checkpoint {str(folder)!r} lacks {name}, which its manifest lists; train or copy it again"
            )
        if (actual := file_sha256(path)) != expected:
            raise DataError(
                f"checkpoint {str(folder)!r}: {name} has sha256 {actual[:12]}, its manifest says {expected[:12]}; "
                "the file was changed or cut short"
            )


def check_no_code(folder: Path) -> None:
    """Raise DataError if a config of the folder names Python code, even if the model could be loaded without it.

    transformers would ask on standard input whether to run it.
    """
    for path in plain_files(folder, "*config.json"):  # tokenizer and processor configs can name code too
        try:
            names_code = _names_code(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{str(path)!r} is not JSON ({type(error).__name__}); copy the checkpoint again") from None
        if names_code:
            raise DataError(
                f"checkpoint {str(folder)!r}: {path.name} names Python code ({_CODE}), which is never run; if "
                f"transformers supports the model itself, remove {_CODE} from that file"
            )


def _names_code(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_names_code, value))
    return isinstance(value, dict) and (bool(value.get(_CODE)) or any(map(_names_code, value.values())))


def _manifest(folder: Path) -> dict[str, str]:
    """Return {file name: sha256} of the files that a folder's manifests list, without those in ``ledgers/``."""
    files: dict[str, str] = {}
    for name, key in (("manifest.json", None), ("provenance.json", "files")):
        if not (folder / name).is_file():
            continue
        try:
            table = json.loads((folder / name).read_text(encoding="utf-8"))
            files |= listed_files(table if key is None else table[key], folder / name)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"checkpoint {str(folder)!r}: {name} is not a readable manifest ({error!r})") from None
    # ledgers belong to the training run; serving the model does not need them
    return {name: digest for name, digest in files.items() if not name.startswith("ledgers/")}


class LoadedClassifier(NamedTuple):
    """A text classifier in evaluation mode with its tokenizer; ``sha256`` is that of the weights.

    ``files`` maps every other file that was read to its sha256.
    """

    model: Any
    tokenizer: Any
    sha256: str
    files: dict[str, str]


def load_classifier(name_or_path: str) -> LoadedClassifier:
    """Load a text classifier onto the GPU if there is one; raise DataError like ``load_model``."""
    with _explain_loading_errors(name_or_path):
        folder = _checked_folder(name_or_path)
        model, tokenizer = _load_folder(folder, "float32", AutoModelForSequenceClassification)
    return LoadedClassifier(model.to(_device("auto")).eval(), tokenizer, weights_sha256(folder), files_read(folder))


def _checked_folder(name_or_path: str) -> Path:
    """Return the folder of a model after checking it for code and against its manifest."""
    folder = locate(name_or_path)
    check_no_code(folder)
    verify_folder(folder)
    return folder


def _load_folder(folder: Path, dtype: DtypeName, kind: Any = AutoModelForCausalLM) -> tuple[Any, Any]:
    tensors = list(headers(weight_files(folder)))
    # before anything is built, since a config may ask for more than the memory holds
    check_sizes(folder, tensors)
    model, info = kind.from_pretrained(
        folder,
        dtype=_dtype(dtype),
        **({"attn_implementation": ATTENTION} if kind is AutoModelForCausalLM else {}),
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # check_complete reports them
        output_loading_info=True,
        **_LOCAL,
    )
    check_complete(str(folder), model, info, tensors)
    check_numbers(str(folder), model, tensors)
    return model, AutoTokenizer.from_pretrained(folder, **_LOCAL)


def _load_gguf(path: Path, dtype: DtypeName) -> tuple[Any, Any]:
    """Return the model and the tokenizer in a GGUF file.

    The weights are dequantised into a plain model, since the one that transformers loads cannot be trained or saved.
    """
    tokenizer = _gguf_tokenizer(path)
    torch_dtype = torch.float32 if dtype == "auto" else _dtype(dtype)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch_dtype, output_loading_info=True, **_LOCAL
    )
    check_complete(str(path), loaded, info)
    check_gguf_biases(str(path), check_gguf(path), loaded)
    config = copy.deepcopy(loaded.config)
    if "quantization_config" in vars(config):
        # the weights are no longer quantised
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch_dtype, attn_implementation=ATTENTION, trust_remote_code=False
    )
    model.load_state_dict(loaded.state_dict())  # strict: an unknown tensor is an error
    check_numbers(str(path), model)
    return model, tokenizer


def _gguf_tokenizer(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"model file {str(path)!r} does not exist")
    check_gguf(path)
    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **_LOCAL)
    except ImportError as error:
        raise RunError(f"reading .gguf files needs two more packages: {install_command('gguf')}") from error


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars inside the context."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def _explain_loading_errors(name: str) -> Iterator[None]:
    """Hide progress bars, and turn any error of transformers into a one-line DataError that names the model."""
    try:
        with hide_progress_bars():
            yield
    except AuditError:
        raise
    except Exception as error:  # an untrusted file can make libraries raise anything
        line, next_line, *_ = [*map(str.strip, str(error).strip().splitlines()), "", ""]
        line = f"{line} {next_line}".strip() if line.endswith(":") else line
        raise DataError(f"model {name!r} cannot be loaded: {line or type(error).__name__}") from error


def _generation_stops(name: str, model: Any) -> list[int]:
    """Return the ids of the stop tokens in the model's generation config; raise DataError for an id out of range."""
    stops = model.generation_config.eos_token_id if model.generation_config is not None else None
    tokens = [] if stops is None else stops if isinstance(stops, list) else [stops]
    size = model.get_input_embeddings().weight.shape[0]
    for stop in tokens:
        if type(stop) is not int or not 0 <= stop < size:
            raise DataError(
                f"model {name!r}: eos_token_id is {short_repr(stop)}, expected a token of the model, 0 to {size - 1}; "
                "correct generation_config.json"
            )
    return tokens


def _check_tokenizer(name: str, model: Any, tokenizer: Any) -> None:
    """Raise DataError if the id of the tokenizer's eos token is beyond the model's embeddings."""
    stop, size = tokenizer.eos_token_id, model.get_input_embeddings().weight.shape[0]
    if stop is not None and stop >= size:
        raise DataError(
            f"model {name!r}: the tokenizer's eos_token {short_repr(tokenizer.eos_token)} is token {stop}, the model "
            f"has tokens 0 to {size - 1}; the two do not belong together"
        )


def _require_full_attention(name: str, config: Any) -> None:
    kinds = layer_kinds(config)
    if not GOVERNED_KINDS & set(kinds):
        names = ", ".join(sorted(set(kinds))) or "none with attention"
        raise RunError(f"model {name!r} has no full-attention layer to compress (its layers: {names})")


def _max_positions(name: str, config: Any) -> int:
    text = config.get_text_config(decoder=True)
    if not (hasattr(text, "max_position_embeddings") and isinstance(text.max_position_embeddings, int)):
        raise RunError(f"model {name!r} does not state max_position_embeddings; kvaudit cannot check context lengths")
    return int(text.max_position_embeddings)


def _dtype(name: DtypeName) -> Any:
    return "auto" if name == "auto" else {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)  # a valid device name may still be absent
    except (RuntimeError, AssertionError) as error:
        line = str(error).partition("\n")[0]
        raise RunError(f"device {name!r} cannot be used here ({line}); try 'cpu' or 'auto'") from None
    return device
