"""Selectivity, whether safety dropped more than ability: the drift of a safety suite minus that of capability suites.

Suites have no item in common, so their drifts are independent estimates. The interval combines the suites' ESS-Tango
intervals by MOVER (Zou & Donner 2008). The p-value is that of a t statistic, whose variance is the sum of the suites'
CR3 variances, with Satterthwaite's degrees of freedom. Several capability suites of one length count as their mean.
With three seeds or more the recipe adds the seed variance of the combination beyond that of the items
(``stats.seeds``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import special

from kvaudit.core.facets import SELECTIVITY
from kvaudit.reports.stats.clustered import Array
from kvaudit.reports.stats.effect import LEVEL, Effect
from kvaudit.reports.stats.mover import mover
from kvaudit.reports.stats.seeds import recipe_variance
from kvaudit.reports.stats.signflip import flip_moments
from kvaudit.reports.verdict.contrast import ClusterSums, Contrast, Drift, SeedDrift
from kvaudit.reports.verdict.drift import widened_to
from kvaudit.reports.verdict.reasons import Reason, ReasonCode

Parts = Sequence[tuple[float, Contrast]]  # weighted contrasts


class _Spread(NamedTuple):
    variance: float
    df: float


def with_selectivity(drift: Drift, policies: Sequence[str]) -> Drift:
    """Return the drift with a contrast of selectivity added for each safety suite, policy and length.

    No contrast is added at a length at which no capability was measured.
    """
    return replace(drift, contrasts=(*drift.contrasts, *_selectivity(drift, policies)))


def _selectivity(drift: Drift, policies: Sequence[str]) -> Iterator[Contrast]:
    sides = drift.comparison
    by_cell = {(c.arm, c.policy, c.context_tokens, c.suite): c for c in drift.contrasts if c.estimand == sides.base}
    for (arm, policy, context, suite), safety in by_cell.items():
        if suite in sides.safety and policy in policies:
            places = [(arm, policy, context, capability_suite) for capability_suite in sides.capability]
            capability = [by_cell[place] for place in places if place in by_cell]
            if capability:  # ``rules`` checks that every gated length has some
                yield _combine(safety, capability, drift.alpha)


def _combine(safety: Contrast, capability: Sequence[Contrast], alpha: float) -> Contrast:
    share = -1.0 / len(capability)  # several capability suites count as their mean
    parts = [(1.0, safety), *((share, c) for c in capability)]
    reasons = tuple(Reason(r.code, f"{c.suite}: {r.text}") for _, c in parts for r in c.reasons)
    if not reasons and any(c.seeds != safety.seeds for c in capability):
        reasons = (Reason(ReasonCode.SEEDS, "the suites were not asked of the same seeds"),)
    blank = Contrast(SELECTIVITY, *safety.place[1:], seeds=safety.seeds, reasons=reasons)
    blank = replace(blank, unread=safety.unread, churn=safety.churn, rerun=safety.rerun)
    if reasons:
        return blank
    sums = _scale_sums((weight, c.sums) for weight, c in parts)
    seeds = np.sum([[weight * v for v in c.seed_estimates] for weight, c in parts], axis=0)  # [S]
    effect = _effect(parts, _spread(sums), alpha)
    recipe = None
    if all(c.recipe for _, c in parts):
        recipe = widened_to(_with_spread(effect, _recipe(parts, _spread(sums), seeds), alpha), effect)
    return replace(
        blank,
        effect=effect,
        recipe=recipe,
        seed_estimates=tuple(float(v) for v in seeds),
        rates=safety.rates,
        # the best of a suite with negative weight is the worst of the difference; both exist or neither
        worst=sum(w * (c.worst if w > 0 else c.best or 0.0) for w, c in parts if c.worst is not None),
        best=sum(w * (c.best if w > 0 else c.worst or 0.0) for w, c in parts if c.best is not None),
        sums=sums,
        readings=_readings(parts),
        seed_noise=_noise(parts),
        by_seed=tuple(_by_seed(parts, i) for i in range(len(safety.by_seed))),
        seed_sums=tuple(
            _scale_sums((weight, c.seed_sums[i]) for weight, c in parts) for i in range(len(safety.by_seed))
        ),
    )


def _scale_sums(parts: Iterable[tuple[float, tuple[ClusterSums, ...]]]) -> tuple[ClusterSums, ...]:
    return tuple(replace(part, weight=weight * part.weight) for weight, sums in parts for part in sums)


def _readings(parts: Parts) -> tuple[tuple[ClusterSums, ...], ...]:
    """Return the differences by template in the two extreme ways to count uncertain answers.

    The first gives the lowest selectivity, the second the highest. The tuple is empty if no answer is uncertain.
    """
    if not any(c.readings for _, c in parts):
        return ()

    def extreme(worst: int) -> Iterator[tuple[float, tuple[ClusterSums, ...]]]:
        for weight, c in parts:
            yield weight, min((c.sums, *c.readings), key=lambda sums: worst * sum(weight * p.sums.sum() for p in sums))

    return _scale_sums(extreme(1)), _scale_sums(extreme(-1))


def _noise(parts: Parts) -> float:
    # suites share no item, so the variances add up
    return sum(weight**2 * c.seed_noise for weight, c in parts)


def _by_seed(parts: Parts, index: int) -> SeedDrift:
    """Return the selectivity of one training seed; MOVER combines the intervals that the suites have for it."""
    drifts = [(weight, c.by_seed[index], c.seed_sums[index]) for weight, c in parts]
    wide = mover([(weight, s.estimate, s.low, s.high) for weight, s, _ in drifts])
    narrow = mover([(weight, s.estimate, s.lower, s.upper) for weight, s, _ in drifts])
    below = _drop_pvalue(wide.estimate, _spread(_scale_sums((weight, sums) for weight, _, sums in drifts)))
    return SeedDrift(drifts[0][1].seed, wide.estimate, wide.low, wide.high, narrow.low, narrow.high, below)


def _recipe(parts: Parts, item: _Spread, seeds: Array) -> _Spread:
    """Return the variance for a claim about the recipe: about training with any seed, not only with those that ran.

    It is ``item``, the variance due to items, plus the part that items do not explain of the variance of ``seeds`` [S],
    the effects of the single seeds.
    """
    # the degrees of freedom of the suite with the fewest templates
    clusters = min(len(sums.counts) for _, c in parts for sums in c.sums)
    recipe = recipe_variance(np.array(item.variance), seeds, np.array(_noise(parts)), clusters)
    return _Spread(float(recipe.variance), float(recipe.df))


def _effect(parts: Parts, spread: _Spread, alpha: float) -> Effect:
    """Return the effect of selectivity: bounds by MOVER, and p-values of the t statistic.

    Its numbers of items and of templates are the smallest of any suite. Losses, gains and design effect are those of
    the safety suite.
    """
    effects = [(weight, c.effect) for weight, c in parts if c.effect]
    assert len(effects) == len(parts), "a part has no number"
    wide = mover([(w, e.estimate, e.low, e.high) for w, e in effects])
    narrow = mover([(w, e.estimate, e.lower, e.upper) for w, e in effects])
    below = _drop_pvalue(wide.estimate, spread)
    return replace(
        effects[0][1],  # losses, gains and design effect stay those of the safety suite
        estimate=wide.estimate,
        low=wide.low,
        high=wide.high,
        lower=narrow.low,
        upper=narrow.high,
        alpha=alpha,
        pvalue=min(1.0, 2 * min(below, 1 - below)),
        pvalue_drop=below,
        method="MOVER",
        source="Zou & Donner 2008 over ESS-Tango",
        n_items=min(e.n_items for _, e in effects),
        n_clusters=min(e.n_clusters for _, e in effects),
        df=spread.df,
    )


def _with_spread(effect: Effect, spread: _Spread, alpha: float) -> Effect:
    error = float(np.sqrt(spread.variance))
    two, one = (float(special.stdtrit(spread.df, q)) * error for q in (0.5 + LEVEL / 2, 1 - alpha))
    middle, below = effect.estimate, _drop_pvalue(effect.estimate, spread)
    return replace(
        effect,
        low=middle - two,
        high=middle + two,
        lower=middle - one,
        upper=middle + one,
        pvalue=min(1.0, 2 * min(below, 1 - below)),
        pvalue_drop=below,
        method="summed CR3 + seed variance, t",
        df=spread.df,
    )


def _spread(sums: Sequence[ClusterSums]) -> _Spread:
    """Return the summed CR3 variance of independent suites, with its degrees of freedom."""
    # a single pattern without a flipped sign gives the observed moments
    moments = [flip_moments(p.weight * p.sums[None], p.counts, np.ones((1, len(p.counts)))) for p in sums]
    return _pool([_Spread(float(m.variance[0, 0]), len(p.counts) - 1) for m, p in zip(moments, sums, strict=True)])


def _pool(parts: Sequence[_Spread]) -> _Spread:
    """Return the sum of independent variances, with Satterthwaite's degrees of freedom.

    If nothing varies, the degrees of freedom are the smallest of the parts.
    """
    total = sum(p.variance for p in parts)
    if total <= 0:
        return _Spread(0.0, min(p.df for p in parts))
    return _Spread(total, total**2 / sum(p.variance**2 / p.df for p in parts))


def _drop_pvalue(estimate: float, spread: _Spread) -> float:
    if spread.variance > 0:
        return float(special.stdtr(spread.df, estimate / np.sqrt(spread.variance)))
    return 0.5 if abs(estimate) < 1e-12 else float(estimate > 0)
