"""verdict.json: the answers and the gated cells for machines, under 50 kB; its schema is docs/verdict.schema.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvaudit.reports.page.answers import Answer, answers, gravest, question_of, subject_of, what_counts
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.page import Page
from kvaudit.reports.sections.shared.facts import dump_json
from kvaudit.reports.sections.shared.words import event_rates, facet_of_metric
from kvaudit.reports.verdict.ratios import Ratio
from kvaudit.reports.verdict.row import Row, row_of
from kvaudit.reports.verdict.verdict import Decision

FILE = "verdict.json"
_FORMAT = 2  # 1 had no pvalue and no reasons
_CELLS = 80  # the gravest; all of them stand in contrasts.csv
_NAMES, _CHARACTERS = 50, 200  # subjects of one answer, and the length of a text


def render(page: Page) -> str:
    """What was decided, and of what."""
    found = page.findings
    verdict, rules, provenance = found.verdict, found.rules, found.provenance
    gated = verdict.gated
    kept = {id(d) for d in sorted(gated, key=gravest(found.comparison))[:_CELLS]}
    return dump_json(
        {
            "format": _FORMAT,
            "run": found.drift.run[:_CHARACTERS],
            "status": verdict.status.value,
            "exit_code": verdict.exit_code,
            "model": found.model[:_CHARACTERS],
            "reference": found.comparison.reference,
            "finished": provenance.get("finished") or provenance.get("started"),
            "spec_sha256": provenance.get("spec_sha256"),
            "base_sha256": provenance.get("base_sha256"),
            "rules": {"source": rules.source, "declared": rules.declared, "alpha": rules.alpha, "sha256": rules.sha256},
            "answers": [_answer(answer) for answer in answers(found)],
            "cells": [_cell(found, d) for d in gated if id(d) in kept],
            "cells_left_out": len(gated) - len(kept),
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


# name in a cell -> its value, in the order of the file
_COLUMNS: Mapping[str, Callable[[Row], Any]] = {
    "contrast": lambda row: row.estimand,
    "arm": lambda row: row.arm,
    "policy": lambda row: row.label,
    "metric": lambda row: row.metric,
    "context_tokens": lambda row: row.context_tokens,
}
_NUMBERS: Mapping[str, Callable[[Row], Any]] = {
    "drift": lambda row: _short(row.estimate),
    "lower": lambda row: _short(row.lower),
    "upper": lambda row: _short(row.upper),
    "margin": lambda row: row.margin if row.ratio_limit is None else _short(row.margin),
}
_COUNTS: Mapping[str, Callable[[Row], Any]] = {
    "items": lambda row: row.items or 0,
    "templates": lambda row: row.templates or 0,
    "pvalue": lambda row: _short(row.pvalue),
    "status": lambda row: row.status,
    "reasons": lambda row: [reason.code for reason in row.reasons],
}


def _cell(found: Findings, d: Decision) -> dict[str, Any]:
    """Rates are shares of what ``counts`` names; ``drift``, its bounds and ``margin`` count what is wanted.

    Where a ratio decides, ``margin`` is what its limit comes to at the reference's rate.
    """
    sides, row, facet = found.comparison, row_of(found.comparison, None, d), facet_of_metric(found.comparison, d.suite)
    before, after = event_rates(sides, d) or (None, None)
    return {
        "question": question_of(sides, d),
        "subject": subject_of(sides, d)[:_CHARACTERS],
        **{name: value(row) for name, value in _COLUMNS.items()},
        "counts": what_counts(sides, d),
        "wanted": facet is None or facet.wanted,
        "before": _short(before),
        "after": _short(after),
        **{name: value(row) for name, value in _NUMBERS.items()},
        **({"ratio": _ratio(d.ratio)} if d.ratio else {}),
        **{name: value(row) for name, value in _COUNTS.items()},
        "waived": d.waiver is not None,
    }


def _ratio(ratio: Ratio) -> dict[str, Any]:
    """How many times as often what is not wanted happens; what has no upper end is null."""
    ends = {name: _short(getattr(ratio.times, name)) for name in ("estimate", "low", "high", "lower", "upper")}
    return {"limit": ratio.limit, **ends}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
