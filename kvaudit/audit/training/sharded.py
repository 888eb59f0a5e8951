"""Weights that lie in several processes: torch's FSDP2 around the model's own layers, gathered layer by layer.

Every rank holds 1/N of every weight in float32, with its gradient and moments; a layer's weights come together in the
model's own precision while that layer computes. Gradients are summed, not averaged: losses are parts of a step's sum.
What needs no gradient, rollouts above all, runs with the weights ``gathered``, since its forwards differ from rank to
rank and could not be kept in step: whole weights once more in every rank for that long, 2 bytes each in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch import distributed as dist
from transformers.modeling_layers import GradientCheckpointingLayer

from kvaudit.audit.cache.attention import find_decoder
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.ranks import RankGroup

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


def can_shard() -> bool:
    """Whether this build of torch has all that is needed; a model of one process needs none of it."""
    if not dist.is_available():
        return False
    from torch.distributed import fsdp

    return hasattr(fsdp, "FSDPModule") and hasattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms")


def shard(model: Any, device: torch.device, ranks: RankGroup) -> Any:
    """The model itself, whose weights become this rank's shards on ``device``; all ranks together.

    Nobody else may use its modules any more; tensors that it shares with another model stay as they are there.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks.count,))
    computed = model.dtype
    layers = [part for part in find_decoder(model).modules() if isinstance(part, GradientCheckpointingLayer)]
    for part in (*layers, model):  # what is in no layer, embeddings and head, stays gathered through a whole pass
        policy = _in_full(part, computed)
        fully_shard(part, mesh=mesh, reshard_after_forward=part is not model, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other
        if hasattr(part, "set_reduce_scatter_unused_params"):  # experts that one rank's tokens never reached
            part.set_reduce_scatter_unused_params(True, recurse=False)
    return model


@contextmanager
def set_aside(start: LoadedModel, ranks: RankGroup) -> Iterator[None]:
    """Inside, the whole weights that shards are made of wait in the machine's memory, and leave the GPU to the shards.

    Of one process they stay where they are.
    """
    if ranks.count > 1:
        start.model.to("cpu")
    try:
        yield
    finally:
        start.model.to(start.device)


def _in_full(part: Any, computed: torch.dtype) -> MixedPrecisionPolicy:
    """Make float32 masters of a part's weights where all of them are trained; how it computes then.

    Beside an adapter, which is float32 already, frozen weights stay as they are and everything computes as it is.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

    own = [weight for weight in part.parameters() if not isinstance(weight, DTensor)]
    if computed == torch.float32 or not all(weight.requires_grad for weight in own):
        return MixedPrecisionPolicy()
    for weight in own:
        # a layer at a time, so that no second whole model is held; half an ulp of bfloat16 is more than a usual step
        weight.data = weight.data.float()
    return MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Inside, a sharded model has its weights whole in every rank, and ranks may call it as often as each likes.

    All ranks enter together and leave when they like; without gradient alone. Another model is left as it is.
    """
    gather(model)
    try:
        yield
    finally:
        # back to shards, and to gathering a layer only while it computes
        for part in _parts(model):
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)


def gather(model: Any) -> None:
    """Have a sharded model ``gathered`` from here on."""
    for part in _parts(model):
        # kept whole behind a forward too
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()


def _parts(model: Any) -> list[FSDPModule]:
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def whole_weights(model: Any) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, on the CPU, of a sharded model that is ``gathered``."""
    found, copies = dict[str, Tensor](), dict[int, Tensor]()
    # by module, since what FSDP hands out as state is always sharded
    for place, module in model.named_modules():
        kept = {name: own for name, own in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (module._parameters | kept).items():
            if tensor is not None:
                # what is tied stays one tensor, which is written once
                copies.setdefault(id(tensor), tensor.detach().cpu().clone())
                found[f"{place}.{name}" if place else name] = copies[id(tensor)]
    return found


def is_sharded(model: Any) -> bool:
    """Whether its weights lie in several processes."""
    return model in _parts(model)


def local(weight: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, in the same memory; another tensor itself."""
    if not dist.is_available() or not dist.is_initialized():
        return weight
    from torch.distributed.tensor import DTensor

    return cast("DTensor", weight.detach()).to_local() if isinstance(weight, DTensor) else weight
