"""The drift of a run from its records: the rate of every cell and the difference of every arm. Nothing is decided here.

Each estimand (kind of difference) is a weighted sum over cells. It gives one number per item, averaged over samples and
seeds, whose mean is then tested as that of one sample in clusters:

    alike           candidate - reference, under the same policy
    deployed        candidate under its policy - uncompressed reference
    serving         a checkpoint under a policy - the same checkpoint uncompressed
    interaction     the candidate's "serving" - the reference's "serving"
    amplification   candidate uncompressed - reference under the policy that the candidate was trained under
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
from kvaudit.core.facets import ALIKE, DEPLOYED, INTERACTION, SERVING, UNSAFE, is_well_formed, suite_of
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.provenance import CHECKPOINT_FILES, INPUTS, MODEL, NOISE, table_of
from kvaudit.core.records import Outcome
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import LIVE_BYTES, NULLABLE, ROLES, CellKey, Panel, Panels
from kvaudit.reports.stats.betting import betting_effect
from kvaudit.reports.stats.clustered import cr3_effect
from kvaudit.reports.stats.effect import Array, Effect
from kvaudit.reports.stats.power import flips
from kvaudit.reports.stats.seeds import SEEDS_NEEDED, by_cluster, recipe_effect, seed_noise
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS
from kvaudit.reports.stats.tango import ess_tango, many_ess_tango
from kvaudit.reports.verdict.comparison import Comparison, run_reasons
from kvaudit.reports.verdict.contrast import (
    Cell,
    ClusterSums,
    Contrast,
    Drift,
    Rates,
    SeedDrift,
    UnwantedEvents,
    idle_cells,
    no_interval,
    reference_answers,
)
from kvaudit.reports.verdict.controls import canaries_of, canary_reasons, checked_by_canary, noisy_conditions
from kvaudit.reports.verdict.reasons import Reason, ReasonCode

Weights = dict[CellKey, float]
Scores = Mapping[CellKey, Array]
AMPLIFICATION = "amplification"
_ADAPTER_CONFIG = "adapter_config.json"
SeedPair = tuple[int, int]  # candidate seed, reference seed
NO_HARM_GRADER = (
    "no judge of harm graded these answers, so unsafe ones are unknown: ask one with kvaudit grade judge RUN --judge "
    "rubric-endpoint:asks=harm,..."
)
UNSCORED_LIMIT = 0.01  # share of samples, and largest difference between two cells
BYTES = ["kv_bytes_peak", "kv_bytes_dense", LIVE_BYTES]
CELL = ["arm", "policy", "suite", "context_tokens"]


class CellFilter(NamedTuple):
    """The cells in which the facets of both sides are compared: those whose estimand, policy and length are listed."""

    estimands: frozenset[str]
    policies: frozenset[str]
    contexts: frozenset[int]

    def accepts(self, estimand: str, policy: str, context: int) -> bool:
        """Return whether facets are compared in a cell of this estimand, policy and length."""
        return estimand in self.estimands and policy in self.policies and context in self.contexts


def drift_of(data: RunData, comparison: Comparison, alpha: float, facets: CellFilter | None = None) -> Drift:
    """Return the drift of a run's records, with one-sided bounds at level ``alpha``.

    ``facets`` limits the cells in which facets are compared, which saves most of the work; None compares them in all.
    """
    tables = data.panels
    cells = tuple(cells_of(data.records, tables, comparison))
    repeated, damaged = _repeated_records(data, comparison)
    canaries = canaries_of(data.records, repeated, comparison)
    stored_noise = table_of(data.provenance, NOISE)  # for a run whose repeated answers are gone, or were not judged
    return Drift(
        run=data.spec.name,
        comparison=comparison,
        alpha=alpha,
        cells=cells,
        contrasts=tuple(
            _with_stored_noise(checked_by_canary(c, comparison, canaries), stored_noise)
            for c in contrasts(comparison, tables, alpha, facets)
        ),
        reasons=(*run_reasons(data, comparison), *damaged, *canary_reasons(comparison, canaries)),
        n_records=len(data.records),
        weights=_checkpoints(data.records, comparison.reference),
        files=_checkpoint_files(data, comparison.reference, comparison.seeds),
        idle=frozenset(idle_cells(cells, data.provenance)),
        answers=reference_answers(data.records, comparison.reference),
    )


def _with_stored_noise(c: Contrast, noise: Mapping[str, str]) -> Contrast:
    """Return the contrast with the sentence that the run stored if an engine's noise hides the contrast's setting."""
    text = noise.get(c.policy)
    return c if text is None or c.noise is not None else replace(c, noise=Reason(ReasonCode.NOISE, str(text)))


def hidden_by_noise(data: RunData, comparison: Comparison) -> dict[str, str]:
    """Return by engine setting (condition) a sentence for each setting whose effect the engine's noise hides."""
    return noisy_conditions(canaries_of(data.records, _repeated_records(data, comparison)[0], comparison))


