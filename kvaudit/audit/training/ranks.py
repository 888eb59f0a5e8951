"""Training on several processes (ranks): collectives, calls of rank 0 that all ranks make too, and FSDP2 sharding.

Rank 0 owns claims, folder and telemetry; the others follow its calls (``on_all_ranks``). Objects from other ranks are
read as plain data only (``_unpack``): anyone who reaches the port can write to it, and torch's own object collectives
would unpickle whatever arrives.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import wraps
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from transformers.modeling_layers import GradientCheckpointingLayer

from kvaudit.audit.cache.attention import find_decoder
from kvaudit.audit.policies import Policy
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.errors import RunError
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class RankGroup:
    """The processes that train one unit (an arm with a seed) together; this one has rank ``number`` of ``count``.

    ``why`` is a function that returns a line about why a rank was lost, "" if the reason is unknown.
    """

    def __init__(self, number: int = 0, count: int = 1, why: Callable[[], str] = str) -> None:
        self.number, self.count, self._why = number, count, why
        self._unit: object = None  # the unit, until it is announced to the other ranks

    def share(self, count: int, number: int | None = None) -> range:
        """Return the range of indices, of ``count`` items, that this rank (or rank ``number``) gets.

        The sizes of the ranks' shares differ by at most one.
        """
        rank = self.number if number is None else number
        # rounding down at both ends leaves no gap and no overlap
        return range(count * rank // self.count, count * (rank + 1) // self.count)

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's object, in rank order."""
        if self.count == 1:
            return [value]
        packed = _pack(value)
        with self.collective():
            sizes = torch.zeros(self.count, dtype=torch.int64)  # bytes of every rank's object
            sizes[self.number] = len(packed)
            dist.all_reduce(sizes)
            # all_gather needs tensors of equal length
            padded = torch.cat([packed, packed.new_zeros(int(sizes.max()) - len(packed))])
            buffers = [torch.empty_like(padded) for _ in range(self.count)]
            dist.all_gather(buffers, padded)
        parts = [buffer[:size] for buffer, size in zip(buffers, sizes.tolist(), strict=True)]
        return [value if rank == self.number else _unpack(part) for rank, part in enumerate(parts)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over all ranks, in place, and return it."""
        if self.count > 1:
            with self.collective():
                dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: object) -> None:
        """Send an object from rank 0 to all other ranks; does nothing in any other rank."""
        if self.number == 0 and self.count > 1:
            packed = _pack(value)
            with self.collective():
                # the length first, so that the receivers can allocate the buffer
                dist.broadcast(torch.tensor([len(packed)]), 0)
                dist.broadcast(packed, 0)

    def receive(self) -> Any:
        """Return the next object that rank 0 broadcasts."""
        size = torch.zeros(1, dtype=torch.int64)
        with self.collective():
            dist.broadcast(size, 0)
            packed = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(packed, 0)
        return _unpack(packed)

    @contextmanager
    def unit(self, name: object) -> Iterator[None]:
        """Name the unit (an arm and seed) that is trained inside the context.

        At the end, tell the other ranks that it is done, if they have joined.
        """
        self._unit = name
        yield
        if self._unit is None:
            self.broadcast(None)
        self._unit = None

    def announce_unit(self) -> None:
        """Broadcast the name of the unit (an arm and seed) once, so that the other ranks join its training."""
        self.broadcast(self._unit)
        self._unit = None

    def follow_rank0(self, run: object) -> None:
        """Call on ``run``, this rank's training run, each method that rank 0 calls on its own.

        Returns when the training of the unit (an arm and seed) is done.
        """
        while (call := self.receive()) is not None:
            name, arguments = call
            if name not in _ON_ALL_RANKS:
                raise RunError(f"rank 0 called {inline(str(name))!r}, which is not a call that ranks share")
            getattr(run, name)(*arguments)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Turn errors of a collective in the context into a RunError, since they mean that another rank was lost."""
        try:
            yield
        except RuntimeError as error:
            # NCCL raises DistError; gloo raises a plain RuntimeError that names its source files
            if self.count == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            # drop the location in gloo's source
            line = inline(re.sub(r"^\[[^]]*\]:? *", "", str(error)).partition("\n")[0])
            problem = self._why() or f"another rank was lost or hangs ({line})"
            raise RunError(f"{problem}; saved work is kept: continue with --resume") from None


def _pack(value: object) -> Tensor:
    """Serialise an object to bytes [n] with torch.save, which writes a storage that tensors share only once."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Any:
    """Deserialise plain values, tensors and data classes; raises RunError, building nothing, for anything else."""
    file = io.BytesIO(packed.numpy().tobytes())
    try:
        # lists the class names only; nothing is imported or built
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        file.seek(0)
        with torch.serialization.safe_globals([cls for name in names if (cls := _data_class(name))]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, ValueError, RuntimeError):
        raise RunError("another rank sent something that is not data; start all ranks from the same install") from None


def _data_class(name: str) -> type | None:
    """Return the imported class with this full name if it is a data class, named tuple, enum or path; else None."""
    module, _, leaf = name.rpartition(".")
    cls = vars(sys.modules[module]).get(leaf) if module in sys.modules else None
    if not isinstance(cls, type):
        return None
    is_own = module.partition(".")[0] == "kvaudit" or issubclass(cls, Policy)
    data = is_dataclass(cls) or issubclass(cls, tuple | Enum)
    return cls if issubclass(cls, PurePath) or (is_own and data) else None


ALONE = RankGroup()
_ON_ALL_RANKS: set[str] = set()  # names of the methods that rank 0 may call on the others


def on_all_ranks(method: Method) -> Method:
    """Decorate a method so that every rank calls it, with the same arguments, when rank 0 does.

    The method's object has an attribute ``ranks``, a ``RankGroup``; all other ranks must be waiting in
    ``RankGroup.follow_rank0``.
    """
    _ON_ALL_RANKS.add(method.__name__)  # at import, so that every rank has the same names

    @wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        with self.ranks.collective():  # weights and gradients are exchanged inside
            self.ranks.broadcast((method.__name__, arguments))
            return method(self, *arguments)

    return cast("Method", call)


# --- sharded weights: torch's FSDP2 around the model's own layers --------------------------------------------------
#
# Every rank holds 1/N of every weight, gradient and moment in float32; a layer's weights are gathered in the model's
# own precision while it computes. Gradients are summed, not averaged: losses are parts of a step's sum. Forwards
# without gradient differ from rank to rank and cannot be kept in step, so they run under ``full_weights``, which costs
# a full copy of the weights per rank for that time (2 bytes each in bfloat16).


def can_shard() -> bool:
    """Return whether this build of torch has the FSDP2 features that sharding needs."""
    if not dist.is_available():
        return False
    from torch.distributed import fsdp

    return hasattr(fsdp, "FSDPModule") and hasattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms")


def shard(model: Any, device: torch.device, ranks: RankGroup) -> Any:
    """Shard the model's weights over the ranks onto ``device``, in place; all ranks call this together.

    Nothing else may use the model's modules afterwards; another model that shares its tensors is not affected.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks.count,))
    precision = model.dtype
    layers = [part for part in find_decoder(model).modules() if isinstance(part, GradientCheckpointingLayer)]
    for part in (*layers, model):  # weights outside the layers (embeddings, head) stay gathered through a whole pass
        policy = _upcast_weights(part, precision)
        fully_shard(part, mesh=mesh, reshard_after_forward=part is not model, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo supports no other
        if hasattr(part, "set_reduce_scatter_unused_params"):  # experts that no token of a rank reached
            part.set_reduce_scatter_unused_params(True, recurse=False)
    return model


@contextmanager
def keep_on_cpu(start: LoadedModel, ranks: RankGroup) -> Iterator[None]:
    """Keep the full weights on the CPU inside the context if several ranks train, to leave the GPU to the shards."""
    if ranks.count > 1:
        start.model.to("cpu")
    try:
        yield
    finally:
        start.model.to(start.device)


def _upcast_weights(part: Any, precision: torch.dtype) -> MixedPrecisionPolicy:
    """Convert a module's weights to float32 masters if all are trained; return FSDP's mixed-precision policy for it.

    ``precision`` is the dtype of passes. If some weights are frozen (beside an adapter, which is float32 already), all
    keep their dtype.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

    weights = [weight for weight in part.parameters() if not isinstance(weight, DTensor)]
    if precision == torch.float32 or not all(weight.requires_grad for weight in weights):
        return MixedPrecisionPolicy()
    for weight in weights:
        # float32, since half an ulp of bfloat16 exceeds a usual step; layer by layer, to save memory
        weight.data = weight.data.float()
    return MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)


@contextmanager
def full_weights(model: Any) -> Iterator[None]:
    """Gather a sharded model's full weights inside the context, so that each rank may run any number of forwards.

    For work without gradient. All ranks enter together, and each may leave at any time. Does nothing for a model that
    is not sharded.
    """
    gather_weights(model)
    try:
        yield
    finally:
        for part in _sharded_modules(model):
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)


def gather_weights(model: Any) -> None:
    """Gather a sharded model's full weights on every rank permanently."""
    for part in _sharded_modules(model):
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()


def _sharded_modules(model: Any) -> list[FSDPModule]:
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def full_state_dict(model: Any) -> dict[str, Tensor]:
    """Return every checkpoint tensor of a sharded model, on the CPU, by name; call it inside ``full_weights``."""
    state, copies = dict[str, Tensor](), dict[int, Tensor]()
    # module by module, because FSDP's own state_dict is always sharded
    for path, module in model.named_modules():
        hidden = module._non_persistent_buffers_set
        buffers = {name: buffer for name, buffer in module._buffers.items() if name not in hidden}
        for name, tensor in (module._parameters | buffers).items():
            if tensor is not None:
                # tied weights stay one tensor, which is written once
                copies.setdefault(id(tensor), tensor.detach().cpu().clone())
                state[f"{path}.{name}" if path else name] = copies[id(tensor)]
    return state


def is_sharded(model: Any) -> bool:
    """Return whether the model's weights are spread over several processes."""
    return model in _sharded_modules(model)


def local_shard(weight: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory; a tensor that is not sharded is returned unchanged."""
    if not dist.is_available() or not dist.is_initialized():
        return weight
    from torch.distributed.tensor import DTensor

    return cast("DTensor", weight.detach()).to_local() if isinstance(weight, DTensor) else weight
