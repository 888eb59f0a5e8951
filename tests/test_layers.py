"""The rooms and their doors: imports point one way, and reports and suites never meet torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# A room may import itself and the rooms of lower rank. Suites and reports stand aside: only the core is below them.
RANK = {
    "kvaudit.core": 0,
    "kvaudit.audit.policies": 1, "kvaudit.audit.scan": 1, "kvaudit.audit.cache": 2, "kvaudit.audit.replay": 3,
    "kvaudit.audit.sampling": 3, "kvaudit.audit.engines": 4, "kvaudit.audit.judges": 4, "kvaudit.audit.serving": 4,
    "kvaudit.audit.training": 5, "kvaudit.audit.runs": 6, "kvaudit.audit.rerun": 7,
    "kvaudit.audit.commands": 10, "kvaudit.audit.cli": 11,
    "kvaudit.suites": 1,
    "kvaudit.reports.records": 1, "kvaudit.reports.stats": 1, "kvaudit.reports.verdict": 2,
    "kvaudit.reports.sections": 3, "kvaudit.reports.page": 4, "kvaudit.reports.run": 5,
}  # fmt: skip
PACKAGE = ROOT / "kvaudit"
TOPS = ("core", "audit", "suites", "reports")  # the packages inside kvaudit
WITHOUT_TORCH = {"torch", "transformers", "safetensors", "tokenizers"}
FILES = sorted(path for top in TOPS for path in (PACKAGE / top).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return next((name for end in (3, 2) if (name := ".".join(parts[:end])) in RANK), None)


@cache
def imports(path: Path) -> frozenset[str]:
    """What a file imports, inside functions and under TYPE_CHECKING too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def test_imports_point_one_way() -> None:
    assert {module_of(path): wrong for path in FILES if (wrong := wrong_imports(path))} == {}


def wrong_imports(path: Path) -> set[str]:
    """The rooms that a file imports and may not."""
    module = module_of(path)
    room = room_of(module)
    if room is None:
        assert module in ("kvaudit.audit", "kvaudit.reports"), f"{module} belongs to no room; give it a rank"
        return set()
    rooms = {other for name in imports(path) if (other := room_of(name)) and other != room}
    upward = {other for other in rooms if RANK[other] >= RANK[room]}
    # each reads its own kind only: suites do not know reports, nor the other way round
    top = room.partition(".")[0]
    aside = {other for other in rooms if top in ("suites", "reports") and other.partition(".")[0] != top}
    return upward | (aside - {"kvaudit.core"})


def test_nothing_is_imported_through_the_links_at_the_top() -> None:
    """A checkout without symlinks has files in their place."""
    links = {"audit", "reports", "suites"}
    assert all((ROOT / name).is_symlink() for name in links)
    assert [path for path in FILES if links & {name.partition(".")[0] for name in imports(path)}] == []


def test_no_chain_of_imports_leads_back() -> None:
    known = {module_of(path) for path in FILES}
    TopologicalSorter({(name := module_of(path)): (imports(path) - {name}) & known for path in FILES}).prepare()


def test_suites_and_reports_never_import_torch() -> None:
    others = [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "audit"]
    found = {module_of(path): {name.split(".")[0] for name in imports(path)} & WITHOUT_TORCH for path in others}
    assert len(others) > 100
    assert {module: names for module, names in found.items() if names} == {}


def test_importing_a_light_module_stays_light() -> None:
    """One process imports one after the other, each with fewer things unwanted than the one before."""
    unwanted = {
        "kvaudit.audit.cli": ["torch", "transformers", "pandas", "numpy", "matplotlib", "scipy", "pydantic", "rich"],
        "kvaudit.core.spec": ["torch", "transformers", "pandas", "numpy"],
        "kvaudit.suites.base": ["torch", "transformers", "pandas"],
        "kvaudit.audit.commands.report": ["torch", "transformers"],
    }
    code = f"""
import importlib, sys
for module, names in {unwanted!r}.items():
    importlib.import_module(module)
    print(*(f"{{module}} imports {{name}}" for name in names if name in sys.modules), sep="\\n", end="")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
