"""Load checkpoints that were trained elsewhere: whole models, or LoRA adapters for the run's model."""

from __future__ import annotations

import copy
import filecmp
import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvaudit.audit.sampling.chat import Chat, ChatOption
from kvaudit.audit.sampling.model import (
    EMBEDDED,
    DtypeName,
    LoadedModel,
    load_chat,
    load_model,
    locate,
    to_path,
    verify_folder,
)
from kvaudit.audit.sampling.weights import (
    ADAPTER_CONFIG,
    check_numbers,
    file_sha256,
    files_read,
    headers,
    weight_files,
    weights_sha256,
)
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json
from kvaudit.core.text import install_command, join_names, short_repr

ADAPTER_WEIGHTS, _TOKENIZER = "adapter_model.safetensors", "tokenizer_config.json"
_CACHED = re.compile(r"models--(?:[^/]*--)?([^/]+?)/snapshots/")  # folder names of the hub's cache
_ADAPTER_NAME = re.compile(r"\.default(?=\.|$)")  # what peft calls an adapter; its files leave it out
_SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def load_comparable(
    name_or_path: str, base: LoadedModel, *, dtype: DtypeName, device: str, chat: Mapping[str, ChatOption] | None = None
) -> LoadedModel:
    """Load a folder or hub id for a comparison with ``base``; merge an adapter into a copy of ``base``.

    Raises DataError if it cannot be loaded, or has another architecture, tokenizer or chat template.
    """
    check_comparable(name_or_path, base)
    if is_adapter(folder := locate(name_or_path)):
        return _merge_adapter(folder, name_or_path, base)
    return load_model(name_or_path, dtype=dtype, device=device, chat=chat)


def load_model_or_adapter(
    name_or_path: str, *, dtype: DtypeName, device: str = "auto", chat: Mapping[str, ChatOption] | None = None
) -> LoadedModel:
    """Load a model; for the folder of an adapter, load the base that its config names and merge the adapter into it.

    The base may itself be an adapter. ``chat`` has the options of the chat template.
    """
    base, *adapters = reversed(_adapter_chain(name_or_path))
    model = load_model(base, dtype=dtype, device=device, chat=chat)
    for adapter in adapters:
        model = load_comparable(adapter, model, dtype=dtype, device=device)
    return model


def checkpoint_sha256(folder: Path) -> str:
    """Return the sha256 of the weights in a folder; the hash of an adapter includes its base model.

    The weights are hashed, not loaded; a model on the hub is downloaded. Raises DataError if a file is missing.
    """
    if not is_adapter(folder):
        return weights_sha256(folder)
    base, *adapters = reversed(_adapter_chain(str(folder.resolve()))[1:])
    if not base.endswith(".gguf"):
        digest = weights_sha256(locate(base))
    elif (path := to_path(base)).is_file():
        digest = file_sha256(path)
    else:
        raise DataError(f"model {short_repr(base)} is no file; put it there, or name another in {ADAPTER_CONFIG}")
    for adapter in (*map(locate, adapters), folder):
        digest = adapter_sha256(adapter, digest)
    return digest


def checkpoint_files(folder: Path) -> dict[str, str]:
    """Return {name: sha256} of the files that are read to load the checkpoint in a folder, except the weights.

    For an adapter these are the files of its base model. The result is {} if the model is a GGUF file.
    """
    base = _adapter_chain(str(folder.resolve()))[-1]
    return {} if base.endswith(".gguf") else files_read(locate(base))


def load_base_chat(name_or_path: str) -> Chat:
    """Load the tokenizer and chat template of a model; for an adapter, those of its base model."""
    return load_chat(_adapter_chain(name_or_path)[-1])


def _adapter_chain(name_or_path: str) -> list[str]:
    """Return an adapter's name, then that of its base, and so on up to the base model; for a model, its name alone."""
    names = [name_or_path]
    while names[-1] != EMBEDDED and is_adapter(folder := to_path(names[-1])):
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise DataError(f"adapter {names[-1]!r} names no base_model_name_or_path; put it into its {ADAPTER_CONFIG}")
        if base in names:
            raise DataError(
                f"adapter {names[-1]!r} has the base model {base!r}, which is based on it; name another model in "
                f"{ADAPTER_CONFIG}"
            )
        names.append(base)
    return names


def check_comparable(name_or_path: str, base: LoadedModel) -> None:
    """Raise DataError if a model differs from ``base`` in architecture, tokenizer or chat template.

    No weights are read.
    """
    folder = locate(name_or_path)
    if is_adapter(folder):
        _check_base(folder, name_or_path, base)
        if (folder / _TOKENIZER).is_file():
            _check_prompts(name_or_path, base)
        return  # shapes are checked when the adapter is merged
    config = read_json(folder / "config.json")
    config = config.get("text_config", config)  # for a model of images and text
    base_config = base.model.config.get_text_config().to_dict()
    for name in _SHAPE:
        if name in config and config[name] != base_config.get(name):
            raise DataError(
                f"checkpoint {name_or_path!r} has {name} {short_repr(config[name])}, model {base.name!r} has "
                f"{base_config.get(name)}; compare checkpoints of one architecture"
            )
    _check_prompts(name_or_path, base)


def holds_same_weights(folder: Path, other: Path) -> bool:
    """Return whether two folders hold the same weights, or the same adapter; reading stops at the first difference."""
    if folder.samefile(other):
        return True
    files, other_files = _identifying_files(folder), _identifying_files(other)
    if [path.name for path in files] != [path.name for path in other_files]:
        return False
    return all(filecmp.cmp(*pair, shallow=False) for pair in zip(files, other_files, strict=True))


