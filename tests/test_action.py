"""The GitHub action and the pre-commit hook: their steps, run as a runner runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]


def run_step(
    step: dict[str, Any], inputs: dict[str, str], folder: Path, beside: Path
) -> subprocess.CompletedProcess[str]:
    """Run one shell step, with programs in ``beside`` before all others."""
    given = {name: str(entry.get("default", "")) for name, entry in ACTION["inputs"].items()} | inputs

    def filled(text: str) -> str:
        text = re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: given[found[1]], text)
        return text.replace("${{ github.action_path }}", str(ROOT))

    told = {name: filled(value) for name, value in step["env"].items()}
    path = os.pathsep.join([str(beside), str(Path(sys.executable).parent), os.environ["PATH"]])
    # as a runner starts bash
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", filled(step["run"])]
    environment = os.environ | told | {"PATH": path}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(("setting", "code"), [("fp8", 3), ("auto", 0)])
def test_the_action_ends_as_its_command_does(setting: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text(f"vllm serve m --kv-cache-dtype {setting}\n", encoding="utf-8")
    done = run_step(STEPS[-1], {"command": "scan . --json 'a file.json'"}, tmp_path, tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "a file.json").is_file()


@pytest.mark.parametrize(("extras", "asked"), [("", "kvaudit"), ("openvino,serve", "kvaudit[openvino,serve]")])
def test_the_action_installs_its_own_version_with_the_pins(extras: str, asked: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "python"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$PIP_EXTRA_INDEX_URL"\n', encoding="utf-8")
    stand_in.chmod(0o755)
    done = run_step(STEPS[1], {"extras": extras}, tmp_path, tmp_path / "bin")
    words = done.stdout.splitlines()
    assert words[:6] == ["-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    assert words[6:] == [f"{asked} @ file://{ROOT}", "https://download.pytorch.org/whl/cpu"]


def test_every_input_is_used_and_every_one_used_is_declared() -> None:
    used = set(re.findall(r"\$\{\{ inputs\.([\w-]+) \}\}", (ROOT / "action.yml").read_text(encoding="utf-8")))
    assert used == set(ACTION["inputs"])


def test_the_hook_runs_an_existing_command(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text("vllm serve m --kv-cache-dtype fp8\n", encoding="utf-8")
    program = Path(sys.executable).parent / "kvaudit"
    command = [str(program), *HOOK["entry"].split()[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert HOOK["entry"].split()[0] == "kvaudit"
    assert done.returncode == 3
    assert "serve.sh:1" in done.stdout
