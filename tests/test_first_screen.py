"""Ten reports of which the truth is known, and five questions that their first screens must answer in words."""

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from reports_synthetic import Design, build, policy

from kvaudit.core.errors import RunError
from kvaudit.core.facets import ALIKE, DEPLOYED, SERVING
from kvaudit.core.provenance import seal_path
from kvaudit.reports.page.answers import TRAINING, answers
from kvaudit.reports.page.formats import formats
from kvaudit.reports.page.formats.disclosure import MOST_CARD_WORDS
from kvaudit.reports.page.page import MOST_GRID_ROWS, MOST_WORDS, _first_words, grid_of
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.page.terminal import MOST_TERMINAL_LINES, terminal_lines
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, with_report_sections, write_report
from kvaudit.reports.sections.shared.words import MOST_OF_NAME, shorten
from kvaudit.reports.verdict.reasons import Reason
from kvaudit.reports.verdict.row import contrasts_csv
from kvaudit.reports.verdict.verdict import Status

SNAP, HARSH = policy("snapkv", 96), policy("h2o", 64)
ASKED = (SERVING, ALIKE, DEPLOYED)
BASE = Design(
    arms=("dense", "naive"),
    seeds=(1,),
    policies=("none", SNAP),
    suites=("refusal", "math"),
    items=360,
    clusters=120,
    seed_sd=0.0,
    estimands=ASKED,
    margins={"refusal": 5, "math": 5},
)
SERVED = replace(BASE, arms=("base",), seeds=(0,), train=False, estimands=())
ALL = range(360)
NOTHING = {"none": (), SNAP: (), ("dense", "none"): (), ("dense", SNAP): (), ("naive", "none"): (), ("naive", SNAP): ()}
SHIP, NOT, OPEN, NONE, BROKEN = "ship", "do not ship", "not enough data", "not measurable", "not valid"


def wrong(**shares: float) -> dict[Any, Any]:
    """Items that are not as wanted, by arm and policy: every tenth, and of what is named a further share."""
    tenth = {i for i in ALL if i % 10 == 0}
    table: dict[Any, Any] = {}
    for arm in ("base", "dense", "naive"):
        for short, p in (("none", "none"), ("snap", SNAP), ("harsh", HARSH)):
            more = shares.get(f"{arm}_{short}", shares.get(short, 0.0))
            table[arm, p] = tenth | {i for i in ALL if (i * 7919) % 1000 < 1000 * more}
    return table


