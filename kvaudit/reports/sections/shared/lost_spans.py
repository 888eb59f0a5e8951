"""Whether behaviour is lost where the span that decides it is lost: flips beside what the cache still held.

A flip is an answer of one checkpoint under a policy minus its own uncompressed answer, by item and training seed,
where both could be read. A span counts as lost where less than half of its entries (over tokens, layers and KV heads)
were held when the last answer began; the regression takes the share itself. What was lost with a span is not told apart
from it, so all of this is association: the cause is what an intervention shows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import special

from kvaudit.core.facets import facet_of
from kvaudit.core.spans import SPANS
from kvaudit.reports.records.rows import SPAN_COLUMNS, CellKey, Panel, Panels
from kvaudit.reports.stats.clustered import cr3_effect
from kvaudit.reports.stats.effect import LEVEL, Array, Effect
from kvaudit.reports.stats.mover import Mover, mover
from kvaudit.reports.stats.regression import jackknife_variance, regression_effect, telling_clusters
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS
from kvaudit.reports.stats.tango import ess_tango, rate_lower
from kvaudit.reports.verdict.contrast import Drift
from kvaudit.reports.verdict.drift import CELL, seed_pairs

WIDEST = 2.0  # of an interval of a change that cannot be beyond -1 or 1
NOTHING = 1e-9  # what rounding leaves of an interval without any spread
LOST_BELOW = 0.5  # of a span's entries; below, it counts as lost
_ASKED: list[Hashable] = [*CELL, "train_seed"]
MOVED = 5.0  # answers that tell of the span and moved: with fewer no spread is seen where there is one
UNMOVED = "no answer is another than uncompressed"
ALIKE = "every template says the same, which leaves no spread to go by"
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Group:
    """The answers whose span was lost, or kept: how often a facet was as wanted, with its 95 % interval.

    ``uncompressed`` is the rate of the same items without compression. ``unread`` is how many more, as a share of all,
    could not be read on one of the sides: where that differs, the rates are of answers that were picked differently.
    """

    answers: int
    templates: int
    rate: float
    low: float | None  # None where the templates are too few for an interval
    high: float | None
    uncompressed: float
    unread: float


@dataclass(frozen=True)
class Share:
    """What part of a facet's drift fell on answers whose span was lost, with its 95 % interval.

    None where every template says the same: no spread to go by is no certainty.
    """

    estimate: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class SpanRates:
    """One facet of one cell beside one span. ``difference`` is the drift where it was lost minus where it was kept.

    None where the span did not vary enough (``reason``). ``share`` is None where no drift is shown to divide.
    ``unknown`` answers have no such span on record.
    """

    arm: str
    policy: str
    metric: str  # SUITE.FACET
    context_tokens: int
    span: str
    lost: Group | None
    kept: Group | None
    difference: Mover | None
    share: Share | None
    unknown: int
    reason: str


@dataclass(frozen=True)
class SpanSlope:
    """The change of a facet's flips where a whole span is lost, by regression over policies and lengths together.

    Between answers that are alike in what ``equal`` names. None where nothing is left to compare (``reason``).
    """

    arm: str
    metric: str
    span: str
    policies: tuple[str, ...]  # under which the span's survival varied
    equal: tuple[str, ...]
    effect: Effect | None
    reason: str


@dataclass(frozen=True)
class Mechanism:
    """Every safety facet beside every span that its items have; empty where no span is on record."""

    rates: tuple[SpanRates, ...] = ()
    slopes: tuple[SpanSlope, ...] = ()


def mechanism(drift: Drift, tables: Panels, records: pd.DataFrame) -> Mechanism:
    """Safety facets of the reference and the candidates under every policy that compresses."""
    held = _held(records)
    metrics = [name for name in drift.comparison.facets if facet_of(name)[1].kind == "safety"] if held else []
    rates: list[SpanRates] = []
    slopes: list[SpanSlope] = []
    for arm in (drift.comparison.reference, *drift.comparison.candidates):
        for metric in metrics:
            cells = list(_cells(drift, tables, held, metric, arm))
            for span in SPANS:
                known = [(cell, rows) for cell in cells if (rows := cell.rows_of(span)) is not None]
                rates += [_rates(cell, span, rows) for cell, rows in known]
                slopes += [_slope(arm, metric, span, known, drift.alpha)] if known else []
    return Mechanism(tuple(rates), tuple(slopes))


Held = Mapping[tuple[object, ...], pd.DataFrame]  # by _ASKED: shares of the spans and placement of every item


def _held(records: pd.DataFrame) -> Held:
    columns = [name for name in SPAN_COLUMNS.values() if records[name].notna().any()]
    if not columns:
        return {}
    grouped = records.groupby([*_ASKED, "item_id"], observed=True)
    table = grouped[columns].mean()  # of an item over its samples
    table["placement"] = grouped["placement"].first()
    parts = table.groupby(level=_ASKED, observed=True)
    return {key: part.droplevel(_ASKED) for key, part in parts}


class _Rows(NamedTuple):
    """Answers [N] with a span on record: lost share of the span, rates under the policy and without, what they are."""

    lost: Array
    rate: Array
    dense: Array
    clusters: npt.NDArray[np.str_]
    placement: npt.NDArray[np.str_]

    @property
    def flips(self) -> Array:
        return self.rate - self.dense


@dataclass(frozen=True)
class _Cell:
    """The answers of one arm under one policy to one facet's items at one length, readable or not, and their spans."""

    arm: str
    policy: str
    panel: Panel
    answers: pd.DataFrame

    def rows_of(self, span: str) -> _Rows | None:
        """The answers beside a span; None where none has it."""
        column = SPAN_COLUMNS[span]
        if column not in self.answers:
            return None
        part = self.answers[self._read & self.answers[column].notna()]
        if part.empty:
            return None
        rate, dense, share = (part[name].to_numpy(dtype=np.float64) for name in ("rate", "dense", column))
        clusters, placement = (part[name].to_numpy(dtype=str) for name in ("cluster", "placement"))
        return _Rows(1 - share, rate, dense, clusters, placement)

    def unread(self, span: str, *, lost: bool) -> float:
        """The share of answers with a span that was lost, or kept, that a side could not be read of."""
        share = self.answers[SPAN_COLUMNS[span]]
        own = share.notna() & ((1 - share > LOST_BELOW) == lost)
        return float((~self._read[own]).mean()) if own.any() else 0.0

    def unknown(self, span: str) -> int:
        """How many answers have no such span on record."""
        return int((self._read & self.answers[SPAN_COLUMNS[span]].isna()).sum())

    @property
    def _read(self) -> pd.Series:
        return self.answers[["rate", "dense"]].notna().all(axis=1)


