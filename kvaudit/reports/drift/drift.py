"""Records -> drift: rates of every cell and the difference of every arm. Pure; the gate decides what it returns.

Estimands (statistics: weights over cells, seeds and samples averaged inside the item first):
alike candidate - reference under the same policy; deployed candidate as deployed - uncompressed reference;
serving a checkpoint under a policy - itself uncompressed; interaction candidate's serving - reference's serving;
amplification candidate uncompressed - reference under the policy that the candidate was trained under.
Each is weights over cells, one number per item, one clustered one-sample inference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvaudit.core.errors import DataError
from kvaudit.core.estimands import ALIKE, DEPLOYED, INTERACTION, SERVING
from kvaudit.core.facets import UNSAFE, facet_of
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.records import Outcome
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.reports.verdict.reference_answers import reference_answers
from kvaudit.reports.verdict.canary import canaries_of, canary_reasons, checked_by_canary
from kvaudit.reports.verdict.comparison import Comparison, Look, Reason, run_reasons
from kvaudit.reports.verdict.contrast import Cell, ClusterSums, Contrast, Drift, Rates, SeedDrift, UnwantedEvents
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import LIVE, OPTIONAL, ROLES, CellKey, Panel, Panels
from kvaudit.reports.stats.betting import betting_effect
from kvaudit.reports.stats.churn import Flips, flips
from kvaudit.reports.stats.clustered import cr3_effect
from kvaudit.reports.stats.effect import Array, Effect
from kvaudit.reports.stats.few import no_interval
from kvaudit.reports.stats.seeds import SEEDS_NEEDED, by_cluster, recipe_effect, seed_noise
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS
from kvaudit.reports.stats.tango import ess_tango, many_ess_tango

Weights = dict[CellKey, float]
Scores = Mapping[CellKey, Array]
AMPLIFICATION = "amplification"
SeedPair = tuple[int, int]  # candidate seed, reference seed
NO_HARM_GRADER = (
    "no grader of harm spoke, so nobody knows what is unsafe: kvaudit grade judge RUN --judge "
    "rubric-endpoint:asks=harm,..."
)
UNSCORED_LIMIT = 0.01  # share of samples, and largest difference between two cells
FEW_CLUSTERS = "FEW_CLUSTERS"
BYTES = ["kv_bytes_peak", "kv_bytes_dense", LIVE]
CELL = ["arm", "policy", "suite", "context_tokens"]


class Where(NamedTuple):
    """Some of the cells of a comparison."""

    estimands: frozenset[str]
    policies: frozenset[str]
    contexts: frozenset[int]

    def hold(self, estimand: str, policy: str, context: int) -> bool:
        """Whether a contrast stands among them."""
        return estimand in self.estimands and policy in self.policies and context in self.contexts


def drift_of(data: RunData, comparison: Comparison, alpha: float, facets: Where | None = None) -> Drift:
    """The drift of a run's records, with one-sided bounds at level ``alpha``.

    ``facets``: where they are contrasted, None for everywhere; they are most of the contrasts.
    """
    tables = data.panels
    acting = canaries_of(data.records, _asked_again(data, comparison), comparison)
    found = contrasts(comparison, tables, alpha, facets)
    return Drift(
        run=data.spec.name,
        comparison=comparison,
        alpha=alpha,
        cells=tuple(cells_of(data.records, tables, comparison)),
        contrasts=tuple(checked_by_canary(c, comparison, acting) for c in found),
        reasons=(*run_reasons(data, comparison), *canary_reasons(comparison, acting)),
        n_records=len(data.records),
        weights=_checkpoints(data.records, comparison.reference),
        answers=reference_answers(data.records, comparison.reference),
    )


def _asked_again(data: RunData, comparison: Comparison) -> Mapping[str, pd.DataFrame]:
    """The records of the floor by way of asking; none of a floor that cannot be read, which is among the problems."""
    if not comparison.references:
        return {}
    try:
        return data.floor.records
    except DataError:
        return {}


def _checkpoints(records: pd.DataFrame, arm: str) -> dict[int, frozenset[str]]:
    own = records.loc[records["arm"] == arm, ["train_seed", "checkpoint"]]
    found = own.groupby("train_seed", observed=True)["checkpoint"].unique()
    return {int(str(seed)): frozenset(weights) for seed, weights in found.items()}


# --- what is contrasted with what -------------------------------------------------------------------------------------


def contrasts(comparison: Comparison, tables: Panels, alpha: float, facets: Where | None = None) -> Iterator[Contrast]:
    """Every contrast that a comparison has; an asked length of a suite without any record yields blanks."""
    for metric in (*comparison.suites, *comparison.facets):
        only = facets if metric in comparison.facets else None
        for context in comparison.lengths[metric]:
            panel = tables.get((metric, context)) or _empty_panel(metric, context)
            for estimand, arm, policy in sides(comparison):
                if only is None or only.hold(estimand, policy, context):
                    yield contrast(comparison, panel, estimand=estimand, arm=arm, policy=policy, alpha=alpha)


def sides(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Estimand, arm and policy of what is contrasted on every metric and length."""
    for policy, arm in product(comparison.policies, comparison.arms):
        if (arm, policy) in comparison.unserved:
            continue
        trained = arm in comparison.candidates
        yield from ((estimand, arm, policy) for estimand in (ALIKE, DEPLOYED) if trained)
        if not comparison.is_uncompressed(policy) and (trained or arm == comparison.reference):
            yield from ((estimand, arm, policy) for estimand in ((SERVING, INTERACTION) if trained else (SERVING,)))
        if trained and policy == comparison.trained_under.get(arm):
            yield AMPLIFICATION, arm, policy


