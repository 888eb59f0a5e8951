"""``import kvaudit``: the product as functions and objects, and what comes with the import."""

from __future__ import annotations

import doctest
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reports_synthetic import Design, build
from typer.testing import CliRunner

import kvaudit
import kvaudit.api
from bench.api_page import PAGE, page
from kvaudit.audit.cli import app
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.records import Record

DESIGN = Design(
    arms=("dense", "naive"), seeds=(1,), policies=("none",), suites=("refusal",), drops={("naive", "refusal"): 0.3}
)


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("api") / "run", DESIGN)


def scores(path: Path, values: list[int]) -> Path:
    path.write_text("item,template,score\n" + "".join(f"i{i},t{i // 2},{v}\n" for i, v in enumerate(values)))
    return path


def test_importing_it_loads_none_of_what_it_is_built_on() -> None:
    code = "import sys, kvaudit; print(sorted({'torch', 'pandas', 'numpy', 'yaml', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", kvaudit.__all__)
def test_every_name_is_there_and_has_a_docstring(name: str) -> None:
    assert getattr(kvaudit, name).__doc__
    assert name in dir(kvaudit)


def test_a_name_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvaudit.nothing  # noqa: B018


def test_a_run_has_records_drift_and_verdict(harmed: Path) -> None:
    run = kvaudit.load_run(harmed)
    assert run.spec.name == "synthetic"
    assert len(run.records) == run.drift.n_records == 256
    assert run.verdict.status.value == "FAIL"
    first = next(run.answers())
    assert isinstance(first, Record)
    assert first.item_id == run.records["item_id"].iloc[0]


def test_the_table_speaks_of_points_and_leaves_out_what_nobody_measured(harmed: Path) -> None:
    run = kvaudit.load_run(harmed)
    row = run.table().query("contrast == 'alike' and suite == 'refusal' and arm == 'naive'").iloc[0]
    effect = next(c.effect for c in run.drift.contrasts if c.estimand == "alike" and c.suite == "refusal")
    assert effect is not None
    assert row["estimate"] == pytest.approx(100 * effect.estimate)
    assert row["candidate"] - row["reference"] == pytest.approx(row["estimate"])
    assert (row["low"], row["high"]) == pytest.approx((100 * effect.low, 100 * effect.high))
    assert row["status"] == "FAIL"
    assert row["gated"]
    assert set(run.table()["contrast"]) >= {"alike", "deployed"}


def test_gate_is_the_command(harmed: Path) -> None:
    verdict = kvaudit.gate(harmed)
    assert CliRunner().invoke(app, ["gate", str(harmed)]).exit_code == verdict.exit_code == 3


def test_a_gate_file_that_came_later_is_refused(harmed: Path, tmp_path: Path) -> None:
    (tmp_path / "gate.yaml").write_text("format: 1\nmargins: {refusal: 50}\n")
    with pytest.raises(SpecError, match="was not declared with the run"):
        kvaudit.gate(harmed, gate_file=tmp_path / "gate.yaml")


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        _ = kvaudit.load_run(tmp_path).verdict
    assert "\n" not in str(raised.value)


def test_a_report_is_written(harmed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.reports.page.formats.html.figures", lambda _: {})
    page = kvaudit.load_run(harmed).report()
    assert page == harmed / "report" / "report.html"
    assert "FAIL" in page.read_text(encoding="utf-8")


def test_two_files_are_compared_by_the_margin_that_is_asked(tmp_path: Path) -> None:
    a, b = scores(tmp_path / "a.csv", [1] * 400), scores(tmp_path / "b.csv", [0] * 12 + [1] * 388)
    few = scores(tmp_path / "few.csv", [0] * 4 + [1] * 396)
    assert kvaudit.compare(a, b, margin=1, cluster="template").verdict.status.value == "FAIL"
    assert kvaudit.compare(a, few, margin=5, cluster="template").verdict.status.value == "PASS"
    table = kvaudit.compare(a, b, cluster="template").table().query("gated")
    assert table["estimate"].tolist() == pytest.approx([-3.0])
    assert table["margin"].tolist() == [5.0]


def test_clusters_and_independence_are_not_both_declared(tmp_path: Path) -> None:
    a = scores(tmp_path / "a.csv", [1] * 10)
    with pytest.raises(SpecError, match="give one"):
        kvaudit.compare(a, a, cluster="template", items_are_independent=True)


def test_what_is_compared_of_a_run_is_chosen_as_by_the_command(harmed: Path) -> None:
    with pytest.raises(SpecError, match="choose one"):
        kvaudit.compare(harmed, harmed)
    chosen = {"arm": "dense"}
    same = kvaudit.compare(harmed, harmed, select_reference=chosen, select_candidate=chosen)
    assert set(same.table()["estimate"]) == {0.0}


@pytest.mark.parametrize("name", ["limit", "threads", "workers"])
def test_a_number_that_cannot_be_is_refused_before_anything_is_read(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} is 0, wanted a whole number of at least 1"):
        kvaudit.run("nowhere.yaml", **{name: 0})


def test_one_plugin_may_be_given_as_a_text() -> None:
    with pytest.raises(DataError, match=r"plug-in file 'nowhere\.py' cannot be read"):
        kvaudit.run({"name": "x"}, plugins="nowhere.py")


@pytest.mark.parametrize("name", ["audit", "suites", "reports", "core"])
def test_the_folders_are_packages_of_kvaudit_alone(name: str) -> None:
    """A user's own ``reports`` folder must never be taken for ours; see tests/test_layers.py for what we import."""
    found = importlib.import_module(f"kvaudit.{name}")
    assert found.__name__ == f"kvaudit.{name}"
    assert Path(str(found.__file__)).parent == Path(__file__).parent.parent / "kvaudit" / name


def test_the_examples_of_the_docstrings_run(harmed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copytree(harmed, tmp_path / "runs" / "mine")
    scores(tmp_path / "dense.csv", [1] * 400)
    scores(tmp_path / "fp8.csv", [0] * 4 + [1] * 396)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvaudit.reports.page.formats.html.figures", lambda _: {})
    done = doctest.testmod(kvaudit.api, optionflags=doctest.ELLIPSIS)
    assert done.attempted >= 10
    assert not done.failed


def test_the_page_of_the_api_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it with: python -m bench.api_page"
