"""Every parser under damaged and hostile files: a bounded number here, fifty thousand with -m slow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import Target, fuzz, fuzz_all

from kvaudit.core.errors import DataError


def test_every_parser_refuses_in_a_line_or_reads(capsys: pytest.CaptureFixture[str]) -> None:
    found = fuzz_all(500)
    wrong = [text for one in found.values() for text in one.wrong]
    with capsys.disabled():
        print(f"\nfuzz: {sum(one.cases for one in found.values())} cases, {len(wrong)} findings")
    assert wrong == []


def test_the_harness_sees_a_crash_a_silent_error_and_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.SECONDS", 0.01)
    whole = b"whole"

    def act(path: Path) -> None:
        body = path.read_bytes()
        if body == whole:
            return
        if len(body) > 300:
            raise DataError("")
        if len(body) < len(whole):
            raise KeyError("lost")
        while body != whole:
            pass

    wrong = " ".join(fuzz("t", Target([whole], "x", act), 40, tmp_path).wrong)
    assert "KeyError: \"'lost'\" at " in wrong
    assert "an error without a word" in wrong
    assert "more than 0.01 s" in wrong


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_thousand_damaged_files() -> None:
    """In a process of its own, for the peak of its memory."""
    command = [sys.executable, "-m", "fuzz", "50000"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    cases, findings, peak = re.search(r"(\d+) cases, (\d+) findings, peak memory ([\d.]+) GB", done.stdout).groups()  # type: ignore[union-attr]
    assert int(cases) >= 50_000
    assert (int(findings), done.returncode) == (0, 0)
    assert float(peak) < 1.0
