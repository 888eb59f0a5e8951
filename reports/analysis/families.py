"""Policies that differ in their budget only: what a curve over budgets, or a sequence of them, is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyFamily:
    """Policies of one kind by budget, smallest first."""

    name: str
    budgets: tuple[int, ...]
    policies: tuple[str, ...]


def families(policies: Sequence[str]) -> tuple[PolicyFamily, ...]:
    """The families with two budgets or more.

    Policies of one name belong together, whatever else changes with their budget (a window is often a share of it).
    Where a name has a budget twice, only policies that agree in every other field do.
    """
    by_name: dict[str, list[tuple[int, str, str]]] = {}
    for policy in policies:
        known = _budget(policy)
        if known:
            name, budget, rest = known
            by_name.setdefault(name, []).append((budget, policy, rest))
    found = []
    for name, members in by_name.items():
        if len({budget for budget, *_ in members}) == len(members):
            found.append(_family(name, members))
            continue
        for rest in dict.fromkeys(rest for *_, rest in members):
            found.append(_family(f"{name} {rest}".strip(), [m for m in members if m[2] == rest]))
    return tuple(family for family in found if len(set(family.budgets)) == len(family.budgets) > 1)


def _family(name: str, members: list[tuple[int, str, str]]) -> PolicyFamily:
    ordered = sorted(members)
    return PolicyFamily(name, tuple(m[0] for m in ordered), tuple(m[1] for m in ordered))


def _budget(policy: str) -> tuple[str, int, str] | None:
    """(name, budget, the other fields) of a policy with one budget; None for any other, a draw of several included."""
    if "|" in policy:
        return None
    names: list[str] = []
    rest: list[str] = []
    budgets: list[str] = []
    for part in policy.split("+"):
        name, _, text = part.partition(":")
        names.append(name.strip())
        for field in filter(None, text.split(",")):
            key, _, value = (piece.strip() for piece in field.partition("="))
            (budgets if key == "budget" else rest).append(value if key == "budget" else f"{key}={value}")
    if len(budgets) != 1 or not budgets[0].isascii() or not budgets[0].isdigit() or not 0 < len(budgets[0]) < 12:
        return None
    return ("+".join(names), int(budgets[0]), ",".join(rest)) if int(budgets[0]) > 0 else None
