"""The commands as functions, and what they return: check a setting, run a spec, load and gate a run, compare two files.

If the input is wrong, each function raises an AuditError of one line. It prints what the command of the same name
prints. ``Run`` and ``Comparison`` hold the results as objects and pandas tables; they need no torch.

    run = kvaudit.load_run("runs/quickstart")
    run.verdict.status                      # Status.PASS, FAIL, INCONCLUSIVE, INVALID or NOT_MEASURABLE
    run.table()[["contrast", "arm", "policy", "suite", "estimate", "low", "high", "status"]]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    Raises DataError if the folder is no run, or if its files or checkpoints have changed since the run. Raises
    SpecError if the gate file or the waivers cannot be used.
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
        """The drift (what changed), the gate's rules and the verdict; labels by humans override those by a judge."""
        from kvaudit.reports.run import decide_run

        return decide_run(self.data, self._overrides)

    @property
    def spec(self) -> RunSpec:
        """The complete spec that the run stored, with all defaults written out."""
        return self.data.spec

    @property
    def records(self) -> pd.DataFrame:
        """A table with a row for each graded sample: arm, seed, policy, suite, item_id, outcome, score, facets, ..."""
        return self.data.records

    def answers(self) -> Iterator[Record]:
        """Yield every record (one graded answer) with its transcript, in the order of the files."""
        places = zip(self.records["file"], self.records["line"], strict=True)
        return (record for _, record in self.data.records_at((str(file), int(line)) for file, line in places))

    @property
    def drift(self) -> Drift:
        """The measured changes: the rate of every cell, and each difference from the reference with its interval."""
        return self.findings.drift

    @property
    def verdict(self) -> Verdict:
        """The verdict (PASS, FAIL, INCONCLUSIVE, INVALID or NOT MEASURABLE) with the decision of every cell."""
        return self.findings.verdict

    def table(self) -> pd.DataFrame:
        """Return a row per contrast (candidate against reference) and facet: rates in percent, and the gate's decision.

        ``estimate`` is the drift, candidate minus reference, ``low`` to ``high`` its 95 % interval, and ``lower`` and
        ``upper`` are its one-sided bounds. These and ``margin`` are in percentage points. A number that does not exist
        is missing, never 0. ``status`` is None for rows that the gate does not decide.
        """
        return _contrast_table(self.findings)

    def report(self) -> Path:
        """Write report/ into the folder; return the path of report.html."""
        from kvaudit.reports.run import write_decided_run

        write_decided_run(self.data, self.findings)
        return self.path / "report" / "report.html"


@dataclass(frozen=True)
class Comparison:
    """The comparison of two result files or run folders by one metric, as ``compare`` returns it."""

    compared: MetricComparison

    @property
    def verdict(self) -> Verdict:
        """The verdict on the two files, decided for each suite, length and facet that has a margin."""
        return self.compared.verdict

    @property
    def records(self) -> pd.DataFrame:
        """A table with a row for each answer of the reference and of the candidate."""
        return self.compared.records

    def table(self) -> pd.DataFrame:
        """Return a row for each suite and length, and one for each facet there, with the columns of ``Run.table()``."""
        return _contrast_table(self.compared.findings)


def _contrast_table(findings: Findings) -> pd.DataFrame:
    import pandas as pd

    from kvaudit.reports.verdict.row import CONTRAST_COLUMNS, contrast_rows

    return pd.DataFrame(list(contrast_rows(findings)), columns=list(CONTRAST_COLUMNS))


def check(
    model: str,
    *,
    engine: str | None = None,
    kv: str | None = None,
    settings: Mapping[str, str] | None = None,
    python: str | None = None,
    weights: str | None = None,
    policy: str | None = None,
    reference: str | None = None,
    candidate: str | None = None,
    minutes: float | None = None,
    seed: int | None = None,
    made_up: bool = False,
    sums: bool = False,
    agents: bool = False,
    long: bool = False,
    out: Path | str | None = None,
    resume: bool = False,
    data: Path | str | None = None,
    threads: int | None = None,
) -> Run:
    """Check whether a model may be served with a KV setting; print the answer and return the run with its ``verdict``.

    ``model`` is a folder, a .gguf file or ``embedded``. Say how it is served: by an ``engine`` with its KV setting
    ``kv`` and other ``settings``, under a ``policy`` of kvaudit's cache, or by two servers, ``reference`` and
    ``candidate``, each as URL#MODEL. ``python`` is the executable of the engine's environment, and ``weights`` the
    model in the engine's format. ``minutes`` (10) limits the time, and ``seed`` orders the questions. These are public
    rows from the folder ``data``; ``made_up`` asks kvaudit's own questions instead. ``sums`` adds mathematics, and
    ``agents`` adds tool calls. With ``long``, questions follow the longest conversation after which the model still
    refuses harmful requests and helps with harmless ones. The run is written to the folder ``out``; with ``resume``,
    a run that was begun there is finished.

    >>> check("models/mine", engine="openvino", kv="u4").verdict.status  # doctest: +SKIP
    """
    from kvaudit.audit.commands.check import CheckOptions, run_check

    options = CheckOptions(
        engine=engine,
        kv=kv,
        settings=[f"{name}={value}" for name, value in (settings or {}).items()],
        python=python,
        weights=weights,
        policy=policy,
        reference=reference,
        candidate=candidate,
        minutes=minutes,
        seed=seed,
        made_up=made_up,
        sums=sums,
        agents=agents,
        long=long,
        data=None if data is None else Path(data),
    )
    folder, _ = run_check(model, options, None if out is None else Path(out), threads, resume=resume)
    return Run(folder)