def seed_pairs(comparison: Comparison, panel: Panel, arm: str) -> list[SeedPair]:
    """Seed s of the arm with seed s of the reference; a reference of one seed (a pinned run, the base) serves all."""
    own = list(comparison.seeds)
    if arm == comparison.reference:
        own = sorted({cell.seed for cell in panel.scores if cell.arm == arm}) or own
        return [(seed, seed) for seed in own]
    other = sorted({cell.seed for cell in panel.scores if cell.arm == comparison.reference})
    # a single seed that is among ours is a reference that lacks the others: paired by number, the gap is said
    single = len(other) == 1 and not set(other) & set(own)
    return [(seed, other[0] if single else seed) for seed in own]


def _empty_panel(suite: str, context: int) -> Panel:
    none: dict[CellKey, Any] = {}
    return Panel(suite, context, (), np.zeros(0, dtype=np.int64), (), none, none, none, {}, 1, False, frozenset(), 0)


# --- estimands: weights over cells ------------------------------------------------------------------------------------


def _add(*terms: tuple[CellKey, float]) -> Weights:
    """Weights summed by cell, so a cell minus itself is nothing."""
    weights: Weights = {}
    for cell, weight in terms:
        weights[cell] = weights.get(cell, 0.0) + weight
    return weights


def weights_of(comparison: Comparison, estimand: str, arm: str, pair: SeedPair, policy: str) -> Weights:
    """The cells of one estimand for one pair of seeds; what is uncompressed is so in the same engine.

    Amplification is what training under the policy did, minus what serving under it does to the reference, in one
    paired difference: (candidate uncompressed - reference uncompressed) - (reference under the policy - reference
    uncompressed). An interaction is the candidate's serving minus the reference's, a difference in differences.
    """
    plain = comparison.uncompressed_of(policy)
    own, own_plain = CellKey(arm, pair[0], policy), CellKey(arm, pair[0], plain)
    other, other_plain = (CellKey(comparison.reference, pair[1], served) for served in (policy, plain))
    terms = {
        ALIKE: ((own, 1.0), (other, -1.0)),
        DEPLOYED: ((own, 1.0), (other_plain, -1.0)),
        SERVING: ((own, 1.0), (own_plain, -1.0)),  # the reference plays no part
        INTERACTION: ((own, 1.0), (own_plain, -1.0), (other, -1.0), (other_plain, 1.0)),
        AMPLIFICATION: ((own_plain, 1.0), (other, -1.0)),
    }
    return _add(*terms[estimand])


