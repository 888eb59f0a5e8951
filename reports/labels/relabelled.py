"""The judge held against people: its error rates in both arms, what they can do to a drift, and the drift without them.

Error rates come from a simple random sample of pairs: the concordant ones that were drawn, and the discordant ones
thinned to the same share, so that Clopper-Pearson applies (it takes pairs of one template for independent). The
corrected drift uses every label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from audit.core.errors import DataError
from reports.drift.results import ClusterSums, Contrast, Drift, People
from reports.labels.pairs import Indices, PairedAnswers, Place, cell_name, chosen, digest, pairs_of, places, texts_of
from reports.labels.sheet import text_hash
from reports.labels.stored import LABELS_FILE, REMEDY, CellLabels, load_labels
from reports.labels.stored import Labels as StoredLabels
from reports.records.load import RunData
from reports.stats.effect import Effect
from reports.stats.judges import adjudicated, differential_bias, judge_error

_Labels = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HumanLabels:
    """A cell's pairs [M] and the labels of the chosen ones, NaN where nobody looked."""

    pairs: PairedAnswers
    candidate: _Labels
    reference: _Labels
    seed: int


def with_labels(data: RunData, drift: Drift) -> Drift:
    """The drift with the run's human labels in their place; raises DataError for labels that do not fit its records.

    Labels of pairs with another reference arm than the drift's say nothing of it.
    """
    stored = load_labels(data.run)
    if stored is None:
        return drift
    if stored.records != digest(data.records):
        raise DataError(f"{LABELS_FILE} is about other records than those of {str(data.run)!r}; {REMEDY}")
    return drift if stored.reference != drift.comparison.reference else relabelled(data, drift, stored)


def relabelled(data: RunData, drift: Drift, stored: StoredLabels) -> Drift:
    """The drift with these labels, of its very records: where people labelled a cell, theirs is its effect."""
    found = {cell_name(h.pairs.contrast): h for h in human_labels(data, drift, stored)}
    contrasts = (
        _with_people(c, h, drift.alpha) if (h := found.get(cell_name(c))) is not None else c for c in drift.contrasts
    )
    return replace(drift, contrasts=tuple(contrasts))


def human_labels(data: RunData, drift: Drift, stored: StoredLabels) -> list[HumanLabels]:
    """The labels of every stored cell that has a number, by the text of the answers; raises DataError for a gap."""
    known = {cell_name(c): c for c in drift.contrasts if c.effect}
    cells = [cell for cell in stored.cells if cell.name in known]
    pairs = [pairs_of(data, drift.comparison, known[cell.name]) for cell in cells]
    picks = [chosen(own, cell.concordant, cell.seed) for own, cell in zip(pairs, cells, strict=True)]
    texts = {place: text_hash(text) for place, text in texts_of(data, list(zip(pairs, picks, strict=True))).items()}
    return [_looked_up(own, indices, cell, texts) for own, indices, cell in zip(pairs, picks, cells, strict=True)]


def _looked_up(pairs: PairedAnswers, indices: Indices, cell: CellLabels, texts: Mapping[Place, str]) -> HumanLabels:
    sides = [[texts[place] for place in column] for column in zip(*places(pairs, indices), strict=True)]
    shown = {text for side in sides for text in side}
    if shown != set(cell.labels):
        raise DataError(
            f"{LABELS_FILE} holds labels of other answers than the pairs of {cell.arm[:80]}, {cell.suite[:80]}; "
            f"{REMEDY}"
        )
    candidate, reference = (np.full(len(pairs.items), np.nan) for _ in range(2))
    for column, side in zip((candidate, reference), sides, strict=False):
        column[indices] = [cell.labels[text] for text in side]
    return HumanLabels(pairs, candidate, reference, cell.seed)


def _with_people(c: Contrast, h: HumanLabels, alpha: float) -> Contrast:
    """What unscored answers could change is about the judge's scores, so it goes with them."""
    return replace(
        c,
        effect=_corrected(h, alpha),
        sums=(_template_sums(h, c.sums[0]),),
        judged=c.effect,
        judged_sums=c.sums,
        worst=None,
        best=None,
        people=_people(h),
    )


def _template_sums(h: HumanLabels, by_judge: ClusterSums) -> ClusterSums:
    """Template totals on the human scale: a concordant pair that nobody saw counts as those of its template that were.

    As the mean of all that were where its template has none: a judge blind to a whole template says nothing of it.
    """
    places = {name: place for place, name in enumerate(by_judge.clusters)}
    codes = np.array([places[str(name)] for name in h.pairs.clusters])
    human, size = h.candidate - h.reference, len(places)
    seen = ~np.isnan(human) & ~h.pairs.discordant
    overall = float(human[seen].mean()) if seen.any() else 0.0
    counts = np.bincount(codes[seen], minlength=size)
    own = np.bincount(codes[seen], weights=human[seen], minlength=size) / np.maximum(counts, 1)
    expected = np.where(counts > 0, own, overall)[codes]
    means = np.bincount(codes, weights=np.where(h.pairs.discordant, human, expected), minlength=size)
    return replace(by_judge, sums=means / np.bincount(codes, minlength=size) * by_judge.counts)


def _corrected(h: HumanLabels, alpha: float) -> Effect:
    """The drift on the human scale; no bound of a sum of two parts lies beyond what a rate can lose or gain."""
    found = adjudicated(h.pairs.discordant, h.candidate - h.reference, h.pairs.clusters, alpha=alpha)
    low, high, lower, upper = np.clip((found.low, found.high, found.lower, found.upper), -1.0, 1.0)
    return replace(found, low=float(low), high=float(high), lower=float(lower), upper=float(upper))


def _people(h: HumanLabels) -> People:
    sample = random_sample(h, h.seed)
    errors = {
        side: judge_error(getattr(h.pairs, side)[sample], getattr(h, side)[sample].astype(np.int64))
        for side in ("reference", "candidate")
    }
    rate = float(h.reference[sample].mean()) if len(sample) else 0.5
    gap = differential_bias(errors["reference"], errors["candidate"], rate)
    return People(
        pairs=len(h.pairs.items),
        discordant=int(h.pairs.discordant.sum()),
        concordant=int((~np.isnan(h.candidate) & ~h.pairs.discordant).sum()),
        reference=errors["reference"],
        candidate=errors["candidate"],
        bias=gap.bound,
        bias_upper=gap.upper,
    )


def random_sample(h: HumanLabels, seed: int) -> Indices:
    """Indices of labelled pairs that are a simple random sample of all: the drawn ones, the discordant ones thinned."""
    labelled, apart = ~np.isnan(h.candidate), h.pairs.discordant
    drawn, alike = np.flatnonzero(labelled & ~apart), int((~apart).sum())
    share = len(drawn) / alike if alike else 1.0
    kept = np.random.default_rng([seed, len(apart), int(apart.sum())]).random(len(apart)) < share
    return np.sort(np.concatenate([drawn, np.flatnonzero(apart & kept)]))
