"""The rooms and their doors: imports point one way, and reports and suites never meet torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A room may import itself and the rooms of lower rank. Suites and reports stand aside: only the spine is below them.
RANK = {
    "audit.errors": 0, "audit.provenance": 1, "audit.records": 1, "audit.registry": 1,
    "audit.text": 1, "audit.inputs": 1, "audit.yaml_file": 1, "audit.spec": 2, "audit.spec_file": 2, "audit.runs": 2,
    "suites": 2, "reports": 2, "audit.draws": 2, "audit.degenerate": 2, "audit.progress": 2, "audit.intact": 2,
    "audit.gguf_header": 2, "audit.weights": 2, "audit.loading": 2,
    "audit.claims": 2,
    "audit.policies": 3, "audit.kv": 4, "audit.rendering": 3, "audit.chat": 4, "audit.embedded": 4, "audit.model": 5,
    "audit.decoding": 5, "audit.decoder": 5, "audit.sampler": 6,
    "audit.episodes": 7, "audit.training": 8, "audit.evaluate": 8, "audit.pretrain": 8, "audit.pipeline": 9,
    "audit.verify": 9, "audit.displacement": 9, "audit.launchers": 9, "audit.commands": 10,
    "audit.command_line": 10, "audit.cli_verdicts": 10, "audit.cli": 11,
}  # fmt: skip
SPINE = {
    "audit", "audit.errors", "audit.records", "audit.registry", "audit.text", "audit.yaml_file", "audit.inputs",
    "audit.provenance",
}  # fmt: skip
WITHOUT_TORCH = {"torch", "transformers", "safetensors", "tokenizers"}
FILES = sorted(path for top in ("audit", "suites", "reports") for path in (ROOT / top).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return next((name for end in (2, 1) if (name := ".".join(parts[:end])) in RANK), None)


def imports(path: Path, *, lazy: bool) -> set[str]:
    """What a file imports; with ``lazy`` also inside functions and under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_one_way(path: Path) -> None:
    module = module_of(path)
    room = room_of(module)
    if room is None:
        assert module == "audit", f"{module} belongs to no room; give it a rank"
        return
    upward = {name for name in imports(path, lazy=False) if (other := room_of(name)) and RANK[other] > RANK[room]}
    # each reads its own kind only: suites do not know reports, nor the other way round
    aside = {name for name in imports(path, lazy=False) if room in ("suites", "reports") and is_outside(name, room)}
    assert not upward | aside


def is_outside(name: str, room: str) -> bool:
    top = name.partition(".")[0]
    return top in ("audit", "suites", "reports") and top != room and name not in SPINE


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[len(ROOT.parts)] != "audit"], ids=module_of)
def test_suites_and_reports_never_import_torch(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path, lazy=True)} & WITHOUT_TORCH


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("audit.cli", {"torch", "transformers", "pandas", "matplotlib", "scipy", "numpy", "pydantic", "rich"}),
        ("audit.commands.report", {"torch", "transformers"}),
        ("suites.base", {"torch", "transformers", "pandas"}),
    ],
)
def test_importing_a_light_module_stays_light(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}} & {unwanted!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