# --- one contrast -----------------------------------------------------------------------------------------------------


def contrast(
    comparison: Comparison,
    panel: Panel,
    *,
    estimand: str,
    arm: str,
    policy: str,
    alpha: float,
    pairs: Sequence[SeedPair] | None = None,
) -> Contrast:
    """One estimand over paired seeds, the panel's own unless given: seeds are averaged inside the item first."""
    paired = seed_pairs(comparison, panel, arm) if pairs is None else pairs
    weights = [weights_of(comparison, estimand, arm, pair, policy) for pair in paired]
    looked = comparison.looked.get(facet_of(panel.suite)[0] if panel.suite in comparison.facets else panel.suite)
    seeds = [pair[0] for pair in paired]
    return _weighed(estimand, panel, weights, arm=arm, seeds=seeds, policy=policy, alpha=alpha, looked=looked)


def _weighed(
    estimand: str,
    panel: Panel,
    weights: list[Weights],
    *,
    arm: str,
    seeds: Sequence[int],
    policy: str,
    alpha: float,
    looked: Look | None = None,
) -> Contrast:
    cells = sorted({cell for w in weights for cell in w})
    reasons = broken_contract(panel, cells) if weights else (Reason("CELL", f"arm {arm} has no seed to pair"),)
    blank = Contrast(
        estimand, arm, policy, panel.suite, panel.context_tokens, seeds=tuple(seeds), reasons=tuple(reasons)
    )
    # nothing else is wrong: the estimate may be said, without an interval
    if [reason.code for reason in reasons] == [FEW_CLUSTERS]:
        return replace(blank, reasons=(_estimate_alone(panel, weights, ~np.isnan(panel.floor[cells[0]])),))
    return blank if reasons else _with_numbers(replace(blank, looked=looked), panel, weights, cells, alpha)


def _estimate_alone(panel: Panel, weights: list[Weights], recorded: npt.NDArray[np.bool_]) -> Reason:
    z = np.stack([_combine(panel.scores, w, recorded) for w in weights])  # [S, N]
    known = ~np.isnan(z).all(axis=0)  # [N], read in some seed
    clusters = len(np.unique(panel.clusters[recorded][known]))
    if not clusters:
        return Reason(FEW_CLUSTERS, f"{no_interval(0)}: no answer could be read on both sides")
    estimate = 100 * float(np.nanmean(z[:, known], axis=0).mean())
    return Reason(FEW_CLUSTERS, f"{no_interval(clusters)}; the estimate alone is {estimate:+.1f} pp")


