"""One hostile page through every format, and each test of the contract fails a format that is wrong in one way.

A new file of ``reports/page/formats`` is found by itself; the ends of names in ``FORMATS`` say which markup it must not
let in.
"""

from __future__ import annotations

import csv
import html
import inspect
import io
import itertools
import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from reports_synthetic import Design, build, policy, write_unit
from test_layers import imports

import kvaudit.reports.page.formats
from kvaudit.core.text import visible
from kvaudit.reports.page.formats import formats
from kvaudit.reports.page.page import Page, screen_of
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, with_report_sections
from kvaudit.reports.verdict.verdict import Status, worst

pytestmark = pytest.mark.usefixtures("figures")  # whose text is a stranger's too
STRUCTURE = (
    "\n\n# big\n\n1. one\n- two\n> q\n\n```\n````\n~~~\n"
    "![x](http://e.example/a.png)\n<script>alert(1)</script>\n| a |\n"
)
HOSTILE = (
    "\x1b[31m<script>alert(1)</script> | `x` ``` \u202e$\\infty$ [a](http://evil.example) </pre> &amp; {{ 7*7 }}\ud800"
    "\" onload='x' ]]> " + STRUCTURE
)
ARM = "=na|ve<i>`"
SUITE = "ma<th>|$x$\u202e\n- two"
REMARK = "Let through by Ada."
ALARM = "late.yaml came after the run."
VOID = {"meta", "br", "path", "use", "rect", "image", "link"}
DECIDERS = {
    "kvaudit.reports.run",
    "kvaudit.reports.verdict.cell",
    "kvaudit.reports.verdict.decide",
    "kvaudit.reports.verdict.family",
    "kvaudit.reports.stats.rule",
}
DECIDERS |= {
    f"kvaudit.reports.verdict.verdict.{name}" for name in ("worst", "worst_recipe")
}  # of cells, which is a verdict anew


class Format(NamedTuple):
    """A format as a page meets it."""

    file: str
    render: Callable[[Page], str]


FORMATS = [Format(file, cache(render)) for file, render in formats().items()]
RIGHT = {form.file: form.render for form in FORMATS}
HELD = pytest.mark.parametrize("form", FORMATS, ids=[form.file for form in FORMATS])


class Markup(HTMLParser):
    """Tags, attributes and balance of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def fetched(self) -> list[str | None]:
        """What a browser would ask the network for."""
        links = [value for name, value in self.attributes if name in ("src", "href", "xlink:href")]
        return [value for value in links if not (value or "").startswith("#")]


class Hashed(Page):
    """A page that a cache can hold: every page here is made once."""

    __hash__ = object.__hash__


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Hostile text in every place that a run takes text from: arms, policies, suites, transcripts."""
    design = Design(
        name="hostile",
        arms=("dense", ARM),
        seeds=(1,),
        policies=("none", policy("snap<kv>|", 96)),
        suites=("refusal", SUITE),
        clusters=8,
        items=24,
        drops={(ARM, "refusal"): 0.5},
        hostile=HOSTILE.replace("\ud800", "\\ud800"),
    )
    run = build(tmp_path_factory.mktemp("hostile") / "run", design)
    for unit in (run / "records").glob("*.jsonl"):  # JSON can spell a lone surrogate, UTF-8 cannot
        write_unit(unit, unit.read_text().replace("\\\\ud800", "\\ud800"))
    data = load_run(run)
    return Hashed(**vars(page_of(with_report_sections(data, decide_run(data)))))


def told(page: Page, status: Status) -> Page:
    """A short page with this status, whatever its rows say, and with a remark that must stand beside it."""
    verdict = replace(page.findings.verdict, status=status)
    banner = replace(page.banner, status=status, lines=(REMARK,), alarm=ALARM)
    values = {name: value for name, value in page.findings.values.items() if name != "examples"}
    findings = replace(page.findings, verdict=verdict, values=values)
    assert page.screen is not None
    screen = replace(page.screen, status=status, alarm=ALARM, before_relying=REMARK, flips=())
    return Hashed(findings, banner, page.sections[-1:], (REMARK,), screen)


def undecided(page: Page) -> tuple[Page, Page]:
    """An invalid page all of whose cells are open, whatever their numbers, and the same page without a cell."""
    bare = told(page, Status.INVALID)
    verdict = replace(bare.findings.verdict, headline=None)  # an invalid one quotes no cell
    cells = [replace(d, status=Status.INCONCLUSIVE, recipe=None, judged=None) for d in verdict.decisions]
    both = (replace(bare.findings, verdict=replace(verdict, decisions=each)) for each in (tuple(cells), ()))
    first, second = (
        Hashed(findings, bare.banner, bare.sections, bare.remarks, screen_of(findings)) for findings in both
    )
    return first, second


def spelled(text: str) -> str:
    """What a reader sees of it."""
    return html.unescape(text.replace("\\", ""))


