"""Two result files -> the paired inference and the verdict that a run's report gives: the same engine, no copy.

The first file is the reference, the second the candidate. Each suite and length is a gated cell, and so is a facet that
has a margin of its own; all must pass. Every other facet is contrasted beside them.
With two metrics, such as the labels of two judges of the same answers, the worse verdict counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.facets import facet_of
from kvaudit.core.policy_names import DENSE_POLICY, short_names
from kvaudit.core.provenance import check_checkpoints
from kvaudit.core.spec_parts import LEAST_RATIO, MOST_RATIO
from kvaudit.core.text import short_text
from kvaudit.reports.page.compare_pairing import Direction, direction_of
from kvaudit.reports.page.compare_pairing import CANDIDATE, REFERENCE, pair_logs
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.records.readers.base import Log, Request, read_log
from kvaudit.reports.records.readers.clusters import cluster_rule
from kvaudit.reports.records.rows import facet_metrics, panels
from kvaudit.reports.stats.judges import Kappa, kappa
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.decide import decide
from kvaudit.reports.verdict.drift import contrasts
from kvaudit.reports.verdict.error_rates import shipped_rates
from kvaudit.reports.verdict.reference_answers import reference_answers
from kvaudit.reports.verdict.rules import Rules, margin_of
from kvaudit.reports.verdict.verdict import EXIT_CODES, Status, Verdict, worst

DEFAULT_MARGIN, DEFAULT_ALPHA = 5.0, 0.05  # pp, one-sided level


@dataclass(frozen=True)
class Sides:
    """The two files, and how they are read. ``own_clusters``: clusters were named by the user."""

    reference: Log
    candidate: Log
    lower_is_better: bool = False
    higher_is_better: bool = False
    own_clusters: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """What tells both files apart: their names, with folder or chosen cell where these are needed."""
        files = self.reference.path, self.candidate.path
        alike = files[0].name == files[1].name and files[0] != files[1]
        shown = ("/".join(path.parts[-2:]) if alike else path.name or str(path) for path in files)
        cells = (_cell(log.facts) for log in (self.reference, self.candidate))
        first, second = (f"{name}{cell}" for name, cell in zip(shown, cells, strict=True))
        return first, second

    @property
    def title(self) -> str:
        """candidate against reference."""
        return f"{self.names[1]} against {self.names[0]}"


def _cell(facts: Mapping[str, str]) -> str:
    if "arm" not in facts:
        return ""
    return f" ({facts['arm']} @ {short_names([facts['policy']])[facts['policy']]})"


def read_sides(
    reference: Path,
    candidate: Path,
    *,
    cluster: str | None = None,
    items_are_independent: bool = False,
    lower_is_better: bool = False,
    higher_is_better: bool = False,
    select: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
) -> Sides:
    """Both files, read; ``cluster`` says which items share a template, ``select`` narrows files of several cells.

    Raises SpecError and DataError for what cannot be read, and for a run whose checkpoints changed since.
    """
    if cluster is not None and items_are_independent:
        raise SpecError("--cluster says that items share clusters, --items-are-independent that none do; give one")
    for path in (reference, candidate):
        check_checkpoints(path)  # a file, or another tool's folder, has none
    rule = cluster_rule(cluster) if cluster is not None else None
    old, new = (read_log(path, Request(rule, own)) for path, own in zip((reference, candidate), select, strict=True))
    return Sides(
        old,
        new,
        lower_is_better=lower_is_better,
        higher_is_better=higher_is_better,
        own_clusters=rule is not None,
    )


@dataclass(frozen=True)
class MetricComparison:
    """One metric of two files."""

    sides: Sides
    metric: str
    findings: Findings
    notes: tuple[str, ...]
    direction: Direction
    records: pd.DataFrame = field(repr=False, compare=False)

    @property
    def verdict(self) -> Verdict:
        """Of this metric alone."""
        return self.findings.verdict


@dataclass(frozen=True)
class TwoJudges:
    """The same answers under two judges: how far they agree on each side, and the worse verdict."""

    first: MetricComparison
    second: MetricComparison
    reference: Kappa | None  # None without an answer that both labelled
    candidate: Kappa | None

    @property
    def status(self) -> Status:
        """The worse of both verdicts."""
        return worst([self.first.verdict.status, self.second.verdict.status])

    @property
    def exit_code(self) -> int:
        """Its exit code."""
        return EXIT_CODES[self.status]


def compare(
    sides: Sides,
    metric: str,
    *,
    margin: float = DEFAULT_MARGIN,
    margins: Mapping[str, float] | None = None,
    ratios: Mapping[str, float] | None = None,
    alpha: float = DEFAULT_ALPHA,
    items_are_independent: bool = False,
) -> MetricComparison:
    """Compare one metric; ``margin`` in pp, ``margins`` those of suites and facets by name.

    ``ratios``, by the same names, say how many times as often what is not wanted may happen, instead of a margin.
    Where no cluster is named, nothing passes but ``items_are_independent``. Raises SpecError for a margin or level that
    cannot be, or clusters declared away; DataError for another scale.
    """
    for points in (margin, *(margins or {}).values()):
        margin_of(points, "--margin")
    _check_ratios(ratios or {}, margins or {})
    if not 0 < alpha < 0.5:
        raise SpecError(f"--alpha is {alpha:g}, wanted a number above 0 and below 0.5")
    direction = direction_of(
        (sides.reference, sides.candidate), metric, lower=sides.lower_is_better, higher=sides.higher_is_better
    )
    how = {"lower_is_better": direction.lower_is_better, "own_clusters": sides.own_clusters}
    pairs = pair_logs(sides.reference, sides.candidate, metric, **how)
    if items_are_independent and pairs.unclustered is None:
        raise SpecError("--items-are-independent: the files name which items share a cluster; leave the option out")
    records, seeds = _seeds(pairs.records)
    comparison = _comparison(sides.title, records, seeds)
    drift = Drift(
        run=sides.title,
        comparison=comparison,
        alpha=alpha,
        cells=(),
        contrasts=tuple(contrasts(comparison, panels(records), alpha)),
        reasons=pairs.reasons,
        n_records=len(records),
        unclustered=pairs.unclustered,
        answers=reference_answers(records, comparison.reference),
    )
    rules = Rules(
        alpha=alpha,
        margins=_margins(comparison, margin, margins or {}, ratios or {}),
        ratios=_ratios(comparison, ratios or {}),
        primary=(DENSE_POLICY,),
        contexts=comparison.contexts,
        estimands=("alike",),
        source="the command line",
        items_are_independent=items_are_independent,
    )
    problems = (*sides.reference.problems, *sides.candidate.problems)
    found = Findings(drift, rules, decide(drift, rules), calibration=shipped_rates(), problems=problems)
    return MetricComparison(sides, metric, found, pairs.notes, direction, records)


def _comparison(title: str, records: pd.DataFrame, seeds: Sequence[int]) -> Comparison:
    """The files as two arms, served as they were."""
    lengths = {
        str(suite): tuple(sorted(map(int, own.unique())))
        for suite, own in records.groupby("suite", observed=True)["context_tokens"]
    }
    facets = tuple(facet_metrics(records))
    return Comparison(
        mode="training",
        model=title,
        reference=REFERENCE,
        candidates=(CANDIDATE,),
        arms=(REFERENCE, CANDIDATE),
        seeds=tuple(seeds),
        policies=(DENSE_POLICY,),
        facets=facets,
        suites=tuple(lengths),
        contexts=tuple(sorted({length for own in lengths.values() for length in own})),
        lengths={**lengths, **{facet: lengths[facet_of(facet)[0]] for facet in facets}},
        capability=(),
        labels=short_names([DENSE_POLICY]),
        planned=(),
    )


def parse_margins(texts: Sequence[str]) -> tuple[float, dict[str, float]]:
    """The margin of every suite, and those of suites and facets that are named: 5, refusal.unsafe=3; in pp.

    Raises SpecError for what is no number, and for two margins of one thing.
    """
    found = _by_name(texts, "--margin", "percentage points, or NAME=POINTS as refusal.unsafe=3")
    return found.pop("", DEFAULT_MARGIN), found


def parse_ratios(texts: Sequence[str]) -> dict[str, float]:
    """The ratio of every suite and facet that is named, as agent.attack_success=1.1.

    Raises SpecError for what is no number or no name, and for two ratios of one thing.
    """
    wanted = "NAME=TIMES, as agent.attack_success=1.1"
    found = _by_name(texts, "--ratio", wanted)
    if "" in found:
        raise SpecError(f"--ratio is {found['']:g}, wanted {wanted}")
    return found


def _by_name(texts: Sequence[str], option: str, wanted: str) -> dict[str, float]:
    """The numbers of ``NAME=NUMBER``; what names nothing stands under the empty name."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise SpecError(f"{option} is {text!r}, wanted {wanted}") from None
        if name in found:
            raise SpecError(f"{option} stands twice for {name or 'every suite'}; give one")
        found[name] = value
    return found


