"""Which cells are decided: one or several contrasts each, against one margin.

E1, E2, E4, selectivity   one contrast, tested for a drop
E3                        the base contrast under every deployable policy, all must pass: the worst policy decides
parity                    the base contrast of a capability suite, tested for a drop and for a gain: both must pass

The base contrast is E1 where arms were trained and E4 where only serving policies are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reports.drift.plan import DENSE_POLICY, Plan
from reports.drift.report import Contrast
from reports.drift.selectivity import SELECTIVITY
from reports.gate.family import Row
from reports.gate.rules import DEFAULT_ESTIMANDS

PARITY, WORST_POLICY = "parity", "E3"


@dataclass(frozen=True)
class GatedCell:
    """A cell to decide; ``rows`` are the tests it is made of."""

    estimand: str
    rows: tuple[Row, ...]
    margin: float | None
    gated: bool


def gated_cells(contrasts: Sequence[Contrast], plan: Plan) -> list[GatedCell]:
    """Every cell that enters the verdict, in the order of the contrasts, then E3 and parity."""
    cells = [_single(c, plan, gated=True) for c in contrasts if is_gated(c, plan)]
    base = [c for c in contrasts if is_base(c, plan)]
    if WORST_POLICY in plan.estimands:
        cells += _worst_policy(base, plan)
    if PARITY in plan.estimands:
        cells += [
            GatedCell(PARITY, (Row(c, 1), Row(c, -1)), plan.margin(PARITY, c.suite), True)
            for c in base
            if c.suite in plan.capability and c.policy in plan.primary
        ]
    return cells


def shown_cells(contrasts: Sequence[Contrast], plan: Plan) -> list[GatedCell]:
    """What is decided beside the verdict."""
    return [_single(c, plan, gated=False) for c in contrasts if is_shown(c, plan)]


def is_gated(c: Contrast, plan: Plan) -> bool:
    """Whether a contrast enters the verdict by itself."""
    if c.policy not in plan.primary or c.context_tokens not in plan.gated_contexts:
        return False
    if c.estimand == SELECTIVITY:
        return SELECTIVITY in plan.estimands
    if plan.mode == "serving":
        return is_base(c, plan) and any(name in plan.estimands for name in DEFAULT_ESTIMANDS)
    return c.estimand in plan.estimands and c.arm in plan.candidates and not _is_twin(c, plan)


def is_shown(c: Contrast, plan: Plan) -> bool:
    """Whether a contrast is decided beside the verdict: of E1 and E2 the one that is not gated."""
    if plan.mode == "serving" or c.policy not in plan.primary or _is_twin(c, plan):
        return False
    return c.estimand in DEFAULT_ESTIMANDS and c.context_tokens in plan.gated_contexts and not is_gated(c, plan)


def is_base(c: Contrast, plan: Plan) -> bool:
    """Whether a contrast is the drift that E3, selectivity and parity are made of."""
    if c.estimand != plan.base or c.context_tokens not in plan.gated_contexts:
        return False
    if plan.mode == "serving":
        return c.arm == plan.reference and c.policy != DENSE_POLICY
    return c.arm in plan.candidates


def _is_twin(c: Contrast, plan: Plan) -> bool:
    """Uncompressed, E1 and E2 are the same difference; it is decided once, as E1 where that is gated."""
    other = "E2" if "E1" in plan.estimands else "E1"
    return c.policy == DENSE_POLICY and c.estimand == other


def _single(c: Contrast, plan: Plan, *, gated: bool) -> GatedCell:
    return GatedCell(c.estimand, (Row(c, 1),), plan.margin(c.estimand, c.suite), gated)


def _worst_policy(base: Sequence[Contrast], plan: Plan) -> Iterator[GatedCell]:
    """One cell per arm, suite and length over the deployable policies."""
    groups: dict[tuple[str, str, int], list[Contrast]] = {}
    for c in base:
        if c.policy in plan.deployable:
            groups.setdefault((c.arm, c.suite, c.context_tokens), []).append(c)
    for (_, suite, _), found in groups.items():
        yield GatedCell(WORST_POLICY, tuple(Row(c, 1) for c in found), plan.margin(WORST_POLICY, suite), True)
