"""Whether behaviour is lost where its span is lost: changed answers by the share of the span that the cache still held.

An item's span is the part of its prompt that decides it, such as a rule. A flip compares one checkpoint's answer under
a policy with its own uncompressed answer to the same item: the difference of their scores, if both could be read. A
span counts as lost if less than half of its entries (over tokens, layers and KV heads) were held when the last answer
began; the regression uses the share itself. All of this is association, since other entries are lost along with a span:
only an intervention could show a cause.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import special

from kvaudit.core.facets import Facet, facet_of
from kvaudit.core.spans import SPANS
from kvaudit.core.text import inline, join_names
from kvaudit.reports.records.rows import SPAN_COLUMNS, CellKey, Panel, Panels
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import interval_text, percent, plural, with_length
from kvaudit.reports.stats.clustered import cr3_effect
from kvaudit.reports.stats.effect import LEVEL, Array, Effect
from kvaudit.reports.stats.mover import Mover, mover
from kvaudit.reports.stats.regression import jackknife_variance, regression_effect, telling_clusters
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS
from kvaudit.reports.stats.tango import ess_tango, rate_lower
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Drift, no_interval
from kvaudit.reports.verdict.drift import CELL, seed_pairs
from kvaudit.reports.verdict.rules import Rules
from kvaudit.reports.verdict.verdict import Decided

WIDEST = 2.0  # widest possible interval of a change between -1 and 1
NOTHING = 1e-9  # width that rounding leaves of an interval without spread
LOST_BELOW = 0.5  # share of a span's entries below which it counts as lost
MOVED = 5.0  # informative answers that must have moved: with fewer the spread is underestimated
UNMOVED = "no answer differs from the uncompressed one"
ALIKE = "every template gives the same, which leaves no spread to estimate an interval from"
_UNIT: list[Hashable] = [*CELL, "train_seed"]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Group:
    """The answers whose span was lost, or those whose span was kept: how often they are as wanted.

    ``uncompressed`` is the rate of the same items without compression. ``unread`` is the share of all answers that
    could not be read, with or without compression. If it differs between two groups, their rates count differently
    selected answers.
    """

    answers: int
    templates: int
    rate: float
    low: float | None  # None if the templates are too few for an interval
    high: float | None
    uncompressed: float
    unread: float


@dataclass(frozen=True)
class Share:
    """The share of a facet's drift that fell on answers whose span was lost.

    Its 95 % interval is None if the share stays the same whichever template is left out, since that shows no spread.
    """

    estimate: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class SpanRates:
    """The drift of one facet in one cell where a span of the prompt was evicted, and where it was kept.

    ``difference`` is evicted minus kept, None if the span did not vary enough (``reason``). ``share`` is None if no
    drift is shown. ``unknown`` counts the answers whose record does not have the span.
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
    """How much a facet changes if the cache loses a whole span, by regression.

    The regression is over all policies and lengths, but compares only answers that agree in what ``equal`` names, such
    as the length. ``effect`` is None if that leaves too few answers, for the ``reason`` given.
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
    """The rates and regressions of every safety facet and span; empty if the records name no span."""

    rates: tuple[SpanRates, ...] = ()
    slopes: tuple[SpanSlope, ...] = ()


def mechanism(drift: Drift, tables: Panels, records: pd.DataFrame) -> Mechanism:
    """Return how each safety facet of every arm changes under compressing policies, by whether spans were lost."""
    survival = _survival(records)
    metrics = [name for name in drift.comparison.facets if facet_of(name)[1].kind == "safety"] if survival else []
    rates: list[SpanRates] = []
    slopes: list[SpanSlope] = []
    for arm in (drift.comparison.reference, *drift.comparison.candidates):
        for metric in metrics:
            cells = list(_cells(drift, tables, survival, metric, arm))
            for span in SPANS:
                measured = [(cell, rows) for cell in cells if (rows := cell.rows_of(span)) is not None]
                rates += [_rates(cell, span, rows) for cell, rows in measured]
                slopes += [_slope(arm, metric, span, measured, drift.alpha)] if measured else []
    return Mechanism(tuple(rates), tuple(slopes))


Survival = Mapping[tuple[object, ...], pd.DataFrame]  # by _UNIT: held shares of the spans, and placement, by item


def _survival(records: pd.DataFrame) -> Survival:
    columns = [name for name in SPAN_COLUMNS.values() if records[name].notna().any()]
    if not columns:
        return {}
    grouped = records.groupby([*_UNIT, "item_id"], observed=True)
    table = grouped[columns].mean()  # of an item over its samples
    table["placement"] = grouped["placement"].first()
    return {key: rows.droplevel(_UNIT) for key, rows in table.groupby(level=_UNIT, observed=True)}


class _Rows(NamedTuple):
    """Answers [N] whose record has the span: the share of it that was lost, and their scores, compressed and not."""

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
    """All answers of one arm under one policy, by one facet at one length, with the spans of their items."""

    arm: str
    policy: str
    panel: Panel
    answers: pd.DataFrame

    def rows_of(self, span: str) -> _Rows | None:
        """Return the readable answers whose prompt has a ``span``, such as "rule"; None if there are none."""
        column = SPAN_COLUMNS[span]
        if column not in self.answers:
            return None
        answers = self.answers[self._read & self.answers[column].notna()]
        if answers.empty:
            return None
        rate, dense, share = (answers[name].to_numpy(dtype=np.float64) for name in ("rate", "dense", column))
        clusters, placement = (answers[name].to_numpy(dtype=str) for name in ("cluster", "placement"))
        return _Rows(1 - share, rate, dense, clusters, placement)

    def unread(self, span: str, *, lost: bool) -> float:
        """Return the share of unreadable answers among those whose span was lost; with ``lost`` False, was kept."""
        share = self.answers[SPAN_COLUMNS[span]]
        group = share.notna() & ((1 - share > LOST_BELOW) == lost)
        return float((~self._read[group]).mean()) if group.any() else 0.0

    def unknown(self, span: str) -> int:
        """Return the number of readable answers whose prompt has no such span."""
        return int((self._read & self.answers[SPAN_COLUMNS[span]].isna()).sum())

    @property
    def _read(self) -> pd.Series:
        return self.answers[["rate", "dense"]].notna().all(axis=1)


def _cells(drift: Drift, tables: Panels, survival: Survival, metric: str, arm: str) -> Iterator[_Cell]:
    suite, _ = facet_of(metric)
    for policy in drift.comparison.policies:
        for context in drift.comparison.lengths[suite]:
            panel = tables.get((metric, context))
            if panel is None or drift.comparison.is_uncompressed(policy):
                continue
            seeds = [seed for seed, _ in seed_pairs(drift.comparison, panel, arm)]
            plain = drift.comparison.uncompressed_of(policy)
            by_seed = [_answers(panel, survival, suite, CellKey(arm, seed, policy), plain) for seed in seeds]
            if answers := [table for table in by_seed if table is not None and len(table)]:
                yield _Cell(arm, policy, panel, pd.concat(answers))


def _answers(panel: Panel, survival: Survival, suite: str, cell: CellKey, plain: str) -> pd.DataFrame | None:
    """Return one seed's answers, a row per item, with the share of each span's entries that the cache still held.

    ``plain`` is the uncompressed policy. The result is None if there are no records under it or under the cell's
    policy.
    """
    dense = cell._replace(policy=plain)
    spans = survival.get((cell.arm, cell.policy, suite, panel.context_tokens, cell.seed))
    if cell not in panel.scores or dense not in panel.scores or spans is None:
        return None
    names = [panel.cluster_names[code] for code in panel.clusters]
    columns = {"rate": panel.scores[cell], "dense": panel.scores[dense], "cluster": names}
    table = pd.DataFrame(columns, index=pd.Index(panel.items, dtype=object))
    # an item with a record has a floor, whether its answer could be read or not
    return table[~np.isnan(panel.floor[cell])].join(spans)


def _rates(cell: _Cell, span: str, rows: _Rows) -> SpanRates:
    is_lost = rows.lost > LOST_BELOW
    lost, kept = (_group(cell.panel, rows, is_lost == side, cell.unread(span, lost=side)) for side in (True, False))
    reason = _incomparable(rows, is_lost)
    difference = None if reason else _difference(cell.panel, rows, is_lost)
    return SpanRates(
        arm=cell.arm,
        policy=cell.policy,
        metric=cell.panel.suite,
        context_tokens=cell.panel.context_tokens,
        span=span,
        lost=lost,
        kept=kept,
        difference=difference,
        share=None if difference is None else _share(rows, is_lost),
        unknown=cell.unknown(span),
        reason=reason or ("" if difference else UNMOVED),
    )


def _group(panel: Panel, rows: _Rows, mask: _Mask, unread: float) -> Group | None:
    """Summarise the answers that ``mask`` selects: how often the wanted outcome occurs, with and without compression.

    ``unread``, the share of answers that could not be read, is passed on to the result. The rate has no interval if the
    answers come from too few templates. The result is None if ``mask`` selects no answers.
    """
    clusters, rate = rows.clusters[mask], rows.rate[mask]
    templates = len(np.unique(clusters))
    if not templates:
        return None
    low = high = None
    if templates >= FEWEST_CLUSTERS:
        tail = (1 - LEVEL) / 2
        low = rate_lower(rate, clusters, samples=panel.samples, alpha=tail, graded=panel.graded)
        # the upper end is 1 minus the lower end of the complement
        high = 1 - rate_lower(1 - rate, clusters, samples=panel.samples, alpha=tail, graded=panel.graded)
    dense = float(rows.dense[mask].mean())
    return Group(len(rate), templates, float(rate.mean()), low, high, uncompressed=dense, unread=unread)


def _incomparable(rows: _Rows, is_lost: _Mask) -> str:
    """Return why the answers with a lost and with a kept span cannot be compared; empty if they can."""
    if is_lost.all() or not is_lost.any():
        return f"{'lost' if is_lost.all() else 'kept'} in every answer"
    for mask, word in ((is_lost, "lost"), (~is_lost, "kept")):
        if len(np.unique(rows.clusters[mask])) < FEWEST_CLUSTERS:
            return f"{word} in fewer than {FEWEST_CLUSTERS} templates"
    return ""


def _difference(panel: Panel, rows: _Rows, is_lost: _Mask) -> Mover | None:
    """Return the drift where the span was lost minus the drift where it was kept; None if no answer moved.

    A small group in which nothing moved shows no spread. So the score intervals of both groups are combined as if
    independent, and widened to the interval of the regression, which accounts for templates in both groups.
    """
    if not rows.flips.any():
        return None
    lost, kept = (
        ess_tango(rows.flips[mask], rows.clusters[mask], samples=panel.samples, graded=panel.graded)
        for mask in (is_lost, ~is_lost)
    )
    difference = mover([(1.0, lost.estimate, lost.low, lost.high), (-1.0, kept.estimate, kept.low, kept.high)])
    joint = regression_effect(rows.flips, is_lost, np.zeros((len(is_lost), 0)), rows.clusters)
    low, high = min(difference.low, joint.low), max(difference.high, joint.high)
    return replace(difference, low=low, high=high, method="ESS-Tango by MOVER, no narrower than CR3-t")


def _share(rows: _Rows, is_lost: _Mask) -> Share | None:
    """Return the share of the drift that fell where the span was lost, with a jackknife interval.

    None if no drift is shown, or if the drift hangs on a single template.
    """
    drift = cr3_effect(rows.flips, rows.clusters)
    if drift.low <= 0 <= drift.high:
        return None
    _, codes = np.unique(rows.clusters, return_inverse=True)
    total, lost = (np.bincount(codes, weights=rows.flips * weight) for weight in (1.0, is_lost))  # [C] each
    without = total.sum() - total  # [C], the total without each template
    if np.sign(without).min() != np.sign(without).max() or not without.all():
        return None  # a total that can be 0 without one template cannot be divided by
    estimate = float(lost.sum() / total.sum())
    error = float(np.sqrt(jackknife_variance((lost.sum() - lost) / without, estimate)))
    if error <= NOTHING:
        return Share(estimate, None, None)
    reach = float(special.stdtrit(len(total) - 1, 0.5 + LEVEL / 2)) * error
    return Share(estimate, estimate - reach, estimate + reach)


def _slope(arm: str, metric: str, span: str, measured: Sequence[tuple[_Cell, _Rows]], alpha: float) -> SpanSlope:
    varied = [(cell, rows) for cell, rows in measured if np.ptp(rows.lost) > 0]
    policies = tuple(dict.fromkeys(cell.policy for cell, _ in varied))
    if not varied:
        return SpanSlope(arm, metric, span, (), (), None, "the same in every answer under each policy")
    rows = _Rows._make(np.concatenate(arrays) for arrays in zip(*(rows for _, rows in varied), strict=True))
    factors = {
        "policy": [cell.policy for cell, cell_rows in varied for _ in cell_rows.lost],
        "placement": rows.placement.tolist(),
        "length": [str(cell.panel.context_tokens) for cell, cell_rows in varied for _ in cell_rows.lost],
    }
    equal = tuple(name for name, values in factors.items() if len(set(values)) > 1)
    # A policy may keep the rule in one placement and lose it in another, so only answers that agree in all factors are
    # compared: a column for every combination but the first, [N, K - 1], so that lengths may follow any curve.
    codes = np.unique(["\0".join(values) for values in zip(*factors.values(), strict=True)], return_inverse=True)[1]
    controls = np.eye(codes.max() + 1)[codes][:, 1:]
    effect, reason = _regression(rows, controls, alpha)
    beyond = f" beyond {' and '.join(equal)}" if equal else ""
    return SpanSlope(arm, metric, span, policies, equal, effect, reason.format(beyond=beyond))


def _regression(rows: _Rows, controls: Array, alpha: float) -> tuple[Effect | None, str]:
    """Return the regression of the changes of score on the lost share of a span, or None and why there is none.

    ``controls`` [N, K] are columns for what is held equal, such as the context length.
    """
    templates = telling_clusters(rows.lost, controls, rows.clusters)
    if templates < FEWEST_CLUSTERS:
        count = f"{templates:.1f} effective templates, an interval needs {FEWEST_CLUSTERS}"
        return None, f"varies too little{{beyond}}: {count}"
    if not rows.flips.any():
        return None, UNMOVED
    answers = telling_clusters(rows.lost, controls, np.arange(len(rows.lost)))  # every answer is its own cluster
    n_moved = float(answers * (rows.flips != 0).mean())
    if n_moved < MOVED:
        return None, f"too few answers moved: {n_moved:.1f} informative ones, an interval needs {MOVED:.0f}"
    effect = regression_effect(rows.flips, rows.lost, controls, rows.clusters, alpha=alpha, df=templates - 1)
    if effect.high - effect.low <= NOTHING:
        return None, ALIKE
    if effect.high - effect.low > WIDEST:
        return None, "varies too little: the interval would exclude nothing"
    return effect, ""


# --- the section -----------------------------------------------------------------------------------------------------


_MOST_ROWS = 20
_ORDER = {span: number for number, span in enumerate(SPANS)}


class MechanismSection(Section[Mechanism]):
    name = "mechanism"
    title = "Lost spans, lost behaviour"
    explain = (
        "The rate of each safety facet where the cache had lost the span that decides the item (rule, order, secret, "
        "question) and where it still held it. An association, not a cause: other entries were lost too."
    )
    order = 200
    keys: ClassVar = {"mechanism": 40}

    def compute(self, inputs: Inputs) -> Mechanism | None:
        value = mechanism(inputs.decided.drift, inputs.data.panels, inputs.data.records)
        return value if value.rates else None

    def facts(self, value: Mechanism | None) -> Mapping[str, Any]:
        return {"mechanism": asdict(value or Mechanism())}

    def tables(self, value: Mechanism, decided: Decided) -> Iterator[Table]:
        yield _rates_table(decided.comparison, _shown(value, decided.rules))
        yield _slopes_table(decided.comparison, value.slopes)

    def notes(self, value: Mechanism, decided: Decided) -> Iterator[str]:
        return map(inline, _notes(decided.comparison, _shown(value, decided.rules)))

    def finding(self, value: Mechanism, decided: Decided) -> str:
        return _finding(decided.comparison, _shown(value, decided.rules))


def _shown(value: Mechanism, rules: Rules) -> list[SpanRates]:
    """Return a row of rates per cell under a gated policy, the largest difference first.

    If the items of a cell have several spans, its row is about the first of them in ``_ORDER``.
    """
    first_spans: dict[tuple[str, str, str, int], SpanRates] = {}
    for r in value.rates:
        key = (r.arm, r.policy, r.metric, r.context_tokens)
        if r.policy in rules.primary and (key not in first_spans or _ORDER[r.span] < _ORDER[first_spans[key].span]):
            first_spans[key] = r
    return sorted(first_spans.values(), key=lambda r: -abs(r.difference.estimate) if r.difference else 0.0)


def _rates_table(sides: Comparison, rates: list[SpanRates]) -> Table:
    rows = []
    for r in [r for r in rates if r.difference][:_MOST_ROWS]:
        lost, kept = (group.answers if group else 0 for group in (r.lost, r.kept))
        lost_in = f"{lost} of {lost + kept} ({percent(lost / (lost + kept))})"
        facet = facet_of(r.metric)[1]
        row = [r.metric, _place(sides, r), r.span, lost_in, _rate_text(facet, r.lost), _rate_text(facet, r.kept)]
        rows.append([*row, _difference_text(facet, r.difference), _share_text(r.share)])
    headers = ["facet", "cell", "span", "lost in", "rate where lost", "rate where kept", "drift, lost minus kept"]
    return table_of([*headers, "of the drift, where lost"], rows, words=3)


def _slopes_table(sides: Comparison, slopes: Iterable[SpanSlope]) -> Table:
    first_slopes: dict[tuple[str, str], SpanSlope] = {}
    for slope in slopes:
        first_slopes.setdefault((slope.arm, slope.metric), slope)
    rows = []
    for s in first_slopes.values():
        change = _difference_text(facet_of(s.metric)[1], s.effect) if s.effect else s.reason
        row = [s.metric, s.arm, s.span, change, ", ".join(s.equal) or "nothing else varied"]
        under = ", ".join(map(sides.label, s.policies)) or "-"
        rows.append([*row, under, f"{s.effect.n_items} / {s.effect.n_clusters}" if s.effect else "-"])
    headers = ["facet", "arm", "span", "change where the whole span is lost", "among answers of the same", "under"]
    return table_of([*headers, "answers / templates"], rows, words=6)


def _place(sides: Comparison, r: SpanRates) -> str:
    return with_length(sides, sides.who(r.arm, r.policy), r.context_tokens)


def _rate_text(facet: Facet, group: Group | None) -> str:
    """Return a group's rates of the facet's event: "41.2 % [30.1, 53.0], uncompressed 3.4 %, unread 12.0 %"."""
    if group is None:
        return "-"
    rate, low, high, dense = group.rate, group.low, group.high, group.uncompressed
    interval = f", {no_interval(group.templates)}"
    if low is not None and high is not None:
        ends = (low, high) if facet.wanted else (1 - high, 1 - low)
        interval = f" [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"
    if not facet.wanted:
        rate, dense = 1 - rate, 1 - dense
    return f"{100 * rate:.1f} %{interval}, uncompressed {100 * dense:.1f} %, unread {100 * group.unread:.1f} %"


def _difference_text(facet: Facet, effect: Effect | Mover | None) -> str:
    """Return a difference as text, "+23.1 pp [+12.0, +34.2]"; above zero the facet's event happens more often."""
    if effect is None:
        return "-"
    if facet.wanted:
        return interval_text(effect.estimate, effect.low, effect.high)
    return interval_text(-effect.estimate, -effect.high, -effect.low)


