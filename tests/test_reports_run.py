"""The way of a run's records: decided once per command, the same whoever asks."""

from pathlib import Path

import pytest
from reports_synthetic import build, tiny
from typer.testing import CliRunner

import kvaudit.reports.run
from kvaudit.audit.cli import app
from kvaudit.reports.page.formats import html
from kvaudit.reports.verdict.decide import decide


@pytest.fixture
def run(tmp_path):
    return build(tmp_path / "run", tiny())


@pytest.fixture
def decisions(monkeypatch):
    """What was decided while the test ran."""
    found = []

    def counted(*args):
        found.append(args)
        return decide(*args)

    monkeypatch.setattr(kvaudit.reports.run, "decide", counted)
    return found


@pytest.mark.parametrize("command", ["gate", "report"])
def test_a_command_decides_once(run, decisions, command, monkeypatch):
    monkeypatch.setitem(html.FORMATS, "report.html", lambda page: "")  # its figures take seconds
    CliRunner().invoke(app, [command, str(run)])
    assert len(decisions) == 1


def test_only_three_ways_decide():
    """A run, each look of a run in rounds, and a comparison of two files; every other part is given a verdict."""
    root = Path(kvaudit.reports.run.__file__).parent.parent
    files = [path for top in ("core", "audit", "reports") for path in (root / top).rglob("*.py")]
    callers = {path.relative_to(root).as_posix() for path in files if " decide(" in path.read_text(encoding="utf-8")}
    callers |= {path.relative_to(root).as_posix() for path in files if "=decide(" in path.read_text(encoding="utf-8")}
    assert callers == {
        *("reports/run.py", "audit/runs/stages/rounds.py", "reports/page/compare_files.py", "reports/verdict/decide.py")
    }
