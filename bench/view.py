"""How fast are the pages of ``kvaudit view`` in a browser: first list, filters, search, scrolling?

    python -m bench.view [RECORDS] [FOLDER]

Takes some minutes and needs playwright and Chromium; results: docs/results/bench.md.

The artificial run is kept in FOLDER if one is given; 600,000 records give about 100,000 flips. A time is the best of
three, since other programs use the processor too; the first search, which reads every file of texts, is timed once.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from bench.report import make_run
from kvaudit.reports.page.view.folder import RunView
from kvaudit.reports.records.load import load_run
from kvaudit.reports.verdict.comparison import comparison_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TARGET = 100  # milliseconds, too short to be noticed
# from setting the address's filters until the list is laid out
TIMED = """async (states) => {
  const times = [];
  for (const state of states) {
    const three = [];
    for (let n = 0; n < 3; n += 1) {
      go("#");
      await new Promise(requestAnimationFrame);
      const started = performance.now();
      go("#" + new URLSearchParams([state]));
      document.body.offsetHeight;
      three.push(performance.now() - started);
    }
    times.push(Math.min(...three));
  }
  return times;
}"""
FILTERS = """[...document.querySelectorAll("#filters select")]
  .flatMap(({ name, options }) => [...options].map(({ value }) => [name, value])).filter(([, value]) => value)"""
# time to the first matching names, time until all texts are read, and the longest pause of the page meanwhile
SEARCHED = """async (text) => {
  let [longest, last] = [0, performance.now()];
  const beat = new MessageChannel();
  let going = true;
  beat.port1.onmessage = () => {
    const now = performance.now();
    [longest, last] = [Math.max(longest, now - last), now];
    if (going) beat.port2.postMessage(0);
  };
  beat.port2.postMessage(0);
  const started = performance.now();
  go("#" + new URLSearchParams({ text }));
  document.body.offsetHeight;
  const first = performance.now() - started;
  while (read.files < FILES) await new Promise((done) => setTimeout(done, 5));
  going = false;
  return [first, performance.now() - started, longest];
}"""
# frame times of a hundred jumps through the whole list
SCROLLED = """async () => {
  go("#");
  const frames = [];
  const whole = document.body.scrollHeight;
  for (let n = 1; n <= 100; n += 1) {
    const started = performance.now();
    scrollTo(0, whole * n / 100);
    drawRows();
    document.body.offsetHeight;
    frames.push(performance.now() - started);
    await new Promise(requestAnimationFrame);
  }
  return frames;
}"""


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 600_000
    with tempfile.TemporaryDirectory() as folder:
        run = Path(sys.argv[2] if len(sys.argv) > 2 else folder) / f"run-{count}"
        if not run.is_dir():
            print(f"made {make_run(run, count)} records in {run}")
        started = time.perf_counter()
        data = load_run(run)
        pages = RunView(data, comparison_of(data.spec, data.records, data.provenance))
        pages.write(out := run / "view")
        weight = sum(path.stat().st_size for path in out.rglob("*.js")) / 1e6
        seconds = time.perf_counter() - started
        print(f"{len(pages.flips)} flips, {weight:.0f} MB, written in {seconds:.0f} s (loading the run included)")
        time_in_browser(out)


def time_in_browser(pages: Path) -> None:
    """Print the milliseconds of everything that a reader waits for."""
    path = next(path for name in BROWSERS if (path := shutil.which(name)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        first_lists = [time_first_list(browser.new_page(), pages) for _ in range(3)]
        print(f"first list: {min(first_lists):.0f} ms")
        page = browser.new_page()
        time_first_list(page, pages)
        print_times("filter", page.evaluate(TIMED, page.evaluate(FILTERS)))
        print_times("scroll", page.evaluate(SCROLLED))
        names, whole, longest = page.evaluate(SEARCHED, "vault word")
        print(f"first search: names {names:.0f} ms, all texts {whole:.0f} ms, longest pause {longest:.0f} ms")
        print_times(
            "search", page.evaluate(TIMED, [["text", text] for text in ("a", "heron", "000123", "no one says this")])
        )
        browser.close()


def time_first_list(page: Any, pages: Path) -> float:
    """Return the milliseconds from requesting the page until its first rows are painted."""
    page.goto(f"{pages.as_uri()}/index.html")
    page.wait_for_selector("#rows a")
    painted = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    loaded = "performance.timing.loadEventEnd - performance.timing.navigationStart"
    return float(page.evaluate(f"Math.max({painted}, {loaded})"))


def print_times(title: str, times: list[float]) -> None:
    """Print the median and the longest of some times."""
    middle, longest = statistics.median(times), max(times)
    print(f"{title}: {len(times)}, median {middle:.0f} ms, longest {longest:.0f} ms (target {TARGET})")


if __name__ == "__main__":
    main()
