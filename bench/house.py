"""How large the house is, how light its doors are, and how many files an idea touches.

    python -m bench.house [RUN]

RUN is a finished run folder for `gate` and `card`; without one they are left out. Every figure is of this clone.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tempfile
import time
import tokenize
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOPS = ("kvaudit",)
IDEAS = ("dose", "churn")
HEAVY = ("torch", "transformers", "pandas", "scipy", "matplotlib")


def sources(*tops: str) -> list[Path]:
    """Python files under folders of the project, links not followed."""
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py") if ".venv" not in path.parts)


def lines(paths: list[Path]) -> int:
    """All lines, blank ones too."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def comments_per_hundred(paths: list[Path]) -> float:
    """Lines with a comment among a hundred lines of code; docstrings are neither."""
    found = 0
    for path in paths:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        found += sum(token.type == tokenize.COMMENT for token in tokens)
    return 100 * found / lines(paths)


def words(paths: list[Path]) -> int:
    """Words as ``wc -w`` counts them."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def arrows_up() -> int:
    """Files of the ground floor, of suites and of reports that import what stands above or beside them."""
    above = {"core": ("audit", "suites", "reports"), "suites": ("audit", "reports"), "reports": ("audit", "suites")}
    return sum(
        any(name.startswith(f"kvaudit.{other}") for other in others for name in imported(path))
        for top, others in above.items()
        for path in sources(f"kvaudit/{top}")
    )


def imported(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def naming(word: str) -> int:
    """Files of the report that name an idea."""
    return sum(bool(re.search(rf"\b{word}\b", path.read_text(encoding="utf-8"))) for path in sources("kvaudit/reports"))


def cost(arguments: list[str]) -> tuple[float, list[str]]:
    """CPU seconds of a command in a process of its own, and what it loaded of the heavy libraries."""
    code = (
        "import sys, time; from kvaudit.audit.cli import main\n"
        f"sys.argv = ['kvaudit', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print('COST', time.process_time(), *loaded, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    told = next(line for line in reversed(done.stderr.splitlines()) if line.startswith("COST"))
    _, seconds, *loaded = told.split()
    return float(seconds), loaded


def wheel_bytes() -> int:
    """Size of the wheel that pip builds; what is in it must lie under kvaudit/."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)]
        subprocess.run(command, check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        names = set(zipfile.ZipFile(wheel).namelist())
        tops = {name.partition("/")[0] for name in names}
        assert all(name == "kvaudit" or name.endswith(".dist-info") for name in tops), tops
        assert {"kvaudit/py.typed", "kvaudit/examples/audit.yaml", "kvaudit/docs/check-a-setting.md"} <= names
        return wheel.stat().st_size


def main() -> None:
    """Print a table."""
    docs = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    code = sources(*TOPS)
    print("| what | figure |\n|---|---:|")
    print(f"| lines of what is installed | {lines(code):,} |")
    print(f"| lines of bench, tests | {lines(sources('bench')):,}, {lines(sources('tests')):,} |")
    print(f"| comments per 100 lines | {comments_per_hundred(code):.1f} |")
    print(f"| words of docs; of the README | {words(docs):,}; {words([ROOT / 'README.md']):,} |")
    print(f"| files that import upward or aside | {arrows_up()} |")
    for idea in IDEAS:
        print(f"| files of the report that name {idea} | {naming(idea)} |")
    started = time.perf_counter()
    print(f"| wheel, MB | {wheel_bytes() / 1e6:.2f} |")
    print(f"| building it, s | {time.perf_counter() - started:.0f} |")
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "wrong.yaml"
        wrong.write_text("name: x\nmodel: embedded\nevaluate: {policies: [snapkw]}\n", encoding="utf-8")
        asked = [["--help"], ["list", "suites"], ["list", "policies"], ["data"], ["run", str(wrong)]]
        asked += [["init", "ci", "--out", str(Path(folder) / "ci.yaml")]]
        asked += [[command, run] for run in sys.argv[1:] for command in ("gate", "card")]
        for one in asked:
            seconds, loaded = cost(one)
            shown = " ".join(one).replace(folder + "/", "")
            print(
                f"| `kvaudit {shown}`, CPU s; loads | {seconds:.2f}; {', '.join(loaded) or 'none of it'} |", flush=True
            )


if __name__ == "__main__":
    main()
