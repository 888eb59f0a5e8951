"""How far two next-token distributions are apart, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvaudit.audit.rerun.diagnose import distances


def test_two_tokens_by_hand() -> None:
    reference = torch.log(torch.tensor([[0.9, 0.1], [0.9, 0.1]]))
    candidate = torch.log(torch.tensor([[0.6, 0.4], [0.2, 0.8]]))
    kl, is_same = distances(reference, candidate)
    by_hand = [0.9 * math.log(1.5) + 0.1 * math.log(0.25), 0.9 * math.log(4.5) + 0.1 * math.log(0.125)]
    assert kl.tolist() == pytest.approx(by_hand, abs=1e-7)
    assert kl.tolist() == pytest.approx([0.226289, 1.145725], abs=1e-6)
    assert is_same.tolist() == [True, False]


def test_a_token_without_any_probability_adds_nothing() -> None:
    reference, candidate = torch.tensor([[0.0, -math.inf]]), torch.log(torch.tensor([[0.5, 0.5]]))
    assert distances(reference, candidate)[0].tolist() == pytest.approx([math.log(2)])
