"""Write the golden report again: python -m tests.golden_report (from the repository root, tests on the path)."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reports_synthetic import build, tiny

from kvaudit.reports.run import write_report


def golden_text(run):
    """report.md without the lines of the calibration, which have numbers of their own."""
    lines = (run / "report" / "report.md").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if "simulated audits" not in line)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = build(Path(folder) / "run", tiny())
        write_report(run)
        golden = Path(__file__).parent / "golden" / "tiny_report.md"
        golden.write_text(golden_text(run), encoding="utf-8")
