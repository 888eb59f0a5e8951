"""Whether a serving setting has any effect: an engine that ignores a flag shows no drift, which must not pass.

Where every answer under an engine's condition equals the one under its reference, and all log-probs are equal to the
bit, the setting changed nothing and the cell is INVALID. The same texts with other log-probs count as an effect.

An engine that is not deterministic changes answers whatever its setting. If the setting were ignored, its answers
would differ from the reference's as much as the reference's differ when asked again. So where the noise floor (A/A)
shows such differences, the setting counts as applied only if it moves the same answers further by a paired test: more
texts, or log-probs further apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import pandas as pd

from kvaudit.core.facets import suite_of
from kvaudit.reports.records.blocks import Array
from kvaudit.reports.records.floor import SAME_ORDER
from kvaudit.reports.records.rows import ANSWER_HASH, LOGPROB
from kvaudit.reports.stats.slope import signed_rank_above
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.reasons import Reason, ReasonCode

CANARY = "CANARY"
_LEVEL = 0.05 / 2  # of each of two tests: by texts, and by log-probs
_UNIT = ["arm", "suite", "context_tokens"]
_ANSWER = [*_UNIT, "train_seed", "item_id", "sample_index"]
_WITHOUT_COMPRESSED_REFERENCE = ("deployed", "serving")  # estimands


class Moves(NamedTuple):
    """How far apart two sets of answers to the same items are."""

    texts: float  # share of answers that have another text
    logprobs: float | None  # root mean square of the difference of log-probs, in nats; None without log-probs


@dataclass(frozen=True)
class BesideFloor:
    """The effect of a setting compared with the engine's noise, on the answers that were asked again."""

    answers: int
    by_setting: Moves
    by_itself: Moves  # of the reference, asked again
    is_exceeded: bool  # whether the setting moves answers further than noise


class Canary(NamedTuple):
    """The answers of one arm in one cell under a condition, compared with those under its reference."""

    answers: int
    logprobs: int  # pairs of log-probs
    moved: int  # answers with another text, or another log-prob
    noise: BesideFloor | None  # None where nothing was asked again, or all answers came out the same

    @property
    def acts(self) -> bool:
        """Whether the setting changed more than the engine's noise does."""
        return bool(self.moved) and (self.noise is None or self.noise.is_exceeded)


@dataclass(frozen=True)
class Canaries:
    """The canary of every engine's condition; both tables are empty for a run without engines."""

    places: Mapping[tuple[str, str, str, int], Canary]  # by arm, condition, suite and length
    conditions: Mapping[str, Canary]  # by condition, over all of its places


def canaries_of(records: pd.DataFrame, again: Mapping[str, pd.DataFrame], comparison: Comparison) -> Canaries:
    """Return the canary of every condition; ``again`` holds the records of the noise floor by how they were asked."""
    places, conditions = dict[tuple[str, str, str, int], Canary](), dict[str, Canary]()
    for condition, reference in comparison.references.items():
        if condition == reference:
            continue
        pairs = _moves(_under(condition, records), _under(reference, records))
        itself = (
            _moves(_under(reference, records), _under(reference, again[SAME_ORDER]))
            if SAME_ORDER in again
            else pairs[:0]
        )
        if len(pairs):
            conditions[condition] = _canary(pairs, itself)
        for index, part in pairs.groupby(_UNIT, observed=True):
            arm, suite, context = cast(tuple[str, str, int], index)
            places[str(arm), condition, str(suite), int(context)] = _canary(part, itself)
    return Canaries(places, conditions)


def _under(policy: str, records: pd.DataFrame) -> pd.DataFrame:
    return records.loc[records["policy"] == policy, [*_ANSWER, ANSWER_HASH, LOGPROB]]