def _cells(drift: Drift, tables: Panels, held: Held, metric: str, arm: str) -> Iterator[_Cell]:
    suite, _ = facet_of(metric)
    for policy in drift.comparison.policies:
        for context in drift.comparison.lengths[suite]:
            panel = tables.get((metric, context))
            if panel is None or drift.comparison.is_uncompressed(policy):
                continue
            seeds = [own for own, _ in seed_pairs(drift.comparison, panel, arm)]
            plain = drift.comparison.uncompressed_of(policy)
            parts = [_answers(panel, held, suite, CellKey(arm, seed, policy), plain) for seed in seeds]
            if found := [part for part in parts if part is not None and len(part)]:
                yield _Cell(arm, policy, panel, pd.concat(found))


def _answers(panel: Panel, held: Held, suite: str, cell: CellKey, plain: str) -> pd.DataFrame | None:
    """The items of one seed that it was asked; None where a side was asked none."""
    dense = cell._replace(policy=plain)
    spans = held.get((cell.arm, cell.policy, suite, panel.context_tokens, cell.seed))
    if cell not in panel.scores or dense not in panel.scores or spans is None:
        return None
    names = [panel.cluster_names[code] for code in panel.clusters]
    columns = {"rate": panel.scores[cell], "dense": panel.scores[dense], "cluster": names}
    table = pd.DataFrame(columns, index=pd.Index(panel.items, dtype=object))
    # what was asked has a floor, whether it could be read or not
    return table[~np.isnan(panel.floor[cell])].join(spans)


def _rates(cell: _Cell, span: str, rows: _Rows) -> SpanRates:
    gone = rows.lost > LOST_BELOW
    lost, kept = (_group(cell.panel, rows, gone == side, cell.unread(span, lost=side)) for side in (True, False))
    reason = _one_sided(rows, gone)
    difference = None if reason else _apart(cell.panel, rows, gone)
    return SpanRates(
        arm=cell.arm,
        policy=cell.policy,
        metric=cell.panel.suite,
        context_tokens=cell.panel.context_tokens,
        span=span,
        lost=lost,
        kept=kept,
        difference=difference,
        share=None if difference is None else _share(rows, gone),
        unknown=cell.unknown(span),
        reason=reason or ("" if difference else UNMOVED),
    )


def _group(panel: Panel, rows: _Rows, mask: _Mask, unread: float) -> Group | None:
    """None where there is no answer; without an interval where its templates are too few."""
    clusters, rate = rows.clusters[mask], rows.rate[mask]
    templates = len(np.unique(clusters))
    if not templates:
        return None
    low = high = None
    if templates >= FEWEST_CLUSTERS:
        tail = (1 - LEVEL) / 2
        low = rate_lower(rate, clusters, samples=panel.samples, alpha=tail, graded=panel.graded)
        # the upper end is the lower one of the opposite
        high = 1 - rate_lower(1 - rate, clusters, samples=panel.samples, alpha=tail, graded=panel.graded)
    dense = float(rows.dense[mask].mean())
    return Group(len(rate), templates, float(rate.mean()), low, high, uncompressed=dense, unread=unread)


