"""Files that are whole or not there, and small hostile ones: JSON and YAML read with a line for what is wrong.

Writing goes beside the place and is renamed. Of YAML (specs, gate files, waivers) every mistake is one line with file
and line. Aliases are refused: such a file needs none, and a few lines of them can stand for more text than a machine
holds. So are tags, which choose what is built from a text, and characters that no path and no UTF-8 file can hold.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvaudit.core.errors import DataError, RunError, SpecError, UnknownName
from kvaudit.core.text import short_text, is_text, one_line

PARTIAL = ".partial"  # ends the name of what is being written beside its place
_LOCKLESS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
LARGEST_FILE = 100_000  # bytes
MAX_VALUE_LENGTH = 2_000  # characters; a number of more digits cannot even be printed
MAX_DEPTH = 20  # levels
_LONGEST_NAME = 120  # characters of a suite in the name of a file
_OTHER_NUMBER = re.compile(r"[-+]?0[0-7_]+|[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")  # 0110 is 72, 1:12 too
_UNFIT = re.compile(r"[^\w.,@= +-]")  # in the name of a file
KeyPath = tuple[str | int, ...]  # of a value: the keys and indices on the way to it


@contextmanager
def mutex(path: Path) -> Iterator[None]:
    """Serialise a few milliseconds of work between processes; the kernel lets go when a process dies.

    Raises RunError on a file system that has no locks.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _LOCKLESS:
                raise
            raise RunError(
                f"the file system of {str(path.parent)!r} has no locks ({error.strerror}); mount it with locks "
                "(Lustre: flock, NFS 3: lockd), or give another --out"
            ) from None
        yield


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises DataError when it is missing, torn or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise DataError(f"{str(path)!r} is missing") from None
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read ({error.strerror}); make it readable") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{str(path)!r} holds a {type(value).__name__}, wanted an object")
    return value


def write_json(path: Path, value: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Write a JSON file whole or not at all: synced beside its place, then renamed. ``indent`` None: on one line."""
    write_whole(path, json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")
    sync(path.parent)


def cache_home() -> Path:
    """Where what can be made or fetched again is kept: KVAUDIT_CACHE, or ~/.cache/kvaudit."""
    named = os.environ.get("KVAUDIT_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "kvaudit"


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a text, or bytes as they are, whole or not at all."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        # on disk before it has its name, so that a power cut leaves the old file or the new one
        file.flush()
        os.fsync(file.fileno())
    try:
        os.replace(partial, path)
    except OSError:  # a folder of that name, say
        partial.unlink(missing_ok=True)
        raise


def plain_files(folder: Path, pattern: str) -> list[Path]:
    """The files in a folder that match, in order, without those that a system leaves beside them (macOS: ``._NAME``).

    Raises DataError for what is no plain file: to read a pipe may never end.
    """
    found = [path for path in sorted(folder.glob(pattern)) if not path.name.startswith(".")]
    for path in found:
        check_plain(path)
    return found


def check_plain(path: Path) -> None:
    """Raise DataError for what is there and is no plain file."""
    if not path.is_file() and path.exists():
        raise DataError(f"{str(path)!r} is a folder, a pipe or a device, where a file belongs; remove it")


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk before this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def in_file_name(name: str) -> str:
    """A suite's name as part of a file's name: ``:`` as ``=``; of a path or a long name its end, and 8 hex digits."""
    plain = name.replace(":", "=")  # no part of a file's name everywhere
    if len(plain) <= _LONGEST_NAME and not _UNFIT.search(plain):
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{_UNFIT.sub('~', plain)[-_LONGEST_NAME:]}~{digest}"


def write_output(path: Path, text: str) -> None:
    """Write a file for a person, whole or not at all, with the folders above it; raises RunError where it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r} ({error.strerror}); free the disk, make the folder writable or give "
            "another path"
        ) from None


# --- small hostile YAML ----------------------------------------------------------------------------------------------


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
            raw = file.read(largest + 1)  # a byte more tells a file that is too large
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"{what} {str(path)!r} cannot be read ({reason}); give the path of the {what}") from None
    if len(raw) > largest:
        raise DataError(f"{what} {str(path)!r} is larger than {largest} bytes; give the path of the {what}")
    return text


def parse_yaml(text: str, name: str, what: str) -> YamlFile:
    """The mapping written in ``text``; ``name`` names it in errors."""
    lines: dict[KeyPath, int] = {}
    try:
        _refuse_monsters(text)
        loader = _Loader(text)
        node = loader.get_single_node()
        _number_lines(node, (), lines)
        table = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        where = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SpecError(f"{name}{where}: not a usable {what}: {one_line(error.problem)}") from None
    except SpecError as error:
        raise SpecError(f"{name} {error}") from None
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:  # also a date such as 2026-13-45
        raise SpecError(f"{name}: not a usable {what}: {one_line(error)}") from None
    if not isinstance(table, dict):
        got = "nothing" if table is None else type(table).__name__
        raise SpecError(f"{name}: wanted a {what}, a mapping, got {got}")
    return YamlFile(name, hashlib.sha256(text.encode()).hexdigest(), text, table, lines)


class _Loader(yaml.SafeLoader):
    """YAML's own, which takes a character that JSON escapes as a pair for the one character that it is."""

    def construct_scalar(self, node: Any) -> Any:
        return join_surrogates(super().construct_scalar(node))


def join_surrogates(text: str) -> str:
    """The text with two halves of a character, as JSON escapes them, as the character."""
    if is_text(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def check_keys(table: Mapping[Any, Any], known: Iterable[str], where: str, kind: str = "key") -> None:
    """Raise UnknownName for a key that is not in ``known``."""
    names = list(known)
    for key in table:
        if key not in names:
            raise UnknownName(f"{kind} in {where}", short_text(key), map(short_text, names))


def _refuse_monsters(text: str) -> None:
    """Raise for what costs more to hold, or does more, than to write, while the text is still a stream."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = f"line {event.start_mark.line + 1 if event.start_mark else 1}"
        if isinstance(event, yaml.AliasEvent):
            raise SpecError(f"{where}: aliases are not allowed")
        if isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent) and event.tag is not None:
            raise SpecError(f"{where}: tags are not allowed, got {short_text(event.tag)!r}")
        if isinstance(event, yaml.ScalarEvent):
            _refuse_unusable(join_surrogates(event.value), where)
            if event.style is None and _OTHER_NUMBER.fullmatch(event.value):
                raise SpecError(
                    f"{where}: {short_text(event.value)} is a number of base 8 or 60 to YAML 1.1; write it without the 0 "
                    "in front, or in quotes"
                )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise SpecError(f"{where}: nested more than {MAX_DEPTH} levels deep")


def _refuse_unusable(value: str, where: str) -> None:
    """Raise for a text that is too long, or that neither a path nor a UTF-8 file can hold."""
    if len(value) > MAX_VALUE_LENGTH:
        raise SpecError(f"{where}: a value of {len(value)} characters, wanted at most {MAX_VALUE_LENGTH}")
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
        name = join_surrogates(str(key.value))
        if name in seen:
            raise yaml.MarkedYAMLError(problem=f"key {short_text(name)!r} is given twice", problem_mark=key.start_mark)
        seen.add(name)
        yield name, key.start_mark.line + 1, value