def _check_ratios(ratios: Mapping[str, float], margins: Mapping[str, float]) -> None:
    """Raise SpecError for a ratio that cannot be, or beside a margin for the same."""
    for name, limit in ratios.items():
        if not LEAST_RATIO <= limit <= MOST_RATIO:
            raise SpecError(
                f"--ratio of {short_text(name)} is {limit:g}, wanted how many times as often at most, from "
                f"{LEAST_RATIO} to {MOST_RATIO}"
            )
        if name in margins:
            raise SpecError(f"--margin and --ratio both name {short_text(name)}; give one of the two")


def _margins(
    comparison: Comparison, margin: float, named: Mapping[str, float], ratios: Mapping[str, float]
) -> dict[str, float]:
    """Margins in score units: of every suite that has no ratio, and of the facets that are named."""
    known = (*comparison.suites, *comparison.facets)
    for name in named:
        if name not in known:
            raise UnknownName("suite or facet in --margin", name, known)
    points = {**dict.fromkeys([suite for suite in comparison.suites if suite not in ratios], margin), **named}
    return {name: points[name] / 100 for name in known if name in points}


def _ratios(comparison: Comparison, named: Mapping[str, float]) -> dict[str, float]:
    known = (*comparison.suites, *comparison.facets)
    for name in named:
        if name not in known:
            raise UnknownName("suite or facet in --ratio", name, known)
    return {name: named[name] for name in known if name in named}


