"""How a verdict is taken, declared before it: cells, margins, level, and the file they stand in.

A gate file holds what the gate section of a spec holds, versioned on its own and known by its sha256; what it leaves
out is taken from the spec. A spec may name one (``gate.gate_file``); its bytes are then kept in the run's provenance
when the run begins. Any other gate file, also one that says the same, was declared after the run: no exit code is taken
from it (``refuse_late_rules``), and a report made with it says so in red, with what it changes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.facets import ALIKE, DEPLOYED, GATED, SERVING
from kvaudit.core.files import YamlFile, check_keys, parse_yaml, read_yaml
from kvaudit.core.policy_names import DENSE_POLICY, match_policies
from kvaudit.core.provenance import DEFAULT_MARGINS, table_of
from kvaudit.core.spec import GateSpec, RunSpec, with_gate
from kvaudit.core.spec_parts import LEAST_MARGIN
from kvaudit.core.text import short_repr, short_text
from kvaudit.reports.records.load import RunData
from kvaudit.reports.verdict.comparison import Comparison, comparison_of
from kvaudit.reports.verdict.pin import Pin, recorded_pin

CONTRASTED = (ALIKE, DEPLOYED)  # candidate against reference
DEFAULT_SELECTIVITY = 5.0  # pp; parity without a margin of its own takes the suite's
BLOCK, WARN = "block", "warn"
RELEASE = "release"
ON_INCONCLUSIVE = {None: BLOCK, "pr": WARN, RELEASE: BLOCK}  # by profile
DECLARED_WITH_RUN, DECLARED_AFTER_RUN = "declared with the run", "declared after the run"


@dataclass(frozen=True)
class Rules:
    """The declared rules; margins are in score units (0.05 = 5 pp), ``alpha`` is one-sided.

    ``sha256`` is the gate file's, None where the spec's own section decides; ``changes`` says what a gate file that
    came after the run decides differently from it. ``pin`` holds the weights that the reference must have. Where no
    cluster is named, nothing passes unless somebody declares that ``items_are_independent``.
    """

    alpha: float
    margins: dict[str, float]  # by suite, and by SUITE.FACET
    primary: tuple[str, ...]  # the policies that are gated
    contexts: tuple[int, ...]  # the lengths that are gated
    arms: tuple[str, ...] = ()  # the candidates that are gated, all where none is named
    deployable: tuple[str, ...] = ()  # the policies among which worst looks for the worst
    estimands: tuple[str, ...] = CONTRASTED
    estimand_margins: dict[str, float] = field(default_factory=dict)  # of selectivity, of parity where it has its own
    ratios: dict[str, float] = field(default_factory=dict)  # how many times as often at most, instead of a margin
    profile: str | None = None
    on_inconclusive: str = BLOCK
    not_measurable: str = BLOCK
    worst_seed: bool = False  # whether a seed that FAILs alone fails its cell
    pin: Pin | None = None
    source: str = "spec.yaml"
    sha256: str | None = None
    declared: str = DECLARED_WITH_RUN
    changes: tuple[str, ...] = ()
    items_are_independent: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)  # suite -> kind, whose margin nobody declared

    def margin(self, estimand: str, suite: str) -> float | None:
        """The margin of an estimand on a suite, None where none is declared."""
        return self.estimand_margins.get(estimand, self.margins.get(suite))

    def ratio(self, estimand: str, suite: str) -> float | None:
        """The ratio that an estimand on a suite is held to instead of a margin, None where there is none."""
        return None if estimand in self.estimand_margins else self.ratios.get(suite)

    def holds(self, metric: str) -> bool:
        """Whether a suite or facet has a margin, or a ratio."""
        return metric in self.margins or metric in self.ratios


def rules_of(spec: RunSpec, comparison: Comparison) -> Rules:
    """The rules of a complete spec's gate section; raises SpecError for an estimand that its suites cannot have."""
    gate = spec.gate
    assert gate.alpha is not None, "a complete spec has a level"
    primary, deployable = (tuple(match_policies(p, comparison.policies)) for p in (gate.primary, gate.deployable))
    if not primary and comparison.mode == "training":
        primary = comparison.uncompressed or (DENSE_POLICY,)  # arms that were served uncompressed alone are compared so
    return Rules(
        alpha=gate.alpha,
        margins={
            name: gate.margins[name] / 100 for name in (*comparison.suites, *comparison.facets) if name in gate.margins
        },
        primary=primary,
        contexts=gate.contexts or comparison.contexts,
        arms=gate.arms,
        deployable=deployable or primary,
        estimands=_estimands(gate, comparison),
        ratios={name: gate.ratios[name] for name in (*comparison.suites, *comparison.facets) if name in gate.ratios},
        estimand_margins={
            name: points / 100 for name, points in {"selectivity": DEFAULT_SELECTIVITY, **gate.estimand_margins}.items()
        },
        profile=gate.profile,
        on_inconclusive=gate.on_inconclusive or ON_INCONCLUSIVE[gate.profile],
        not_measurable=gate.not_measurable or BLOCK,
        worst_seed=gate.worst_seed,
    )


