"""The rules of ``--cluster``, and proposals of fields that could name clusters.

``FIELD`` or ``outer.inner`` is a field of the file's own row; ``re:PATTERN`` the first group (or the whole match) of a
pattern in the item's name; ``file:MAP.csv`` a table with the columns item and cluster.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.text import clip, inline
from kvaudit.reports.records.readers.base import ClusterRule, check_readable, name_of

_MAX_NAME = 500  # characters of an item's name that a pattern is tried on
_MAX_ITEMS = 2000  # whose fields are compared
_MAX_FIELD = 60  # characters of a field's name that is proposed
_MIN_CLUSTERS = 6  # fewer decide nothing


def cluster_rule(text: str) -> ClusterRule:
    """Return the rule that ``--cluster`` names; raises SpecError for a bad pattern, DataError for a bad table."""
    kind, colon, rest = text.partition(":")
    if colon and kind == "re":
        return _by_pattern(rest)
    if colon and kind == "file":
        return _by_table(Path(rest))
    if not text.strip():
        raise SpecError("--cluster is empty, wanted a field, re:PATTERN or file:MAP.csv")
    return lambda row, _item: name_of(_lookup(row, text.split(".")))


def _lookup(row: Any, keys: list[str]) -> Any:
    """Return row[a][b] for a.b, also for keys that contain dots; None if there is no such field."""
    if not keys:
        return row
    if not isinstance(row, Mapping):
        return None
    key = ".".join(keys)
    return row[key] if key in row else _lookup(row.get(keys[0]), keys[1:])


def _by_pattern(pattern: str) -> ClusterRule:
    try:
        regex = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SpecError(f"--cluster re:{pattern} is not a regular expression ({error})") from None

    def rule(_row: Mapping[str, Any], item: str) -> str | None:
        match = regex.search(item[:_MAX_NAME])
        return (match[1] if regex.groups else match[0]) or None if match else None

    return rule


def _by_table(path: Path) -> ClusterRule:
    check_readable(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            rows = list(csv.DictReader(handle, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"--cluster file:{path} cannot be read ({error})") from None
    if not rows or not {"item", "cluster"} <= set(rows[0]):
        raise DataError(f"--cluster file:{path} needs the columns item and cluster")
    table: dict[str, str] = {}
    for item, cluster in ((str(row["item"]), str(row["cluster"])) for row in rows if row["cluster"]):
        if table.setdefault(item, cluster) != cluster:
            raise DataError(
                f"--cluster file:{path} has item {clip(item, 80)!r} in two clusters, {clip(table[item], 80)!r} and "
                f"{clip(cluster, 80)!r}; keep one"
            )
    return lambda _row, item: table.get(item)


class SharedFields:
    """Finds the fields of a file's rows that several items share: these could name clusters."""

    def __init__(self, prefix: str = "", known: Iterable[str] = ()) -> None:
        """``prefix`` is prepended to a field for ``--cluster``; ``known`` fields have another meaning."""
        self._prefix, self._known_fields = prefix, frozenset(known)
        self._items: set[str] = set()
        self._values: dict[str, dict[str, int]] = {}  # field -> item -> hash of its value

    def add(self, item: str, fields: Any, target: Any = None) -> None:
        """Add the fields of one row of an item; a field that equals the ``target`` answer is left out."""
        if not isinstance(fields, Mapping) or (len(self._items) >= _MAX_ITEMS and item not in self._items):
            return
        self._items.add(item)
        for field, value in fields.items():
            name = name_of(value)
            if name is not None and name != name_of(target) and field not in self._known_fields:
                self._values.setdefault(field, {})[item] = hash(name)

    def names(self) -> tuple[str, ...]:
        """Return the fields that every item has and of whose values at least two items share one on average."""
        names = []
        for field, values in self._values.items():
            distinct = len(set(values.values()))
            is_printable = inline(clip(field, _MAX_FIELD)) == field
            if is_printable and len(values) == len(self._items) and _MIN_CLUSTERS <= distinct <= len(values) / 2:
                names.append(self._prefix + field)
        return tuple(names)
