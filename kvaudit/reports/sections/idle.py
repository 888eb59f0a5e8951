"""Gated cells in which a policy of kvaudit had nothing to compress, so that a PASS says nothing about the policy.

This happens where the budget exceeds the length of prompt and answer, or an uncompressed residual holds both. The cache
of such a cell has as many bytes as the uncompressed entries of all its tokens. In a model whose layers have a window it
has as many bytes as the cache under policy ``none`` for as many tokens. A policy that holds every entry and reads only
a part of them cannot be recognised by bytes and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvaudit.core.facets import suite_of
from kvaudit.core.text import inline, join_names, length_label
from kvaudit.reports.sections.base import Depth, Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import bytes_text
from kvaudit.reports.verdict.contrast import idle_cells
from kvaudit.reports.verdict.verdict import Decided


@dataclass(frozen=True)
class Idle:
    """One gated cell whose policy compressed nothing; ``live`` is the mean number of bytes of its cache entries."""

    arm: str
    policy: str
    suite: str
    context_tokens: int
    answers: int
    live: float


class IdleSection(Section[tuple[Idle, ...]]):
    name = "idle"
    title = "Where nothing was compressed"
    explain = (
        "Gated cells in which the policy held every entry uncompressed: prompts and answers are too short for it. "
        "Their results say nothing about the policy."
    )
    reading = "To test the policy, use longer prompts (SUITE@CONTEXT with context_tokens) or a smaller budget."
    order = 62
    depth = Depth.VERDICT
    gated = True
    remarks_at = 16

    def compute(self, inputs: Inputs) -> tuple[Idle, ...] | None:
        idle = idle_cells(inputs.decided.drift.cells, inputs.data.provenance)
        gated = dict.fromkeys(
            (d.arm, d.policy, suite_of(d.suite), d.context_tokens) for d in inputs.decided.verdict.gated
        )
        rows = [(place, idle[place]) for place in gated if place in idle]
        return tuple(Idle(*place, cell.n_samples, cell.kv_bytes_live or 0.0) for place, cell in rows) or None

    def tables(self, value: tuple[Idle, ...], decided: Decided) -> Iterator[Table]:
        label = decided.comparison.label
        rows = [
            [c.arm, label(c.policy), c.suite, length_label(c.context_tokens), str(c.answers), bytes_text(c.live)]
            for c in value
        ]
        yield table_of(["arm", "policy", "suite", "tokens", "answers", "live bytes, as uncompressed"], rows)

    def finding(self, value: tuple[Idle, ...], decided: Decided) -> str:
        return next(self.remarks(value, decided)).removeprefix("NOTHING COMPRESSED: ")

    def remarks(self, value: tuple[Idle, ...], decided: Decided) -> Iterator[str]:
        places: dict[str, list[str]] = {}
        for c in value:
            place = f"{c.suite} {length_label(c.context_tokens)}"
            places.setdefault(decided.comparison.label(c.policy), []).append(place)
        text = join_names(
            (f"{label} in {join_names(dict.fromkeys(suites))}" for label, suites in places.items()), between="; "
        )
        yield inline(f"NOTHING COMPRESSED: {text}; these results say nothing about the policy.")
