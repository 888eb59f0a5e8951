"""The real controls at a small size: what they draw is what they say, and what they spoil is what the gate names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_cli import kvaudit

from bench.controls import (
    BASE,
    DENSE,
    RERUN,
    RUINOUS,
    SERVED,
    SUITE_NAMES,
    Size,
    break_label,
    cells_on_disk,
    copy_run,
    draw_halves,
    draw_losses,
    draw_swaps,
    fail_limit,
    flip_label,
    pair_arms,
    random_templates,
    rerun_arm,
    sample,
    spoil_candidate,
    spoil_templates,
    status_shares,
    templates_of,
)
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.reports.records.load import RunData, load_run
from kvaudit.reports.verdict.verdict import Status

SIZE = Size(items=16, reruns=1)
ARMS = [BASE, rerun_arm(0)]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return sample(tmp_path_factory.mktemp("controls") / "sampled", SIZE)


@pytest.fixture(scope="module")
def data(sampled: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """The first run and its rerun as a run folder of two arms."""
    target = tmp_path_factory.mktemp("controls") / "whole"
    return load_run(copy_run(sampled, target, {BASE: (BASE,), ARMS[1]: (RERUN,)}, (DENSE, SERVED)))


def scores(data: RunData) -> pd.DataFrame:
    rows = data.records.assign(arm=data.records["arm"].astype(str))
    return rows.pivot_table(
        index=["suite", "cluster_id", "policy", "item_id"], columns="arm", values="score", observed=True
    )


def test_a_rerun_asks_the_same_items_and_answers_by_itself(data: RunData) -> None:
    table = scores(data)
    assert len(table) == 3 * 2 * SIZE.items
    assert not table.isna().any().any()
    assert 0 < (table[BASE] != table[RERUN]).mean() < 0.5


def test_an_exact_copy_has_no_difference_and_never_fails(data: RunData) -> None:
    twin = pair_arms(data, BASE, BASE)
    assert (scores(twin)[BASE] == scores(twin)[RERUN]).all()
    assert status_shares([twin]).fail == 0


def test_a_half_holds_half_of_every_suites_templates_in_both_arms(data: RunData) -> None:
    (half,) = draw_halves(data, [BASE, RERUN], 1, np.random.default_rng(0))
    assert {suite: len(own) for suite, own in templates_of(half).items()} == dict.fromkeys(SUITE_NAMES, 8)
    assert not scores(half).isna().any().any()
    assert half.spec.evaluate.suites["math"].items == 8


def test_a_swap_exchanges_the_arms_in_half_of_the_templates_and_nothing_else(data: RunData) -> None:
    (swapped,) = draw_swaps(data, [RERUN, BASE], 1, np.random.default_rng(0))
    before, after = scores(data), scores(swapped)
    assert (before.max(axis=1) == after.max(axis=1)).all()
    assert (before.min(axis=1) == after.min(axis=1)).all()
    turned = (before[BASE] != after[BASE]).groupby("cluster_id").any()
    straight = (before[BASE] != after[RERUN]).groupby("cluster_id").any()
    assert turned.any()
    assert straight.any()
    assert not (turned & straight).any()  # a template is turned as a whole, in all cells, or not at all


def test_draws_are_valid_to_the_gate(data: RunData) -> None:
    rng = np.random.default_rng(0)
    found = status_shares([*draw_halves(data, [BASE, RERUN], 2, rng), *draw_swaps(data, [BASE, RERUN], 2, rng)])
    assert found.draws == 4
    assert found.verdicts[Status.INVALID] == 0
    assert len(found.cells) == 6


def test_spoilt_labels_are_those_of_the_candidates_templates_only(data: RunData) -> None:
    twin, chosen = pair_arms(data, BASE, BASE), random_templates(data, np.random.default_rng(0), 0.25)
    table = scores(spoil_candidate(twin, chosen, flip_label))
    hit = table.index.get_level_values("cluster_id").isin(chosen)
    assert hit.sum() == 3 * 4 * 2
    assert (table.loc[hit, RERUN] == 1 - table.loc[hit, BASE]).all()
    assert (table.loc[~hit, RERUN] == table.loc[~hit, BASE]).all()


def test_broken_templates_fail_when_there_are_enough_of_them(data: RunData) -> None:
    rng = np.random.default_rng(0)
    assert status_shares(draw_losses(data, [BASE], 3, rng, share=0.5, spoil=break_label, copy=True)).fail == 1
    assert status_shares(draw_losses(data, [BASE], 3, rng, share=3 / 16, spoil=break_label, copy=True)).fail == 0


def test_broken_templates_fail_on_disk_and_are_the_ones_listed(
    sampled: RunFolder, data: RunData, tmp_path: Path
) -> None:
    chosen = random_templates(data, np.random.default_rng(1), 0.5)
    run = copy_run(sampled, tmp_path / "broken", {BASE: (BASE, RERUN)}, (DENSE,), spoil_templates(chosen, break_label))
    failed = [row for row in cells_on_disk(run, chosen) if row.decision.status is Status.FAIL]
    assert "refusal none" in [row.cell for row in failed]
    for row in failed:
        assert len(row.listed) > 5
        assert set(row.listed) <= set(row.spoilt)
        assert row.leading == len(row.listed)
    assert kvaudit("gate", run)[0] == 3


def test_the_reference_at_a_ruinous_budget_fails_in_every_suite(sampled: RunFolder, tmp_path: Path) -> None:
    run = copy_run(sampled, tmp_path / "starved", {BASE: (BASE,)}, (DENSE, RUINOUS))
    assert {row.cell: row.decision.status for row in cells_on_disk(run, frozenset())} == {
        f"{suite} streaming 16": Status.FAIL for suite in SUITE_NAMES
    }
    assert kvaudit("gate", run)[0] == 3


def test_the_limit_is_three_standard_errors_above_the_level() -> None:
    assert fail_limit(200) == pytest.approx(0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5)
    assert round(fail_limit(200), 4) == 0.0962
