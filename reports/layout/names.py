"""What cells and the two sides of a difference are called."""

from __future__ import annotations

from kvaudit.core.text import length_label
from kvaudit.reports.drift.comparison import Comparison
from kvaudit.reports.drift.results import CellName, Contrast
from kvaudit.reports.gate.verdict import Decision
from kvaudit.reports.layout.words import spelled

MOST_OF_NAME = 48  # characters, where a line has to stay one


def shortened(name: str, most: int = MOST_OF_NAME) -> str:
    """A long name with its middle left out: settings and paths are told apart by either end."""
    head = most // 2
    return name if len(name) <= most else f"{name[:head]}…{name[head + 1 - most :]}"


def place_name(sides: Comparison, name: CellName) -> str:
    """smd @ snapkv 96, refusal; the length where the run has several; whether the other side is uncompressed."""
    end = " end to end" if name.estimand == "deployed" else ""
    where = f"{sides.who(name.arm, name.policy)}{end}, {spelled(sides, name.suite)}"
    return with_length(sides, where, name.context_tokens)


def with_length(sides: Comparison, text: str, tokens: int) -> str:
    """A text with the length that it is about, where the run has several."""
    return text if len(sides.contexts) == 1 else f"{text}, {length_label(tokens)}"


def plain_words(sides: Comparison) -> str:
    """What serving policies are held against: policy none, the reference of an engine, or each its own."""
    own = [policy for policy in sides.policies if not sides.is_uncompressed(policy)] or sides.policies
    plain = {sides.uncompressed_of(policy) for policy in own}
    if not any(map(sides.is_engine, plain)):
        return "policy none"
    named = ", ".join(sides.label(policy) for policy in sides.uncompressed if policy in plain)
    return named if len(plain) == 1 else f"the uncompressed one of its own engine ({named})"


def named(sides: Comparison, d: Decision) -> str:
    """The suite of a cell, with what is asked of it where that is more than its drift."""
    suite = spelled(sides, d.suite)
    if d.estimand == "selectivity":
        return f"{suite} minus {', '.join(sides.capability)}"
    if d.policies:
        return f"{suite}, worst of {len(d.policies)} policies"
    return f"{suite}, parity" if d.estimand == "parity" else suite


def against(sides: Comparison, d: Decision | Contrast) -> str:
    """The other side of a difference: which arm, under which policy."""
    alike = sides.mode == "training" and d.estimand != "deployed"
    policy = d.policy if alike else sides.uncompressed_of(d.policy)
    return f"{sides.reference} @ {sides.label(policy)}"
