"""Atomic writes, and strict readers of small untrusted JSON and YAML files.

An error in YAML (specs, gate files, waivers) is one line with file and line. The YAML reader refuses aliases, a few of
which can expand to more text than fits into memory; tags, which can construct objects; and characters that UTF-8 or a
path cannot encode.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvaudit.core.errors import DataError, RunError, SpecError, UnknownName
from kvaudit.core.text import is_text, one_line, short_text

PARTIAL = ".partial"  # the suffix of a file that is being written, before it is renamed
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_WRITABLE = 0o222  # the bits of a file's mode that let anybody write it
_SHELL_PIPES = ("/dev/", "/proc/")
LARGEST_FILE = 100_000  # bytes
MAX_VALUE_LENGTH = 2_000  # characters; Python cannot print a number of more digits
MAX_DEPTH = 20  # levels
_MAX_NAME_LENGTH = 120  # characters of a suite in the name of a file
_ODD_NUMBER = re.compile(
    r"[-+]?0[0-7_]+|[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
)  # in YAML 1.1 both 0110 and 1:12 are 72
_UNSAFE = re.compile(r"[^\w.,@= +-]")  # in the name of a file
KeyPath = tuple[str | int, ...]  # the keys and indices that lead to a value


@contextmanager
def mutex(path: Path) -> Iterator[None]:
    """Hold a lock between processes inside the context; the kernel releases it if the process dies.

    It is meant for milliseconds: other processes wait without a limit. Raises RunError on a file system without locks.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise RunError(
                f"the file system of {str(path.parent)!r} has no locks ({error.strerror}); mount it with locks "
                "(Lustre: flock, NFS 3: lockd), or give another --out"
            ) from None
        yield


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises DataError if the file is missing, damaged or no object."""
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
    """Write a JSON file atomically and sync its folder; ``indent`` None: on one line."""
    write_whole(path, json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")
    sync(path.parent)


def cache_home() -> Path:
    """Return the folder for files that can be recreated or downloaded: KVAUDIT_CACHE, or ~/.cache/kvaudit."""
    folder = os.environ.get("KVAUDIT_CACHE")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "kvaudit"


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a text as UTF-8, or bytes, atomically."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        # on disk before the rename, so that a power cut leaves the old file or the new one
        file.flush()
        os.fsync(file.fileno())
    try:
        if path.is_file():
            shutil.copymode(path, partial)
        os.replace(partial, path)
    except OSError:  # such as a folder of that name
        partial.unlink(missing_ok=True)
        raise


def plain_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files in a folder whose names match ``pattern``, sorted.

    Hidden files are left out, because macOS writes ``._NAME`` next to a file. Raises DataError for anything but a
    regular file, since reading a pipe may never end.
    """
    paths = [path for path in sorted(folder.glob(pattern)) if not path.name.startswith(".")]
    for path in paths:
        check_plain(path)
    return paths


def check_plain(path: Path) -> None:
    """Raise DataError if the path exists and is no regular file."""
    if not path.is_file() and path.exists():
        raise DataError(f"{str(path)!r} is a folder, a pipe or a device, where a file belongs; remove it")


