"""Comparison of mathematical answers: as numbers or formulas if both can be computed, else as text."""

from __future__ import annotations

import cmath
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

LONGEST = 300  # characters; a longer text is not compared
_TOLERANCE = 1e-9  # relative to the larger magnitude
_BRACES = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # one level inside
_BOXED = re.compile(r"\\f?boxed\s*" + _BRACES.replace(r"\{[^{}]*\}", r"\{(?:[^{}]|\{[^{}]*\})*\}"))
_STATED = re.compile(r"answer\s*(?:is|:|=)([^\n]*\S)", re.IGNORECASE)
_DOLLARS = re.compile(r"\$([^$\n]+)\$")
_DELIMITERS = re.compile(r"\\[()\[\]]|\$\$")  # LaTeX's other delimiters of a formula
_NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)")
_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:left|right|displaystyle|[!,;:])", ""),
        (r"\{,\}", ","),
        (r"(?<!\\)\$|\\\$|\\?%|\*\*", ""),  # currency, percent signs and bold type
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\?°|\\degree", ""),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),  # \frac12
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*" + _BRACES + r")\s*(\w)", r"\1{\3}"),
        (r"\\sqrt\s*(\d|[a-z])", r"\\sqrt{\1}"),
        (r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?\s*$", ""),  # a unit
        (r"\\(?:text|mbox|mathrm|textbf|mathbf)\{([^{}]*)\}", r" \1 "),
        (r"(?<=[\d}])\s+(?!and\b)[A-Za-z]{3,}[\w ^]*$", ""),  # a unit in words
        (r"_\{(\w+)\}", r"_\1"),
        (r"\s+(?:and|or)\s+", ","),
        (
            r"(?<=\d),(?=\d{3}(?:\D|$))(?<!\(\d,)(?<!\(\d\d,)(?<!\(\d\d\d,)",
            "",
        ),  # thousands separators, but not in a pair
        (r"\\cdot|\\times", "*"),
        (r"\\leq?\b", "<="),
        (r"\\geq?\b", ">="),
        (r"−|–", "-"),
    )
)


def final_answer(text: str) -> str | None:
    """Return a text's final answer; None if there is none.

    It is the content of the last LaTeX box; else the text after the last "answer is"; else the last formula between
    dollar signs; else the last number.
    """
    if boxes := _BOXED.findall(text):
        return str(boxes[-1]).strip() or None
    text = _DELIMITERS.sub("$", text)
    if statements := _STATED.findall(text):
        statement = str(statements[-1]).split(". ")[0].lstrip(" :*").rstrip(" :*.")  # keep the leading point of .5
        if statement:  # if not, the answer is on the next line
            return statement
    if formulas := _DOLLARS.findall(text):
        return str(formulas[-1]).strip() or None
    return numbers[-1] if (numbers := _NUMBER.findall(text)) else None


def same_answer(answer: str, right: str) -> bool:
    """Return whether an answer equals the right one: as number, formula, list, pair, interval, matrix or text."""
    if max(len(answer), len(right)) > LONGEST:
        return False
    first, second = _parse(answer), _parse(right)
    if (first.shape, len(first.parts)) != (second.shape, len(second.parts)):
        return False
    if first.shape == _LIST:  # for example of roots; the order is free
        rest = list(second.parts)
        for part in first.parts:
            match = next((candidate for candidate in rest if _are_equal(part, candidate)), None)
            if match is None:
                return False
            rest.remove(match)
        return True
    return all(map(_are_equal, first.parts, second.parts))


