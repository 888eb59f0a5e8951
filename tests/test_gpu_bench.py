"""The bench of a GPU: parts end at their limits, nothing measured is lost, and a model travels in pieces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from bench import gpu, pieces

ROOT = Path(__file__).parent.parent


def part(script: str, limit: float = 60.0) -> gpu.Part:
    return gpu.Part("one", "One", [sys.executable, "-c", script], limit)


def test_a_part_that_runs_late_is_stopped_with_what_it_printed(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "SHORTEST", 0.0)
    late = part("import time; print('measured'); time.sleep(60)", limit=2.0)
    began = time.monotonic()
    (section,) = gpu.run_together([late], time.monotonic() + 60)
    assert time.monotonic() - began < 20
    assert not section.succeeded
    assert "stopped at its limit" in section.text
    assert "\nmeasured" in section.text


def test_a_part_without_time_is_named_and_not_begun() -> None:
    (section,) = gpu.run_together([part("print(1)")], time.monotonic() + 5)
    assert section == ("## One\n\nNot started: no time was left.", False)


def test_a_part_that_fails_shows_its_last_errors() -> None:
    first, second = gpu.run_together([part("1 / 0"), part("print('fine')")], time.monotonic() + 60)
    assert not first.succeeded
    assert "exit 1" in first.text
    assert "    ZeroDivisionError: division by zero" in first.text
    assert second.succeeded


def test_the_archive_has_everything_but_weights(tmp_path) -> None:
    for name in ("report/report.html", "records/one.jsonl", "checkpoints/dense/model.safetensors"):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    gpu.keep(tmp_path / "run", tmp_path)
    assert (tmp_path / "gpu-paired.html").read_text() == "report/report.html"
    with tarfile.open(tmp_path / "gpu-paired.tar.gz") as packed:
        assert sorted(packed.getnames()) == ["run/records/one.jsonl", "run/report/report.html"]


def test_an_archive_that_would_grow_too_large_leaves_the_largest_out(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu, "LARGEST", 20_000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "small.json").write_text("{}")
    (tmp_path / "run" / "large.jsonl").write_bytes(os.urandom(90_000))
    gpu.keep(tmp_path / "run", tmp_path)
    assert "left out of gpu-paired.tar.gz: large.jsonl" in capsys.readouterr().out
    with tarfile.open(tmp_path / "gpu-paired.tar.gz") as packed:
        assert packed.getnames() == ["run/small.json"]


def test_pieces_make_the_file_again(tmp_path) -> None:
    (tmp_path / "model").write_bytes(bytes(range(256)) * 10)
    assert pieces.main(["split", str(tmp_path / "model"), str(tmp_path / "cut"), "--size", "0.001"]) == 0
    assert len(list((tmp_path / "cut").glob("*.piece"))) == 3
    assert pieces.main(["join", str(tmp_path / "cut"), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again").read_bytes() == bytes(range(256)) * 10


@pytest.mark.parametrize(("harm", "said"), [(Path.unlink, "missing"), (lambda p: p.write_text("x"), "damaged")])
def test_a_piece_that_is_missing_or_damaged_is_named(tmp_path, capsys, harm, said: str) -> None:
    (tmp_path / "model").write_bytes(bytes(2500))
    pieces.split(tmp_path / "model", tmp_path / "cut", 1000)
    harm(tmp_path / "cut" / "001.piece")
    assert pieces.join(tmp_path / "cut", tmp_path / "again") == 1
    assert f"{said}: 001.piece" in capsys.readouterr().out
    assert not (tmp_path / "again").exists()


def test_every_wheel_has_a_pin() -> None:
    names = [line for line in (ROOT / "bench" / "gpu-wheels.txt").read_text().split("\n") if line and line[0] != "#"]
    pinned = re.findall("^(.*)==", (ROOT / "constraints.txt").read_text(), re.M)
    assert len(names) > 5
    assert set(names) <= set(pinned)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rehearsal_runs_every_part_and_keeps_the_paired_run(tmp_path) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bench.gpu", "--small", "--device", "cpu", "--minutes", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu-embedded.md").read_text(encoding="utf-8")
    assert page.count("s, exit 0.") == 13
    assert " failed: " not in page
    for policy in ("none", "streaming:budget=512", "kivi:bits=4"):
        assert page.count(f"| `{policy}` |") >= 6
    assert (tmp_path / "gpu-paired.html").is_file()
    with tarfile.open(tmp_path / "gpu-paired.tar.gz") as packed:
        names = packed.getnames()
    assert sum(name.endswith("telemetry.jsonl") for name in names) == 3
    assert sum(name.startswith("run/records/") and name.endswith(".jsonl") for name in names) == 12
