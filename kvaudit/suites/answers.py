"""Whether two mathematical answers are the same: as numbers or formulas where they can be computed, else as text."""

from __future__ import annotations

import cmath
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

LONGEST = 300  # characters of an answer that is looked at; more is no answer but a text
_CLOSE = 1e-9  # of the larger magnitude
_BRACES = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # one level inside
_BOXED = re.compile(r"\\f?boxed\s*" + _BRACES.replace(r"\{[^{}]*\}", r"\{(?:[^{}]|\{[^{}]*\})*\}"))
_STATED = re.compile(r"answer\s*(?:is|:|=)([^\n]*\S)", re.IGNORECASE)
_DOLLARS = re.compile(r"\$([^$\n]+)\$")
_MATHS = re.compile(r"\\[()\[\]]|\$\$")  # LaTeX's other ways to begin a formula and to end it
_NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)")
_REWRITTEN = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:left|right|displaystyle|[!,;:])", ""),
        (r"\{,\}", ","),
        (r"(?<!\\)\$|\\\$|\\?%|\*\*", ""),  # currency, per cent and bold type
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\?°|\\degree", ""),
        (r"\\[dt]frac", r"\\frac"),  # of any size
        (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),  # \frac12
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*" + _BRACES + r")\s*(\w)", r"\1{\3}"),
        (r"\\sqrt\s*(\d|[a-z])", r"\\sqrt{\1}"),
        (r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?\s*$", ""),  # a unit
        (r"\\(?:text|mbox|mathrm|textbf|mathbf)\{([^{}]*)\}", r" \1 "),
        (r"(?<=[\d}])\s+(?!and\b)[A-Za-z]{3,}[\w ^]*$", ""),  # a unit in words
        (r"_\{(\w+)\}", r"_\1"),
        (r"\s+(?:and|or)\s+", ","),
        (r"(?<=\d),(?=\d{3}(?:\D|$))(?<!\(\d,)(?<!\(\d\d,)(?<!\(\d\d\d,)", ""),  # thousands, but not in a pair
        (r"\\cdot|\\times", "*"),
        (r"\\leq?\b", "<="),
        (r"\\geq?\b", ">="),
        (r"−|–", "-"),
    )
)


def final_answer(text: str) -> str | None:
    """What an answer ends on: the last box, else what follows "answer is", else the last formula or number."""
    if found := _BOXED.findall(text):
        return str(found[-1]).strip() or None
    text = _MATHS.sub("$", text)
    if found := _STATED.findall(text):
        stated = str(found[-1]).split(". ")[0].lstrip(" :*").rstrip(" :*.")  # .5 begins with its point
        if stated:  # or it stands on a line of its own
            return stated
    if found := _DOLLARS.findall(text):
        return str(found[-1]).strip() or None
    return last[-1] if (last := _NUMBER.findall(text)) else None


def same_answer(one: str, other: str) -> bool:
    """Whether two answers are equal; each may be a number, a formula, a list, a pair, an interval, a matrix or text."""
    if max(len(one), len(other)) > LONGEST:
        return False
    first, second = _read(one), _read(other)
    if (first.shape, len(first.parts)) != (second.shape, len(second.parts)):
        return False
    if first.shape == _LIST:  # of roots, say, in any order
        rest = list(second.parts)
        for part in first.parts:
            match = next((candidate for candidate in rest if _same(part, candidate)), None)
            if match is None:
                return False
            rest.remove(match)
        return True
    return all(map(_same, first.parts, second.parts))


