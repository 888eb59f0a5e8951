"""Which files are read, and as what: by their names, never by running or importing anything."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvaudit.audit.scan.python import read_python
from kvaudit.audit.scan.sheet import Setting, Sheet, Unreadable, split_camel
from kvaudit.audit.scan.shell import read_dockerfile, read_settings, read_shell
from kvaudit.audit.scan.shell_words import HereDocument
from kvaudit.audit.scan.trees import read_toml_text
from kvaudit.audit.scan.trees import read_json_text, read_yaml_text, without_templates
from kvaudit.core.errors import DataError, SpecError

LARGEST_CONFIGURATION = 500_000  # bytes of a configuration; what is larger is data
MOST_FILES = 20_000
_ENDINGS = {
    ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".jsonc": "json", ".toml": "toml", ".py": "python",
    ".sh": "shell", ".bash": "shell", ".zsh": "shell", ".sbatch": "shell", ".slurm": "shell", ".env": "shell",
    ".args": "shell", ".flags": "shell", ".fish": "shell",
    ".service": "settings", ".conf": "settings", ".ini": "settings", ".container": "settings", ".mk": "settings",
}  # fmt: skip
_READERS: dict[str, Callable[[str, Sheet], list[HereDocument] | None]] = {
    "yaml": read_yaml_text, "json": read_json_text, "toml": read_toml_text, "python": read_python,
    "shell": read_shell, "settings": read_settings, "dockerfile": read_dockerfile,
}  # fmt: skip
_NAMES = {
    "makefile": "settings", "gnumakefile": "settings", "justfile": "settings", "procfile": "shell", "env.list": "shell",
}  # fmt: skip
_TEMPLATES = {".j2", ".jinja", ".jinja2", ".tmpl", ".tpl"}
_DATA = re.compile(
    r"tokenizer.*\.json|vocab\.json|.*\.index\.json|special_tokens_map\.json|.*[-.]lock(\.json)?|merges\..*"
)
_SKIPPED_FOLDERS = {"node_modules", "__pycache__", "site-packages", "venv"}  # and those whose names begin with a dot
_SHEBANG = re.compile(r"#!.*\b(ba|z|da)?sh\b")
_PYTHON = re.compile(r"#!.*\bpython")
_NOTEBOOK = re.compile(r'\s*\{\s*"(cells|metadata|nbformat)"')
_JSON_VALUE = re.compile(r"\s*\{.*\}\s*", re.DOTALL)


class Contents(NamedTuple):
    """What a file sets, what of it could not be read (line, reason), and its text in lower case."""

    settings: Sequence[Setting]
    unread: Sequence[tuple[int, str]]
    text: str


class ConfigFile(NamedTuple):
    """A file and the name it is reported under."""

    path: Path
    name: str


def find_files(paths: Sequence[Path]) -> tuple[list[ConfigFile], int]:
    """The files to read, in order of their names, and how many in the folders are of no dialect.

    Links in folders are not followed. Raises DataError for a path that is not there.
    """
    found: dict[str, Path] = {}
    skipped = 0
    for path in paths:
        if path.is_dir():
            for file in _walk(path):
                if dialect_of(file.name) is None and not _is_script(file):
                    skipped += 1
                else:
                    found[display_path(file)] = file
        elif path.exists() or path.is_symlink():
            found[display_path(path)] = path
        else:
            raise DataError(f"{str(path)!r} is missing; give files or folders of configurations")
        if len(found) > MOST_FILES:
            raise SpecError(
                f"more than {MOST_FILES} files below {str(path)!r}; give the folders that hold configurations"
            )
    return [ConfigFile(path, name) for name, path in sorted(found.items())], skipped


def dialect_of(name: str) -> str | None:
    """What a file of this name is written in; None for what is no configuration."""
    path = Path(name.lower())
    if path.suffix in _TEMPLATES:
        path = path.with_suffix("")
    if path.name.startswith(("dockerfile", "containerfile")) or path.suffix == ".dockerfile":
        return "dockerfile"
    if _DATA.fullmatch(path.name):
        return None
    if path.name == ".env" or path.name.startswith(".env."):  # .env.production
        return "shell"
    return _NAMES.get(path.name) or _ENDINGS.get(path.suffix)


def read_file(path: Path) -> Contents:
    """The settings of one file; what cannot be read of it is said, and never raised."""
    try:
        text = _text(path)
    except Unreadable as error:
        return Contents((), [(error.line, error.reason)], "")
    sheet = Sheet()
    unread: list[tuple[int, str]] = []
    plain = without_templates(text) if path.suffix.lower() in _TEMPLATES else text
    try:
        for body in _READERS[dialect_of(path.name) or _guessed(text)](plain, sheet) or ():
            _read_quietly(body, sheet)
    except Unreadable as error:
        unread.append((error.line, error.reason))
    _expand_json(sheet)
    apart = split_camel(text)
    # words are looked up in names in camelCase too, and in these as they are written
    words = text.lower() if apart == text else f"{text}\n{apart}".lower()
    return Contents(sheet.settings, [*unread, *sheet.unread], words)


def _read_quietly(body: HereDocument, sheet: Sheet) -> None:
    """A here-document that is a configuration or a script; one that is neither says nothing about a cache."""
    for reader in (read_yaml_text, read_shell):
        trial = Sheet(groups=sheet.groups)
        try:
            reader(body.text, trial, body.line)
        except Unreadable:
            continue
        if trial.settings:
            sheet.settings.extend(trial.settings)
            sheet.groups = trial.groups
            return


def _expand_json(sheet: Sheet) -> None:
    """Values that are JSON, as flags and YAML hold them: their keys count as keys below."""
    for setting in list(sheet.settings):
        if isinstance(setting.value, str) and _JSON_VALUE.fullmatch(setting.value):
            inner = Sheet(groups=sheet.groups)
            try:
                read_json_text(setting.value.replace("\n", " "), inner, setting.line)
            except Unreadable:
                continue  # a text in braces
            path = tuple(part.lstrip("-").replace("-", "_") for part in setting.key)
            sheet.groups = inner.groups
            for below in inner.settings:
                if below.kind == "key":
                    sheet.add(below._replace(key=(*path, *below.key), block=setting.block, near=setting.near))


def _text(path: Path) -> str:
    """The text of a regular file; raises Unreadable."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unreadable("no regular file")
        with path.open("rb") as file:
            raw = file.read(LARGEST_CONFIGURATION + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise Unreadable(error.strerror or "cannot be opened") from None
    except UnicodeDecodeError as error:
        raise Unreadable("no UTF-8 text", raw.count(b"\n", 0, error.start) + 1) from None
    if len(raw) > LARGEST_CONFIGURATION:
        raise Unreadable(f"larger than {LARGEST_CONFIGURATION} bytes, which no configuration is")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # one count of lines for every reader


def _guessed(text: str) -> str:
    """The dialect of a file that was named and whose name tells none; raises Unreadable."""
    if _SHEBANG.match(text):
        return "shell"
    if _NOTEBOOK.match(text):
        raise Unreadable("a notebook, which is not read; export it as a script")
    if re.match(r"\s*[{\[]", text):
        return "json"
    if _PYTHON.match(text):
        return "python"
    raise Unreadable("of no dialect that is known: YAML, JSON, TOML, shell, Dockerfile, Python, .args")


def _is_script(path: Path) -> bool:
    """Whether a file whose name has no ending begins as a shell or Python script does."""
    try:
        if path.suffix or not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            first = file.readline(200).decode("utf-8", "replace")
    except OSError:
        return False
    return _SHEBANG.match(first) is not None or _PYTHON.match(first) is not None


def _walk(folder: Path) -> Iterator[Path]:
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for name in names:
            path = Path(above, name)
            if not path.is_symlink():
                yield path


def display_path(path: Path) -> str:
    """A path as it is reported: below the folder that the command runs in, where it is."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()
