"""The answers that people should label: every pair of a gated cell that the judge graded differently, and some others.

The others are drawn in turn over the templates, because a judge may be blind to whole templates. A pair is one sample
of one item, answered by the candidate and by the reference of a cell (serving, alike or deployed; the other estimands
are made of these). An answer that several pairs share is labelled once.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.facets import FORMER_CONTRASTS
from kvaudit.core.policy_names import match_policies
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import CellKey, RecordPlace
from kvaudit.reports.stats.adjudication import round_robin
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.drift import seed_pairs, two_sides, weights_of
from kvaudit.reports.verdict.label_sheet import ShownAnswer, shown_answer

ADJUDICATED = ("alike", "deployed", "serving")  # one candidate cell against one reference cell
_SELECTORS = ("estimand", "arm", "policy", "suite", "context")
FEWEST_CONCORDANT = 100  # by default: fewer pairs are too few to estimate a judge's error rates
DESIRED = 0.5  # lowest score that counts as the judge's label 1
DIGESTED = ("suite", "context_tokens", "arm", "train_seed", "policy", "item_id", "sample_index", "cluster_id", "score")
_MATCH = ["item_id", "sample_index"]
_Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PairedAnswers:
    """All pairs [M] of a cell over its paired seeds: labels of the judge, clusters, files and lines of the answers."""

    contrast: Contrast
    items: npt.NDArray[np.object_]
    samples: _Labels
    seeds: tuple[_Labels, _Labels]  # candidate, reference
    clusters: npt.NDArray[np.object_]
    candidate: _Labels
    reference: _Labels
    candidate_places: tuple[RecordPlace, ...]
    reference_places: tuple[RecordPlace, ...]

    @property
    def discordant(self) -> npt.NDArray[np.bool_]:
        """Whether the judge's labels differ [M]."""
        return np.not_equal(self.candidate, self.reference)


def paired_answers(
    data: RunData, comparison: Comparison, gated: Sequence[Contrast], select: Mapping[str, str]
) -> list[PairedAnswers]:
    """Return the pairs of every gated contrast that the selectors select; raises SpecError if there is none."""
    contrasts = [c for c in gated if c.effect and c.estimand in ADJUDICATED]
    if not contrasts:
        raise SpecError(
            f"no gated cell with a number can be adjudicated; gate one of the estimands {', '.join(ADJUDICATED)}"
        )
    for key, value in select.items():
        contrasts = _select(contrasts, key, value)
    return [pairs_of(data, comparison, c) for c in contrasts]


def pairs_of(data: RunData, comparison: Comparison, c: Contrast) -> PairedAnswers:
    """Return the pairs of one contrast that has a number."""
    tables = []
    for seeds in seed_pairs(comparison, data.panels[c.suite, c.context_tokens], c.arm):
        weights = weights_of(comparison, c.estimand, c.arm, seeds, c.policy)
        (candidate,), (reference,) = two_sides([weights])
        tables.append(_join_sides(data.records, c, candidate, reference))
    return _answers(c, pd.concat(tables, ignore_index=True))


def _select(contrasts: list[Contrast], key: str, value: str) -> list[Contrast]:
    if key not in _SELECTORS:
        raise UnknownName("selector", key, _SELECTORS)
    field = "context_tokens" if key == "context" else key
    values = sorted({str(getattr(c, field)) for c in contrasts})
    selected = match_policies([value], values)[0] if key == "policy" else FORMER_CONTRASTS.get(value, value)
    if selected not in values:
        raise UnknownName(f"{key} among the gated cells", value, values)
    return [c for c in contrasts if str(getattr(c, field)) == selected]


