"""Scan files for KV compression, and find what accounts for each finding: a declaration or a correction.

A lossy mechanism needs a declaration in ``kvaudit.yaml``. In rollouts, a correction (importance weights) in the same
file also suffices; if mechanism and correction are set in command lines, they must be in the same command. A correction
accounts for changed log-probs, not for changed text. Native mechanisms, which come with the weights, and lossless ones
need neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvaudit import __version__
from kvaudit.audit.scan.files import ConfigFile, display_path, read_file
from kvaudit.audit.scan.interpret import Finding, Interpreter, NotReadable
from kvaudit.audit.scan.rules import CORRECTION, NATIVE, NO_EQUIVALENT, load_rules
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.files import YamlFile, check_keys, read_yaml
from kvaudit.core.text import inline, join_names, one_line, short_repr

DECLARATIONS_FILE = "kvaudit.yaml"
DECLARATION_FORMAT = 1
_KEYS = ("rule", "mechanism", "file", "role", "value", "why")
_ROLES = ("rollout", "serving", "both", "unknown")


@dataclass(frozen=True)
class Declaration:
    """An entry of ``kvaudit.yaml`` that says why compression is there, for all findings that agree with its fields.

    ``folder``: the folder of the ``kvaudit.yaml``; only files below it are covered. None if the file was given for the
    whole scan.
    """

    why: str  # printed in the disclosure
    rule: str | None = None
    mechanism: str | None = None
    file: str = "*"  # a pattern of the displayed path
    role: str | None = None
    value: str | None = None
    folder: str | None = None

    def covers(self, finding: Finding) -> bool:
        """Return whether this declaration covers a finding."""
        return (
            self.rule in (None, finding.rule.id)
            and self.mechanism in (None, finding.rule.mechanism)
            and self.role in (None, finding.role)
            and self.value in (None, finding.value)
            and (self.folder is None or _is_below(finding.file, self.folder))
            and (fnmatchcase(finding.file, self.file) or fnmatchcase(finding.file, f"*/{self.file}"))
        )


@dataclass(frozen=True)
class Scan:
    """The result of scanning files: compression settings found, declarations that cover them, and unreadable places."""

    findings: Sequence[Finding]
    corrections: Sequence[Finding]
    not_readable: Sequence[NotReadable]
    clean_files: Sequence[str]
    skipped: int  # files that are no configurations
    stale: Sequence[Declaration]  # declarations that match no finding
    left_out: Sequence[str] = ()  # links, and folders that are not read

    @property
    def open(self) -> list[Finding]:
        """The findings of lossy mechanisms that are neither declared nor corrected."""
        return [finding for finding in self.findings if finding.state == "open"]


def scan_files(
    files: Sequence[ConfigFile],
    declared: Sequence[Declaration] = (),
    skipped: int = 0,
    left_out: Sequence[str] = (),
) -> Scan:
    """Return what the rules match in every file; an unreadable file is reported and does not stop the scan."""
    rules = load_rules()
    findings: list[Finding] = []
    corrections: list[Finding] = []
    unread: list[NotReadable] = []
    clean_files: list[str] = []
    for file in files:
        contents = read_file(file.path)
        matches, values = Interpreter(file.name, contents, rules).findings()
        file_unread = [NotReadable(file.name, line, one_line(reason)) for line, reason in contents.unread] + values
        file_corrections = [match for match in matches if match.rule.mechanism == CORRECTION]
        by_block = {correction.block: correction for correction in reversed(file_corrections)}
        file_findings = [
            _set_state(match, by_block, declared) for match in matches if match.rule.mechanism != CORRECTION
        ]
        unread += file_unread
        corrections += file_corrections
        findings += file_findings
        if not (file_findings or file_unread):
            clean_files.append(file.name)
    stale = [entry for entry in declared if not any(entry.covers(finding) for finding in findings)]
    return Scan(findings, corrections, unread, clean_files, skipped, stale, left_out)


def _set_state(finding: Finding, corrections: dict[int, Finding], declared: Sequence[Declaration]) -> Finding:
    mechanism = load_rules().mechanisms[finding.rule.mechanism]
    if not mechanism.lossy:
        return replace(finding, state="native" if finding.rule.mechanism == NATIVE else "lossless")
    if entry := next((entry for entry in declared if entry.covers(finding)), None):
        return replace(finding, state="declared", answer=entry.why)
    if mechanism.corrected and finding.role == "rollout":
        # block 0: words outside a command, which may belong to any command
        correction = corrections.get(finding.block) or corrections.get(0)
        if finding.block == 0:
            correction = correction or next(iter(corrections.values()), None)
        if correction is not None:
            return replace(finding, state="corrected", answer=f"{correction.key} in line {correction.line}")
    return finding


def find_declarations(paths: Sequence[Path], file: Path | None) -> list[Declaration]:
    """Return the declarations in ``file``, or else in the ``kvaudit.yaml`` of each scanned folder that has one."""
    if file is not None:
        return read_declarations(file)
    folders = dict.fromkeys(path for path in paths if (path / DECLARATIONS_FILE).is_file())
    return [
        replace(entry, folder=display_path(folder))
        for folder in folders
        for entry in read_declarations(folder / DECLARATIONS_FILE)
    ]


def _is_below(file: str, folder: str) -> bool:
    """Return whether a file is below a folder; both are given as paths for display (see ``display_path``)."""
    if folder == ".":
        return not file.startswith(("/", "../"))
    return file.startswith(folder.rstrip("/") + "/")


def read_declarations(path: Path) -> list[Declaration]:
    """Return the entries of a file of declarations; raises SpecError with the line of the first mistake."""
    file = read_yaml(path, "file of declarations")
    check_keys(file.table, ("format", "declared"), file.name)
    if file.table.get("format") != DECLARATION_FORMAT:
        raise SpecError(f"{file.name}: format is {short_repr(file.table.get('format'))}, wanted {DECLARATION_FORMAT}")
    entries = file.table.get("declared")
    if not isinstance(entries, list):
        raise SpecError(
            f"{file.name}: declared is {short_repr(entries)}, wanted a list of entries with rule or mechanism, and why"
        )
    return [_parse_entry(entry, file, index) for index, entry in enumerate(entries)]


def _parse_entry(entry: Any, file: YamlFile, index: int) -> Declaration:
    place = f"{file.name} line {file.lines['declared', index]}"
    if not isinstance(entry, dict):
        raise SpecError(f"{place}: the entry is {short_repr(entry)}, wanted a mapping with rule or mechanism, and why")
    check_keys(entry, _KEYS, place)
    fields = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in entry.items()}
    if not fields.get("why", "").strip():
        raise SpecError(f"{place}: why is missing; say where the mechanism was evaluated")
    rules = load_rules()
    if "rule" not in fields and "mechanism" not in fields:
        raise SpecError(f"{place}: rule and mechanism are both missing; give one of them")
    if "rule" in fields and fields["rule"] not in (names := [rule.id for rule in rules.rules]):
        raise UnknownName(f"rule in {place}", fields["rule"], names)
    mechanisms = [name for name, mechanism in rules.mechanisms.items() if mechanism.lossy and name != CORRECTION]
    if "mechanism" in fields and fields["mechanism"] not in mechanisms:
        raise UnknownName(f"mechanism in {place}", fields["mechanism"], mechanisms)
    if fields.get("role", "both") not in _ROLES:
        raise UnknownName(f"role in {place}", fields["role"], _ROLES)
    return Declaration(**fields)


SCAN_FORMAT, SCAN_VERSION = "kvaudit.scan", 1
_NAMED = 8  # links and folders that are left out
_LISTED = 20  # clean files that are listed by name


def report_lines(scan: Scan) -> Iterator[str]:
    """Yield a line per finding, correction, unread value, clean file and unused declaration; then the totals."""
    for finding in scan.findings:
        place, engines, setting = _describe(finding)
        mechanism = f"{finding.rule.mechanism}  {setting}  policy {finding.policy}"
        yield inline(f"found         {place}  {finding.role}  {engines}  {mechanism}  {_state(finding)}")
    for correction in scan.corrections:
        yield inline(f"correction    {'  '.join(_describe(correction))}")
    for unread in scan.not_readable:
        yield inline(f"not readable  {unread.file}:{unread.line}  {unread.reason}")
    for file in scan.clean_files[:_LISTED]:
        yield inline(f"not found     {file}")
    if len(scan.clean_files) > _LISTED:
        yield f"not found     in {len(scan.clean_files) - _LISTED} more files"
    if scan.left_out:
        yield inline(f"left out      {len(scan.left_out)} links or folders: {join_names(scan.left_out, _NAMED)}")
    for entry in scan.stale:
        subject = entry.rule or entry.mechanism
        yield inline(f"stale         the declaration of {subject} in {entry.file} matches no finding; remove it")
    yield _totals(scan)


def _describe(finding: Finding) -> tuple[str, str, str]:
    """Return location, engines, and key with value of a finding, as texts."""
    setting = finding.key
    if not (setting.endswith("(...)") or setting.startswith("import ")):
        setting = f"{setting} = {finding.value}{' (by default)' if finding.by_default else ''}"
    return f"{finding.file}:{finding.line}", " or ".join(finding.engines), setting


def _state(finding: Finding) -> str:
    if finding.state == "open":
        return "OPEN: neither corrected nor declared" if finding.role == "rollout" else "OPEN: not declared"
    return f"{finding.state}: {finding.answer}" if finding.answer else finding.state


def _totals(scan: Scan) -> str:
    files = len({finding.file for finding in scan.findings})
    text = (
        f"{len(scan.findings)} found in {files} files, {len(scan.not_readable)} not readable, nothing in "
        f"{len(scan.clean_files)} files, {scan.skipped} files of other kinds; {len(scan.open)} open"
    )
    return f"{text}: declare them in kvaudit.yaml, or correct their rollouts" if scan.open else text


def scan_table(scan: Scan, paths: list[str]) -> dict[str, Any]:
    """Return the scan as JSON of format ``kvaudit.scan``, version 1."""
    return {
        "format": SCAN_FORMAT,
        "version": SCAN_VERSION,
        "kvaudit": __version__,
        "rules_sha256": load_rules().sha256,
        "paths": paths,
        "found": [_finding_row(finding) for finding in scan.findings],
        "corrections": [_key_row(finding) for finding in scan.corrections],
        "not_readable": [unread._asdict() for unread in scan.not_readable],
        "not_found": list(scan.clean_files),
        "other_files": scan.skipped,
        "left_out": list(scan.left_out),
        "open": len(scan.open),
    }


def _finding_row(finding: Finding) -> dict[str, Any]:
    mechanism = load_rules().mechanisms[finding.rule.mechanism]
    return {
        **_key_row(finding),
        "says": mechanism.says,
        "lossy": mechanism.lossy,
        "policy": None if finding.policy == NO_EQUIVALENT else finding.policy,
        "state": finding.state,
        "answer": finding.answer,
    }


def _key_row(finding: Finding) -> dict[str, Any]:
    return {
        "file": finding.file,
        "line": finding.line,
        "role": finding.role,
        "engines": list(finding.engines),
        "rule": finding.rule.id,
        "mechanism": finding.rule.mechanism,
        "key": finding.key,
        "value": finding.value,
        "by_default": finding.by_default,
        "since": finding.rule.since,
        "source": finding.rule.source,
        "note": finding.rule.note,
    }
