"""MOVER on hand numbers and against Newcombe's interval, which it generalises; the fixed sequence."""

import math

import numpy as np
import pytest
from scipy import stats

from kvaudit.reports.stats.mover import WeightedEstimate, mover, mover_bounds
from kvaudit.reports.stats.rule import cleared, fixed_sequence


def test_a_single_part_is_returned():
    found = mover([WeightedEstimate(1.0, 0.1, -0.05, 0.4)])
    assert (found.estimate, found.low, found.high) == pytest.approx((0.1, -0.05, 0.4), abs=1e-12)


def test_a_negative_weight_turns_the_interval():
    found = mover([(-2.0, 0.1, -0.05, 0.4)])
    assert (found.estimate, found.low, found.high) == pytest.approx((-0.2, -0.8, 0.1), abs=1e-12)


def test_two_symmetric_parts_add_their_squares():
    found = mover([(1.0, 0.2, 0.17, 0.23), (1.0, 0.1, 0.06, 0.14)])
    assert (found.estimate, found.low, found.high) == pytest.approx((0.3, 0.25, 0.35), abs=1e-12)


def test_a_difference_of_wilson_intervals_is_newcombes():
    # Newcombe 1998, Statistics in Medicine 17:873, example (a): 56/70 against 48/80, method 10
    one, two = (stats.binomtest(k, n).proportion_ci(method="wilson") for k, n in ((56, 70), (48, 80)))
    found = mover([(1.0, 56 / 70, one.low, one.high), (-1.0, 48 / 80, two.low, two.high)])
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_skewed_parts_stay_skewed():
    found = mover([(1.0, 0.0, -0.3, 0.1), (0.5, 0.0, -0.8, 0.0)])
    assert (found.low, found.high) == pytest.approx((-0.5, 0.1), abs=1e-12)


def test_many_sums_equal_one_at_a_time():
    rng = np.random.default_rng(0)
    weights, points, widths = rng.normal(size=3), rng.normal(size=(4, 5, 3)), rng.random((2, 4, 5, 3))
    found = mover_bounds(weights, points, points - widths[0], points + widths[1])
    assert found.low.shape == (4, 5)
    cell = (2, 3)
    alone = mover(list(zip(weights, points[cell], (points - widths[0])[cell], (points + widths[1])[cell], strict=True)))
    assert (found.estimate[cell], found.low[cell], found.high[cell]) == pytest.approx(
        (alone.estimate, alone.low, alone.high), abs=1e-12
    )
    assert found.estimate[cell] == pytest.approx(math.fsum(weights * points[cell]), abs=1e-12)


def test_an_estimate_outside_its_interval_is_a_mistake():
    with pytest.raises(AssertionError, match="outside its interval"):
        mover([(1.0, 0.5, 0.0, 0.4)])


@pytest.mark.parametrize(
    ("passes", "index"),
    [([], None), ([False, True], None), ([True], 0), ([True, True, False, True], 1), ([True, True, True], 2)],
)
def test_the_first_failure_ends_the_sequence(passes, index):
    assert fixed_sequence(passes) == index


def test_many_sequences_at_once():
    passes = np.array([[True, False, True], [True, True, True], [False, True, True]])
    assert cleared(passes).tolist() == [1, 3, 0]
