"""The gate file: rules, margins and cells of a verdict in a versioned file of their own, known by its sha256.

What the file leaves out is taken from the gate section of the run's spec. A spec may name a gate file
(``gate.gate_file``); its bytes are then kept in the run's provenance when the run begins. Any other gate file, also
one that says the same, was declared after the run: no exit code is taken from it (``refuse_late``), and a report made
with it says so in red with what it changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from audit.core.errors import DataError, SpecError, UnknownName
from audit.core.yaml_file import YamlFile, clipped, known_keys, parse_yaml, read_yaml, shown
from reports.drift.plan import Plan, read_plan
from reports.gate.pin import Pin
from reports.gate.rules import AFTER_RUN, KEYS, WITH_RUN
from reports.gate.waivers import Waiver, waivers_of
from reports.records.load import RunData

GATE_FORMAT = 1
WHAT = "gate file"


@dataclass(frozen=True)
class Asked:
    """What is asked of a run beyond its spec. ``pin`` is the one that ``gate`` names; ``today`` ends waivers."""

    gate: YamlFile | None = None
    pin: Pin | None = None
    waivers: YamlFile | None = None
    on_inconclusive: str | None = None
    today: date | None = None


def load_gate_file(path: Path) -> YamlFile:
    """A gate file whose keys are known; its values are checked against a run by ``declared_plan``."""
    return _checked(read_yaml(path, WHAT))


def pinned_gate_file(provenance: Mapping[str, Any]) -> YamlFile | None:
    """The gate file that was kept when the run began; raises DataError where its text is not the one hashed."""
    kept = provenance.get("gate_file")
    if kept is None:
        return None
    text, wanted = (kept.get("text"), kept.get("sha256")) if isinstance(kept, Mapping) else (None, None)
    if not isinstance(text, str) or hashlib.sha256(text.encode()).hexdigest() != wanted:
        raise DataError("provenance.json: the text of gate_file does not have the sha256 it was kept with")
    return _checked(parse_yaml(text, str(kept.get("name")), WHAT))


def declared_plan(data: RunData, asked: Asked) -> Plan:
    """The plan that decides a run, with where its rules come from. Raises SpecError and DataError in one line."""
    kept = pinned_gate_file(data.provenance)
    if kept is None and _section(data.spec).get("gate_file") is not None:
        raise DataError("spec.yaml names gate.gate_file, but provenance.json holds none; start another run with --out")
    own = _plan_of(data, kept)
    if asked.gate is None:
        return _tuned(own, asked)
    plan = _plan_of(data, asked.gate)
    with_run = kept is not None and kept.sha256 == asked.gate.sha256
    rules = replace(
        plan.rules,
        declared=WITH_RUN if with_run else AFTER_RUN,
        changes=() if with_run else tuple(changes(own, plan)),
    )
    return _tuned(replace(plan, rules=rules), asked)


def refuse_late(data: RunData, asked: Asked) -> None:
    """Raise SpecError for a gate file that is not the one the run began with: its author may have seen the numbers."""
    if asked.gate is None or not declares_gate(data):
        return
    kept = pinned_gate_file(data.provenance)
    if kept is None or kept.sha256 != asked.gate.sha256:
        own = "its spec's gate section" if kept is None else f"{kept.name}, sha256 {kept.sha256[:12]}"
        raise SpecError(
            f"{asked.gate.name} (sha256 {asked.gate.sha256[:12]}) was not declared with the run, which began with "
            f"{own}; leave --gate out, see what the file would change with kvaudit report --gate, or start a run whose "
            "gate.gate_file names it"
        )


def declares_gate(data: RunData) -> bool:
    """Whether the run began with rules of its own, in its spec or in a gate file kept with it."""
    return bool(_section(data.spec)) or data.provenance.get("gate_file") is not None


def waivers_for(plan: Plan, asked: Asked) -> tuple[Waiver, ...]:
    """The waivers that hold today; raises SpecError for an expired or unknown one."""
    return () if asked.waivers is None else waivers_of(asked.waivers, plan, asked.today or date.today())


def changes(own: Plan, plan: Plan) -> Iterator[str]:
    """What a plan decides differently from the run's own, in words."""
    for name, old, new in (
        ("alpha", own.rules.alpha, plan.rules.alpha),
        ("reference", own.reference, plan.reference),
        ("estimands", own.estimands, plan.estimands),
        ("gated policies", _short(own, own.primary), _short(plan, plan.primary)),
        ("deployable policies", _short(own, own.deployable), _short(plan, plan.deployable)),
        ("gated lengths", own.gated_contexts, plan.gated_contexts),
        ("on_inconclusive", own.rules.on_inconclusive, plan.rules.on_inconclusive),
    ):
        if old != new:
            yield f"{name} {_text(old)} -> {_text(new)}"
    pairs = (("margin", own.margins, plan.margins), ("margin of", own.estimand_margins, plan.estimand_margins))
    for word, before, after in pairs:
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                yield f"{word} {key} {_points(before.get(key))} -> {_points(after.get(key))}"


def overlay(section: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """A gate section with what a gate file says instead; margins are replaced suite by suite."""
    kept = dict(section)
    if "profile" in table or "alpha" in table:  # a level stands in one place
        for key in ("profile", "alpha", "on_inconclusive"):
            kept.pop(key, None)
    merged = {**kept, **{key: value for key, value in table.items() if key != "format"}}
    for key in ("margins", "estimand_margins"):
        old, new = kept.get(key), table.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            merged[key] = {**old, **new}
    return merged


def _checked(file: YamlFile) -> YamlFile:
    known_keys(file.table, ("format", *(key for key in KEYS if key != "gate_file")), file.name)
    if file.table.get("format") != GATE_FORMAT:
        raise SpecError(f"{file.name}: format is {shown(file.table.get('format'))}, wanted {GATE_FORMAT}")
    reference = file.table.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise SpecError(f"{file.name}: reference is {shown(reference)}, wanted the name of an arm")
    return file


def _plan_of(data: RunData, file: YamlFile | None) -> Plan:
    if file is None:
        return read_plan(data.spec, data.records, data.provenance)
    spec = {**data.spec, "gate": overlay(_section(data.spec), file.table)}
    try:
        plan = read_plan(spec, data.records, data.provenance)
        known = {*data.records["arm"].unique(), *plan.candidates, read_plan(data.spec, data.records, {}).reference}
        if plan.reference not in known:
            raise UnknownName("gate.reference", clipped(plan.reference), map(clipped, known))
    except SpecError as error:
        raise SpecError(f"{file.name}: {error}") from None
    return replace(plan, rules=replace(plan.rules, source=file.name, sha256=file.sha256))


def _tuned(plan: Plan, asked: Asked) -> Plan:
    """The plan with the handling of INCONCLUSIVE that the command line gives."""
    rules = replace(plan.rules, on_inconclusive=asked.on_inconclusive or plan.rules.on_inconclusive)
    return replace(plan, rules=rules)


def _section(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    gate = spec.get("gate")
    return gate if isinstance(gate, Mapping) else {}


def _short(plan: Plan, policies: Sequence[str]) -> tuple[str, ...]:
    return tuple(plan.labels[policy] for policy in policies)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _points(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:g} pp"
