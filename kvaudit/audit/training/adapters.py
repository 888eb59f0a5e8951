"""What a learner trains: its own copy of all weights, or a LoRA adapter beside weights that it shares with the base.

Hu 2021 (2106.09685): W + alpha / rank B A, W frozen. Every learner of a run shares W with the model that it began from,
so that model is the reference policy as it stands: there is no second copy, and nothing to switch off and on again.
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
from kvaudit.audit.engines.rollouts import unique_weights
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.sampling.checkpoints import ADAPTER_WEIGHTS, adapter_sha256
from kvaudit.audit.sampling.model import LoadedModel, verify_folder
from kvaudit.audit.sampling.weights import ADAPTER_CONFIG
from kvaudit.audit.training.ranks import ALONE, RankGroup
from kvaudit.audit.training.ranks import is_sharded, shard, full_state_dict
from kvaudit.core.errors import DataError, RunError, SpecError
from kvaudit.core.spec_train import AdapterSpec
from kvaudit.core.text import install_command

_NAME = "default"  # what peft calls an adapter that has no name
_BASE = "base_layer"  # of an adapted layer: the layer that was there before
_MARK, _PREFIX = "lora_", "base_model.model."  # of its weights in a model, and of all names in an adapter's file


@dataclass
class AdaptedModel(LoadedModel):
    """A model with an adapter beside frozen weights; ``origin`` is the sha256 of the model that those are of."""

    origin: str = ""


def trainable_copy(
    start: LoadedModel, adapter: AdapterSpec | None, seed: int, *, checkpointing: bool = False, ranks: RankGroup = ALONE
) -> LoadedModel:
    """A model to train from ``start``, which stays as it is; the same weights for the same seed, in every arm.

    ``checkpointing`` has every layer keep its input alone for the backward pass, and compute the rest anew. Of several
    ranks each gets its shards of it.
    """
    learner = _copied(start, adapter, seed, sharded=ranks.count > 1)
    if checkpointing:
        checkpoint_layers(learner.model)
    if ranks.count > 1:
        learner.model = shard(learner.model, start.device, ranks)
    return learner


def frozen_copy(start: LoadedModel, ranks: RankGroup) -> Any:
    """The reference, which learns nothing: the model of ``start`` itself, or each rank's shards of a copy."""
    return start.model if ranks.count == 1 else shard(_sharing(start.model), start.device, ranks)


def _copied(start: LoadedModel, adapter: AdapterSpec | None, seed: int, *, sharded: bool) -> LoadedModel:
    if adapter is None and sharded:
        return replace(start, model=_sharing(start.model, trains=True))  # shards are copies by themselves
    if adapter is None:
        return replace(start, model=copy.deepcopy(start.model).eval())
    if isinstance(start, AdaptedModel):
        return replace(start, model=_sharing(start.model))
    check_adapter(start.model, adapter)
    model = _injected(_sharing(start.model), adapter)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_A" in name:  # B is 0, so that a new adapter changes nothing (Hu 2021, section 4.1)
                draw = torch.Generator().manual_seed(derive_seed("adapter", seed, name))
                # uniform in +-1/sqrt(in_features), what Kaiming's init with a = sqrt(5) comes to
                bound = weight.shape[1] ** -0.5
                weight.copy_(torch.rand(weight.shape, generator=draw) * 2 * bound - bound)
    # the base's own sha256 stays known: an adapter is identified by both
    return AdaptedModel(**(vars(start) | {"model": model, "origin": start.sha256}))


