"""Faster decoding on a CPU: large weights are stored a second time, in oneDNN's packed layout.

Decoding multiplies a few rows with all weights, so memory speed limits it. With packed weights, decoding eight rows
takes two thirds of the time, and two fifths on a processor with AVX-512 (docs/results/bench.md). Packed weights must
not change, so a model that learns is never packed. The packed product adds up in another order, so log-probs differ in
their last bits, as they do between processors.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvaudit.audit.sampling.episode import ServedModel
from kvaudit.audit.sampling.memory import total_bytes

Model = TypeVar("Model", bound=ServedModel)

# by instruction set: the fewest weights for which packing pays, and the fewest rows of float32 for which the packed
# product is faster (for bfloat16 it always is)
LARGE, _FEWEST = {"AVX2": 1 << 19, "AVX512": 1 << 17}, {"AVX2": 2, "AVX512": 1}
_SHARE = 4  # the copies of one process per core may fill a quarter of the machine's memory


def pack_weights(model: Model) -> Model:
    """Return a copy of ``model`` whose large weights are packed and whose other weights are shared.

    Returns ``model`` itself if no weight would be packed. The result is for sampling: with gradients enabled it
    multiplies with the unpacked weights.
    """
    layers = _packable_layers(model)
    if not layers:
        return model
    # deepcopy does not copy what is in its memo: modules are new, their tensors shared
    shared = {id(tensor): tensor for tensor in (*model.model.parameters(), *model.model.buffers())}
    weights: Any = copy.deepcopy(model.model, shared)
    for name, module in layers:
        weights.set_submodule(name, _Packed(module))
    served = copy.copy(model)
    served.model = weights
    return served


def has_packable_weights(model: ServedModel) -> bool:
    """Return whether ``pack_weights`` would pack weights of this model."""
    return bool(_packable_layers(model))


def _packable_layers(model: ServedModel) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers to pack, with their names; none if the packed copies would not fit into memory."""
    layers = [
        (name, module)
        for name, module in model.model.named_modules()
        if _is_plain_linear(module)
        and is_packable_dtype(module.weight.dtype)
        and module.weight.numel() >= LARGE[_instruction_set()]
    ]
    size = sum(module.weight.nbytes for _, module in layers)
    # total memory, not free memory, so that results do not depend on what else is running
    fits = size * _SHARE * (os.cpu_count() or 1) <= total_bytes()
    return layers if model.device.type == "cpu" and fits else []


@functools.cache
def is_packable_dtype(dtype: torch.dtype) -> bool:
    """Return whether packing weights of this dtype is supported by torch here, and known to pay on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return dtype in (torch.float32, torch.bfloat16) and _instruction_set() in LARGE


def _instruction_set() -> str:
    """Return the instruction set that torch uses on this processor, such as "AVX512" (even if it has AMX too)."""
    return torch.backends.cpu.get_cpu_capability()


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer without hooks or a replaced forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return type(module) is nn.Linear and "forward" not in vars(module) and not any(hooks)


class _Packed(nn.Linear):
    """A linear layer that also holds its weights [N, K] in oneDNN's packed layout."""

    def __init__(self, stored: nn.Linear) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would initialise new weights
        self.in_features, self.out_features = stored.in_features, stored.out_features
        self.weight, self.bias = stored.weight, stored.bias
        self.training = stored.training
        self._fewest = _FEWEST[_instruction_set()] if stored.weight.dtype == torch.float32 else 1
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(stored.weight.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's output [..., N] for the rows ``hidden`` [..., K]."""
        has_few_rows = hidden.numel() < self._fewest * hidden.shape[-1]
        if has_few_rows or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return linear(hidden, self.weight, self.bias)
        products: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._blocks, self.bias, "none", [], "")
        return products
