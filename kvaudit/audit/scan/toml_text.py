"""TOML: its reader knows no lines, so they are looked up in the text, in the order of the file."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from typing import Any

from kvaudit.audit.scan.sheet import DEEPEST_TREE, Sheet, Unreadable, blank_of, read_value
from kvaudit.audit.scan.trees import TEMPLATE, Branch, Leaf, Series, Tree, walk

_FAR = 500  # lines in which an entry of a list, or of a table in braces, is looked up
_NAME = r"(?:[\w-]+|\"[^\"]*\"|'[^']*')"
_TABLE = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?$")
_KEY = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")


def read_toml_text(text: str, sheet: Sheet) -> None:
    """The settings of TOML."""
    blanked = TEMPLATE.sub(_toml_blank, text)
    try:
        table = tomllib.loads(blanked)
        walk(_Located(blanked).tree(table, ()), (), sheet)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        raise Unreadable(f"no TOML: {error}", int(at[1]) if at else 1) from None
    except RecursionError:
        raise Unreadable(f"nested more than {DEEPEST_TREE} levels deep") from None


class _Located:
    """Turns a table into a tree, and finds the line of everything in it."""

    def __init__(self, text: str) -> None:
        self.rows = text.split("\n")
        self.tables, self.keys = _toml_lines(self.rows)

    def tree(self, value: Any, path: tuple[str, ...], line: int = 1) -> Tree:
        """The tree of a value that stands on ``line`` or below."""
        if isinstance(value, dict):
            return Branch([self._item(name, child, (*path, name), line) for name, child in value.items()])
        if isinstance(value, list):
            return Series(self._items(value, path, line), line)
        text = value if isinstance(value, str) else ""
        kept = value if isinstance(value, bool | int | float) else read_value(str(value))
        return Leaf(kept, line, text if " " in text else "", line)

    def _item(self, name: str, child: Any, path: tuple[str, ...], line: int) -> tuple[str, int, Tree]:
        rows = self.keys.get(path) or self.tables.get(path) or []
        index = bisect_left(rows, line)  # of several tables of one name, the one that begins here
        mine = rows[min(index, len(rows) - 1)] if rows else self._next(name, line)
        return name, mine, self.tree(child, path, mine)

    def _items(self, values: list[Any], path: tuple[str, ...], line: int) -> list[Tree]:
        headers = self.tables.get(path, [])
        found: list[Tree] = []
        for index, value in enumerate(values):
            if isinstance(value, dict):
                line = headers[index] if index < len(headers) else line
            elif isinstance(value, str):
                line = self._next(value.split("\n")[0], line)
            found.append(self.tree(value, path, line))
        return found

    def _next(self, text: str, line: int) -> int:
        """The first line from ``line`` on that holds it; ``line`` where an escape hides it."""
        rows = range(line, min(line + _FAR, len(self.rows) + 1))
        return next((row for row in rows if text in self.rows[row - 1]), line)


def _toml_lines(rows: list[str]) -> tuple[dict[tuple[str, ...], list[int]], dict[tuple[str, ...], list[int]]]:
    """Where tables and keys begin; what stands in a text of several lines is neither."""
    tables: dict[tuple[str, ...], list[int]] = {}
    keys: dict[tuple[str, ...], list[int]] = {}
    table: tuple[str, ...] = ()
    quote = ""
    for number, row in enumerate(rows, 1):
        if quote:
            quote = "" if quote in row else quote
            continue
        if match := _TABLE.match(row):
            table = _dotted(match[1])
            tables.setdefault(table, []).append(number)
        elif match := _KEY.match(row):
            path = _dotted(match[1])
            for end in range(1, len(path) + 1):
                keys.setdefault((*table, *path[:end]), []).append(number)
        quote = next((mark for mark in ('"""', "'''") if row.count(mark) % 2), "")
    return tables, keys


def _dotted(text: str) -> tuple[str, ...]:
    parts = re.findall(r'"([^"]*)"|\'([^\']*)\'|([\w-]+)', text)
    return tuple(next(part for part in found if part) if any(found) else "" for found in parts)


def _toml_blank(match: re.Match[str]) -> str:
    """A text in place of a template, in quotes unless the template is in them."""
    quoted = match.string[match.string.rfind("\n", 0, match.start()) + 1 : match.start()].count('"') % 2
    blank = blank_of(match[0])
    return (blank if quoted else f'"{blank}"') + "\n" * match[0].count("\n")
