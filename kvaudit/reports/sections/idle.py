"""Gated cells in which a policy of ours had nothing to compress: its PASS there is that of the uncompressed cache.

A budget above the length of a prompt and its answer, or a residual that holds both: then every entry is held as it was,
in as many bytes as uncompressed: those of all tokens, or, where layers have a window of their own, those that policy
none held of as many tokens. A policy that holds all and reads a part has no bytes to tell it by and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvaudit.core.facets import facet_of
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.text import inline, join_names, length_label
from kvaudit.reports.sections.base import Depth, Inputs, Section
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import bytes_text
from kvaudit.reports.verdict.contrast import Cell
from kvaudit.reports.verdict.verdict import Decided


@dataclass(frozen=True)
class Idle:
    """One gated cell of which every answer was served uncompressed; ``live`` are mean bytes."""

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
        "Gated cells in which the policy held every entry as it was, to the last byte: prompts and answers are too "
        "short for it. What holds there says nothing of the policy."
    )
    reading = "To try it, ask longer prompts (SUITE@CONTEXT with context_tokens), or give it less room."
    order = 62
    depth = Depth.VERDICT
    gated = True
    remarks_at = 16

    def compute(self, inputs: Inputs) -> tuple[Idle, ...] | None:
        selecting = inputs.data.provenance.get("selecting_policies")
        if not isinstance(selecting, list):  # an older run does not say which policies hold all and read a part
            return None
        return tuple(_idle(inputs.decided, {DENSE_POLICY, *map(str, selecting)})) or None

    def tables(self, value: tuple[Idle, ...], decided: Decided) -> Iterator[Table]:
        label = decided.comparison.label
        rows = [
            [
                one.arm,
                label(one.policy),
                one.suite,
                length_label(one.context_tokens),
                str(one.answers),
                bytes_text(one.live),
            ]
            for one in value
        ]
        yield table_of(["arm", "policy", "suite", "tokens", "answers", "live bytes, as uncompressed"], rows)

    def finding(self, value: tuple[Idle, ...], decided: Decided) -> str:
        return next(self.remarks(value, decided)).removeprefix("NOTHING COMPRESSED: ")

    def remarks(self, value: tuple[Idle, ...], decided: Decided) -> Iterator[str]:
        places: dict[str, list[str]] = {}
        for one in value:
            place = f"{one.suite} {length_label(one.context_tokens)}"
            places.setdefault(decided.comparison.label(one.policy), []).append(place)
        found = join_names(
            (f"{label} in {join_names(dict.fromkeys(own))}" for label, own in places.items()), between="; "
        )
        yield inline(f"NOTHING COMPRESSED: {found}; what holds there says nothing of the policy.")


def _idle(decided: Decided, left_out: set[str]) -> Iterator[Idle]:
    cells, facets = (
        {(c.arm, c.policy, c.suite, c.context_tokens): c for c in decided.drift.cells},
        decided.comparison.facets,
    )
    wanted = dict.fromkeys(
        (d.arm, d.policy, facet_of(d.suite)[0] if d.suite in facets else d.suite, d.context_tokens)
        for d in decided.verdict.gated
    )
    for place in wanted:
        cell = cells.get(place)
        plain = cells.get((place[0], DENSE_POLICY, *place[2:]))
        if cell is not None and cell.policy not in left_out and _is_whole(cell, plain):
            yield Idle(*place, answers=cell.n_samples, live=cell.kv_bytes_live or 0.0)


def _is_whole(cell: Cell, plain: Cell | None) -> bool:
    """Whether every answer held what an uncompressed cache holds; a cache that nobody sees is none."""
    if not cell.kv_bytes_dense or cell.kv_bytes_live is None:
        return False
    held, tokens = cell.kv_bytes_live, cell.kv_bytes_dense
    return held == tokens or (plain is not None and (held, tokens) == (plain.kv_bytes_live, plain.kv_bytes_dense))