def _with_numbers(
    blank: Contrast, panel: Panel, weights: list[Weights], cells: list[CellKey], alpha: float
) -> Contrast:
    # items that these cells have records of, the same in each: a cell that lacks one has broken the contract
    recorded = ~np.isnan(panel.floor[cells[0]])
    z = np.stack([_combine(panel.scores, w, recorded) for w in weights])  # [S, N], NaN where a facet could not be read
    known = ~np.isnan(z).all(axis=0)  # of the recorded items, those that were read in some seed
    if blank.estimand != INTERACTION:
        blank = replace(blank, unread=_unread(panel, weights, recorded))
    if len(np.unique(panel.clusters[recorded][known])) < FEWEST_CLUSTERS:
        return replace(blank, reasons=(_estimate_alone(panel, weights, recorded),))
    # from the recorded items back to the places of the panel
    present = recorded.copy()
    present[recorded] = known
    clusters, z = panel.clusters[present], z[:, known]
    mean = np.nanmean(z, axis=0)
    z = np.where(np.isnan(z), mean, z)  # a seed whose answer could not be read stands for nothing of its own
    draws = panel.samples * len(weights)  # seeds are averaged as samples are
    effect = _effect_of(blank, panel, mean, clusters, draws, alpha)
    totals = []
    for other, own in _readings(panel, weights, recorded):
        effect = no_narrower(effect, _effect_of(blank, panel, other, own, draws, alpha))
        totals.append((_cluster_sums(panel, other, own),))
    recipe = None
    if _fewest_seeds(cells) >= SEEDS_NEEDED:
        recipe = no_narrower(recipe_effect(z, clusters, alpha=alpha), effect)
    moved = None if blank.estimand == INTERACTION else _moved(panel, weights, present)
    found = replace(
        blank,
        effect=effect,
        recipe=recipe,
        rates=None if blank.estimand == INTERACTION else _rates(panel, weights, present),
        unwanted=() if blank.estimand == INTERACTION else tuple(_unwanted(panel, weights, present)),
        seed_estimates=tuple(float(v) for v in z.mean(axis=1)),
        # what nobody could score counted against the candidate, then for it
        worst=_bound(panel.floor, panel.best, weights, recorded),
        best=_bound(panel.best, panel.floor, weights, recorded),
        sums=(_cluster_sums(panel, mean, clusters),),
        readings=tuple(totals),
        churn=moved.churn if moved else None,
        rerun=moved.rerun if moved else None,
    )
    return _with_seeds(found, panel, z, clusters, alpha) if len(weights) > 1 else found


def _readings(
    panel: Panel, weights: list[Weights], recorded: npt.NDArray[np.bool_]
) -> Iterator[tuple[Array, npt.NDArray[np.int64]]]:
    """Item means [N] and clusters [N] with what is not known read otherwise: what is claimed holds under each.

    What a judge was unsure of is read alike on both sides; what is unscored against the candidate, then for it.
    """
    ways = [(reading, reading) for reading in panel.readings]
    if panel.unscored_as:
        zero, one = panel.unscored_as
        ways += [(zero, one), (one, zero)]
    for plus, minus in ways:
        z = np.stack([_between(plus, minus, w, recorded) for w in weights])  # [S, N]
        known = ~np.isnan(z).all(axis=0)
        yield np.nanmean(z[:, known], axis=0), panel.clusters[recorded][known]


def _effect_of(
    c: Contrast, panel: Panel, mean: Array, clusters: npt.NDArray[np.int64], draws: int, alpha: float
) -> Effect:
    if c.estimand == INTERACTION:
        return _interaction_effect(mean, clusters, alpha)
    if c.looked is not None:
        return betting_effect(mean, clusters, alpha=alpha, tests=c.looked.tests, is_last=c.looked.is_last)
    return ess_tango(mean, clusters, samples=draws, alpha=alpha, graded=panel.graded)


def _with_seeds(c: Contrast, panel: Panel, z: Array, clusters: npt.NDArray[np.int64], alpha: float) -> Contrast:
    """The contrast with every seed of z [S, N] by itself, and what the items alone do to one seed's drift."""
    ordered, counts = by_cluster(z, clusters)
    noise = float(seed_noise(ordered, counts))
    if c.estimand == INTERACTION:
        return replace(c, seed_noise=noise)
    b = many_ess_tango(ordered, counts, samples=panel.samples, alpha=alpha, graded=panel.graded)
    bounds = zip(b.low, b.high, b.lower, b.upper, b.pvalue_drop, strict=True)
    return replace(
        c,
        seed_noise=noise,
        by_seed=tuple(
            SeedDrift(seed, estimate, *map(float, own))
            for seed, estimate, own in zip(c.seeds, c.seed_estimates, bounds, strict=True)
        ),
        seed_sums=tuple((_cluster_sums(panel, own, clusters),) for own in z),
    )


def _fewest_seeds(cells: list[CellKey]) -> int:
    """Training seeds of the arm with the fewest; the base model was not trained here and has none to vary."""
    seeds: dict[str, set[int]] = {}
    for cell in cells:
        seeds.setdefault(cell.arm, set()).add(cell.seed)
    return min((len(found) for arm, found in seeds.items() if arm != BASE_ARM), default=0)


