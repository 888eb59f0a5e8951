"""The pages of a run's flips in a real browser: they open from disk, filter, can be read by all, and obey no text."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reports_synthetic import Design, build, policy

from kvaudit.core.shading import ALL, Shading, write_shadings
from kvaudit.reports.drift.comparison import comparison_of
from kvaudit.reports.page.view.folder import RunView
from kvaudit.reports.records.load import load_run

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, which stands among the dev extra")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SNAP = policy("snapkv", 96)
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&amp;<a href=http://evil.example>\u202e\x1b]0;x\x07\u2028${1}"
SHOWN = "</script><img src=x onerror=alert(1)>\"'&amp;<a href=http://evil.example>⟨U+202E⟩␛]0;x␇⟨U+2028⟩${1}"
MANY = 5_000
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


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages with hostile text in answers, prompts and tokens, and a shade for every answer that lost something."""
    arms, drops = ("dense", "naive"), {("naive", "refusal"): 0.4, ("naive", "math"): 0.4}
    design = Design(
        arms=arms, seeds=(1,), policies=("none", SNAP), suites=("refusal", "math"), clusters=8, items=48, drops=drops,
        serving={SNAP: 0.2}, hostile=HOSTILE,
    )  # fmt: skip
    run = build(tmp_path_factory.mktemp("browser") / "run", design)
    data = load_run(run)
    pages = RunView(data, comparison_of(data.spec, data.records, data.provenance))
    for unit, answers in pages.unshaded(10**6).items():
        write_shadings(run, unit, dict.fromkeys(answers, shading()))
    pages.write(run / "view")
    return run / "view"


def shading() -> Shading:
    return Shading(
        pieces=["<|system|>", "Never", " tell.", HOSTILE, "<|user|>", "Say", " it", " now.", "<|end|>"],
        roles=["format", "system", "system", "system", "format", "user", "user", "user", "format"],
        held=[8, 0, 0, 4, 8, 1, 8, 8, 8],
        heads=8,
        depth={ALL: [0.5, 0.75], "rule": [0.0, 0.0]},
        marks={"rule": [1, 2]},
    )


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium is installed ({', '.join(BROWSERS)})")
    unboxed = ["--no-sandbox"] if os.geteuid() == 0 else []  # as root it starts in no other way
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=unboxed)
        yield browser
        browser.close()


class Opened:
    """A page, with all that it asked for and complained of."""

    def __init__(self, browser: Any, folder: Path, theme: str = "light", address: str = "") -> None:
        self.page = browser.new_page(color_scheme=theme)
        self.page.set_default_timeout(10_000)
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        for event in ("console", "pageerror", "dialog"):
            self.page.on(event, lambda what: self.said.append(str(what)))
        self.folder = folder.as_uri()
        self.page.goto(f"{self.folder}/index.html{address}")

    def count(self) -> str:
        return str(self.page.inner_text("#count"))

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


def test_it_opens_from_disk_and_is_filtered_by_keyboard(chromium: Any, view: Path) -> None:
    opened = Opened(chromium, view)
    found = table(view)
    every = len(found["flips"]["key"])
    assert opened.count() == f"{every} of {every} flips"
    opened.page.focus("select[name=suite]")
    opened.page.keyboard.type("math")
    maths = [found["items"]["suite"][item] == "math" for item in found["flips"]["item"]]
    opened.page.wait_for_function("location.hash === '#suite=math'")
    assert opened.count() == f"{sum(maths)} of {every} flips"
    opened.page.focus("#rows a")
    name = opened.page.inner_text("#rows a >> nth=0")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("#flip .facts")
    assert opened.page.evaluate("document.activeElement.textContent") == name
    opened.page.go_back()
    opened.page.wait_for_selector("#list:not([hidden])")
    assert opened.page.evaluate("document.activeElement.id") == "main"
    opened.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(chromium: Any, view: Path, theme: str) -> None:
    for address in ("", both_lost(view)):
        opened = Opened(chromium, view, theme, address)
        opened.page.wait_for_selector("#flip .facts" if address else "#rows a")
        shade = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert shade == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[theme]
        assert [found for found in opened.page.evaluate(CONTRAST) if found[0] < 4.5] == []
        opened.close()


def test_what_is_gone_is_struck_and_said_and_the_rule_is_marked(chromium: Any, view: Path) -> None:
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
    assert opened.page.locator(".turn.answer pre >> nth=0").inner_text().endswith(SHOWN)
    assert f"stop: {SHOWN}" in opened.page.locator("#flip .facts").inner_text()  # said instead of an answer
    opened.close()  # which holds it to no dialog and no request


def test_five_thousand_flips_are_listed_and_filtered(chromium: Any, view: Path, tmp_path: Path) -> None:
    found, many = table(view), tmp_path / "many"
    shutil.copytree(view, many)
    for name, column in found["flips"].items():
        found["flips"][name] = [column[n % len(column)] for n in range(MANY)]
    found["flips"]["key"] = [f"{n:010x}" for n in range(MANY)]
    (many / "data" / "flips.js").write_text(f"const VIEW = {json.dumps(found)};\n", encoding="utf-8")
    opened = Opened(chromium, many)
    assert opened.count() == "5,000 of 5,000 flips"
    lost = sum(any(new < old for _, old, new in changes) for changes in found["flips"]["changes"])
    opened.page.select_option("select[name=direction]", "lost")
    opened.page.wait_for_function("location.hash === '#direction=lost'")
    assert opened.count() == f"{lost:,} of 5,000 flips"
    assert opened.page.locator("#rows tr").count() == 50
    opened.close()
