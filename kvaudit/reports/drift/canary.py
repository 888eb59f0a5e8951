"""Whether a setting acts at all: asked is not applied, and an engine that ignores a flag gives no drift.

Where every answer under an engine's condition is the one under its reference, and every pair of log-probs that both
have is equal to the bit, the setting changed nothing there. That is no finding of no drift: the cell is INVALID. A
condition whose answers are the same texts with other log-probs acts.

An engine that does not repeat itself moves answers by itself, whatever it is set to. Were the setting ignored, its
answers would be the reference's, asked the same once more in the same batches. Where the A/A floor shows that those
move, the setting acts only if, on the rows of the floor, it moves answers further: more texts, or log-probs further
apart, by a paired test. What the setting makes of another order, or of itself, is a part of how it acts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import pandas as pd

from kvaudit.core.facets import facet_of
from kvaudit.reports.verdict.comparison import Comparison, Reason
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.records.blocks import Array
from kvaudit.reports.records.floor import AGAIN
from kvaudit.reports.records.rows import LOGPROB, SAID
from kvaudit.reports.stats.signed_rank import signed_rank_above

CANARY = "CANARY"
_LEVEL = 0.05 / 2  # of each of two tests: by texts, and by log-probs
_UNIT = ["arm", "suite", "context_tokens"]
_ANSWER = [*_UNIT, "train_seed", "item_id", "sample_index"]
_WITH_ITSELF = ("deployed", "serving")  # estimands in which the reference arm stands uncompressed, or not at all


class Moves(NamedTuple):
    """How far apart two runs of the same answers are."""

    texts: float  # share of answers that have another text
    logprobs: float | None  # root mean square of what their log-probs differ by, in nats; None where there are none


@dataclass(frozen=True)
class BesideFloor:
    """What a setting moves beside what its engine moves by itself, on the answers that were asked again."""

    answers: int
    by_setting: Moves
    by_itself: Moves  # the reference, asked the same again
    is_exceeded: bool  # by what the setting moves


class Canary(NamedTuple):
    """The answers of an arm under a condition at one place beside those under its reference, seed by seed."""

    answers: int
    logprobs: int  # pairs of them
    moved: int  # answers of another text, or another log-prob
    noise: BesideFloor | None  # None where nothing was asked again, or all of it came out the same

    @property
    def acts(self) -> bool:
        """Whether the setting changed something that the engine does not change by itself."""
        return bool(self.moved) and (self.noise is None or self.noise.is_exceeded)


@dataclass(frozen=True)
class Canaries:
    """What stands of every engine's condition beside its reference; both are empty for a run without engines."""

    places: Mapping[tuple[str, str, str, int], Canary]  # by arm, condition, suite and length
    conditions: Mapping[str, Canary]  # over all of their places


def canaries_of(records: pd.DataFrame, again: Mapping[str, pd.DataFrame], comparison: Comparison) -> Canaries:
    """Every condition beside its reference; ``again`` has by way of asking the records of the floor."""
    places, conditions = dict[tuple[str, str, str, int], Canary](), dict[str, Canary]()
    for condition, reference in comparison.references.items():
        if condition == reference:
            continue
        pairs = _moves(_under(condition, records), _under(reference, records))
        itself = _moves(_under(reference, records), _under(reference, again[AGAIN])) if AGAIN in again else pairs[:0]
        if len(pairs):
            conditions[condition] = _canary(pairs, itself)
        for index, part in pairs.groupby(_UNIT, observed=True):
            arm, suite, context = cast(tuple[str, str, int], index)
            places[str(arm), condition, str(suite), int(context)] = _canary(part, itself)
    return Canaries(places, conditions)


def _under(policy: str, records: pd.DataFrame) -> pd.DataFrame:
    return records.loc[records["policy"] == policy, [*_ANSWER, SAID, LOGPROB]]


