"""The cells that the gate decides, and their tests, whose p-values are adjusted together as one family.

    serving, alike, deployed, selectivity   one contrast, tested for a drop
    worst                                   the base contrast under every deployable policy; all must pass
    parity                                  the base contrast of a capability suite, tested for a drop and for a gain

The base contrast is alike where arms were trained, and serving where only serving policies are compared.

FAIL needs a drop that holds for the whole family. Without drift, the differences of a template are as likely as their
negatives, in all cells at once. So one sign per template flips every cell that has it: max-T takes into account how
much the cells have in common, and has more power than Holm, which is the fallback where flips are not possible.
Templates of one name in one suite are the same at every length; different suites share no template and are flipped
independently. A cell of several suites is studentised by the summed variances of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import special

from kvaudit.core.facets import PARITY, SELECTIVITY, SERVING, WORST, facet_of
from kvaudit.reports.stats.effect import Array, Effect
from kvaudit.reports.stats.signflip import (
    BLOCK,
    EXHAUSTIVE_CLUSTERS,
    FEWEST_CLUSTERS,
    flip_moments,
    flip_statistics,
    holm,
    max_t_pvalues,
    random_signs,
    signs,
)
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast, Drift
from kvaudit.reports.verdict.drift import CellFilter
from kvaudit.reports.verdict.rules import CONTRASTED, Rules, allowed_points
from kvaudit.reports.verdict.verdict import Adjustment


@dataclass(frozen=True)
class GatedCell:
    """A cell to decide: the tests that it has to pass (``rows``), and their limit, a ``margin`` or a ``ratio``."""

    estimand: str
    rows: tuple[FamilyRow, ...]
    margin: float | None
    gated: bool
    ratio: float | None = None

    def margin_of(self, row: FamilyRow) -> float | None:
        """Return the margin of a test in score units.

        If the limit is on a ratio of rates, this is the loss that it allows at the reference's rate; None if that rate
        is unknown. It is None as well if no margin is declared.
        """
        return self.margin if self.ratio is None else allowed_points(row.contrast, self.ratio)


def gated_cells(drift: Drift, rules: Rules) -> list[GatedCell]:
    """Return every cell that enters the verdict: the single contrasts in their order, then worst and parity.

    worst: every deployable policy must pass; parity: the drift must be within the margin on both sides.
    """
    sides = drift.comparison
    cells = [single_cell(c, rules, gated=True) for c in drift.contrasts if is_gated(c, sides, rules)]
    base = [c for c in drift.contrasts if is_base(c, sides, rules)]
    if WORST in rules.estimands:
        cells += _worst_policy(base, rules)
    if PARITY in rules.estimands:
        cells += [
            GatedCell(PARITY, (FamilyRow(c, 1), FamilyRow(c, -1)), rules.margin(PARITY, c.suite), True)
            for c in base
            if c.suite in sides.capability and c.policy in rules.primary
        ]
    return cells


def shown_cells(drift: Drift, rules: Rules) -> list[GatedCell]:
    """Return the cells that are decided and shown, but do not enter the verdict."""
    return [single_cell(c, rules, gated=False) for c in drift.contrasts if is_shown(c, drift.comparison, rules)]


def gated_facets(sides: Comparison, rules: Rules) -> CellFilter:
    """Return the cells (by difference, policy and length) in which the verdict may need facets."""
    estimands: tuple[str, ...] = (sides.base,)
    policies = {*rules.primary, *rules.deployable}
    if sides.mode != "serving":
        estimands = (*CONTRASTED, *({SERVING} & {*rules.estimands}))
        policies |= {*sides.policies} if SERVING in rules.estimands else set()
    return CellFilter(frozenset(estimands), frozenset(policies), frozenset(rules.contexts))


def is_gated(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Return whether a contrast (a measured difference) enters the verdict as a cell."""
    if c.estimand not in rules.estimands or c.context_tokens not in rules.contexts or not _is_decided(c, sides, rules):
        return False
    if c.estimand == SERVING and sides.mode == "training":  # all settings; ``primary`` is about the trained arms
        return c.arm == sides.reference
    if c.policy not in rules.primary:
        return False
    if c.estimand == SELECTIVITY:
        return _is_chosen(c, rules)
    if sides.mode == "serving":
        return is_base(c, sides, rules)
    return c.arm in sides.candidates and _is_chosen(c, rules) and not _is_repeated(c, sides, rules)


