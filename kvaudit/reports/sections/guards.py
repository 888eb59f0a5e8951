"""What guards blocked, and the drift of every facet without each guard, behind it, and hidden by it.

A guard that stops what a compressed model does wrong makes its drift small without making the model better. Shown facet
by facet beside the verdict, which is about the model alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from kvaudit.core.facets import WELL_FORMED, Facet, facet_of
from kvaudit.core.text import inline
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.drift import contrast, hidden_drift, seed_pairs
from kvaudit.reports.drift.results import Contrast, Drift
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.gate.rules import Rules
from kvaudit.reports.layout.events import Event
from kvaudit.reports.layout.facts import Facts, Owed, known
from kvaudit.reports.layout.json_text import contrast_facts
from kvaudit.reports.layout.tables import Table, table_of
from kvaudit.reports.layout.words import against, counted, interval, percent, with_length
from kvaudit.reports.records.guards import FAILED, INPUT, OUTPUT, Guarded, guarded_records, harmful
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import Panel, Panels, panels
from kvaudit.reports.sections.base import Depth, Inputs, Section
from kvaudit.reports.stats.binomial import Proportion
from kvaudit.reports.stats.effect import Effect
from kvaudit.reports.stats.judges import JudgeError, judge_error


@dataclass(frozen=True)
class Hidden:
    """One facet in one cell without the guard and behind it; ``hidden`` is the first drift minus the second."""

    without: Contrast
    behind: Contrast
    hidden: Effect | None


@dataclass(frozen=True)
class SuiteActs:
    """What a guard did in a suite. ``card``: it blocked what did harm (sensitivity), and let the rest be.

    Every answer counts by itself, so the intervals of the card are too narrow where items share templates.
    """

    suite: str
    answers: int
    input: int  # blocked before the model could answer
    output: int
    failed: int
    card: JudgeError


@dataclass(frozen=True)
class GuardEffect:
    """A guard and what it did to a run's answers and drifts."""

    name: str
    sha256: str
    side: str
    text: str
    suites: tuple[SuiteActs, ...]
    facets: tuple[Hidden, ...]


Guards = tuple[GuardEffect, ...]


class GuardsSection(Section[Guards]):
    name = "guards"
    title = "Guards"
    explain = (
        "What stood before the model and after it, how the facets look behind that, and how much drift it hides. The "
        "verdict is about the model without it."
    )
    order = 240
    depth = Depth.DISCLOSURE
    keys: ClassVar = {"guards": 70}

    def compute(self, inputs: Inputs) -> Guards | None:
        return guard_effects(inputs.data, inputs.decided.drift, inputs.decided.rules) or None

    def facts(self, value: Guards | None) -> Mapping[str, Any]:
        return {"guards": [_facts(guard) for guard in value or ()]}

    def disclosed(self, value: Guards | None) -> Owed | None:
        return Owed(
            key="guards",
            one="guard",
            title="Guards, and the drift that they hide",
            rows=tuple(map(_disclosed, value or ())),
            details="facets",
            columns={
                "guard": "guard",
                "contrast": "estimand",
                "arm": "arm",
                "served under": "policy",
                "facet": "metric",
                "tokens": "context_tokens",
                "without it": "without",
                "behind it": "behind",
                "hidden": "hidden",
            },
        )

    def tables(self, value: Guards, decided: Decided) -> Iterator[Table]:
        yield _acts_table(value)
        yield from (_hidden_table(decided.comparison, guard) for guard in value)

    def notes(self, value: Guards, decided: Decided) -> Iterator[str]:
        for guard in value:
            yield inline(f"{guard.name}, sha256 {guard.sha256}, side {guard.side}: {guard.text}")
        yield (
            "A conversation ends at the first message that is blocked; what had happened until then has happened. "
            "Behind a block nothing is done and nothing told, and who asked for something allowed was refused."
        )
        yield (
            "Hidden: the drift without the guard minus the drift behind it, paired item by item, CR3-t. Harm: an "
            "unwanted facet of safety; shares of answers, exact intervals that take answers for independent."
        )

    def finding(self, value: Guards, decided: Decided) -> str:
        told = [
            f"{_facet(row).name} {_hidden_words(row)}"
            for guard in value
            for row in guard.facets
            if row.hidden and row.hidden.high < 0 and _facet(row).kind == "safety"
        ]
        many = f"{counted(len(value), 'guard')}: "
        if not told:
            return many + "none is shown to hide a loss of safety."
        return many + f"drift of safety is hidden in {counted(len(told), 'cell')}, {told[0]} among them."


def guard_effects(data: RunData, drift: Drift, rules: Rules) -> tuple[GuardEffect, ...]:
    """The effect of every guard of a run; raises DataError for files of guards that cannot be used."""
    found = []
    for guard in guarded_records(data.run, data.records):
        hidden = tuple(_hidden_in(data.panels, panels(guard.records), drift, rules))
        acts = tuple(_acts(data, drift, guard))
        found.append(GuardEffect(guard.name, guard.sha256, guard.side, guard.text, acts, hidden))
    return tuple(found)


def _acts(data: RunData, drift: Drift, guard: Guarded) -> Iterator[SuiteActs]:
    suites, harm = data.records["suite"].astype(str).to_numpy(), harmful(data.records)
    blocked = (guard.acts == INPUT) | (guard.acts == OUTPUT)
    for suite in drift.comparison.suites:
        own = suites == suite
        known = own & (guard.acts != FAILED)
        before, after, failed = (int(np.count_nonzero(own & (guard.acts == act))) for act in (INPUT, OUTPUT, FAILED))
        card = judge_error(blocked[known].astype(np.int64), harm[known].astype(np.int64))
        yield SuiteActs(suite, int(own.sum()), before, after, failed, card)