def _cluster_sums(panel: Panel, z: Array, clusters: npt.NDArray[np.int64]) -> ClusterSums:
    codes, inverse = np.unique(clusters, return_inverse=True)
    names = tuple(panel.cluster_names[code] for code in codes)
    counts: Array = np.bincount(inverse).astype(np.float64)  # [C]
    sums: Array = np.bincount(inverse, weights=z).astype(np.float64)  # [C]
    return ClusterSums(panel.suite, 1.0, names, sums, counts)


def _rates(panel: Panel, weights: list[Weights], present: npt.NDArray[np.bool_]) -> Rates:
    """The mean score of both sides over the pairs that the drift is made of, so that they differ by just that drift.

    A policy compared with itself has both sides in one cell of weight 0.
    """
    candidate, reference = paired_scores(panel, weights, present)
    return Rates(float(reference.mean()), float(candidate.mean()))


def _unwanted(panel: Panel, weights: list[Weights], present: npt.NDArray[np.bool_]) -> Iterator[UnwantedEvents]:
    """By the scores, and by every reading of those that a judge was unsure of, or that nobody gave."""
    ways = [(scores, scores, present) for scores in (panel.scores, *panel.readings)]
    if panel.unscored_as:
        zero, one = panel.unscored_as
        # what could be read or was not scored, on some pair's both sides
        either = np.stack([np.sum([zero[cell] for cell in w], axis=0) for w in weights])  # [S, items of all]
        told: npt.NDArray[np.bool_] = np.any(~np.isnan(either), axis=0)
        ways += [(zero, one, told), (one, zero, told)]
    for own, other, items in ways:
        candidate, _ = paired_scores(replace(panel, scores=own), weights, items)
        _, reference = paired_scores(replace(panel, scores=other), weights, items)
        new, old = (1 - side.mean(axis=0) for side in (candidate, reference))  # each [N], mean over seeds
        _, clusters = np.unique(panel.clusters[items], return_inverse=True)
        yield UnwantedEvents(
            reference=np.bincount(clusters, weights=old).astype(np.float64),
            candidate=np.bincount(clusters, weights=new).astype(np.float64),
            before=float(np.maximum(old - new, 0).sum()),
            after=float(np.maximum(new - old, 0).sum()),
            counts=np.bincount(clusters).astype(np.float64),
        )


def _unread(panel: Panel, weights: list[Weights], recorded: npt.NDArray[np.bool_]) -> Rates:
    """What could not be read counts 0 in ``floor`` and 1 in ``best``: their difference is its share."""
    candidate, reference = (
        float(np.mean([(panel.best[cell] - panel.floor[cell])[recorded] for cell in side]))
        for side in two_sides(weights)
    )
    return Rates(reference, candidate)


def two_sides(weights: Sequence[Weights]) -> tuple[list[CellKey], list[CellKey]]:
    """Candidate's and reference's cell of every pair; a cell against itself has weight 0 and stands on both sides."""
    positive = [next(cell for cell, weight in w.items() if weight >= 0) for w in weights]
    negative = [next(cell for cell, weight in w.items() if weight <= 0) for w in weights]
    return positive, negative


