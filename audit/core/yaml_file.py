"""Small hostile YAML files (specs, gate files, waivers): every mistake is one line with file and line.

Aliases are refused: such a file needs none, and a few lines of them can stand for more text than a machine holds. So
are tags, which choose what is built from a text, and characters that no path and no UTF-8 file can hold.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from audit.core.errors import DataError, SpecError, UnknownName

LARGEST_FILE = 100_000  # bytes
LONGEST_VALUE = 2_000  # characters; a number of more digits cannot even be printed
DEEPEST = 20  # levels
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 80


KeyPath = tuple[str | int, ...]  # of a value: the keys and indices on the way to it


@dataclass(frozen=True)
class YamlFile:
    """A file's name, the sha256 of its bytes, its text, the mapping it holds and the line of everything in that."""

    name: str
    sha256: str
    text: str
    table: Mapping[str, Any]
    lines: Mapping[KeyPath, int]


def read_yaml(path: Path, what: str) -> YamlFile:
    """The mapping in ``path``; raises DataError when it cannot be read, SpecError when it is no plain mapping."""
    return parse_yaml(read_text(path, what), path.name, what)


def read_text(path: Path, what: str, largest: int = LARGEST_FILE) -> str:
    """The text of a small file; raises DataError when it cannot be read or is too large for a ``what``."""
    try:
        with path.open("rb") as file:
            raw = file.read(largest + 1)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"{what} {str(path)!r} cannot be read ({reason}); give the path of a {what}") from None
    if len(raw) > largest:
        raise DataError(f"{what} {str(path)!r} is larger than {largest} bytes; give the path of a {what}")
    return text


def parse_yaml(text: str, name: str, what: str) -> YamlFile:
    """The mapping written in ``text``; ``name`` names it in errors."""
    lines: dict[KeyPath, int] = {}
    try:
        _refuse_monsters(text)
        _number_lines(yaml.compose(text, Loader=yaml.SafeLoader), (), lines)
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
    return YamlFile(name, hashlib.sha256(text.encode()).hexdigest(), text, table, lines)


def known_keys(table: Mapping[Any, Any], known: Iterable[str], where: str, kind: str = "key") -> None:
    """Raise UnknownName for a key that is not in ``known``."""
    names = list(known)
    for key in table:
        if key not in names:
            raise UnknownName(f"{kind} in {where}", clipped(key), map(clipped, names))


def shown(value: Any) -> str:
    """Any value as a short line."""
    return one_line(_shown.repr(value))


def clipped(value: Any) -> str:
    """A name from a file, without line breaks and at most 80 characters."""
    return one_line(value if isinstance(value, str) else shown(value))[:80]


def one_line(value: object) -> str:
    """The text of an error without line breaks."""
    return " ".join(str(value).split())[:200]


def reason(error: BaseException) -> str:
    """The class of an exception of somebody else's code and what it says, which may itself fail."""
    try:
        said = one_line(error)
    except (Exception, SystemExit):
        said = "it fails again where it is asked what happened"
    return f"{type(error).__name__}: {said}"


def _refuse_monsters(text: str) -> None:
    """Raise for what costs more to hold, or does more, than to write, while the text is still a stream."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = f"line {event.start_mark.line + 1 if event.start_mark else 1}"
        if isinstance(event, yaml.AliasEvent):
            raise SpecError(f"{where}: aliases are not allowed")
        if isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent) and event.tag is not None:
            raise SpecError(f"{where}: tags are not allowed, got {clipped(event.tag)!r}")
        if isinstance(event, yaml.ScalarEvent):
            _refuse_unusable(event.value, where)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise SpecError(f"{where}: nested more than {DEEPEST} levels deep")


def _refuse_unusable(value: str, where: str) -> None:
    """Raise for a text that is too long, or that neither a path nor a UTF-8 file can hold."""
    if len(value) > LONGEST_VALUE:
        raise SpecError(f"{where}: a value of {len(value)} characters, wanted at most {LONGEST_VALUE}")
    if wrong := next((c for c in value if c == "\0" or "\ud800" <= c <= "\udfff"), None):
        raise SpecError(f"{where}: a value holds the character U+{ord(wrong):04X}, which no path or text can")


def _number_lines(node: Any, place: KeyPath, lines: dict[KeyPath, int]) -> None:
    """Remember the line of every key and element; raise for a key given twice, which YAML would silently drop.

    Without aliases this ends, and ``_refuse_monsters`` has bounded the depth.
    """
    if isinstance(node, yaml.CollectionNode):
        for name, line, value in _children(node):
            lines[(*place, name)] = line
            _number_lines(value, (*place, name), lines)


def _children(node: Any) -> Iterator[tuple[str | int, int, Any]]:
    """Name, line and node of everything in a mapping or sequence; raises for a key given twice."""
    if isinstance(node, yaml.SequenceNode):
        yield from ((index, value.start_mark.line + 1, value) for index, value in enumerate(node.value))
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value)
        if name in seen:
            raise yaml.MarkedYAMLError(problem=f"key {clipped(name)!r} is given twice", problem_mark=key.start_mark)
        seen.add(name)
        yield name, key.start_mark.line + 1, value
