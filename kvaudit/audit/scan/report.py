"""The result of a scan as printed lines, and as the JSON that a disclosure reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvaudit import __version__
from kvaudit.audit.scan.interpret import Finding
from kvaudit.audit.scan.rules import NO_EQUIVALENT, load_rules
from kvaudit.audit.scan.scan import Scan
from kvaudit.core.text import inline, join_names

SCAN_FORMAT, SCAN_VERSION = "kvaudit.scan", 1
_NAMED = 8  # links and folders that are left out
_LISTED = 20  # clean files that are listed by name


def report_lines(scan: Scan) -> Iterator[str]:
    """Yield a line per finding, correction, unread value, clean file and stale declaration; then the totals."""
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
    """Return place, engines, and key with value."""
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
    """Return the table of format ``kvaudit.scan`` version 1."""
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