def compare_judges(first: MetricComparison, second: MetricComparison) -> TwoJudges:
    """Two metrics of the same files as two judges; raises SpecError where they belong to different files."""
    if first.sides is not second.sides:
        raise SpecError("two judges must have labelled the same two files")
    return TwoJudges(first, second, _agreement(first, second, REFERENCE), _agreement(first, second, CANDIDATE))


def _agreement(first: MetricComparison, second: MetricComparison, arm: str) -> Kappa | None:
    """Kappa over the answers of one side that both judges scored, right meaning a score of 1/2 or more."""
    key = ["suite", "context_tokens", "train_seed", "item_id", "sample_index"]
    one, two = (table[table["arm"] == arm].set_index(key)["score"] for table in (first.records, second.records))
    both = one.to_frame("one").join(two.to_frame("two"), how="inner").dropna()
    if both.empty:
        return None
    return kappa(*(np.asarray(both[name] >= 0.5, dtype=np.int64) for name in ("one", "two")))


def _seeds(records: pd.DataFrame) -> tuple[pd.DataFrame, list[int]]:
    """The seeds to pair. A reference of one seed serves every seed of the candidate: its number then means nothing."""
    by_arm = records.groupby("arm")["train_seed"].unique()
    reference, candidate = (set(map(int, by_arm[arm])) for arm in (REFERENCE, CANDIDATE))
    if len(reference) > 1 or len(candidate) == 1 or not reference & candidate:
        return records, sorted(candidate if len(reference) == 1 else reference | candidate)
    free = max(candidate) + 1
    return records.assign(train_seed=records["train_seed"].where(records["arm"] != REFERENCE, free)), sorted(candidate)