def _moves(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """By answer whether the text differs, and by how much the log-prob does: NaN where one of them has none."""
    pairs = one.merge(other, on=_ANSWER, suffixes=("", "_other"))
    found = pairs[_ANSWER].copy()
    found["text"] = (pairs[SAID] != pairs[f"{SAID}_other"]).astype(np.float64)
    found["logprob"] = (pairs[LOGPROB] - pairs[f"{LOGPROB}_other"]).abs().astype(np.float64)
    return found


def _canary(pairs: pd.DataFrame, itself: pd.DataFrame) -> Canary:
    known = int(pairs["logprob"].notna().sum())
    moved = int(((pairs["text"] > 0) | (pairs["logprob"] > 0)).sum())
    # only answers that were asked again can be held against themselves
    rows = pairs.merge(itself, on=_ANSWER, suffixes=("", "_itself"))
    if not ((rows["text_itself"] > 0) | (rows["logprob_itself"] > 0)).any():
        return Canary(len(pairs), known, moved, None)
    exceeded = any(
        signed_rank_above((rows[name] - rows[f"{name}_itself"]).dropna()) < _LEVEL for name in ("text", "logprob")
    )
    by_setting, by_itself = (_moves_of(rows[f"text{side}"], rows[f"logprob{side}"]) for side in ("", "_itself"))
    return Canary(len(pairs), known, moved, BesideFloor(len(rows), by_setting, by_itself, exceeded))


def _moves_of(texts: pd.Series, logprobs: pd.Series) -> Moves:
    known: Array = logprobs.dropna().to_numpy(dtype=np.float64)
    return Moves(float(texts.mean()), float(np.sqrt(np.mean(known**2))) if len(known) else None)


def held_by_canary(c: Contrast, comparison: Comparison, found: Canaries) -> Contrast:
    """The contrast; without any number where a setting that it is about changed nothing.

    The endpoints of a run in rounds are short rows of one kind, so a setting that acts on one acts on all of them.
    """
    whole = found.conditions.get(c.policy)
    if c.looked is not None and whole is not None and whole.acts:
        return c
    suite = facet_of(c.suite)[0] if c.suite in comparison.facets else c.suite
    arms = [c.arm] if c.estimand in _WITH_ITSELF else [c.arm, comparison.reference]
    held = [found.places.get((arm, c.policy, suite, c.context_tokens)) for arm in arms]
    still = next((own for own in held if own is not None and not own.acts), None)
    if still is None:
        return c
    reason = Reason(CANARY, _words(still, comparison, c.policy))
    return Contrast(*c.place, seeds=c.seeds, reasons=(reason, *c.reasons))


def canary_reasons(comparison: Comparison, found: Canaries) -> Iterator[Reason]:
    """A run of which a condition changed nothing anywhere is INVALID: it was not served under what it says."""
    for condition, held in found.conditions.items():
        if not held.acts:
            yield Reason(CANARY, f"{comparison.label(condition)}: {_words(held, comparison, condition)}")


def _words(held: Canary, comparison: Comparison, condition: str) -> str:
    plain = comparison.label(comparison.uncompressed_of(condition))
    if held.moved and held.noise is not None:
        return (
            "the setting changed nothing beyond what the engine changes by answering again: of "
            f"{held.noise.answers} answers {_moved(held.noise.by_setting)} against {plain}, and "
            f"{_moved(held.noise.by_itself)} when that is asked the same again"
        )
    alike = f"the setting changed nothing: {held.answers} answers"
    if held.logprobs == held.answers:
        return f"{alike} and their log-probs are the same as under {plain}"
    if held.logprobs:
        return f"{alike}, and the log-probs that {held.logprobs} of them have, are the same as under {plain}"
    return f"{alike} are the same as under {plain}; there are no log-probs to tell them apart by"


def _moved(moves: Moves) -> str:
    texts = f"{100 * moves.texts:.1f} % have another text"
    return texts if moves.logprobs is None else f"{texts} (log-probs {moves.logprobs:.2g} nats apart, root mean square)"
