"""Plan the rounds of questions of a run: how many rows to ask next, when to test them (a look), and why to stop.

Everything here follows from the plan and the stored looks alone, so that a resumed run asks what it would have asked.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from kvaudit.core.facets import facet_of, is_well_formed
from kvaudit.core.provenance import LOOKS, PLANNED, TIME_SPENT, seconds_of, table_of
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_evaluate import FIRST_LOOK, PILOT_ITEMS
from kvaudit.reports.stats.betting import decidable_churn, smallest_margin
from kvaudit.reports.verdict.verdict import Status

DECIDED, ROWS_SPENT, LOSS = "everything is decided", "the rows are spent", "a loss is shown"
UNANSWERED = "too many answers are missing"
UNREAD = "too few answers can be read"
UNCHANGED = "the setting changed no answer and no log-prob"
UNMEASURABLE = "the uncompressed model has nothing to lose in anything asked"
# in place of a status that more rows would not change
INVALID_BY_MISSING, INVALID_BY_CANARY = "INVALID, answers are missing", "INVALID, nothing has changed"
INVALID_BY_FORM = "INVALID, too few answers can be read"
ENDINGS = {INVALID_BY_MISSING: UNANSWERED, INVALID_BY_FORM: UNREAD, INVALID_BY_CANARY: UNCHANGED}
# statuses that more rows may change
OPEN = (Status.INCONCLUSIVE.value, Status.NOT_MEASURABLE.value, Status.INVALID.value)
_OVERHEAD = 1.15  # total time / time that the answers take


def look_sizes(rows: int, first: int = FIRST_LOOK, pilot: int = PILOT_ITEMS) -> list[int]:
    """Return the numbers of rows of a suite after which a look is taken.

    These are the pilot's rows (``pilot``), ``first``, then each time 1.5 times the number before, and at last ``rows``.
    """
    looks, look = [pilot] if pilot < min(first, rows) else [], first
    while look < rows:
        looks.append(look)
        look = look * 3 // 2
    return [*looks, rows]


@dataclass(frozen=True)
class RowsPlan:
    """The plan of how many rows of each suite to ask at most.

    It is made before the first round, and corrected once, after the first rows that the pilot had not asked. Each field
    is by suite: ``items`` is the largest number of rows to ask, ``seconds`` the time per row under all serving
    configurations together, ``left_out`` the reason why a suite is not asked, and ``at_hand`` the number of rows that
    exist. ``first_items`` are the ``items`` before the correction; empty until then.
    """

    items: Mapping[str, int]
    seconds: Mapping[str, float]
    left_out: Mapping[str, str]
    at_hand: Mapping[str, int]
    first_items: Mapping[str, int] = field(default_factory=dict)

    def written(self) -> dict[str, Any]:
        """Return the plan as a table for provenance.json."""
        return {part.name: dict(getattr(self, part.name)) for part in fields(self)}

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> RowsPlan | None:
        """Return the plan of rounds that a run has stored in its provenance, or None."""
        table = table_of(table_of(provenance, LOOKS), PLANNED)
        return cls(*(table_of(table, part.name) for part in fields(cls))) if table else None


def rows_plan(
    at_hand: Mapping[str, int],
    seconds: Mapping[str, float],
    left_out: Mapping[str, str],
    minutes: float,
    first: int,
    gated: Collection[str],
) -> RowsPlan:
    """Return a plan of the largest number of rows to ask of each suite.

    That is the number at the first look (``first``) and, for gated suites, a share of the remaining rows. The share is
    the same for all gated suites, and as large as ``minutes`` allow. ``at_hand`` is the number of existing rows by
    suite, ``seconds`` the time per row, ``left_out`` the suites not to ask with the reason.
    """
    least = {suite: min(first, rows) for suite, rows in at_hand.items() if suite not in left_out}
    most = {suite: at_hand[suite] if suite in gated else rows for suite, rows in least.items()}
    least_seconds, most_seconds = (
        _OVERHEAD * sum(numbers[suite] * seconds.get(suite, 0.0) for suite in most) for numbers in (least, most)
    )
    share = (60 * minutes - least_seconds) / (most_seconds - least_seconds) if most_seconds > least_seconds else 1.0
    share = min(1.0, max(0.0, share))
    items = {suite: least[suite] + int(share * (rows - least[suite])) for suite, rows in most.items()}
    return RowsPlan(items, {suite: seconds.get(suite, 0.0) for suite in most}, left_out, at_hand)


def is_first_asked(looks: Sequence[Mapping[str, Any]], pilot: int) -> bool:
    """Return whether the last look is the first with more rows of a suite than the ``pilot`` rows of the pilot."""
    most = [max(table_of(look, "items").values(), default=0) for look in looks]
    return most[-1] > pilot and all(rows <= pilot for rows in most[:-1])


def corrected_items(
    plan: RowsPlan, looks: Sequence[Mapping[str, Any]], minutes: float, gated: Collection[str]
) -> dict[str, int]:
    """Return the largest number of rows to ask of each suite, planned again from the time that the rows so far took.

    It is the number asked so far and, for a gated suite, a share of the remaining rows. The share is the same for all
    gated suites, and as large as the time allows. Only the time decides, never the answers, so the tests stay valid.
    """
    rows_asked, seconds = table_of(looks[-1], "items"), _measured_seconds(plan, looks)
    more = {suite: plan.at_hand.get(suite, rows) - rows for suite, rows in rows_asked.items() if suite in gated}
    seconds_left = 60 * minutes - seconds_of(looks)
    seconds_needed = sum(rows * seconds.get(suite, 0.0) for suite, rows in more.items())
    share = min(1.0, max(0.0, seconds_left / seconds_needed)) if seconds_needed else 1.0
    return {suite: rows_asked.get(suite, rows) + int(share * more.get(suite, 0)) for suite, rows in plan.items.items()}


def next_round(
    plan: RowsPlan, looks: Sequence[Mapping[str, Any]], minutes: float, first: int, pilot: int = PILOT_ITEMS
) -> dict[str, range] | str:
    """Return the rows of the next round by suite, or the reason why there is none.

    ``looks`` are the earlier tests, with the rows asked before each. A loss that is shown ends all rounds. Once some
    suite has ``first`` rows, so does the time limit ``minutes``, or a result that is invalid however many rows follow.
    A suite that is undecided after its planned looks gets more rows while time is left, and is then decided by the
    betting test, which may be made at any number of looks. ``pilot`` is the number of rows that the pilot has asked.
    """
    rows_asked = {suite: 0 for suite in plan.items} | dict(table_of(looks[-1], "items") if looks else {})
    statuses: Mapping[str, str] = table_of(looks[-1], "words") if looks else {}
    if reason := _reason_to_end(statuses, max(rows_asked.values(), default=0), first):
        return reason
    undecided = {facet_of(metric)[0] for metric, status in statuses.items() if status in (*OPEN, *ENDINGS)}
    ungated = plan.items.keys() - {facet_of(metric)[0] for metric in statuses}  # all suites before the first look
    undecided |= {suite for suite in ungated if rows_asked[suite] < plan.items[suite]}
    if not undecided:
        return DECIDED
    open_suites = {facet_of(metric)[0] for metric, status in statuses.items() if status == Status.INCONCLUSIVE.value}
    rows = dict[str, range]()
    for suite, done in rows_asked.items():
        planned = plan.items[suite]
        if suite in undecided and done < planned:
            rows[suite] = range(done, next(look for look in look_sizes(planned, first, pilot) if look > done))
        elif suite in open_suites and done < plan.at_hand.get(suite, planned):
            rows[suite] = range(done, min(done * 3 // 2, plan.at_hand[suite]))
    if not rows:
        if {*statuses.values()} == {Status.NOT_MEASURABLE.value} and max(plan.items.values()) <= pilot:
            return UNMEASURABLE  # only a model with nothing to lose is planned to get no more than the pilot's rows
        is_all_asked = all(rows_asked[suite] == plan.at_hand.get(suite, rows_asked[suite]) for suite in undecided)
        return ROWS_SPENT if is_all_asked else TIME_SPENT
    seconds_left, row_seconds = 60 * minutes - seconds_of(looks), _measured_seconds(plan, looks)
    seconds = {suite: len(suite_rows) * row_seconds.get(suite, 0.0) for suite, suite_rows in rows.items()}
    if max(rows_asked.values(), default=0) < first or sum(seconds.values()) <= seconds_left:
        return rows
    # too little time for all suites: ask the one with the fewest rows that fits alone
    fitting = [suite for suite in rows if seconds[suite] <= seconds_left]
    return {suite: rows[suite] for suite in sorted(fitting, key=lambda suite: len(rows[suite]))[:1]} or TIME_SPENT


def _reason_to_end(statuses: Mapping[str, str], rows: int, first: int) -> str | None:
    """Return why a look ends all rounds, even if suites are undecided; None if it does not.

    ``statuses`` are the look's, by metric. ``rows`` is how many rows the suite with the most rows has been asked.
    """
    if Status.FAIL.value in statuses.values():
        return LOSS
    endings = (reason for invalid, reason in ENDINGS.items() if invalid in statuses.values())
    return next(endings, None) if rows >= first else None


def _measured_seconds(plan: RowsPlan, looks: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return the seconds per row by suite: the plan's, scaled by how much slower the rounds so far have been."""
    seconds_spent = seconds_of(looks)
    rows: Mapping[str, int] = table_of(looks[-1], "items") if looks else {}
    planned = sum(number * plan.seconds.get(suite, 0.0) for suite, number in rows.items())
    slower = seconds_spent / planned if planned and seconds_spent else _OVERHEAD
    return {suite: slower * seconds for suite, seconds in plan.seconds.items()}


