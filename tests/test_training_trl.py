"""Losses equal TRL's on the same tensors: its numbers as literals, so that no test installs it.

grpo, dr_grpo, dapo, gspo and online-dpo are of trl 1.16.0 (``GRPOTrainer._compute_loss``, ``OnlineDPOTrainer``), ppo is
of trl 1.0.0 (``experimental.ppo``), the last that has it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvaudit.audit.training.corrections import Correction
from kvaudit.audit.training.losses.base import LOSSES, BatchRewards, CriticInputs, LossInputs, StepCounts

LOGPROBS = torch.tensor([[-0.5, -1.2, -0.3], [-2.0, -0.1, -0.7], [-0.9, -0.4, -1.5], [-1.1, -0.6, -0.2]])
OLD = torch.tensor([[-0.7, -1.1, -0.4], [-1.6, -0.2, -0.7], [-0.8, -0.9, -1.4], [-1.4, -0.5, -0.3]])
REFERENCE = torch.tensor([[-0.6, -1.0, -0.5], [-1.9, -0.3, -0.6], [-1.0, -0.6, -1.3], [-1.2, -0.8, -0.1]])
MASK = torch.tensor([[True, True, True], [True, True, False], [True, True, True], [True, False, False]])
SIGNS = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]])
OLD_VALUES = torch.tensor([[0.1, 0.3, 0.2], [0.4, 0.1, 0.5], [0.0, 0.2, 0.6], [0.3, 0.3, 0.1]])
MOVED = torch.tensor([[0.3, -0.1, 0.05], [-0.5, 0.1, 0.0], [0.2, 0.2, -0.4], [0.0, 0.25, 0.1]])


def given(mask: Tensor, advantages: Tensor, **options: object) -> LossInputs:
    values = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.04, "ref_logprobs": REFERENCE} | options
    return LossInputs(
        logprobs=LOGPROBS.clone().requires_grad_(),
        correction=Correction(mask.float(), mask, OLD, {}),
        advantages=advantages * mask,
        mask=mask,
        group=2,
        counts=StepCounts.of(advantages * mask, mask, 2, 4),
        **values,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("name", "options", "wanted", "gradient"),
    [
        ("grpo", {}, -0.0406870, [0.0003172, -0.0761411, -0.0914934]),
        ("dr_grpo", {}, 0.0598941, [0.0002379, -0.0571058, -0.0686200]),
        ("dapo", {"epsilon_high": 0.28}, 0.0952114, [-0.1352885, -0.1015215, -0.1219911]),
        ("gspo", {"epsilon_low": 0.1, "epsilon_high": 0.15}, -0.0529743, [-0.0887610, -0.0898163, -0.0884740]),
        ("online-dpo", {"beta": 0.5, "ref_logprobs": OLD}, 0.6345433, [-0.1094559, -0.1094559, -0.1094559]),
    ],
)
def test_a_loss_and_its_gradient_are_those_of_trl(
    name: str, options: dict[str, object], wanted: float, gradient: list[float]
) -> None:
    inputs = given(MASK, SIGNS, **options)
    loss = LOSSES.get(name)()(inputs).loss
    loss.backward()
    assert loss.item() == pytest.approx(wanted, abs=1e-6)
    assert inputs.logprobs.grad is not None
    torch.testing.assert_close(inputs.logprobs.grad[0], torch.tensor(gradient), rtol=0, atol=1e-6)


def test_ppo_its_advantages_and_its_gradients_are_those_of_trl() -> None:
    mask = torch.ones(4, 3, dtype=torch.bool)
    loss, rewards = LOSSES.get("ppo")(), torch.tensor([1.0, 0.0, 0.0, 1.0])
    advantages, returns = loss.estimate(BatchRewards(rewards, mask[:, 0], mask, 2, OLD_VALUES, 0.9, 0.8))
    assert returns is not None
    torch.testing.assert_close(advantages[0], torch.tensor([0.6885864, 0.6013292, 1.3106027]))
    torch.testing.assert_close(returns[2], torch.tensor([0.1137600, 0.1080000, 0.0]))
    values = (OLD_VALUES + MOVED).requires_grad_()
    inputs = given(mask, advantages, ref_logprobs=None, critic=CriticInputs(values, OLD_VALUES, returns, 0.2))
    outputs = loss(inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-0.0293201 + 0.0952884, abs=1e-6)
    assert outputs.metrics["value_loss"] / 12 == pytest.approx(0.0952884, abs=1e-6)
    assert values.grad is not None
    torch.testing.assert_close(values.grad[1], torch.tensor([-0.0152333, 0.0091667, 0.0416667]), rtol=0, atol=1e-6)
    assert inputs.logprobs.grad is not None
    torch.testing.assert_close(
        inputs.logprobs.grad[2], torch.tensor([0.0078657, 0.0726207, 0.1188335]), rtol=0, atol=1e-6
    )