@cache
def has_algebra() -> bool:
    """Return whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def equal_by_algebra(answer: str, right: str) -> bool | None:
    """Return whether computer algebra (math-verify) finds two answers equal; None if it cannot decide.

    It is meant for answers that ``same_answer`` cannot compute. The result is None, too, if math-verify is not
    installed. It takes at most 5 s, and works in the main thread only.
    """
    # algebra adds nothing if both answers were computed, or if ``answer`` is no formula
    if _is_computable(right) and ("\\" not in answer or _is_computable(answer)):
        return None
    if len(answer) > LONGEST or not has_algebra():
        return None
    from math_verify import parse, verify

    return bool(verify(parse(f"${right}$"), parse(f"${answer}$")))


def _is_computable(text: str) -> bool:
    return len(text) <= LONGEST and all(_value(part, _POINTS[0]) is not None for part in _parse(text).parts)


class _Answer(NamedTuple):
    shape: str  # the kind of brackets, _LIST, or a matrix with the lengths of its rows
    parts: tuple[str, ...]


_LIST = "list"


def _parse(text: str) -> _Answer:
    text = _normalise_notation(text)
    matrix = re.fullmatch(r"\\begin\{[a-z]?matrix\}(.*)\\end\{[a-z]?matrix\}", text, re.DOTALL)
    if matrix:
        rows = [row.split("&") for row in re.split(r"\\\\", matrix[1])]
        return _Answer(f"matrix {[len(row) for row in rows]}", tuple(cell.strip() for row in rows for cell in row))
    text = text.replace("\\{", "").replace("\\}", "")  # a set counts as a list
    if text.count("\\pm") == 1:
        text = ",".join(text.replace("\\pm", sign) for sign in "+-")
    parts = _split(text)
    if len(parts) == 1 and text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        inside = _split(text[1:-1])
        if len(inside) > 1:
            return _Answer(text[0] + text[-1], tuple(inside))
    return _Answer(_LIST, tuple(parts))


def _normalise_notation(text: str) -> str:
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = text.strip().rstrip(".").strip()
    return re.sub(r"^\\?[A-Za-z]\w?\s*(?:=|\\in\b)\s*(?=[^=]+$)", "", text)  # x = 5 becomes 5


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for mark in text:
        depth += (mark in "([{") - (mark in ")]}")
        if mark == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += mark
    return [part.strip() for part in parts]


def _are_equal(first: str, second: str) -> bool:
    if _normalise(first) == _normalise(second):
        return True
    for point in _POINTS:
        a, b = _value(first, point), _value(second, point)
        if a is None or b is None or not cmath.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * 1e-3):
            return False
    return True


def _normalise(text: str) -> str:
    choice = re.fullmatch(r"\s*\(([A-Z])\)\s*", text)  # (A) equals A
    return re.sub(r"\s+", "", choice[1] if choice else text).casefold()


# Formulas are equal if they agree at both points: a point gives the letters values start + step * position in alphabet.
_POINTS = ((0.7316, 1.3), (1.9147, 0.7))
_FORMULA_PIECE = re.compile(r"\s*(\d+\.?\d*|\.\d+|\\[A-Za-z]+|[A-Za-z]{3,}|[A-Za-z]|<=|>=|.)", re.DOTALL)
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sqrt": cmath.sqrt, "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "ln": cmath.log, "log": cmath.log10,
    "exp": cmath.exp, "cot": lambda x: 1 / cmath.tan(x), "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
}  # fmt: skip
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def _value(text: str, point: tuple[float, float]) -> complex | None:
    """Return the value of a formula or equation where its variables have the values that ``point`` determines.

    An equation's value is the squared difference of its sides. The result is None if the text is neither a formula nor
    an equation, or if the value is too large for a float.
    """
    sides = re.split(r"(?<![<>])=", text)
    if len(sides) > 2:
        return None
    try:
        value, *right = [_Formula(side, point).evaluate() for side in sides]
        # an equation is compared by the difference of its sides, squared to ignore its sign
        value = (value - right[0]) ** 2 if right else value
        return value if math.isfinite(abs(value)) else None
    except (ValueError, ArithmeticError, RecursionError):
        return None


class _Formula:
    """A recursive-descent evaluator of formulas: sums of products of powers of numbers, variables and brackets."""

    def __init__(self, text: str, point: tuple[float, float]) -> None:
        self._pieces: Sequence[str] = [piece for piece in _FORMULA_PIECE.findall(text.strip()) if piece.strip()]
        self._at, self._point = 0, point

    def evaluate(self) -> complex:
        value = self._sum()
        if self._next() is not None:
            raise ValueError(self._next())
        return value

    def _next(self) -> str | None:
        return self._pieces[self._at] if self._at < len(self._pieces) else None

    def _take(self, expected: str | None = None) -> str:
        piece = self._next()
        if piece is None or (expected is not None and piece != expected):
            raise ValueError(piece)
        self._at += 1
        return piece

    def _sum(self) -> complex:
        sign = -1 if self._next() == "-" else 1
        self._at += self._next() in ("+", "-")
        value = sign * self._product()
        while self._next() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> complex:
        value = self._power()
        # adjacent factors are multiplied
        while (piece := self._next()) is not None and piece not in ("+", "-", ")", "]", "}"):
            if piece in ("*", "/"):
                self._at += 1
            value = value / self._power() if piece == "/" else value * self._power()
        return value

    def _power(self) -> complex:
        mixed = self._pieces[self._at : self._at + 2]
        value = self._atom()
        if self._next() == "\\frac" and mixed[0].isdigit():  # a mixed number such as 1 4/5
            return value + self._atom()
        while self._next() in ("^", "!"):
            if self._take() == "!":
                value = complex(math.factorial(int(value.real))) if value in range(30) else complex("nan")
            else:
                value = value ** (-self._atom() if self._next() == "-" and self._take() else self._atom())
        return value

    def _atom(self) -> complex:
        piece = self._take()
        if piece in _BRACKETS:
            value = self._sum()
            self._take(_BRACKETS[piece])
            return value
        if piece == "\\frac":
            return self._atom() / self._atom()
        if piece in ("\\pi", "π"):
            return complex(math.pi)
        if (name := piece.removeprefix("\\")) in _FUNCTIONS:
            return _FUNCTIONS[name](self._atom())
        if piece == "i":
            return 1j
        if len(piece) == 1 and piece.isalpha() and piece.isascii():
            start, step = self._point
            return complex(start + step * (ord(piece) - 96))
        return complex(float(piece))