@cache
def has_algebra() -> bool:
    """Whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def equal_by_algebra(found: str, wanted: str) -> bool | None:
    """What computer algebra says of two answers that ``same_answer`` could not compute; None where it is not asked.

    Asks the package math-verify where it is installed, five seconds at most and in a main thread only.
    """
    # both were computed, or what was found is no formula: algebra would say nothing new
    if _computed(wanted) and ("\\" not in found or _computed(found)):
        return None
    if len(found) > LONGEST or not has_algebra():
        return None
    from math_verify import parse, verify

    return bool(verify(parse(f"${wanted}$"), parse(f"${found}$")))


def _computed(text: str) -> bool:
    return len(text) <= LONGEST and all(_value(part, _TRIED_AT[0]) is not None for part in _read(text).parts)


class _Read(NamedTuple):
    shape: str  # how the parts are held: by which brackets, as a list, in rows of a matrix
    parts: tuple[str, ...]


_LIST = "list"


def _read(text: str) -> _Read:
    text = _rewritten(text)
    matrix = re.fullmatch(r"\\begin\{[a-z]?matrix\}(.*)\\end\{[a-z]?matrix\}", text, re.DOTALL)
    if matrix:
        rows = [row.split("&") for row in re.split(r"\\\\", matrix[1])]
        return _Read(f"matrix {[len(row) for row in rows]}", tuple(cell.strip() for row in rows for cell in row))
    text = text.replace("\\{", "").replace("\\}", "")  # a set is a list
    if text.count("\\pm") == 1:
        text = ",".join(text.replace("\\pm", sign) for sign in "+-")
    parts = _split(text)
    if len(parts) == 1 and text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        inside = _split(text[1:-1])
        if len(inside) > 1:
            return _Read(text[0] + text[-1], tuple(inside))
    return _Read(_LIST, tuple(parts))


def _rewritten(text: str) -> str:
    for pattern, new in _REWRITTEN:
        text = pattern.sub(new, text)
    text = text.strip().rstrip(".").strip()
    return re.sub(r"^\\?[A-Za-z]\w?\s*(?:=|\\in\b)\s*(?=[^=]+$)", "", text)  # x = 5 is 5


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    parts, depth = [""], 0
    for mark in text:
        depth += (mark in "([{") - (mark in ")]}")
        if mark == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += mark
    return [part.strip() for part in parts]


def _same(one: str, other: str) -> bool:
    if _normalised(one) == _normalised(other):
        return True
    for point in _TRIED_AT:
        first, second = _value(one, point), _value(other, point)
        # relative to the larger one, absolute near 0
        if first is None or second is None or abs(first - second) > _CLOSE * max(1e-3, abs(first), abs(second)):
            return False
    return True


def _normalised(text: str) -> str:
    whole = re.fullmatch(r"\s*\(([A-Z])\)\s*", text)  # a choice is its letter
    return re.sub(r"\s+", "", whole[1] if whole else text).casefold()


# Where formulas are compared: letters stand for these numbers, so that 2k + 2 is 2(k + 1) and not 2k + 1.
_TRIED_AT = ((0.7316, 1.3), (1.9147, 0.7))
_FORMULA_PIECE = re.compile(r"\s*(\d+\.?\d*|\.\d+|\\[A-Za-z]+|[A-Za-z]{3,}|[A-Za-z]|<=|>=|.)", re.DOTALL)
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sqrt": cmath.sqrt, "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "ln": cmath.log, "log": cmath.log10,
    "exp": cmath.exp, "cot": lambda x: 1 / cmath.tan(x), "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
}  # fmt: skip
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def _value(text: str, point: tuple[float, float]) -> complex | None:
    """The number that a formula gives at a point; None where it is none."""
    sides = re.split(r"(?<![<>])=", text)
    try:
        values = [_Formula(side, point).whole() for side in sides if len(sides) <= 2]
    except (ValueError, ArithmeticError, RecursionError):
        return None
    # an equation stands for the difference of its sides, up to its sign
    value = values[0] if len(values) == 1 else (values[0] - values[1]) ** 2 if values else complex("nan")
    return value if cmath.isfinite(value) else None


class _Formula:
    """Reads and computes at once: sums of products of powers of atoms, by recursive descent."""

    def __init__(self, text: str, point: tuple[float, float]) -> None:
        self._pieces: Sequence[str] = [piece for piece in _FORMULA_PIECE.findall(text.strip()) if piece.strip()]
        self._at, self._point = 0, point

    def whole(self) -> complex:
        value = self._sum()
        if self._next() is not None:
            raise ValueError(self._next())
        return value

    def _next(self) -> str | None:
        return self._pieces[self._at] if self._at < len(self._pieces) else None

    def _take(self, wanted: str | None = None) -> str:
        piece = self._next()
        if piece is None or (wanted is not None and piece != wanted):
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
        # what stands side by side is multiplied
        while (piece := self._next()) is not None and piece not in ("+", "-", ")", "]", "}"):
            if piece in ("*", "/"):
                self._at += 1
            value = value / self._power() if piece == "/" else value * self._power()
        return value

    def _power(self) -> complex:
        mixed = self._pieces[self._at : self._at + 2]
        value = self._atom()
        if self._next() == "\\frac" and mixed[0].isdigit():  # one and four fifths
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
            return complex(start + step * (ord(piece) - 96))  # a is 1 step on, b 2
        return complex(float(piece))
