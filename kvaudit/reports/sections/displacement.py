"""How far token distributions moved on the reference's own text; never gated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvaudit.core.text import length_label
from kvaudit.reports.analysis.displacement import Displacement, load_displacement
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.layout.tables import Table, table_of
from kvaudit.reports.layout.words import percent
from kvaudit.reports.sections.base import Inputs, Section
from kvaudit.reports.stats.few import no_interval

MOST_TIMES = 1e6  # beyond, a ratio to the floor is a power of ten
Rows = tuple[Displacement, ...]


class DisplacementSection(Section[Rows]):
    name = "displacement"
    title = "Displacement of token distributions"
    explain = (
        "How far next-token probabilities moved on the reference's own text. Not part of the verdict: near the "
        "reference it does not tell the direction of behaviour."
    )
    order = 250
    keys: ClassVar = {"displacement": 130}

    def compute(self, inputs: Inputs) -> Rows | None:
        return load_displacement(inputs.data.run) or None

    def tables(self, value: Rows, decided: Decided) -> Iterator[Table]:
        headers = ["arm", "policy", "suite", "tokens", "mean KL, nats, 95 % interval", "median", "p99", "p99.9", "max"]
        headers += ["same top-1", "RMS dp", "refusal log-odds", "times the floor"]
        rows = []
        for d in value:
            arm = f"{d.arm} again (A/A floor)" if d.floor else f"{d.arm} seed {d.seed}"
            between = f", {no_interval(d.clusters)}" if d.low is None else f" [{d.low:.3g}, {d.high:.3g}]"
            where = f"{d.suite}, {length_label(d.context_tokens)}"
            row = [arm, decided.comparison.label(d.policy), where, str(d.tokens), f"{d.mean_kl:.3g}{between}"]
            row += [f"{v:.3g}" for v in (d.median_kl, d.p99_kl, d.p99_9_kl, d.max_kl)]
            row += [percent(d.same_top1), percent(d.rms_dp)]
            row.append("-" if d.refusal_margin is None else f"{d.refusal_margin:+.2f}")
            row.append("-" if d.ratio is None else f"{d.ratio:.1f}x" if d.ratio < MOST_TIMES else f"{d.ratio:.0e}x")
            rows.append(row)
        yield table_of(headers, rows, words=3)

    def notes(self, value: Rows, decided: Decided) -> Iterator[str]:
        if any(d.floor for d in value):
            yield "The floor is the reference run again: what other batches, kernels or seeds do by themselves."
        else:
            yield "No A/A floor was measured: there is nothing to hold these numbers against."

    def finding(self, value: Rows, decided: Decided) -> str:
        found = [d for d in value if not d.floor]
        if not found:
            return ""
        most = max(found, key=lambda d: d.mean_kl)
        return f"The largest mean KL: {most.arm} seed {most.seed}, {most.suite}: {most.mean_kl:.3g} nats."
