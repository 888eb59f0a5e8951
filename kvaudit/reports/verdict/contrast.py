"""The data of a drift, by how much behaviour changed: answers, rates and contrasts, in score units (0.05 = 5 pp)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvaudit.core.facets import FACETS, WELL_FORMED
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.records import Outcome
from kvaudit.reports.records.blocks import UNREAD
from kvaudit.reports.records.rows import FACET_COLUMNS
from kvaudit.reports.stats.effect import Array, Effect
from kvaudit.reports.stats.judges import JudgeError
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS
from kvaudit.reports.verdict.comparison import Comparison, Look
from kvaudit.reports.verdict.reasons import Reason


@dataclass(frozen=True)
class Answers:
    """The answers of one checkpoint, or of all seeds of an arm, on one metric at one length, averaged by item.

    A metric is the score of a suite, or one of its facets (yes-or-no properties of an answer). Items are in order of
    cluster. ``draws`` is the largest number of answers to one item, over samples and seeds.
    """

    suite: str
    facet: str  # empty for the score
    context_tokens: int
    wanted: Array  # [N] in [0, 1]
    readable: Array  # [N] share of an item's answers
    clusters: npt.NDArray[np.str_]  # [N] names
    draws: int
    graded: bool
    answers: int  # rows
    hits: float  # sum of the wanted values over the rows
    formless: int  # rows in which the metric could not be read

    @property
    def metric(self) -> str:
        """The name of the metric: SUITE or SUITE.FACET."""
        return f"{self.suite}.{self.facet}" if self.facet else self.suite


_NEEDED = ("policy", "suite", "context_tokens", "item_id", "cluster_id", "score", "outcome")


def reference_answers(records: pd.DataFrame, reference: str) -> dict[str, tuple[Answers, ...]]:
    """Return the answers of the reference arm, averaged by item, by serving policy."""
    needed = [name for name in (*_NEEDED, *FACET_COLUMNS.values()) if name in records]
    rows = records.loc[records["arm"] == reference, needed]
    return {str(policy): tuple(answers_of(group)) for policy, group in rows.groupby("policy", observed=True)}


def answers_of(rows: pd.DataFrame) -> Iterator[Answers]:
    """Yield the ``Answers`` of every metric and length, averaged by item.

    The columns ``outcome`` and those of facets may be missing.
    """
    for index, group in rows.groupby(["suite", "context_tokens"], sort=True, observed=True):
        suite, context = str(cast(tuple[str, int], index)[0]), int(cast(tuple[str, int], index)[1])
        table = _SuiteRows(suite, context, _texts(group, "item_id"), _texts(group, "cluster_id"), _read(group))
        score = group["score"].to_numpy(dtype=np.float64)
        yield from table.answers("", score, ~np.isnan(score), table.read == 0)
        for name, column in FACET_COLUMNS.items():
            if column in group:
                value = group[column].to_numpy(dtype=np.float64)
                # a truncated answer has no form, but may have a value, from its text before the cut
                formless = (table.read == 0) & (name != WELL_FORMED) & (np.isnan(value) | (value == UNREAD))
                good = np.where(formless, 0.0, value == FACETS[name].wanted)
                # an answer that has form but no value was not judged
                yield from table.answers(name, good, ~np.isnan(value) & ((value != UNREAD) | formless), formless)


def _texts(rows: pd.DataFrame, column: str) -> npt.NDArray[np.str_]:
    return rows[column].astype(str).to_numpy(dtype=np.str_)


def _read(rows: pd.DataFrame) -> Array:
    """Return 1 for rows [n] whose answer could be read, else 0.

    That is the value of the facet ``well_formed``. A row without this facet counts as read unless its outcome is
    "degenerate".
    """
    outcomes = rows["outcome"].astype(str).to_numpy(dtype=np.str_) if "outcome" in rows else np.array([""])
    read: Array = np.ones(len(rows)) * (outcomes != Outcome.DEGENERATE.value)  # [n]
    column = FACET_COLUMNS[WELL_FORMED]
    if column not in rows:
        return read
    value = rows[column].to_numpy(dtype=np.float64)
    return np.where(np.isnan(value) | (value == UNREAD), read, value)


class _SuiteRows:
    """The graded answers [n] of one suite at one context length, one row each, to be averaged by item."""

    def __init__(
        self, suite: str, context: int, items: npt.NDArray[np.str_], clusters: npt.NDArray[np.str_], read: Array
    ) -> None:
        self.suite, self.context, self.clusters, self.read = suite, context, clusters, read
        self.items = np.unique(items, return_inverse=True)[1]  # [n], the number of a row's item

    def answers(
        self, facet: str, good: Array, known: npt.NDArray[np.bool_], formless: npt.NDArray[np.bool_]
    ) -> Iterator[Answers]:
        """Yield one ``Answers``: the ``known`` rows averaged by item; nothing if no row is known.

        ``good`` [n] is 1 where the answer is as wanted; ``formless`` marks answers that have no readable form.
        """
        if not known.any():
            return
        good, read = good[known], self.read[known]
        # rows [n] to items [N], each with the template of its first row
        _, first, item = np.unique(self.items[known], return_index=True, return_inverse=True)
        names = self.clusters[known][first]  # [N]
        order = np.argsort(names, kind="stable")
        count = np.bincount(item).astype(np.float64)  # [N] answers
        yield Answers(
            suite=self.suite,
            facet=facet,
            context_tokens=self.context,
            wanted=(np.bincount(item, weights=good) / count)[order],
            readable=(np.bincount(item, weights=read) / count)[order],
            clusters=names[order],
            draws=int(count.max()),
            graded=bool(np.any((good > 0) & (good < 1))),
            answers=len(good),
            hits=float(good.sum()),
            formless=int(formless[known].sum()),
        )


CellPlace = tuple[str, str, str, str, int]  # estimand, arm, policy, suite, context_tokens


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean paired difference in score units (0.05 = 5 pp), without an interval because there are too few clusters."""

    estimate: float
    n_items: int
    n_clusters: int
    low: None = None
    high: None = None


