"""The rate of every safety facet where its deciding span was lost and where it was kept, as tables of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from kvaudit.core.facets import Facet, facet_of
from kvaudit.core.spans import SPANS
from kvaudit.core.text import inline, join_names
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.sections.shared.lost_spans import UNMOVED, Group, Mechanism, Share, SpanRates, SpanSlope, mechanism
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import interval_text, percent, plural, with_length
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.few import no_interval
from kvaudit.reports.stats.mover import Mover
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.rules import Rules
from kvaudit.reports.verdict.verdict import Decided

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
    """Return the first span of every cell under a gated policy, the largest differences first."""
    first: dict[tuple[str, str, str, int], SpanRates] = {}
    for r in value.rates:
        key = (r.arm, r.policy, r.metric, r.context_tokens)
        if r.policy in rules.primary and (key not in first or _ORDER[r.span] < _ORDER[first[key].span]):
            first[key] = r
    return sorted(first.values(), key=lambda r: -abs(r.difference.estimate) if r.difference else 0.0)


def _rates_table(sides: Comparison, rates: list[SpanRates]) -> Table:
    rows = []
    for r in [r for r in rates if r.difference][:_MOST_ROWS]:
        lost, kept = (group.answers if group else 0 for group in (r.lost, r.kept))
        lost_in = f"{lost} of {lost + kept} ({percent(lost / (lost + kept))})"
        facet = facet_of(r.metric)[1]
        row = [r.metric, _place(sides, r), r.span, lost_in, _rate(facet, r.lost), _rate(facet, r.kept)]
        rows.append([*row, _difference(facet, r.difference), _share(r.share)])
    headers = ["facet", "cell", "span", "lost in", "rate where lost", "rate where kept", "drift, lost minus kept"]
    return table_of([*headers, "of the drift, where lost"], rows, words=3)


def _slopes_table(sides: Comparison, slopes: Iterable[SpanSlope]) -> Table:
    first: dict[tuple[str, str], SpanSlope] = {}
    for slope in slopes:
        first.setdefault((slope.arm, slope.metric), slope)
    rows = []
    for s in first.values():
        change = _difference(facet_of(s.metric)[1], s.effect) if s.effect else s.reason
        row = [s.metric, s.arm, s.span, change, ", ".join(s.equal) or "nothing else varied"]
        under = ", ".join(map(sides.label, s.policies)) or "-"
        rows.append([*row, under, f"{s.effect.n_items} / {s.effect.n_clusters}" if s.effect else "-"])
    headers = ["facet", "arm", "span", "change where the whole span is lost", "among answers of the same", "under"]
    return table_of([*headers, "answers / templates"], rows, words=6)


def _place(sides: Comparison, r: SpanRates) -> str:
    return with_length(sides, sides.who(r.arm, r.policy), r.context_tokens)


def _rate(facet: Facet, group: Group | None) -> str:
    """Return "41.2 % [30.1, 53.0], uncompressed 3.4 %, unread 12.0 %", as event rates."""
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


def _difference(facet: Facet, effect: Effect | Mover | None) -> str:
    """Return "+23.1 pp [+12.0, +34.2]"; above zero the event happens more often."""
    if effect is None:
        return "-"
    if facet.wanted:
        return interval_text(effect.estimate, effect.low, effect.high)
    return interval_text(-effect.estimate, -effect.high, -effect.low)


def _share(share: Share | None) -> str:
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
    facet = facet_of(r.metric)[1]
    return (
        f"The largest of {len(compared)}: {r.metric}, {_place(sides, r)}: {_difference(facet, r.difference)} where the "
        f"{r.span} was lost, against where it was kept. Not a cause."
    )
