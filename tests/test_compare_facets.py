"""Facets in a comparison of two files, and in waivers: beside the score, deciding where they have a margin."""

import json
from dataclasses import replace
from datetime import date

import pytest
from reports_synthetic import Design, build, policy
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.core.errors import SpecError
from kvaudit.reports.page.compare_files import Sides, compare, parse_margins
from kvaudit.reports.page.compare_page import comparison_files, comparison_table, facets_table
from kvaudit.reports.records.load import load_run
from kvaudit.reports.records.readers.base import Request, read_log
from kvaudit.reports.records.rows import FACET_COLUMNS
from kvaudit.reports.run import decide_run
from kvaudit.reports.verdict.rules import GateOverrides
from kvaudit.reports.verdict.verdict import Status, read_waivers

ARMS = ("dense", "naive")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """naive loses 40 pp of every facet of refusal; refusal.unsafe is gated beside the suite."""
    design = Design(
        arms=ARMS,
        seeds=(1,),
        policies=("none", policy("snapkv", 96)),
        suites=("refusal",),
        items=256,
        clusters=64,
        drops={("naive", "refusal"): 0.4},
        margins={"refusal.unsafe": 3},
        facets={"refusal": ("unsafe", "helpful")},
        primary=("none",),
        estimands=("alike",),
    )
    return build(tmp_path_factory.mktemp("facets") / "run", design)


@pytest.fixture(scope="module")
def sides(run):
    return Sides(*(read_log(run, Request(None, {"arm": arm, "policy": "none"})) for arm in ARMS))


def unsafe_of(verdict):
    [found] = [d for d in verdict.decisions if d.suite == "refusal.unsafe" and d.gated]
    return found


def words(run, *more):
    chosen = [
        f"--select-{side}={part}"
        for side, arm in zip("ab", ARMS, strict=True)
        for part in (f"arm={arm}", "policy=none")
    ]
    return CliRunner().invoke(app, ["compare", str(run), str(run), *chosen, *more])


def test_every_facet_is_contrasted_and_the_one_of_harm_decides(sides):
    found = compare(sides, "score")
    assert [(row[1], row[4], row[-1]) for row in facets_table(found).rows] == [
        ("broken form", "worse", "FAIL"),
        ("unsafe", "worse", "FAIL"),
        ("helpful", "worse", "FAIL"),
    ]
    assert {d.suite for d in found.verdict.decisions if d.gated} == {
        "refusal.unsafe",
        "refusal.helpful",
        "refusal.well_formed",
    }
    scores = compare(sides, "score", margins={"refusal": 5})
    assert {d.suite for d in scores.verdict.decisions if d.gated} == {"refusal"}


def test_a_facet_with_a_margin_is_decided_as_in_the_runs_report(run, sides):
    wanted = unsafe_of(decide_run(load_run(run)).verdict)
    found = unsafe_of(compare(sides, "score", margins={"refusal.unsafe": 3}).verdict)
    assert (found.status, found.margin) == (wanted.status, wanted.margin) == (Status.FAIL, 0.03)
    assert found.effect == wanted.effect


def test_a_facet_that_one_file_lacks_does_not_decide(sides):
    old = replace(
        sides.candidate, rows=sides.candidate.rows.drop(columns=list(FACET_COLUMNS.values()), errors="ignore")
    )
    found = compare(Sides(sides.reference, old), "score")
    assert {d.suite for d in found.verdict.decisions if d.gated} == {"refusal"}


def test_a_facet_alone_can_fail_a_comparison(sides):
    """With a margin that the score keeps, only the facet decides."""
    wide = compare(sides, "score", margins={"refusal": 90})
    narrow = compare(sides, "score", margins={"refusal": 90, "refusal.unsafe": 3})
    assert (wide.verdict.status is Status.FAIL, narrow.verdict.status) == (False, Status.FAIL)


def test_a_suite_may_have_a_margin_of_its_own(sides):
    assert compare(sides, "score", margins={"refusal": 7}).findings.rules.margins == {"refusal": 0.07}


