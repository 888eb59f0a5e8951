"""Checkpoints that were trained elsewhere: whole models, or LoRA adapters over the run's own model."""

from __future__ import annotations

import copy
import hashlib
import re
import warnings
from collections.abc import Mapping
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
from kvaudit.audit.sampling.weights import ADAPTER_CONFIG, check_numbers, file_sha256, weights_sha256
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json
from kvaudit.core.text import install_line, shown

ADAPTER_WEIGHTS, _TOKENIZER = "adapter_model.safetensors", "tokenizer_config.json"
_CACHED = re.compile(r"models--(?:[^/]*--)?([^/]+?)/snapshots/")  # how the hub's cache names a folder
_SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def load_comparable(
    name_or_path: str, base: LoadedModel, *, dtype: DtypeName, device: str, chat: Mapping[str, ChatOption] | None = None
) -> LoadedModel:
    """A folder or hub id as a model that can be compared with ``base``, which an adapter is merged into.

    Raises DataError for what cannot be loaded, and for another architecture, tokenizer or chat template.
    """
    check_comparable(name_or_path, base)
    if is_adapter(folder := locate(name_or_path)):
        return _adapted(folder, name_or_path, base)
    return load_model(name_or_path, dtype=dtype, device=device, chat=chat)


def load_model_or_adapter(
    name_or_path: str, *, dtype: DtypeName, device: str = "auto", chat: Mapping[str, ChatOption] | None = None
) -> LoadedModel:
    """``load_model``; an adapter's folder is merged into the model that its configuration names, itself perhaps one."""
    # from the whole model upwards: each adapter is over what is below it
    base, *adapters = reversed(_stack(name_or_path))
    model = load_model(base, dtype=dtype, device=device, chat=chat)
    for adapter in adapters:
        model = load_comparable(adapter, model, dtype=dtype, device=device)
    return model


def checkpoint_sha256(folder: Path) -> str:
    """What identifies the weights in a folder, those of an adapter by the model that it names too.

    Nothing is loaded, so weights that could not be are not found out; a model on the hub is downloaded. Raises
    DataError where a part is missing.
    """
    if not is_adapter(folder):
        return weights_sha256(folder)
    # without the folder itself, whose hash comes last
    base, *adapters = reversed(_stack(str(folder.resolve()))[1:])
    if not base.endswith(".gguf"):
        digest = weights_sha256(locate(base))
    elif (path := to_path(base)).is_file():
        digest = file_sha256(path)
    else:
        raise DataError(f"model {shown(base)} is no file; put it there, or name another in {ADAPTER_CONFIG}")
    for adapter in (*map(locate, adapters), folder):
        digest = adapter_sha256(adapter, digest)
    return digest


def load_base_chat(name_or_path: str) -> Chat:
    """``load_chat``; an adapter speaks as the model that it is for."""
    return load_chat(_stack(name_or_path)[-1])


def _stack(name_or_path: str) -> list[str]:
    """A model, or an adapter with what it is for, and what that is for, down to a whole model."""
    names = [name_or_path]  # the adapter first, the whole model last
    while names[-1] != EMBEDDED and is_adapter(folder := to_path(names[-1])):
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise DataError(f"adapter {names[-1]!r} names no base_model_name_or_path; put it into its {ADAPTER_CONFIG}")
        if base in names:
            raise DataError(f"adapter {names[-1]!r} is for {base!r}, which is for it; name a model in {ADAPTER_CONFIG}")
        names.append(base)
    return names


