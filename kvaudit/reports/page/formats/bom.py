"""bom.json: a CycloneDX 1.6 ML-BOM, whose model card holds every gated drift with its interval, sliced by policy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from kvaudit.core.text import inline, length_of
from kvaudit.reports.page.disclosure import ArmRecipe, Disclosure, Measured, disclosure_of
from kvaudit.reports.page.page import Page
from kvaudit.reports.page.servers import without_servers
from kvaudit.reports.sections.shared.facts import Fact, dump_json

FILE = "bom.json"


def render(page: Page) -> str:
    """One model per recipe, what was measured of each, and what nobody measured; text of strangers stays text."""
    told = disclosure_of(page)
    components = [_component(told, recipe) for recipe in told.recipes]
    kvaudit = told.run["kvaudit"]
    version = {"version": inline(str(kvaudit.value))} if kvaudit.state == "known" else {}
    body = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "kvaudit", **version}]},
            "properties": [row for group, facts in _groups(told) for row in _properties(group, facts)],
        },
        "components": components,
    }
    # two documents that differ in anything, a waiver too, have two serial numbers; a clock would give one run many
    digest = hashlib.sha256(dump_json(body).encode()).digest()
    whole = dump_json({**body, "serialNumber": f"urn:uuid:{UUID(bytes=digest[:16], version=4)}"})
    return without_servers(whole, page.findings)


def _groups(told: Disclosure) -> Iterator[tuple[str, Mapping[str, Fact]]]:
    yield from ((name, getattr(told, name)) for name in ("verdict", "run", "model", "reference"))
    yield from (("not_evaluated", told.not_evaluated), ("judging", told.judging))
    for number, served in enumerate(told.serving, 1):
        if "engine" in served:  # of a run without engines every metric names its policy
            yield f"served_{number}", served


def _component(told: Disclosure, recipe: ArmRecipe) -> dict[str, Any]:
    gated = [m for m in told.drift if m.arm == recipe.arm and m.verdict != "not gated"]
    own, silent = [m for m in gated if m.estimate is not None], [m for m in gated if m.estimate is None]
    facts = {**recipe.facts, **{f"mismatch.{k}": v for k, v in recipe.mismatch.items()}, **recipe.mask_schedule}
    return {
        "type": "machine-learning-model",
        "bom-ref": f"kvaudit-arm-{hashlib.sha256(recipe.arm.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}",
        "name": inline(recipe.arm),
        "description": f"{recipe.role} of a KV-cache compression audit",
        "hashes": _hashes(recipe.facts.get("weights_sha256")),
        "modelCard": {
            "quantitativeAnalysis": {"performanceMetrics": [_metric(m) for m in own]},
            "considerations": {"technicalLimitations": [inline(line) for line in told.limits]},
        },
        "properties": [
            *_properties("rollouts", facts),
            *({"name": "kvaudit:no_number", "value": inline(f"{m.slice}: {m.verdict}, {m.why}")} for m in silent),
        ],
    }


def _metric(m: Measured) -> dict[str, Any]:
    where = f"{m.estimand}, {m.policy} ({m.policy_hash.value or m.policy_hash.state}), {length_of(m.context_tokens)}"
    return {
        "type": inline(f"drift of {m.says} in percentage points, limit {m.held_to or 'none'}: {m.verdict}"),
        "value": f"{100 * (m.estimate or 0.0):.4g}",
        "slice": inline(where),
        "confidenceInterval": {
            "lowerBound": f"{100 * (m.low or 0.0):.4g}",
            "upperBound": f"{100 * (m.high or 0.0):.4g}",
        },
    }


def _hashes(fact: Fact | None) -> list[dict[str, str]]:
    """The weights of every seed; what is no sha256 is no hash of a document that must validate."""
    if fact is None or fact.state != "known":
        return []
    digests = [str(digest) for digest in fact.value.values()]
    whole = [d for d in digests if len(d) == 64 and set(d) <= set("0123456789abcdef")]
    return [{"alg": "SHA-256", "content": digest} for digest in whole]


def _properties(group: str, facts: Mapping[str, Fact]) -> Iterator[dict[str, str]]:
    for name, fact in facts.items():
        lines = fact.value if isinstance(fact.value, list) else [fact.value if fact.state == "known" else fact.state]
        for line in lines:
            yield {"name": f"kvaudit:{group}:{name}", "value": inline(str(line))}