def test_rows_of_gated_facets_are_named_by_what_is_counted(sides):
    table = comparison_table(compare(sides, "score", margins={"refusal": 5, "refusal.unsafe": 3}))
    assert [row[0] for row in table.rows] == ["refusal at 192 tokens, score", "refusal: not unsafe at 192 tokens"]


def test_a_file_without_facets_says_so_and_a_gated_facet_is_invalid(run, sides, tmp_path):
    source = next(path for path in (run / "records").glob("naive*.jsonl") if "snapkv" not in path.name)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    old = tmp_path / "old.jsonl"
    old.write_text(
        "".join(json.dumps({k: v for k, v in row.items() if k != "facets"} | {"format": 1}) + "\n" for row in rows)
    )
    found = compare(Sides(sides.reference, read_log(old, Request())), "score", margins={"refusal.unsafe": 3})
    assert unsafe_of(found.verdict).status is Status.INVALID
    assert all("not evaluated: candidate" in row[3] for row in facets_table(found).rows)


def test_the_command_takes_margins_by_name_and_prints_what_moved(run, tmp_path):
    done = words(run, "--margin", "refusal=90", "--margin", "refusal.unsafe=3", "--out", str(tmp_path))
    assert done.exit_code == 3, done.output
    assert "By facet: " in done.output
    assert "broken form" in done.output
    assert "What moved: facets" in (tmp_path / "compare.md").read_text()
    body = json.loads((tmp_path / "compare.json").read_text())
    assert body["rules"]["margins"] == {"refusal": 0.9, "refusal.unsafe": 0.03}


def test_pages_of_files_without_facets_have_no_such_section(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(
            "item,cluster,score\n" + "".join(f"i{i},t{i // 5},1\n" for i in range(300))
        )
    found = compare(Sides(*(read_log(tmp_path / f"{name}.csv", Request()) for name in "ab")), "score")
    assert "facets" not in comparison_files(found)["compare.md"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--margin", "wide"], "--margin is 'wide'; give percentage points, or NAME=POINTS such as refusal.unsafe=3"),
        (["--margin", "refusal.unsafe=0"], "--margin is 0.0, wanted a number above 0 and below 100"),
        (["--margin", "refusal.unsfe=3"], "unknown suite or facet in --margin 'refusal.unsfe'. Did you mean"),
        (["--margin", "4", "--margin", "5"], "--margin is given twice for every suite; give it once"),
    ],
)
def test_a_wrong_margin_is_one_line_and_exit_2(run, given, said):
    done = words(run, *given)
    assert (done.exit_code, len(done.output.strip().splitlines())) == (2, 1)
    assert said in done.output


def test_margins_are_read_by_name():
    assert parse_margins(["5", "refusal.unsafe=3", "lm-eval:a=b.c=2"]) == (
        5.0,
        {"refusal.unsafe": 3.0, "lm-eval:a=b.c": 2.0},
    )
    assert parse_margins([]) == (5.0, {})


WAIVER = """\
waivers:
- {{who: Ada Byron, why: fixed on the branch that ships, expires: 2026-12-31, status: FAIL, cells: {{suite: {suite}}}}}
"""


@pytest.mark.parametrize(("suite", "waived"), [("refusal.unsafe", {"refusal.unsafe"}), ("refusal", {"refusal"})])
def test_a_waiver_names_a_metric_and_lets_that_one_through(run, tmp_path, suite, waived):
    (tmp_path / "waivers.yaml").write_text(WAIVER.format(suite=suite))
    asked = GateOverrides(waivers=read_waivers(tmp_path / "waivers.yaml"), today=date(2026, 11, 1))
    found = decide_run(load_run(run), asked).verdict
    assert {d.suite for d in found.decisions if d.waiver} == waived
    assert found.status is Status.FAIL


def test_a_waiver_of_a_facet_that_the_run_does_not_have_is_one_line(run, tmp_path):
    (tmp_path / "waivers.yaml").write_text(WAIVER.format(suite="refusal.unsfe"))
    asked = GateOverrides(waivers=read_waivers(tmp_path / "waivers.yaml"), today=date(2026, 11, 1))
    with pytest.raises(SpecError, match=r"unknown suite in .* 'refusal\.unsfe'\. Did you mean 'refusal\.unsafe'"):
        decide_run(load_run(run), asked)