def _repeated_records(data: RunData, comparison: Comparison) -> tuple[Mapping[str, pd.DataFrame], tuple[Reason, ...]]:
    """Return the records of requests asked a second time, by the order of that asking (same or shuffled).

    If their files changed since then, return none, and the reason why the run is invalid: its noise is unknown.
    """
    if not comparison.references:
        return {}, ()
    try:
        return data.floor.records, ()
    except DataError as error:
        return {}, (Reason(ReasonCode.REF_HASH, str(error)),)


def _checkpoint_files(data: RunData, arm: str, seeds: Sequence[int]) -> dict[int, Mapping[str, str]]:
    """Return by seed the sha256 of an arm's files other than weights, by file name, as far as the run stored them."""
    stored = {seed: _stored_files(data, arm, seed) for seed in (*seeds, *([0] if arm == BASE_ARM else []))}
    return {seed: files for seed, files in stored.items() if files}


def _stored_files(data: RunData, arm: str, seed: int) -> Mapping[str, str]:
    """Return the sha256 of a checkpoint's files other than weights, by file name; empty if the run stored none."""
    if arm in data.spec.checkpoints:
        return table_of(table_of(data.provenance, CHECKPOINT_FILES), f"{arm}/{seed}")
    model = table_of(table_of(data.provenance, INPUTS), MODEL)
    if data.spec.train is None or (arm, seed) not in data.checkpoints:
        return model if arm == BASE_ARM else {}
    files = table_of(data.checkpoints[arm, seed], "files")
    if _ADAPTER_CONFIG in files:  # an adapter is served with the files of its base model
        return model
    return {name: sha256 for name, sha256 in files.items() if not name.endswith((".safetensors", ".jsonl"))}


def _checkpoints(records: pd.DataFrame, arm: str) -> dict[int, frozenset[str]]:
    rows = records.loc[records["arm"] == arm, ["train_seed", "checkpoint"]]
    by_seed = rows.groupby("train_seed", observed=True)["checkpoint"].unique()
    return {int(str(seed)): frozenset(weights) for seed, weights in by_seed.items()}


# --- what is contrasted with what -------------------------------------------------------------------------------------


def contrasts(
    comparison: Comparison, tables: Panels, alpha: float, facets: CellFilter | None = None
) -> Iterator[Contrast]:
    """Yield every measured difference of a run.

    A planned length without records gives differences without an effect, each with its reasons. ``facets`` limits the
    cells in which facets are compared; None compares them in all.
    """
    for metric in (*comparison.suites, *comparison.facets):
        cells = facets if metric in comparison.facets else None
        for context in comparison.lengths[metric]:
            panel = tables.get((metric, context)) or _empty_panel(metric, context)
            for estimand, arm, policy in contrast_names(comparison):
                if cells is None or cells.accepts(estimand, policy, context):
                    yield contrast(comparison, panel, estimand=estimand, arm=arm, policy=policy, alpha=alpha)