def no_interval(clusters: int) -> str:
    """Return the text that is printed instead of an interval if there are fewer clusters than ``FEWEST_CLUSTERS``."""
    return f"too few templates for an interval ({clusters}, wanted {FEWEST_CLUSTERS})"


@dataclass(frozen=True)
class CellName:
    """The cell that a contrast or a decision is about, and which difference is taken there (``estimand``)."""

    estimand: str  # alike | deployed | serving | interaction | selectivity | change
    arm: str
    policy: str
    suite: str
    context_tokens: int

    @property
    def place(self) -> CellPlace:
        """The key of the cell and its difference, as a tuple: estimand, arm, policy, suite, length."""
        return self.estimand, self.arm, self.policy, self.suite, self.context_tokens

    @property
    def name(self) -> CellName:
        """This cell as a plain CellName, without the further fields of a contrast or decision."""
        return CellName(*self.place)


@dataclass(frozen=True)
class Cell:
    """One arm under one policy on one suite at one length, averaged over its seeds.

    ``rate`` counts degenerate and unscored samples as 0; ``rate_if_desired`` counts unscored ones as 1. ``kv_ratio``
    (of allocated bytes) and ``kv_live_ratio`` (of the entries' bytes) are the size of the cache relative to that under
    policy ``none`` (``drift.shares_of_none``); None where ``none`` was not served or records have no live bytes.
    ``survival`` is the share of entries kept, by role.
    """

    arm: str
    policy: str
    suite: str
    context_tokens: int
    seeds: tuple[int, ...]
    n_items: int
    n_clusters: int
    n_samples: int
    rate: float
    rate_if_desired: float
    seed_rates: tuple[float, ...]
    outcomes: dict[str, int]
    retention: float | None  # None, like all bytes, where an engine does not show its cache
    kv_bytes_peak: float | None  # mean bytes per row
    kv_bytes_dense: float | None
    kv_bytes_live: float | None
    kv_ratio: float | None
    kv_live_ratio: float | None
    survival: dict[str, float]
    new_tokens: float
    unsure: int = 0  # samples whose grade is only the best guess of a judge

    def is_idle(self, uncompressed: Cell | None) -> bool:
        """Return whether the cache has as many bytes as an uncompressed one; False if its bytes are unknown.

        ``uncompressed`` is the same cell under policy ``none``, None if that was not served. It is needed for a model
        whose layers have a window: there even an uncompressed cache does not hold every token.
        """
        if not self.kv_bytes_dense or self.kv_bytes_live is None:
            return False
        sizes = self.kv_bytes_live, self.kv_bytes_dense
        dense = None if uncompressed is None else (uncompressed.kv_bytes_live, uncompressed.kv_bytes_dense)
        return sizes[0] == sizes[1] or sizes == dense