def sync(path: Path) -> None:
    """Flush a file, or a folder's directory entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def in_file_name(name: str) -> str:
    """Return a suite's name in a form that is safe in a file name: ``:`` becomes ``=``.

    A path, or a name that is too long, is replaced by its last characters and a hash.
    """
    plain = name.replace(":", "=")  # some file systems do not allow a colon
    if len(plain) <= _MAX_NAME_LENGTH and not _UNSAFE.search(plain):
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{_UNSAFE.sub('~', plain)[-_MAX_NAME_LENGTH:]}~{digest}"


def write_output(path: Path, text: str) -> None:
    """Write an output file atomically, with its parent folders; raise RunError if it cannot be written.

    A link is followed: the file that it names is written. Raises RunError also for a read-only file, even as root, and
    for anything but a file, such as a device.
    """
    if path.exists() and not (path.is_file() and path.stat().st_mode & _WRITABLE):
        kind = "read-only" if path.is_file() else "a folder, a pipe or a device"
        raise RunError(f"cannot write {str(path)!r}, which is {kind}; give another path")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path.resolve() if path.is_symlink() else path, text)
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r} ({error.strerror}); free the disk, make the folder writable or give "
            "another path"
        ) from None


# --- YAML ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class YamlFile:
    """A parsed YAML file: its name, sha256 and text, its content as ``table``, and the line of every key and entry."""

    name: str
    sha256: str
    text: str
    table: Mapping[str, Any]
    lines: Mapping[KeyPath, int]


def read_yaml(path: Path, kind: str) -> YamlFile:
    """Read a YAML mapping; raise DataError if the file cannot be read, SpecError if it is no plain mapping.

    ``kind`` is what errors call the file, such as a spec.
    """
    return parse_yaml(read_text(path, kind), path.name, kind)


def read_text(path: Path, kind: str, largest: int = LARGEST_FILE) -> str:
    """Read the text of a small file, called ``kind`` in errors; raises DataError if it is unreadable or too large.

    A pipe is read only if a shell made it (``<(...)``); reading another pipe might wait forever.
    """
    if path.is_fifo() and not str(path).startswith(_SHELL_PIPES):
        raise DataError(f"{kind} {str(path)!r} is a pipe, where a file belongs; give the path of the {kind}")
    try:
        with path.open("rb") as file:
            raw = file.read(largest + 1)  # one more byte shows that a file is too large
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"{kind} {str(path)!r} cannot be read ({reason}); give the path of the {kind}") from None
    if len(raw) > largest:
        raise DataError(f"{kind} {str(path)!r} is larger than {largest} bytes; give the path of the {kind}")
    return text


def parse_yaml(text: str, name: str, kind: str) -> YamlFile:
    """Parse a YAML mapping from ``text``; raise SpecError if it is none or breaks the limits of this module.

    Errors call the file ``name`` and its content a ``kind``, such as a spec.
    """
    lines: dict[KeyPath, int] = {}
    try:
        _check_yaml_limits(text)
        loader = _Loader(text)
        node = loader.get_single_node()
        _number_lines(node, (), lines)
        table = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SpecError(f"{name}{line}: not a usable {kind}: {one_line(error.problem)}") from None
    except SpecError as error:
        raise SpecError(f"{name} {error}") from None
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:  # such as a date 2026-13-45
        raise SpecError(f"{name}: not a usable {kind}: {one_line(error)}") from None
    if not isinstance(table, dict):
        actual = "nothing" if table is None else type(table).__name__
        raise SpecError(f"{name}: wanted a {kind}, a mapping, got {actual}")
    return YamlFile(name, hashlib.sha256(text.encode()).hexdigest(), text, table, lines)


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that joins surrogate pairs (two JSON escapes for one character) into that character."""

    def construct_scalar(self, node: Any) -> Any:
        return join_surrogates(super().construct_scalar(node))


def join_surrogates(text: str) -> str:
    """Return the text with each surrogate pair (two code units of one character) joined into its character."""
    if is_text(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def check_keys(table: Mapping[Any, Any], known: Iterable[str], location: str) -> None:
    """Raise UnknownName for a key that is not in ``known``; ``location`` names the table in the error."""
    names = list(known)
    for key in table:
        if key not in names:
            raise UnknownName(f"key in {location}", short_text(key), map(short_text, names))


def _check_yaml_limits(text: str) -> None:
    """Raise SpecError for aliases, tags, invalid text, numbers of base 8 or 60 and deep nesting, before parsing."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        location = f"line {event.start_mark.line + 1 if event.start_mark else 1}"
        if isinstance(event, yaml.AliasEvent):
            raise SpecError(f"{location}: aliases are not allowed")
        if isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent) and event.tag is not None:
            raise SpecError(f"{location}: tags are not allowed, got {short_text(event.tag)!r}")
        if isinstance(event, yaml.ScalarEvent):
            _check_text(join_surrogates(event.value), location)
            if event.style is None and _ODD_NUMBER.fullmatch(event.value):
                raise SpecError(
                    f"{location}: {short_text(event.value)} is a number of base 8 or 60 to YAML 1.1; write it without "
                    "the leading 0, or in quotes"
                )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise SpecError(f"{location}: nested more than {MAX_DEPTH} levels deep")


def _check_text(value: str, location: str) -> None:
    if len(value) > MAX_VALUE_LENGTH:
        raise SpecError(f"{location}: a value of {len(value)} characters, wanted at most {MAX_VALUE_LENGTH}")
    if wrong := next((c for c in value if c == "\0" or "\ud800" <= c <= "\udfff"), None):
        raise SpecError(f"{location}: a value holds the character U+{ord(wrong):04X}, which no path or text can")


def _number_lines(node: Any, location: KeyPath, lines: dict[KeyPath, int]) -> None:
    """Add the line of every key and element below ``node`` to ``lines``; raise for a key given twice.

    ``location`` holds the keys that lead to ``node``. A key given twice must be refused here, since the YAML parser
    would silently keep one of the two. The recursion is bounded, because ``_check_yaml_limits`` has refused aliases and
    deep nesting.
    """
    if isinstance(node, yaml.CollectionNode):
        for name, line, value in _children(node):
            lines[(*location, name)] = line
            _number_lines(value, (*location, name), lines)


def _children(node: Any) -> Iterator[tuple[str | int, int, Any]]:
    """Yield (key or index, line, node) for each entry of a YAML mapping or sequence; raise for a duplicate key."""
    if isinstance(node, yaml.SequenceNode):
        yield from ((index, value.start_mark.line + 1, value) for index, value in enumerate(node.value))
        return
    names: set[str] = set()
    for key, value in node.value:
        name = join_surrogates(str(key.value))
        if name in names:
            raise yaml.MarkedYAMLError(problem=f"key {short_text(name)!r} is given twice", problem_mark=key.start_mark)
        names.add(name)
        yield name, key.start_mark.line + 1, value