def _identifying_files(folder: Path) -> list[Path]:
    """Return the files that the sha256 of a checkpoint covers, without the base of an adapter."""
    if not is_adapter(folder):
        return weight_files(folder)
    return [path for path in (folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS) if path.is_file()]


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter and no whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def _check_prompts(name_or_path: str, base: LoadedModel) -> None:
    tokenizer, base_tokenizer = load_chat(name_or_path).tokenizer, base.chat.tokenizer
    for component, differs in (
        ("vocabulary", tokenizer.get_vocab() != base_tokenizer.get_vocab()),
        ("chat template", str(tokenizer.get_chat_template()) != str(base_tokenizer.get_chat_template())),
    ):
        if differs:
            raise DataError(
                f"checkpoint {name_or_path!r} has another {component} than model {base.name!r}; their prompts would "
                "differ"
            )


def _check_base(folder: Path, name: str, base: LoadedModel) -> None:
    """Raise DataError if an adapter's config names another base model than the run's.

    If the config names a folder that exists on this machine, the weights in it are compared with the run's. Otherwise
    only the last parts of the two names are compared, since folders move and hub ids are copied into caches.
    """
    base_name = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    named = to_path(str(base_name or ""))
    if base_name and any(named.glob("*.safetensors")) and to_path(base.name).suffix != ".gguf":
        if not holds_same_weights(named, locate(base.name)):
            raise DataError(
                f"adapter {name!r} was trained over {short_repr(base_name)}, which is here and has other weights than "
                f"the run's model {base.name!r}; set model to that folder"
            )
        return
    if base_name and _last_part(str(base_name)) != _last_part(base.name):
        raise DataError(
            f"adapter {name!r} was trained over {short_repr(base_name)}, the run's model is {base.name!r}; set model "
            f"to its base or, if both are the same, set base_model_name_or_path in its {ADAPTER_CONFIG} to "
            f"{base.name!r}"
        )


def _last_part(name: str) -> str:
    """Return the last part of a model's name in lower case.

    It is qwen2-0.5b for models--Qwen--Qwen2-0.5B/snapshots/0a1b, Qwen/Qwen2-0.5B and models/Qwen2-0.5B.
    """
    cached = _CACHED.search(name)
    return (cached[1] if cached else re.split(r"[/\\]", name.rstrip("/\\"))[-1]).casefold()


def _merge_adapter(folder: Path, name: str, base: LoadedModel) -> LoadedModel:
    """Merge an adapter into a copy of the base; the result's sha256 covers both."""
    try:
        from peft import PeftModel
    except ImportError:
        raise RunError(f"reading LoRA adapters needs another package: {install_command('lora')}") from None
    digest = adapter_sha256(folder, base.sha256)
    verify_folder(folder)
    peft_type = read_json(folder / ADAPTER_CONFIG).get("peft_type")
    if peft_type != "LORA":
        raise DataError(
            f"adapter {name!r} is of type {str(peft_type)[:40]!r}, expected LORA; merge it and give the whole model"
        )
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # peft's, about transformers' names
            # an error, or an adapter that does not fit would be merged without effect
            warnings.filterwarnings("error", message="Found missing adapter keys")
            # a copy: other arms use the base unchanged
            adapted: Any = PeftModel.from_pretrained(copy.deepcopy(base.model), folder)
            # loaded again for its report, which from_pretrained does not return
            report = adapted.load_adapter(folder, adapted.active_adapter)
            _check_all_placed(folder, name, report.unexpected_keys)
            merged = adapted.merge_and_unload(safe_merge=True)
    except DataError:
        raise
    except Exception as error:  # an untrusted file can make libraries raise anything
        reason = str(error).partition("\n")[0][:200]
        raise DataError(f"adapter {name!r} does not fit {base.name!r} ({reason})") from None
    check_numbers(name, merged)
    return replace(base, model=merged.eval(), name=name, sha256=digest)


def _check_all_placed(folder: Path, name: str, without_place: Collection[str]) -> None:
    """Raise DataError if tensors of an adapter's file were not loaded: merged without them, it would be another model.

    ``without_place`` has peft's names of the tensors for which the adapted model has no place. Two tensors may also
    compete for one place, if only peft's name for the adapter differs in their names; peft then loads just one.
    """
    stored = [header.name for header in headers([folder / ADAPTER_WEIGHTS])]
    places = [_ADAPTER_NAME.sub("", tensor) for tensor in stored]
    counts = Counter(places)
    doubled = [tensor for tensor, place in zip(stored, places, strict=True) if counts[place] > 1]
    if unused := sorted(without_place) or doubled:
        raise DataError(
            f"adapter {name!r}: {len(unused)} of the {len(stored)} tensors in its {ADAPTER_WEIGHTS} have no place of "
            f"their own in the adapted model ({join_names(unused, 2)}), wanted one for each; correct {ADAPTER_CONFIG} "
            "(target_modules, layers_to_transform, use_dora), or merge the adapter and give the whole model"
        )


def adapter_sha256(folder: Path, base_sha256: str) -> str:
    """Return one sha256 for base model, adapter config and adapter weights; raise DataError if weights are missing."""
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise DataError(f"adapter {str(folder)!r} holds no {ADAPTER_WEIGHTS}; pickled weights are not loaded")
    # the config too: its alpha scales the weights
    parts = (base_sha256, file_sha256(folder / ADAPTER_CONFIG), file_sha256(folder / ADAPTER_WEIGHTS))
    return hashlib.sha256("".join(parts).encode()).hexdigest()