def is_shown(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Return whether a contrast is decided and shown, but does not enter the verdict.

    This is so for "deployed" if only "alike" is gated, and for "alike" if only "deployed" is gated.
    """
    if sides.mode == "serving" or c.estimand not in CONTRASTED or is_gated(c, sides, rules):
        return False
    is_listed = c.policy in rules.primary and c.context_tokens in rules.contexts
    return is_listed and _is_decided(c, sides, rules) and not _is_repeated(c, sides, rules)


def is_base(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Return whether a contrast is one from which the cells of ``worst`` and ``parity`` are made."""
    if c.estimand != sides.base or c.context_tokens not in rules.contexts or not _is_decided(c, sides, rules):
        return False
    if sides.mode == "serving":
        return c.arm == sides.reference and not sides.is_uncompressed(c.policy)
    return c.arm in sides.candidates and _is_chosen(c, rules)


def _is_chosen(c: Contrast, rules: Rules) -> bool:
    """Return whether the rules gate the arm of a contrast (a measured difference)."""
    return not rules.arms or c.arm in rules.arms


def _is_decided(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Return whether a metric is decided: a facet that has a margin, or in most cases a suite's score.

    A suite's score is not decided if only facets of the suite have margins. A suite without any margin is decided too,
    so that its cell says that the margin is missing, but not in a run in rounds.
    """
    if c.suite in sides.facets or rules.has_limit(c.suite) or sides.looks:
        return rules.has_limit(c.suite)
    return not any(facet_of(facet)[0] == c.suite for facet in sides.facets if rules.has_limit(facet))


def _is_repeated(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Return whether a contrast repeats another: under an uncompressed policy "alike" and "deployed" are the same."""
    other = "deployed" if "alike" in rules.estimands else "alike"
    return sides.is_uncompressed(c.policy) and c.estimand == other


def single_cell(c: Contrast, rules: Rules, *, gated: bool) -> GatedCell:
    """Return the cell that consists of one contrast, tested for a drop."""
    margin, ratio = rules.margin(c.estimand, c.suite), rules.ratio(c.estimand, c.suite)
    return GatedCell(c.estimand, (FamilyRow(c, 1),), margin, gated, ratio)


def _worst_policy(base: Sequence[Contrast], rules: Rules) -> Iterator[GatedCell]:
    """Yield the cells of the estimand ``worst``: an arm passes a suite if it passes under every deployable policy.

    There is a cell per arm, suite and length, with a test per policy.
    """
    groups: dict[tuple[str, str, int], list[Contrast]] = {}
    for c in base:
        if c.policy in rules.deployable:
            groups.setdefault((c.arm, c.suite, c.context_tokens), []).append(c)
    for (_, suite, _), contrasts in groups.items():
        margin, ratio = rules.margin(WORST, suite), rules.ratio(WORST, suite)
        yield GatedCell(WORST, tuple(FamilyRow(c, 1) for c in contrasts), margin, True, ratio)


Patterns = Mapping[str, Array]  # suite -> signs [B, C]
Columns = Mapping[str, Mapping[str, int]]  # suite -> template -> column of its signs
_DRAWS = 9999
MAX_T, HOLM = "max-T", "Holm"


class FamilyRow(NamedTuple):
    """One of the tests whose p-values are adjusted together: is a difference below 0, or above 0 if ``sign`` is -1?"""

    contrast: Contrast
    sign: int


class _Part(NamedTuple):
    """The differences of a test in one suite, weighted and signed; hashable, as ``_flips`` is cached."""

    suite: str
    clusters: tuple[str, ...]
    counts: bytes  # [C]
    sums: bytes  # [C]


class _Flips(NamedTuple):
    """The result of max-T (the signs of all tests are changed jointly): adjusted p-values and the critical t.

    ``floor`` is the smallest possible p-value.
    """

    pvalues: tuple[float, ...]
    floor: float
    critical: float


_Test = tuple[_Part, ...]


@dataclass(frozen=True)
class TestFamily:
    """The p-values of tests for a drop, adjusted together, and the same p-values adjusted by Holm.

    A test without an effect has the p-value 1.
    """

    pvalues: tuple[float, ...]
    holm: tuple[float, ...]
    adjustment: Adjustment


def joint_family(rows: Sequence[FamilyRow], alpha: float = 0.05) -> TestFamily:
    """Return the p-values of all tests, adjusted together by max-T, or by Holm where max-T is not possible.

    ``alpha`` is the level of the adjustment's ``critical`` value.
    """
    by_holm = holm_family([drop_pvalue(row.contrast.effect, row.sign) for row in rows])
    numbered = [i for i, row in enumerate(rows) if row.contrast.effect]
    reason = _reason_for_holm([rows[i].contrast for i in numbered])
    if reason or not numbered:
        return TestFamily(by_holm, by_holm, Adjustment(HOLM, reason, 0.0, _bonferroni(rows, alpha)))
    flips = _flips(tuple(_test(rows[i]) for i in numbered), alpha)
    adjusted = dict(zip(numbered, flips.pvalues, strict=True))
    pvalues = tuple(adjusted.get(i, 1.0) for i in range(len(rows)))
    return TestFamily(pvalues, by_holm, Adjustment(MAX_T, "", flips.floor, flips.critical))


def _bonferroni(rows: Sequence[FamilyRow], alpha: float) -> float:
    """Return Bonferroni's critical t value at the fewest degrees of freedom of a test; infinite if there is no test."""
    df = [row.contrast.effect.df for row in rows if row.contrast.effect]
    return float(special.stdtrit(min(df), 1 - alpha / len(df))) if df else math.inf


def holm_family(pvalues: Sequence[float | None]) -> tuple[float, ...]:
    """Return Holm-adjusted p-values in the given order; a p-value of None becomes 1."""
    numbered = [i for i, value in enumerate(pvalues) if value is not None]
    result = [1.0] * len(pvalues)
    for index, value in zip(numbered, holm([p for p in pvalues if p is not None]), strict=True):
        result[index] = value
    return tuple(result)


def drop_pvalue(effect: Effect | None, sign: int) -> float | None:
    """Return the one-sided p-value of a drop, or of a gain if ``sign`` is -1; None if there is no effect."""
    return None if effect is None else effect.pvalue_drop if sign > 0 else 1 - effect.pvalue_drop


def _reason_for_holm(contrasts: Sequence[Contrast]) -> str:
    """Return why the signs of these contrasts cannot be flipped together; empty if they can."""
    if not all(c.sums for c in contrasts):
        return "the item differences of a cell are not at hand"
    if any(len(part.counts) < FEWEST_CLUSTERS for c in contrasts for part in c.sums):
        return f"a cell has fewer than {FEWEST_CLUSTERS} templates"
    return ""


def _test(row: FamilyRow) -> _Test:
    return tuple(
        _Part(p.suite, p.clusters, p.counts.tobytes(), (row.sign * p.weight * p.sums).tobytes())
        for p in row.contrast.sums
    )


@lru_cache(maxsize=8)  # every format of a report asks for the same verdict
def _flips(tests: tuple[_Test, ...], alpha: float) -> _Flips:
    """Compute max-T over the tests, from random or all sign patterns (one sign for each template).

    Random patterns come from a fixed seed, so that a verdict can be reproduced.
    """
    templates: dict[str, set[str]] = {}
    for part in (part for test in tests for part in test):
        templates.setdefault(part.suite, set()).update(part.clusters)
    # sorted, so that signs do not depend on the order in which cells name their templates
    columns = {suite: {name: i for i, name in enumerate(sorted(templates[suite]))} for suite in sorted(templates)}
    sizes = {suite: len(table) for suite, table in columns.items()}
    # all patterns of several suites together would be too many
    exact = len(sizes) == 1 and max(sizes.values()) <= EXHAUSTIVE_CLUSTERS
    groups = _groups_of_equal_clusters(tests)
    blocks = []
    for patterns in _patterns(sizes, exact=exact):
        block = np.empty((len(tests), len(next(iter(patterns.values())))))  # [K, B]
        for members in groups:
            block[members] = _statistics([tests[i] for i in members], patterns, columns)
        blocks.append(block)
    flipped = np.concatenate(blocks, axis=-1)
    unflipped = {suite: np.ones((1, size)) for suite, size in sizes.items()}
    observed = np.array([_statistics([test], unflipped, columns)[0, 0] for test in tests])
    pvalues = max_t_pvalues(observed, flipped, exact=exact)
    # take a drawn value: a value between two draws would leave more than alpha beyond it
    critical = float(np.quantile(-flipped.min(axis=0), 1 - alpha, method="higher"))
    # random patterns count the observed one as one more
    return _Flips(tuple(map(float, pvalues)), 1 / (flipped.shape[-1] + (not exact)), critical)


def _groups_of_equal_clusters(tests: Sequence[_Test]) -> list[list[int]]:
    """Group tests that have the same clusters with the same numbers of items; return the indices of each group.

    One pattern of signs can then be applied to all tests of a group at once.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, test in enumerate(tests):
        groups.setdefault(tuple((p.suite, p.clusters, p.counts) for p in test), []).append(index)
    return list(groups.values())


def _patterns(sizes: Mapping[str, int], *, exact: bool) -> Iterator[dict[str, Array]]:
    """Yield blocks of sign patterns [B, C] by suite: all patterns if ``exact``, else random ones from a fixed seed."""
    if exact:
        yield {suite: signs(clusters, _DRAWS, 0).patterns for suite, clusters in sizes.items()}
        return
    streams = {suite: np.random.default_rng([0, i]) for i, suite in enumerate(sizes)}
    rows = max(1, BLOCK // sum(sizes.values()))
    for start in range(0, _DRAWS, rows):
        size = min(rows, _DRAWS - start)
        yield {suite: random_signs(rng, size, sizes[suite]) for suite, rng in streams.items()}


def _statistics(tests: Sequence[_Test], patterns: Patterns, columns: Columns) -> Array:
    """Return the CR3 t statistics [K, B] of K tests that share their clusters, under B patterns of signs."""
    suites = []
    for parts in zip(*tests, strict=True):  # the same suite of every test
        first = parts[0]
        sign_columns = [columns[first.suite][name] for name in first.clusters]  # [C]
        sums = np.stack([np.frombuffer(part.sums) for part in parts])  # [K, C]
        suites.append((sums, np.frombuffer(first.counts), patterns[first.suite][:, sign_columns]))
    if len(suites) == 1:
        statistics: Array = flip_statistics(*suites[0])
        return statistics
    moments = [flip_moments(*suite) for suite in suites]
    mean: Array = np.sum([m.mean for m in moments], axis=0)  # [K, B]
    variance: Array = np.sum([m.variance for m in moments], axis=0)  # [K, B]
    flat = variance <= 1e-12 * np.sum([m.scale for m in moments], axis=0)
    # parts may cancel, but for rounding
    ends: Array = np.copysign(np.where(np.abs(mean) <= 1e-12, 0.0, np.inf), mean)
    joined: Array = np.where(flat, ends, mean / np.sqrt(np.where(flat, 1.0, variance)))
    return joined