def checkpoint_layers(model: Any) -> None:
    """Checkpoint the decoder's layers in evaluation mode too, which transformers' own switch does in training only."""
    layers = [part for part in find_decoder(model).modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise RunError(
            f"gradient checkpointing is not prepared in {type(model).__name__}; set gradient_checkpointing: false"
        )
    for layer in layers:
        # of this instance alone: other models of its class stay as they are
        layer.forward = partial(_kept_by_its_input, layer.forward)


def _kept_by_its_input(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # nothing is drawn in a layer, so there is no state of a generator to put back
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def load_trained_adapter(base: LoadedModel, adapter: AdapterSpec, folder: Path) -> LoadedModel:
    """The base with the adapter of a finished checkpoint beside it, to be trained further."""
    verify_folder(folder)
    start = trainable_copy(base, adapter, 0)
    found = load_file(folder / ADAPTER_WEIGHTS)
    own = adapter_weights(start.model)
    if {name: tensor.shape for name, tensor in found.items()} != {name: own[name].shape for name in own}:
        raise DataError(f"adapter {str(folder)!r} is not of this spec; delete the folder to train it again")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(found[name])
    return replace(start, sha256=adapter_sha256(folder, base.sha256))


def without_adapter(start: LoadedModel) -> LoadedModel:
    """The model that an adapter is beside, of the same weights; a model without one as it is."""
    if not isinstance(start, AdaptedModel):
        return start
    model = _sharing(start.model)
    for name, layer in _adapted_layers(model).items():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, layer.base_layer)
    plain = {part.name: getattr(start, part.name) for part in fields(LoadedModel)}
    return LoadedModel(**(plain | {"model": model, "sha256": start.origin}))


def merged_weights(model: Any) -> dict[str, Tensor]:
    """A model's weights, each once, by the names of its checkpoint, an adapter merged in (Hu 2021, section 4.1).

    Sums are float32. Of a sharded model that is gathered they are on the CPU.
    """
    layers, found = _adapted_layers(model), dict[str, Tensor]()
    for name, tensor in unique_weights(full_state_dict(model) if is_sharded(model) else model.state_dict()).items():
        if _MARK in name:
            continue
        owner, adapted, _ = name.partition(f".{_BASE}.weight")
        whole = tensor.detach()
        if adapted:
            whole = whole.float() + layers[owner].get_delta_weight(_NAME).detach().to(tensor.device, torch.float32)
        found[name.replace(f".{_BASE}.", ".")] = whole
    return found


def _adapted_layers(model: Any) -> dict[str, Any]:
    """The layers that have an adapter beside them, by name."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, _BASE)}


def check_adapter(model: Any, adapter: AdapterSpec | None) -> None:
    """Raise SpecError for a target that the model lacks, and RunError where peft is not installed."""
    if adapter is None:
        return
    try:
        import peft  # noqa: F401
    except ImportError:
        raise RunError(f"training an adapter needs another package: {install_command('lora')}") from None
    known = linear_layers(model)
    for target in adapter.targets:
        if target not in known:
            raise SpecError(
                f"train.adapter.targets names {target!r}, no linear layer of the model; known: {', '.join(known)}"
            )


def adapter_weights(model: Any) -> dict[str, Parameter]:
    """The adapter's weights by the names they have in its file."""
    named = ((name, weight) for name, weight in model.named_parameters() if _MARK in name)
    # peft's files leave the adapter's own name out
    return {_PREFIX + name.replace(f".{_NAME}.", "."): weight for name, weight in named}


def save_adapter(learner: AdaptedModel, folder: Path) -> None:
    """Write the adapter as a folder that peft and ``checkpoints:`` read; the same bytes for the same weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().contiguous() for name, weight in adapter_weights(learner.model).items()}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings = learner.model.peft_config[_NAME].to_dict() | {"base_model_name_or_path": learner.name}
    # peft holds names of layers in sets, whose order changes from process to process
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    text = json.dumps(plain | {"inference_mode": True}, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")


def linear_layers(model: Any) -> list[str]:
    """Last parts of the names of the decoder's linear layers; the head, often tied to the embeddings, is none."""
    named = find_decoder(model).named_modules()
    return sorted({name.rpartition(".")[2] for name, module in named if isinstance(module, Linear)})


def _sharing(model: Any, *, trains: bool = False) -> Any:
    """A copy of the modules around the same weights, frozen unless it ``trains``; an adapter's weights are copied."""
    shared = {
        # by id, which deepcopy looks up: whatever is in here is not copied
        id(weight): Parameter(weight.detach(), requires_grad=trains)
        for name, weight in model.named_parameters()
        if _MARK not in name
    }
    return copy.deepcopy(model, shared).eval()


def _injected(model: Any, adapter: AdapterSpec) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    settings = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.targets or linear_layers(model)),
        task_type="CAUSAL_LM",
    )
    model = inject_adapter_in_model(settings, model, adapter_name=_NAME)
    for name, weight in model.named_parameters():
        if _MARK in name:
            weight.data = weight.data.float()  # half an ulp of bfloat16 is more than a usual step
    return model.eval()
