"""AdamW with float32 master weights, and its whole state as named tensors; of sharded weights each rank's own part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.training.ranks import ALONE, RankGroup
from kvaudit.audit.training.optimiser import read_floats
from kvaudit.audit.training.ranks import local_shard
from kvaudit.core.errors import DataError

HALF_METRICS = ("grad_variance", "grad_half_cosine")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FLOOR = 1e-6  # of a norm, as torch's own clipping has it


class StepResult(NamedTuple):
    """``norm`` of the gradient before clipping, None where it was not finite and changed nothing.

    ``halves``: ``grad_variance`` is the squared distance of the gradients of the two halves of a batch, an estimate of
    the gradient's own variance (its squared length is ``norm`` squared); ``grad_half_cosine`` of the two. None without
    two halves.
    """

    norm: float | None
    halves: dict[str, float | None]


class Optimiser:
    """AdamW (Loshchilov 2019, 1711.05101) without weight decay; linear warm-up, then a constant rate.

    Weights that are not float32 get a float32 master copy: half an ulp of a bfloat16 weight of .02 is 6e-5, more than
    a usual step. Sharded weights are float32, and each of the ranks steps with its part of every one; they take every
    ``step`` together, since the norm is of all parts.
    """

    def __init__(
        self, model: Any, *, learning_rate: float, warmup_steps: int, max_grad_norm: float, ranks: RankGroup = ALONE
    ) -> None:
        # beside an adapter the model's own weights are frozen
        named = model.named_parameters()
        self._given: dict[str, Tensor] = {name: weight for name, weight in named if weight.requires_grad}
        self._weights = {name: local_shard(weight) for name, weight in self._given.items()}
        self._masters, self._ranks = dict[str, Tensor](), ranks
        for name, own in self._weights.items():
            wide = own.dtype == torch.float32
            self._masters[name] = own if wide else own.detach().float().requires_grad_()
        self._adam = torch.optim.AdamW(self._masters.values(), lr=learning_rate, weight_decay=0.0, fused=True)
        self._learning_rate, self._warmup, self._max_norm = learning_rate, warmup_steps, max_grad_norm
        self._marks, self._first = 0, dict[str, Tensor]()  # halves that have ended; gradients of the first, by name
        self.updates = 0

    def mark(self) -> None:
        """Say that a half of the batch ends here; the gradient of the first is kept in a copy."""
        self._marks += 1
        if self._marks == 1:
            self._first = {name: grad.detach().clone() for name, grad in self._gradients().items()}

    def step(self) -> StepResult:
        """Clip, update, forget the gradients; one that is not finite changes nothing."""
        gradients = self._gradients()
        for name, weight in self._given.items():
            weight.grad = None  # one at a time, so that no second copy of all is held
            own = gradients.pop(name, None)
            self._masters[name].grad = None if own is None else own.float()
        halves = self._apart() if self._marks > 1 else dict.fromkeys(HALF_METRICS)
        self._marks, self._first = 0, {}
        norm = self._clipped()
        if math.isfinite(norm):  # one bad token would make every moment NaN for good
            self._update()
        self._adam.zero_grad(set_to_none=True)
        return StepResult(norm if math.isfinite(norm) else None, halves)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: local_shard(weight.grad) for name, weight in self._given.items() if weight.grad is not None}

    def _apart(self) -> dict[str, float | None]:
        """How far the halves' gradients are apart: they add up, so the second is what came on top of the first."""
        one, both, two = 0.0, 0.0, 0.0  # squared lengths, and the product
        found = list[Tensor]()  # the three of each weight, read at once: each read waits for the device
        for name, master in self._masters.items():
            total, early = master.grad, self._first.pop(name, None)
            if total is None:  # in a mixture of experts some may have none
                continue
            first = torch.zeros_like(total) if early is None else early.float()
            second = total - first
            found += [first.square().sum(), second.square().sum(), (first * second).sum()]
        values = read_floats(found)
        for length, other, product in zip(values[::3], values[1::3], values[2::3], strict=True):
            one, two, both = one + length, two + other, both + product
        # in double, which holds a float of Python as it is
        one, two, both = self._ranks.summed(torch.tensor([one, two, both], dtype=torch.float64)).tolist()
        if not math.isfinite(one + two):
            return dict.fromkeys(HALF_METRICS)
        lengths = math.sqrt(one * two)  # the product of both norms
        return dict(zip(HALF_METRICS, (one + two - 2 * both, both / lengths if lengths else None), strict=True))

    def _clipped(self) -> float:
        """The norm of all gradients together, which are scaled down to the largest that is allowed."""
        own = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        # a place for every weight, so that ranks add up the same ones
        lengths = torch.zeros(len(self._weights))
        if own:
            places = [place for place, name in enumerate(self._weights) if name in own]
            lengths[places] = torch.stack([torch.linalg.vector_norm(grad) for grad in own.values()]).cpu()
        if self._ranks.count > 1:  # each of a part of the weight
            lengths = self._ranks.summed(lengths.double().square()).sqrt().float()
        norm = torch.linalg.vector_norm(lengths)
        scale = (self._max_norm / (norm + _FLOOR)).clamp(max=1.0)  # never up: a small gradient is left as it is
        for grad in own.values():
            grad.mul_(scale)  # one number on the host goes along with the call
        return float(norm)

    def _update(self) -> None:
        self.updates += 1
        # warm-up counts updates, so a skipped one does not shorten it
        rate = self._learning_rate * min(1.0, self.updates / max(self._warmup, 1))
        for settings in self._adam.param_groups:
            settings["lr"] = rate
        self._adam.step()
        # rounding happens here and is forgotten: the masters go on from what they were before it
        with torch.no_grad():
            for name, master in self._masters.items():
                if self._weights[name] is not master:
                    self._weights[name].copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """Master weights and both moments, keyed ``weight/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>``.

        ``step/<name>`` is how many gradients a weight had, where that is not the number of updates; one without moments
        had none. Of sharded weights this rank's part.
        """
        named = {f"weight/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            state = self._adam.state.get(master, {})  # empty for a weight that never had a gradient
            named |= {f"{moment}/{name}": state[moment] for moment in _MOMENTS if state}
            if state and int(state["step"]) != self.updates:  # it had none in some of the updates
                named[f"step/{name}"] = torch.tensor(float(state["step"]))
        return named

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Put back what ``tensors`` returned after ``updates`` updates; raises DataError where it does not fit.

        Each rank its own part.
        """
        self.updates = updates
        for name, weight in self._weights.items():
            weight.copy_(_fitting(tensors, f"weight/{name}", weight))
        for name, master in self._masters.items():
            master.copy_(tensors[f"weight/{name}"])
            if any(f"{moment}/{name}" in tensors for moment in _MOMENTS):
                moments = {moment: _fitting(tensors, f"{moment}/{name}", master) for moment in _MOMENTS}
                steps = float(tensors.get(f"step/{name}", updates))
                # fused AdamW keeps its count as a tensor beside the weights
                self._adam.state[master] = moments | {"step": torch.tensor(steps, device=master.device)}


def _fitting(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = tensors.get(name)
    if found is None or (found.shape, found.dtype) != (like.shape, torch.float32) or not found.isfinite().all():
        raise DataError(
            f"training state does not fit the model at {name!r}; delete the checkpoint folder to start over"
        )
    return found.to(like.device).clone()
