"""The results of a run and of a comparison, as objects and as tables; no torch.

run = kvaudit.load_run("runs/quickstart")
run.verdict.status                      # Status.PASS, FAIL, INCONCLUSIVE, INVALID or NOT_MEASURABLE
run.table()[["contrast", "arm", "policy", "suite", "estimate", "low", "high", "status"]]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from kvaudit.core.records import Record
    from kvaudit.core.spec import RunSpec
    from kvaudit.reports.page.compare_files import MetricComparison
    from kvaudit.reports.page.findings import Findings
    from kvaudit.reports.records.load import RunData
    from kvaudit.reports.verdict.contrast import Drift
    from kvaudit.reports.verdict.rules import GateOverrides
    from kvaudit.reports.verdict.verdict import Verdict


class Run:
    """A run folder: its spec, records, drift and verdict, each read on first use.

    Raises DataError for a folder that is not a run, or whose files or checkpoints have changed since the run; SpecError
    for rules that cannot be used.
    """

    def __init__(self, path: Path | str, overrides: GateOverrides | None = None) -> None:
        from kvaudit.core.provenance import check_checkpoints

        self.path = Path(path)
        self._overrides = overrides
        check_checkpoints(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def data(self) -> RunData:
        """The records, spec and provenance in the run folder, as reports read them."""
        from kvaudit.reports.records.load import load_run

        return load_run(self.path)

    @cached_property
    def findings(self) -> Findings:
        """The drift, rules and verdict with every facet; human labels take precedence over the judge's."""
        from kvaudit.reports.run import decide_run

        return decide_run(self.data, self._overrides)

    @property
    def spec(self) -> RunSpec:
        """The complete spec that the run wrote."""
        return self.data.spec

    @property
    def records(self) -> pd.DataFrame:
        """A table with a row for each graded sample: arm, seed, policy, suite, item_id, outcome, score, facets, ..."""
        return self.data.records

    def answers(self) -> Iterator[Record]:
        """Yield every record with its transcript, in the order of the files."""
        places = zip(self.records["file"], self.records["line"], strict=True)
        return (record for _, record in self.data.records_at((str(file), int(line)) for file, line in places))

    @property
    def drift(self) -> Drift:
        """The measured changes: the rate of every cell, and each contrast with the reference with its interval."""
        return self.findings.drift

    @property
    def verdict(self) -> Verdict:
        """The verdict (PASS, FAIL, INCONCLUSIVE, INVALID or NOT MEASURABLE) with the decision of every cell."""
        return self.findings.verdict

    def table(self) -> pd.DataFrame:
        """Return one row per contrast and facet: both sides in percent, and the gate's decision.

        In percentage points: the drift ``estimate``, candidate minus reference, with its 95 % interval ``low`` to
        ``high``, its one-sided bound ``lower``, and ``margin``. Numbers that do not exist are missing, never 0;
        ``status`` is None outside the gate.
        """
        return _contrast_table(self.findings)

    def report(self) -> Path:
        """Write report/ into the folder; return the path of report.html."""
        from kvaudit.reports.run import write_decided_run

        write_decided_run(self.data, self.findings)
        return self.path / "report" / "report.html"


@dataclass(frozen=True)
class Comparison:
    """The comparison of two result files by one metric."""

    compared: MetricComparison

    @property
    def verdict(self) -> Verdict:
        """The verdict on the two files, decided for each suite, length and facet that has a margin."""
        return self.compared.verdict

    @property
    def records(self) -> pd.DataFrame:
        """A table with a row per answer of either side."""
        return self.compared.records

    def table(self) -> pd.DataFrame:
        """Return one row per contrast and facet, with the columns of ``Run.table()``."""
        return _contrast_table(self.compared.findings)


def _contrast_table(findings: Findings) -> pd.DataFrame:
    import pandas as pd

    from kvaudit.reports.verdict.row import CONTRAST_COLUMNS, contrast_rows

    return pd.DataFrame(list(contrast_rows(findings)), columns=list(CONTRAST_COLUMNS))
