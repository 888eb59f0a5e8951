"""A model for answers alone: on a processor, the weights of its large products are laid out for few rows as well.

Half and more of a decode step is products of a few rows with all weights. Stored row by row these are read at half the
speed that memory has and less; in oneDNN's blocks a product of eight rows takes two thirds of the time, and two fifths
where the processor has AVX-512, for which one row is enough, and smaller weights (docs/results/bench.md).
They are a second copy, of weights that must not change any more: what learns is never packed. A product adds up in
another order then, so that log-probs differ in their last bits, as they do between processors.
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

# by the processor's widest instructions: weights below which a call of oneDNN costs more than it saves, and rows of
# float32 from which the packed product is the faster one; of bfloat16 it always is
LARGE, _FEWEST = {"AVX2": 1 << 19, "AVX512": 1 << 17}, {"AVX2": 2, "AVX512": 1}
_SHARE = 4  # of the machine's memory copies take a quarter at most, were there a process for every core


def packed(model: Model) -> Model:
    """``model`` itself where nothing is to be won, or one that shares its weights and holds the large ones packed.

    It answers the same questions and learns nothing: with gradients its products are those of ``model``.
    """
    products = _products(model)
    if not products:
        return model
    # deepcopy takes what its memo holds as copied already: modules are new, their tensors the same
    shared = {id(tensor): tensor for tensor in (*model.model.parameters(), *model.model.buffers())}
    weights: Any = copy.deepcopy(model.model, shared)
    for name, module in products:
        weights.set_submodule(name, _Packed(module))
    served = copy.copy(model)
    served.model = weights
    return served


def packs(model: ServedModel) -> bool:
    """Whether ``packed`` holds weights of this model a second time."""
    return bool(_products(model))


def _products(model: ServedModel) -> list[tuple[str, nn.Linear]]:
    """The products to be packed, by name; none where their copies would not fit."""
    products = [
        (name, module)
        for name, module in model.model.named_modules()
        if _is_plain(module) and is_able(module.weight.dtype) and module.weight.numel() >= LARGE[_widest()]
    ]
    size = sum(module.weight.nbytes for _, module in products)
    # all of the memory, not what is free: what a run computes must not depend on the hour
    fits = size * _SHARE * (os.cpu_count() or 1) <= total_bytes()
    return products if model.device.type == "cpu" and fits else []


@functools.cache
def is_able(dtype: torch.dtype) -> bool:
    """Whether this processor is of the kind that was measured, and this torch has the products for it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return dtype in (torch.float32, torch.bfloat16) and _widest() in LARGE


def _widest() -> str:
    """The widest instructions that torch uses here, those of AMX beside AVX-512."""
    return torch.backends.cpu.get_cpu_capability()


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer that nobody listens to or has hidden another forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return type(module) is nn.Linear and "forward" not in vars(module) and not any(hooks)


class _Packed(nn.Linear):
    """A linear layer that holds its weights [N, K] a second time, in oneDNN's blocks."""

    def __init__(self, stored: nn.Linear) -> None:
        nn.Module.__init__(self)  # a linear layer's own would draw weights
        self.in_features, self.out_features = stored.in_features, stored.out_features
        self.weight, self.bias = stored.weight, stored.bias
        self.training = stored.training
        self._fewest = _FEWEST[_widest()] if stored.weight.dtype == torch.float32 else 1
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(stored.weight.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        """Products [..., N] of rows [..., K]."""
        few = hidden.numel() < self._fewest * hidden.shape[-1]  # rows in all, whatever the leading dimensions
        if few or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return linear(hidden, self.weight, self.bias)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._blocks, self.bias, "none", [], "")
        return found