def contrast_names(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Yield (estimand, arm, policy) of every contrast of a run; a contrast is computed for every metric and length.

    The estimand is the kind of difference, such as "alike".
    """
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
    """Return pairs (candidate seed, reference seed): equal seeds, or each seed with the reference's only one.

    The base model and a pinned checkpoint are references with one seed.
    """
    seeds = list(comparison.seeds)
    if arm == comparison.reference:
        recorded = sorted({cell.seed for cell in panel.scores if cell.arm == arm})
        return [(seed, seed) for seed in recorded or seeds]
    reference = sorted({cell.seed for cell in panel.scores if cell.arm == comparison.reference})
    # a single seed that the arm has too is a reference that lacks the others: pair by number, so that the gap shows
    serves_all = len(reference) == 1 and not set(reference) & set(seeds)
    return [(seed, reference[0] if serves_all else seed) for seed in seeds]


def _empty_panel(suite: str, context: int) -> Panel:
    no_clusters = np.zeros(0, dtype=np.int64)
    return Panel(suite, context, (), no_clusters, (), {}, {}, {}, {}, 1, False, frozenset(), 0)


# --- estimands: weights over cells ------------------------------------------------------------------------------------


def _add(*terms: tuple[CellKey, float]) -> Weights:
    """Sum weights by cell, so that a cell minus itself has weight 0."""
    weights: Weights = {}
    for cell, weight in terms:
        weights[cell] = weights.get(cell, 0.0) + weight
    return weights


def weights_of(comparison: Comparison, estimand: str, arm: str, pair: SeedPair, policy: str) -> Weights:
    """Return the weight of each cell whose scores make up a difference (``estimand``) for one pair of seeds.

    Amplification is the effect of training under the policy, minus the effect of serving the reference under it:
    (candidate uncompressed - reference uncompressed) - (reference under the policy - reference uncompressed).
    Interaction is a difference in differences.
    """
    dense = comparison.uncompressed_of(policy)
    candidate, candidate_dense = CellKey(arm, pair[0], policy), CellKey(arm, pair[0], dense)
    reference, reference_dense = (CellKey(comparison.reference, pair[1], served) for served in (policy, dense))
    terms = {
        ALIKE: ((candidate, 1.0), (reference, -1.0)),
        DEPLOYED: ((candidate, 1.0), (reference_dense, -1.0)),
        SERVING: ((candidate, 1.0), (candidate_dense, -1.0)),
        INTERACTION: ((candidate, 1.0), (candidate_dense, -1.0), (reference, -1.0), (reference_dense, 1.0)),
        AMPLIFICATION: ((candidate_dense, 1.0), (reference, -1.0)),
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
) -> Contrast:
    """Return one measured difference (``estimand``); each item's difference is first averaged over the paired seeds."""
    pairs = seed_pairs(comparison, panel, arm)
    weights = [weights_of(comparison, estimand, arm, pair, policy) for pair in pairs]
    cells = sorted({cell for w in weights for cell in w})
    no_seed = Reason(ReasonCode.CELL, f"arm {arm} has no seed to pair")
    reasons = incomparable_reasons(panel, cells) if weights else (no_seed,)
    seeds = tuple(seed for seed, _ in pairs)
    blank = Contrast(estimand, arm, policy, panel.suite, panel.context_tokens, seeds=seeds, reasons=reasons)
    if [reason.code for reason in reasons] == [ReasonCode.FEW_CLUSTERS]:  # print the estimate alone
        return replace(blank, reasons=(_estimate_alone(panel, weights, ~np.isnan(panel.floor[cells[0]])),))
    if reasons:
        return blank
    look = comparison.looks.get(suite_of(panel.suite))
    if look is not None and is_well_formed(panel.suite):
        look = look.for_readable
    # seeds with equal weights are one training run, which is no evidence about others
    runs = 0 if any(map(comparison.alike, {cell.arm for cell in cells})) else _fewest_seeds(cells)
    return _with_numbers(replace(blank, look=look), panel, weights, cells, alpha, runs)


def _estimate_alone(panel: Panel, weights: list[Weights], recorded: npt.NDArray[np.bool_]) -> Reason:
    z = np.stack([_combine(panel.scores, w, recorded) for w in weights])  # [S, N]
    readable = ~np.isnan(z).all(axis=0)  # [N], read in some seed
    clusters = len(np.unique(panel.clusters[recorded][readable]))
    if not clusters:
        return Reason(ReasonCode.FEW_CLUSTERS, f"{no_interval(0)}: no answer could be read on both sides")
    estimate = 100 * float(np.nanmean(z[:, readable], axis=0).mean())
    return Reason(ReasonCode.FEW_CLUSTERS, f"{no_interval(clusters)}; the estimate alone is {estimate:+.1f} pp")


def _with_numbers(
    blank: Contrast, panel: Panel, weights: list[Weights], cells: list[CellKey], alpha: float, runs: int
) -> Contrast:
    """Return the contrast ``blank`` with its effect.

    If there are enough training ``runs``, it also gets the effect of the recipe.
    """
    # items with a record: the same in every cell, as ``incomparable_reasons`` checked
    recorded = ~np.isnan(panel.floor[cells[0]])
    z = np.stack([_combine(panel.scores, w, recorded) for w in weights])  # [S, N], NaN where a facet could not be read
    readable = ~np.isnan(z).all(axis=0)  # recorded items that could be read in some seed
    if blank.estimand != INTERACTION:  # which has four sides
        blank = replace(blank, unread=_unread(panel, weights, recorded))
    if len(np.unique(panel.clusters[recorded][readable])) < FEWEST_CLUSTERS:
        return replace(blank, reasons=(_estimate_alone(panel, weights, recorded),))
    present = recorded.copy()  # the readable items as a mask of the whole panel
    present[recorded] = readable
    clusters, z = panel.clusters[present], z[:, readable]
    mean = np.nanmean(z, axis=0)
    z = np.where(np.isnan(z), mean, z)  # a seed whose answer could not be read takes the mean of the others
    draws = panel.samples * len(weights)  # seeds are averaged as samples are
    effect = _effect_of(blank, panel, mean, clusters, draws, alpha)
    totals = []
    for other_mean, other_clusters in _readings(panel, weights, recorded):
        effect = widened_to(effect, _effect_of(blank, panel, other_mean, other_clusters, draws, alpha))
        totals.append((_cluster_sums(panel, other_mean, other_clusters),))
    recipe = None
    if runs >= SEEDS_NEEDED:
        recipe = widened_to(recipe_effect(z, clusters, alpha=alpha), effect)
    if blank.estimand != INTERACTION:
        candidate, reference = paired_scores(panel, weights, present)
        # the share of 1s among several draws follows from their mean only if each is 0 or 1
        answers = flips(reference, candidate, samples=1 if panel.graded else panel.samples)
        blank = replace(
            blank,
            # from the same pairs as the drift, so that the rates differ by the drift
            rates=Rates(float(reference.mean()), float(candidate.mean())),
            unwanted=tuple(_unwanted(panel, weights, present)),
            churn=answers.churn,
            rerun=answers.rerun,
        )
    c = replace(
        blank,
        effect=effect,
        recipe=recipe,
        seed_estimates=tuple(float(v) for v in z.mean(axis=1)),
        # unscored answers counted against the candidate, then for it
        worst=_bound(panel.floor, panel.best, weights, recorded),
        best=_bound(panel.best, panel.floor, weights, recorded),
        sums=(_cluster_sums(panel, mean, clusters),),
        readings=tuple(totals),
    )
    return _with_seeds(c, panel, z, clusters, alpha) if len(weights) > 1 else c


def _readings(
    panel: Panel, weights: list[Weights], recorded: npt.NDArray[np.bool_]
) -> Iterator[tuple[Array, npt.NDArray[np.int64]]]:
    """Yield the items' mean differences [N] and clusters [N], once for each other way to count uncertain answers.

    A claim has to hold under each way. Answers that a judge was unsure of count the same on both sides; unscored ones
    count against the candidate, then for it.
    """
    for plus, minus in (*zip(panel.readings, panel.readings, strict=True), *_unscored_readings(panel)):
        z = np.stack([_between(plus, minus, w, recorded) for w in weights])  # [S, N]
        readable = ~np.isnan(z).all(axis=0)
        yield np.nanmean(z[:, readable], axis=0), panel.clusters[recorded][readable]


def _unscored_readings(panel: Panel) -> list[tuple[Scores, Scores]]:
    """Return the scores of candidate and reference with unscored answers counted against the candidate, then for it."""
    if not panel.unscored_as:
        return []
    zero, one = panel.unscored_as
    return [(zero, one), (one, zero)]


def _effect_of(
    c: Contrast, panel: Panel, mean: Array, clusters: npt.NDArray[np.int64], draws: int, alpha: float
) -> Effect:
    if c.estimand == INTERACTION:
        effect = cr3_effect(mean, clusters, alpha=alpha)
        # where all items agree, CR3 has an interval of width zero
        return effect if effect.high > effect.low else ess_tango(mean, clusters, alpha=alpha, scale=2.0)
    if c.look is not None:
        return betting_effect(mean, clusters, alpha=alpha, tests=c.look.tests, is_last=c.look.is_last)
    return ess_tango(mean, clusters, samples=draws, alpha=alpha, graded=panel.graded)


def _with_seeds(c: Contrast, panel: Panel, z: Array, clusters: npt.NDArray[np.int64], alpha: float) -> Contrast:
    """Return the contrast with the drift of each seed, from differences z [S, N], and the seed noise.

    The seed noise is the part of the variance of one seed's drift that is due to its items.
    """
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
            SeedDrift(seed, estimate, *map(float, seed_bounds))
            for seed, estimate, seed_bounds in zip(c.seeds, c.seed_estimates, bounds, strict=True)
        ),
        seed_sums=tuple((_cluster_sums(panel, seed_items, clusters),) for seed_items in z),
    )