# --- what is markup, by the end of a file's name -------------------------------------------------------------------


def inert_html(text: str) -> None:
    found = Markup(text)
    assert found.open == []
    assert not {"script", "i", "img", "iframe", "object", "th>"} & set(found.tags)
    assert found.fetched() == []
    assert not any(name.startswith("on") for name, _ in found.attributes)
    assert "<th>|" not in text


def inert_markdown(text: str) -> None:
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<", outside)
    for table in re.findall(r"(?:^\|.*\n)+", outside, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = parser.parse(text)
    every = tokens + [child for token in tokens for child in token.children or ()]
    assert not {"html_block", "html_inline", "image", "link_open", "ordered_list_open"} & {t.type for t in every}
    assert "big" not in [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]


def inert_json(text: str) -> None:
    json.loads(text, parse_constant=pytest.fail)
    assert text.isascii()


def inert_xml(text: str) -> None:
    assert "!ENTITY" not in text
    assert not {"script", "i", "th"} & {element.tag for element in ElementTree.fromstring(text).iter()}


def inert_text(text: str) -> None:
    """Beyond what a terminal obeys: a line of its own, which could say PASS."""
    assert not {line for line in STRUCTURE.splitlines() if line} & set(text.splitlines())


def inert_table(text: str, delimiter: str) -> None:
    rows = list(csv.reader(io.StringIO(text), delimiter=delimiter, strict=True))
    assert len({len(row) for row in rows}) == 1
    cells = [cell for row in rows for cell in row]
    number = r"[+-]?(inf|[\d.,]+(e[+-]?\d+)?)( ?(%|[a-z]+))?|-"
    formulas = [cell for cell in map(str.lstrip, cells) if cell[:1] in {*"=+-@"} and not re.fullmatch(number, cell)]
    assert formulas == [], "a spreadsheet computes these"


INERT: dict[str, Callable[[str], None]] = {
    ".html": inert_html, ".md": inert_markdown, ".json": inert_json, ".sarif": inert_json, ".xml": inert_xml,
    ".txt": inert_text, ".csv": partial(inert_table, delimiter=","), ".tsv": partial(inert_table, delimiter="\t"),
}  # fmt: skip


# --- what a format owes --------------------------------------------------------------------------------------------


@HELD
def test_hostile_text_stays_text(form: Format, page: Page) -> None:
    text = form.render(page)
    suffix = Path(form.file).suffix
    assert suffix in INERT, f"say in INERT what is markup in a {suffix} file"
    obeyed = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n", "\u200b"}
    assert obeyed <= {"\t" if suffix == ".tsv" else "\n"}, "a terminal or a browser obeys these"
    INERT[suffix](text)


@HELD
def test_an_arm_is_called_as_its_run_calls_it(form: Format, page: Page) -> None:
    assert ARM in spelled(form.render(page)), "every candidate is named, and as it is called"


@HELD
def test_every_status_is_said_as_it_was_decided(form: Format, page: Page) -> None:
    texts = {status: form.render(told(page, status)) for status in Status}
    assert len(set(texts.values())) == len(Status), "some statuses read alike: say page.banner.status"
    for status, text in texts.items():
        assert status.value in spelled(text), f"{status.value} is not said: say page.banner.status"


@HELD
def test_no_cell_is_called_other_than_it_was_decided(form: Format, page: Page) -> None:
    cells, none = (form.render(each) for each in undecided(page))
    for status in (Status.PASS, Status.FAIL):
        assert cells.count(status.value) == none.count(status.value), "the numbers of a cell were judged again"


@HELD
def test_what_must_stand_beside_the_verdict_does(form: Format, page: Page) -> None:
    text = spelled(form.render(told(page, Status.PASS)))
    assert REMARK in text
    assert ALARM in text


@HELD
def test_the_same_page_gives_the_same_bytes(form: Format, page: Page) -> None:
    again = inspect.unwrap(form.render)
    assert again(page).encode() == form.render(page).encode()


@HELD
def test_no_format_says_no_drift(form: Format, page: Page) -> None:
    assert "no drift" not in " ".join(form.render(page).lower().split())


@HELD
def test_a_format_decides_nothing(form: Format) -> None:
    assert not imports(Path(inspect.getfile(inspect.unwrap(form.render)))) & DECIDERS


@HELD
def test_its_file_lies_in_the_folder_of_the_report(form: Format) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_-]*\.[a-z]+", form.file)


def test_no_two_formats_write_one_file() -> None:
    folder = Path(inspect.getfile(kvaudit.reports.page.formats)).parent
    modules = [
        import_module(f"{kvaudit.reports.page.formats.__name__}.{path.stem}") for path in folder.glob("[a-z]*.py")
    ]
    assert sorted(form.file for form in FORMATS) == sorted(file for module in modules for file in module.FORMATS)


