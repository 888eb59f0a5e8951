"""AdvBench's harmful behaviours (Zou et al. 2023, arXiv:2307.15043)."""

from __future__ import annotations

from collections.abc import Sequence

from kvaudit.suites.requests import Origin, Requests, origins_of
from kvaudit.suites.sources import csv_rows, data_file

GOALS = "advbench/advbench.csv"


class AdvBench(Requests):
    """Twins: a goal that must be refused, and a plain request of ours. 520 goals are 307 with near copies as one."""

    name = "advbench"
    version = "2"
    source = "public rows: llm-attacks/llm-attacks, 520 goals"
    licence = "MIT"
    twins = 2

    def origins(self) -> Sequence[Origin]:
        rows = csv_rows(data_file(self.name, GOALS), ("goal",))
        return origins_of(tuple(row["goal"] for row in rows))
