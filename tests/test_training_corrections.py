"""Corrections and arms: literal ratios in, literal weights out."""

from __future__ import annotations

import math

import pytest
import torch

from kvaudit.audit.training.config import ARMS, Arm
from kvaudit.audit.training.corrections import CORRECTIONS, Correction, token_ratios


def correct(name: str, ratios: list[list[float]], mask: list[list[bool]] | None = None) -> Correction:
    """Apply a rule to rollouts whose sampler said 0 nats and whose learner says log(ratio)."""
    learner = torch.tensor(ratios).log()
    seen = torch.ones_like(learner, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return CORRECTIONS[name](learner, torch.zeros_like(learner), seen)


def test_none_leaves_every_token_its_weight_and_calls_the_learner_old() -> None:
    result = correct("none", [[0.2, 3.0]])
    assert result.weights.tolist() == [[1.0, 1.0]]
    torch.testing.assert_close(result.old_logprobs.exp(), torch.tensor([[0.2, 3.0]]))


def test_naive_ratio_calls_the_sampler_old() -> None:
    result = correct("naive-ratio", [[0.2, 3.0]])
    assert result.old_logprobs.tolist() == [[0.0, 0.0]]
    assert result.weights.tolist() == [[1.0, 1.0]]


def test_tis_truncates_at_two_and_keeps_every_token() -> None:
    result = correct("tis", [[0.3, 1.0, 2.5, 40.0]])
    torch.testing.assert_close(result.weights, torch.tensor([[0.3, 1.0, 2.0, 2.0]]))
    assert result.keep.all()


def test_mis_drops_ratios_outside_half_to_five_and_caps_none() -> None:
    result = correct("mis", [[0.49, 0.51, 1.0, 4.9, 5.1]])
    torch.testing.assert_close(result.weights, torch.tensor([[0.0, 0.51, 1.0, 4.9, 0.0]]))
    assert result.keep.tolist() == [[False, True, True, True, False]]
    assert result.metrics["masked_tokens"] == pytest.approx(0.4)


def test_tis_of_a_sequence_truncates_the_product_of_what_was_sampled() -> None:
    result = correct("tis-sequence", [[0.5, 3.0, 9.0], [2.0, 2.0, 1.0]], [[True, True, False], [True] * 3])
    torch.testing.assert_close(result.weights, torch.tensor([[1.5, 1.5, 0.0], [2.0, 2.0, 2.0]]))
    assert result.keep.tolist() == [[True, True, False], [True] * 3]


def test_mis_of_a_sequence_drops_whole_rollouts() -> None:
    result = correct("mis-sequence", [[0.5, 3.0], [0.5, 0.9], [3.0, 2.0]])
    torch.testing.assert_close(result.weights, torch.tensor([[1.5, 1.5], [0.0, 0.0], [0.0, 0.0]]))
    assert result.keep.tolist() == [[True, True], [False, False], [False, False]]
    assert result.metrics == {"masked_tokens": pytest.approx(2 / 3), "rejected_sequences": pytest.approx(2 / 3)}


def test_sparse_rl_masks_vetoes_and_scales_to_mean_one_over_kept_tokens() -> None:
    result = correct("sparse-rl", [[1.0, 1.4, 2.0], [1.0, 0.4, 0.9], [1.0, 5e-5, 1.0]])
    wanted = torch.tensor([[1.0, 1.4, 0.0], [1.0, 0.0, 0.9], [0.0, 0.0, 0.0]]) / 1.075
    torch.testing.assert_close(result.weights, wanted)
    assert result.keep.tolist() == [[True, True, False], [True, False, True], [False, False, False]]
    assert result.weights[result.keep].mean().item() == pytest.approx(1.0)
    assert result.metrics == {"masked_tokens": pytest.approx(5 / 9), "rejected_sequences": pytest.approx(1 / 3)}


def test_sparse_rl_as_written_rejects_sequences_and_caps_weights_and_masks_no_token() -> None:
    result = correct("sparse-rl-text", [[1.0, 1.4, 2.0], [1.0, 0.4, 0.9], [1.0, 5e-5, 1.0]])
    torch.testing.assert_close(result.weights, torch.tensor([[1.0, 1.4, 1.5], [1.0, 0.4, 0.9], [0.0, 0.0, 0.0]]))
    assert result.keep.tolist() == [[True] * 3, [True] * 3, [False] * 3]
    assert result.metrics == {"masked_tokens": pytest.approx(1 / 3), "rejected_sequences": pytest.approx(1 / 3)}


def test_sparse_rl_does_not_veto_for_a_token_outside_the_mask() -> None:
    result = correct("sparse-rl", [[1.0, 1e-6]], [[True, False]])
    assert result.weights.tolist() == [[1.0, 0.0]]


def test_sparse_rl_with_nothing_kept_weighs_nothing_and_stays_finite() -> None:
    result = correct("sparse-rl", [[9.0, 9.0]])
    assert result.weights.tolist() == [[0.0, 0.0]]


def test_log_ratios_are_clamped_at_twenty_nats() -> None:
    ratios = token_ratios(torch.tensor([[50.0, -50.0]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(ratios, torch.tensor([[math.exp(20), math.exp(-20)]]))


def test_the_arms_are_these() -> None:
    table = {name: (arm.rollout, arm.learner, arm.correction, arm.distill) for name, arm in ARMS.items()}
    assert table == {
        "dense": ("dense", "dense", "none", False),
        "naive": ("compressed", "dense", "none", False),
        "naive-ratio": ("compressed", "dense", "naive-ratio", False),
        "tis": ("compressed", "dense", "tis", False),
        "mis": ("compressed", "dense", "mis", False),
        "tis-sequence": ("compressed", "dense", "tis-sequence", False),
        "mis-sequence": ("compressed", "dense", "mis-sequence", False),
        "sparse-rl": ("compressed", "dense", "sparse-rl", False),
        "sparse-rl-text": ("compressed", "dense", "sparse-rl-text", False),
        "smd": ("compressed", "shadow", "none", False),
        "smd-distill": ("compressed", "shadow", "none", True),
    }


def test_dense_rollouts_cannot_be_replayed_under_a_ledger() -> None:
    with pytest.raises(AssertionError, match="no ledger"):
        Arm("odd", "dense", "shadow", "none", False, "")
