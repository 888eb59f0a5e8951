"""AdamW with float32 master weights, and its whole state as named tensors; several ranks share it (ZeRO, stage 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvaudit.audit.training.ranks import ALONE, RankGroup
from kvaudit.core.errors import DataError

HALVES = ("grad_variance", "grad_half_cosine")
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
    a usual step. Of several ranks each has the masters and moments of its own weights (Rajbhandari 2020, 1910.02054,
    stage 1): it gets the sum of all ranks' gradients of those and gives back what becomes of them. All ranks take
    every ``step``, and ask for ``tensors`` together.
    """

    def __init__(
        self, model: Any, *, learning_rate: float, warmup_steps: int, max_grad_norm: float, ranks: RankGroup = ALONE
    ) -> None:
        # beside an adapter the model's own weights are frozen
        named = model.named_parameters()
        self._weights: dict[str, Tensor] = {name: weight for name, weight in named if weight.requires_grad}
        self._ranks, self._owners = ranks, ranks.dealt({name: own.numel() for name, own in self._weights.items()})
        self._masters = {n: _master(own) for n, own in self._weights.items() if self._owners[n] == ranks.number}
        # as a group, which may be empty: there can be more ranks than weights
        own = [{"params": list(self._masters.values())}]
        self._adam = torch.optim.AdamW(own, lr=learning_rate, weight_decay=0.0, fused=True)
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
        names = self._taking_part(gradients)
        for weight in self._weights.values():
            weight.grad = None
        for name, grad in self._summed(gradients, names):
            self._masters[name].grad = grad
        halves = self._apart(names) if self._marks > 1 else dict.fromkeys(HALVES)
        self._marks, self._first = 0, {}
        norm = self._clipped()
        if math.isfinite(norm):  # one bad token would make every moment NaN for good
            self._update()
        self._adam.zero_grad(set_to_none=True)
        return StepResult(norm if math.isfinite(norm) else None, halves)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}

    def _taking_part(self, gradients: Mapping[str, Tensor]) -> list[str]:
        """The weights that have a gradient in any rank: in a mixture of experts some may have none."""
        # 1 where this rank has a gradient, so that the sum counts ranks
        known = torch.tensor([name in gradients for name in self._weights], dtype=torch.int64)
        return [name for name, ranks in zip(self._weights, self._ranks.summed(known).tolist(), strict=True) if ranks]

    def _summed(self, gradients: dict[str, Tensor], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The sum over all ranks for each of the names that is this rank's, in float32; empties ``gradients``.

        One at a time, so that no second copy of all is held.
        """
        for name in names:
            own = gradients.pop(name, None)
            wide = torch.zeros_like(self._weights[name], dtype=torch.float32) if own is None else own.float()
            self._ranks.sum_at(self._owners[name], wide)
            if name in self._masters:
                yield name, wide

    def _apart(self, names: Sequence[str]) -> dict[str, float | None]:
        """How far the halves' gradients are apart: they add up, so the second is what came on top of the first."""
        one, both, two = 0.0, 0.0, 0.0  # squared lengths, and the product
        for name, first in self._summed(self._first, names):
            total = self._masters[name].grad
            assert total is not None
            second = total - first
            one, two, both = (
                one + float(first.square().sum()),
                two + float(second.square().sum()),
                both + float((first * second).sum()),
            )
        one, two, both = (sum(numbers) for numbers in zip(*self._ranks.gathered((one, two, both)), strict=True))
        if not math.isfinite(one + two):
            return dict.fromkeys(HALVES)
        lengths = math.sqrt(one * two)  # the product of both norms
        return dict(zip(HALVES, (one + two - 2 * both, both / lengths if lengths else None), strict=True))

    def _clipped(self) -> float:
        """The norm of all ranks' gradients together, which are scaled down to the largest that is allowed."""
        own = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        # a place for every weight, so that the sum is of the same numbers in the same order whoever has which
        lengths = torch.zeros(len(self._weights))
        if own:
            places = [place for place, name in enumerate(self._weights) if name in own]
            lengths[places] = torch.stack([torch.linalg.vector_norm(grad) for grad in own.values()]).cpu()
        norm = torch.linalg.vector_norm(self._ranks.summed(lengths))
        scale = (self._max_norm / (norm + _FLOOR)).clamp(max=1.0)  # never up: a small gradient is left as it is
        for grad in own.values():
            grad.mul_(scale.to(grad.device))
        return float(norm)

    def _update(self) -> None:
        self.updates += 1
        # warm-up counts updates, so a skipped one does not shorten it
        rate = self._learning_rate * min(1.0, self.updates / max(self._warmup, 1))
        for settings in self._adam.param_groups:
            settings["lr"] = rate
        self._adam.step()
        self._publish()
        for name, weight in self._weights.items():
            self._ranks.spread(self._owners[name], weight.detach())

    @torch.no_grad()
    def _publish(self) -> None:
        # rounding happens here and is forgotten: the masters go on from what they were before it
        for name, master in self._masters.items():
            if self._weights[name] is not master:
                self._weights[name].copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """Master weights and both moments, keyed ``weight/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>``.

        All of them in the first rank, elsewhere its own.
        """
        return self._ranks.collected(self.own_tensors())

    def own_tensors(self) -> dict[str, Tensor]:
        """Those of them that this rank holds."""
        named = {f"weight/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for moment in _MOMENTS if master in self._adam.state else ():
                named[f"{moment}/{name}"] = self._adam.state[master][moment]
        return named

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Put back what ``tensors`` returned after ``updates`` updates; raises DataError where it does not fit.

        Each rank by itself, from what the first one had.
        """
        self.updates = updates
        for name, weight in self._weights.items():
            weight.copy_(_fitting(tensors, f"weight/{name}", weight))
        for name, master in self._masters.items():
            master.copy_(tensors[f"weight/{name}"])
            if updates:  # there are no moments to put back where every gradient so far was skipped
                moments = {moment: _fitting(tensors, f"{moment}/{name}", master) for moment in _MOMENTS}
                # fused AdamW keeps its count as a tensor beside the weights
                self._adam.state[master] = moments | {"step": torch.tensor(float(updates), device=master.device)}


def _master(weight: Tensor) -> Tensor:
    return weight if weight.dtype == torch.float32 else weight.detach().float().requires_grad_()


def _fitting(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = tensors.get(name)
    if found is None or (found.shape, found.dtype) != (like.shape, torch.float32) or not found.isfinite().all():
        raise DataError(
            f"training state does not fit the model at {name!r}; delete the checkpoint folder to start over"
        )
    return found.to(like.device).clone()