def _join_sides(records: pd.DataFrame, c: Contrast, candidate: CellKey, reference: CellKey) -> pd.DataFrame:
    """Return the rows of both cells side by side; ``broken_contract`` has checked that they pair."""
    rows = records[(records["suite"] == c.suite) & (records["context_tokens"] == c.context_tokens)]
    sides = []
    for cell in (candidate, reference):
        is_side = (rows["arm"] == cell.arm) & (rows["train_seed"] == cell.seed) & (rows["policy"] == cell.policy)
        sides.append(rows.loc[is_side, [*_MATCH, "cluster_id", "score", "train_seed", "file", "line"]])
    return sides[0].merge(sides[1], on=_MATCH, suffixes=("", "_reference"), how="inner", validate="one_to_one")


def _answers(c: Contrast, table: pd.DataFrame) -> PairedAnswers:
    # ``pairs_to_label`` draws by position, so the order must not depend on how files were read
    table = table.assign(item_id=table["item_id"].astype(str)).sort_values([*_MATCH, "train_seed"], kind="stable")
    labels = [(table[name].fillna(0.0).to_numpy() >= DESIRED).astype(np.int64) for name in ("score", "score_reference")]
    answer_places = [
        tuple((str(file), int(line)) for file, line in zip(table[f"file{end}"], table[f"line{end}"], strict=True))
        for end in ("", "_reference")
    ]
    return PairedAnswers(
        contrast=c,
        items=table["item_id"].to_numpy(dtype=object),
        samples=table["sample_index"].to_numpy(dtype=np.int64),
        seeds=(table["train_seed"].to_numpy(np.int64), table["train_seed_reference"].to_numpy(np.int64)),
        clusters=table["cluster_id"].astype(str).to_numpy(dtype=object),
        candidate=labels[0],
        reference=labels[1],
        candidate_places=answer_places[0],
        reference_places=answer_places[1],
    )


def pairs_to_label(pairs: PairedAnswers, concordant: int, seed: int, *, spread: bool = True) -> Indices:
    """Return the indices of the pairs to label, ascending: every discordant one, and ``concordant`` random others.

    Without ``spread`` the others are a simple random sample, as in older label files.
    """
    name = " ".join(map(str, pairs.contrast.place))
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])  # hash() differs between processes
    if spread:
        drawn = np.flatnonzero(round_robin(generator, ~pairs.discordant, pairs.clusters, concordant))
    else:
        alike = np.flatnonzero(~pairs.discordant)
        drawn = generator.choice(alike, size=min(concordant, len(alike)), replace=False)
    return np.sort(np.concatenate([np.flatnonzero(pairs.discordant), drawn]))


def concordant_templates(answers: Sequence[PairedAnswers]) -> int:
    """Return the largest number of templates with concordant pairs in a cell: it cannot pass with fewer labelled."""
    return max(len(set(pairs.clusters[~pairs.discordant])) for pairs in answers)


def default_concordant(answers: Sequence[PairedAnswers]) -> int:
    """Return how many concordant pairs of each cell to label: two per template, beyond which power hardly grows."""
    return max(FEWEST_CONCORDANT, 2 * concordant_templates(answers))


def records_digest(records: pd.DataFrame) -> str:
    """Return a hash of the scored records in any order, so that labels are not applied to other records."""
    hashes = pd.util.hash_pandas_object(records[list(DIGESTED)], index=False).to_numpy()
    return hashlib.sha256(np.sort(hashes).tobytes()).hexdigest()


def shown_answers(data: RunData, answers: Sequence[tuple[PairedAnswers, Indices]]) -> dict[RecordPlace, ShownAnswer]:
    """Return what a person is shown of every answer of the chosen pairs, read from the run's records."""
    suites = {
        place: pairs.contrast.suite
        for pairs, indices in answers
        for pair in answer_places(pairs, indices)
        for place in pair
    }
    return {place: shown_answer(suites[place], text) for place, text in data.transcripts(suites).items()}


def answer_places(pairs: PairedAnswers, indices: Indices) -> Iterator[tuple[RecordPlace, RecordPlace]]:
    """Yield file and line of the candidate's and the reference's answer of each chosen pair."""
    for i in indices:
        yield pairs.candidate_places[i], pairs.reference_places[i]
