"""Find configuration files and read each in the format that its name implies; nothing is run or imported."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvaudit.audit.scan.python import read_python
from kvaudit.audit.scan.sheet import Setting, Sheet, Unreadable, split_camel
from kvaudit.audit.scan.shell import HereDocument, read_dockerfile, read_settings, read_shell
from kvaudit.audit.scan.trees import read_json_text, read_toml_text, read_yaml_text, without_templates
from kvaudit.core.errors import DataError, SpecError

LARGEST_CONFIGURATION = 500_000  # bytes; larger files are data
MOST_FILES = 20_000
_DIALECT_BY_ENDING = {
    ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".jsonc": "json", ".toml": "toml", ".py": "python",
    ".sh": "shell", ".bash": "shell", ".zsh": "shell", ".sbatch": "shell", ".slurm": "shell", ".env": "shell",
    ".args": "shell", ".flags": "shell", ".fish": "shell",
    ".service": "settings", ".conf": "settings", ".ini": "settings", ".container": "settings", ".mk": "settings",
}  # fmt: skip
_DIALECT_BY_NAME = {
    "makefile": "settings", "gnumakefile": "settings", "justfile": "settings", "procfile": "shell", "env.list": "shell",
}  # fmt: skip
_READERS: dict[str, Callable[[str, Sheet], list[HereDocument] | None]] = {
    "yaml": read_yaml_text, "json": read_json_text, "toml": read_toml_text, "python": read_python,
    "shell": read_shell, "settings": read_settings, "dockerfile": read_dockerfile,
}  # fmt: skip
_TEMPLATES = {".j2", ".jinja", ".jinja2", ".tmpl", ".tpl"}
_DATA = re.compile(
    r"tokenizer.*\.json|vocab\.json|.*\.index\.json|special_tokens_map\.json|.*[-.]lock(\.json)?|merges\..*"
)
_SKIPPED_FOLDERS = {"node_modules", "__pycache__", "site-packages", "venv"}
_READ_DOT_FOLDERS = {  # other names that begin with a dot are caches, environments and histories
    ".azure", ".azuredevops", ".buildkite", ".circleci", ".config", ".deploy", ".devcontainer", ".docker", ".forgejo",
    ".gitea", ".github", ".gitlab", ".helm", ".k8s", ".woodpecker",
}  # fmt: skip
_SHEBANG = re.compile(r"#!.*\b(ba|z|da)?sh\b")
_PYTHON = re.compile(r"#!.*\bpython")
_NOTEBOOK = re.compile(r'\s*\{\s*"(cells|metadata|nbformat)"')
_JSON_VALUE = re.compile(r"\s*\{.*\}\s*", re.DOTALL)


class Contents(NamedTuple):
    """A file's settings, the parts that could not be read (line, reason), and its text in lower case."""

    settings: Sequence[Setting]
    unread: Sequence[tuple[int, str]]
    text: str


class ConfigFile(NamedTuple):
    """A configuration file and its name for display."""

    path: Path
    name: str


class FoundFiles(NamedTuple):
    """The configuration files found below some paths, sorted by name, and what was not read.

    ``skipped`` counts files of other kinds. ``left_out`` names links, which are not followed, and folders that are
    skipped or cannot be read.
    """

    files: list[ConfigFile]
    skipped: int
    left_out: list[str]


def find_files(paths: Sequence[Path]) -> FoundFiles:
    """Return the configuration files among the paths and in folders below them. Raises DataError for a missing path."""
    files: dict[str, Path] = {}
    left_out: list[Path] = []
    skipped = 0
    for path in paths:
        if path.is_dir():
            for file in _walk_folder(path, left_out):
                if dialect_of(file.name) is None and not _is_script(file):
                    skipped += 1
                else:
                    files[display_path(file)] = file
        elif path.exists() or path.is_symlink():
            files[display_path(path)] = path
        else:
            raise DataError(f"{str(path)!r} is missing; give files or folders of configurations")
        if len(files) > MOST_FILES:
            raise SpecError(
                f"more than {MOST_FILES} files below {str(path)!r}; give the folders that hold configurations"
            )
    configs = [ConfigFile(path, name) for name, path in sorted(files.items())]
    return FoundFiles(configs, skipped, sorted({_name_left_out(path) for path in left_out}))


def dialect_of(name: str) -> str | None:
    """Return the format that a file's name implies; None if a file of this name is no configuration."""
    path = Path(name.lower())
    if path.suffix in _TEMPLATES:
        path = path.with_suffix("")
    if path.name.startswith(("dockerfile", "containerfile")) or path.suffix == ".dockerfile":
        return "dockerfile"
    if _DATA.fullmatch(path.name):
        return None
    if path.name == ".env" or path.name.startswith(".env."):  # .env.production
        return "shell"
    return _DIALECT_BY_NAME.get(path.name) or _DIALECT_BY_ENDING.get(path.suffix)


