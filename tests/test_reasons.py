"""Every reason code is explained once in the code and once in the docs, in the same words."""

from __future__ import annotations

import re
from pathlib import Path

from kvaudit.reports.verdict.reasons import Reason, ReasonCode

PAGE = Path(__file__).parent.parent / "docs" / "read-the-report.md"


def test_the_guide_lists_every_code_with_its_meaning() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert rows == [(code.value, code.meaning) for code in ReasonCode]


def test_a_reason_prints_its_code_and_its_sentence() -> None:
    assert str(Reason(ReasonCode.REF_HASH, "other weights")) == "REFHASH: other weights"