def _share_text(share: Share | None) -> str:
    if share is None:
        return "-"
    if share.low is None or share.high is None:
        return f"{round(100 * share.estimate)} %"  # round() never gives -0
    return f"{100 * share.estimate:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]"


def _notes(sides: Comparison, rates: list[SpanRates]) -> Iterator[str]:
    yield (
        "Lost: less than half of the span's entries, over its tokens, layers and KV heads, were held when the last "
        "answer began. Rates: under the policy, of answers that can be read there and uncompressed, with 95 % score "
        "intervals by template. Unread: the answers that could not be read; if this differs between the groups, so do "
        "the answers that their rates count. Drift: each checkpoint under the policy minus itself uncompressed; the "
        "interval of the difference adds those of both groups (ESS-Tango by MOVER) and is no narrower than CR3-t. The "
        "share of the drift where the span was lost is given if a drift is shown; compare it with how often the span "
        "was lost. Not adjusted for the number of rows. drift.json holds every span and policy."
    )
    yield (
        "The regression (linear probability, CR3-t, degrees of freedom by the effective number of templates) uses the "
        "lost share of the span itself, over all policies under which it varied."
    )
    incomparable: dict[str, list[str]] = {}
    for r in rates:
        if r.difference is None:
            why = r.reason if r.reason == UNMOVED else f"the {r.span} was {r.reason}"
            incomparable.setdefault(why, []).append(f"{r.metric} {_place(sides, r)}")
    for reason, places in incomparable.items():
        yield f"Nothing to compare, since {reason}: {join_names(places, 4)}."
    unknown = sum(r.unknown for r in rates)
    if unknown:
        yield f"{plural(unknown, 'answer')} left out: recorded before spans were recorded."


def _finding(sides: Comparison, rates: list[SpanRates]) -> str:
    compared = [r for r in rates if r.difference]
    if not compared:
        return f"In none of {plural(len(rates), 'cell')} does a span's survival vary enough to compare."
    r = compared[0]
    difference = _difference_text(facet_of(r.metric)[1], r.difference)
    return (
        f"The largest of {len(compared)}: {r.metric}, {_place(sides, r)}: {difference} where the "
        f"{r.span} was lost, against where it was kept. Not a cause."
    )
