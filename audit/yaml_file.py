"""Small hostile YAML files (gate, waivers): read whole, checked key by key, every mistake one line with file and line.

Aliases are refused: such a file needs none, and a few lines of them can stand for more text than a machine holds.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from audit.errors import DataError, SpecError, UnknownName

LARGEST_FILE = 100_000  # bytes
DEEPEST = 20  # levels
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 80


@dataclass(frozen=True)
class YamlFile:
    """A file's name, the sha256 of its bytes, its text and the mapping it holds."""

    name: str
    sha256: str
    text: str
    table: Mapping[str, Any]


def read_yaml(path: Path, what: str) -> YamlFile:
    """The mapping in ``path``; raises DataError when it cannot be read, SpecError when it is no plain mapping."""
    try:
        raw = path.read_bytes()[: LARGEST_FILE + 1]
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"{what} {str(path)!r} cannot be read ({reason}); give the path of a YAML file") from None
    if len(raw) > LARGEST_FILE:
        raise DataError(f"{what} {str(path)!r} is larger than {LARGEST_FILE} bytes; give the path of a {what}")
    return parse_yaml(text, path.name, what)


def parse_yaml(text: str, name: str, what: str) -> YamlFile:
    """The mapping written in ``text``; ``name`` names it in errors."""
    try:
        _refuse_monsters(text)
        _refuse_twins(yaml.compose(text, Loader=yaml.SafeLoader))
        table = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        where = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SpecError(f"{name}{where}: not a usable {what}: {one_line(error.problem)}") from None
    except SpecError as error:
        raise SpecError(f"{name} {error}") from None
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:  # also a date such as 2026-13-45
        raise SpecError(f"{name}: not a usable {what}: {one_line(error)}") from None
    if not isinstance(table, dict):
        raise SpecError(f"{name}: wanted a {what}, a mapping, got {type(table).__name__}")
    return YamlFile(name, hashlib.sha256(text.encode()).hexdigest(), text, table)


def known_keys(table: Mapping[Any, Any], known: Iterable[str], where: str, kind: str = "key") -> None:
    """Raise UnknownName for a key that is not in ``known``."""
    names = list(known)
    for key in table:
        if key not in names:
            raise UnknownName(f"{kind} in {where}", clipped(key), map(clipped, names))


def shown(value: Any) -> str:
    """Any value as a short line."""
    return one_line(_shown.repr(value))


def name_of(value: Any) -> str:
    """A name as it is; any other value as a short line, since aliases can make one of any size."""
    return value if isinstance(value, str) else shown(value)


def clipped(value: Any) -> str:
    """A name from a file, without line breaks and at most 80 characters."""
    return one_line(value if isinstance(value, str) else shown(value))[:80]


def one_line(value: object) -> str:
    """The text of an error without line breaks."""
    return " ".join(str(value).split())[:200]


def _refuse_monsters(text: str) -> None:
    """Raise for aliases and for depth while the text is still a stream: both cost more to hold than to write."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        mark = event.start_mark
        where = f"line {mark.line + 1 if mark else 1}"
        if isinstance(event, yaml.AliasEvent):
            raise SpecError(f"{where}: aliases are not allowed")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise SpecError(f"{where}: nested more than {DEEPEST} levels deep")


def _refuse_twins(node: Any) -> None:
    """Raise for a key given twice, which YAML would silently drop; there are no aliases, so this ends."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_twins(child)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, child in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {clipped(key.value)!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
            _refuse_twins(child)