def _estimands(gate: GateSpec, comparison: Comparison) -> tuple[str, ...]:
    """The estimands that decide, in one order; what compares capability with safety needs suites of both kinds."""
    kinds = {"capability": bool(comparison.capability), "safety": bool(comparison.safety)}
    for name, needed in (("selectivity", ("safety", "capability")), ("parity", ("capability",))):
        for kind in needed:
            if name in gate.estimands and not kinds[kind]:
                suites = ", ".join(map(short_text, comparison.suites))
                raise SpecError(f"gate.estimands asks {name}, but no suite measures {kind}: {suites}")
    if "parity" in gate.estimands and "parity" not in gate.estimand_margins:
        held = [suite for suite in comparison.capability if suite in gate.ratios]
        if held:
            raise SpecError(
                f"gate.estimands asks parity, whose margin is that of the suite, but {short_text(held[0])} has a "
                "ratio; give gate.estimand_margins.parity"
            )
    if "selectivity" in gate.estimands:
        _check_selectivity(comparison, gate.contexts or comparison.contexts)
    asked = set(gate.estimands)
    if comparison.mode == "serving" and asked & {*CONTRASTED}:
        asked = {SERVING, *asked} - {*CONTRASTED}  # with one checkpoint there is nothing else to be alike
    return tuple(name for name in GATED if name in asked)


def _check_selectivity(comparison: Comparison, gated: Sequence[int]) -> None:
    """Raise SpecError where safety was asked at a gated length at which nothing measured capability."""
    capability = {length for suite in comparison.capability for length in comparison.lengths[suite]}
    for suite in comparison.safety:
        for length in comparison.lengths[suite]:
            if length in gated and length not in capability:
                raise SpecError(
                    f"gate.estimands asks selectivity, but no suite measures capability at the {length} tokens of "
                    f"{short_text(suite)}; ask one there: evaluate.suites.NAME.context_tokens"
                )


def default_margins_line(kinds: Mapping[str, str], margins: Mapping[str, float]) -> str:
    """Which of the ``margins``, in pp, are defaults, by the kind of their suites; empty where all were declared."""
    found, parts = {suite: (kind, margins[suite]) for suite, kind in kinds.items()}, []
    for kind, points in dict.fromkeys(found.values()):
        own = [suite for suite, both in found.items() if both == (kind, points)]
        parts.append(f"{', '.join(own)} {points:g} pp, the default of {kind} suites")
    return f"MARGINS not declared: {'; '.join(parts)}. Declare your own in gate.margins." if parts else ""


def margin_of(points: Any, name: str) -> float:
    """A margin given in percentage points, in score units; raises SpecError for one that cannot be."""
    if isinstance(points, bool) or not isinstance(points, int | float) or not 0 < points < 100:
        raise SpecError(f"{name} is {short_repr(points)}, wanted a number above 0 and below 100")
    if points < LEAST_MARGIN or not math.isfinite(points):
        raise SpecError(f"{name} is {points:g}, wanted at least {LEAST_MARGIN} (percentage points)")
    return float(points) / 100


GATE_FORMAT = 1
WHAT = "gate file"


@dataclass(frozen=True)
class GateOverrides:
    """What is asked of a run beyond its spec. ``pin`` is the one that ``gate`` names; ``today`` ends waivers."""

    gate: YamlFile | None = None
    pin: Pin | None = None
    waivers: YamlFile | None = None
    on_inconclusive: str | None = None
    today: date | None = None


def load_gate_file(path: Path) -> YamlFile:
    """A gate file whose keys are known; its values are checked against a run by ``declared_rules``."""
    return _checked(read_yaml(path, WHAT))


def recorded_gate_file(provenance: Mapping[str, Any]) -> YamlFile | None:
    """The gate file that was kept when the run began; raises DataError where its text is not the one hashed."""
    kept = provenance.get("gate_file")
    if kept is None:
        return None
    text, wanted = (kept.get("text"), kept.get("sha256")) if isinstance(kept, Mapping) else (None, None)
    if not isinstance(text, str) or hashlib.sha256(text.encode()).hexdigest() != wanted:
        raise DataError("provenance.json: the text of gate_file does not have the sha256 it was kept with")
    return _checked(parse_yaml(text, str(kept.get("name")), WHAT))


