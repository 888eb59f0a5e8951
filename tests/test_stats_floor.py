"""The lower bound of a rate: Wilson's own numbers, and what templates do to it."""

import numpy as np
import pytest
from scipy import stats

from kvaudit.reports.stats.tango import rate_lower


def test_with_many_single_item_clusters_it_is_wilsons_bound():
    scores = np.repeat([1.0, 0.0], [600, 5400])
    found = rate_lower(scores, np.arange(6000))
    wanted = stats.binomtest(600, 6000).proportion_ci(0.90, method="wilson").low
    assert found == pytest.approx(wanted, abs=1e-4)


def test_a_rate_of_nothing_is_bounded_by_nothing():
    assert rate_lower(np.zeros(40), np.arange(40)) == 0


def test_templates_that_agree_say_less_than_items_that_do_not():
    scores = np.repeat([1.0, 0.0], [60, 540])
    assert rate_lower(scores, np.arange(600) // 20) < rate_lower(scores, np.arange(600) % 30) < 0.1


def test_a_rate_that_is_high_is_clearly_above_a_margin():
    assert rate_lower(np.repeat([1.0, 0.0], [128, 16]), np.arange(144) % 72) > 0.8
