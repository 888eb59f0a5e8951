"""The judge held against people: its error rates in both arms, what they can do to a drift, and the drift without them.

Error rates come from a simple random sample of pairs: the concordant ones that were drawn, and the discordant ones
thinned to the same share, so that Clopper-Pearson applies (it takes pairs of one template for independent). The
corrected drift uses every label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from audit.errors import DataError
from reports.adjudication import Indices, PairedAnswers
from reports.gate import Status, Verdict, decide_cell, worst
from reports.judge_panel import Adjudication, Arm, Bounds, JudgedCell, Rate
from reports.sheet_key import KeyCell
from reports.stats.adjudication import adjudicated
from reports.stats.binomial import Proportion
from reports.stats.effect import Effect
from reports.stats.holm import holm
from reports.stats.judge_error import JudgeError, differential_bias, judge_error

Labels = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HumanLabels:
    """A cell's pairs [M] and the labels of the chosen ones, NaN where nobody looked."""

    pairs: PairedAnswers
    candidate: Labels
    reference: Labels


def human_labels(pairs: PairedAnswers, cell: KeyCell, labels: Mapping[str, int]) -> HumanLabels:
    """Labels of a cell's pairs, matched by item, sample and seeds; raises DataError where the key fits no pair."""
    where = {
        (str(item), int(sample), int(own), int(other)): i
        for i, (item, sample, own, other) in enumerate(zip(pairs.items, pairs.samples, *pairs.seeds, strict=True))
    }
    candidate, reference = (np.full(len(pairs.items), np.nan) for _ in range(2))
    for pair in cell.pairs:
        index = where.get((pair.item, pair.sample, pair.candidate_seed, pair.reference_seed))
        if index is None:
            raise DataError(f"the sheet's key names item {pair.item[:80]!r}, which is in no pair of {cell.suite}")
        candidate[index], reference[index] = labels[pair.candidate_row], labels[pair.reference_row]
    unseen = int((pairs.discordant & np.isnan(candidate)).sum())
    if unseen:
        raise DataError(f"the sheet's key leaves out {unseen} discordant pairs of {cell.suite}; write another sheet")
    return HumanLabels(pairs, candidate, reference)


def adjudicate(
    verdict: Verdict, found: Sequence[HumanLabels], *, alpha: float, seed: int, records: str
) -> Adjudication:
    """The verdict with human labels in the adjudicated cells; FAIL is adjusted over all gated cells (Holm)."""
    effects = {id(h.pairs.decision): _corrected(h, alpha) for h in found}
    gated = [d for d in verdict.decisions if d.gated and d.effect]
    pvalues = [effects[id(d)].pvalue_drop if id(d) in effects else d.effect.pvalue_drop for d in gated if d.effect]
    adjusted = {id(d): p for d, p in zip(gated, holm(pvalues), strict=True)}
    cells = tuple(_cell(h, effects[id(h.pairs.decision)], adjusted[id(h.pairs.decision)], seed) for h in found)
    done = {id(h.pairs.decision): cell.status for h, cell in zip(found, cells, strict=True)}
    statuses = [done.get(id(d), d.status) for d in verdict.decisions if d.gated]
    return Adjudication(
        records=records,
        labels=sum(int((~np.isnan(h.candidate)).sum()) for h in found),
        seed=seed,
        cells=cells,
        judged=verdict.status,
        status=worst([Status.INVALID, *statuses] if verdict.reasons else statuses),
    )


def _corrected(h: HumanLabels, alpha: float) -> Effect:
    return adjudicated(h.pairs.discordant, h.candidate - h.reference, h.pairs.clusters, alpha=alpha)


def _cell(h: HumanLabels, effect: Effect, pvalue: float, seed: int) -> JudgedCell:
    d = h.pairs.decision
    assert d.effect is not None
    assert d.margin is not None
    sample = random_sample(h, seed)
    errors = {
        side: judge_error(getattr(h.pairs, side)[sample], getattr(h, side)[sample].astype(np.int64))
        for side in ("reference", "candidate")
    }
    rate = float(h.reference[sample].mean()) if len(sample) else 0.5
    gap = differential_bias(errors["reference"], errors["candidate"], rate)
    status, reasons = decide_cell(effect, d.margin, pvalue)
    if d.at_floor and status is not Status.FAIL:
        status, reasons = Status.INCONCLUSIVE, d.reasons
    guard = gap.upper <= d.margin / 2
    return JudgedCell(
        estimand=d.estimand,
        arm=d.arm,
        policy=d.policy,
        suite=d.suite,
        context_tokens=d.context_tokens,
        margin=d.margin,
        pairs=len(h.pairs.items),
        discordant=int(h.pairs.discordant.sum()),
        concordant=int((~np.isnan(h.candidate) & ~h.pairs.discordant).sum()),
        reference=_arm(errors["reference"]),
        candidate=_arm(errors["candidate"]),
        bias=gap.bound,
        bias_upper=gap.upper,
        guard=guard,
        raw=_bounds(d.effect),
        corrected=_bounds(effect),
        judged=d.status,
        status=status,
        reasons=reasons,
    )


def random_sample(h: HumanLabels, seed: int) -> Indices:
    """Indices of labelled pairs that are a simple random sample of all: the drawn ones, the discordant ones thinned."""
    labelled, apart = ~np.isnan(h.candidate), h.pairs.discordant
    drawn, alike = np.flatnonzero(labelled & ~apart), int((~apart).sum())
    share = len(drawn) / alike if alike else 1.0
    kept = np.random.default_rng([seed, len(apart), int(apart.sum())]).random(len(apart)) < share
    return np.sort(np.concatenate([drawn, np.flatnonzero(apart & kept)]))


def _bounds(effect: Effect) -> Bounds:
    return Bounds(effect.estimate, effect.low, effect.high, effect.lower, effect.upper)


def _arm(error: JudgeError) -> Arm:
    return Arm(_rate(error.sensitivity), _rate(error.specificity))


def _rate(p: Proportion) -> Rate:
    return Rate(p.estimate, p.low, p.high, p.successes, p.trials)