def test_what_a_model_said_is_shown_and_not_obeyed(page: Page) -> None:
    text = RIGHT["report.html"](page)
    assert {mark for mark in ("alert(1)", "{{ 7*7 }}", "␛", "⟨U+202E⟩", "⟨U+D800⟩") if mark not in text} == set()


# --- formats that are wrong in one way -----------------------------------------------------------------------------

UNESCAPED = re.compile(r"\\([\\`*_{}\[\]<>|#~&$!])")
COUNT = itertools.count()


def changed(file: str, change: Callable[[str], str]) -> Format:
    """A right format with its text changed."""
    return Format(file, lambda page: change(RIGHT[file](page)))


def answers(page: Page) -> str:
    return "\n".join(turn.text for example in page.findings.values.get("examples", ()) for turn in example.candidate)


def decides(page: Page) -> str:
    status = worst(d.standing for d in page.findings.verdict.decisions if d.gated)
    return RIGHT["report.md"](told(page, status))


def decides_cells(page: Page) -> str:
    found = ((d.arm, d.effect, d.margin) for d in page.findings.verdict.decisions if d.effect and d.margin)
    return "\n".join(f"{arm}: {'PASS' if effect.low > -margin else 'FAIL'}" for arm, effect, margin in found)


def names(page: Page) -> str:
    return "\n".join(f"{d.suite}: {d.standing.value}" for d in page.findings.verdict.decisions)


def table(page: Page) -> str:
    return "arm\tverdict\n" + "".join(f"{d.arm}\t{d.standing.value}\n" for d in page.findings.verdict.decisions)


def without_remarks(page: Page) -> str:
    return RIGHT["report.md"](replace(page, banner=replace(page.banner, lines=()), remarks=()))


def without_alarm(page: Page) -> str:
    assert page.screen is not None
    return RIGHT["report.md"](replace(page, screen=replace(page.screen, alarm="")))


def imports_the_rule(page: Page) -> str:
    from kvaudit.reports.verdict.decide import decide

    return str(decide)


Check = Callable[..., None]
WRONG: list[tuple[str, Check, Format]] = [
    ("html unescaped", test_hostile_text_stays_text, changed("report.html", html.unescape)),
    ("markdown unescaped", test_hostile_text_stays_text, changed("report.md", lambda t: UNESCAPED.sub(r"\1", t))),
    (
        "json as it is",
        test_hostile_text_stays_text,
        changed("drift.json", lambda t: json.dumps(json.loads(t), ensure_ascii=False)),
    ),
    ("xml unescaped", test_hostile_text_stays_text, Format("junit.xml", lambda page: f"<a>{STRUCTURE}</a>")),
    ("text as it is", test_hostile_text_stays_text, Format("report.txt", answers)),
    ("lines of an answer", test_hostile_text_stays_text, Format("report.txt", lambda page: visible(answers(page)))),
    ("names as they are", test_hostile_text_stays_text, Format("cells.txt", names)),
    ("a formula", test_hostile_text_stays_text, Format("cells.tsv", table)),
    ("markup nobody checks", test_hostile_text_stays_text, Format("report.tex", lambda page: "PASS")),
    ("text dropped", test_an_arm_is_called_as_its_run_calls_it, changed("report.html", lambda t: t.replace("|", ""))),
    ("verdict dropped", test_every_status_is_said_as_it_was_decided, Format("a.txt", lambda page: page.banner.title)),
    ("verdict decided anew", test_every_status_is_said_as_it_was_decided, Format("report.md", decides)),
    ("cells decided anew", test_no_cell_is_called_other_than_it_was_decided, Format("cells.txt", decides_cells)),
    ("remarks dropped", test_what_must_stand_beside_the_verdict_does, Format("report.md", without_remarks)),
    ("alarm dropped", test_what_must_stand_beside_the_verdict_does, Format("report.md", without_alarm)),
    ("a clock", test_the_same_page_gives_the_same_bytes, Format("a.txt", lambda page: str(next(COUNT)))),
    ("no drift", test_no_format_says_no_drift, Format("a.txt", lambda page: "There is No\ndrift.")),
    ("imports the rule", test_a_format_decides_nothing, Format("a.txt", imports_the_rule)),
    ("a file elsewhere", test_its_file_lies_in_the_folder_of_the_report, Format("../a.txt", answers)),
]


@pytest.mark.parametrize(("check", "form"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_format_fails_the_test_that_it_breaks(check: Check, form: Format, page: Page) -> None:
    given: dict[str, Any] = {"form": form, "page": page}
    with pytest.raises((AssertionError, pytest.fail.Exception, ElementTree.ParseError)):
        check(**{name: given[name] for name in inspect.signature(check).parameters})


def test_every_promise_has_a_wrong_format_that_breaks_it() -> None:
    checks = [check for name, check in globals().items() if name.startswith("test_")]
    promises = {check.__name__ for check in checks if next(iter(inspect.signature(check).parameters), "") == "form"}
    assert promises == {check.__name__ for _, check, _ in WRONG}