def _one_sided(rows: _Rows, gone: _Mask) -> str:
    """Why the two groups cannot be held against each other; empty where they can."""
    if gone.all() or not gone.any():
        return f"{'lost' if gone.all() else 'kept'} in every answer"
    for mask, word in ((gone, "lost"), (~gone, "kept")):
        if len(np.unique(rows.clusters[mask])) < FEWEST_CLUSTERS:
            return f"{word} in fewer than {FEWEST_CLUSTERS} templates"
    return ""


def _apart(panel: Panel, rows: _Rows, gone: _Mask) -> Mover | None:
    """The drift where the span was lost minus where it was kept; None where no answer moved.

    A group in which nothing moved shows no spread, and of a few answers that says little: so the score intervals of
    both groups are added as of independent ones, and the regression's, which knows the templates in both, widens it.
    """
    if not rows.flips.any():
        return None
    lost, kept = (
        ess_tango(rows.flips[mask], rows.clusters[mask], samples=panel.samples, graded=panel.graded)
        for mask in (gone, ~gone)
    )
    apart = mover([(1.0, lost.estimate, lost.low, lost.high), (-1.0, kept.estimate, kept.low, kept.high)])
    joint = regression_effect(rows.flips, gone, np.zeros((len(gone), 0)), rows.clusters)
    low, high = min(apart.low, joint.low), max(apart.high, joint.high)
    return replace(apart, low=low, high=high, method="ESS-Tango by MOVER, no narrower than CR3-t")


def _share(rows: _Rows, gone: _Mask) -> Share | None:
    """A ratio of sums over templates with its jackknife; None where the drift's own interval holds 0."""
    whole = cr3_effect(rows.flips, rows.clusters)
    if whole.low <= 0 <= whole.high:
        return None
    _, codes = np.unique(rows.clusters, return_inverse=True)
    total, own = (np.bincount(codes, weights=rows.flips * weight) for weight in (1.0, gone))  # [C] each
    left = total.sum() - total  # [C], what is left without each template
    if np.sign(left).min() != np.sign(left).max() or not left.all():
        return None  # without one template nothing is left to divide
    estimate = float(own.sum() / total.sum())
    error = float(np.sqrt(jackknife_variance((own.sum() - own) / left, estimate)))
    if error <= NOTHING:
        return Share(estimate, None, None)
    reach = float(special.stdtrit(len(total) - 1, 0.5 + LEVEL / 2)) * error
    return Share(estimate, estimate - reach, estimate + reach)


def _slope(arm: str, metric: str, span: str, known: Sequence[tuple[_Cell, _Rows]], alpha: float) -> SpanSlope:
    varied = [(cell, rows) for cell, rows in known if np.ptp(rows.lost) > 0]
    policies = tuple(dict.fromkeys(cell.policy for cell, _ in varied))
    if not varied:
        return SpanSlope(arm, metric, span, (), (), None, "the same in every answer under each policy")
    rows = _Rows._make(np.concatenate(parts) for parts in zip(*(own for _, own in varied), strict=True))
    factors = {
        "policy": [cell.policy for cell, own in varied for _ in own.lost],
        "placement": rows.placement.tolist(),
        "length": [str(cell.panel.context_tokens) for cell, own in varied for _ in own.lost],
    }
    equal = tuple(name for name, values in factors.items() if len(set(values)) > 1)
    # a policy keeps the rule of one placement and not of another: only answers alike in all of these are compared,
    # with a column for every combination but the first, [N, K - 1], so that lengths may follow any curve
    codes = np.unique(["\0".join(values) for values in zip(*factors.values(), strict=True)], return_inverse=True)[1]
    controls = np.eye(codes.max() + 1)[codes][:, 1:]
    effect, reason = _of_span(rows, controls, alpha)
    beyond = f" beyond {' and '.join(equal)}" if equal else ""
    return SpanSlope(arm, metric, span, policies, equal, effect, reason.format(beyond=beyond))


def _of_span(rows: _Rows, controls: Array, alpha: float) -> tuple[Effect | None, str]:
    """The regression of flips on the lost share of a span, or why there is none."""
    templates = telling_clusters(rows.lost, controls, rows.clusters)
    if templates < FEWEST_CLUSTERS:
        return None, f"varies too little{{beyond}}: worth {templates:.1f} templates, {FEWEST_CLUSTERS} make an interval"
    if not rows.flips.any():
        return None, UNMOVED
    answers = telling_clusters(rows.lost, controls, np.arange(len(rows.lost)))  # each by itself
    moved = float(answers * (rows.flips != 0).mean())
    if moved < MOVED:
        return None, f"too few answers moved: {moved:.1f} of those that tell of the span, {MOVED:.0f} make an interval"
    effect = regression_effect(rows.flips, rows.lost, controls, rows.clusters, alpha=alpha, df=templates - 1)
    if effect.high - effect.low <= NOTHING:
        return None, ALIKE
    if effect.high - effect.low > WIDEST:
        return None, "varies too little for an interval that rules anything out"
    return effect, ""
