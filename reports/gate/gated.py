"""Which cells are decided: one or several contrasts each, against one margin.

E1, E2, E4, selectivity   one contrast, tested for a drop
E3                        the base contrast under every deployable policy, all must pass: the worst policy decides
parity                    the base contrast of a capability suite, tested for a drop and for a gain: both must pass

The base contrast is E1 where arms were trained and E4 where only serving policies are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from audit.core.policy_names import DENSE_POLICY
from reports.drift.comparison import Comparison
from reports.drift.results import Contrast, Drift
from reports.drift.selectivity import SELECTIVITY
from reports.gate.family import Row
from reports.gate.rules import DEFAULT_ESTIMANDS, Rules

PARITY, WORST_POLICY = "parity", "E3"


@dataclass(frozen=True)
class GatedCell:
    """A cell to decide; ``rows`` are the tests it is made of."""

    estimand: str
    rows: tuple[Row, ...]
    margin: float | None
    gated: bool


def gated_cells(drift: Drift, rules: Rules) -> list[GatedCell]:
    """Every cell that enters the verdict, in the order of the contrasts, then E3 and parity."""
    sides = drift.comparison
    cells = [_single(c, rules, gated=True) for c in drift.contrasts if is_gated(c, sides, rules)]
    base = [c for c in drift.contrasts if is_base(c, sides, rules)]
    if WORST_POLICY in rules.estimands:
        cells += _worst_policy(base, rules)
    if PARITY in rules.estimands:
        cells += [
            GatedCell(PARITY, (Row(c, 1), Row(c, -1)), rules.margin(PARITY, c.suite), True)
            for c in base
            if c.suite in sides.capability and c.policy in rules.primary
        ]
    return cells


def shown_cells(drift: Drift, rules: Rules) -> list[GatedCell]:
    """What is decided beside the verdict."""
    return [_single(c, rules, gated=False) for c in drift.contrasts if is_shown(c, drift.comparison, rules)]


def is_gated(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Whether a contrast enters the verdict by itself."""
    if c.policy not in rules.primary or c.context_tokens not in rules.contexts:
        return False
    if c.estimand == SELECTIVITY:
        return SELECTIVITY in rules.estimands
    if sides.mode == "serving":
        return is_base(c, sides, rules) and any(name in rules.estimands for name in DEFAULT_ESTIMANDS)
    return c.estimand in rules.estimands and c.arm in sides.candidates and not _is_twin(c, rules)


def is_shown(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Whether a contrast is decided beside the verdict: of E1 and E2 the one that is not gated."""
    if sides.mode == "serving" or c.policy not in rules.primary or _is_twin(c, rules):
        return False
    return c.estimand in DEFAULT_ESTIMANDS and c.context_tokens in rules.contexts and not is_gated(c, sides, rules)


def is_base(c: Contrast, sides: Comparison, rules: Rules) -> bool:
    """Whether a contrast is the drift that E3, selectivity and parity are made of."""
    if c.estimand != sides.base or c.context_tokens not in rules.contexts:
        return False
    if sides.mode == "serving":
        return c.arm == sides.reference and c.policy != DENSE_POLICY
    return c.arm in sides.candidates


def _is_twin(c: Contrast, rules: Rules) -> bool:
    """Uncompressed, E1 and E2 are the same difference; it is decided once, as E1 where that is gated."""
    other = "E2" if "E1" in rules.estimands else "E1"
    return c.policy == DENSE_POLICY and c.estimand == other


def _single(c: Contrast, rules: Rules, *, gated: bool) -> GatedCell:
    return GatedCell(c.estimand, (Row(c, 1),), rules.margin(c.estimand, c.suite), gated)


def _worst_policy(base: Sequence[Contrast], rules: Rules) -> Iterator[GatedCell]:
    """One cell per arm, suite and length over the deployable policies."""
    groups: dict[tuple[str, str, int], list[Contrast]] = {}
    for c in base:
        if c.policy in rules.deployable:
            groups.setdefault((c.arm, c.suite, c.context_tokens), []).append(c)
    for (_, suite, _), found in groups.items():
        yield GatedCell(WORST_POLICY, tuple(Row(c, 1) for c in found), rules.margin(WORST_POLICY, suite), True)
