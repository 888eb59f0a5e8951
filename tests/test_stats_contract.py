"""Every statistic keeps its promises, and each test of the contract fails a statistic that is wrong in one way.

A new file of ``reports/stats`` is found by itself: what is asked of it stands here, its numbers in the test it names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvaudit.reports.stats import clustered
from kvaudit.reports.stats.clustered import cr3_effect
from kvaudit.reports.stats.effect import Array, Effect, Statistic, statistics

ROOT = Path(__file__).parent.parent
HELD = pytest.mark.parametrize("statistic", statistics().values(), ids=list(statistics()))
NO_STATISTIC = "\nNo statistic: "
SIMULATIONS = 48
CLUSTERS = 13  # what flips signs takes every pattern


def drawn(seed: int, *, clusters: int = CLUSTERS) -> tuple[Array, np.ndarray]:
    """Differences without drift, in clusters of two to nine items that mostly move together."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(clusters), rng.integers(2, 10, clusters))
    way = rng.choice([-1.0, 1.0], clusters)[labels]
    return np.where(rng.random(len(labels)) < 0.5, way, 0.0), labels


def numbers(found: Any) -> dict[str, float]:
    """What a result says of the differences, without its words and flags."""
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return {name: value for name, value in values.items() if type(value) in (int, float)}


def has_interval(found: Any) -> bool:
    return {"low", "high"} <= {field.name for field in fields(found)}


# --- what a statistic owes -----------------------------------------------------------------------------------------


@HELD
def test_no_difference_is_no_drift(statistic: Statistic) -> None:
    found = statistic(np.zeros(60), np.repeat(np.arange(20), 3))
    assert (found.estimate, found.pvalue) == (0, 1)
    assert found.pvalue_drop >= 0.5
    if has_interval(found):
        assert found.low <= 0 <= found.high


@HELD
def test_a_loss_is_below_zero_and_known(statistic: Statistic) -> None:
    z, labels = np.tile([-1.0, 0.0, 0.0, 0.0, -1.0], 12), np.arange(60) // 3
    found = statistic(z, labels)
    assert -1 <= found.estimate < 0
    assert found.pvalue < 0.01
    assert found.pvalue_drop < 0.01
    if has_interval(found):
        assert found.low < found.estimate < found.high < 0


@HELD
@pytest.mark.parametrize("seed", range(3))
def test_swapped_arms_flip_the_sign_and_mirror_the_interval(statistic: Statistic, seed: int) -> None:
    z, labels = drawn(seed)
    one, two = statistic(z, labels), statistic(-z, labels)
    assert one.estimate == pytest.approx(-two.estimate, abs=1e-10)
    assert one.pvalue == pytest.approx(two.pvalue, abs=1e-10)
    assert (one.pvalue_drop < two.pvalue_drop) == (one.estimate < 0)
    there, back = numbers(one), numbers(two)
    for below, above in (("low", "high"), ("lower", "upper"), ("losses", "gains")):
        if below in there:
            sign = 1 if below == "losses" else -1
            assert (there[below], there[above]) == pytest.approx((sign * back[above], sign * back[below]), abs=1e-10)


@HELD
def test_order_of_items_and_names_of_clusters_change_nothing(statistic: Statistic) -> None:
    z, labels = drawn(4)
    order = np.random.default_rng(0).permutation(len(z))
    names = np.array([f"template-{97 - label * 5 % 13}" for label in labels])
    assert numbers(statistic(z[order], names[order])) == pytest.approx(numbers(statistic(z, labels)), abs=1e-10)


@HELD
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_refused(statistic: Statistic, value: float) -> None:
    z, labels = drawn(5)
    z[3] = value
    with pytest.raises(AssertionError):
        statistic(z, labels)


@HELD
def test_a_result_is_frozen_and_names_its_method_and_source(statistic: Statistic) -> None:
    found = statistic(*drawn(6))
    assert found.method.strip()
    assert found.source.strip()
    with pytest.raises(FrozenInstanceError):
        found.method = "another"  # type: ignore[misc]


@HELD
def test_more_clusters_of_the_same_kind_narrow_the_interval(statistic: Statistic) -> None:
    z, labels = drawn(7)
    few, many = statistic(z, labels), statistic(np.tile(z, 4), np.concatenate([labels + i * 100 for i in range(4)]))
    if has_interval(few):
        # half as wide by the root of four, and a little less by the t quantile and the jackknife
        assert 0.3 < (many.high - many.low) / (few.high - few.low) < 0.6
    else:
        assert many.pvalue < few.pvalue


@HELD
def test_items_that_move_together_are_not_counted_as_so_many(statistic: Statistic) -> None:
    """Simulated: no false alarms beyond the 5 % that are declared, and the interval covers what it should."""
    found = [statistic(*drawn(seed)) for seed in range(100, 100 + SIMULATIONS)]
    allowed = 0.05 + 3 * math.sqrt(0.05 * 0.95 / SIMULATIONS)
    assert np.mean([one.pvalue < 0.05 for one in found]) <= allowed
    if has_interval(found[0]):
        assert np.mean([not one.low <= 0 <= one.high for one in found]) <= allowed


@HELD
def test_an_oracle_of_its_own_exists_and_calls_it(statistic: Statistic) -> None:
    path, _, name = statistic.oracle.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    body = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    assert body is not None, f"{path} has no {name}"
    called = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    assert statistic.function.__name__ in called, f"{name} does not call {statistic.function.__name__}"


