"""displacement.json: literal means and ratios, hostile files, and the table of a report."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_text import run_text
from reports_synthetic import build, policy, tiny

from kvaudit.core.errors import DataError
from kvaudit.reports.analysis.displacement import bootstrap_mean, load_displacement
from kvaudit.reports.run import write_report

SNAP = policy("snapkv", 96)


def row(**more):
    return {
        "arm": "smd",
        "seed": 11,
        "policy": SNAP,
        "suite": "refusal",
        "context_tokens": 192,
        "floor": False,
        "median_kl": 0.001,
        "p99_kl": 0.5,
        "p99_9_kl": 1.5,
        "max_kl": 4.0,
        "same_top1": 0.97,
        "rms_dp": 0.04,
        "refusal_margin": -0.25,
        "sequences": [["a", 10, 0.02], ["a", 30, 0.04], ["b", 60, 0.01]],
        **more,
    }


FLOOR = row(arm="dense", policy="none", floor=True, refusal_margin=None, sequences=[["a", 50, 0.001], ["b", 50, 0.003]])


def write(folder, *rows, **more):
    (folder / "displacement.json").write_text(json.dumps({"format": 1, "rows": list(rows), **more}))
    return folder


def test_means_are_over_tokens_and_ratios_over_the_floor(tmp_path):
    floor, smd = load_displacement(write(tmp_path, row(), FLOOR))
    assert (floor.arm, floor.floor, floor.ratio) == ("dense", True, None)
    assert (smd.tokens, smd.sequences, smd.clusters) == (100, 3, 2)
    assert smd.mean_kl == pytest.approx((0.2 + 1.2 + 0.6) / 100)
    assert floor.mean_kl == pytest.approx(0.002)
    assert smd.ratio == pytest.approx(10)


def test_a_floor_of_another_suite_is_no_floor(tmp_path):
    found = load_displacement(write(tmp_path, row(), FLOOR | {"suite": "math"}))
    assert [d.ratio for d in found] == [None, None]


def test_the_interval_is_that_of_clusters_drawn_again():
    """Six clusters of equal length, three at .1 and three at .3: as many as a coin shows in six throws."""
    mean, low, high = bootstrap_mean(list("abcdef"), np.full(6, 10.0), np.array([1.0, 3.0] * 3))
    assert (mean, low, high) == pytest.approx((0.2, (1 + 2 / 6) / 10, (1 + 10 / 6) / 10))  # one head, and five
    assert bootstrap_mean(["a", "a"], np.array([10.0, 30.0]), np.array([1.0, 1.0])) == (0.05, None, None)


def sequences(*means):
    """One sequence in each of as many clusters."""
    return [[f"t{n}", 10, mean] for n, mean in enumerate(means)]


def test_a_run_without_the_file_has_none(tmp_path):
    assert load_displacement(tmp_path) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_kl": float("nan")}, "row 1: max_kl is 'nan'"),
        ({"p99_kl": -1}, "p99_kl"),
        ({"same_top1": 1.2}, "same_top1"),
        ({"seed": True}, "seed"),
        ({"arm": 3}, "arm"),
        ({"refusal_margin": "x"}, "refusal_margin"),
        ({"sequences": []}, "sequences are missing"),
        ({"sequences": [["a", 0, 0.1]]}, "tokens above 0"),
        ({"sequences": [["a", 5, float("inf")]]}, "tokens above 0"),
        ({"sequences": [["a", 5, 1e300]]}, "below 1e+06"),
        ({"sequences": [["a", 5]]}, "sequence is"),
        ({"sequences": [[1, 5, 0.1]]}, "sequence is"),
        ({"extra": 1}, "extra ['extra']"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, change, words):
    with pytest.raises(DataError) as error:
        load_displacement(write(tmp_path, row(**change)))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "rows": []}', '{"format": 1}', "[" * 100_000, '"\x00"'])
def test_a_file_that_is_no_displacement_is_one_line(tmp_path, text):
    (tmp_path / "displacement.json").write_text(text)
    with pytest.raises(DataError) as error:
        load_displacement(tmp_path)
    assert "\n" not in str(error.value)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(row())), plain, max_size=2))
def test_any_change_is_loaded_or_refused_in_one_line(tmp_path_factory, change):
    folder = tmp_path_factory.mktemp("d")
    message, found = "", []
    try:
        found = load_displacement(write(folder, row(**change)))
    except DataError as error:
        message = str(error)
    assert "\n" not in message
    assert bool(found) != bool(message)
    assert all(0 <= d.low <= d.high < float("inf") for d in found if d.clusters >= 6)


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    run = build(tmp_path_factory.mktemp("runs") / "run", tiny())
    write(run, row(arm="<i>smd</i>"), FLOOR)
    write_report(run)
    return run / "report"


def test_the_table_shows_floor_ratio_and_llama_cpp_columns(reported):
    text = run_text(reported.parent)
    words = "too few templates for an interval (2, wanted 6)"
    assert f"| dense again (A/A floor) | none | refusal, 192 | 100 | 0.002, {words} |" in text
    assert "| 0.001 | 0.5 | 1.5 | 4 | 97.0 % | 4.0 % | -0.25 | 10.0x |" in text
    assert "&lt;i&gt;smd" in (reported / "report.html").read_text()


def test_every_number_of_the_table_is_in_json(reported):
    first, second = json.loads((reported / "drift.json").read_text())["displacement"]
    assert (first["floor"], second["mean_kl"], second["ratio"]) == (True, pytest.approx(0.02), pytest.approx(10))


def test_a_broken_file_costs_the_section_and_not_the_report(tmp_path):
    run = build(tmp_path / "run", tiny())
    write(run, row(seed="x"))
    report = write_report(run)
    assert "displacement" not in report.values
    assert any(p.startswith("displacement.json, row 1: seed") for p in report.problems)
    text = run_text(run)
    assert "Displacement of token distributions" not in text
    assert "displacement.json, row 1: seed" in text
