"""The pages of a run's flips with every prompt shaded: what they weigh, and how long the browser takes to filter them.

Run: python -m bench.view RUN, after `kvaudit view RUN`. Answers that were not served again are given the shade of
another answer to the same item, so that all are drawn; needs playwright and a Chromium. A filter's time is the least of
three, since other programs want the processor too.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from kvaudit.core.shading import SHADING_FOLDER, Shading, read_shadings, write_shadings
from kvaudit.reports.drift.comparison import comparison_of
from kvaudit.reports.page.view.folder import RunView
from kvaudit.reports.records.load import load_run

FLIPS, BYTES, MILLISECONDS = 5_000, 15_000_000, 100  # what is asked of so many flips
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMED = """async () => {
  const went = (hash) => new Promise((done) => {
    const started = performance.now();
    const drawn = () => { document.body.offsetHeight; done(performance.now() - started); };
    addEventListener("hashchange", drawn, { once: true });
    location.hash = hash;
  });
  const fields = [...document.querySelectorAll("#filters select")];
  const filters = fields.flatMap(({ name, options }) => [...options].map(({ value }) => [name, value]));
  const texts = ["a", "refusal-0", "nothing has this name"].map((text) => ["text", text]);
  const times = [];
  for (const filter of [...filters.filter(([, value]) => value), ...texts]) {
    const three = [];
    for (let n = 0; n < 3; n += 1) {
      await went(`page=${2 + (n % 2)}`);
      three.push(await went(new URLSearchParams([filter])));
    }
    times.push(Math.min(...three));
  }
  return times;
}"""


def main() -> None:
    """Shade a copy of the run's pages whole, weigh it, and time every filter."""
    run = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "run"
        shutil.copytree(run, copied, ignore=shutil.ignore_patterns("view", "report", "checkpoints"))
        data = load_run(copied)
        pages = RunView(data, comparison_of(data.spec, data.records, data.provenance))
        shade_all(copied, pages)
        pages.write(out := Path(folder) / "view")
        weight, count = sum(path.stat().st_size for path in out.rglob("*.js")), len(pages.flips)
        print(f"{count} flips, shaded of those that lost something: {pages.shaded()}")
        print(
            f"{weight / 1e6:.1f} MB, {weight * FLIPS / count / 1e6:.1f} MB for {FLIPS} flips (at most {BYTES / 1e6:g})"
        )
        for flips in (count, FLIPS):
            cut(out, flips)
            times = sorted(filter_times(out))
            slow = f"median {statistics.median(times):.0f} ms, slowest {times[-1]:.0f} ms"
            print(f"{flips} flips, {len(times)} filters: {slow} (at most {MILLISECONDS} at {FLIPS})")


def shade_all(run: Path, pages: RunView) -> None:
    """Give every answer that was not served again the shade of one to the same item, or of any."""
    known: dict[str, Shading] = {}
    for path in sorted((run / SHADING_FOLDER).glob("*.json")):
        known |= {answer.item: shade for answer, shade in read_shadings(run, path.stem).items() if shade}
    if not known:
        raise SystemExit(f"no answer of {run} was shaded yet: kvaudit view {run} --shade 5 first")
    some = next(iter(known.values()))
    for unit, answers in pages.unshaded(len(pages.flips)).items():
        borrowed = {answer: known.get(answer.item, some) for answer in answers}
        write_shadings(run, unit, {**read_shadings(run, unit), **borrowed})


def cut(pages: Path, count: int) -> None:
    """Leave so many flips in the list, over and over where there are fewer."""
    path = pages / "data" / "flips.js"
    table = json.loads(path.read_text(encoding="utf-8").removeprefix("const VIEW = ").removesuffix(";\n"))
    for name, column in table["flips"].items():
        table["flips"][name] = [column[n % len(column)] for n in range(count)]
    path.write_text(f"const VIEW = {json.dumps(table)};\n", encoding="utf-8")


def filter_times(pages: Path) -> list[float]:
    """Milliseconds of every value of every filter, until the list is laid out."""
    path = next(found for name in BROWSERS if (found := shutil.which(name)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        page = browser.new_page()
        page.goto(f"{pages.as_uri()}/index.html")
        found: list[float] = page.evaluate(TIMED)
        browser.close()
    return found


if __name__ == "__main__":
    main()
