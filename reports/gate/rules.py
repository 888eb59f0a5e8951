"""How a verdict is taken: which cells, against which margins, at which level, declared where.

Profiles: ``pr`` has alpha .05 and lets an INCONCLUSIVE verdict through with a warning, ``release`` has alpha .025 and
blocks it. A section without a profile has alpha .05 and blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from audit.core.errors import SpecError
from audit.core.numbers import LEAST_MARGIN
from audit.core.policy_names import match_policies
from audit.core.spec import CODES, GateSpec, RunSpec
from audit.core.yaml_file import clipped, shown
from reports.drift.comparison import Comparison
from reports.gate.pin import Pin

DEFAULT_ESTIMANDS = ("E1", "E2")
DEFAULT_SELECTIVITY = 5.0  # pp; parity without a margin of its own takes the suite's
BLOCK, WARN = "block", "warn"
ON_INCONCLUSIVE = {None: BLOCK, "pr": WARN, "release": BLOCK}  # by profile
WITH_RUN, AFTER_RUN = "declared with the run", "declared after the run"


@dataclass(frozen=True)
class Rules:
    """The declared rules; margins are in score units (0.05 = 5 pp), ``alpha`` is one-sided.

    ``sha256`` is the gate file's, None where the spec's own section decides; ``changes`` says what a gate file that
    came after the run decides differently from it. ``pin`` holds the weights that the reference must have.
    """

    alpha: float
    margins: dict[str, float]  # by suite
    primary: tuple[str, ...]  # the policies that are gated
    contexts: tuple[int, ...]  # the lengths that are gated
    deployable: tuple[str, ...] = ()  # the policies among which E3 looks for the worst
    estimands: tuple[str, ...] = DEFAULT_ESTIMANDS  # that decide, in mode "training"
    estimand_margins: dict[str, float] = field(default_factory=dict)  # of selectivity, of parity where it has its own
    profile: str | None = None
    on_inconclusive: str = BLOCK
    pin: Pin | None = None
    source: str = "spec.yaml"
    sha256: str | None = None
    declared: str = WITH_RUN
    changes: tuple[str, ...] = ()

    def margin(self, estimand: str, suite: str) -> float | None:
        """The margin of an estimand on a suite, None where none is declared."""
        return self.estimand_margins.get(estimand, self.margins.get(suite))


def rules_of(spec: RunSpec, comparison: Comparison) -> Rules:
    """The rules of a complete spec's gate section; raises SpecError for an estimand that its suites cannot have."""
    gate = spec.gate
    assert gate.alpha is not None, "a complete spec has a level"
    primary, deployable = (tuple(match_policies(p, comparison.policies)) for p in (gate.primary, gate.deployable))
    return Rules(
        alpha=gate.alpha,
        margins={suite: gate.margins[suite] / 100 for suite in comparison.suites if suite in gate.margins},
        primary=primary,
        contexts=gate.contexts or comparison.contexts,
        deployable=deployable or primary,
        estimands=_estimands(gate, comparison),
        estimand_margins={
            name: points / 100 for name, points in {"selectivity": DEFAULT_SELECTIVITY, **gate.estimand_margins}.items()
        },
        profile=gate.profile,
        on_inconclusive=gate.on_inconclusive or ON_INCONCLUSIVE[gate.profile],
    )


def _estimands(gate: GateSpec, comparison: Comparison) -> tuple[str, ...]:
    """The estimands that decide, in one order; what compares capability with safety needs suites of both kinds."""
    kinds = {"capability": bool(comparison.capability), "safety": bool(comparison.safety)}
    for name, needed in (("selectivity", ("safety", "capability")), ("parity", ("capability",))):
        for kind in needed:
            if name in gate.estimands and not kinds[kind]:
                suites = ", ".join(map(clipped, comparison.suites))
                raise SpecError(f"gate.estimands asks {name}, but no suite measures {kind}: {suites}")
    return tuple(name for name in CODES if name in gate.estimands)


def margin_of(points: Any, name: str) -> float:
    """A margin given in percentage points, in score units; raises SpecError for one that cannot be."""
    if isinstance(points, bool) or not isinstance(points, int | float) or not 0 < points < 100:
        raise SpecError(f"{name} is {shown(points)}, wanted a number above 0 and below 100")
    if points < LEAST_MARGIN or not math.isfinite(points):
        raise SpecError(f"{name} is {points:g}, wanted at least {LEAST_MARGIN} (percentage points)")
    return float(points) / 100
