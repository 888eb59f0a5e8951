"""How large is the code, how plain are its names, how light are its commands, and how far does a record travel?

    python -m bench.house [RUN]                       # a table; rows about a run need a finished run folder
    python -m bench.house --docstrings 75 --seed 8    # random docstrings, for a reader who has not seen the code

Takes 2 minutes, since it builds a wheel; results: docs/results/bench.md.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import random
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
# names that do not tell what a value is
VAGUE = {
    *("found", "own", "told", "held", "said", "asked", "known", "given", "wanted", "again", "apart", "beside"),
    *("there", "one", "part", "other", "here", "what", "whole", "left", "heard", "meant", "seen"),
}
HEAVY = ("torch", "transformers", "pandas", "scipy", "matplotlib")


def sources(*tops: str) -> list[Path]:
    """Return the Python files under folders of the project, without following links."""
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py") if ".venv" not in path.parts)


def lines(paths: list[Path]) -> int:
    """Count all lines, blank ones included."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def comments_per_hundred(paths: list[Path]) -> float:
    """Return the number of comments per hundred lines; docstrings are no comments."""
    comments = 0
    for path in paths:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        comments += sum(token.type == tokenize.COMMENT for token in tokens)
    return 100 * comments / lines(paths)


def words(paths: list[Path]) -> int:
    """Count words as ``wc -w`` does."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def functions(paths: list[Path]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return all functions and methods."""
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def vague_names(paths: list[Path]) -> tuple[int, int]:
    """Count local assignments to a name in VAGUE, and all local assignments."""
    names = [
        node.id
        for function in functions(paths)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return sum(name in VAGUE for name in names), len(names)


def docstrings(paths: list[Path]) -> list[tuple[str, str]]:
    """Return every docstring whole, each behind its file and the header of its class and function."""
    texts = list[tuple[str, str]]()
    for path in paths:
        nodes: list[tuple[ast.AST, str]] = [(ast.parse(path.read_text(encoding="utf-8")), "")]
        while nodes:
            node, headers = nodes.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text, headers = ast.get_docstring(node), headers + _header(node)
                texts += [(f"{path.relative_to(ROOT)}\n{headers}", text)] if text else []
            nodes += [(child, headers) for child in ast.iter_child_nodes(node)]
    return texts


def _header(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) -> str:
    """Return the line that ``help`` would print above a docstring; nothing for a module."""
    match node:
        case ast.Module():
            return ""
        case ast.ClassDef():
            return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})\n"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){result}\n"


def files_entered(run: Path) -> tuple[int, int]:
    """Count files of kvaudit whose functions run from records to verdict, and from verdict to page."""
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


def command_cost(arguments: list[str]) -> tuple[float, list[str]]:
    """Run a command; returns its CPU seconds and the heavy libraries that it imported."""
    code = (
        "import sys, time; from kvaudit.audit.cli import main\n"
        f"sys.argv = ['kvaudit', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print('COST', time.process_time(), *loaded, file=sys.stderr)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    report = next(line for line in reversed(child.stderr.splitlines()) if line.startswith("COST"))
    _, seconds, *loaded = report.split()
    return float(seconds), loaded


def wheel_bytes() -> int:
    """Build a wheel and return its size; its files must be under kvaudit/."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--docstrings", type=int, default=0)
    parser.add_argument("--seed", type=int, default=8)
    arguments = parser.parse_args()
    code = sources(*TOPS)
    if arguments.docstrings:
        drawn = random.Random(arguments.seed).sample(docstrings(code), arguments.docstrings)
        print(*(f"{headers}{text}\n" for headers, text in drawn), sep="\n")
        return
    docs = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    vague, assignments = vague_names(code)
    print("| what | figure |\n|---|---:|")
    print(f"| lines, files installed | {lines(code):,}, {len(code)} |")
    longest = max((node.end_lineno or 0) - node.lineno + 1 for node in functions(code))
    print(f"| functions, lines of the longest | {len(functions(code)):,}, {longest} |")
    print(f"| local assignments, of them to a vague name | {assignments:,}, {vague} |")
    whats = sum(text.startswith("What ") for _, text in docstrings(code))
    print(f"| docstrings, of them beginning with What | {len(docstrings(code)):,}, {whats} |")
    if arguments.run:
        to_verdict, to_page = files_entered(arguments.run)
        print(f"| files entered from record to verdict, from verdict to page | {to_verdict}, {to_page} |")
    print(f"| lines of bench, tests | {lines(sources('bench')):,}, {lines(sources('tests')):,} |")
    print(f"| comments per 100 lines | {comments_per_hundred(code):.1f} |")
    print(f"| words of docs; of the README | {words(docs):,}; {words([ROOT / 'README.md']):,} |")
    started = time.perf_counter()
    print(f"| wheel, MB | {wheel_bytes() / 1e6:.2f} |")
    print(f"| building it, s | {time.perf_counter() - started:.0f} |")
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "wrong.yaml"
        wrong.write_text("name: x\nmodel: embedded\nevaluate: {policies: [snapkw]}\n", encoding="utf-8")
        commands = [["--help"], ["list", "suites"], ["list", "policies"], ["data"], ["run", str(wrong)]]
        commands += [["init", "ci", "--out", str(Path(folder) / "ci.yaml")]]
        commands += [[command, str(run)] for run in filter(None, [arguments.run]) for command in ("gate", "card")]
        for command_words in commands:
            seconds, loaded = command_cost(command_words)
            shown = " ".join(command_words).replace(folder + "/", "")
            print(f"| `kvaudit {shown}`, CPU s; loads | {seconds:.2f}; {', '.join(loaded) or 'none'} |", flush=True)


if __name__ == "__main__":
    main()