def idle_cells(cells: Iterable[Cell], provenance: Mapping[str, Any]) -> dict[tuple[str, str, str, int], Cell]:
    """Return the cells in which a policy of kvaudit compressed nothing, by arm, policy, suite and length.

    Policies that keep every entry and read only some are left out, if provenance lists them: their cache has the size
    of an uncompressed one, though they act.
    """
    selecting = provenance.get("selecting_policies")
    selecting = selecting if isinstance(selecting, list) else []
    by_place = {(c.arm, c.policy, c.suite, c.context_tokens): c for c in cells}
    return {
        place: cell
        for place, cell in by_place.items()
        if cell.policy not in {DENSE_POLICY, *map(str, selecting)}
        and cell.is_idle(by_place.get((cell.arm, DENSE_POLICY, cell.suite, cell.context_tokens)))
    }


@dataclass(frozen=True)
class Rates:
    """The rates of the wanted outcome, of reference and candidate, averaged over paired seeds."""

    reference: float
    candidate: float

    def as_event_rates(self, *, wanted: bool) -> tuple[float, float]:
        """Return (reference, candidate) as rates at which a facet's event happens, such as "unsafe".

        If the event is ``wanted``, these are the stored rates; otherwise they are 1 - rate.
        """
        return (self.reference, self.candidate) if wanted else (1 - self.reference, 1 - self.candidate)


@dataclass(frozen=True)
class ClusterSums:
    """The differences of one suite, summed by cluster (template).

    The sign-flip test and the template rule (could a few broken templates hide a loss?) are computed from them. A
    difference over several suites has a ClusterSums for each suite, with the suite's ``weight``. In one suite, clusters
    of equal name are the same cluster everywhere.
    """

    suite: str
    weight: float
    clusters: tuple[str, ...]
    sums: npt.NDArray[np.float64]  # [C]
    counts: npt.NDArray[np.float64]  # [C] items, or pairs of answers that people labelled


@dataclass(frozen=True)
class UnwantedEvents:
    """How often the unwanted event (such as "unsafe") happened with the reference and with the candidate, by cluster.

    ``before`` counts the items with the event only under the reference, ``after`` those with it only under the
    candidate.
    """

    reference: npt.NDArray[np.float64]  # [C]
    candidate: npt.NDArray[np.float64]  # [C]
    before: float
    after: float
    counts: npt.NDArray[np.float64]  # [C] items


@dataclass(frozen=True)
class SeedDrift:
    """The drift of one paired training seed: estimate, 95 % interval (low, high), one-sided bounds (lower, upper)."""

    seed: int
    estimate: float
    low: float
    high: float
    lower: float
    upper: float
    pvalue_drop: float


@dataclass(frozen=True)
class LabelSummary:
    """The judge of a cell compared with human labels of its answers.

    ``discordant`` counts the pairs that the judge grades differently, all of them labelled; ``concordant`` the labelled
    pairs among those that it grades alike. ``templates`` counts the templates with concordant pairs, ``unseen`` the
    templates of which no concordant pair is labelled. ``bias`` is the largest drift that the judge's errors alone could
    make (None where one kind of label is missing), ``bias_upper`` its upper limit. ``rate`` is the share of the
    labelled answers of the reference that are as wanted by the labels, ``rate_low`` its lower bound.
    """

    pairs: int
    discordant: int
    concordant: int
    templates: int
    unseen: int
    reference: JudgeError
    candidate: JudgeError
    bias: float | None
    bias_upper: float
    rate: float
    rate_low: float


