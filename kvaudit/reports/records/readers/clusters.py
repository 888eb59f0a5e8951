"""Where an item's cluster comes from when the file does not say, or says it under another name.

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
from kvaudit.reports.records.readers.base import ClusterRule, name_of

_LONGEST_NAME = 500  # characters of an item's name that a pattern is tried on
_ITEMS_LOOKED_AT = 2000
_LONGEST_FIELD = 60  # characters of a field's name that is proposed
_FEWEST = 6  # values: fewer clusters decide nothing


def cluster_rule(text: str) -> ClusterRule:
    """The rule that ``--cluster`` names. Raises SpecError for a bad pattern, DataError for a bad table."""
    kind, mark, rest = text.partition(":")
    if mark and kind == "re":
        return _by_pattern(rest)
    if mark and kind == "file":
        return _by_table(Path(rest))
    if not text.strip():
        raise SpecError("--cluster is empty, wanted a field, re:PATTERN or file:MAP.csv")
    return lambda row, _item: name_of(_inside(row, text.split(".")))


def _inside(row: Any, keys: list[str]) -> Any:
    """row[a][b] for a.b; a key that itself holds a dot is found too. None where there is no such field."""
    if not keys:
        return row
    if not isinstance(row, Mapping):
        return None
    whole = ".".join(keys)
    return row[whole] if whole in row else _inside(row.get(keys[0]), keys[1:])


def _by_pattern(pattern: str) -> ClusterRule:
    try:
        found = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SpecError(f"--cluster re:{pattern} is not a regular expression ({error})") from None

    def rule(_row: Mapping[str, Any], item: str) -> str | None:
        match = found.search(item[:_LONGEST_NAME])
        return (match[1] if found.groups else match[0]) or None if match else None

    return rule


def _by_table(path: Path) -> ClusterRule:
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
    """Which fields of a file's rows several items share: what could name their clusters, where nobody has said."""

    def __init__(self, prefix: str = "", known: Iterable[str] = ()) -> None:
        """``prefix`` is what ``--cluster`` needs before the name of such a field; ``known`` fields mean something."""
        self._prefix, self._known = prefix, frozenset(known)
        self._items: set[str] = set()
        self._values: dict[str, dict[str, int]] = {}  # field -> item -> hash of its value

    def add(self, item: str, fields: Any, target: Any = None) -> None:
        """The fields beside one score of an item; what is no table has none, and the answer key is no origin."""
        if not isinstance(fields, Mapping) or (len(self._items) >= _ITEMS_LOOKED_AT and item not in self._items):
            return
        self._items.add(item)
        for field, value in fields.items():
            name = name_of(value)
            if name is not None and name != name_of(target) and field not in self._known:
                self._values.setdefault(field, {})[item] = hash(name)

    def names(self) -> tuple[str, ...]:
        """Those that every item has, with values that on average two items share."""
        found = []
        for field, values in self._values.items():
            # a field that says nothing of its own is the same everywhere, one that names the item is never shared
            distinct = len(set(values.values()))
            plain = inline(clip(field, _LONGEST_FIELD)) == field
            if plain and len(values) == len(self._items) and _FEWEST <= distinct <= len(values) / 2:
                found.append(self._prefix + field)
        return tuple(found)
