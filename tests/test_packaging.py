"""What is built and what is checked out works elsewhere: sdist, wheel, and a checkout without symlinks."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from reports_synthetic import build, tiny

from kvaudit.audit.cli import unmet_requirements

ROOT = Path(__file__).parent.parent
# what pyproject.toml leaves out of the wheel
LEFT_OUT = ("*.png", "quickstart.json")
PLACES = {"kvaudit": "kvaudit", "docs": "kvaudit/docs", "examples": "kvaudit/examples"}
# runs a module of the folder that it is given, with every other folder that holds kvaudit off the path
LAUNCH = """
import runpy, sys
from pathlib import Path
place, module, *words = sys.argv[1:]
sys.path[:] = [place, *(entry for entry in sys.path if not (Path(entry or ".") / "kvaudit").is_dir())]
import kvaudit
assert Path(kvaudit.__file__).is_relative_to(place), kvaudit.__file__
sys.argv = [module, *words]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
# imports every module; packages of others that are not installed may be missing
IMPORT_ALL = """
import importlib, pkgutil, kvaudit
for module in pkgutil.walk_packages(kvaudit.__path__, "kvaudit."):
    if module.name != "kvaudit.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert not error.name.startswith("kvaudit"), (module.name, error)
"""


def launched(place: Path, module: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a module of ``place`` from there."""
    command = [sys.executable, "-c", LAUNCH, str(place), module, *map(str, words)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist of the source tree; nothing is downloaded."""
    out = tmp_path_factory.mktemp("dist")
    words = ("--no-isolation", "--outdir", str(out), str(ROOT))
    done = subprocess.run([sys.executable, "-m", "build", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_of_the_sdist_holds_every_file_of_the_package(wheel: Path) -> None:
    wanted = set()
    for top, place in PLACES.items():
        files = (path for path in (ROOT / top).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        kept = (path for path in files if not any(path.match(pattern) for pattern in LEFT_OUT))
        wanted |= {f"{place}/{path.relative_to(ROOT / top).as_posix()}" for path in kept}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == wanted


def test_the_wheel_works_outside_of_the_source_tree(unpacked: Path, tmp_path: Path) -> None:
    policies = launched(unpacked, "kvaudit", "list", "policies")
    assert (policies.returncode, "snapkv" in policies.stdout) == (0, True), policies.stderr
    gate = launched(unpacked, "kvaudit", "gate", build(tmp_path / "run", tiny()))
    assert (gate.returncode, gate.stdout.startswith("FAIL (exit 3)")) == (3, True), gate.stderr


def test_a_checkout_without_symlinks_can_be_imported(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the tests run outside of a git checkout")
    words = ["git", "-c", "core.symlinks=false", "checkout-index", "--all", f"--prefix={tmp_path}{os.sep}"]
    subprocess.run(words, cwd=ROOT, check=True)
    assert (tmp_path / "audit").is_file(), "a link is a file that names its target"
    assert launched(tmp_path, "kvaudit", "--help").returncode == 0


@pytest.mark.slow
def test_every_module_of_a_checkout_without_symlinks_can_be_imported(tmp_path: Path) -> None:
    words = ["git", "-c", "core.symlinks=false", "checkout-index", "--all", f"--prefix={tmp_path}{os.sep}"]
    subprocess.run(words, cwd=ROOT, check=True)
    (tmp_path / "import_all.py").write_text(IMPORT_ALL)
    done = launched(tmp_path, "import_all")
    assert done.returncode == 0, done.stderr


def test_a_package_that_is_missing_or_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "needy-1.dist-info"
    folder.mkdir()
    needs = [
        "numpy>=1",
        "rich>=999",
        "no-such-package>=2",
        "typer>=999; extra == 'x'",
        "typer>=999; python_version < '3'",
    ]
    lines = ["Metadata-Version: 2.1", "Name: needy", "Version: 1", *(f"Requires-Dist: {text}" for text in needs)]
    (folder / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    old, missing = unmet_requirements("needy")
    assert old == f"rich>=999 is needed, {version('rich')} is installed"
    assert missing == "no-such-package>=2 is needed and not installed"
    assert unmet_requirements("no-such-package") == []
