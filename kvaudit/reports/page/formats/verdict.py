"""verdict.json: the answers and the gated cells for machines, under 50 kB; its schema is docs/verdict.schema.json."""

from __future__ import annotations

from typing import Any

from kvaudit.reports.verdict.ratios import Ratio
from kvaudit.reports.verdict.verdict import Decision
from kvaudit.reports.sections.shared.json_text import dumped
from kvaudit.reports.sections.shared.words import facet_counted, happens
from kvaudit.reports.page.answers import Answer, answers, gravest, question_of, subject_of, what_counts
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.page import Page

FILE = "verdict.json"
_FORMAT = 1
_CELLS = 80  # the gravest; all of them stand in contrasts.csv
_NAMES, _CHARACTERS = 50, 200  # subjects of one answer, and the length of a text


def render(page: Page) -> str:
    """What was decided, and of what."""
    found = page.findings
    verdict, rules, provenance = found.verdict, found.rules, found.provenance
    gated = verdict.gated
    kept = {id(d) for d in sorted(gated, key=gravest(found.comparison))[:_CELLS]}
    return dumped(
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


def _cell(found: Findings, d: Decision) -> dict[str, Any]:
    """Rates are shares of what ``counts`` names; ``drift``, its bounds and ``margin`` count what is wanted.

    Where a ratio decides, ``margin`` is what its limit comes to at the reference's rate.
    """
    sides, effect, facet = found.comparison, d.effect, facet_counted(found.comparison, d.suite)
    before, after = happens(sides, d) or (None, None)
    return {
        "question": question_of(sides, d),
        "subject": subject_of(sides, d)[:_CHARACTERS],
        "contrast": d.estimand,
        "arm": d.arm,
        "policy": sides.label(d.policy),
        "metric": d.suite,
        "context_tokens": d.context_tokens,
        "counts": what_counts(sides, d),
        "wanted": facet is None or facet.wanted,
        "before": _short(before),
        "after": _short(after),
        "drift": _short(effect.estimate if effect else None),
        "lower": _short(effect.lower if effect else None),
        "upper": _short(effect.upper if effect else None),
        "margin": None if d.margin is None else _short(d.margin) if d.ratio else d.margin,
        **({"ratio": _ratio(d.ratio)} if d.ratio else {}),
        "items": effect.n_items if effect else 0,
        "templates": effect.n_clusters if effect else 0,
        "status": d.status.value,
        "waived": d.waiver is not None,
    }


def _ratio(found: Ratio) -> dict[str, Any]:
    """How many times as often what is not wanted happens; what has no upper end is null."""
    own = found.times
    ends = {name: _short(getattr(own, name)) for name in ("estimate", "low", "high", "lower", "upper")}
    return {"limit": found.limit, **ends}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