def _fewest_seeds(cells: list[CellKey]) -> int:
    """Return the number of training seeds of the arm with the fewest in these cells; the base model is left out."""
    seeds: dict[str, set[int]] = {}
    for cell in cells:
        seeds.setdefault(cell.arm, set()).add(cell.seed)
    return min((len(arm_seeds) for arm, arm_seeds in seeds.items() if arm != BASE_ARM), default=0)


def _cluster_sums(panel: Panel, z: Array, clusters: npt.NDArray[np.int64]) -> ClusterSums:
    codes, inverse = np.unique(clusters, return_inverse=True)
    names = tuple(panel.cluster_names[code] for code in codes)
    counts: Array = np.bincount(inverse).astype(np.float64)  # [C]
    sums: Array = np.bincount(inverse, weights=z).astype(np.float64)  # [C]
    return ClusterSums(panel.suite, 1.0, names, sums, counts)


def _unwanted(panel: Panel, weights: list[Weights], present: npt.NDArray[np.bool_]) -> Iterator[UnwantedEvents]:
    """Yield how often the unwanted event happened: as scored, then for every other way to count uncertain answers."""
    readings = [(scores, scores, present) for scores in (panel.scores, *panel.readings)]
    for plus, minus in _unscored_readings(panel):
        # items whose two sides both have a record in some pair of seeds
        totals = np.stack([np.sum([plus[cell] for cell in w], axis=0) for w in weights])  # [S, items of the panel]
        readings.append((plus, minus, np.any(~np.isnan(totals), axis=0)))
    for candidate_scores, reference_scores, items in readings:
        candidate, _ = paired_scores(replace(panel, scores=candidate_scores), weights, items)
        _, reference = paired_scores(replace(panel, scores=reference_scores), weights, items)
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
    """Return both sides' shares of unreadable answers: mean(best - floor), as best counts them as 1 and floor as 0."""
    candidate, reference = (
        float(np.mean([(panel.best[cell] - panel.floor[cell])[recorded] for cell in side]))
        for side in two_sides(weights)
    )
    return Rates(reference, candidate)


