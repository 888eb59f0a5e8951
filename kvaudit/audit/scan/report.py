"""A scan as lines for people and as the JSON that a disclosure takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvaudit import __version__
from kvaudit.audit.scan.interpret import Finding
from kvaudit.audit.scan.rules import NO_EQUIVALENT, load_rules
from kvaudit.audit.scan.scan import Scan
from kvaudit.core.text import inline

SCAN_FORMAT, SCAN_VERSION = "kvaudit.scan", 1
_LISTED = 20  # clean files that are named


def report_lines(scan: Scan) -> Iterator[str]:
    """One line per finding, per unread value, per correction; then what was clean and what is open."""
    for one in scan.found:
        mechanism = f"{one.rule.mechanism}  {_setting(one)}  policy {one.policy}"
        yield inline(f"found         {_place(one)}  {one.role}  {_engines(one)}  {mechanism}  {_state(one)}")
    for correction in scan.corrections:
        yield inline(f"correction    {_place(correction)}  {_engines(correction)}  {_setting(correction)}")
    for unread in scan.not_readable:
        yield inline(f"not readable  {unread.file}:{unread.line}  {unread.reason}")
    for file in scan.not_found[:_LISTED]:
        yield inline(f"not found     {file}")
    if len(scan.not_found) > _LISTED:
        yield f"not found     in {len(scan.not_found) - _LISTED} more files"
    for entry in scan.stale:
        what = entry.rule or entry.mechanism
        yield inline(f"stale         the declaration of {what} in {entry.file} meets nothing; remove it")
    yield scan_summary(scan)


def scan_summary(scan: Scan) -> str:
    """The numbers, and what to do where something is open."""
    files = len({finding.file for finding in scan.found})
    text = (
        f"{len(scan.found)} found in {files} files, {len(scan.not_readable)} not readable, nothing in "
        f"{len(scan.not_found)} files, {scan.skipped} of other kinds; {len(scan.open)} that nobody answers for"
    )
    return f"{text}: declare them in kvaudit.yaml, or correct their rollouts" if scan.open else text


def scan_table(scan: Scan, paths: list[str]) -> dict[str, Any]:
    """Schema ``kvaudit.scan`` version 1: what was found for rollouts and for serving, and what answers for it."""
    return {
        "format": SCAN_FORMAT,
        "version": SCAN_VERSION,
        "kvaudit": __version__,
        "rules_sha256": load_rules().sha256,
        "paths": paths,
        "found": [_row(finding) for finding in scan.found],
        "corrections": [_key_row(finding) for finding in scan.corrections],
        "not_readable": [unread._asdict() for unread in scan.not_readable],
        "not_found": list(scan.not_found),
        "other_files": scan.skipped,
        "open": len(scan.open),
    }


def _row(finding: Finding) -> dict[str, Any]:
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


def _place(finding: Finding) -> str:
    return f"{finding.file}:{finding.line}"


def _engines(finding: Finding) -> str:
    return " or ".join(finding.engines)


def _setting(finding: Finding) -> str:
    named = finding.key.endswith("(...)") or finding.key.startswith("import ")
    default = " (by default)" if finding.by_default else ""
    return finding.key if named else f"{finding.key} = {finding.value}{default}"


def _state(finding: Finding) -> str:
    if finding.state == "open":
        return "OPEN: neither corrected nor declared" if finding.role == "rollout" else "OPEN: not declared"
    return f"{finding.state}: {finding.answer}" if finding.answer else finding.state
