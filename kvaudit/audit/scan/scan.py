"""From files to findings, and who answers for each.

A lossy mechanism is answered for by a declaration; in rollouts also by a correction that the same file switches on,
and where both stand in command lines, the same command. A correction answers for other numbers, never for another
text. What comes with the weights, and what moves entries without loss, needs no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvaudit.audit.scan.scan import Declaration
from kvaudit.audit.scan.files import ConfigFile, read_file
from kvaudit.audit.scan.interpret import Finding, Interpreter, NotReadable
from kvaudit.audit.scan.rules import CORRECTION, NATIVE, load_rules
from kvaudit.core.text import one_line


@dataclass(frozen=True)
class Scan:
    """What a scan says of a set of files."""

    found: Sequence[Finding]
    corrections: Sequence[Finding]
    not_readable: Sequence[NotReadable]
    not_found: Sequence[str]
    skipped: int
    stale: Sequence[Declaration]  # declarations that nothing meets

    @property
    def open(self) -> list[Finding]:
        """The compressors that nobody answers for."""
        return [finding for finding in self.found if finding.state == "open"]


def scan_files(files: Sequence[ConfigFile], declared: Sequence[Declaration] = (), skipped: int = 0) -> Scan:
    """Read every file against the rules; a file that cannot be read stops none of the others."""
    rules = load_rules()
    found: list[Finding] = []
    corrections: list[Finding] = []
    unread: list[NotReadable] = []
    clean: list[str] = []
    for file in files:
        contents = read_file(file.path)
        findings, values = Interpreter(file.name, contents, rules).findings()
        broken = [NotReadable(file.name, line, one_line(reason)) for line, reason in contents.unread] + values
        mine = [finding for finding in findings if finding.rule.mechanism == CORRECTION]
        by_block = {correction.block: correction for correction in reversed(mine)}
        others = [_answered(one, by_block, declared) for one in findings if one.rule.mechanism != CORRECTION]
        unread += broken
        corrections += mine
        found += others
        if not (others or broken):
            clean.append(file.name)
    stale = [entry for entry in declared if not any(entry.covers(finding) for finding in found)]
    return Scan(found, corrections, unread, clean, skipped, stale)


def _answered(finding: Finding, corrections: dict[int, Finding], declared: Sequence[Declaration]) -> Finding:
    mechanism = load_rules().mechanisms[finding.rule.mechanism]
    if not mechanism.lossy:
        return replace(finding, state="native" if finding.rule.mechanism == NATIVE else "lossless")
    if entry := next((entry for entry in declared if entry.covers(finding)), None):
        return replace(finding, state="declared", answer=entry.why)
    if mechanism.corrected and finding.role == "rollout":
        # words of no command may go to any of them
        correction = corrections.get(finding.block) or corrections.get(0)
        if finding.block == 0:
            correction = correction or next(iter(corrections.values()), None)
        if correction is not None:
            return replace(finding, state="corrected", answer=f"{correction.key} in line {correction.line}")
    return finding
