"""How a verdict is taken: the part of a gate section that a spec and a gate file share, read and checked by hand.

Profiles: ``pr`` has alpha .05 and lets an INCONCLUSIVE verdict through with a warning, ``release`` has alpha .025 and
blocks it. A section without a profile has alpha .05 and blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from audit.core.errors import SpecError, UnknownName
from audit.core.yaml_file import clipped, known_keys, shown

GATED_ESTIMANDS = ("E1", "E2", "E3", "selectivity", "parity")
DEFAULT_ESTIMANDS = ("E1", "E2")
DEFAULT_ALPHA = 0.05
DEFAULT_SELECTIVITY = 5.0  # pp; parity without a margin of its own takes the suite's
OWN_MARGINS = ("selectivity", "parity")
BLOCK, WARN = "block", "warn"
WITH_RUN, AFTER_RUN = "declared with the run", "declared after the run"
KEYS = (
    *("reference", "profile", "alpha", "margins", "estimand_margins", "primary", "contexts", "deployable"),
    *("estimands", "on_inconclusive", "pin", "gate_file"),
)


class Profile(NamedTuple):
    """One-sided level, and what happens to INCONCLUSIVE."""

    alpha: float
    on_inconclusive: str


PROFILES = {"pr": Profile(0.05, WARN), "release": Profile(0.025, BLOCK)}
LEAST_MARGIN = 0.01  # percentage points: no sample shows less


@dataclass(frozen=True)
class Rules:
    """The declared rules beside margins and cells. ``alpha`` is one-sided; ``sha256`` is the gate file's, if any.

    ``changes`` says what a gate file decides differently from the spec of the run, ``pin`` names the file of the pinned
    reference as it was written.
    """

    profile: str | None = None
    alpha: float = DEFAULT_ALPHA
    on_inconclusive: str = BLOCK
    pin: str | None = None
    source: str = "spec.yaml"
    sha256: str | None = None
    declared: str = WITH_RUN
    changes: tuple[str, ...] = ()


def read_rules(gate: Mapping[str, Any]) -> Rules:
    """The rules of a gate section; raises SpecError for what cannot be used."""
    profile = gate.get("profile")
    if profile is not None and (not isinstance(profile, str) or profile not in PROFILES):
        raise UnknownName("gate.profile", clipped(profile), PROFILES)
    known = PROFILES[profile] if profile is not None else Profile(DEFAULT_ALPHA, BLOCK)
    alpha = number(gate["alpha"], "gate.alpha", 0.5) if gate.get("alpha") is not None else known.alpha
    if profile is not None and not math.isclose(alpha, known.alpha):
        raise SpecError(f"gate.alpha is {alpha:g}, profile {profile} has {known.alpha:g}; give one of the two")
    pin = gate.get("pin")
    if pin is not None and not (isinstance(pin, str) and pin):
        raise SpecError(f"gate.pin is {shown(pin)}, wanted the path of a pin file (kvaudit pin CHECKPOINT)")
    return Rules(
        profile=profile,
        alpha=alpha,
        on_inconclusive=_choice(gate, known.on_inconclusive),
        pin=pin,
    )


def estimands(gate: Mapping[str, Any], asked: Sequence[str]) -> tuple[str, ...]:
    """The estimands that decide, in the order of ``GATED_ESTIMANDS``; ``asked`` are the names in the section."""
    names = list(asked) or list(DEFAULT_ESTIMANDS)
    unknown = [name for name in names if name not in GATED_ESTIMANDS]
    if unknown:
        raise SpecError(f"gate.estimands names {clipped(unknown[0])!r}, known: {', '.join(GATED_ESTIMANDS)}")
    if gate.get("estimands") is not None and not asked:
        raise SpecError(f"gate.estimands is empty, known: {', '.join(GATED_ESTIMANDS)}")
    return tuple(name for name in GATED_ESTIMANDS if name in names)


def estimand_margins(gate: Mapping[str, Any]) -> dict[str, float]:
    """Margins of selectivity and parity in score units; parity is absent where each suite's own margin holds."""
    given = gate.get("estimand_margins") or {}
    if not isinstance(given, Mapping):
        raise SpecError(f"gate.estimand_margins is {shown(given)}, wanted estimand: percentage points")
    known_keys(given, OWN_MARGINS, "gate.estimand_margins")
    merged = {"selectivity": DEFAULT_SELECTIVITY, **given}
    return {name: margin_of(value, f"gate.estimand_margins.{name}") for name, value in merged.items()}


def margin_of(value: Any, name: str) -> float:
    """A margin given in percentage points, in score units."""
    points = number(value, name, 100.0)
    if points < LEAST_MARGIN:
        raise SpecError(f"{name} is {points:g}, wanted at least {LEAST_MARGIN} (percentage points)")
    return points / 100


def number(value: Any, name: str, below: float) -> float:
    """A finite number in (0, below)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < below:
        raise SpecError(f"{name} is {shown(value)}, wanted a number above 0 and below {below:g}")
    return float(value)


def _choice(gate: Mapping[str, Any], default: str) -> str:
    value = gate.get("on_inconclusive")
    if value is None:
        return default
    if value not in (BLOCK, WARN):
        raise SpecError(f"gate.on_inconclusive is {shown(value)}, wanted {BLOCK} or {WARN}")
    return str(value)
