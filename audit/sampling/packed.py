"""A model for answers alone: on a processor, the weights of its large products are laid out for few rows as well.

Half and more of a decode step is products of a few rows with all weights. Stored row by row these are read at half the
speed that memory has; in oneDNN's blocks a product of eight rows takes two thirds of the time (docs/results/bench.md).
They are a second copy, of weights that must not change any more: what learns is never packed. A product adds up in
another order then, so that log-probs differ in their last bits, as they do between processors.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from audit.sampling.episode import ServedModel
from audit.sampling.memory import whole_bytes

Model = TypeVar("Model", bound=ServedModel)
LARGE = 1 << 19  # weights: below, a call of oneDNN costs more than it saves
_FEWEST = {torch.float32: 4, torch.bfloat16: 1}  # rows from which the packed product is the faster one, by dtype
_SHARE = 8  # of the machine's memory a copy takes an eighth at most: the same at any time, so that a run can go on


def packed(model: Model) -> Model:
    """``model`` itself where nothing is to be won, or one that shares its weights and holds the large ones packed.

    It answers the same questions and learns nothing: with gradients its products are those of ``model``.
    """
    products = [
        (name, module)
        for name, module in model.model.named_modules()
        if type(module) is nn.Linear and module.weight.numel() >= LARGE and module.weight.dtype in _FEWEST
    ]
    size = sum(module.weight.nbytes for _, module in products)
    if model.device.type != "cpu" or not products or not _is_able() or size * _SHARE > whole_bytes():
        return model
    shared = {id(tensor): tensor for tensor in (*model.model.parameters(), *model.model.buffers())}
    weights: Any = copy.deepcopy(model.model, shared)
    for name, module in products:
        weights.set_submodule(name, _Packed(module))
    served = copy.copy(model)
    served.model = weights
    return served


@functools.cache
def _is_able() -> bool:
    """Whether this processor is of the kind that was measured, and this torch has the products."""
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return has_onednn and torch.backends.cpu.get_cpu_capability().startswith("AVX")


class _Packed(nn.Linear):
    """A linear layer that holds its weights [N, K] a second time, in oneDNN's blocks."""

    def __init__(self, stored: nn.Linear) -> None:
        nn.Module.__init__(self)  # a linear layer's own would draw weights
        self.in_features, self.out_features = stored.in_features, stored.out_features
        self.weight, self.bias = stored.weight, stored.bias
        self._fewest = _FEWEST[stored.weight.dtype]
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(stored.weight.detach())

    def forward(self, given: Tensor) -> Tensor:
        """Products [..., N] of rows [..., K]."""
        if torch.is_grad_enabled() or given.numel() < self._fewest * given.shape[-1]:
            return linear(given, self.weight, self.bias)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(given, self._blocks, self.bias, "none", [], "")
        return found
