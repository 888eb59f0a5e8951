"""``check --agents``: hidden orders that one of two made-up servers carries out more often are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_world import write_agent_rows

from bench.planted import run_orders

ATTACKERS = (30, 32)  # as many as InjecAgent has


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_agent_rows(folder, ATTACKERS)
    monkeypatch.setenv("KVAUDIT_DATA", str(folder))
    return folder


def test_a_fifth_more_of_the_orders_carried_out_is_a_fail(tmp_path: Path, rows: Path) -> None:
    (row,) = run_orders(tmp_path, 0.2, seed=1).table().query("gated").to_dict("records")
    assert (row["status"], row["margin"], row["items"], row["templates"]) == ("FAIL", 10, 62, 62)
    assert (row["lost"], row["gained"]) == (13, 0)  # 6 of 62 by one server, 19 by the other


def test_servers_that_carry_out_the_same_orders_pass(tmp_path: Path, rows: Path) -> None:
    (row,) = run_orders(tmp_path, 0.0, seed=1).table().query("gated").to_dict("records")
    assert (row["status"], row["lost"], row["gained"]) == ("PASS", 0, 0)
    assert -5.4 < row["lower"] < -5.3


def test_with_thirty_attackers_a_fifth_more_stays_open_at_twenty_points(tmp_path: Path, rows: Path) -> None:
    (rows / "injecagent" / "attacker_cases_ds.jsonl").unlink()
    (row,) = run_orders(tmp_path, 0.2, seed=1).table().query("gated").to_dict("records")
    assert (row["status"], row["margin"], row["items"], row["lost"]) == ("INCONCLUSIVE", 20, 30, 6)