def judge_may_pass(people: LabelSummary, margin: float) -> bool:
    """Return whether the judge's bias is at most half the margin, so that its labels alone may pass the cell."""
    return people.bias_upper <= margin / 2


@dataclass(frozen=True)
class Contrast(CellName):
    """One measured difference in one cell; ``estimand`` says which, such as candidate - reference served alike.

    If ``effect`` is None, ``reasons`` says why. ``effect`` is about the checkpoints that were measured, averaged over
    paired seeds; ``sums`` are its differences by template. ``recipe`` (three seeds or more) adds the variance between
    seeds. The estimate uses a judge's best guess for answers that it was unsure of. Its bounds also hold with all of
    these counted as desired, or as undesired, on both sides, and with unscored answers counted for and against the
    candidate (``best``, ``worst``). ``readings`` are the sums in each of these cases. ``seed_noise`` is the variance of
    one seed's estimate due to its items alone, ``by_seed`` the drift of every seed if several are averaged.
    """

    effect: Effect | None = None
    recipe: Effect | None = None
    seeds: tuple[int, ...] = ()
    seed_estimates: tuple[float, ...] = ()
    worst: float | None = None
    best: float | None = None
    reasons: tuple[Reason, ...] = ()
    noise: Reason | None = field(default=None, compare=False, repr=False)  # why a PASS would not hold; not written
    look: Look | None = field(default=None, compare=False, repr=False)  # of a run in rounds; not written
    rates: Rates | None = None  # None for an interaction, which has four sides
    unread: Rates | None = None  # shares of answers that could not be read or scored; None for an interaction
    sums: tuple[ClusterSums, ...] = field(default=(), compare=False, repr=False)  # not written
    readings: tuple[tuple[ClusterSums, ...], ...] = field(default=(), compare=False, repr=False)  # not written
    judged: Effect | None = None  # by the judge's labels; ``effect`` and ``sums`` are then by human labels
    judged_sums: tuple[ClusterSums, ...] = field(default=(), compare=False, repr=False)  # not written
    people: LabelSummary | None = None  # the judge compared with those human labels
    churn: float | None = None  # P(the candidate's grade differs from the reference's); None for an interaction
    rerun: float | None = None  # A/A: the same for two answers of one checkpoint; None with one sample
    seed_noise: float = 0.0
    by_seed: tuple[SeedDrift, ...] = ()
    seed_sums: tuple[tuple[ClusterSums, ...], ...] = field(default=(), compare=False, repr=False)  # not written
    # by the judge's labels, then by each reading of uncertain answers; an interaction has none. Not written
    unwanted: tuple[UnwantedEvents, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Drift:
    """Every rate and every difference of a run, from which ``decide`` makes the verdict.

    ``reasons`` says why the run as a whole is INVALID, and is empty if it is not. ``alpha`` is the level of the
    one-sided bounds. ``weights`` are the sha256 of the reference's checkpoints by seed, as in the records, and
    ``files`` the sha256 of these checkpoints' other files, by seed and name. ``unclustered`` is set where no field says
    which items share a template, so that each item is its own cluster. ``idle`` are the cells (arm, policy, suite,
    length) in which a policy compressed nothing. ``answers`` are the reference's answers by serving policy;
    ``controls.Controls`` checks by them whether each metric could show a loss.
    """

    run: str
    comparison: Comparison
    alpha: float
    cells: tuple[Cell, ...]
    contrasts: tuple[Contrast, ...]
    reasons: tuple[Reason, ...]
    n_records: int
    weights: Mapping[int, frozenset[str]] = field(default_factory=dict)
    files: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    idle: frozenset[tuple[str, str, str, int]] = frozenset()
    unclustered: Reason | None = None
    answers: Mapping[str, tuple[Answers, ...]] = field(default_factory=dict, compare=False, repr=False)  # not written
