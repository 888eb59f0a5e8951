"""The trainable model: a copy of all weights, or a LoRA adapter on frozen weights shared with the base model.

An adapter replaces a weight W by W + (alpha / rank) B A and trains only A and B; W is frozen (Hu 2021, 2106.09685). All
learners of a run share W with the base model, which therefore serves as the reference model (of the KL term) without a
second copy.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from kvaudit.audit.cache.attention import find_decoder
from kvaudit.audit.engines.rollouts import model_weights
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.sampling.checkpoints import ADAPTER_WEIGHTS, adapter_sha256
from kvaudit.audit.sampling.model import LoadedModel, verify_folder
from kvaudit.audit.sampling.weights import ADAPTER_CONFIG
from kvaudit.core.errors import DataError, RunError, SpecError
from kvaudit.core.spec_train import AdapterSpec
from kvaudit.core.text import install_command

_NAME = "default"  # peft's name for an adapter
_BASE = "base_layer"  # peft's name for the layer that an adapter wraps
_LORA, _PREFIX = "lora_", "base_model.model."  # in adapter weight names; before all names in an adapter's file


@dataclass
class AdaptedModel(LoadedModel):
    """A model with an adapter on frozen weights; ``origin`` is the sha256 of the model without the adapter."""

    origin: str = ""


def trainable_copy(
    start: LoadedModel, adapter: AdapterSpec | None, seed: int, *, checkpointing: bool = False
) -> LoadedModel:
    """Return a trainable copy of ``start``; its initial weights depend on the seed only, not on the arm.

    All weights are trained, or only a new adapter if ``adapter`` is given. ``checkpointing`` turns on gradient
    checkpointing.
    """
    learner = _copy_for_training(start, adapter, seed)
    if checkpointing:
        checkpoint_layers(learner.model)
    return learner


def _copy_for_training(start: LoadedModel, adapter: AdapterSpec | None, seed: int) -> LoadedModel:
    if adapter is None:
        return replace(start, model=copy.deepcopy(start.model).eval())
    if isinstance(start, AdaptedModel):
        return replace(start, model=_share_weights(start.model))
    check_adapter(start.model, adapter)
    model = _add_adapter(_share_weights(start.model), adapter)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_A" in name:  # B is 0, so that a new adapter changes nothing (Hu 2021, section 4.1)
                draw = torch.Generator().manual_seed(derive_seed("adapter", seed, name))
                # uniform in +-1/sqrt(in_features), as Kaiming's init with a = sqrt(5)
                bound = weight.shape[1] ** -0.5
                weight.copy_(torch.rand(weight.shape, generator=draw) * 2 * bound - bound)
    # keeps the base's sha256 too, since an adapter is identified by both
    return AdaptedModel(**(vars(start) | {"model": model, "origin": start.sha256}))


def checkpoint_layers(model: Any) -> None:
    """Turn on gradient checkpointing in evaluation mode, where transformers' own switch has no effect."""
    layers = [part for part in find_decoder(model).modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise RunError(
            f"{type(model).__name__} does not support gradient checkpointing; set gradient_checkpointing: false"
        )
    for layer in layers:
        # on the instance, so that other models of its class are unaffected
        layer.forward = partial(_checkpointed_forward, layer.forward)


def _checkpointed_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # layers draw no random numbers, so no generator state needs restoring
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def load_trained_adapter(base: LoadedModel, adapter: AdapterSpec, folder: Path) -> LoadedModel:
    """Return the base model with the adapter of the finished checkpoint ``folder``; it can be trained further.

    Raises DataError if its tensors do not have the names and shapes that the settings ``adapter`` lead to.
    """
    verify_folder(folder)
    start = trainable_copy(base, adapter, 0)
    saved, weights = load_file(folder / ADAPTER_WEIGHTS), adapter_weights(start.model)
    if {name: tensor.shape for name, tensor in saved.items()} != {name: weights[name].shape for name in weights}:
        raise DataError(f"adapter {str(folder)!r} does not match train.adapter; delete the folder to train it again")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name])
    return replace(start, sha256=adapter_sha256(folder, base.sha256))


