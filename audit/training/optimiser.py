"""AdamW with float32 master weights, and its whole state as named tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from audit.core.errors import DataError

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimiser:
    """AdamW (Loshchilov 2019, 1711.05101) without weight decay; linear warm-up, then a constant rate.

    Weights that are not float32 get a float32 master copy: half an ulp of a bfloat16 weight of .02 is 6e-5, more than
    a usual step.
    """

    def __init__(self, model: Any, *, learning_rate: float, warmup_steps: int, max_grad_norm: float) -> None:
        # beside an adapter the model's own weights are frozen
        named = model.named_parameters()
        self._weights: dict[str, Tensor] = {name: weight for name, weight in named if weight.requires_grad}
        self._masters = {name: _master(weight) for name, weight in self._weights.items()}
        self._adam = torch.optim.AdamW(self._masters.values(), lr=learning_rate, weight_decay=0.0, fused=True)
        self._learning_rate, self._warmup, self._max_norm = learning_rate, warmup_steps, max_grad_norm
        self.updates = 0

    def step(self) -> float | None:
        """Clip, update, forget the gradients; returns the norm before clipping.

        A gradient that is not finite changes nothing and returns None.
        """
        for name, weight in self._weights.items():
            master = self._masters[name]
            if master is not weight and weight.grad is not None:
                master.grad, weight.grad = weight.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters.values(), self._max_norm))
        if math.isfinite(norm):  # one bad token would make every moment NaN for good
            self._update()
        self._adam.zero_grad(set_to_none=True)
        return norm if math.isfinite(norm) else None

    def _update(self) -> None:
        self.updates += 1
        rate = self._learning_rate * min(1.0, self.updates / max(self._warmup, 1))
        for settings in self._adam.param_groups:
            settings["lr"] = rate
        self._adam.step()
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        # rounding happens here and is forgotten: the masters go on from what they were before it
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                weight.copy_(self._masters[name])

    def tensors(self) -> dict[str, Tensor]:
        """Master weights and both moments, keyed ``weight/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>``."""
        named = {f"weight/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for moment in _MOMENTS if master in self._adam.state else ():
                named[f"{moment}/{name}"] = self._adam.state[master][moment]
        return named

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Put back what ``tensors`` returned after ``updates`` updates; raises DataError where it does not fit."""
        self.updates = updates
        for name, master in self._masters.items():
            master.copy_(_fitting(tensors, f"weight/{name}", master))
            if updates:  # there are no moments to put back where every gradient so far was skipped
                moments = {moment: _fitting(tensors, f"{moment}/{name}", master) for moment in _MOMENTS}
                # fused AdamW keeps its count as a tensor beside the weights
                self._adam.state[master] = moments | {"step": torch.tensor(float(updates), device=master.device)}
        self._publish()


class Halves:
    """How far the gradients of two halves of a batch are apart: what a correction costs in variance.

    ``mark`` stands after the first half; gradients add up, so the second half's is what comes on top.
    """

    def __init__(self, model: Any) -> None:
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._first: list[Tensor | None] | None = None

    def mark(self) -> None:
        """Keep the gradients so far, those of the first half, in a copy."""
        self._first = [None if weight.grad is None else weight.grad.detach().clone() for weight in self._weights]

    def numbers(self) -> dict[str, float | None]:
        """``grad_variance``: squared distance of the halves, an estimate of the step's gradient's own variance (its
        squared length is ``grad_norm`` squared); ``grad_half_cosine`` of the two. None without two halves.
        """
        one, both, two = 0.0, 0.0, 0.0  # squared lengths, and the product
        for first, weight in zip(self._first or (), self._weights, strict=self._first is not None):
            if weight.grad is not None:
                total = weight.grad.float()  # bfloat16 has too few digits for the difference of two lengths
                own = torch.zeros_like(total) if first is None else first.float()
                second = total - own
                one, two, both = (
                    one + float(own.square().sum()),
                    two + float(second.square().sum()),
                    both + float((own * second).sum()),
                )
        if self._first is None or not math.isfinite(one + two):
            return dict.fromkeys(HALVES)
        lengths = math.sqrt(one * two)
        return dict(zip(HALVES, (one + two - 2 * both, both / lengths if lengths else None), strict=True))


HALVES = ("grad_variance", "grad_half_cosine")


def _master(weight: Tensor) -> Tensor:
    return weight if weight.dtype == torch.float32 else weight.detach().float().requires_grad_()


def _fitting(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = tensors.get(name)
    if found is None or (found.shape, found.dtype) != (like.shape, like.dtype) or not found.isfinite().all():
        raise DataError(
            f"training state does not fit the model at {name!r}; delete the checkpoint folder to start over"
        )
    return found.to(like.device).clone()
