"""The smallest cache budget and the longest context that a fixed sequence of non-inferiority tests clears.

From the largest budget down (or the shortest length up) each cell is tested at the full level against the uncompressed
reference; the first that does not pass ends the sequence, so no adjustment is needed (statistical hierarchy: Maurer,
Hothorn & Lehmacher 1995). Whether a loss within the margin is significant plays no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvaudit.core.plugins import split_named
from kvaudit.reports.stats.rule import fixed_sequence
from kvaudit.reports.verdict.cell import unadjusted_status
from kvaudit.reports.verdict.comparison import Comparison
from kvaudit.reports.verdict.contrast import Contrast, Drift
from kvaudit.reports.verdict.controls import Controls
from kvaudit.reports.verdict.rules import Rules
from kvaudit.reports.verdict.verdict import Status

_Key = tuple[str, str, str, int]  # arm, policy, suite, length
_PASSED = (Status.PASS.value, Status.PASS_NOTED.value)


@dataclass(frozen=True)
class SafeBudget:
    """The result of one sequence of tests of non-inferiority (is the loss below the margin?), over budgets or lengths.

    ``amounts`` are in the order tested: budgets from the largest, or lengths from the shortest. ``cleared`` is the last
    amount that passed before the first failure, None if the first amount failed. ``failed`` is the first amount that
    failed, None if all passed.
    """

    axis: str  # budget | length
    estimand: str  # deployed for a candidate, serving for the reference: both against the uncompressed reference
    arm: str
    family: str
    suite: str
    context_tokens: int | None
    amounts: tuple[int, ...]
    statuses: tuple[str, ...]
    margin: float
    cleared: int | None
    failed: int | None


class _Steps(NamedTuple):
    """One sequence of tests: its cells, and their budgets or lengths, in the order tested."""

    axis: str
    family: str
    amounts: list[int]
    cells: Sequence[Contrast]


def safe_budgets(drift: Drift, rules: Rules) -> tuple[SafeBudget, ...]:
    """Return, for each sequence of tests from mild to strong, the last test that passes before one does not pass.

    There are two kinds of sequence. One goes from the largest budget to the smallest, for each family (policies that
    differ only in their budget), suite, length and arm. The other goes from the shortest length to the longest, for
    each policy, suite and arm, if there are several lengths.
    """
    controls = Controls(drift, rules.margins)
    # the estimand that compares an arm with the uncompressed reference
    estimands = {arm: "serving" if arm == drift.comparison.reference else "deployed" for arm in drift.comparison.arms}
    contrasts = {c.place[1:]: c for c in drift.contrasts if c.estimand == estimands[c.arm]}
    sequences = (*_over_budgets(drift.comparison, rules, contrasts), *_over_lengths(drift.comparison, rules, contrasts))
    return tuple(_sequence(steps, rules.margins[steps.cells[0].suite], controls) for steps in sequences)


def _suites(sides: Comparison, rules: Rules) -> list[str]:
    """Return the suites that have a margin on their score; margins on single facets, ``well_formed`` too, do not count.

    Only the gate checks whether answers can be read.
    """
    return [suite for suite in rules.margins if suite not in sides.facets]


def _over_budgets(sides: Comparison, rules: Rules, contrasts: Mapping[_Key, Contrast]) -> Iterator[_Steps]:
    for family in families(sides.policies):
        for suite in _suites(sides, rules):
            for context in sides.lengths[suite]:
                for arm in (sides.reference, *sides.candidates):
                    keys = [(arm, policy, suite, context) for policy in reversed(family.policies)]
                    cells = [contrasts[key] for key in keys if key in contrasts]
                    if len(cells) == len(keys):
                        yield _Steps("budget", family.name, list(reversed(family.budgets)), cells)


def _over_lengths(sides: Comparison, rules: Rules, contrasts: Mapping[_Key, Contrast]) -> Iterator[_Steps]:
    for policy in sides.policies:
        for suite in _suites(sides, rules):
            lengths = list(sides.lengths[suite])
            for arm in (sides.reference, *sides.candidates):
                if sides.is_uncompressed(policy) and arm == sides.reference:
                    continue
                cells = [c for context in lengths if (c := contrasts.get((arm, policy, suite, context)))]
                if len(cells) == len(lengths) > 1:
                    yield _Steps("length", sides.label(policy), lengths, cells)


def _sequence(steps: _Steps, margin: float, controls: Controls) -> SafeBudget:
    cells, amounts = steps.cells, steps.amounts
    statuses = [unadjusted_status(c, margin, is_measurable=controls.against(c) is None).value for c in cells]
    last = fixed_sequence([status in _PASSED for status in statuses])
    after = 0 if last is None else last + 1
    return SafeBudget(
        axis=steps.axis,
        estimand=cells[0].estimand,
        arm=cells[0].arm,
        family=steps.family,
        suite=cells[0].suite,
        context_tokens=cells[0].context_tokens if steps.axis == "budget" else None,
        amounts=tuple(amounts),
        statuses=tuple(statuses),
        margin=margin,
        cleared=None if last is None else amounts[last],
        failed=amounts[after] if after < len(amounts) else None,
    )


# --- policies that differ in their budget -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyFamily:
    """Policies that differ in their cache budget, such as snapkv with 64 and with 128 entries; the smallest first."""

    name: str
    budgets: tuple[int, ...]
    policies: tuple[str, ...]


def families(policies: Sequence[str]) -> tuple[PolicyFamily, ...]:
    """Return the families of policies: each is one method at two budgets or more.

    Policies of one name form a family, such as "snapkv:budget=64" and "snapkv:budget=128". Other fields may differ too,
    because a window is often a share of the budget. But if two policies of a name have the same budget, only policies
    that agree in every other field form a family.
    """
    by_name: dict[str, list[tuple[int, str, str]]] = {}
    for policy in policies:
        fields = _budget(policy)
        if fields:
            name, budget, others = fields
            by_name.setdefault(name, []).append((budget, policy, others))
    candidates = []
    for name, members in by_name.items():
        if len({budget for budget, *_ in members}) == len(members):
            candidates.append(_family(name, members))
            continue
        for others in dict.fromkeys(member[2] for member in members):
            candidates.append(_family(f"{name} {others}".strip(), [m for m in members if m[2] == others]))
    return tuple(family for family in candidates if len(set(family.budgets)) == len(family.budgets) > 1)


def _family(name: str, members: list[tuple[int, str, str]]) -> PolicyFamily:
    ordered = sorted(members)
    return PolicyFamily(name, tuple(m[0] for m in ordered), tuple(m[1] for m in ordered))


def _budget(policy: str) -> tuple[str, int, str] | None:
    """Return (name, budget, other fields) of a policy that has one budget; None for others and for mixtures ("|")."""
    if "|" in policy:
        return None
    names: list[str] = []
    others: list[str] = []
    budgets: list[str] = []
    for part in policy.split("+"):
        name, fields = split_named(part)
        names.append(name)
        budgets += [field.value or "" for field in fields if field.name == "budget"]
        others += [f"{field.name}={field.value or ''}" for field in fields if field.name != "budget"]
    if len(budgets) != 1 or not budgets[0].isascii() or not budgets[0].isdigit() or not 0 < len(budgets[0]) < 12:
        return None
    return ("+".join(names), int(budgets[0]), ",".join(others)) if int(budgets[0]) > 0 else None