def _moves(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Return for every answer whether the text differs, and by how much the log-prob does: NaN where one is missing."""
    pairs = one.merge(other, on=_ANSWER, suffixes=("", "_other"))
    moves = pairs[_ANSWER].copy()
    moves["text"] = (pairs[ANSWER_HASH] != pairs[f"{ANSWER_HASH}_other"]).astype(np.float64)
    moves["logprob"] = (pairs[LOGPROB] - pairs[f"{LOGPROB}_other"]).abs().astype(np.float64)
    return moves


def _canary(pairs: pd.DataFrame, itself: pd.DataFrame) -> Canary:
    logprobs = int(pairs["logprob"].notna().sum())
    moved = int(((pairs["text"] > 0) | (pairs["logprob"] > 0)).sum())
    # only answers that were asked again show noise
    rows = pairs.merge(itself, on=_ANSWER, suffixes=("", "_itself"))
    if not ((rows["text_itself"] > 0) | (rows["logprob_itself"] > 0)).any():
        return Canary(len(pairs), logprobs, moved, None)
    exceeded = any(
        signed_rank_above((rows[name] - rows[f"{name}_itself"]).dropna()) < _LEVEL for name in ("text", "logprob")
    )
    by_setting, by_itself = (_moves_of(rows[f"text{side}"], rows[f"logprob{side}"]) for side in ("", "_itself"))
    return Canary(len(pairs), logprobs, moved, BesideFloor(len(rows), by_setting, by_itself, exceeded))


def _moves_of(texts: pd.Series, logprobs: pd.Series) -> Moves:
    differences: Array = logprobs.dropna().to_numpy(dtype=np.float64)
    return Moves(float(texts.mean()), float(np.sqrt(np.mean(differences**2))) if len(differences) else None)


def checked_by_canary(c: Contrast, comparison: Comparison, canaries: Canaries) -> Contrast:
    """Return the contrast, without its numbers where the setting that it is about changed nothing.

    In a run in rounds all rows are short and of one kind, so a setting that acts anywhere counts as applied.
    """
    condition = canaries.conditions.get(c.policy)
    if c.look is not None and condition is not None and condition.acts:
        return c
    suite = suite_of(c.suite)
    arms = [c.arm] if c.estimand in _WITHOUT_COMPRESSED_REFERENCE else [c.arm, comparison.reference]
    cells = [canaries.places.get((arm, c.policy, suite, c.context_tokens)) for arm in arms]
    unchanged = next((canary for canary in cells if canary is not None and not canary.acts), None)
    if unchanged is None:
        return c
    reason = Reason(ReasonCode.CANARY, _sentence(unchanged, comparison, c.policy))
    return Contrast(*c.place, seeds=c.seeds, reasons=(reason, *c.reasons))


def canary_reasons(comparison: Comparison, canaries: Canaries) -> Iterator[Reason]:
    """Yield the conditions that changed nothing anywhere: their run is INVALID, because the setting was not applied."""
    for condition, canary in canaries.conditions.items():
        if not canary.acts:
            yield Reason(
                ReasonCode.CANARY, f"{comparison.label(condition)}: {_sentence(canary, comparison, condition)}"
            )


def _sentence(canary: Canary, comparison: Comparison, condition: str) -> str:
    reference = comparison.label(comparison.uncompressed_of(condition))
    if canary.moved and canary.noise is not None:
        return (
            "the setting changed nothing beyond what the engine changes by answering again: of "
            f"{canary.noise.answers} answers {_moved(canary.noise.by_setting)} against {reference}, and "
            f"{_moved(canary.noise.by_itself)} when that is asked the same again"
        )
    text = f"the setting changed nothing: {canary.answers} answers"
    if canary.logprobs == canary.answers:
        return f"{text} and their log-probs are the same as under {reference}"
    if canary.logprobs:
        return f"{text}, and the log-probs that {canary.logprobs} of them have, are the same as under {reference}"
    return f"{text} are the same as under {reference}; there are no log-probs to tell them apart by"


def _moved(moves: Moves) -> str:
    texts = f"{100 * moves.texts:.1f} % have another text"
    return texts if moves.logprobs is None else f"{texts} (log-probs {moves.logprobs:.2g} nats apart, root mean square)"
