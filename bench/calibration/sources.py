"""The source files on which a calibration depends, and a hash that changes only with their code.

A calibration holds for the statistics that it simulated. The listed files decide a simulated event; the hash ignores
comments, docstrings and blank lines. Used by bench.calibration and tests/test_calibration_command.py.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from importlib.resources import files

SOURCES = (
    "adjudication.py",
    "betting.py",
    "clustered.py",
    "effect.py",
    "mover.py",
    "ratio.py",
    "rule.py",
    "seeds.py",
    "shares.py",
    "signflip.py",
    "tango.py",
)


def source_hashes() -> dict[str, str]:
    """Return the hash of each statistics file as it is installed."""
    folder = files("kvaudit.reports.stats")
    return {name: code_hash((folder / name).read_text(encoding="utf-8")) for name in SOURCES}


def code_hash(source: str) -> str:
    """Return the sha256 of the code alone."""
    return hashlib.sha256(code_only(source).encode()).hexdigest()


def code_only(source: str) -> str:
    """Return source without comments, docstrings, blank lines and trailing spaces."""
    lines: list[str] = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for first, last in _docstrings(ast.parse(source)):
        lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _docstrings(tree: ast.Module) -> list[tuple[int, int]]:
    """Return the first and last line of each docstring."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            found.append((first.lineno, first.end_lineno or first.lineno))
    return found
