"""The files for programs: verdict.json has answers and gated cells, drift.json the verdict and all sections in full.

verdict.json is under 50 kB; its schema is docs/verdict.schema.json. Both are ASCII only, without NaN. The contrasts are
in contrasts.csv.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any

from kvaudit.reports.page.answers import Answer, answers, metric_text, question_of, severity_order, subject_of
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.page import Page
from kvaudit.reports.sections.base import sections
from kvaudit.reports.sections.shared.words import dump_json, event_rates, facet_of_metric
from kvaudit.reports.verdict.row import row_of
from kvaudit.reports.verdict.rules import Ratio
from kvaudit.reports.verdict.verdict import Decision

_VERDICT_FORMAT = 2  # 1 had no pvalue and no reasons
_DRIFT_FORMAT = 4  # 3 named a control's measurability "standing"
_CELLS = 80  # the gravest; contrasts.csv holds all
_NAMES, _CHARACTERS = 50, 200  # subjects of one answer, and the length of a text


def render_verdict(page: Page) -> str:
    """Return verdict.json: status, rules, answers and gated cells."""
    findings = page.findings
    verdict, rules, provenance = findings.verdict, findings.rules, findings.provenance
    gated = verdict.gated
    shown_cells = {id(d) for d in sorted(gated, key=severity_order(findings.comparison))[:_CELLS]}
    return dump_json(
        {
            "format": _VERDICT_FORMAT,
            "run": findings.drift.run[:_CHARACTERS],
            "status": verdict.status.value,
            "exit_code": verdict.exit_code,
            "model": findings.model[:_CHARACTERS],
            "reference": findings.comparison.reference,
            "finished": provenance.get("finished") or provenance.get("started"),
            "spec_sha256": provenance.get("spec_sha256"),
            "base_sha256": provenance.get("base_sha256"),
            "rules": {"source": rules.source, "declared": rules.declared, "alpha": rules.alpha, "sha256": rules.sha256},
            "answers": [_answer(answer) for answer in answers(findings)],
            "cells": [_cell(findings, d) for d in gated if id(d) in shown_cells],
            "cells_left_out": len(gated) - len(shown_cells),
            "remarks": [line[:_CHARACTERS] for line in page.remarks[:_NAMES]],
            "alarm": page.banner.alarm,
        }
    )


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "question": answer.question,
        "asks": answer.asks,
        "asked": bool(answer.groups),
        "groups": [
            {
                "status": group.status.value,
                "word": group.word,
                "subjects": [name[:_CHARACTERS] for name in group.subjects[:_NAMES]],
                "subjects_left_out": max(0, len(group.subjects) - _NAMES),
                "why": group.why,
            }
            for group in answer.groups
        ],
    }


def _cell(findings: Findings, d: Decision) -> dict[str, Any]:
    """Return the entry of a gated cell in verdict.json.

    ``before`` and ``after`` are rates of the event named in ``counts``; ``drift``, its bounds and ``margin`` are in
    terms of the wanted outcome.

    If the limit is on a ratio of rates, ``margin`` is the loss that it allows at the reference's rate, in score units.
    """
    sides, facet = findings.comparison, facet_of_metric(findings.comparison, d.suite)
    row = row_of(sides, None, d)
    before, after = event_rates(sides, d) or (None, None)
    return {
        "question": question_of(sides, d),
        "subject": subject_of(sides, d)[:_CHARACTERS],
        "contrast": row.estimand,
        "arm": row.arm,
        "policy": row.label,
        "metric": row.metric,
        "context_tokens": row.context_tokens,
        "counts": metric_text(sides, d),
        "wanted": facet is None or facet.wanted,
        "before": _short(before),
        "after": _short(after),
        "drift": _short(row.estimate),
        "lower": _short(row.lower),
        "upper": _short(row.upper),
        "margin": row.margin if row.ratio_limit is None else _short(row.margin),
        **({"ratio": _ratio(d.ratio)} if d.ratio else {}),
        "items": row.items or 0,
        "templates": row.templates or 0,
        "pvalue": None if row.pvalue is None else float(f"{row.pvalue:.4g}"),  # a small one is not 0
        "status": row.status,
        "reasons": [reason.code for reason in row.reasons],
        "waived": d.waiver is not None,
    }


def _ratio(ratio: Ratio) -> dict[str, Any]:
    """Return how many times as often the unwanted outcome occurred, with bounds and limit; an infinite end is null."""
    ends = {name: _short(getattr(ratio.times, name)) for name in ("estimate", "low", "high", "lower", "upper")}
    return {"limit": ratio.limit, **ends}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def render_drift(page: Page) -> str:
    """Return drift.json: the findings, without the contrasts, which are in contrasts.csv."""
    findings = page.findings
    # emptied first, since asdict would copy them, which takes long
    body: dict[str, Any] = {"format": _DRIFT_FORMAT, **asdict(replace(findings.drift, contrasts=(), answers={}))}
    for name in ("answers", "contrasts", "files", "idle"):  # idle and files only decide, and provenance has the files
        del body[name]
    entries = [*verdict_facts(page)]
    for section in sections():
        facts = section.facts(findings.values.get(section.name))
        entries += [(place, key, facts[key]) for key, place in section.keys.items()]
    for _, key, value in sorted(entries, key=itemgetter(0)):
        group, _, name = key.rpartition(".")
        (body.setdefault(group, {}) if group else body)[name] = value
    return dump_json(body)


def verdict_facts(page: Page) -> Iterator[tuple[int, str, Any]]:
    """Yield (position, key, value) of each entry of drift.json that comes from the verdict or the run.

    Entries are written in the order of their positions; those of report sections are added elsewhere.
    """
    findings = page.findings
    rules, verdict = asdict(findings.rules), asdict(findings.verdict)
    if not findings.rules.ratios:  # older files without ratios stay byte-identical
        del rules["ratios"]
    for decision in verdict["decisions"]:
        if decision["ratio"] is None:
            del decision["ratio"]
    yield 20, "rules", rules
    yield 50, "calibration", asdict(findings.calibration) if findings.calibration else None
    yield 60, "verdict", {**verdict, "annotations": page.remarks, "alarm": page.banner.alarm}
    yield 100, "waivers", [asdict(waiver) for waiver in findings.waivers]
    yield 140, "problems", findings.problems
    yield 150, "provenance", findings.provenance


FORMATS = {"verdict.json": render_verdict, "drift.json": render_drift}