def without_adapter(start: LoadedModel) -> LoadedModel:
    """Return the model without its adapter, sharing the weights; a model without an adapter is returned unchanged."""
    if not isinstance(start, AdaptedModel):
        return start
    model = _share_weights(start.model)
    for name, layer in _adapted_layers(model).items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.base_layer)
    plain = {field.name: getattr(start, field.name) for field in fields(LoadedModel)}
    return LoadedModel(**(plain | {"model": model, "sha256": start.origin}))


def merged_weights(model: Any) -> dict[str, Tensor]:
    """Return a model's weights, keyed by their names in a checkpoint; tied weights are listed once.

    If the model has an adapter, it is merged into them (Hu 2021, section 4.1). Weights that it changes are float32.
    """
    layers, merged = _adapted_layers(model), dict[str, Tensor]()
    for name, tensor in model_weights(model).items():
        if _LORA in name:
            continue
        layer, is_adapted, _ = name.partition(f".{_BASE}.weight")
        weight = tensor.detach()
        if is_adapted:
            weight = weight.float() + layers[layer].get_delta_weight(_NAME).detach().to(tensor.device, torch.float32)
        merged[name.replace(f".{_BASE}.", ".")] = weight
    return merged


def _adapted_layers(model: Any) -> dict[str, Any]:
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, _BASE)}


def check_adapter(model: Any, adapter: AdapterSpec | None) -> None:
    """Raise SpecError for a model or a target layer that cannot be adapted, and RunError if peft is not installed."""
    if adapter is None:
        return
    try:
        import peft  # noqa: F401
    except ImportError:
        raise RunError(f"training an adapter needs another package: {install_command('lora')}") from None
    names = linear_layers(model)
    if not names:
        raise SpecError("train.adapter: the model has no linear layers, which an adapter needs; remove train.adapter")
    for target in adapter.targets:
        if target not in names:
            raise SpecError(
                f"train.adapter.targets has {target!r}, which is not a linear layer of the model; known: "
                f"{', '.join(names)}"
            )


def adapter_weights(model: Any) -> dict[str, Parameter]:
    """Return the adapter's weights, keyed by the names that peft gives them in the adapter's file."""
    weights = ((name, weight) for name, weight in model.named_parameters() if _LORA in name)
    # peft's files leave the adapter's name out
    return {_PREFIX + name.replace(f".{_NAME}.", "."): weight for name, weight in weights}


def save_adapter(learner: AdaptedModel, folder: Path) -> None:
    """Write the adapter as a folder that peft and a spec's ``checkpoints:`` read; equal weights give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().contiguous() for name, weight in adapter_weights(learner.model).items()}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings = learner.model.peft_config[_NAME].to_dict() | {"base_model_name_or_path": learner.name}
    # peft keeps layer names in sets, whose order differs between processes
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    text = json.dumps(plain | {"inference_mode": True}, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")


def linear_layers(model: Any) -> list[str]:
    """Return the kinds of linear layers in the decoder, sorted: the last parts of their names, such as ``q_proj``.

    The output head is left out, since its weights may be tied to the embedding's.
    """
    modules = find_decoder(model).named_modules()
    return sorted({name.rpartition(".")[2] for name, module in modules if isinstance(module, Linear)})


def _share_weights(model: Any) -> Any:
    """Return a copy of the model that shares its weights but cannot train them; adapter weights are copied."""
    shared = {
        # deepcopy looks objects up by id and does not copy those it finds here
        id(weight): Parameter(weight.detach(), requires_grad=False)
        for name, weight in model.named_parameters()
        if _LORA not in name
    }
    return copy.deepcopy(model, shared).eval()


def _add_adapter(model: Any, adapter: AdapterSpec) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    settings = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.targets or linear_layers(model)),
        task_type="CAUSAL_LM",
    )
    model = inject_adapter_in_model(settings, model, adapter_name=_NAME)
    for name, weight in model.named_parameters():
        if _LORA in name:
            weight.data = weight.data.float()  # half an ulp of bfloat16 exceeds a usual step
    return model.eval()
