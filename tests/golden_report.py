"""Write the golden files again: python -m tests.golden_report (from the repository root).

tests/golden/tiny holds the report of records that a test makes up, tests/golden/embedded the records and the report of
a run of the model that ships. Both must stay as they are, byte for byte, while the code is rearranged.
"""

import re
import sys
import tempfile
from pathlib import Path

from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from reports_synthetic import build, tiny

from kvaudit.audit.cli import app
from kvaudit.reports.run import write_report

GOLDEN = Path(__file__).parent / "golden"
_REPORT = ("report.md", "verdict.json", "contrasts.csv", "card.md")
_VARIES = (
    (re.compile(r'"seconds": [0-9.e-]+'), '"seconds": 0'),
    (re.compile(r"\b20\d\d-\d\d-\d\d(T[0-9:]+(\+00:00|Z))?"), "DATE"),
    (re.compile(r"kvaudit \d+\.\d+\.\d+"), "kvaudit VERSION"),
)


def golden_texts(run):
    """File name -> its text, without times, versions and the lines of the calibration, which has tests of its own."""
    records = sorted((run / "records").glob("*.jsonl")) if run.name == "embedded" else []
    paths = [*records, *(run / "report" / name for name in _REPORT)]
    return {path.name: _comparable(path.read_text(encoding="utf-8")) for path in paths}


def _comparable(text):
    for pattern, word in _VARIES:
        text = pattern.sub(word, text)
    return "".join(line for line in text.splitlines(keepends=True) if "simulated audits" not in line)


def tiny_run(folder):
    """The made-up run with its report."""
    run = build(folder / "tiny", tiny())
    write_report(run)
    return run


def embedded_run(folder):
    """A run of the embedded model under two policies, with its report."""
    run = folder / "embedded"
    spec = GOLDEN / "embedded" / "spec.yaml"
    words = ("run", str(spec), "--out", str(run), "--workers", "1", "--threads", "1", "--anyway")
    CliRunner().invoke(app, words, catch_exceptions=False)
    return run


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for run in (tiny_run(Path(folder)), embedded_run(Path(folder))):
            for name, text in golden_texts(run).items():
                (GOLDEN / run.name / name).write_text(text, encoding="utf-8")