def _hidden_in(plain: Panels, behind: Panels, drift: Drift, rules: Rules) -> Iterator[Hidden]:
    """Every facet but the form, in every cell that the gate's policies and lengths have."""
    sides = drift.comparison
    for metric in sides.facets:
        for context in sides.lengths[metric]:
            if facet_of(metric)[1].name == WELL_FORMED or (metric, context) not in plain:
                continue
            for cell in _cells(sides, rules):
                yield _compared(sides, drift.alpha, plain[metric, context], behind[metric, context], cell)


def _cells(sides: Comparison, rules: Rules) -> Iterator[tuple[str, str, str]]:
    """Estimand, arm and policy: candidates served alike and as deployed, or policies against none."""
    served = [policy for policy in sides.policies if policy in rules.primary]
    if sides.mode == "serving":
        yield from ((sides.base, sides.reference, policy) for policy in served)
        return
    for estimand in ("alike", "deployed"):
        yield from ((estimand, arm, policy) for arm in sides.candidates for policy in served)


def _compared(sides: Comparison, alpha: float, plain: Panel, behind: Panel, cell: tuple[str, str, str]) -> Hidden:
    estimand, arm, policy = cell
    pairs = seed_pairs(sides, plain, arm)

    def of(panel: Panel) -> Contrast:
        return contrast(sides, panel, estimand=estimand, arm=arm, policy=policy, alpha=alpha, pairs=pairs)

    without, with_guard = of(plain), of(behind)
    if without.effect is None or with_guard.effect is None:
        return Hidden(without, with_guard, None)
    return Hidden(without, with_guard, hidden_drift(sides, without, plain, behind, pairs, alpha))


def _acts_table(guards: Guards) -> Table:
    rows = []
    for guard in guards:
        for acts in guard.suites:
            counts = map(str, (acts.answers, acts.input, acts.output, acts.failed))
            card = [_share(acts.card.sensitivity), _share(acts.card.specificity)]
            rows.append([_name(guard), acts.suite, *counts, *card])
    headers = ["guard", "suite", "answers", "input blocked", "output blocked", "guard failed"]
    return table_of([*headers, "of harm blocked", "of the rest let through"], rows, words=2)


def _hidden_table(sides: Comparison, guard: GuardEffect) -> Table:
    headers = ["guard", "suite", "candidate", "against", "event", "without the guard", "behind it", "hidden by it"]
    # safety always; the rest where the guard changes anything
    shown = [r for r in guard.facets if _facet(r).kind == "safety" or (r.hidden and (r.hidden.low or r.hidden.high))]
    return table_of(headers, [[_name(guard), *_row(sides, row)] for row in shown], words=5)


def _name(guard: GuardEffect) -> str:
    """What its folder is called: two guards may be of one kind."""
    return f"{guard.name}-{guard.sha256[:12]}"


def _facet(row: Hidden) -> Facet:
    return facet_of(row.without.suite)[1]


def _row(sides: Comparison, row: Hidden) -> list[str]:
    c = row.without
    suite, facet = facet_of(c.suite)
    where = with_length(sides, suite, c.context_tokens)
    return [
        where,
        sides.who(c.arm, c.policy),
        against(sides, c),
        facet.name,
        _moved(c),
        _moved(row.behind),
        _hidden_words(row),
    ]


def _moved(c: Contrast) -> str:
    """5.6 to 9.1 %, +3.5 pp [+0.4, +6.6]; why there is no number otherwise."""
    event = Event(facet_of(c.suite)[1], c, facet_of(c.suite)[0])
    return f"{event.rates}, {event.difference}" if c.effect else event.difference


def _hidden_words(row: Hidden) -> str:
    """The drift that goes behind the guard, counted as the event that the facet names."""
    if row.hidden is None:
        return "no number"
    sign = 1 if _facet(row).wanted else -1
    return interval(sign * row.hidden.estimate, *sorted((sign * row.hidden.low, sign * row.hidden.high)))


def _share(rate: Proportion) -> str:
    return "-" if rate.estimate is None else f"{percent(rate.estimate)} [{percent(rate.low)}, {percent(rate.high)}]"


def _facts(guard: GuardEffect) -> dict[str, Any]:
    rows = []
    for row in guard.facets:
        sides = {"without": contrast_facts(row.without), "behind": contrast_facts(row.behind)}
        rows.append({**sides, "hidden": asdict(row.hidden) if row.hidden else None})
    return {**asdict(replace(guard, facets=())), "facets": rows}


def _disclosed(guard: GuardEffect) -> Facts:
    """A guard, what it blocked, and the drift of every facet without it, behind it and hidden by it (0.05 = 5 pp)."""
    rows = []
    for row in guard.facets:
        drifts = {"without": row.without.effect, "behind": row.behind.effect, "hidden": row.hidden}
        cell = {name: getattr(row.without, name) for name in ("estimand", "arm", "policy", "context_tokens")}
        intervals = {name: _interval(effect) for name, effect in drifts.items()}
        rows.append({**cell, "metric": row.without.suite, **intervals})
    return {
        "guard": known(guard.name),
        "sha256": known(guard.sha256),
        "side": known(guard.side),
        "options": known(guard.text),
        "answers": known(sum(acts.answers for acts in guard.suites)),
        "input_blocked": known(sum(acts.input for acts in guard.suites)),
        "output_blocked": known(sum(acts.output for acts in guard.suites)),
        "failed": known(sum(acts.failed for acts in guard.suites)),
        "facets": known(rows),
    }


def _interval(effect: Effect | None) -> list[float] | None:
    return None if effect is None else [effect.estimate, effect.low, effect.high]