def read_file(path: Path) -> Contents:
    """Return the settings of a file; parts that cannot be read are listed in ``unread``. Never raises."""
    try:
        text = _read_text(path)
    except Unreadable as error:
        return Contents((), [(error.line, error.reason)], "")
    sheet = Sheet()
    unread: list[tuple[int, str]] = []
    plain = without_templates(text) if path.suffix.lower() in _TEMPLATES else text
    try:
        for document in _READERS[dialect_of(path.name) or _guess_dialect(text)](plain, sheet) or ():
            _read_here_document(document, sheet)
    except Unreadable as error:
        unread.append((error.line, error.reason))
    _expand_json(sheet)
    split = split_camel(text)
    # names in camelCase can be looked up as written and as split into words
    words = text.lower() if split == text else f"{text}\n{split}".lower()
    return Contents(sheet.settings, [*unread, *sheet.unread], words)


def _read_here_document(document: HereDocument, sheet: Sheet) -> None:
    """Add the settings of a here-document to ``sheet``, the settings of its file.

    It is read as YAML, or else as a script, and ignored if it is neither.
    """
    for reader in (read_yaml_text, read_shell):
        trial = Sheet(groups=sheet.groups)
        try:
            reader(document.text, trial, document.line)
        except Unreadable:
            continue
        if trial.settings:
            sheet.settings.extend(trial.settings)
            sheet.groups = trial.groups
            return


def _expand_json(sheet: Sheet) -> None:
    """Add to ``sheet`` the settings inside its values that are JSON texts (as in flags and YAML).

    They become keys below the value's own key.
    """
    for setting in list(sheet.settings):
        if isinstance(setting.value, str) and _JSON_VALUE.fullmatch(setting.value):
            inner = Sheet(groups=sheet.groups)
            try:
                read_json_text(setting.value.replace("\n", " "), inner, setting.line)
            except Unreadable:
                continue  # a text in braces
            path = tuple(part.lstrip("-").replace("-", "_") for part in setting.key)
            sheet.groups = inner.groups
            for child in inner.settings:
                if child.kind == "key":
                    sheet.add(child._replace(key=(*path, *child.key), block=setting.block, command=setting.command))


def _read_text(path: Path) -> str:
    """Return the text of a regular file; raises Unreadable."""
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
        raise Unreadable(f"larger than {LARGEST_CONFIGURATION} bytes, so no configuration")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # so that all readers count lines alike


def _guess_dialect(text: str) -> str:
    """Guess the format of a text whose file name does not show it; raises Unreadable if no known format fits."""
    if _SHEBANG.match(text):
        return "shell"
    if _NOTEBOOK.match(text):
        raise Unreadable("a notebook, which is not read; export it as a script")
    if re.match(r"\s*[{\[]", text):
        return "json"
    if _PYTHON.match(text):
        return "python"
    raise Unreadable("unknown dialect; known are YAML, JSON, TOML, shell, Dockerfile, Python, .args")


def _is_script(path: Path) -> bool:
    """Return whether a file without an ending begins like a shell or Python script."""
    try:
        if path.suffix or not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            first = file.readline(200).decode("utf-8", "replace")
    except OSError:
        return False
    return _SHEBANG.match(first) is not None or _PYTHON.match(first) is not None


def _walk_folder(folder: Path, left_out: list[Path]) -> Iterator[Path]:
    """Yield the files below a folder; links, and folders that are not read, go into ``left_out``."""
    for parent, folders, names in os.walk(folder, onerror=lambda error: left_out.append(Path(error.filename))):
        to_read = []
        for name in sorted(folders):
            path = Path(parent, name)
            is_hidden = name.startswith(".") and name not in _READ_DOT_FOLDERS
            if path.is_symlink() or is_hidden or name in _SKIPPED_FOLDERS:
                left_out.append(path)
            else:
                to_read.append(name)
        folders[:] = to_read
        for name in names:
            path = Path(parent, name)
            if path.is_symlink():
                left_out.append(path)
            else:
                yield path


def _name_left_out(path: Path) -> str:
    """Return the name under which a file or folder that is not read is reported: a folder's name ends in a slash.

    A link keeps its own name, not that of its target.
    """
    name = Path(display_path(path.parent), path.name).as_posix()
    return name if path.is_symlink() else f"{name}/"


def display_path(path: Path) -> str:
    """Return a path for display, relative to the current folder if it is below it."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()