def two_sides(weights: Sequence[Weights]) -> tuple[list[CellKey], list[CellKey]]:
    """Return two lists with a cell per pair of seeds: the candidate's and the reference's cells.

    A cell that is compared with itself is on both sides.
    """
    positive = [next(cell for cell, weight in w.items() if weight >= 0) for w in weights]
    negative = [next(cell for cell, weight in w.items() if weight <= 0) for w in weights]
    return positive, negative


def paired_scores(panel: Panel, weights: Sequence[Weights], present: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return the scores of candidate and reference, two arrays [S, N]: a row per pair of seeds, a column per item.

    Where one side of a pair could not be read, both sides take the item's mean over its other pairs.
    """
    candidate, reference = (np.stack([panel.scores[cell][present] for cell in side]) for side in two_sides(weights))
    unread = np.isnan(candidate) | np.isnan(reference)
    if not unread.any():
        return candidate, reference
    readable = (np.where(unread, np.nan, side) for side in (candidate, reference))
    candidate, reference = (np.where(unread, np.nanmean(side, axis=0), side) for side in readable)
    return candidate, reference


def _combine(table: Scores, weights: Weights, present: npt.NDArray[np.bool_]) -> Array:
    """Return, for each of the N ``present`` items, the weighted sum of its scores in the cells of ``weights``.

    ``table`` holds the scores by cell (checkpoint and policy).
    """
    total = np.zeros(int(present.sum()))
    for cell, weight in weights.items():
        total += weight * table[cell][present]
    return total


def _between(plus: Scores, minus: Scores, weights: Weights, present: npt.NDArray[np.bool_]) -> Array:
    """Return the sums [N] of ``_combine``, with scores from ``plus`` for positive weights, else from ``minus``."""
    return _combine(plus, {cell: weight for cell, weight in weights.items() if weight > 0}, present) + _combine(
        minus, {cell: weight for cell, weight in weights.items() if weight <= 0}, present
    )


def _bound(plus: Scores, minus: Scores, weights: Sequence[Weights], present: npt.NDArray[np.bool_]) -> float:
    """Return a bound of the mean difference over all pairs of seeds, from two tables of scores.

    Cells of positive weight take their scores from ``plus``, all others from ``minus``: with the lowest scores in
    ``plus`` and the highest in ``minus`` this is the lower bound.
    """
    return float(np.mean([_between(plus, minus, w, present) for w in weights]))


def widened_to(effect: Effect, other: Effect) -> Effect:
    """Return the first effect with its bounds and p-values moved so that they cover those of the second.

    A claim about a recipe is at least as uncertain as the claim about its checkpoints. A claim about unsure or unscored
    answers has to hold under every way to count them.
    """
    return replace(
        effect,
        low=min(effect.low, other.low),
        high=max(effect.high, other.high),
        lower=min(effect.lower, other.lower),
        upper=max(effect.upper, other.upper),
        pvalue=max(effect.pvalue, other.pvalue),
        pvalue_drop=max(effect.pvalue_drop, other.pvalue_drop),
    )


def incomparable_reasons(panel: Panel, cells: Sequence[CellKey]) -> tuple[Reason, ...]:
    """Return the reasons why the scores of these checkpoints and policies cannot be compared; empty if they can."""
    absent = [cell for cell in cells if cell not in panel.scores]
    if absent and not panel.scores and panel.suite.endswith(f".{UNSAFE}"):
        return (Reason(ReasonCode.HARM, NO_HARM_GRADER),)
    if absent:
        absent_names = "; ".join(f"{c.arm} seed {c.seed} under {c.policy}" for c in absent)
        return (Reason(ReasonCode.CELL, f"not evaluated: {absent_names}"),)
    holes = np.stack([np.isnan(panel.floor[cell]) for cell in cells])  # [cells, N]
    lacking = int((holes.any(axis=0) & ~holes.all(axis=0)).sum())
    if lacking:
        text = f"item sets differ: {lacking} of {len(panel.items)} items lack a record in some cell"
        return (Reason(ReasonCode.ITEMS, text),)
    return tuple(_data_breaches(panel, cells, ~holes[0]))


def _data_breaches(panel: Panel, cells: Sequence[CellKey], present: npt.NDArray[np.bool_]) -> Iterator[Reason]:
    clusters = len(np.unique(panel.clusters[present]))
    if clusters < FEWEST_CLUSTERS:
        yield Reason(ReasonCode.FEW_CLUSTERS, no_interval(clusters))
    shares = [panel.unscored[cell] for cell in cells]
    if max(shares) > UNSCORED_LIMIT:
        text = f"{max(shares):.1%} of the samples of a cell are unscored, {100 * (max(shares) - min(shares)):.1f} pp"
        yield Reason(ReasonCode.MISSING, f"{text} more than of another; the limit is 1 %")
    if not panel.uneven_samples.isdisjoint(cells):
        yield Reason(ReasonCode.SAMPLES, f"some items have fewer than {panel.samples} samples")
    if panel.split_items:
        yield Reason(ReasonCode.CLUSTER_IDS, f"{panel.split_items} items are in more than one cluster")


# --- cells ------------------------------------------------------------------------------------------------------------


def cells_of(records: pd.DataFrame, tables: Panels, comparison: Comparison) -> Iterator[Cell]:
    """Yield rates, outcomes and cache use of every cell that has records, in the order of the comparison."""
    grouped = records.groupby(CELL, sort=False, observed=True)
    counts = records.groupby([*CELL, "outcome"], observed=True).size().unstack(fill_value=0)
    survival = [f"survival_{role}" for role in ROLES]
    means = grouped[["retention", "new_tokens", *BYTES, *survival]].mean()
    for name in NULLABLE:  # a mean over only some of the records would mislead
        if name in means:
            means.loc[grouped[name].count() < grouped.size(), name] = np.nan
    clusters = grouped["cluster_id"].nunique()
    unsure = grouped["unsure"].sum() if "unsure" in records else grouped.size() * 0
    order = sorted(means.index, key=lambda index: _position(comparison, index))
    peaks, live = shares_of_none(means, "kv_bytes_peak"), shares_of_none(means, LIVE_BYTES)
    for index in order:
        arm, policy, suite, context = cast(tuple[str, str, str, int], index)
        panel = tables[suite, int(context)]
        keys = sorted(key for key in panel.scores if (key.arm, key.policy) == (arm, policy))
        row, outcomes = means.loc[index], counts.loc[index]
        rates = [float(np.nanmean(panel.scores[key])) for key in keys]
        # None where an engine does not show its cache
        cache: dict[str, Any] = {n: None if math.isnan(row[n]) else float(row[n]) for n in ("retention", *BYTES)}
        yield Cell(
            arm=arm,
            policy=policy,
            suite=suite,
            context_tokens=int(context),
            seeds=tuple(key.seed for key in keys),
            n_items=int(np.sum(~np.isnan(panel.scores[keys[0]]))),
            n_clusters=int(clusters.loc[index]),
            n_samples=int(outcomes.sum()),
            rate=float(np.mean(rates)),
            rate_if_desired=float(np.mean([np.nanmean(panel.best[key]) for key in keys])),
            seed_rates=tuple(rates),
            outcomes={o.value: int(outcomes.get(o.value, 0)) for o in Outcome},
            **cache,
            kv_ratio=peaks[index],
            kv_live_ratio=live[index],
            survival={role: float(row[f"survival_{role}"]) for role in ROLES if pd.notna(row[f"survival_{role}"])},
            new_tokens=float(row["new_tokens"]),
            unsure=int(unsure.loc[index]),
        )


def shares_of_none(means: pd.DataFrame, column: str) -> dict[Any, float | None]:
    """Return the size of each cell's cache relative to policy ``none``, from the bytes in ``column``; None if unknown.

    Two cells may have different numbers of tokens. So the bytes of each are first divided by the bytes that its own
    tokens would have uncompressed. ``means`` has a row per cell, indexed by ``CELL``. An arm that was not served under
    ``none`` is compared with the mean of those that were.
    """
    shares = (means[column] / means["kv_bytes_dense"]).where(means["kv_bytes_dense"] > 0)
    by_cell, dense_means, relative = {index: float(share) for index, share in shares.items()}, {}, {}
    for arm, policy, suite, context in means.index:
        dense = (DENSE_POLICY, suite, context)
        if dense not in dense_means:
            dense_means[dense] = float(shares[[cell[1:] == dense for cell in means.index]].mean())
        baseline, index = by_cell.get((arm, *dense), dense_means[dense]), (arm, policy, suite, context)
        share = by_cell[index] / baseline if baseline > 0 else math.nan
        relative[index] = None if math.isnan(share) else share
    return relative


def _position(comparison: Comparison, index: Any) -> tuple[int, int, int, int]:
    arm, policy, suite, context = index
    return comparison.suites.index(suite), int(context), comparison.policies.index(policy), comparison.arms.index(arm)
