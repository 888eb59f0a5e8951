"""Under six templates there is no interval anywhere, and no verdict: the estimate stands alone and says so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_text import page_text
from reports_synthetic import Design, build, policy
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.reports.page.formats import formats
from kvaudit.reports.page.page import Page
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, with_report_sections
from kvaudit.reports.verdict.verdict import Status

pytestmark = pytest.mark.usefixtures("figures")
INTERVAL = re.compile(r"\[[-+]?\d+(\.\d+)?, [-+]?\d|[-+]\d+\.\d to [-+]?\d|\blowerBound\b")
ENDS = {"low", "high", "lower", "upper"}
WORDS = "too few templates for an interval (3, wanted 6); the estimate alone is"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Doses, facets, spans, seeds and two suites, all of them in three templates; one arm has lost two fifths."""
    design = Design(
        name="few",
        arms=("dense", "naive"),
        policies=("none", *(policy("snapkv", budget) for budget in (96, 64, 48))),
        suites=("refusal", "math"),
        clusters=3,
        items=36,
        drops={("naive", "refusal"): 0.4},
        serving={policy("snapkv", 48): 0.3},
        facets={"refusal": ("unsafe", "helpful")},
        telemetry=4,
    )
    return build(tmp_path_factory.mktemp("few") / "run", design)


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    data = load_run(run)
    return page_of(with_report_sections(data, decide_run(data)))


@pytest.mark.parametrize("file", formats())
def test_no_format_prints_an_interval_of_three_templates(file: str, page: Page) -> None:
    text = formats()[file](page)
    if file.endswith(".json"):
        assert not [place for place, value in ends(json.loads(text)) if value is not None]
        text = re.sub(r"\[[^][{}]*\]", "", text)  # lists of seeds, budgets and rates are no intervals
    assert not INTERVAL.search(text), INTERVAL.search(text)


@pytest.mark.parametrize("file", ["report.html", "junit.xml", "disclosure.json"])
def test_the_estimate_stands_alone_with_the_words(file: str, page: Page) -> None:
    text = formats()[file](page) if file != "report.html" else page_text(page)
    assert WORDS in text.replace("\\", "")
    assert re.search(r"the estimate alone is -\d\d\.\d pp", text)


def test_no_cell_of_three_templates_passes_or_fails(page: Page) -> None:
    """Two fifths lost is no FAIL, and nothing lost no PASS."""
    assert {d.status for d in page.findings.verdict.decisions} == {Status.INVALID}


def ends(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every end of an interval in parsed JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ENDS and not isinstance(inner, dict):
                yield f"{place}/{key}", inner
            yield from ends(inner, f"{place}/{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from ends(inner, f"{place}/{number}")


def test_the_terminal_prints_no_interval_of_three_templates(run: Path) -> None:
    done = CliRunner().invoke(app, ["gate", str(run)])
    assert done.exit_code == 5
    assert not INTERVAL.search(done.output)
    assert "too few templates for an interval (3, wanted 6)" in " ".join(done.output.split())


def test_a_comparison_prints_no_interval_of_five_templates(tmp_path: Path) -> None:
    for name, wrong in (("a", 0), ("b", 9)):
        rows = [f"i{n},t{n % 5},{int(n >= wrong)}\n" for n in range(30)]
        (tmp_path / f"{name}.csv").write_text("item,cluster,score\n" + "".join(rows))
    words = ["compare", tmp_path / "a.csv", tmp_path / "b.csv", "--cluster", "cluster", "--out", tmp_path / "out"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 5, done.output
    for text in (done.output, *((tmp_path / "out" / f"compare.{end}").read_text() for end in ("md", "html"))):
        assert not INTERVAL.search(text)
    text = (tmp_path / "out" / "compare.md").read_text().replace("\\", "")
    assert "too few templates for an interval (5, wanted 6); the estimate alone is -30.0 pp" in text