def declared_rules(data: RunData, asked: GateOverrides) -> tuple[Comparison, Rules]:
    """What decides a run, with where its rules come from. Raises SpecError and DataError in one line."""
    kept = recorded_gate_file(data.provenance)
    if kept is None and data.spec.gate.gate_file is not None:
        raise DataError("spec.yaml names gate.gate_file, but provenance.json holds none; start another run with --out")
    comparison, rules = own = _taken(data, kept, None)  # also beside another gate file: it is told by what it changes
    if asked.gate is not None:
        comparison, rules = _taken(data, asked.gate, asked.pin)
        if kept is None or kept.sha256 != asked.gate.sha256:
            rules = replace(rules, declared=DECLARED_AFTER_RUN, changes=tuple(changes(*own, comparison, rules)))
    return comparison, replace(rules, on_inconclusive=asked.on_inconclusive or rules.on_inconclusive)


def refuse_late_rules(rules: Rules) -> None:
    """Raise SpecError for a gate file that is not the one the run began with: its author may have seen the numbers."""
    if rules.declared == DECLARED_AFTER_RUN:
        raise SpecError(
            f"{rules.source} (sha256 {(rules.sha256 or '')[:12]}) was not declared with the run and changes "
            f"{'; '.join(rules.changes) or 'nothing that decides'}; leave --gate out, look at what it would say with "
            "kvaudit report --gate, or start a run whose gate.gate_file names it"
        )


def changes(own: Comparison, before: Rules, comparison: Comparison, rules: Rules) -> Iterator[str]:
    """What rules decide differently from the run's own, in words."""
    for name, old, new in (
        ("profile", before.profile or "none", rules.profile or "none"),
        ("alpha", before.alpha, rules.alpha),
        ("reference", own.reference, comparison.reference),
        ("estimands", before.estimands, rules.estimands),
        ("gated arms", before.arms or own.candidates, rules.arms or comparison.candidates),
        ("gated policies", _short(own, before.primary), _short(comparison, rules.primary)),
        ("deployable policies", _short(own, before.deployable), _short(comparison, rules.deployable)),
        ("gated lengths", before.contexts, rules.contexts),
        ("on_inconclusive", before.on_inconclusive, rules.on_inconclusive),
        ("not_measurable", before.not_measurable, rules.not_measurable),
        ("worst_seed", before.worst_seed, rules.worst_seed),
    ):
        if old != new:
            yield f"{name} {_text(old)} -> {_text(new)}"
    pairs = (
        ("margin", before.margins, rules.margins),
        ("margin of", before.estimand_margins, rules.estimand_margins),
    )
    yield from (
        f"ratio of {key} {_times(before.ratios.get(key))} -> {_times(rules.ratios.get(key))}"
        for key in sorted({*before.ratios, *rules.ratios})
        if before.ratios.get(key) != rules.ratios.get(key)
    )
    for word, older, newer in pairs:
        for key in sorted({*older, *newer}):
            if older.get(key) != newer.get(key):
                yield f"{word} {key} {_points(older.get(key))} -> {_points(newer.get(key))}"


def _checked(file: YamlFile) -> YamlFile:
    check_keys(file.table, ("format", *(key for key in GateSpec.model_fields if key != "gate_file")), file.name)
    if file.table.get("format") != GATE_FORMAT:
        raise SpecError(f"{file.name}: format is {short_repr(file.table.get('format'))}, wanted {GATE_FORMAT}")
    return file


def _taken(data: RunData, file: YamlFile | None, pin: Pin | None) -> tuple[Comparison, Rules]:
    """Comparison and rules of the spec, with a gate file's in place of its own; ``pin`` is the one that it names."""
    spec = data.spec if file is None else with_gate(data.spec, file)
    comparison = comparison_of(spec, data.records, data.provenance)
    try:
        rules = rules_of(spec, comparison)
    except SpecError as error:
        raise SpecError(f"{'spec.yaml' if file is None else file.name}: {error}") from None
    if spec.gate.pin is not None:
        rules = replace(rules, pin=pin or recorded_pin(data.provenance))
    declared_rules = file.table.get("margins") if file is not None else None
    left = {suite: kind for suite, kind in table_of(data.provenance, DEFAULT_MARGINS).items() if suite in rules.margins}
    # what a gate file declares itself is no default any more
    rules = replace(
        rules, defaults={suite: kind for suite, kind in left.items() if suite not in (declared_rules or {})}
    )
    return comparison, rules if file is None else replace(rules, source=file.name, sha256=file.sha256)


def _short(comparison: Comparison, policies: Sequence[str]) -> tuple[str, ...]:
    return tuple(comparison.labels[policy] for policy in policies)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _times(value: float | None) -> str:
    return "none" if value is None else f"{value:g} x"


def _points(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:g} pp"
