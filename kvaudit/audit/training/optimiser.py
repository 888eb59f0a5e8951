"""AdamW with float32 master weights; its full state can be saved as named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.core.errors import DataError

HALF_METRICS = ("grad_variance", "grad_half_cosine")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NORM_FLOOR = 1e-6  # as in torch's own clipping


def read_floats(values: Sequence[Tensor | float]) -> list[float]:
    """Convert one-element tensors on one device to floats with a single device read; floats pass through.

    Reads are batched because each waits for the device to finish its queue.
    """
    tensors = [value.detach().double() for value in values if isinstance(value, Tensor)]  # double holds each exactly
    floats = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(floats) if isinstance(value, Tensor) else value for value in values]


class StepResult(NamedTuple):
    """The result of a gradient step: the gradient's norm, and a comparison of the gradients of two half batches.

    ``norm`` is taken before clipping. If it was not finite, it is None, and the step was skipped.

    ``halves`` compares the gradients of the two halves of a batch. ``grad_variance`` is their squared distance; it
    estimates the variance of the whole gradient and can be compared with ``norm`` squared. ``grad_half_cosine`` is
    their cosine. Both are None if the batch had no second half.
    """

    norm: float | None
    halves: dict[str, float | None]


class Optimiser:
    """AdamW (Loshchilov 2019, 1711.05101) without weight decay; linear warm-up, then a constant rate.

    Weights of less precision than float32 get a float32 master copy. Without it most steps would be lost in rounding:
    half a unit in the last place of a bfloat16 weight of .02 is 6e-5, more than a usual step.
    """

    def __init__(self, model: Any, *, learning_rate: float, warmup_steps: int, max_grad_norm: float) -> None:
        # with an adapter, the model's own weights are frozen
        self._weights: dict[str, Tensor] = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        self._masters: dict[str, Tensor] = {
            name: weight if weight.dtype == torch.float32 else weight.detach().float().requires_grad_()
            for name, weight in self._weights.items()
        }
        self._adam = torch.optim.AdamW(self._masters.values(), lr=learning_rate, weight_decay=0.0, fused=True)
        self._learning_rate, self._warmup, self._max_norm = learning_rate, warmup_steps, max_grad_norm
        self._ended_halves, self._first_half = 0, dict[str, Tensor]()  # gradients of the first half, by name
        self.updates = 0

    def end_half(self) -> None:
        """Note that the gradient of one half of the batch is complete; after the first half, keep a copy of it."""
        self._ended_halves += 1
        if self._ended_halves == 1:
            self._first_half = {
                name: weight.grad.detach().clone() for name, weight in self._weights.items() if weight.grad is not None
            }

    def step(self) -> StepResult:
        """Clip gradients, update the weights and clear the gradients; skip the update if a gradient is not finite."""
        for name, weight in self._weights.items():
            grad, weight.grad = weight.grad, None  # one at a time, so that no second copy of all gradients exists
            self._masters[name].grad = None if grad is None else grad.float()
        halves = self._compare_halves() if self._ended_halves > 1 else dict.fromkeys(HALF_METRICS)
        self._ended_halves, self._first_half = 0, {}
        norm = self._clip()
        if math.isfinite(norm):  # one bad token would make every moment NaN for good
            self._update()
        self._adam.zero_grad(set_to_none=True)
        return StepResult(norm if math.isfinite(norm) else None, halves)

    def _compare_halves(self) -> dict[str, float | None]:
        products = list[Tensor]()  # three numbers per weight: |first|^2, |second|^2, first . second
        for name, master in self._masters.items():
            total, saved = master.grad, self._first_half.pop(name, None)
            if total is None:  # some weights of a mixture of experts may have none
                continue
            first = torch.zeros_like(total) if saved is None else saved.float()
            second = total - first  # gradients accumulate
            products += [first.square().sum(), second.square().sum(), (first * second).sum()]
        values, sums = read_floats(products), [0.0, 0.0, 0.0]
        for n, value in enumerate(values):
            sums[n % 3] += value
        first_square, second_square, dot = sums
        if not math.isfinite(first_square + second_square):
            return dict.fromkeys(HALF_METRICS)
        norms = math.sqrt(first_square * second_square)
        variance = first_square + second_square - 2 * dot
        return dict(zip(HALF_METRICS, (variance, dot / norms if norms else None), strict=True))

    def _clip(self) -> float:
        """Scale gradients down to the maximum global norm; return the norm before clipping."""
        gradients = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        # an entry for every weight, so that the order of summation does not depend on which ones have gradients
        norms = torch.zeros(len(self._weights))
        if gradients:
            indices = [n for n, name in enumerate(self._weights) if name in gradients]
            norms[indices] = torch.stack([torch.linalg.vector_norm(grad) for grad in gradients.values()]).cpu()
        norm = torch.linalg.vector_norm(norms)
        scale = (self._max_norm / (norm + _NORM_FLOOR)).clamp(max=1.0)  # never scales up
        for grad in gradients.values():
            grad.mul_(scale)  # a scalar on the host is passed as an argument, without a copy to the device
        return float(norm)

    def _update(self) -> None:
        self.updates += 1
        # warm-up counts updates, so a skipped one does not shorten it
        rate = self._learning_rate * min(1.0, self.updates / max(self._warmup, 1))
        for settings in self._adam.param_groups:
            settings["lr"] = rate
        self._adam.step()
        # only the model's copy is rounded; the masters keep full precision
        with torch.no_grad():
            for name, master in self._masters.items():
                if self._weights[name] is not master:
                    self._weights[name].copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """Return master weights and moments under keys ``weight/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>``.

        ``step/<name>`` is the number of gradients that a weight has had, if it differs from the number of updates; a
        weight without gradients has no moments.
        """
        tensors = {f"weight/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            state = self._adam.state.get(master, {})  # empty for a weight that never had a gradient
            tensors |= {f"{moment}/{name}": state[moment] for moment in _MOMENTS if state}
            if state and int(state["step"]) != self.updates:
                tensors[f"step/{name}"] = torch.tensor(float(state["step"]))
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Restore what ``Optimiser.tensors`` returned after ``updates`` updates; raise DataError if it does not fit."""
        self.updates = updates
        for name, weight in self._weights.items():
            weight.copy_(_saved_tensor(tensors, f"weight/{name}", weight))
        for name, master in self._masters.items():
            master.copy_(tensors[f"weight/{name}"])
            if any(f"{moment}/{name}" in tensors for moment in _MOMENTS):
                moments = {moment: _saved_tensor(tensors, f"{moment}/{name}", master) for moment in _MOMENTS}
                steps = float(tensors.get(f"step/{name}", updates))
                # fused AdamW keeps its step count as a tensor on the device
                self._adam.state[master] = moments | {"step": torch.tensor(steps, device=master.device)}


def _saved_tensor(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or (tensor.shape, tensor.dtype) != (like.shape, torch.float32) or not tensor.isfinite().all():
        raise DataError(
            f"training state does not fit the model at {name!r}; delete the checkpoint folder to start over"
        )
    return tensor.to(like.device).clone()
