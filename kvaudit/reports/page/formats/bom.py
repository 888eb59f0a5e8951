"""bom.json: a CycloneDX 1.6 ML-BOM whose model cards hold every gated drift with its interval, by policy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from kvaudit.core.text import inline, length_of
from kvaudit.reports.page.disclosure import ArmRecipe, Disclosure, MeasuredCell, disclosure_of
from kvaudit.reports.page.page import Page
from kvaudit.reports.page.publish import mask_private
from kvaudit.reports.sections.shared.words import Fact, dump_json

FILE = "bom.json"


def render(page: Page) -> str:
    """Return one component per recipe with its drift, and what was not evaluated."""
    disclosure = disclosure_of(page)
    components = [_component(disclosure, recipe) for recipe in disclosure.recipes]
    kvaudit = disclosure.run["kvaudit"]
    version = {"version": inline(str(kvaudit.value))} if kvaudit.state == "known" else {}
    body = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "kvaudit", **version}]},
            "properties": [row for group, facts in _groups(disclosure) for row in _properties(group, facts)],
        },
        "components": components,
    }
    # the serial number is a hash: documents that differ have different ones, and a rerun keeps it
    digest = hashlib.sha256(dump_json(body).encode()).digest()
    text = dump_json({**body, "serialNumber": f"urn:uuid:{UUID(bytes=digest[:16], version=4)}"})
    return mask_private(text, page.findings)


def _groups(disclosure: Disclosure) -> Iterator[tuple[str, Mapping[str, Fact]]]:
    yield from ((name, getattr(disclosure, name)) for name in ("verdict", "run", "model", "reference"))
    yield from (("not_evaluated", disclosure.not_evaluated), ("judging", disclosure.judging))
    for number, served in enumerate(disclosure.serving, 1):
        if "engine" in served:  # without engines the metrics name their policies
            yield f"served_{number}", served


def _component(disclosure: Disclosure, recipe: ArmRecipe) -> dict[str, Any]:
    gated = [m for m in disclosure.drift if m.arm == recipe.arm and m.verdict != "not gated"]
    measured, unmeasured = [m for m in gated if m.estimate is not None], [m for m in gated if m.estimate is None]
    facts = {**recipe.facts, **{f"mismatch.{k}": v for k, v in recipe.mismatch.items()}, **recipe.mask_schedule}
    return {
        "type": "machine-learning-model",
        "bom-ref": f"kvaudit-arm-{hashlib.sha256(recipe.arm.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}",
        "name": inline(recipe.arm),
        "description": f"{recipe.role} of a KV-cache compression audit",
        "hashes": _hashes(recipe.facts.get("weights_sha256")),
        "modelCard": {
            "quantitativeAnalysis": {"performanceMetrics": [_metric(m) for m in measured]},
            "considerations": {"technicalLimitations": [inline(line) for line in disclosure.limits]},
        },
        "properties": [
            *_properties("rollouts", facts),
            *({"name": "kvaudit:no_number", "value": inline(f"{m.slice}: {m.verdict}, {m.why}")} for m in unmeasured),
        ],
    }


def _metric(m: MeasuredCell) -> dict[str, Any]:
    slice_text = (
        f"{m.estimand}, {m.policy} ({m.policy_hash.value or m.policy_hash.state}), {length_of(m.context_tokens)}"
    )
    return {
        "type": inline(f"drift of {m.says} in percentage points, limit {m.held_to or 'none'}: {m.verdict}"),
        "value": f"{100 * (m.estimate or 0.0):.4g}",
        "slice": inline(slice_text),
        "confidenceInterval": {
            "lowerBound": f"{100 * (m.low or 0.0):.4g}",
            "upperBound": f"{100 * (m.high or 0.0):.4g}",
        },
    }


def _hashes(fact: Fact | None) -> list[dict[str, str]]:
    """Return the hashes of the weights of every seed, without values that are no sha256, which would not validate."""
    if fact is None or fact.state != "known":
        return []
    digests = [str(digest) for digest in fact.value.values()]
    valid = [d for d in digests if len(d) == 64 and set(d) <= set("0123456789abcdef")]
    return [{"alg": "SHA-256", "content": digest} for digest in valid]


def _properties(group: str, facts: Mapping[str, Fact]) -> Iterator[dict[str, str]]:
    for name, fact in facts.items():
        lines = fact.value if isinstance(fact.value, list) else [fact.value if fact.state == "known" else fact.state]
        for line in lines:
            yield {"name": f"kvaudit:{group}:{name}", "value": inline(str(line))}
