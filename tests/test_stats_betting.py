"""Bounds that hold at every look: against confseq's own wealth, by simulation, and at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvaudit.reports.stats import betting
from kvaudit.reports.stats.betting import (
    betting_bound,
    betting_effect,
    decidable_churn,
    log_wealth,
    smallest_margin,
)

ROWS = np.array([0, 0, 0, 1, 0, 0, -1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0], dtype=float)


@pytest.mark.parametrize(
    ("bet", "wealth"), [(0.2, 0.3396753124055039), (0.6, 0.6356895974490683), (0.98 / 0.95, -1.589275584494751)]
)
def test_a_single_bet_is_that_of_confseq(bet: float, wealth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """confseq 0.0.11, betting_mart of (ROWS + 1) / 2 against .475 with bets of 2 * bet, theta and trunc_scale 1."""
    monkeypatch.setattr(betting, "_BETS", np.array([bet * 0.95]))
    monkeypatch.setattr(betting, "_WEIGHTS", np.array([1.0]))
    assert log_wealth(ROWS, -0.05) == pytest.approx(wealth, abs=1e-12)
    assert betting_effect(ROWS, np.arange(20)).n_clusters == 20


def test_the_first_look_is_the_fewest_rows_that_rule_out_five_points_where_nothing_changes() -> None:
    lower = [betting_effect(np.zeros(rows), np.arange(rows)).lower for rows in (92, 100)]
    assert lower[0] < -0.05 < lower[1]


def test_the_order_of_rows_changes_nothing() -> None:
    turned = np.random.default_rng(1).permutation(ROWS)
    assert betting_effect(turned, np.arange(20)) == betting_effect(ROWS, np.arange(20))


def test_copies_of_a_row_count_once() -> None:
    rows, clusters = np.repeat(ROWS, 3), np.repeat(np.arange(20), 3)
    copies, once = betting_effect(rows, clusters), betting_effect(ROWS, np.arange(20))
    assert (copies.lower, copies.upper, copies.n_clusters) == (once.lower, once.upper, 20)
    assert copies.n_items == 60


def test_the_last_planned_look_shows_more_than_the_bets_alone() -> None:
    rows = np.repeat([-1.0, 1.0, 0.0], [52, 26, 958])
    some, last = (betting_effect(rows, np.arange(1036), is_last=is_last) for is_last in (False, True))
    assert some.lower < -0.05 < last.lower
    assert some.upper > last.upper


def test_several_tests_share_the_level_of_a_loss_and_not_that_of_none() -> None:
    rows = np.repeat([-1.0, 0.0], [20, 76])
    one, three = (betting_effect(rows, np.arange(96), tests=tests) for tests in (1, 3))
    assert one.lower == three.lower
    assert one.upper < three.upper < -0.05


@pytest.mark.parametrize("shares", [(0.05, 0.0), (0.15, 0.10)])
def test_at_the_margin_few_runs_ever_pass_or_fail_wherever_they_stop(shares: tuple[float, float]) -> None:
    """Simulated: 400 runs that may stop after every tenth row. 4 standard errors above 2 % would be 5 %."""
    lost, gained = shares
    draws = np.random.default_rng(5).choice([-1.0, 0.0, 1.0], p=[lost, 1 - lost - gained, gained], size=(400, 400))
    level = betting.SHARE * 0.05
    ever = [any(log_wealth(run[:rows], -0.05) >= -math.log(level) for rows in range(10, 401, 10)) for run in draws]
    gone = [any(log_wealth(-run[:rows], 0.05) >= -math.log(level) for rows in range(10, 401, 10)) for run in draws]
    assert np.mean(ever) <= 0.05
    assert np.mean(gone) <= 0.05


def test_a_bound_lies_where_the_wealth_reaches_the_level() -> None:
    bound = betting_bound(ROWS, 0.05)
    assert log_wealth(ROWS, bound) >= math.log(20) - 1e-6
    assert log_wealth(ROWS, bound + 1e-4) < math.log(20)


@pytest.mark.parametrize("value", [-1.0, 1.0])
def test_rows_that_all_moved_alike_have_bounds(value: float) -> None:
    found = betting_effect(np.full(100, value), np.arange(100), is_last=True)
    assert -1 <= found.low <= found.estimate <= found.high <= 1
    assert found.estimate == value


def test_the_smallest_margin_that_can_be_shown_is_known_before_the_run() -> None:
    assert smallest_margin(66, 0.05) > 0.05 > smallest_margin(67, 0.05)
    assert decidable_churn(1036, 0.05, 0.05) == pytest.approx(0.359, abs=0.001)
    assert decidable_churn(100_000, 0.05, 0.05) == 1.0
