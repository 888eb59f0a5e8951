"""What a person waits for who asks nothing of a model: these commands load no torch, and each says so itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from reports_synthetic import Design, build

CODE = """
import sys
from kvaudit.audit.cli import main
sys.argv = ["kvaudit", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    code = end.code
heavy = [name for name in ("torch", "transformers", "safetensors") if name in sys.modules]
print("CODE", code, *heavy, file=sys.stderr)
"""
SPECS = {
    "policy": "name: x\nmodel: embedded\nevaluate: {policies: [snapkw]}\n",
    "key": "name: x\nmodel: embedded\nevaluat: {}\n",
    "suite": "name: x\nmodel: embedded\nevaluate: {policies: [none], suites: {refusals: {items: 4}}}\n",
    "loss": "name: x\nmodel: embedded\ntrain: {arms: [dense], seeds: [1], policy: none, suites: [math], loss: grpq}\n",
    "engine": "name: x\nmodel: embedded\nevaluate: {policies: [{engine: openvina}]}\n",
}


def loaded(*words: str, cwd: Path) -> tuple[int, list[str]]:
    """Exit code of a command, and the heavy libraries that its process had loaded at its end."""
    done = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True, cwd=cwd, check=False)
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("CODE ")]
    _, code, *heavy = told.split()
    return (0 if code == "None" else int(code)), heavy


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    design = Design(arms=("dense", "naive"), seeds=(1,), policies=("none",), suites=("refusal",), clusters=16, items=32)
    return build(tmp_path_factory.mktemp("light") / "run", design)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["check", "--help"],
        ["replay", "--help"],
        ["list", "suites"],
        ["list", "policies"],
        ["list", "engines"],
        ["list", "judges"],
        ["data"],
        ["init", "ci", "--out", "ci.yaml"],
    ],
    ids=" ".join,
)
def test_asking_what_there_is_loads_no_model_library(words: list[str], tmp_path: Path) -> None:
    assert loaded(*words, cwd=tmp_path) == (0, [])


@pytest.mark.parametrize("wrong", SPECS)
def test_a_mistake_in_a_spec_is_found_before_anything_heavy_is_loaded(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPECS[wrong])
    assert loaded("run", "spec.yaml", cwd=tmp_path) == (2, [])


@pytest.mark.parametrize("command", ["gate", "card"])
def test_a_verdict_needs_no_model_library(command: str, finished: Path, tmp_path: Path) -> None:
    code, heavy = loaded(command, str(finished), cwd=tmp_path)
    assert code in (0, 3, 4, 5, 6)
    assert heavy == []
