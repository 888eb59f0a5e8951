"""``kvaudit.yaml``: which mechanisms of a repository are known and answered for, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvaudit.audit.scan.files import display_path
from kvaudit.audit.scan.interpret import Finding
from kvaudit.audit.scan.rules import CORRECTION, load_rules
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.files import YamlFile, check_keys, read_yaml
from kvaudit.core.text import short_repr

DECLARATIONS_FILE = "kvaudit.yaml"
DECLARATION_FORMAT = 1
_KEYS = ("rule", "mechanism", "file", "role", "value", "why")
_ROLES = ("rollout", "serving", "both", "unknown")


@dataclass(frozen=True)
class Declaration:
    """One entry: every field that is given must agree with a finding; ``why`` is for the disclosure.

    ``below`` is the folder that its file stands in, for which alone it speaks; None: it was named for the whole scan.
    """

    why: str
    rule: str | None = None
    mechanism: str | None = None
    file: str = "*"
    role: str | None = None
    value: str | None = None
    below: str | None = None

    def covers(self, finding: Finding) -> bool:
        """Whether it declares this finding. ``file`` is a pattern of the path as it is reported."""
        return (
            self.rule in (None, finding.rule.id)
            and self.mechanism in (None, finding.rule.mechanism)
            and self.role in (None, finding.role)
            and self.value in (None, finding.value)
            and (self.below is None or _stands_below(finding.file, self.below))
            and (fnmatchcase(finding.file, self.file) or fnmatchcase(finding.file, f"*/{self.file}"))
        )


def declared_in(paths: Sequence[Path], asked: Path | None) -> list[Declaration]:
    """The declarations of ``asked``, or of every scanned folder that has a ``kvaudit.yaml`` on top."""
    if asked is not None:
        return read_declared(asked)
    folders = dict.fromkeys(path for path in paths if (path / DECLARATIONS_FILE).is_file())
    return [
        replace(entry, below=display_path(folder))
        for folder in folders
        for entry in read_declared(folder / DECLARATIONS_FILE)
    ]


def _stands_below(file: str, folder: str) -> bool:
    """Whether a file is in the folder or below it, both as they are reported."""
    if folder == ".":
        return not file.startswith(("/", "../"))
    return file.startswith(folder.rstrip("/") + "/")


def read_declared(path: Path) -> list[Declaration]:
    """The entries of a file of declarations; raises SpecError naming the line of the first mistake."""
    file = read_yaml(path, "file of declarations")
    check_keys(file.table, ("format", "declared"), file.name)
    if file.table.get("format") != DECLARATION_FORMAT:
        raise SpecError(f"{file.name}: format is {short_repr(file.table.get('format'))}, wanted {DECLARATION_FORMAT}")
    entries = file.table.get("declared")
    if not isinstance(entries, list):
        raise SpecError(
            f"{file.name}: declared is {short_repr(entries)}, wanted a list of entries with rule or mechanism, and why"
        )
    return [_entry(entry, file, index) for index, entry in enumerate(entries)]


def _entry(entry: Any, file: YamlFile, index: int) -> Declaration:
    where = f"{file.name} line {file.lines['declared', index]}"
    if not isinstance(entry, dict):
        raise SpecError(f"{where}: {short_repr(entry)} is no entry, wanted rule or mechanism, and why")
    check_keys(entry, _KEYS, where)
    fields = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in entry.items()}
    if not fields.get("why", "").strip():
        raise SpecError(f"{where}: says no why; say where the mechanism was evaluated")
    rules = load_rules()
    if "rule" not in fields and "mechanism" not in fields:
        raise SpecError(f"{where}: names neither rule nor mechanism")
    if "rule" in fields and fields["rule"] not in (names := [rule.id for rule in rules.rules]):
        raise UnknownName(f"rule in {where}", fields["rule"], names)
    mechanisms = [name for name, mechanism in rules.mechanisms.items() if mechanism.lossy and name != CORRECTION]
    if "mechanism" in fields and fields["mechanism"] not in mechanisms:
        raise UnknownName(f"mechanism in {where}", fields["mechanism"], mechanisms)
    if fields.get("role", "both") not in _ROLES:
        raise UnknownName(f"role in {where}", fields["role"], _ROLES)
    return Declaration(**fields)