@HELD
def test_the_page_about_statistics_has_a_line_on_it(statistic: Statistic) -> None:
    file = statistic.function.__module__.rpartition(".")[2]
    assert f"`{file}`" in (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")


# --- the walk ------------------------------------------------------------------------------------------------------

FILES = sorted(path.stem for path in (ROOT / "kvaudit" / "reports" / "stats").glob("[a-z]*.py"))


def of_clusters(file: str) -> Iterator[str]:
    """Public functions of a file that make a result with an estimate from items in clusters."""
    module = importlib.import_module(f"kvaudit.reports.stats.{file}")
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__ and not name.startswith("_"):
            signature = inspect.signature(function, eval_str=True)
            made = signature.return_annotation
            if "clusters" in signature.parameters and is_dataclass(made):
                yield from [name] if "estimate" in {field.name for field in fields(made)} else []


@pytest.mark.parametrize("file", FILES)
def test_a_file_declares_its_statistic_or_says_that_it_is_none(file: str) -> None:
    declared = [
        name for name, found in statistics().items() if found.function.__module__ == f"kvaudit.reports.stats.{file}"
    ]
    says_none = NO_STATISTIC in (importlib.import_module(f"kvaudit.reports.stats.{file}").__doc__ or "")
    assert bool(declared) != says_none
    assert sorted(of_clusters(file)) == sorted(declared)


# --- statistics that are wrong in one way --------------------------------------------------------------------------


def wrong(function: Callable[..., Any], oracle: str = statistics()["cr3_effect"].oracle) -> Statistic:
    return Statistic(function, oracle)


def constant(z: Array, clusters: np.ndarray) -> Effect:
    return cr3_effect(np.zeros(60), np.arange(60))


def one_for_all(z: Array, clusters: np.ndarray) -> Effect:
    return cr3_effect(drawn(1)[0], drawn(1)[1])


def sign_kept(z: Array, clusters: np.ndarray) -> Effect:
    found = cr3_effect(z, clusters)
    return replace(found, estimate=abs(found.estimate))


def interval_not_mirrored(z: Array, clusters: np.ndarray) -> Effect:
    found = cr3_effect(z, clusters)
    return replace(found, high=found.high + 0.01)


def order_matters(z: Array, clusters: np.ndarray) -> Effect:
    return cr3_effect(z, np.sort(clusters))


def nan_is_zero(z: Array, clusters: np.ndarray) -> Effect:
    return cr3_effect(np.nan_to_num(z, posinf=0.0), clusters)


def nameless(z: Array, clusters: np.ndarray) -> Effect:
    return replace(cr3_effect(z, clusters), source=" ")


@dataclass
class Thawed:
    method: str = "m"
    source: str = "s"


def thawed(z: Array, clusters: np.ndarray) -> Thawed:
    return Thawed()


def anything_is_possible(z: Array, clusters: np.ndarray) -> Effect:
    return replace(cr3_effect(z, clusters), low=-1.0, high=1.0)


def clusters_ignored(z: Array, clusters: np.ndarray) -> Effect:
    return cr3_effect(z, np.arange(len(z)))


def undocumented(z: Array, clusters: np.ndarray) -> Effect:
    return cr3_effect(z, clusters)


Check = Callable[..., None]
WRONG: list[tuple[Check, Statistic]] = [
    (test_no_difference_is_no_drift, wrong(one_for_all)),
    (test_a_loss_is_below_zero_and_known, wrong(constant)),
    (test_a_loss_is_below_zero_and_known, wrong(sign_kept)),
    (test_swapped_arms_flip_the_sign_and_mirror_the_interval, wrong(sign_kept)),
    (test_swapped_arms_flip_the_sign_and_mirror_the_interval, wrong(interval_not_mirrored)),
    (test_order_of_items_and_names_of_clusters_change_nothing, wrong(order_matters)),
    (test_nan_and_infinity_are_refused, wrong(nan_is_zero)),
    (test_a_result_is_frozen_and_names_its_method_and_source, wrong(nameless)),
    (test_a_result_is_frozen_and_names_its_method_and_source, wrong(thawed)),
    (test_more_clusters_of_the_same_kind_narrow_the_interval, wrong(anything_is_possible)),
    (test_items_that_move_together_are_not_counted_as_so_many, wrong(clusters_ignored)),
    (test_an_oracle_of_its_own_exists_and_calls_it, wrong(undocumented)),
    (test_an_oracle_of_its_own_exists_and_calls_it, wrong(cr3_effect, "tests/test_stats.py::test_that_is_not_there")),
    (test_the_page_about_statistics_has_a_line_on_it, wrong(undocumented)),
]


def hold(check: Check, statistic: Statistic) -> None:
    given = {"statistic": statistic, "seed": 1, "value": math.nan}
    check(**{name: given[name] for name in inspect.signature(check).parameters})


@pytest.mark.parametrize(
    ("check", "statistic"), WRONG, ids=[f"{check.__name__}-{s.function.__name__}" for check, s in WRONG]
)
def test_a_wrong_statistic_fails_the_test_that_it_breaks(check: Check, statistic: Statistic) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        hold(check, statistic)


def test_every_promise_has_a_wrong_statistic_that_breaks_it() -> None:
    checks = [check for name, check in globals().items() if name.startswith("test_")]
    promises = {check.__name__ for check in checks if "statistic" in inspect.signature(check).parameters}
    broken = {check.__name__ for check, _ in WRONG}
    assert promises - {"test_a_wrong_statistic_fails_the_test_that_it_breaks"} == broken


@pytest.mark.parametrize("text", ["", NO_STATISTIC])
def test_a_statistic_without_a_declaration_is_missed_by_its_file(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustered, "__doc__", f"A file.{text}")
    monkeypatch.delattr(clustered, "STATISTIC")
    with pytest.raises(AssertionError):
        test_a_file_declares_its_statistic_or_says_that_it_is_none("clustered")
