"""The disclosure of a run: card.md, the section of a model card; disclosure.json, every fact; bom.json, an ML-BOM.

card.md shows the answers, the grid, and how every arm was trained and served. Besides its tables it has at most 150
words. ``kvaudit card`` inserts it into a model card. disclosure.json holds every other fact, as known, unknown or not
applicable; its schema is docs/disclosure.schema.json. bom.json is a machine-learning bill of materials (CycloneDX 1.6),
whose model cards hold every gated drift with its interval, by policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any
from uuid import UUID

from kvaudit.core.text import inline, length_of
from kvaudit.reports.page.disclosure import (
    DISCLOSURE_FORMAT,
    ArmRecipe,
    Disclosure,
    MeasuredCell,
    disclosure_of,
    findings_of_arm,
)
from kvaudit.reports.page.formats.markdown import escape, grid_parts, pipe_table
from kvaudit.reports.page.page import Page, Screen, screen_of
from kvaudit.reports.page.publish import mask_private
from kvaudit.reports.sections.shared.words import NOT_APPLICABLE, Fact, dump_json, fact_of

MOST_CARD_WORDS = 150  # besides the tables
_ROWS = 24  # of the grid, of which contrasts.csv has all, and of the table of settings
_FACTS = {  # header -> name in the disclosure's recipe
    "rollouts": "rollouts",
    "learner": "learner_view",
    "correction": "correction",
    "distillation": "distillation",
    "trained on": "trained_on",
    "seeds": "seeds",
    "source": "said_by",
}


def render_card(page: Page, arm: str | None = None) -> str:
    """Return the section of the model card, with its heading, on all arms or on ``arm`` alone."""
    disclosure = disclosure_of(page, arm)
    screen = page.screen if arm is None else screen_of(findings_of_arm(page.findings, arm))
    assert screen is not None, "only a run has a card"
    arm_note = "" if arm is None else _fact_text(disclosure.verdict["says"])
    text = "\n\n".join(part for part in _parts(disclosure, screen, arm_note) if part) + "\n"
    return str(mask_private(text, page.findings))


def _parts(disclosure: Disclosure, screen: Screen, arm_note: str) -> Iterator[str]:
    """Yield the paragraphs of the model card's section; ``arm_note`` describes the verdict of one arm."""
    yield "## KV-cache compression"
    if disclosure.verdict["alarm"].state == "known":
        yield f"> **{_fact_text(disclosure.verdict['alarm'])}**"
    yield f"**{_fact_text(disclosure.verdict['status'])}** · " + " · ".join(
        f"{escape(name)} **{escape(text)}**" for name, text in screen.facts
    )
    yield arm_note
    yield "\n".join(f"* {escape(a.asks)} **{escape(a.line)}**" for a in screen.answers if a.groups)
    yield "\n".join(f"* {escape(line)}" for line in screen.suggestions)
    yield from grid_parts(screen.grid, _ROWS)
    if recipes := [recipe for recipe in disclosure.recipes if recipe.role != "base"]:
        yield _recipe_table(recipes)
    yield _serving_table(disclosure)
    if len(disclosure.serving) > _ROWS:
        yield f"{len(disclosure.serving) - _ROWS} more settings were served; disclosure.json lists all."
    if stack := [(name, fact) for name, fact in disclosure.stack.items() if fact.state == "known"]:
        rows = [(escape(name.replace("_", " ")), _fact_text(fact)) for name, fact in stack]
        yield pipe_table(("declared about the stack, not verified", ""), rows, words=2)
    if screen.before_relying:
        yield f"Read first: {escape(screen.before_relying)}."
    yield (
        f"Other suites, lengths and settings: not evaluated. All facts: disclosure.json. kvaudit "
        f"{_fact_text(disclosure.run['kvaudit'])}, spec {_fact_text(disclosure.run['spec_sha256'])[:12]}."
    )


def _recipe_table(recipes: Iterable[ArmRecipe]) -> str:
    """Return a table of how each arm was trained, without columns that are unknown for all arms."""
    rows = [
        (recipe, {head: recipe.facts[name] for head, name in _FACTS.items() if name in recipe.facts})
        for recipe in recipes
    ]
    heads = [head for head in _FACTS if any(head in facts and facts[head].state == "known" for _, facts in rows)]
    cells = [[escape(recipe.arm), *(_fact_text(facts.get(head)) for head in heads)] for recipe, facts in rows]
    return pipe_table(["arm", *heads], cells, words=1 + len(heads))


def _serving_table(disclosure: Disclosure) -> str:
    """Return a table of at most _ROWS serving settings: full name, engine, and how much of the cache each keeps.

    The cache is given as three shares: allocated bytes and live bytes relative to policy ``none``, and entries kept.
    """
    rows = []
    for served in disclosure.serving[:_ROWS]:
        settings = served.get("settings", NOT_APPLICABLE)
        full_name = settings if settings.state == "known" else served["policy"]
        shares = (served[name] for name in ("kv_allocated_of_none", "kv_live_of_none", "retention"))
        rows.append([*map(_fact_text, (full_name, served.get("engine", fact_of("kvaudit")), *shares))])
    headers = ["served under", "engine", "kv allocated of none", "kv live of none", "retention"]
    return pipe_table(headers, rows, words=len(headers))


def _fact_text(fact: Fact | None) -> str:
    """Return a fact's value as text, or its state if it is not known."""
    if fact is None:
        return "-"
    if fact.state != "known":
        return f"*{fact.state}*"
    return escape(_value_text(fact.value)) or "-"


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_value_text(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_value_text(inner) for inner in value)
    return str(value)


def render_disclosure(page: Page) -> str:
    """Return disclosure.json: every fact of the disclosure."""
    return dump_json({"format": DISCLOSURE_FORMAT, **_plain(asdict(disclosure_of(page)))})


def _plain(value: Any) -> Any:
    """Return nested values with every ``Fact`` replaced by a mapping of its ``state`` and, if known, its ``value``."""
    if isinstance(value, Fact):
        return {"state": value.state, **({"value": value.value} if value.state == "known" else {})}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def render_bom(page: Page) -> str:
    """Return bom.json: one component per arm with its training recipe and its drift, and what was not evaluated."""
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
    serial = {"serialNumber": f"urn:uuid:{UUID(bytes=digest[:16], version=4)}"}
    return dump_json(mask_private({**body, **serial}, page.findings))


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
    """Return the hashes of the weights of every seed, in the form of CycloneDX: {alg, content}.

    Values that are no sha256 are left out, because they would not validate.
    """
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


FORMATS = {"card.md": render_card, "disclosure.json": render_disclosure, "bom.json": render_bom}
