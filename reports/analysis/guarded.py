"""Drift with a guard before the model and without: what a user behind the guard no longer meets, and what it hides.

A guard that stops what a compressed model does wrong makes its drift small without making the model better. Shown facet
by facet beside the verdict, which is about the model alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvaudit.core.facets import WELL_FORMED, facet_of
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.drift import contrast, hidden_drift, seed_pairs
from kvaudit.reports.drift.results import Contrast, Drift
from kvaudit.reports.gate.rules import Rules
from kvaudit.reports.records.guards import FAILED, INPUT, OUTPUT, Guarded, harmful
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import Panel, Panels, panels
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


def guard_effects(data: RunData, drift: Drift, rules: Rules) -> tuple[GuardEffect, ...]:
    """The effect of every guard of a run; raises DataError for files of guards that cannot be used."""
    return tuple(_effect(data, drift, rules, guard) for guard in data.guards)


def _effect(data: RunData, drift: Drift, rules: Rules, guard: Guarded) -> GuardEffect:
    shown = tuple(_facets(data.panels, panels(guard.records), drift, rules))
    return GuardEffect(guard.name, guard.sha256, guard.side, guard.text, tuple(_acts(data, drift, guard)), shown)


def _acts(data: RunData, drift: Drift, guard: Guarded) -> Iterator[SuiteActs]:
    suites, harm = data.records["suite"].astype(str).to_numpy(), harmful(data.records)
    blocked = (guard.acts == INPUT) | (guard.acts == OUTPUT)
    for suite in drift.comparison.suites:
        own = suites == suite
        known = own & (guard.acts != FAILED)
        before, after, failed = (int(np.count_nonzero(own & (guard.acts == act))) for act in (INPUT, OUTPUT, FAILED))
        card = judge_error(blocked[known].astype(np.int64), harm[known].astype(np.int64))
        yield SuiteActs(suite, int(own.sum()), before, after, failed, card)


def _facets(plain: Panels, behind: Panels, drift: Drift, rules: Rules) -> Iterator[Hidden]:
    """Every facet but the form, in every cell that the gate's policies and lengths have."""
    sides = drift.comparison
    for metric in sides.facets:
        for context in sides.lengths[metric]:
            if facet_of(metric)[1].name == WELL_FORMED or (metric, context) not in plain:
                continue
            for estimand, arm, policy in _cells(sides, rules):
                one, other = plain[metric, context], behind[metric, context]
                yield _hidden(sides, drift.alpha, one, other, (estimand, arm, policy))


def _cells(sides: Comparison, rules: Rules) -> Iterator[tuple[str, str, str]]:
    """Estimand, arm and policy: candidates served alike and as deployed, or policies against none."""
    served = [policy for policy in sides.policies if policy in rules.primary]
    if sides.mode == "serving":
        yield from ((sides.base, sides.reference, policy) for policy in served)
        return
    for estimand in ("E1", "E2"):
        yield from ((estimand, arm, policy) for arm in sides.candidates for policy in served)


def _hidden(sides: Comparison, alpha: float, plain: Panel, behind: Panel, cell: tuple[str, str, str]) -> Hidden:
    estimand, arm, policy = cell
    pairs = seed_pairs(sides, plain, arm)

    def of(panel: Panel) -> Contrast:
        return contrast(sides, panel, estimand=estimand, arm=arm, policy=policy, alpha=alpha, pairs=pairs)

    without, with_guard = of(plain), of(behind)
    if without.effect is None or with_guard.effect is None:
        return Hidden(without, with_guard, None)
    return Hidden(without, with_guard, hidden_drift(sides, without, plain, behind, pairs, alpha))
