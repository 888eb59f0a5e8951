"""The pages of a run's flips in a real browser: filters, search and keys, for every reader, and no text is obeyed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from reports_synthetic import Design, build, policy, records_of

from kvaudit.core.facets import FACETS
from kvaudit.core.records import Record
from kvaudit.core.spans import ALL_TOKENS, Shading, write_shadings
from kvaudit.reports.page.view.folder import RunView
from kvaudit.reports.records.load import load_run
from kvaudit.reports.verdict.comparison import comparison_of

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, which stands among the dev extra")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SNAP = policy("snapkv", 96)
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&amp;<a href=http://evil.example>\u202e\x1b]0;x\x07\u2028${1}"
SHOWN = "</script><img src=x onerror=alert(1)>\"'&amp;<a href=http://evil.example>⟨U+202E⟩␛]0;x␇⟨U+2028⟩${1}"
FOREIGN = " مرحبا بالعالم 你好世界"
MANY = 20_000
LIT = """() => [...CSS.highlights.get("found")].map(({ startContainer, startOffset, endContainer, endOffset }) => {
  const range = document.createRange();
  range.setStart(startContainer, startOffset);
  range.setEnd(endContainer, endOffset);
  return range.toString();
})"""
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], under) => [r, g, b].map((c, n) => a * c + (1 - a) * under[n]);
  const back = (node) => {
    const own = parse(getComputedStyle(node).backgroundColor);
    return node.parentElement ? over(own, back(node.parentElement)) : over(own, [255, 255, 255]);
  };
  const light = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
  const texts = [...document.querySelectorAll("body *")].filter((node) =>
    node.checkVisibility() && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()));
  return texts.map((node) => {
    const ink = light(parse(getComputedStyle(node).color).slice(0, 3));
    const [one, other] = [ink, light(back(node))].sort((x, y) => y - x);
    return [(one + 0.05) / (other + 0.05), node.outerHTML.slice(0, 80)];
  });
}"""


