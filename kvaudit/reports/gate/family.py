"""Which cells are decided, and the one family of tests over all of them.

serving, alike, deployed, selectivity   one contrast, tested for a drop
worst                        the base contrast under every deployable policy, all must pass: the worst policy decides
parity                    the base contrast of a capability suite, tested for a drop and for a gain: both must pass

The base contrast is alike where arms were trained and serving where only serving policies are compared.

FAIL needs a drop that holds for the family. Under no drift anywhere the differences of a template are as likely as
their negatives, in all cells at once: one sign per template flips every cell that holds it, so max-T knows how much the
cells have in common, and has more power than Holm, which stands in where flipping cannot be had. Templates of one name
in one suite are the same also at another length; suites have none in common and are flipped independently. A cell of
several suites is studentised by the summed variances of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import special

from kvaudit.core.estimands import PARITY, SELECTIVITY, SERVING, WORST
from kvaudit.core.facets import facet_of
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.drift import CellFilter
from kvaudit.reports.verdict.contrast import Contrast, Drift
from kvaudit.reports.verdict.ratios import points_in
from kvaudit.reports.verdict.rules import CONTRASTED, Rules
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


@dataclass(frozen=True)
class GatedCell:
    """A cell to decide; ``rows`` are the tests it is made of. It is held to a ``margin``, or to a ``ratio``."""

    estimand: str
    rows: tuple[FamilyRow, ...]
    margin: float | None
    gated: bool
    ratio: float | None = None

    def margin_of(self, row: FamilyRow) -> float | None:
        """The margin of a test, or what the ratio allows at its reference's rate; None where neither is known."""
        return self.margin if self.ratio is None else points_in(row.contrast, self.ratio)


def gated_cells(drift: Drift, rules: Rules) -> list[GatedCell]:
    """Every cell that enters the verdict, in the order of the contrasts, then worst and parity."""
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
    """What is decided beside the verdict."""
    return [single_cell(c, rules, gated=False) for c in drift.contrasts if is_shown(c, drift.comparison, rules)]


def gated_facets(sides: Comparison, rules: Rules) -> CellFilter:
    """Where facets can decide something, or take apart what decides: what a verdict needs of them."""
    estimands: tuple[str, ...] = (sides.base,)
    policies = {*rules.primary, *rules.deployable}
    if sides.mode != "serving":
        estimands = (*CONTRASTED, *({SERVING} & {*rules.estimands}))
        policies |= {*sides.policies} if SERVING in rules.estimands else set()
    return CellFilter(frozenset(estimands), frozenset(policies), frozenset(rules.contexts))