# design, and by question what the first screen must say of whom
REPORTS: dict[str, tuple[Design, dict[str, dict[str, str]]]] = {
    "serving holds": (replace(SERVED, wrong=wrong()), {SERVING: {"snapkv 96": SHIP}}),
    "serving fails": (replace(SERVED, wrong=wrong(snap=0.3)), {SERVING: {"snapkv 96": NOT}}),
    "serving is open": (
        replace(SERVED, wrong=wrong(snap=0.02), items=120, clusters=60),
        {SERVING: {"snapkv 96": OPEN}},
    ),
    "one setting holds and one fails": (
        replace(SERVED, policies=("none", SNAP, HARSH), wrong=wrong(harsh=0.3)),
        {SERVING: {"snapkv 96": SHIP, "h2o 64": NOT}},
    ),
    "nothing to lose": (
        replace(SERVED, wrong={p: {*ALL} - {1} for p in ("none", SNAP)}),
        {SERVING: {"snapkv 96": NONE}},
    ),
    "all hold": (
        replace(BASE, wrong=wrong()),
        {SERVING: {"snapkv 96": SHIP}, TRAINING: {"naive": SHIP}, DEPLOYED: {"naive @ snapkv 96": SHIP}},
    ),
    "training fails": (
        replace(BASE, wrong=wrong(naive_none=0.3, naive_snap=0.3)),
        {SERVING: {"snapkv 96": SHIP}, TRAINING: {"naive": NOT}, DEPLOYED: {"naive @ snapkv 96": NOT}},
    ),
    "serving fails, training holds": (
        replace(BASE, wrong=wrong(dense_snap=0.3, naive_snap=0.3)),
        {SERVING: {"snapkv 96": NOT}, TRAINING: {"naive": SHIP}, DEPLOYED: {"naive @ snapkv 96": NOT}},
    ),
    "training alone is asked": (
        replace(BASE, wrong=wrong(), estimands=(ALIKE,)),
        {SERVING: {}, TRAINING: {"naive": SHIP}, DEPLOYED: {}},
    ),
    "not valid": (
        replace(BASE, wrong=wrong()),
        {
            SERVING: {"snapkv 96": BROKEN},
            TRAINING: {"naive": BROKEN},
            DEPLOYED: {"naive @ snapkv 96": BROKEN},
        },
    ),
}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The findings of one of the reports, made once."""
    made: dict[str, Any] = {}

    def one(name: str) -> Any:
        if name not in made:
            run = build(tmp_path_factory.mktemp("screens") / "run", REPORTS[name][0])
            if name == "not valid":
                unit = min((run / "records").glob("*.jsonl"))
                unit.unlink()
                seal_path(unit).unlink()
            data = load_run(run)
            made[name] = with_report_sections(data, decide_run(data))
        return made[name]

    return one


class Words(HTMLParser):
    """What a page says before anything is opened, without the grid and its signs."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self._hidden = 0
        self._inside = self._signs = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._signs = self._signs or (tag == "p" and "signs" in (dict(attrs).get("class") or ""))
        self._inside = self._inside or tag == "main"
        if tag == "div" and dict(attrs).get("class") == "folds":
            self._inside = False
        self._hidden += tag in ("table", "details", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("table", "details", "style")
        self._signs = self._signs and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._inside and not self._hidden and not self._signs:
            self.text += data.split()


def seen_first(html: str) -> list[str]:
    parser = Words()
    parser.feed(html)
    return parser.text


@pytest.mark.parametrize("name", REPORTS)
def test_a_first_screen_answers_what_is_true(reported: Any, name: str) -> None:
    found, truth = reported(name), REPORTS[name][1]
    told = {answer.question: answer for answer in answers(found)}
    assert {q: {s: g.word for g in a.groups for s in g.subjects} for q, a in told.items()} == truth
    page = page_of(found)
    html, words = formats()["report.html"](page), " ".join(seen_first(formats()["report.html"](page)))
    for subjects in truth.values():
        for subject, word in subjects.items():
            assert word in words
            assert subject in words
    assert len(seen_first(html)) <= MOST_WORDS, words
    assert "embedded" in words, "the model"
    assert "@ none" in words, "the reference"
    assert found.verdict.status.value in words


@pytest.mark.parametrize("name", REPORTS)
def test_the_same_answer_stands_everywhere(reported: Any, name: str, tmp_path: Path) -> None:
    found, truth = reported(name), REPORTS[name][1]
    page = page_of(found)
    files = {file: render(page) for file, render in formats().items()}
    said = {
        "terminal": "\n".join(terminal_lines(found, tmp_path)),
        **{file: files[file].replace("\\", "") for file in ("report.md", "summary.md", "card.md", "junit.xml")},
        "gate.sarif": json.loads(files["gate.sarif"])["runs"][0]["results"][0]["message"]["text"],
    }
    for subjects in truth.values():
        for subject, word in subjects.items():
            for place, text in said.items():
                assert re.search(rf"{word} (?:[^;.]*, )?{subject}\b", text, re.IGNORECASE), (place, subject, word)
    assert len(said["terminal"].splitlines()) <= MOST_TERMINAL_LINES
    assert len(files["report.md"].split()) <= 2500
    assert len(files["verdict.json"]) < 50_000
    prose = [line for line in files["card.md"].splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= MOST_CARD_WORDS


def test_the_grid_tells_rates_as_what_happens(tmp_path: Path) -> None:
    design = replace(SERVED, wrong=wrong(snap=0.3), facets={"refusal": ("unsafe",)}, margins={"refusal.unsafe": 5})
    found = decide_run(load_run(build(tmp_path / "run", design)))
    grid = grid_of(found)
    row = dict(zip(grid.columns, grid.rows[0].cells, strict=True))
    cell = row["forbidden things told or done (refusal)"]
    assert cell is not None
    assert (cell.text, cell.sign) == ("10 → 37.2 %", "✗")
    assert re.search(r"^worse: forbidden .* 10 → 37.2 % of 360, limit \+5, up to \+31\.3", cell.says)
    assert cell.bound == "limit +5, up to +31.3"
    html = formats()["report.html"](page_of(found))
    assert f'<span class="bound">{cell.bound}</span>' in html, "which is shown where there is no pointer"
    assert ".grid .bound { display: none; }" in html
    score = row["refusal score"]
    assert score is not None
    assert score.text == "90 → 62.8 %"
    assert re.search(r"limit -5, up to -31\.3", score.says)


def test_a_small_p_value_is_not_written_as_0(reported: Any) -> None:
    findings = reported("all hold")
    verdict = findings.verdict
    decisions = tuple(replace(d, pvalue_drop=1.23456e-9) for d in verdict.decisions)
    page = page_of(replace(findings, verdict=replace(verdict, decisions=decisions)))
    assert {cell["pvalue"] for cell in json.loads(formats()["verdict.json"](page))["cells"]} == {1.235e-9}


def test_verdict_json_is_as_its_schema_says(reported: Any) -> None:
    schema = json.loads((Path(__file__).parent.parent / "docs" / "verdict.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for name in REPORTS:
        body = json.loads(formats()["verdict.json"](page_of(reported(name))))
        jsonschema.Draft202012Validator(schema).validate(body)
        body["cells"][0]["status"] = "FINE"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema).validate(body)


def test_whatever_breaks_a_comparison_breaks_every_answer(reported: Any) -> None:
    found = reported("all hold")
    broken = replace(found, verdict=replace(found.verdict, reasons=(Reason("INCOMPLETE", "rows are missing"),)))
    assert {answer.status for answer in answers(broken)} == {Status.INVALID}
    assert {cell.status for row in grid_of(broken).rows for cell in row.cells if cell} == {Status.INVALID}


def test_a_grid_of_a_hundred_settings_keeps_the_worst(tmp_path: Path) -> None:
    names = [policy("snapkv", budget) for budget in range(10, 110)]
    hurt = {names[77]: {i for i in range(32) if i % 3}}
    design = replace(
        SERVED, policies=("none", *names), suites=("refusal",), items=32, clusters=32, wrong=hurt, margins={}
    )
    found = decide_run(load_run(build(tmp_path / "run", design)))
    grid, page = grid_of(found), page_of(found)
    assert (len(grid.rows), grid.left_out) == (MOST_GRID_ROWS, 100 - MOST_GRID_ROWS)
    assert "snapkv 87" in {row.name for row in grid.rows}
    assert len(formats()["verdict.json"](page)) < 50_000
    assert len(formats()["report.md"](page).split()) <= 2500
    assert len(seen_first(formats()["report.html"](page))) <= MOST_WORDS
    assert len(terminal_lines(found, tmp_path)) <= MOST_TERMINAL_LINES


@pytest.mark.parametrize("name", ["x" * 64, "نموذج", "模型<script>alert(1)</script>", "a|b`c*d_e", "=1+1"])
def test_names_of_any_kind_are_text_on_the_first_screen(reported: Any, name: str) -> None:
    found = reported("serving holds")
    sides = replace(found.comparison, model=name, labels={**found.comparison.labels, SNAP: name})
    found = replace(found, drift=replace(found.drift, run=name, comparison=sides))
    page = page_of(found)
    html = formats()["report.html"](page)
    assert "<script" not in html
    assert len(seen_first(html)) <= MOST_WORDS
    assert not re.search(r"(?<!\\)<script", formats()["report.md"](page))


@pytest.mark.parametrize("name", ["=1+1", "\t=1+1", " =1+1", "＝1+1", "|calc", "%0", "@a"])
def test_a_name_in_the_table_of_contrasts_is_no_formula(reported: Any, name: str) -> None:
    found = reported("serving holds")
    contrasts = [replace(c, suite=name) for c in found.drift.contrasts]
    rows = csv.DictReader(contrasts_csv(replace(found, drift=replace(found.drift, contrasts=contrasts))).splitlines())
    assert {row["suite"] for row in rows} == {"'" + name.replace("\t", " ")}


def test_long_names_are_cut_in_one_way_wherever_a_line_has_to_stay_one(tmp_path: Path) -> None:
    found = decide_run(load_run(build(tmp_path / "run", replace(SERVED, wrong=wrong(snap=0.3)))))
    name = f"engine with a {'very ' * 20}long name, its last setting=4"
    short = "engine with a very very …ame, its last setting=4"
    assert shorten(name) == short
    assert len(short) == MOST_OF_NAME
    sides = replace(found.comparison, model=name, labels={**found.comparison.labels, SNAP: name})
    page = page_of(replace(found, drift=replace(found.drift, run=name, comparison=sides)))
    assert page.screen is not None
    assert page.screen.title == f"May it ship? {short}"
    assert page.screen.facts[0][1].startswith(f"{short} (")
    assert page.screen.answers[0].groups[0].names == short


def test_a_remark_that_is_cut_ends_at_a_word_and_says_so() -> None:
    line = "Answers of two endpoints were served by models of other names than asked"
    assert _first_words(line) == "Answers of two endpoints were served by models …"
    assert _first_words("Gate") == "Gate"
    assert _first_words("x" * 60) == "x" * MOST_OF_NAME + " …"


def test_a_file_where_the_report_belongs_is_one_line(tmp_path: Path) -> None:
    run = build(tmp_path / "run", replace(SERVED, wrong=wrong()))
    (run / "report").write_text("mine")
    with pytest.raises(RunError, match=r"report' is a file, but must be the report's folder; move the file away$"):
        write_report(run)
    assert (run / "report").read_text() == "mine"


def test_half_a_run_says_to_resume_first(reported: Any) -> None:
    (group,) = answers(reported("not valid"))[0].groups
    assert group.why.startswith("INCOMPLETE: resume this run first, it is incomplete: planned units missing: 1 of 8")


def test_a_run_of_one_setting_answers_that_nothing_was_asked(tmp_path: Path) -> None:
    found = decide_run(load_run(build(tmp_path / "run", replace(SERVED, policies=("none",), wrong=wrong()))))
    (answer,) = answers(found)
    assert answer.line == ("Not valid base (NOTHING: no cell to gate: one arm under one policy cannot be compared).")
    assert grid_of(found).rows == ()
    assert "not valid" in formats()["report.html"](page_of(found))
