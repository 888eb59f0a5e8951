"""Measure the code: its size, its language, how light commands are, and how many files a record passes through.

python -m bench.house [RUN]             # a table; RUN is a finished run folder, without one its rows are left out
python -m bench.house --docstrings 75 --seed 8    # docstrings drawn at random, for somebody who never saw the code
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
import zipfile
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
TOPS = ("kvaudit",)
IDEAS = ("dose", "churn")
# words that do not say what a value is
VAGUE = {
    *("found", "own", "told", "held", "said", "asked", "known", "given", "wanted", "again", "apart", "beside"),
    *("there", "one", "part", "other", "here", "what", "whole", "left", "heard", "meant", "seen"),
}
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


def functions(paths: list[Path]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods."""
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def vague_names(paths: list[Path]) -> tuple[int, int]:
    """Local assignments to a vague name, and all local assignments."""
    names = [
        node.id
        for function in functions(paths)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return sum(name in VAGUE for name in names), len(names)


def docstrings(paths: list[Path]) -> list[str]:
    """The first lines of all docstrings, with the place of each."""
    lines = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                name = getattr(node, "name", "module")
                lines += [f"{path.relative_to(ROOT)} {name}: {text.splitlines()[0]}"] if text else []
    return lines


def files_entered(run: Path) -> tuple[int, int]:
    """Files of kvaudit whose functions run from the records to the verdict, and from there to the pages."""
    from kvaudit.reports.records.load import load_run
    from kvaudit.reports.run import decide_run, write_decided_run

    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or class
        if event == "call" and is_function and str(ROOT / "kvaudit") in frame.f_code.co_filename:
            entered.add(frame.f_code.co_filename)

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(run, copy)
        counts = []
        sys.setprofile(note)
        try:
            findings = decide_run(data := load_run(copy))
            counts.append(len(entered))
            entered.clear()
            write_decided_run(data, findings)
            counts.append(len(entered))
        finally:
            sys.setprofile(None)
    return counts[0], counts[1]


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
    """Print the table, or docstrings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--docstrings", type=int, default=0)
    parser.add_argument("--seed", type=int, default=8)
    arguments = parser.parse_args()
    code = sources(*TOPS)
    if arguments.docstrings:
        print(*random.Random(arguments.seed).sample(docstrings(code), arguments.docstrings), sep="\n")
        return
    docs = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    vague, assignments = vague_names(code)
    print("| what | figure |\n|---|---:|")
    print(f"| lines, files of what is installed | {lines(code):,}, {len(code)} |")
    longest = max((node.end_lineno or 0) - node.lineno + 1 for node in functions(code))
    print(f"| functions, lines of the longest | {len(functions(code)):,}, {longest} |")
    print(f"| local assignments, of them to a vague name | {assignments:,}, {vague} |")
    whats = sum(line.partition(": ")[2].startswith("What ") for line in docstrings(code))
    print(f"| docstrings, of them beginning with What | {len(docstrings(code)):,}, {whats} |")
    if arguments.run:
        to_verdict, to_page = files_entered(arguments.run)
        print(f"| files entered from record to verdict, from verdict to page | {to_verdict}, {to_page} |")
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
        asked += [[command, str(run)] for run in filter(None, [arguments.run]) for command in ("gate", "card")]
        for one in asked:
            seconds, loaded = cost(one)
            shown = " ".join(one).replace(folder + "/", "")
            print(
                f"| `kvaudit {shown}`, CPU s; loads | {seconds:.2f}; {', '.join(loaded) or 'none of it'} |", flush=True
            )


if __name__ == "__main__":
    main()