def check_comparable(name_or_path: str, base: LoadedModel) -> None:
    """Raise DataError where prompts or caches of the two could not be paired; no weights are read."""
    folder = locate(name_or_path)
    if is_adapter(folder):
        _check_base(folder, name_or_path, base)
        if (folder / _TOKENIZER).is_file():
            _check_prompts(name_or_path, base)
        return  # its shapes are held to the base when it is merged into it
    config = read_json(folder / "config.json")
    config = config.get("text_config", config)  # a model of images and text has its language model in here
    ours = base.model.config.get_text_config().to_dict()
    for name in _SHAPE:
        if name in config and config[name] != ours.get(name):
            raise DataError(
                f"checkpoint {name_or_path!r} has {name} {shown(config[name])}, model {base.name!r} has "
                f"{ours.get(name)}; compare checkpoints of one architecture"
            )
    _check_prompts(name_or_path, base)


def is_adapter(folder: Path) -> bool:
    """Whether a folder is to be merged; beside a whole model an adapter's configuration is refused as that is read."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def _check_prompts(name_or_path: str, base: LoadedModel) -> None:
    theirs = load_chat(name_or_path).tokenizer
    ours = base.chat.tokenizer
    for what, differs in (
        ("vocabulary", theirs.get_vocab() != ours.get_vocab()),
        ("chat template", str(theirs.get_chat_template()) != str(ours.get_chat_template())),
    ):
        if differs:
            raise DataError(
                f"checkpoint {name_or_path!r} has another {what} than model {base.name!r}; their prompts would differ"
            )


def _check_base(folder: Path, name: str, base: LoadedModel) -> None:
    """Raise DataError where an adapter says that it was trained over a model of another name than the run's.

    Folders move and hub ids are copied into caches, so the last part of the name is what counts.
    """
    named = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if named and _last_part(str(named)) != _last_part(base.name):
        raise DataError(
            f"adapter {name!r} was trained over {shown(named)}, the run's model is {base.name!r}; name its own base as "
            f"model, or, where this is the same, set base_model_name_or_path in its {ADAPTER_CONFIG} to {base.name!r}"
        )


def _last_part(name: str) -> str:
    """Qwen2-0.5B of hub/models--Qwen--Qwen2-0.5B/snapshots/0a1b, of Qwen/Qwen2-0.5B and of models/Qwen2-0.5B."""
    cached = _CACHED.search(name)
    return (cached[1] if cached else re.split(r"[/\\]", name.rstrip("/\\"))[-1]).casefold()


def _adapted(folder: Path, name: str, base: LoadedModel) -> LoadedModel:
    """The base with an adapter merged into a copy of it; its identity is of both."""
    try:
        from peft import PeftModel
    except ImportError:
        raise RunError(f"reading LoRA adapters needs another package: {install_line('lora')}") from None
    digest = adapter_sha256(folder, base.sha256)
    verify_folder(folder)
    kind = read_json(folder / ADAPTER_CONFIG).get("peft_type")
    if kind != "LORA":
        raise DataError(
            f"adapter {name!r} is of type {str(kind)[:40]!r}, wanted LORA; merge it and give the whole model"
        )
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of peft's, about transformers' names
            # or it would be merged as if it changed nothing there, and be found not to differ
            warnings.filterwarnings("error", message="Found missing adapter keys")
            # a copy: the base serves other arms as it is
            adapted: Any = PeftModel.from_pretrained(copy.deepcopy(base.model), folder)
            merged = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # a stranger's file leads libraries to raise anything, bare Exception included
        reason = str(error).partition("\n")[0][:200]
        raise DataError(f"adapter {name!r} does not fit {base.name!r} ({reason})") from None
    check_numbers(name, merged)
    return replace(base, model=merged.eval(), name=name, sha256=digest)


def adapter_sha256(folder: Path, base_sha256: str) -> str:
    """What identifies an adapter over a model: the hashes of what both are made of; DataError without weights."""
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise DataError(f"adapter {str(folder)!r} holds no {ADAPTER_WEIGHTS}; pickled weights are not loaded")
    # the configuration too: alpha scales the same weights
    parts = (base_sha256, file_sha256(folder / ADAPTER_CONFIG), file_sha256(folder / ADAPTER_WEIGHTS))
    return hashlib.sha256("".join(parts).encode()).hexdigest()