def is_gated(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Whether a contrast enters the verdict by itself."""
    if c.estimand not in rules.estimands or c.context_tokens not in rules.contexts or not _has_say(c, sides, rules):
        return False
    if c.estimand == SERVING and sides.mode == "training":  # of every setting; ``primary`` is of the arms
        return c.arm == sides.reference
    if c.policy not in rules.primary:
        return False
    if c.estimand == SELECTIVITY:
        return _is_chosen(c, rules)
    if sides.mode == "serving":
        return is_base(c, sides, rules)
    return c.arm in sides.candidates and _is_chosen(c, rules) and not _is_twin(c, sides, rules)


def is_shown(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Whether a contrast is decided beside the verdict: of alike and deployed the one that is not gated."""
    if (
        sides.mode == "serving"
        or c.policy not in rules.primary
        or _is_twin(c, sides, rules)
        or not _has_say(c, sides, rules)
    ):
        return False
    return c.estimand in CONTRASTED and c.context_tokens in rules.contexts and not is_gated(c, sides, rules)


def is_base(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Whether a contrast is the drift that worst, selectivity and parity are made of."""
    if c.estimand != sides.base or c.context_tokens not in rules.contexts or not _has_say(c, sides, rules):
        return False
    if sides.mode == "serving":
        return c.arm == sides.reference and not sides.is_uncompressed(c.policy)
    return c.arm in sides.candidates and _is_chosen(c, rules)


def _is_chosen(c: Contrast, rules: Rules) -> bool:
    """Whether the contrast is of an arm that decides."""
    return not rules.arms or c.arm in rules.arms


def _has_say(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """A facet is decided where it has a margin, and a suite where none of its facets alone stands for it.

    So a suite without any margin is decided, too: that it lacks one is said there.
    """
    if c.suite in sides.facets or rules.holds(c.suite) or sides.looked:
        return rules.holds(c.suite)
    return not any(facet_of(facet)[0] == c.suite for facet in sides.facets if rules.holds(facet))


def _is_twin(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Uncompressed, alike and deployed are the same difference; it is decided once, as alike where that is gated."""
    other = "deployed" if "alike" in rules.estimands else "alike"
    return sides.is_uncompressed(c.policy) and c.estimand == other


def single_cell(c: Contrast, rules: Rules, *, gated: bool) -> GatedCell:
    """A contrast as a cell of its own."""
    limits = rules.margin(c.estimand, c.suite), rules.ratio(c.estimand, c.suite)
    return GatedCell(c.estimand, (FamilyRow(c, 1),), limits[0], gated, limits[1])


def _worst_policy(base: Sequence[Contrast], rules: Rules) -> Iterator[GatedCell]:
    """One cell per arm, suite and length over the deployable policies."""
    groups: dict[tuple[str, str, int], list[Contrast]] = {}
    for c in base:
        if c.policy in rules.deployable:
            groups.setdefault((c.arm, c.suite, c.context_tokens), []).append(c)
    for (_, suite, _), found in groups.items():
        limits = rules.margin(WORST, suite), rules.ratio(WORST, suite)
        yield GatedCell(WORST, tuple(FamilyRow(c, 1) for c in found), limits[0], True, limits[1])


Patterns = Mapping[str, Array]  # suite -> signs [B, C]
Places = Mapping[str, Mapping[str, int]]  # suite -> template -> column of its signs
_DRAWS = 9999
MAX_T, HOLM = "max-T", "Holm"
NO_SUMS = "the item differences of a cell are not at hand"
_FEW = f"a cell has fewer than {FEWEST_CLUSTERS} templates"


class FamilyRow(NamedTuple):
    """One test of the family: that a contrast lies below 0, or above it where ``sign`` is -1."""

    contrast: Contrast
    sign: int


class _Part(NamedTuple):
    """The differences of a test in one suite, weighted and signed, as a value that can be looked up."""

    suite: str
    clusters: tuple[str, ...]
    counts: bytes  # [C]
    sums: bytes  # [C]


class _Flips(NamedTuple):
    """Adjusted p-values, the smallest one that the number of patterns allows, and the t statistic that is needed."""

    pvalues: tuple[float, ...]
    floor: float
    critical: float


_Test = tuple[_Part, ...]


@dataclass(frozen=True)
class TestFamily:
    """Adjusted one-sided p-values of the rows, 1 where a row has no number, by ``method`` and by Holm beside it.

    ``reason`` says why the method is Holm; it is empty for max-T. ``floor`` is the smallest p-value it can reach.
    ``critical`` is how many standard errors below 0 the lowest test must lie to be a drop, infinite without a test.
    """

    pvalues: tuple[float, ...]
    holm: tuple[float, ...]
    method: str
    reason: str
    floor: float
    critical: float


def joint_family(rows: Sequence[FamilyRow], alpha: float = 0.05) -> TestFamily:
    """The family of the checkpoints at hand; ``alpha`` is the level of ``critical``."""
    by_holm = holm_family([drop_pvalue(row.contrast.effect, row.sign) for row in rows])
    known = [i for i, row in enumerate(rows) if row.contrast.effect]
    reason = _reason_for_holm([rows[i] for i in known])
    if reason or not known:
        return TestFamily(by_holm, by_holm, HOLM, reason, 0.0, _bonferroni(rows, alpha))
    flips = _flips(tuple(_test(rows[i]) for i in known), alpha)
    adjusted = dict(zip(known, flips.pvalues, strict=True))
    pvalues = tuple(adjusted.get(i, 1.0) for i in range(len(rows)))
    return TestFamily(pvalues, by_holm, MAX_T, "", flips.floor, flips.critical)


def _bonferroni(rows: Sequence[FamilyRow], alpha: float) -> float:
    """What Holm asks of the lowest of so many tests."""
    df = [row.contrast.effect.df for row in rows if row.contrast.effect]
    # the fewest degrees of freedom ask the most
    return float(special.stdtrit(min(df), 1 - alpha / len(df))) if df else math.inf


def holm_family(pvalues: Sequence[float | None]) -> tuple[float, ...]:
    """Holm-adjusted p-values in order; 1 where there is none."""
    known = [i for i, value in enumerate(pvalues) if value is not None]
    result = [1.0] * len(pvalues)
    for index, value in zip(known, holm([p for p in pvalues if p is not None]), strict=True):
        result[index] = value
    return tuple(result)


def drop_pvalue(effect: Effect | None, sign: int) -> float | None:
    """The one-sided p-value of a drop, or of a gain."""
    return None if effect is None else effect.pvalue_drop if sign > 0 else 1 - effect.pvalue_drop


def _reason_for_holm(rows: Sequence[FamilyRow]) -> str:
    if not all(row.contrast.sums for row in rows):
        return NO_SUMS
    return _FEW if any(len(part.counts) < FEWEST_CLUSTERS for row in rows for part in row.contrast.sums) else ""


def _test(row: FamilyRow) -> _Test:
    return tuple(
        _Part(p.suite, p.clusters, p.counts.tobytes(), (row.sign * p.weight * p.sums).tobytes())
        for p in row.contrast.sums
    )


@lru_cache(maxsize=8)  # every format of a report asks for the same verdict
def _flips(tests: tuple[_Test, ...], alpha: float) -> _Flips:
    """Max-T over tests; patterns are drawn from a fixed seed, so a verdict does not depend on who asks."""
    templates: dict[str, set[str]] = {}
    for part in (part for test in tests for part in test):
        templates.setdefault(part.suite, set()).update(part.clusters)
    # sorted: the order in which cells name their templates gives no other signs
    places = {suite: {name: i for i, name in enumerate(sorted(templates[suite]))} for suite in sorted(templates)}
    sizes = {suite: len(table) for suite, table in places.items()}
    # patterns of several suites would be the product of theirs
    exact = len(sizes) == 1 and max(sizes.values()) <= EXHAUSTIVE_CLUSTERS
    groups = _alike(tests)
    blocks = []
    for patterns in _patterns(sizes, exact=exact):
        block = np.empty((len(tests), len(next(iter(patterns.values())))))  # [K, B]
        for members in groups:
            block[members] = _statistics([tests[i] for i in members], patterns, places)
        blocks.append(block)
    flipped = np.concatenate(blocks, axis=-1)
    unflipped = {suite: np.ones((1, size)) for suite, size in sizes.items()}  # one pattern that turns nothing
    observed = np.array([_statistics([test], unflipped, places)[0, 0] for test in tests])
    pvalues = max_t_pvalues(observed, flipped, exact=exact)
    # up to a value that was drawn: between two of them more than alpha would lie beyond
    critical = float(np.quantile(-flipped.min(axis=0), 1 - alpha, method="higher"))
    # random patterns count the one observed as one more
    return _Flips(tuple(map(float, pvalues)), 1 / (flipped.shape[-1] + (not exact)), critical)


def _alike(tests: Sequence[_Test]) -> list[list[int]]:
    """The places of tests with the same clusters of the same sizes, which are flipped together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, test in enumerate(tests):
        groups.setdefault(tuple((p.suite, p.clusters, p.counts) for p in test), []).append(place)
    return list(groups.values())


def _patterns(sizes: Mapping[str, int], *, exact: bool) -> Iterator[dict[str, Array]]:
    """Blocks of sign patterns of every suite."""
    if exact:
        yield {suite: signs(clusters, _DRAWS, 0).patterns for suite, clusters in sizes.items()}
        return
    streams = {suite: np.random.default_rng([0, i]) for i, suite in enumerate(sizes)}
    rows = max(1, BLOCK // sum(sizes.values()))
    for start in range(0, _DRAWS, rows):
        size = min(rows, _DRAWS - start)
        yield {suite: random_signs(rng, size, sizes[suite]) for suite, rng in streams.items()}


def _statistics(tests: Sequence[_Test], patterns: Patterns, places: Places) -> Array:
    """CR3 t statistics [K, B] of tests that share their clusters."""
    found = []
    for own in zip(*tests, strict=True):  # the same suite of every test
        columns = [places[own[0].suite][name] for name in own[0].clusters]  # [C], where their signs are
        sums = np.stack([np.frombuffer(part.sums) for part in own])  # [K, C]
        found.append((sums, np.frombuffer(own[0].counts), patterns[own[0].suite][:, columns]))
    if len(found) == 1:
        alone: Array = flip_statistics(*found[0])
        return alone
    moments = [flip_moments(*parts) for parts in found]
    mean: Array = np.sum([m.mean for m in moments], axis=0)  # [K, B]
    variance: Array = np.sum([m.variance for m in moments], axis=0)  # [K, B]
    flat = variance <= 1e-12 * np.sum([m.scale for m in moments], axis=0)
    ends: Array = np.copysign(np.where(np.abs(mean) <= 1e-12, 0.0, np.inf), mean)  # parts may cancel but for rounding
    joined: Array = np.where(flat, ends, mean / np.sqrt(np.where(flat, 1.0, variance)))
    return joined