def plan_lines(plan: RowsPlan, spec: RunSpec, shares: Mapping[str, float] = MappingProxyType({})) -> Iterator[str]:
    """Yield a line for each margin: how many rows are planned, how long they take and what loss they can show.

    If not all rows of a suite count for a metric, ``shares`` has the share that does, by metric. The first lines name
    the suites that are not asked, with the reason. If the rows that are always asked take longer than the time limit,
    the last line says so.
    """
    rounds = spec.evaluate.rounds
    assert rounds is not None, "only a check in rounds has a plan"
    assert spec.gate.alpha is not None, "a complete spec has a level"
    for suite, reason in plan.left_out.items():
        yield f"not asked of this model: {suite} ({reason})"
    minutes = {suite: _OVERHEAD * rows * plan.seconds.get(suite, 0.0) / 60 for suite, rows in plan.items.items()}
    for suite, rows in plan.items.items():
        size = f"{suite}: up to {rows} rows, about {_in_minutes(minutes[suite])}"
        for metric, points in spec.gate.margins.items():
            if facet_of(metric)[0] == suite and not is_well_formed(metric):  # of which nothing is expected to change
                counted = round(rows * shares.get(metric, 1.0))
                yield f"{size}; {_detectable_loss(counted, points, spec.gate.alpha)}"
    total = sum(minutes.values())
    if total > _OVERHEAD * rounds.minutes:
        yield (
            f"the first {rounds.first} rows are always asked: about {_in_minutes(total)} in all, not {rounds.minutes:g}"
        )


def _in_minutes(minutes: float) -> str:
    whole = max(1, round(minutes))
    return f"{whole} minute{'s' * (whole > 1)}"


def _detectable_loss(rows: int, points: float, alpha: float) -> str:
    least = math.ceil(1000 * smallest_margin(rows, alpha)) / 10
    if least > points:
        return f"a loss of {points:g} points cannot be ruled out with so few rows, one of {least:.1f} points can"
    churn = 100 * decidable_churn(rows, points / 100, alpha)
    return (
        f"a loss of {points:g} points can be ruled out if fewer than {churn:.0f} % of the answers change, half of them "
        "for the better"
    )
