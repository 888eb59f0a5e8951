"""Whether a setting acts at all: asked is not applied, and an engine that ignores a flag gives no drift.

Where every answer under an engine's condition is the one under its reference, and every pair of log-probs that both
have is equal to the bit, the setting changed nothing there. That is no finding of no drift: the cell is INVALID. A
condition whose answers are the same texts with other log-probs acts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import pandas as pd

from kvaudit.core.facets import facet_of
from kvaudit.reports.drift.comparison import Comparison, Reason
from kvaudit.reports.drift.results import Contrast
from kvaudit.reports.records.rows import LOGPROB, SAID

CANARY = "CANARY"
_UNIT = ["arm", "suite", "context_tokens"]
_ANSWER = [*_UNIT, "train_seed", "item_id", "sample_index"]
_WITH_ITSELF = ("E2", "E4")  # estimands in which the reference arm stands uncompressed, or not at all


class Canary(NamedTuple):
    """The answers of an arm under a condition at one place beside those under its reference, seed by seed."""

    answers: int
    logprobs: int  # pairs of them
    moved: int  # answers of another text, or another log-prob


Canaries = Mapping[tuple[str, str, str, int], Canary]  # by arm, condition, suite and length


def unmoved(records: pd.DataFrame, comparison: Comparison) -> Canaries:
    """What stands of every engine's condition beside its reference; empty for a run without engines."""
    found: dict[tuple[str, str, str, int], Canary] = {}
    for condition, reference in comparison.references.items():
        if condition == reference:
            continue
        sides = [
            records.loc[records["policy"] == policy, [*_ANSWER, SAID, LOGPROB]] for policy in (condition, reference)
        ]
        pairs = sides[0].merge(sides[1], on=_ANSWER, suffixes=("", "_plain"))
        own, plain = pairs[LOGPROB], pairs[f"{LOGPROB}_plain"]
        pairs["known"] = own.notna() & plain.notna()
        pairs["moved"] = (pairs[SAID] != pairs[f"{SAID}_plain"]) | (pairs["known"] & (own != plain))
        for index, part in pairs.groupby(_UNIT, observed=True):
            arm, suite, context = cast(tuple[str, str, int], index)
            held = Canary(len(part), int(np.sum(part["known"])), int(np.sum(part["moved"])))
            found[str(arm), condition, str(suite), int(context)] = held
    return found


def held_by_canary(c: Contrast, comparison: Comparison, found: Canaries) -> Contrast:
    """The contrast; without any number where a setting that it is about changed nothing."""
    suite = facet_of(c.suite)[0] if c.suite in comparison.facets else c.suite
    arms = [c.arm] if c.estimand in _WITH_ITSELF else [c.arm, comparison.reference]
    held = [found.get((arm, c.policy, suite, c.context_tokens)) for arm in arms]
    still = next((own for own in held if own is not None and not own.moved), None)
    if still is None:
        return c
    reason = Reason(CANARY, _words(still, comparison, c.policy))
    return replace(
        c,
        effect=None,
        recipe=None,
        seed_estimates=(),
        worst=None,
        best=None,
        reasons=(reason, *c.reasons),
        rates=None,
        unread=None,
        sums=(),
        churn=None,
        rerun=None,
        seed_noise=0.0,
        by_seed=(),
        seed_sums=(),
    )


def canary_reasons(comparison: Comparison, found: Canaries) -> Iterator[Reason]:
    """A run of which a condition changed nothing anywhere is INVALID: it was not served under what it says."""
    for condition in comparison.references:
        own = [held for (_, policy, _, _), held in found.items() if policy == condition]
        if own and not any(held.moved for held in own):
            whole = Canary(sum(held.answers for held in own), sum(held.logprobs for held in own), 0)
            yield Reason(CANARY, f"{comparison.label(condition)}: {_words(whole, comparison, condition)}")


def _words(held: Canary, comparison: Comparison, condition: str) -> str:
    plain = comparison.label(comparison.uncompressed_of(condition))
    alike = f"the setting changed nothing: {held.answers} answers"
    if held.logprobs == held.answers:
        return f"{alike} and their log-probs are the same as under {plain}"
    if held.logprobs:
        return f"{alike}, and the log-probs that {held.logprobs} of them have, are the same as under {plain}"
    return f"{alike} are the same as under {plain}; there are no log-probs to tell them apart by"