def run(
    spec: Path | str | Mapping[str, Any],
    *,
    out: Path | str | None = None,
    resume: bool = False,
    limit: int | None = None,
    threads: int | None = None,
    workers: int | None = None,
    plugins: Sequence[Path | str] = (),
    anyway: bool = False,
) -> Run:
    """Train the arms of a spec, evaluate them and write the report; ``spec`` is a file or a mapping.

    The run is written to the folder ``out``; with ``resume``, a run that was begun there is finished. ``limit`` is the
    largest number of items per suite, for a trial. ``plugins`` are files with plug-ins. Raises CannotPass if a gated
    cell could not pass whatever the model answers, and NotMeasurable (exit code 6) if the reference has nothing to lose
    in a suite; ``anyway`` runs the spec nevertheless.

    >>> grid = {"policies": ["none", "int8"], "suites": {"math": {"items": 4}}, "context_tokens": [96], "pilot": 0}
    >>> spec = {"name": "tiny", "model": "embedded", "evaluate": {"base": True, **grid}}
    >>> tiny = run(spec, out="runs/tiny", threads=1, anyway=True)  # doctest: +ELLIPSIS
    run tiny ...
    >>> sorted(tiny.records["policy"].str.partition(":")[0].unique())
    ['int8', 'none']
    """
    from kvaudit.audit.commands.run import RunOptions, run_spec

    files = (plugins,) if isinstance(plugins, str) else plugins
    options = RunOptions(limit=limit, threads=threads, workers=workers, plugins=list(map(Path, files)), anyway=anyway)
    source = spec if isinstance(spec, Mapping) else Path(spec)
    return Run(run_spec(source, None if out is None else Path(out), options, resume=resume))


def load_run(path: Path | str) -> Run:
    """Return the run in a folder; its files are read on first use.

    >>> mine = load_run("runs/mine")
    >>> mine.verdict.status.value
    'FAIL'
    >>> worst = mine.table().query("gated").sort_values("estimate").iloc[0]
    >>> worst["arm"], worst["suite"], worst["status"]
    ('naive', 'refusal', 'FAIL')
    """
    return Run(path)


def gate(
    path: Path | str,
    *,
    gate_file: Path | str | None = None,
    waivers: Path | str | None = None,
    on_inconclusive: str | None = None,
) -> Verdict:
    """Return the verdict of a run, with its ``status`` and the ``exit_code`` of the command ``kvaudit gate``.

    ``gate_file`` has the gate's rules; ``waivers`` is a file that says which cells need not pass, and why.
    ``on_inconclusive`` chooses the exit code for INCONCLUSIVE: 4 for ``block``, 0 for ``warn``. Raises SpecError for a
    ``gate_file`` that was not declared when the run began.

    >>> gate("runs/mine").exit_code
    3
    """
    from kvaudit.audit.commands.report import GateOptions
    from kvaudit.reports.verdict.rules import refuse_late_rules

    rules, waived = (None if file is None else Path(file) for file in (gate_file, waivers))
    findings = Run(path, GateOptions(rules, waived, on_inconclusive).read()).findings
    refuse_late_rules(findings.rules)
    return findings.verdict


def compare(
    reference: Path | str,
    candidate: Path | str,
    *,
    margin: float = 5.0,
    margins: Mapping[str, float] | None = None,
    ratios: Mapping[str, float] | None = None,
    alpha: float = 0.05,
    metric: str | None = None,
    cluster: str | None = None,
    lower_is_better: bool = False,
    higher_is_better: bool = False,
    items_are_independent: bool = False,
    select_reference: Mapping[str, str] | None = None,
    select_candidate: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare two result files or run folders: kvaudit's, lm-eval's, Inspect's, AgentDojo's, or a CSV.

    ``margin``, or ``margins`` by suite or facet, says how many percentage points may be lost; ``ratios`` say instead
    how many times as often the unwanted outcome may happen. ``alpha`` is the one-sided significance level. ``metric``
    names the metric if the files have several. ``cluster`` says which items share a template: give the name of a field
    that is equal in their rows, ``re:PATTERN`` whose match is equal in their names, or ``file:MAP.csv``, which lists
    them. Set ``items_are_independent`` if none do. ``select_reference`` and ``select_candidate`` choose a cell of a run
    folder by arm, policy, seed, suite or context. For a metric that is not well known, set ``lower_is_better`` or
    ``higher_is_better``.

    >>> found = compare("dense.csv", "fp8.csv", cluster="template", margin=5)
    >>> found.verdict.status.value, float(found.table()["estimate"].iloc[0])
    ('PASS', -1.0)
    """
    from kvaudit.reports.page.compare_files import compare as compared
    from kvaudit.reports.page.compare_files import read_sides
    from kvaudit.reports.page.compare_pairing import choose_metrics

    sides = read_sides(
        Path(reference),
        Path(candidate),
        cluster=cluster,
        items_are_independent=items_are_independent,
        lower_is_better=lower_is_better,
        higher_is_better=higher_is_better,
        select=(select_reference or {}, select_candidate or {}),
    )
    (name,) = choose_metrics(sides.reference, sides.candidate, () if metric is None else (metric,))
    return Comparison(
        compared(
            sides,
            name,
            margin=margin,
            margins=margins,
            ratios=ratios,
            alpha=alpha,
            items_are_independent=items_are_independent,
        )
    )
