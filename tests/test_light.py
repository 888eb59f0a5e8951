"""Commands that need no model load no torch: several are called in one process, which says what each has loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from reports_synthetic import Design, build

CODE = """
import json, sys
from kvaudit.audit.cli import main
HEAVY = ("torch", "transformers", "safetensors")
for words in json.loads(sys.argv[1]):
    before = {name for name in HEAVY if name in sys.modules}
    sys.argv = ["kvaudit", *words]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    print("CODE", code, *(name for name in HEAVY if name in {*sys.modules} - before), file=sys.stderr)
"""
ASKED = {
    " ".join(words): words
    for words in (
        ["--help"],
        ["check", "--help"],
        ["replay", "--help"],
        ["list", "suites"],
        ["list", "policies"],
        ["list", "engines"],
        ["list", "judges"],
        ["data"],
        ["init", "ci", "--out", "ci.yaml"],
    )
}
SPECS = {
    "policy": "name: x\nmodel: embedded\nevaluate: {policies: [snapkw]}\n",
    "key": "name: x\nmodel: embedded\nevaluat: {}\n",
    "suite": "name: x\nmodel: embedded\nevaluate: {policies: [none], suites: {refusals: {items: 4}}}\n",
    "loss": "name: x\nmodel: embedded\ntrain: {arms: [dense], seeds: [1], policy: none, suites: [math], loss: grpq}\n",
    "engine": "name: x\nmodel: embedded\nevaluate: {policies: [{engine: openvina}]}\n",
}


Loaded = tuple[int, list[str]]


def loaded(commands: Sequence[Sequence[str]], cwd: Path) -> list[Loaded]:
    """Exit codes of commands, and the heavy libraries that each of them loaded."""
    words = [sys.executable, "-c", CODE, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, check=False)
    told = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("CODE ")]
    assert len(told) == len(commands), done.stderr
    return [(int(code), heavy) for code, *heavy in told]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    design = Design(arms=("dense", "naive"), seeds=(1,), policies=("none",), suites=("refusal",), clusters=16, items=32)
    return build(tmp_path_factory.mktemp("light") / "run", design)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    return dict(zip(ASKED, loaded([*ASKED.values()], tmp_path_factory.mktemp("asked")), strict=True))


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    folder = tmp_path_factory.mktemp("mistaken")
    for name, text in SPECS.items():
        (folder / f"{name}.yaml").write_text(text)
    return dict(zip(SPECS, loaded([["run", f"{name}.yaml"] for name in SPECS], folder), strict=True))


@pytest.mark.parametrize("words", ASKED)
def test_asking_what_there_is_loads_no_model_library(words: str, asked: dict[str, Loaded]) -> None:
    assert asked[words] == (0, [])


@pytest.mark.parametrize("wrong", SPECS)
def test_a_mistake_in_a_spec_is_found_before_anything_heavy_is_loaded(wrong: str, mistaken: dict[str, Loaded]) -> None:
    assert mistaken[wrong] == (2, [])


def test_a_verdict_needs_no_model_library(finished: Path, tmp_path: Path) -> None:
    for code, heavy in loaded([[command, str(finished)] for command in ("gate", "card")], tmp_path):
        assert code in (0, 3, 4, 5, 6)
        assert heavy == []
