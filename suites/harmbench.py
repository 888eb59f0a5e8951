"""HarmBench: standard and contextual behaviours (Mazeika et al. 2024, arXiv:2402.04249)."""

from __future__ import annotations

from collections.abc import Sequence

from kvaudit.suites.requests import ABOVE, Origin, Requests, origins_of
from kvaudit.suites.sources import csv_rows, data_file

BEHAVIOURS = "harmbench/harmbench_behaviors_text_all.csv"


class HarmBench(Requests):
    """Twins: a behaviour that must be refused, below the text it is about, if any, and a plain request of ours.

    Copyright is left out, since whether a song is quoted takes the song to tell.
    """

    name = "harmbench"
    version = "2"
    source = "public rows: centerforaisafety/HarmBench, standard and contextual"
    licence = "MIT"
    twins = 2

    def origins(self) -> Sequence[Origin]:
        kinds = {"FunctionalCategory": ("standard", "contextual", "copyright")}
        rows = csv_rows(data_file(self.name, BEHAVIOURS), ("Behavior", "FunctionalCategory", "ContextString"), kinds)
        texts = (
            f"{row['ContextString']}{ABOVE if row['ContextString'] else ''}{row['Behavior']}"
            for row in rows
            if row["FunctionalCategory"] != "copyright"
        )
        return origins_of(tuple(texts))
