"""A graph of operators that is recorded once and replayed on a CPU, as a GPU replays a CUDA graph.

Between recording and replay only numbers in memory may change: what Python decided, and where tensors lay, is baked in.
A step that is replayed wrongly here would be replayed wrongly there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pretend_gpu import where
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvaudit.audit.sampling.captured import CapturedStep

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default)


class GraphError(AssertionError):
    """What no graph can hold."""


class Operator(NamedTuple):
    """What ran, and the results it allocated, each by its place among the tensors of what it returned."""

    func: Any
    args: Any
    kwargs: Any
    made: list[tuple[int, Tensor]]


class RecordedGraph(TorchDispatchMode):
    """The operators that ran inside it and did more than show a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS and "gather_entries" not in where():  # which checks indices on a CPU alone
            raise GraphError(f"{func} reads what the graph computes")
        result = func(*args, **kwargs)
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        # a view needs no copy: it shows what its base holds
        results = enumerate(tensors_in(result))
        made = [(n, tensor) for n, tensor in results if tensor.untyped_storage().data_ptr() not in given]
        if made or func._schema.is_mutable:
            self.operators.append(Operator(func, args, kwargs, made))
        return result

    def replay(self) -> None:
        """Compute every operator again, into the memory that it first wrote to."""
        for func, args, kwargs, made in self.operators:
            result = func(*args, **kwargs)
            if made:
                new = tensors_in(result)
                for n, old in made:
                    old.copy_(new[n])


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def _unlikely(dtype: torch.dtype) -> float:
    """Return what stands in memory that a capture has allocated but not computed: a number that no step makes."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


class Recorder:
    """Takes the place of ``captured.capture_graph``: records, undoes what that computed, and counts replays."""

    def __init__(self, state: Callable[[], list[Tensor]]) -> None:
        self.captures = self.replays = 0
        self._state = state

    def __call__(self, run: Callable[[], Tensor], device: torch.device) -> CapturedStep:
        before = [(tensor, tensor.clone()) for tensor in self._state()]
        with RecordedGraph() as graph:
            logits = run()
        for tensor, old in before:  # a capture computes nothing
            tensor.copy_(old)
        for operator in graph.operators:
            for _, tensor in operator.made:
                tensor.fill_(_unlikely(tensor.dtype))
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            graph.replay()

        return CapturedStep(replay, logits)
