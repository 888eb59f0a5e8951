"""The work as functions: check a setting, run a spec, load and gate a run, compare two result files.

Each raises an AuditError with one line where the input is wrong, and prints what the command of the same name prints
while it works.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvaudit.results import Comparison, Run

if TYPE_CHECKING:
    from kvaudit.reports.gate.verdict import Verdict


def load_run(path: Path | str) -> Run:
    """The run in a folder; reads what is asked of it, when it is asked.

    >>> run = load_run("runs/quickstart")  # doctest: +SKIP
    >>> run.table().query("gated and status == 'FAIL'")  # doctest: +SKIP
    """
    return Run(path)


def gate(
    path: Path | str,
    *,
    gate_file: Path | str | None = None,
    waivers: Path | str | None = None,
    on_inconclusive: str | None = None,
) -> Verdict:
    """The verdict of a run, with ``status`` and the ``exit_code`` of the command.

    A ``gate_file`` that was not declared when the run began is refused with a SpecError, as by the command.

    >>> gate("runs/quickstart").status  # doctest: +SKIP
    """
    from kvaudit.audit.commands.report import asked_of
    from kvaudit.reports.gate.rules import refuse_late

    rules, waived = (None if file is None else Path(file) for file in (gate_file, waivers))
    findings = Run(path, asked_of(rules, waived, on_inconclusive)).findings
    refuse_late(findings.rules)
    return findings.verdict


def compare(
    reference: Path | str,
    candidate: Path | str,
    *,
    margin: float = 5.0,
    margins: Mapping[str, float] | None = None,
    alpha: float = 0.05,
    metric: str | None = None,
    cluster: str | None = None,
    lower_is_better: bool = False,
    items_are_independent: bool = False,
) -> Comparison:
    """Two result files or run folders: kvaudit's, lm-eval's, Inspect's, AgentDojo's, or a CSV.

    ``margin`` and ``margins`` (by suite or facet) are in percentage points, ``cluster`` says which items share a
    template: a field of the rows, ``re:PATTERN`` of the item's name, or ``file:MAP.csv``.

    >>> compare("dense.jsonl", "fp8.jsonl", cluster="template").verdict.status  # doctest: +SKIP
    """
    from kvaudit.core.errors import SpecError
    from kvaudit.core.provenance import check_checkpoints
    from kvaudit.reports.compare.files import Sides
    from kvaudit.reports.compare.files import compare as compared
    from kvaudit.reports.compare.pairing import chosen_metrics
    from kvaudit.reports.records.readers.base import Request, read_log
    from kvaudit.reports.records.readers.clusters import cluster_rule

    if cluster is not None and items_are_independent:
        raise SpecError("cluster says that items share clusters, items_are_independent that none do; give one")
    paths = Path(reference), Path(candidate)
    for path in paths:
        check_checkpoints(path)
    rule = cluster_rule(cluster) if cluster is not None else None
    old, new = (read_log(path, Request(rule)) for path in paths)
    sides = Sides(old, new, lower_is_better=lower_is_better, own_clusters=rule is not None)
    (name,) = chosen_metrics(old, new, () if metric is None else (metric,))
    return Comparison(
        compared(
            sides,
            name,
            margin=margin,
            margins=margins,
            alpha=alpha,
            items_are_independent=items_are_independent,
        )
    )