def paired_scores(panel: Panel, weights: Sequence[Weights], present: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Scores [S, N] of candidate and reference by pair of seeds.

    A pair in which either side could not be read takes the item's mean over its other pairs on both sides, so that it
    stands for nothing of its own.
    """
    candidate, reference = (np.stack([panel.scores[cell][present] for cell in side]) for side in two_sides(weights))
    unread = np.isnan(candidate) | np.isnan(reference)
    if not unread.any():
        return candidate, reference
    known = (np.where(unread, np.nan, side) for side in (candidate, reference))
    candidate, reference = (np.where(unread, np.nanmean(side, axis=0), side) for side in known)
    return candidate, reference


def _moved(panel: Panel, weights: list[Weights], present: npt.NDArray[np.bool_]) -> Flips:
    candidate, reference = paired_scores(panel, weights, present)
    # draws that are not 0 or 1 cannot be told apart by their mean: item means are compared instead
    return flips(reference, candidate, samples=1 if panel.graded else panel.samples)


def _interaction_effect(mean: Array, clusters: npt.NDArray[np.int64], alpha: float) -> Effect:
    """CR3-t; where every item agrees there is no spread to go by, and a zero width would be a lie: ESS-Tango."""
    effect = cr3_effect(mean, clusters, alpha=alpha)
    return effect if effect.high > effect.low else ess_tango(mean, clusters, alpha=alpha, scale=2.0)


def _combine(table: Scores, weights: Weights, present: npt.NDArray[np.bool_]) -> Array:
    """Weighted cell scores [N]."""
    total = np.zeros(int(present.sum()))
    for cell, weight in weights.items():
        total += weight * table[cell][present]
    return total


def _between(plus: Scores, minus: Scores, weights: Weights, present: npt.NDArray[np.bool_]) -> Array:
    """Weighted cell scores [N], of ``plus`` where the weight is positive, else of ``minus``."""
    return _combine(plus, {cell: weight for cell, weight in weights.items() if weight > 0}, present) + _combine(
        minus, {cell: weight for cell, weight in weights.items() if weight <= 0}, present
    )


def _bound(plus: Scores, minus: Scores, weights: Sequence[Weights], present: npt.NDArray[np.bool_]) -> float:
    """The estimate with what is not known taken from ``plus`` where the weight is positive, else from ``minus``."""
    return float(np.mean([_between(plus, minus, w, present) for w in weights]))


def no_narrower(one: Effect, other: Effect) -> Effect:
    """The first effect, as uncertain as both together.

    A claim about a recipe is at least as uncertain as the one about its checkpoints, also without any spread; one about
    answers that a judge was unsure of holds with all of them counted as desired, and with none; one beside answers that
    nobody scored holds with all of those against the candidate, and for it.
    """
    return replace(
        one,
        low=min(one.low, other.low),
        high=max(one.high, other.high),
        lower=min(one.lower, other.lower),
        upper=max(one.upper, other.upper),
        pvalue=max(one.pvalue, other.pvalue),
        pvalue_drop=max(one.pvalue_drop, other.pvalue_drop),
    )


def broken_contract(panel: Panel, cells: Sequence[CellKey]) -> tuple[Reason, ...]:
    """Why these cells cannot be compared; empty when they can."""
    absent = [cell for cell in cells if cell not in panel.scores]
    if absent and not panel.scores and panel.suite.endswith(f".{UNSAFE}"):
        return (Reason("HARM", NO_HARM_GRADER),)
    if absent:
        named = "; ".join(f"{c.arm} seed {c.seed} under {c.policy}" for c in absent)
        return (Reason("CELL", f"not evaluated: {named}"),)
    holes = np.stack([np.isnan(panel.floor[cell]) for cell in cells])  # [cells, N]
    uneven = int((holes.any(axis=0) & ~holes.all(axis=0)).sum())
    if uneven:
        return (Reason("ITEMS", f"item sets differ: {uneven} of {len(panel.items)} items lack a record in some cell"),)
    return tuple(_unfit(panel, cells, ~holes[0]))


def _unfit(panel: Panel, cells: Sequence[CellKey], present: npt.NDArray[np.bool_]) -> Iterator[Reason]:
    clusters = len(np.unique(panel.clusters[present]))
    if clusters < FEWEST_CLUSTERS:
        yield Reason(FEW_CLUSTERS, no_interval(clusters))
    shares = [panel.unscored[cell] for cell in cells]
    if max(shares) > UNSCORED_LIMIT:
        apart = f"{max(shares):.1%} of the samples of a cell are unscored, {100 * (max(shares) - min(shares)):.1f} pp"
        yield Reason("MISSING", f"{apart} more than of another; the limit is 1 %")
    if not panel.uneven_samples.isdisjoint(cells):
        yield Reason("SAMPLES", f"some items have fewer than {panel.samples} samples")
    if panel.split_items:
        yield Reason("CLUSTER_IDS", f"{panel.split_items} items stand in more than one cluster")


# --- cells ------------------------------------------------------------------------------------------------------------


def cells_of(records: pd.DataFrame, tables: Panels, comparison: Comparison) -> Iterator[Cell]:
    """Rates, outcomes and cache use of every cell that has records, in the order of the comparison."""
    grouped = records.groupby(CELL, sort=False, observed=True)
    counts = records.groupby([*CELL, "outcome"], observed=True).size().unstack(fill_value=0)
    survival = [f"survival_{role}" for role in ROLES]
    means = grouped[["retention", "new_tokens", *BYTES, *survival]].mean()
    for name in OPTIONAL:  # a mean over some of the records would mislead
        if name in means:
            means.loc[grouped[name].count() < grouped.size(), name] = np.nan
    clusters = grouped["cluster_id"].nunique()
    unsure = grouped["unsure"].sum() if "unsure" in records else grouped.size() * 0
    order = sorted(means.index, key=lambda index: _position(comparison, index))
    peaks, live = shares_of_none(means, "kv_bytes_peak"), shares_of_none(means, LIVE)
    for index in order:
        arm, policy, suite, context = cast(tuple[str, str, str, int], index)
        panel = tables[suite, int(context)]
        keys = sorted(key for key in panel.scores if (key.arm, key.policy) == (arm, policy))
        row, seen = means.loc[index], counts.loc[index]
        rates = [float(np.nanmean(panel.scores[key])) for key in keys]
        # None for what nobody showed
        cache: dict[str, Any] = {n: None if math.isnan(row[n]) else float(row[n]) for n in ("retention", *BYTES)}
        yield Cell(
            arm=arm,
            policy=policy,
            suite=suite,
            context_tokens=int(context),
            seeds=tuple(key.seed for key in keys),
            n_items=int(np.sum(~np.isnan(panel.scores[keys[0]]))),
            n_clusters=int(clusters.loc[index]),
            n_samples=int(seen.sum()),
            rate=float(np.mean(rates)),
            rate_if_desired=float(np.mean([np.nanmean(panel.best[key]) for key in keys])),
            seed_rates=tuple(rates),
            outcomes={o.value: int(seen.get(o.value, 0)) for o in Outcome},
            **cache,
            kv_ratio=peaks[index],
            kv_live_ratio=live[index],
            survival={role: float(row[f"survival_{role}"]) for role in ROLES if pd.notna(row[f"survival_{role}"])},
            new_tokens=float(row["new_tokens"]),
            unsure=int(unsure.loc[index]),
        )


def shares_of_none(means: pd.DataFrame, column: str) -> dict[Any, float | None]:
    """Bytes of every cell per byte of its tokens uncompressed, over the same under ``none``; None where not known.

    ``means`` by ``CELL``. Slack and bookkeeping are on both sides, or on none. An arm that was not served uncompressed
    is held against those that were.
    """
    shares = (means[column] / means["kv_bytes_dense"]).where(means["kv_bytes_dense"] > 0)
    own, plain, found = {index: float(share) for index, share in shares.items()}, {}, {}
    for arm, policy, suite, context in means.index:
        none = (DENSE_POLICY, suite, context)
        if none not in plain:
            plain[none] = float(shares[[place[1:] == none for place in means.index]].mean())
        against, index = own.get((arm, *none), plain[none]), (arm, policy, suite, context)
        share = own[index] / against if against > 0 else math.nan
        found[index] = None if math.isnan(share) else share
    return found


def _position(comparison: Comparison, index: Any) -> tuple[int, int, int, int]:
    arm, policy, suite, context = index
    return comparison.suites.index(suite), int(context), comparison.policies.index(policy), comparison.arms.index(arm)