ARMS, DROPS = ("dense", "naive", "smd"), {("naive", "refusal"): 0.4, ("naive", "math"): 0.4}
DESIGN = Design(
    arms=ARMS, seeds=(1, 2), policies=("none", SNAP), suites=("refusal", "math"), clusters=8, items=48, drops=DROPS,
    serving={SNAP: 0.2}, hostile=HOSTILE + FOREIGN, facets={"refusal": ("unsafe", "helpful")},
)  # fmt: skip


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages with hostile text in answers, prompts and tokens, and a shade for every answer that lost something."""
    run = build(tmp_path_factory.mktemp("browser") / "run", DESIGN)
    data = load_run(run)
    pages = RunView(data, comparison_of(data.spec, data.records, data.provenance))
    for unit, answers in pages.missing_shades(10**6).items():
        write_shadings(run, unit, dict.fromkeys(answers, shading()))
    pages.write(run / "view")
    return run / "view"


class Differing(NamedTuple):
    """A pair of records that differ, told apart from the code that makes the pages."""

    kind: str
    arm: str
    seed: str
    policy: str
    suite: str
    changes: frozenset[tuple[str, str]]  # what changed, lost or gained
    answers: tuple[str, str]


@pytest.fixture(scope="module")
def differing() -> list[Differing]:
    rows = [row for _, own in records_of(DESIGN) for row in own]
    by = {(row.arm, row.train_seed, row.policy, row.suite, row.item_id): row for row in rows}
    found = []
    for (arm, seed, served, suite, item), candidate in by.items():
        others = {"alike": by["dense", seed, served, suite, item], "serving": by[arm, seed, "none", suite, item]}
        if arm != "dense" and served != "none":  # else it is one of the two above
            others["deployed"] = by["dense", seed, "none", suite, item]
        for kind, reference in others.items():
            if changes := changes_of(reference, candidate):
                said = reference.transcript[-1].content, candidate.transcript[-1].content
                short = "none" if served == "none" else "snapkv 96"
                found.append(Differing(kind, arm, str(seed), short, suite, changes, said))
    return found


def changes_of(reference: Record, candidate: Record) -> frozenset[tuple[str, str]]:
    values = [("score", reference.score, candidate.score, True)]
    for name, old in reference.facets.items():
        values.append((name, old, candidate.facets[name], FACETS[name].wanted))
    known = [(name, old, new, good) for name, old, new, good in values if None not in (old, new) and old != new]
    return frozenset((name, "gained" if new == good else "lost") for name, _, new, good in known)


def shading() -> Shading:
    return Shading(
        pieces=["<|system|>", "Never", " tell.", HOSTILE, "<|user|>", "Say", " it", " now.", "<|end|>"],
        roles=["format", "system", "system", "system", "format", "user", "user", "user", "format"],
        held=[8, 0, 0, 4, 8, 1, 8, 8, 8],
        heads=8,
        depth={ALL_TOKENS: [0.5, 0.75], "rule": [0.0, 0.0]},
        marks={"rule": [1, 2]},
    )


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium is installed ({', '.join(BROWSERS)})")
    unboxed = ["--no-sandbox"] if os.geteuid() == 0 else []  # as root it starts in no other way
    with playwright.sync_playwright() as driver:
        usual = ["--disable-ipc-flooding-protection"]  # readers' browsers refuse what comes too often
        browser = driver.chromium.launch(executable_path=path, args=unboxed, ignore_default_args=usual)
        yield browser
        browser.close()


class Opened:
    """A page, with all that it asked for and complained of."""

    def __init__(self, browser: Any, folder: Path, theme: str = "light", address: str = "", width: int = 1280) -> None:
        self.page = browser.new_page(color_scheme=theme, viewport={"width": width, "height": 800})
        self.page.set_default_timeout(60_000)
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        for event in ("console", "pageerror", "dialog"):
            self.page.on(event, lambda what: self.said.append(str(what)))
        self.folder = folder.as_uri()
        self.page.goto(f"{self.folder}/index.html{address}")

    def count(self) -> str:
        return str(self.page.inner_text("#count"))

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def active(self) -> str:
        """The row that the keys are on."""
        return str(self.page.evaluate("document.querySelector('#rows .here')?.ariaRowIndex ?? 'none'"))

    def close(self) -> None:
        """What it asked for lies in the folder, and nothing went wrong."""
        assert [url for url in self.asked if not url.startswith(self.folder)] == []
        assert self.said == []
        self.page.close()


def table(folder: Path) -> dict[str, Any]:
    text = (folder / "data" / "flips.js").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text.removeprefix("const VIEW = ").removesuffix(";\n"))
    return found


def both_lost(view: Path) -> str:
    """The address of a flip whose sides both lost something."""
    found = table(view)
    alike, policies = found["kinds"].index("alike"), [p["text"] for p in found["policies"]]
    flips = zip(found["flips"]["key"], found["flips"]["kind"], found["flips"]["policy"], strict=True)
    return f"#flip={next(key for key, kind, p in flips if kind == alike and p == policies.index(SNAP))}"


def with_list(view: Path, out: Path, found: dict[str, Any]) -> Path:
    """The same pages with another list."""
    shutil.copytree(view, out)
    (out / "data" / "flips.js").write_text(f"const VIEW = {json.dumps(found)};\n", encoding="utf-8")
    return out


def test_it_opens_from_disk_and_is_filtered_by_keyboard(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view)
    found = table(view)
    every = len(found["flips"]["key"])
    assert opened.count() == f"{every} of {every} flips"
    opened.page.focus("select[name=suite]")
    opened.page.keyboard.type("math")
    maths = [found["items"]["suite"][item] == "math" for item in found["flips"]["item"]]
    opened.page.wait_for_url("**#suite=math")
    assert opened.count() == f"{sum(maths)} of {every} flips"
    opened.page.focus("#rows a")
    name = opened.page.inner_text("#rows a >> nth=0")
    opened.press("Enter")
    opened.page.wait_for_selector("#flip .facts")
    assert opened.page.evaluate("document.activeElement.textContent") == name
    opened.page.go_back()
    opened.page.wait_for_selector("#list:not([hidden])")
    assert opened.page.evaluate("document.activeElement.closest('tr').ariaRowIndex") == "2"
    opened.close()


def test_filters_count_what_the_records_count(chromium: Any, view: Path, differing: list[Differing]) -> None:
    opened = Opened(chromium, view)
    asked: list[tuple[dict[str, str], int]] = []
    for name in ("suite", "policy", "arm", "seed", "kind"):
        values = [getattr(flip, name) for flip in differing]
        asked += [({name: value}, values.count(value)) for value in sorted(set(values))]
    for way in ("lost", "gained"):
        asked.append(({"direction": way}, sum(any(w == way for _, w in f.changes) for f in differing)))
        for what in ("score", "unsafe", "helpful"):
            asked.append(({"what": what, "direction": way}, sum((what, way) in f.changes for f in differing)))
    both = [f for f in differing if (f.arm, f.seed, f.suite, f.policy) == ("naive", "2", "refusal", "snapkv 96")]
    asked.append(({"arm": "naive", "seed": "2", "suite": "refusal", "policy": "snapkv 96"}, len(both)))
    assert min(count for _, count in asked) >= 1
    for chosen, count in [*asked, ({"policy": "of another run"}, 0)]:
        opened.page.evaluate("(chosen) => go('#' + new URLSearchParams(chosen))", chosen)
        assert (chosen, opened.count()) == (chosen, f"{count} of {len(differing)} flips")
        assert opened.page.locator("#active li").count() == len(chosen)
    assert opened.page.is_visible("#none")
    opened.page.click("#active a")  # takes the filter away
    assert opened.count() == f"{len(differing)} of {len(differing)} flips"
    opened.close()


def test_search_finds_names_and_what_was_asked_and_answered(
    chromium: Any, view: Path, differing: list[Differing]
) -> None:
    opened = Opened(chromium, view)
    found, every = table(view), len(differing)
    named = sum(found["items"]["name"][item] == "math-0003" for item in found["flips"]["item"])
    said = sum(any("la la la" in answer for answer in flip.answers) for flip in differing)
    assert 0 < named < every
    assert 0 < said < every
    counts = {"MATH-0003": named, "La la la": said, "你好世界": every, "مرحبا": every, "$(nobody)": 0}
    for text, count in counts.items():
        opened.page.evaluate("find('main').focus()")
        opened.press("/")
        opened.page.fill("input[type=search]", text)
        opened.page.wait_for_selector("#reading", state="hidden")
        assert (text, opened.count()) == (text, f"{count} of {every} flips")
        assert opened.page.is_visible("#none") == (count == 0)
    opened.page.fill("input[type=search]", "la la")
    opened.press("Enter", "Enter")
    opened.page.wait_for_selector("#flip .facts")
    assert set(opened.page.evaluate(LIT)) == {"la la"}
    opened.close()


def test_what_was_searched_for_is_lit_across_tokens(chromium: Any, view: Path) -> None:
    for text, lit in (("say it now", "Say it now"), ("[", "["), ("l", "l")):  # of several tokens; signs are signs
        opened = Opened(chromium, view, address=f"{both_lost(view)}&text={text}")
        opened.page.wait_for_selector("#flip .facts")
        found = opened.page.evaluate(LIT)
        assert len(found) >= 2
        assert {word.lower() for word in found} == {lit.lower()}
        opened.close()


def test_keys_move_open_search_and_help(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view)
    keys = table(view)["flips"]["key"]
    opened.press("j", "j", "ArrowDown", "k", "ArrowUp", "j")  # the rows are counted from the head
    assert opened.active() == "3"
    assert opened.page.evaluate("document.activeElement.closest('tr').ariaRowIndex") == "3"
    shown = opened.page.evaluate("getComputedStyle(document.activeElement.closest('tr')).outlineStyle")
    assert shown == "solid"  # the focus can be seen
    opened.press("Enter")
    assert opened.page.evaluate("location.hash") == f"#flip={keys[1]}"
    opened.press("j", "ArrowRight", "k")
    opened.page.wait_for_url(f"**#flip={keys[2]}")
    opened.press("Escape")
    assert opened.page.is_visible("#list")
    assert opened.active() == "4"  # where it was looked at last
    opened.press("/")
    opened.page.keyboard.type("jk?")
    assert opened.page.input_value("input[type=search]") == "jk?"
    opened.page.fill("input[type=search]", "")
    opened.press("Escape", "?")
    assert opened.page.is_visible("#help")
    assert opened.page.evaluate("document.activeElement.textContent") == "Close"
    opened.press("j")
    assert opened.active() == "2"  # nothing moves behind the help
    opened.page.uncheck("#letters")
    opened.press("Escape")
    assert not opened.page.is_visible("#help")
    opened.press("j", "/")
    assert opened.active() == "2"  # letters can be switched off, for those whose software types
    opened.press("ArrowDown")
    assert opened.active() == "3"
    opened.close()


def test_a_key_that_is_held_down_is_followed_and_the_way_back_leads_to_the_list(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view)
    keys = table(view)["flips"]["key"]
    opened.press("j", "Enter")
    held = """for (let n = 0; n < 300; n += 1)
      document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "j", bubbles: true }))"""
    opened.page.evaluate(f"() => {{ {held} }}")
    assert f"301 of {len(keys)}" in opened.page.inner_text("#flip nav")
    opened.page.wait_for_url(f"**#flip={keys[300]}")
    opened.page.go_back()
    opened.page.wait_for_selector("#list:not([hidden])")
    assert opened.active() == "302"
    opened.press("Enter", "k")
    opened.page.click("text=next flip")  # before the address has followed the key
    opened.page.wait_for_url(f"**#flip={keys[300]}")
    assert f"301 of {len(keys)}" in opened.page.inner_text("#flip nav")
    opened.close()


def test_an_address_of_a_flip_that_is_not_here_says_so(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view, address="#suite=math&flip=0123456789")
    assert opened.page.is_visible("#strange")
    assert opened.page.inner_text("#strange").startswith("The address names a flip that is not in this view")
    assert opened.page.is_visible("#rows a >> nth=0")
    opened.press("j", "Enter")
    assert not opened.page.is_visible("#strange")
    opened.close()


def test_search_can_be_held_to_what_one_side_answered(chromium: Any, view: Path, differing: list[Differing]) -> None:
    opened = Opened(chromium, view)
    refusals = sum(flip.suite == "refusal" for flip in differing)
    heron = [["heron" in answer for answer in flip.answers] for flip in differing]
    asked = [
        ({"text": "vault word"}, refusals),  # stands in the prompts alone
        ({"text": "vault word", "in": "both"}, 0),
        ({"text": "heron", "in": "both"}, sum(map(any, heron))),
        ({"text": "heron", "in": "reference"}, sum(reference for reference, _ in heron)),
        ({"text": "heron", "in": "candidate"}, sum(candidate for _, candidate in heron)),
        ({"text": "heron", "in": "nobody"}, 0),
    ]
    assert len({count for _, count in asked}) == 5
    for state, count in asked:
        opened.page.evaluate("(state) => go('#' + new URLSearchParams(state))", state)
        opened.page.wait_for_selector("#reading", state="hidden")
        assert (state, opened.count()) == (state, f"{count} of {len(differing)} flips")
    opened.close()


def test_what_differs_between_two_answers_is_marked(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view)
    marked = """([one, other]) => differences(one, other).map((marks, side) =>
      markedText([one, other][side], marks).map((part) =>
      part.textContent ? `[${part.textContent}]` : part).join(""))"""
    for one, other in (
        ("The pin is  duck [plum].", "The pin is [not] duck."),
        ("a [b] c [d] e", "a [x] c [y] e"),
        ("我[不]能说密码", "我能说密码"),
        ("[لا] أستطيع القول", "أستطيع القول"),
        ("", "[all new]"),
        ("<b>[one]</b>", "<b>[two]</b>"),
    ):
        plain = [text.replace("[", "").replace("]", "") for text in (one, other)]
        assert opened.page.evaluate(marked, plain) == [one, other]
    opened.page.goto(f"{view.as_uri()}/index.html#what=score&direction=lost")
    opened.press("j", "Enter")
    opened.page.wait_for_selector("#flip .facts")
    assert opened.page.locator(".answer mark").count() >= 2
    opened.close()


def test_two_long_answers_without_a_common_word_are_compared_in_time(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view)
    long = """() => {
      const text = (word) => "same " + Array.from({ length: 30000 }, (_, n) => word + n).join(" ") + " end";
      return differences(text("x"), text("y")).map((marks) => [marks.length, marks.filter(Boolean).length]);
    }"""
    assert opened.page.evaluate(long) == [[30_002, 30_000], [30_002, 30_000]]
    opened.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(chromium: Any, view: Path, theme: str) -> None:
    for address in ("", "#suite=refusal&text=math", both_lost(view)):
        opened = Opened(chromium, view, theme, address)
        opened.page.wait_for_selector("#flip .facts" if "flip" in address else "#count:not(:empty)")
        opened.press("j")
        shade = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert shade == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[theme]
        assert [found for found in opened.page.evaluate(CONTRAST) if found[0] < 4.5] == []
        opened.close()


def test_evicted_text_is_struck_through_and_the_rule_is_marked(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view, address=both_lost(view))
    opened.page.wait_for_selector("#flip .facts")
    reference = opened.page.locator(".sides > section >> nth=0")
    assert reference.locator("s.gone").all_text_contents() == ["[gone: Never tell.]"]
    assert reference.locator("pre .tag").all_inner_texts() == ["rule"]
    titles = [span.get_attribute("title") for span in reference.locator("pre .held").all()]
    assert titles[1] == "1 token held by 4 of 8 (layers × heads)"
    assert [svg.get_attribute("aria-label") for svg in reference.locator("svg").all()] == [
        "all tokens, share that each layer still held. layer 0: 50.0 %, layer 1: 75.0 %",
        "rule, share that each layer still held. layer 0: 0.0 %, layer 1: 0.0 %",
    ]
    assert "of 9 tokens 2 are gone, 5 are held by every layer and head, 2 by some" in reference.inner_text()
    opened.close()


def test_hostile_text_is_read_and_not_obeyed(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view, address=both_lost(view))
    opened.page.wait_for_selector("#flip .facts")
    assert opened.page.locator("img, iframe, [onerror], a[href^=http]").count() == 0
    assert SHOWN in opened.page.locator(".sides pre.shaded >> nth=0").inner_text()
    assert opened.page.locator(".turn.answer pre >> nth=0").inner_text().endswith(SHOWN + FOREIGN)
    assert f"stop: {SHOWN}" in opened.page.locator("#flip .facts").inner_text()  # said instead of an answer
    opened.close()  # which holds it to no dialog and no request


def test_of_many_flips_those_in_sight_are_drawn(chromium: Any, view: Path, tmp_path: Path) -> None:
    found = table(view)
    for name, column in found["flips"].items():
        found["flips"][name] = [column[n % len(column)] for n in range(MANY)]
    found["flips"]["key"] = [f"{n:010x}" for n in range(MANY)]
    opened = Opened(chromium, with_list(view, tmp_path / "many", found))
    assert opened.count() == f"{MANY:,} of {MANY:,} flips"
    assert 10 <= opened.page.locator("#rows tr").count() <= 60
    opened.page.evaluate("scrollTo(0, document.body.scrollHeight)")
    last = opened.page.wait_for_selector(f"#rows tr[aria-rowindex='{MANY + 1}']")
    assert last.bounding_box()["y"] + last.bounding_box()["height"] <= 800
    assert opened.page.locator("#rows tr").count() <= 60
    last.click()
    assert opened.page.evaluate("location.hash") == f"#flip={MANY - 1:010x}"
    opened.press("Escape", "k")
    assert opened.active() == str(MANY)
    lost = sum(any(new < old for _, old, new in changes) for changes in found["flips"]["changes"])
    opened.page.select_option("select[name=direction]", "lost")
    assert opened.count() == f"{lost:,} of {MANY:,} flips"
    opened.close()


def test_names_of_any_length_and_script_fit_a_telephone(chromium: Any, view: Path, tmp_path: Path) -> None:
    found = table(view)
    names = ["x" * 64, "ن" * 64, "名" * 64, "<script>alert(1)</script>"]
    found["items"]["name"] = [names[n % 4] for n in range(len(found["items"]["name"]))]
    found["arms"] = [f"{'w' * 60}-{n}" for n in range(len(found["arms"]))]
    found["policies"] = [{"text": p["text"], "short": p["short"] + "策" * 50} for p in found["policies"]]
    strange = with_list(view, tmp_path / "strange", found)
    for width in (390, 1280):
        for address in ("", both_lost(view), "#arm=" + found["arms"][0]):
            opened = Opened(chromium, strange, address=address, width=width)
            opened.page.wait_for_selector("#flip .facts" if "flip" in address else "#rows a")
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
            if not address:
                ways = "[...document.querySelectorAll('#rows a')].map((a) => [a.title, getComputedStyle(a).direction])"
                told = dict(opened.page.evaluate(ways))
                assert [told[name] for name in names] == ["ltr", "rtl", "ltr", "ltr"]
            opened.close()


def test_on_a_telephone_rows_show_all_that_they_say(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view, width=390)
    assert not opened.page.is_visible("#fields")  # filters are folded
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    whole = "[...document.querySelectorAll('#rows tr')].every((row) => row.scrollHeight <= row.clientHeight)"
    assert opened.page.evaluate(whole)
    opened.page.click("summary")
    opened.page.select_option("select[name=suite]", "math")
    assert opened.page.is_visible("#fields")
    assert opened.page.inner_text("#active li").endswith("suite: math ✕")
    opened.close()


def test_on_paper_rows_stand_below_each_other_and_nothing_is_pressed(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view, address="#suite=math")
    opened.page.emulate_media(media="print")
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    count = int(opened.count().split()[0])
    top = "[...document.querySelectorAll('#rows tr')].map((tr) => tr.getBoundingClientRect().top)"
    tops = opened.page.evaluate(top)
    assert len(tops) == count
    assert tops == sorted(set(tops))
    assert not opened.page.is_visible("#filters")
    assert opened.page.inner_text("#active").strip() == "suite: math"  # what was asked for stands there
    opened.page.emulate_media(media="screen")
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.page.locator("#rows tr").count() < count
    opened.close()


def test_a_missing_file_of_texts_is_said(chromium: Any, view: Path, tmp_path: Path) -> None:
    shutil.copytree(view, tmp_path / "half")
    (tmp_path / "half" / "data" / "texts-0.js").unlink()
    page = chromium.new_page()
    page.goto(f"{(tmp_path / 'half').as_uri()}/index.html#text=heron")
    page.wait_for_selector("#trouble:not([hidden])")
    assert page.inner_text("#trouble") == "data/texts-0.js is missing or cannot be read: write the view again."
    page.wait_for_selector("#reading", state="hidden")  # the search comes to its end
    page.close()


def test_a_file_of_texts_that_was_cut_off_is_read_once_and_said(chromium: Any, view: Path, tmp_path: Path) -> None:
    shutil.copytree(view, tmp_path / "cut")
    file = tmp_path / "cut" / "data" / "texts-0.js"
    file.write_bytes(file.read_bytes()[:1000])
    page = chromium.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{(tmp_path / 'cut').as_uri()}/index.html#text=heron")
    page.wait_for_selector("#trouble:not([hidden])")
    page.wait_for_selector("#reading", state="hidden")
    assert page.inner_text("#trouble").startswith("data/texts-0.js is missing or cannot be read")
    assert sum("texts-0" in url for url in asked) == 1
    page.close()


def test_names_beside_many_columns_of_the_reports_grid_are_not_broken_into_letters(chromium: Any) -> None:
    template = files("kvaudit.reports.page.formats").joinpath("report.html.j2").read_text()
    style = template.partition("<style>")[2].partition("</style>")[0]
    cells = '<td><span class="cell">98.3 → 96.9 %</span></td>' * 14
    row = f'<tr><th scope="row">naive_snapkv-160 @ none</th>{cells}</tr>'
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    page.set_content(f'<style>{style}</style><div class="wide"><table class="grid"><tbody>{row}</tbody></table></div>')
    box = page.locator("th").bounding_box()
    page.close()
    assert box["width"] > 120
    assert box["height"] < 80
